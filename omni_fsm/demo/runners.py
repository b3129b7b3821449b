"""The runners of the three stages: a loop around the facade, a model, and a producer with namespaced state.

Each loop is the one that a real engine has: collect feedback, drop what failed, take what is ready, compute one step, submit.
What the model raises over a request ends that request and no other. A segment's end flushes what an end flushes, and the
request goes on with its next turn.
A payload carries the seed of its question's noise and the generation of its request; a consumer counts those that are not its
own, which must never happen.
"""

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import FULL_PAYLOAD, Ends
from omni_fsm.demo.faults import CANCEL_AFTER_CHUNKS, RAISE_AT_CHUNK, At, Faults
from omni_fsm.demo.models import CHUNK_FRAMES
from omni_fsm.demo.record import Record
from omni_fsm.demo.talker_model import AcousticNet, FrameCutter, no_frames
from omni_fsm.demo.text import ClauseBuffer
from omni_fsm.demo.thinker_model import Thinker, ThinkerRequest
from omni_fsm.demo.vocoder import Vocoder
from omni_fsm.protocol.frames import Cause
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import ProducerContext, StageConfig, TakenKind
from omni_fsm.state import Scope, StateRetiredError, StateView

IDLE_S = 0.2

_log = logging.getLogger("omni_fsm.demo")


@dataclass(slots=True)
class Local:
    """What a runner itself keeps of a request while it works on it."""

    identity: Identity
    index: int = -1
    seed: int = 0
    submitted: int = 0
    thinking: ThinkerRequest | None = None
    ends_segment: bool = False


class StageRunner(ABC):
    """The loop that all three stages share.

    Args:
        config: Settings of the stage's runtime.
        ends: The stage's ends of its two edges.
        faults: What to break.
    """

    def __init__(self, config: StageConfig, ends: Ends, faults: Faults) -> None:
        self.stage = config.stage
        self.faults = faults
        self.record = Record()
        self.foreign_frames = 0
        self.requests: dict[str, Local] = {}
        self.stopping = threading.Event()
        self.adapter = StageRunnerAdapter(
            config, source=ends.source, sink=ends.sink, producer=self.produce_or_raise, observers=[self.record]
        )

    def run(self) -> None:
        """Serve until `stopping` is set. Called by: the main thread of the stage's process."""
        while not self.stopping.is_set():
            feedback = self.adapter.collect_feedback(IDLE_S if self.turn is None else 0.0)
            for internal_id, identity in feedback.registered.items():
                self.requests[internal_id] = Local(identity)
            for internal_id, cause in feedback.failed.items():
                self.drop(internal_id, cause)
            for internal_id in feedback.ready:
                self.contained(self.consume, internal_id)
            if (turn := self.turn) is not None:
                self.contained(self.step, turn)

    def residue(self) -> dict[str, int]:
        """What the stage holds, by table."""
        return self.adapter.residue()

    def report(self) -> dict[str, Any]:
        """What this stage alone has to tell at the end."""
        return {}

    def contained(self, work: Callable[[str], None], internal_id: str) -> None:
        """Work for a request: a raise ends it, up and down the pipeline, in the form that the runtime gives a producer's."""
        try:
            work(internal_id)
        except Exception as error:  # noqa: BLE001 - becomes an event: the request fails, all others are served on
            _log.debug("%s: the model raised for %s", self.stage, internal_id, exc_info=error)
            self.adapter.fail(internal_id, f"{type(error).__name__}: {error}")
            self.drop(internal_id)

    @property
    def turn(self) -> str | None:
        """The request whose step is the next to compute; None when there is none to compute without waiting for input."""
        return None

    def step(self, internal_id: str) -> None:  # noqa: B027 - a stage that computes when chunks come has no step of its own
        """Compute one step of the model for the request whose turn it is."""

    def consume(self, internal_id: str) -> None:
        """Take what has come for a request, as long as there is work to do for it."""
        while (local := self.requests.get(internal_id)) is not None and self.can_take(internal_id, local):
            taken = self.adapter.take(internal_id)
            if taken.kind not in (TakenKind.CHUNK, TakenKind.END):
                return
            if taken.payload is not None:
                self._count_foreign(local, taken.payload)
                self.on_chunk(internal_id, local, taken.payload)
            if taken.segment_end:
                self.on_segment_end(internal_id, local)
            if taken.kind is TakenKind.END:
                self.on_input_end(internal_id, local)
                return

    def can_take(self, internal_id: str, local: Local) -> bool:  # noqa: ARG002 - for those who have to wait
        """Whether the next frame of a request's input can be worked on now."""
        return True

    def _count_foreign(self, local: Local, payload: dict[str, Any]) -> None:
        self.foreign_frames += payload["generation"] != local.identity.generation
        local.index, local.seed = payload["index"], payload["seed"]

    @abstractmethod
    def on_chunk(self, internal_id: str, local: Local, payload: dict[str, Any]) -> None:
        """A chunk of a request's input."""

    def on_segment_end(self, internal_id: str, local: Local) -> None:
        """A turn of a request's input is complete: so is that of its output, once the producer has flushed what is of it."""
        self.submit(internal_id, local, {}, segment_end=True)

    def on_input_end(self, internal_id: str, local: Local) -> None:
        """A request's input is complete: so is its output, but for what its producer flushes."""
        if internal_id in self.requests:
            self.finish(internal_id, local)

    @abstractmethod
    def produce(self, context: ProducerContext) -> dict[str, Any] | None:
        """The stage's producer."""

    def submit(self, internal_id: str, local: Local, output: dict[str, Any], *, segment_end: bool = False) -> bool:
        """Submit a chunk; a refusal means that the request is over, which the feedback will say too."""
        output |= {"index": local.index, "seed": local.seed}
        if not self.adapter.submit_chunk(internal_id, output, segment_end=segment_end).accepted:
            return False
        local.submitted += 1
        if self.faults.cancel_at == At(self.stage, local.index) and local.submitted == CANCEL_AFTER_CHUNKS[self.stage]:
            self.adapter.cancel(internal_id, f"{self.stage} cancels request {local.index}")
            self.drop(internal_id)
            return False
        return True

    def finish(self, internal_id: str, local: Local) -> None:
        """End a request's output; the producer's last call gets what identifies it."""
        self.adapter.end(internal_id, {"index": local.index, "seed": local.seed})
        self.requests.pop(internal_id, None)

    def drop(self, internal_id: str, cause: Cause | None = None) -> None:  # noqa: ARG002 - for those who want it
        """Forget a request that ends early."""
        self.requests.pop(internal_id, None)
        self.adapter.release(internal_id)

    def produce_or_raise(self, context: ProducerContext) -> dict[str, Any] | None:
        """The producer, with the fault that was asked for, and the generation that consumers check."""
        payload = self.produce(context)
        if payload is None:
            return None
        index = context.output["index"]
        if self.faults.raise_at == At(self.stage, index):
            counted = context.state.get_or_create("demo.chunks", Counter)
            counted.value += 1
            if counted.value == RAISE_AT_CHUNK:
                raise RuntimeError(f"the {self.stage} cannot go on with request {index}")
        return {**payload, "index": index, "seed": context.output["seed"], "generation": context.identity.generation}


