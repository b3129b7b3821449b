"""What the explored stages are joined to: an edge's ends without an edge, hosts and producers that watch for faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from omni_fsm.connectors.ledger import CreditLedger
from omni_fsm.connectors.port import BUSY, STORED, Health, Hello, PutOutcome, PutStatus, Signal
from omni_fsm.payload import receive_buffer
from omni_fsm.protocol.frames import Cause, Frame
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import SenderEffect, SenderEvent, SenderState
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
from omni_fsm.state import Scope, StateRetiredError

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


@dataclass(frozen=True)
class Role:
    """What a stage is, and how its host behaves.

    Attributes:
        name: Its name.
        source: Name of the stage before; empty when it has none.
        sink: Name of the stage after; empty when it has none.
        front: Whether requests begin and end here.
        chunks: How many chunks each life has.
        segments: Whether each chunk is a segment.
        answer: What its host says to an offer: ``register`` or ``later``.
        step_wise: Whether its host takes frame by frame.
        window_frames: Credit of a stream in frames.
        retries: Puts that may fail for now before a frame is given up.
    """

    name: str
    source: str
    sink: str
    front: bool = False
    chunks: int = 1
    segments: bool = False
    answer: str = "register"
    step_wise: bool = False
    window_frames: int = 8
    retries: int = 1


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


_TAIL = "tail"
"""What every end carries."""


def external_name(identity: Identity) -> str:
    """The internal id that every host here gives a life: its generation."""
    return str(identity.generation)


class WorldHost:
    """The runner and the scheduler of one stage; passes on what it takes.

    Attributes:
        role: How it behaves.
        offered: Lives that were offered and wait for their registration.
        ready: Lives to take from.
        took: How many chunks were taken, by internal id.
        told: How each request ended, as this host knows it.
        ended: Requests that this host has ended.
        opened: Requests that the stages before know.
        lost: Requests whose marker was lost.
        closing: Whether the stage was shut down.
        owes_release: Requests that this host has failed and not yet let go.
        released: Requests that this host has let go.
        begun: Lives that began here or were offered.
        problem: What was seen that must never be.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.offered: dict[str, Identity] = {}
        self.ready: dict[str, None] = {}
        self.took: dict[str, int] = {}
        self.told: dict[str, str] = {}
        self.ended: set[str] = set()
        self.opened: set[str] = set()
        self.lost: set[str] = set()
        self.closing = False
        self.owes_release: set[str] = set()
        self.released: set[str] = set()
        self.begun: set[str] = set()
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
            self.closing,
            frozenset(self.owes_release),
            frozenset(self.released),
            frozenset(self.begun),
        )

    def stream_offered(self, identity: Identity) -> Offer:
        """See `omni_fsm.runtime.StageHost`."""
        self.begun.add(external_name(identity))
        if self.role.answer == "register":
            return Register(external_name(identity))
        self.offered[external_name(identity)] = identity
        return Later()

    def feedback_ready(self) -> None:
        """See `omni_fsm.runtime.StageHost`."""

    def open(self, runtime: StageRuntime, identity: Identity) -> None:
        """Begin a life here, with all its chunks."""
        name = external_name(identity)
        self.begun.add(name)
        admission = runtime.register(name, identity)
        if not admission.accepted:
            self.told[name] = admission.reason
        for chunk in range(self.role.chunks):
            runtime.submit_chunk(name, chunk, segment_end=self.role.segments)

    def end(self, runtime: StageRuntime, name: str) -> None:
        """Say that the output is complete; something goes out with the end itself."""
        self.ended.add(name)
        runtime.end(name, _TAIL)

    def cycle(self, runtime: StageRuntime) -> None:
        """Collect the feedback and act on it."""
        told = runtime.collect_feedback()
        self.opened |= told.opened.keys()
        self.lost |= told.marker_lost.keys()
        self.ready |= told.ready
        if not self.role.step_wise:
            for name in list(self.ready):
                while name in self.ready:
                    self.take(runtime, name)
        self._hear_failures(runtime, told)

    def _hear_failures(self, runtime: StageRuntime, told: Feedback) -> None:
        for name, cause in told.failed.items():
            self.told.setdefault(name, cause.reason)
            self.ready.pop(name, None)
            self.release(runtime, name)

    def has_let_go(self, name: str) -> bool:
        """Whether this host has let go of a request, or a successor may have made it do so."""
        return name in self.released or len(self.begun) > 1

    def release(self, runtime: StageRuntime, name: str) -> None:
        """Let go of a request."""
        self.released.add(name)
        self.owes_release.discard(name)
        if not self.closing:
            runtime.release(name)

    def take(self, runtime: StageRuntime, name: str) -> None:
        """Take one frame."""
        taken = runtime.take(name)
        if taken.kind in (TakenKind.CHUNK, TakenKind.END) and name not in self.opened:
            self.problem = "input is taken of a request that was never reported as opened"
        if taken.kind is TakenKind.CHUNK:
            if taken.segment != (taken.payload if self.role.segments else 0):
                self.problem = f"chunk {taken.payload} comes with segment {taken.segment}"
            self._took_chunk(runtime, name, taken.payload)
            return
        self.ready.pop(name, None)
        if taken.kind is TakenKind.END:
            if (taken.payload, taken.segment) != (_TAIL, self.role.chunks if self.role.segments else 0):
                self.problem = f"the end brings {taken.payload!r} in segment {taken.segment}"
            if self.took.get(name, 0) != self.role.chunks:
                self.problem = f"ok after {self.took.get(name, 0)} of {self.role.chunks} chunks"
            if not self.role.sink or self.role.front:
                self.told.setdefault(name, "ok")
                self.release(runtime, name)
            else:
                self.end(runtime, name)

    def _took_chunk(self, runtime: StageRuntime, name: str, chunk: Any) -> None:
        if chunk != self.took.get(name, 0):
            self.problem = f"chunk {chunk} is taken, {self.took.get(name, 0)} comes next"
        self.took[name] = chunk + 1
        if self.role.sink and not self.role.front:
            runtime.submit_chunk(name, chunk, segment_end=self.role.segments)

    def shut_down(self, runtime: StageRuntime, names: tuple[str, ...]) -> None:
        """The stage is shut down: every request is let go by that, and nothing is released one by one."""
        self.closing = True
        self.released.update(names)
        for name in names:
            self.told.setdefault(name, "shutdown")
        runtime.begin_shutdown()

    def leave(self, runtime: StageRuntime, how: str, name: str, reason: str) -> None:
        """End a request early, in one of the ways that a host has."""
        if how == "fail":
            runtime.fail(name, reason)
        elif how == "cancel":
            runtime.cancel(name, reason)
        if how == "release":
            self.release(runtime, name)
        elif how == "fail":
            self.owes_release.add(name)
        else:
            self.released.add(name)
        self.told.setdefault(name, reason)
        self.ready.pop(name, None)


