"""What the explored stages are joined to: an edge's ends without an edge, hosts and producers that watch for faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from omni_fsm.connectors.ledger import CreditLedger
from omni_fsm.connectors.port import BUSY, STORED, Health, Hello, PutOutcome, PutStatus, Signal
from omni_fsm.payload import receive_buffer
from omni_fsm.protocol.frames import Cause, Frame
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import (
    Failure,
    Feedback,
    Later,
    Offer,
    ProducerContext,
    Register,
    StageRuntime,
    TakenKind,
    Transition,
)
from omni_fsm.state import StateRetiredError

CellName = tuple[str, str, str]
"""A cell of the tables: machine, state, event."""


@dataclass(frozen=True, slots=True)
class Sent:
    """On its way to the receiver: a frame, and its body as bytes."""

    frame: Frame
    body: bytes | None


@dataclass(frozen=True, slots=True)
class StopSent:
    """On its way to the sender: a stop."""

    identity: Identity
    cause: Cause


@dataclass(frozen=True, slots=True)
class Granted:
    """On its way to the sender: credit, in absolute numbers."""

    identity: Identity
    frames: int
    nbytes: int
    taken_frames: int
    taken_bytes: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What is stored and unread of this life is dropped."""

    identity: Identity


Notice = StopSent | Granted
Letter = Sent | Notice | Reclaimed


def nothing() -> None:
    """What happens meanwhile when nothing does."""


class WorldEnd:
    """One end of an edge, with the real book of credit. What it sends lies in ``out`` until the world carries it on.

    Attributes:
        out: What this end has sent since the world last looked.
        planned: What becomes of the next put: ``stored``, ``busy``, ``failed``, ``lied`` (stored, reported as failed),
            ``refused``; credit permitting.
        room_owed: Whether a put found no room: the world owes it a sign when there is some.
        arrival: The frame that the next ``get`` gives.
        load: What becomes of its body: ``sound``, ``invalid``, or ``lost`` (no get succeeds).
        meanwhile: Called in the middle of the next put or load.
    """

    def __init__(self, edge: Edge, *, sends: bool) -> None:
        self.edge, self.sends = edge, sends
        self.ledger = CreditLedger()
        self.connected = True
        self.room_owed = False
        self.out: list[Letter] = []
        self.said: list[Signal] = []
        self.planned, self.load = "stored", "sound"
        self.arrival: Sent | None = None
        self.meanwhile: Callable[[], None] = nothing

    def hello(self) -> Hello:
        """See `Connector`."""
        return Hello(self.edge, "digest")

    def put(self, frame: Frame) -> PutOutcome:
        """See `Connector`."""
        planned, self.planned = self.planned, "stored"
        body = b"".join(frame.body.parts) if frame.body is not None else None
        nbytes = len(body) if body is not None else 0
        if self.connected and self.ledger.is_unheard_of(frame):
            return PutOutcome(PutStatus.REFUSED, "the peer never heard of this life")
        if not self.connected or not self.ledger.allows(frame, nbytes):
            return BUSY
        self.meanwhile()
        if planned in ("stored", "lied") and self.connected:
            self.ledger.count(frame, nbytes)
            self.out.append(Sent(replace(frame, body=None), body))
        if planned == "busy":
            self.room_owed = True
            return BUSY
        if planned == "stored":
            return STORED
        status = PutStatus.REFUSED if planned == "refused" else PutStatus.RETRY
        return PutOutcome(status, f"refused at {self.edge.from_stage}")

    def get(self) -> "WorldArrival | None":
        """See `Connector`."""
        sent, self.arrival = self.arrival, None
        return WorldArrival(sent, self.load, self.meanwhile) if sent is not None else None

    def wait(self, timeout_s: float | None) -> bool:  # noqa: ARG002 - the port's
        """Nobody waits here."""
        return False

    def wake(self) -> None:
        """Nobody waits here."""

    def signals(self) -> list[Signal]:
        """See `Connector`."""
        said, self.said = self.said, []
        return said

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> None:
        """See `Connector`."""
        self.out.append(Granted(identity, frames, nbytes, taken_frames, taken_bytes))

    def stop(self, identity: Identity, cause: Cause) -> None:
        """See `Connector`."""
        self.out.append(StopSent(identity, cause))

    def reclaim(self, identity: Identity, *, unread: bool) -> None:
        """See `Connector`."""
        if self.sends:
            self.ledger.drop(identity)
            if unread:
                self.out.append(Reclaimed(identity))

    def health(self) -> Health:
        """See `Connector`."""
        return Health(connected=self.connected, entries={"ledger": len(self.ledger)})

    def close(self) -> None:
        """See `Connector`."""
        self.connected = False