@dataclass(slots=True)
class Counter:
    """A number in a namespace."""

    value: int = 0


class ThinkerRunner(StageRunner):
    """Question in, text out, a token a step, one request a forward, the requests in turn.

    A request's questions are answered one after the other; one that ends its segment has an answer that does.
    """

    def __init__(self, config: StageConfig, ends: Ends, faults: Faults) -> None:
        super().__init__(config, ends, faults)
        self.model = Thinker()

    @property
    def turn(self) -> str | None:
        """See `StageRunner`."""
        waiting = (internal_id for internal_id, local in self.requests.items() if local.thinking is not None)
        return next(waiting, None)

    def can_take(self, internal_id: str, local: Local) -> bool:  # noqa: ARG002
        """See `StageRunner`: what follows a question, the end too, waits in the receiver until it is answered."""
        return local.thinking is None

    def on_chunk(self, internal_id: str, local: Local, payload: dict[str, Any]) -> None:  # noqa: ARG002
        """See `StageRunner`."""
        self.record.forward_begun(local.identity)
        local.thinking = self.model.start(payload["question"], payload["max_new_tokens"])

    def on_segment_end(self, internal_id: str, local: Local) -> None:
        """See `StageRunner`: it goes with the answer's last token; a turn without a question has none."""
        if local.thinking is None:
            super().on_segment_end(internal_id, local)
        else:
            local.ends_segment = True

    def step(self, internal_id: str) -> None:
        """One token of the request whose turn it is."""
        self.requests[internal_id] = local = self.requests.pop(internal_id)  # to the end of the line
        self.record.forward_begun(local.identity)
        step = self.model.step(local.thinking) if local.thinking is not None else None
        if step is None:
            return
        token = {"piece": step.piece, "token_id": step.token_id}
        ends_segment = step.finished and local.ends_segment
        if self.submit(internal_id, local, token, segment_end=ends_segment) and step.finished:
            local.thinking, local.ends_segment = None, False
            self.consume(internal_id)

    def produce(self, context: ProducerContext) -> dict[str, Any] | None:
        """A token and its text; nothing is left for an end."""
        if "token_id" not in context.output:
            return None
        return {key: context.output[key] for key in ("piece", "token_id")}


@dataclass(slots=True)
class Cut:
    """The talker producer's state of one turn: frames that do not fill a chunk yet, and text that was not sent yet."""

    cutter: FrameCutter = field(default_factory=FrameCutter)
    text: str = ""


