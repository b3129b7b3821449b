"""The front of the demo: it submits questions, gets their sound, and is a stage like any other."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Ends
from omni_fsm.demo.faults import CANCEL_AFTER_SOUNDS, Faults
from omni_fsm.demo.models import seed_of
from omni_fsm.demo.record import Record
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import StageConfig, TakenKind

WAIT_S = 0.05
LIVES_A_FLUSH = 10
BETWEEN_S = 0.6


@dataclass(slots=True)
class Segment:
    """One question of a request, and what has come in answer to it.

    Attributes:
        question: The question.
        text: What the thinker said, as far as its sound has come.
        sounds: PCM pieces, int16 mono 24 kHz, as bytes.
        turn: Which turn of the request this is, as the last stage counts them from 1; 0 before its first chunk.
        number: Of the segment that brought it, once that has ended; None before, and where only the request's end ends it.
    """

    question: str
    text: str = ""
    sounds: list[bytes] = field(default_factory=list)
    turn: int = 0
    number: int | None = None

    @property
    def pcm(self) -> bytes:
        """All its sound so far."""
        return b"".join(self.sounds)


@dataclass(slots=True)
class Answer:
    """One life of one request, as the front sees it.

    Attributes:
        index: Its place among the requests, from 0.
        internal_id: The front's name of it.
        identity: External id and generation.
        begun_s: CLOCK_MONOTONIC in seconds when it was submitted.
        segments: Its questions so far, with their answers: one, but for a request of several turns.
        first_audio_s: Seconds from submission to the first sound; None before.
        cause: How it ended; None while it is open.
        cancel_after: How many pieces of sound it gets before the front cancels it; None: all.
    """

    index: int
    internal_id: str
    identity: Identity
    begun_s: float
    segments: list[Segment] = field(default_factory=list)
    first_audio_s: float | None = None
    cause: Cause | None = None
    cancel_after: int | None = None

    @property
    def text(self) -> str:
        """All that the thinker said so far."""
        return "".join(segment.text for segment in self.segments)

    @property
    def sounds(self) -> list[bytes]:
        """The pieces of its sound so far."""
        return [sound for segment in self.segments for sound in segment.sounds]

    @property
    def pcm(self) -> bytes:
        """All its sound so far."""
        return b"".join(self.sounds)


class Front:
    """Submits requests and collects their answers.

    Args:
        config: Settings of its runtime; a front's.
        ends: Its ends of the edges from the last stage and to the first.
        faults: The faults that are the front's to make.
        progress: Called whenever an answer has changed.
        on_sound: Called after each piece of sound; the command's own faults hang here.
    """

    def __init__(
        self,
        config: StageConfig,
        ends: Ends,
        faults: Faults,
        progress: Callable[[Answer], None] = lambda _answer: None,
    ) -> None:
        self.record = Record()
        self.adapter = StageRunnerAdapter(config, source=ends.source, sink=ends.sink, observers=[self.record])
        self.faults = faults
        self.progress = progress
        self.foreign_frames = 0
        self.answers: dict[str, Answer] = {}

    def submit(self, index: int, question: str, external_id: str, max_new_tokens: int) -> Answer:
        """Begin a request: the prompt is one chunk and its end, which goes out when every stage knows the request."""
        answer = self.open(index, external_id)
        self.ask(answer, question, max_new_tokens)
        self.adapter.end(answer.internal_id)
        self.progress(answer)
        return answer

    def open(self, index: int, external_id: str) -> Answer:
        """Begin a request that asks nothing yet."""
        internal_id, identity = self.adapter.open(external_id)
        answer = Answer(index, internal_id, identity, time.monotonic())
        answer.cancel_after = CANCEL_AFTER_SOUNDS if self.faults.cancel == index else None
        self.answers[internal_id] = answer
        return answer

    def ask(self, answer: Answer, question: str, max_new_tokens: int, *, segment_end: bool = False) -> None:
        """Submit a question as one chunk.

        Args:
            answer: Its request, which is open.
            question: The question.
            max_new_tokens: Bound of its answer.
            segment_end: Whether the request is asked more later: its answer then comes as one segment.
        """
        answer.segments.append(Segment(question))
        prompt = {
            "index": answer.index,
            "question": question,
            "max_new_tokens": max_new_tokens,
            "seed": seed_of(question),
            "generation": answer.identity.generation,
        }
        self.adapter.submit_chunk(answer.internal_id, prompt, segment_end=segment_end)

    def cancel(self, answer: Answer, reason: str) -> None:
        """Cancel a request at the front."""
        cause = Cause(Outcome.CANCELLED, reason, time.monotonic_ns())
        self.adapter.cancel(answer.internal_id, reason)
        self._close(answer, cause)

    def serve(self, wanted: Callable[[], bool]) -> None:
        """Collect answers while ``wanted`` says so."""
        while wanted():
            feedback = self.adapter.collect_feedback(WAIT_S)
            for internal_id, cause in feedback.failed.items():
                if (answer := self.answers.get(internal_id)) is not None:
                    self.adapter.release(internal_id)
                    self._close(answer, cause)
            for internal_id in feedback.ready:
                self._take(internal_id)

    def _take(self, internal_id: str) -> None:
        """Take all that has come for a request."""
        while (answer := self.answers.get(internal_id)) is not None:
            taken = self.adapter.take(internal_id)
            if taken.kind not in (TakenKind.CHUNK, TakenKind.END):
                return
            if taken.payload is not None:
                self._hear(answer, taken.payload)
            if taken.segment_end:
                answer.segments[-1].number = taken.segment
            if taken.kind is TakenKind.END and taken.cause is not None:
                self._close(answer, taken.cause)
            elif len(answer.sounds) == answer.cancel_after:
                self.cancel(answer, "the front cancels")

    def _hear(self, answer: Answer, payload: dict[str, Any]) -> None:
        self.foreign_frames += payload["generation"] != answer.identity.generation
        segment = answer.segments[-1]
        segment.text += payload["text"]
        segment.turn = payload["turn"]
        if len(payload["pcm"]):
            if answer.first_audio_s is None:
                answer.first_audio_s = time.monotonic() - answer.begun_s
            segment.sounds.append(payload["pcm"].tobytes())
        self.progress(answer)

    def _close(self, answer: Answer, cause: Cause) -> None:
        """A request is over at the front."""
        answer.cause = cause
        del self.answers[answer.internal_id]
        self.progress(answer)


def serve_all(front: Front, questions: list[tuple[str, str]], max_new_tokens: int) -> list[Answer]:
    """Submit every question (with its external id) at once and wait until all have ended."""
    answers = [
        front.submit(index, question, external_id, max_new_tokens)
        for index, (question, external_id) in enumerate(questions)
    ]
    front.serve(lambda: any(answer.cause is None for answer in answers))
    return answers


def converse(front: Front, questions: list[str], external_id: str, max_new_tokens: int) -> Answer:
    """Ask all questions in one request, each when the answer to the one before has come back whole; then end the request."""
    answer = front.open(0, external_id)
    for question in questions:
        front.ask(answer, question, max_new_tokens, segment_end=True)
        front.serve(lambda: answer.cause is None and answer.segments[-1].number is None)
        if answer.cause is not None:
            return answer
    front.adapter.end(answer.internal_id)
    front.serve(lambda: answer.cause is None)
    return answer


def reuse_one_id(front: Front, question: str, external_id: str, lives: int, max_new_tokens: int) -> list[Answer]:
    """Live many lives of one external id: each is cancelled, the last one ends. Each is followed at once by the next.

    The points of the cancels are seeded: as soon as it began, some time between, or, one in ten, while it flushes: so short an
    answer is one clause, and its first sound is the talker's flush. None gets past its first sound.
    """
    chance = random.Random(lives)  # noqa: S311 - a seeded schedule, not a secret
    answers = []
    for life in range(lives):
        answer = front.submit(0, question, external_id, max_new_tokens)
        answer.cancel_after = 1
        answers.append(answer)
        flushes = life % LIVES_A_FLUSH == LIVES_A_FLUSH - 1
        wait_s = BETWEEN_S * LIVES_A_FLUSH if flushes else chance.choice([0.0, chance.uniform(0.0, BETWEEN_S)])
        _serve_for(front, answer, wait_s)
        if answer.cause is None:
            front.cancel(answer, f"life {life} is cancelled")
    last = front.submit(0, question, external_id, max_new_tokens)
    front.serve(lambda: last.cause is None)
    return [*answers, last]


def _serve_for(front: Front, answer: Answer, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    front.serve(lambda: answer.cause is None and time.monotonic() < until)