class WorldArrival:
    """A frame that has come out of a `WorldEnd`."""

    def __init__(self, sent: Sent, load: str, meanwhile: Callable[[], None]) -> None:
        self.frame = sent.frame
        self.nbytes = len(sent.body) if sent.body is not None else 0
        self._body, self._load, self._meanwhile = sent.body, load, meanwhile

    def load(self) -> memoryview | None:
        """See `omni_fsm.connectors.port.Arrival`."""
        meanwhile, self._meanwhile = self._meanwhile, nothing
        meanwhile()
        if self._load == "lost":
            raise OSError("the region is gone")
        if self._body is None:
            return None
        buffer = receive_buffer(self.nbytes)
        buffer[:] = self._body if self._load == "sound" else bytes(self.nbytes)
        return buffer

    def discard(self) -> None:
        """See `omni_fsm.connectors.port.Arrival`."""


class StoppedClock:
    """Time stands still: the world fires timers by name."""

    def now_ns(self) -> int:
        """See `omni_fsm.runtime.Clock`."""
        return 0

    def pause(self, seconds: float) -> None:
        """See `omni_fsm.runtime.Clock`."""


class Watcher:
    """An observer, and the producer: both report what must never be as ``problem``.

    Attributes:
        problem: What was seen that must never be; empty when nothing was.
        cells: The cells of both tables that were used.
        failed: How often a failure of each request was reported.
        raises: Whether the producer raises.
        meanwhile: Called once in the middle of the next producer call, inside its factory if that runs.
        is_over: Tells whether the sender of a life is over.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.problem = ""
        self.cells: set[CellName] = set()
        self.failed: dict[str, int] = {}
        self.raises = False
        self.meanwhile: Callable[[], None] = nothing
        self.is_over: Callable[[Identity], bool] = bool

    def on_transition(self, transition: Transition) -> None:
        """See `omni_fsm.runtime.Observer`."""
        self.cells.add((transition.machine, str(transition.before), str(transition.event)))

    def on_failure(self, failure: Failure) -> None:
        """See `omni_fsm.runtime.Observer`."""
        if failure.what in ("hook_raised", "crashed", "edge"):
            self.problem = f"{failure.what}: {failure.cause.reason}"
        elif failure.what == "failed":
            self.failed[failure.internal_id] = self.failed.get(failure.internal_id, 0) + 1
            if self.failed[failure.internal_id] > 1:
                self.problem = "a failure is recorded twice"

    def __call__(self, context: ProducerContext) -> Any:
        """The producer: passes outputs on, and keeps the life's name in its state."""
        lives = self._state(context, self._make)
        self._happen()
        again = self._state(context, list)
        if again is not None and again is not lives:
            self.problem = self.problem or "a life that goes on has lost its state"
        if again is not None:
            if any(life != context.identity for life in again):
                self.problem = "a producer sees another generation's state"
            again.append(context.identity)
        if self.raises:
            raise ValueError(f"raised at {self.stage}")
        return context.output

    def _state(self, context: ProducerContext, factory: Callable[[], list[Identity]]) -> list[Identity] | None:
        try:
            held = context.state.get_or_create("verify.lives", factory)
        except StateRetiredError:
            if not self.is_over(context.identity):
                self.problem = "a life that is not over cannot read its state"
            return None
        if self.is_over(context.identity):
            self.problem = "state of a life that is over comes back"
        return held

    def _make(self) -> list[Identity]:
        self._happen()
        return []

    def _happen(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, nothing
        meanwhile()


def external_name(identity: Identity) -> str:
    """The internal id that every host here gives a life: its generation."""
    return str(identity.generation)


class WorldHost:
    """The runner and the scheduler of one stage; passes on what it takes.

    Attributes:
        chunks: How many chunks each life has.
        front: Whether requests begin and end here.
        last: Whether nothing is passed on.
        answer: What becomes of an offer: ``register``, or ``later``: the world registers it when it likes.
        step_wise: Whether each take is a step of its own.
        offered: Lives that were offered and wait for their registration.
        ready: Lives to take from.
        took: How many chunks were taken, by internal id.
        told: How each request ended, as this host knows it.
        ended: Requests that this host has ended.
        opened: Requests that the stages before know.
        lost: Requests whose marker was lost.
        problem: What was seen that must never be.
    """

    def __init__(self, *, chunks: int, front: bool, last: bool, answer: str, step_wise: bool) -> None:
        self.chunks, self.front, self.last, self.answer, self.step_wise = chunks, front, last, answer, step_wise
        self.offered: dict[str, Identity] = {}
        self.ready: dict[str, None] = {}
        self.took: dict[str, int] = {}
        self.told: dict[str, str] = {}
        self.ended: set[str] = set()
        self.opened: set[str] = set()
        self.lost: set[str] = set()
        self.problem = ""

    def key(self) -> tuple[Any, ...]:
        """All that decides how it goes on."""
        return (
            tuple(self.offered),
            tuple(self.ready),
            tuple(self.took.items()),
            tuple(self.told.items()),
            frozenset(self.ended),
            frozenset(self.opened),
            frozenset(self.lost),
        )

    def stream_offered(self, identity: Identity) -> Offer:
        """See `omni_fsm.runtime.StageHost`."""
        if self.answer == "register":
            return Register(external_name(identity))
        self.offered[external_name(identity)] = identity
        return Later()

    def feedback_ready(self) -> None:
        """See `omni_fsm.runtime.StageHost`."""

    def open(self, runtime: StageRuntime, identity: Identity) -> None:
        """Begin a life here, with all its chunks; the first stage of a line ends it as well."""
        name = external_name(identity)
        runtime.register(name, identity)
        for chunk in range(self.chunks):
            runtime.submit_chunk(name, chunk)
        if not self.front:
            self.end(runtime, name)

    def end(self, runtime: StageRuntime, name: str) -> None:
        """Say that the output is complete."""
        self.ended.add(name)
        runtime.end(name)

    def cycle(self, runtime: StageRuntime) -> None:
        """Collect the feedback and act on it."""
        told = runtime.collect_feedback()
        self.opened |= told.opened.keys()
        self.lost |= told.marker_lost.keys()
        self.ready |= told.ready
        if not self.step_wise:
            for name in list(self.ready):
                while name in self.ready:
                    self.take(runtime, name)
        self._hear_failures(runtime, told)

    def _hear_failures(self, runtime: StageRuntime, told: Feedback) -> None:
        for name, cause in told.failed.items():
            self.told.setdefault(name, cause.reason)
            self.ready.pop(name, None)
            runtime.release(name)

    def take(self, runtime: StageRuntime, name: str) -> None:
        """Take one frame."""
        taken = runtime.take(name)
        if taken.kind is TakenKind.CHUNK:
            self._took_chunk(runtime, name, taken.payload)
            return
        self.ready.pop(name, None)
        if taken.kind is TakenKind.END:
            if self.took.get(name, 0) != self.chunks:
                self.problem = f"ok after {self.took.get(name, 0)} of {self.chunks} chunks"
            if self.last or self.front:
                self.told.setdefault(name, "ok")
                runtime.release(name)
            else:
                self.end(runtime, name)

    def _took_chunk(self, runtime: StageRuntime, name: str, chunk: Any) -> None:
        if chunk != self.took.get(name, 0):
            self.problem = f"chunk {chunk} is taken, {self.took.get(name, 0)} comes next"
        self.took[name] = chunk + 1
        if not self.last and not self.front:
            runtime.submit_chunk(name, chunk)

    def leave(self, runtime: StageRuntime, how: str, name: str, reason: str) -> None:
        """End a request early, in one of the ways that a host has."""
        if how == "fail":
            runtime.fail(name, reason)
        elif how == "cancel":
            runtime.cancel(name, reason)
        if how != "cancel":
            runtime.release(name)
        self.told.setdefault(name, reason)
        self.ready.pop(name, None)