class TalkerRunner(StageRunner):
    """Text in, acoustic frames out: a clause is spoken as a whole, its frames leave in chunks of 25."""

    def __init__(self, config: StageConfig, ends: Ends, faults: Faults) -> None:
        super().__init__(config, ends, faults)
        self.model = AcousticNet()
        self.sends_whole = ends.sink is not None and ends.sink.hello().mode == FULL_PAYLOAD

    def can_take(self, internal_id: str, local: Local) -> bool:  # noqa: ARG002
        """See `StageRunner`: clauses are state of the request, so they wait until it owns its external id."""
        return self.adapter.state(internal_id) is not None

    def on_chunk(self, internal_id: str, local: Local, payload: dict[str, Any]) -> None:
        """See `StageRunner`."""
        clauses = self._clauses(internal_id)
        if clauses is None:
            return
        spoken = clauses.push(payload["piece"])
        if not spoken:
            self.submit(internal_id, local, {"text": payload["piece"], "frames": None})
        for at, clause in enumerate(spoken):
            self._speak(internal_id, local, clause, payload["piece"] if at == 0 else "")

    def on_segment_end(self, internal_id: str, local: Local) -> None:
        """See `StageRunner`."""
        self._flush(internal_id, local)
        super().on_segment_end(internal_id, local)

    def on_input_end(self, internal_id: str, local: Local) -> None:
        """See `StageRunner`."""
        self._flush(internal_id, local)
        super().on_input_end(internal_id, local)

    def _flush(self, internal_id: str, local: Local) -> None:
        clauses = self._clauses(internal_id)
        for clause in clauses.flush() if clauses is not None else ():
            self._speak(internal_id, local, clause, "")

    def _clauses(self, internal_id: str) -> ClauseBuffer | None:
        """The request's clause buffer; None when the request is over.

        Not scoped to the segment: the loop may be in the next turn by the time the end of this one is put, which would reset it.
        """
        view: StateView | None = self.adapter.state(internal_id)
        try:
            return view.get_or_create("talker.clauses", ClauseBuffer) if view is not None else None
        except StateRetiredError:  # it ended between the take and here: the feedback says so
            return None

    def _speak(self, internal_id: str, local: Local, clause: str, text: str) -> None:
        self.record.forward_begun(local.identity)
        frames = self.model.speak(clause)
        for at in range(0, max(len(frames), 1), CHUNK_FRAMES):
            piece = frames[at : at + CHUNK_FRAMES]
            if not self.submit(internal_id, local, {"text": text if at == 0 else "", "frames": piece}):
                return

    def produce(self, context: ProducerContext) -> dict[str, Any] | None:
        """Chunks of exactly 25 frames, whatever the clauses; the end, of the turn or of all, brings the tail.

        In one full payload the frames are joined, and of the text the latest holds: so it brings all text so far.
        """
        cut = context.state.get_or_create("talker.cut", Cut, Scope.SEGMENT)
        cut.text += context.output.get("text", "")
        frames = context.output.get("frames")
        chunks = cut.cutter.push(frames) if frames is not None else []  # at most one: 24 held and 25 new
        if context.is_segment_finished and (tail := cut.cutter.flush()) is not None:
            chunks.append(tail)
        if not chunks and not (context.is_segment_finished and cut.text):
            return None
        text = cut.text
        if not self.sends_whole:
            cut.text = ""
        return {"text": text, "frames": np.concatenate(chunks) if chunks else None}


@dataclass(frozen=True, slots=True)
class Turn:
    """What the last producer keeps of one turn of a request: its number, from 1, and its sound so far."""

    number: int
    vocoder: Vocoder


class Code2WavRunner(StageRunner):
    """Acoustic frames in, sound out: the vocoder's state is a namespace, its tail is flushed with the end of the turn.

    Each payload tells its turn, as the producer counts them: the count is the request's, and the vocoder anew for each turn.
    """

    def on_chunk(self, internal_id: str, local: Local, payload: dict[str, Any]) -> None:
        """See `StageRunner`."""
        self.submit(internal_id, local, {"text": payload["text"], "frames": payload["frames"]})

    def produce(self, context: ProducerContext) -> dict[str, Any] | None:
        """PCM int16 ``[samples]``, 24 kHz."""
        self.record.forward_begun(context.identity)
        turns = context.state.get_or_create("code2wav.turns", lambda: itertools.count(1))
        turn = context.state.get_or_create(
            "code2wav.turn", lambda: Turn(next(turns), Vocoder(context.output["seed"])), Scope.SEGMENT
        )
        frames = context.output.get("frames")
        pcm = turn.vocoder.push(no_frames() if frames is None else frames, last=context.is_segment_finished)
        if context.is_finished and not len(pcm):
            return None  # the end after a segment's end: no turn of its own
        return {"text": context.output.get("text", ""), "pcm": pcm, "turn": turn.number}


RUNNERS: dict[str, type[StageRunner]] = {
    "thinker": ThinkerRunner,
    "talker": TalkerRunner,
    "code2wav": Code2WavRunner,
}
"""The runner of each stage of pipeline.toml."""