class Watcher:
    """An observer, and the producer: both report what must never be as ``problem``.

    Attributes:
        problem: What was seen that must never be; empty when nothing was.
        cells: The cells of both tables that were used.
        failed: How often a failure of each request was reported.
        retained: Requests whose sender failed and is not over.
        raises: Whether the producer raises.
        meanwhile: Called once in the middle of the next producer call, inside its factory if that runs.
        is_over: Tells whether the sender of a life is over.
    """

    def __init__(self, stage: str, host: WorldHost) -> None:
        self.stage, self.host = stage, host
        self.problem = ""
        self.cells: set[CellName] = set()
        self.failed: dict[str, int] = {}
        self.retained: set[str] = set()
        self.raises = False
        self.meanwhile: Callable[[], None] = nothing
        self.is_over: Callable[[Identity], bool] = bool

    def on_transition(self, transition: Transition) -> None:
        """See `omni_fsm.runtime.Observer`."""
        self.cells.add((transition.machine, str(transition.before), str(transition.event)))
        if transition.machine == "sender":
            self._check_retained(transition)

    def _check_retained(self, transition: Transition) -> None:
        """The state of a sender that failed stays until its host lets go, or nobody is left to need it."""
        name = transition.internal_id
        if SenderEffect.RECORD_FAILURE in transition.effects:
            self.retained.add(name)
        if transition.after is SenderState.FINALIZED and name in self.retained:
            self.retained.discard(name)
            if transition.event is not SenderEvent.PEER_LOST and not self.host.has_let_go(name):
                self.problem = "the state of a failed life is released before its host has let go"

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
        self._check_segment(context)
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

    def _check_segment(self, context: ProducerContext) -> None:
        """What is scoped to a segment was made in this one."""
        try:
            segment = context.state.get_or_create("verify.segment", lambda: [context.segment], Scope.SEGMENT)
        except StateRetiredError:
            return  # `_state` judges that
        if segment != [context.segment]:
            self.problem = f"state of segment {segment} is seen in segment {context.segment}"

    def _make(self) -> list[Identity]:
        self._happen()
        return []

    def _happen(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, nothing
        meanwhile()
