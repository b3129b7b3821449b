"""A connector, a host, a producer and a clock that do what the test says, and stages that are stepped by hand.

No thread and no time: every put's outcome, every arrival and every signal is decided by the test.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from omni_fsm.connectors.port import (
    STORED,
    CreditReturned,
    Health,
    Hello,
    PeerBack,
    PeerLost,
    PutOutcome,
    PutStatus,
    RoomReturned,
    Signal,
    Stopped,
)
from omni_fsm.payload import encode, receive_buffer
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import (
    Failure,
    Feedback,
    Offer,
    Producer,
    ProducerContext,
    Refuse,
    Register,
    StageConfig,
    StageRuntime,
    Taken,
    Transition,
    passthrough,
)

IN = Edge("front", "thinker")
OUT = Edge("thinker", "talker")
R1 = Identity("r1", 1)
R2 = Identity("r1", 2)  # the next life of the same external id
OTHER = Identity("r2", 1)
S = 1_000_000_000
START_NS = 1_000 * S

RETRY = PutOutcome(PutStatus.RETRY, "no link")
RETRY_BUT_STORED = PutOutcome(PutStatus.RETRY, "no answer")
REFUSED = PutOutcome(PutStatus.REFUSED, "too large")

Planned = PutOutcome | Exception | Callable[[Frame], PutOutcome]


class HandClock:
    """Time moves when the test moves it."""

    def __init__(self) -> None:
        self.ns = START_NS

    def now_ns(self) -> int:
        return self.ns

    def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * S)


class ScriptedArrival:
    """A frame that has come; ``faults`` are raised by ``load``, one a call, before the body is given."""

    def __init__(
        self, frame: Frame, body: bytes | None, faults: Iterable[Exception], during: Callable[[], None]
    ) -> None:
        self.frame = frame
        self.nbytes = 0 if body is None else len(body)
        self.loads = 0
        self.discarded = False
        self._body, self._faults, self._during = body, deque(faults), during

    def load(self) -> memoryview | None:
        self.loads += 1
        self._during()
        if self._faults:
            raise self._faults.popleft()
        if self._body is None:
            return None
        buffer = receive_buffer(len(self._body))
        buffer[:] = self._body
        return buffer

    def discard(self) -> None:
        self.discarded = True


class ScriptedConnector:
    """One end of an edge. ``plan`` holds the outcomes of the puts to come; ``default`` decides the rest."""

    def __init__(self, edge: Edge, *, sends: bool) -> None:
        self.edge = edge
        self.sends = sends
        self.peer: ScriptedConnector | None = None
        self.plan: deque[Planned] = deque()
        self.default: Planned = STORED
        self.tried: list[Frame] = []
        self.stored: list[Frame] = []
        self.arrivals: deque[ScriptedArrival] = deque()
        self.got: list[ScriptedArrival] = []
        self.said: deque[Signal] = deque()
        self.granted: list[tuple[Identity, int, int]] = []  # identity, frames, taken frames
        self.stopped: list[tuple[Identity, Cause]] = []
        self.reclaimed: list[tuple[Identity, bool]] = []
        self.kept: set[Identity] = set()
        self.unlocked: Callable[[], None] = lambda: None

    def hello(self) -> Hello:
        return Hello(self.edge, "digest")

    # The sending end

    def put(self, frame: Frame) -> PutOutcome:
        self.unlocked()
        self.tried.append(frame)
        planned = self.plan.popleft() if self.plan else self.default
        if isinstance(planned, Exception):
            raise planned
        outcome = planned if isinstance(planned, PutOutcome) else planned(frame)
        if outcome == STORED or outcome is RETRY_BUT_STORED:
            self._store(frame)
        return outcome

    def _store(self, frame: Frame) -> None:
        self.stored.append(frame)
        self.kept.add(frame.identity)
        if self.peer is not None:
            self.peer.bring(frame)

    def reclaim(self, identity: Identity, *, unread: bool) -> None:
        self.unlocked()
        self.reclaimed.append((identity, unread))
        self.kept.discard(identity)

    # The receiving end

    def get(self) -> ScriptedArrival | None:
        self.unlocked()
        if not self.arrivals:
            return None
        self.got.append(self.arrivals.popleft())
        return self.got[-1]

    def bring(
        self, frame: Frame, faults: Iterable[Exception] = (), during: Callable[[], None] = lambda: None
    ) -> ScriptedArrival:
        """Let a frame arrive."""
        body = b"".join(frame.body.parts) if frame.body is not None else None
        arrival = ScriptedArrival(frame, body, faults, during)
        self.arrivals.append(arrival)
        return arrival

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> None:
        self.unlocked()
        self.granted.append((identity, frames, taken_frames))
        if self.peer is not None:
            self.peer.said.append(CreditReturned(identity))

    def stop(self, identity: Identity, cause: Cause) -> None:
        self.unlocked()
        self.stopped.append((identity, cause))
        if self.peer is not None:
            self.peer.said.append(Stopped(identity, cause))

    # Both

    def say(self, *signals: Signal) -> None:
        self.said.extend(signals)

    def signals(self) -> list[Signal]:
        self.unlocked()
        said, self.said = list(self.said), deque()
        return said

    def wait(self, timeout_s: float | None) -> bool:
        return bool(self.arrivals or self.said)

    def wake(self) -> None:
        """Nobody waits."""

    def health(self) -> Health:
        return Health(connected=True, entries={"arrived": len(self.arrivals), "kept": len(self.kept)})

    def close(self) -> None:
        """Nothing is held."""


def scripted_pair(edge: Edge) -> tuple[ScriptedConnector, ScriptedConnector]:
    """Two ends that meet: what is stored arrives, what the receiving end says is heard."""
    sending, receiving = ScriptedConnector(edge, sends=True), ScriptedConnector(edge, sends=False)
    sending.peer, receiving.peer = receiving, sending
    return sending, receiving


class ScriptedHost:
    """Answers offers as the test says, and notes them."""

    def __init__(self, answer: Callable[[Identity], Offer] = lambda _: Refuse()) -> None:
        self.answer = answer
        self.offered: list[Identity] = []
        self.woken = 0

    def stream_offered(self, identity: Identity) -> Offer:
        self.offered.append(identity)
        return self.answer(identity)

    def feedback_ready(self) -> None:
        self.woken += 1


class Recorder:
    """Keeps what observers are told."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.failures: list[Failure] = []

    def on_transition(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)

    @property
    def reasons(self) -> list[tuple[str, str, str]]:
        return [(failure.what, failure.internal_id, failure.cause.reason) for failure in self.failures]


class CountingProducer:
    """Passes outputs on and notes each call; an output that is an exception is raised, ``None`` buffers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Identity, Any]] = []

    def __call__(self, context: ProducerContext) -> Any:
        self.calls.append((context.identity, context.output))
        if isinstance(context.output, Exception):
            raise context.output
        return context.output


@dataclass(eq=False)
class Stage:
    """One runtime, stepped by hand."""

    runtime: StageRuntime
    clock: HandClock
    source: Any
    sink: Any
    host: ScriptedHost
    seen: Recorder
    feedback: Feedback = field(default_factory=Feedback)

    def step(self) -> bool:
        """Each step once. Returns whether anything happened."""
        runtime = self.runtime
        return any([runtime.produce_once(), runtime.put_once(), runtime.source_once(), runtime.sink_once()])

    def run(self) -> None:
        """All steps until nothing is left to do."""
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("no end of steps")

    def pass_time(self, seconds: float) -> None:
        """Move the clock, let timers go off, run."""
        self.clock.advance(seconds)
        self.runtime.tick_once()
        self.run()

    def open(self, internal_id: str, identity: Identity) -> None:
        """Register; the sender announces itself."""
        assert self.runtime.register(internal_id, identity).accepted
        self.run()

    def submit(self, internal_id: str, *outputs: Any) -> None:
        for output in outputs:
            assert self.runtime.submit_chunk(internal_id, output).accepted

    def come(self, *frames: Frame) -> None:
        """Let frames arrive, and feed them."""
        for frame in frames:
            self.source.bring(frame)
        self.run()

    def collect(self) -> Feedback:
        return self.runtime.collect_feedback()

    def take(self, internal_id: str) -> Taken:
        return self.runtime.take(internal_id)

    def wire(self, identity: Identity | None = None) -> list[str]:
        """What the sink stored, in words."""
        return [words(frame) for frame in self.sink.stored if identity in (None, frame.identity)]

    def hear(self, *signals: Signal) -> None:
        """Let the sink's peer speak, and feed it."""
        self.sink.say(*signals)
        self.run()

    def lose_source(self, reason: str = "peer_lost") -> None:
        self.source.say(PeerLost(reason))
        self.run()

    def find_source(self) -> None:
        self.source.say(PeerBack())
        self.run()

    def held(self) -> dict[str, int]:
        """Residue that is not zero."""
        return {name: count for name, count in self.runtime.residue().items() if count}

    def rest(self, seconds: float = 1_000_000.0) -> dict[str, int]:
        """Residue that is not zero after every time-out has passed and feedback was collected."""
        self.run()
        self.pass_time(seconds)
        self.pass_time(seconds)
        self.collect()
        return self.held()


def make_stage(
    *,
    source: Any = None,
    sink: Any = None,
    producer: Producer = passthrough,
    answer: Callable[[Identity], Offer] = lambda _: Refuse(),
    clock: HandClock | None = None,
    host: Any = None,
    observers: Iterable[Any] = (),
    stage: str = "thinker",
    **settings: Any,
) -> Stage:
    """A stage with the ports that are given."""
    clock = clock or HandClock()
    host = host or ScriptedHost(answer)
    seen = Recorder()
    runtime = StageRuntime(
        StageConfig(stage=stage, **settings),
        source=source,
        sink=sink,
        host=host,
        producer=producer,
        clock=clock,
        observers=(seen, *observers),
    )
    return Stage(runtime, clock, source, sink, host, seen)


def sender_only(**options: Any) -> Stage:
    """A stage with an output edge only."""
    return make_stage(sink=ScriptedConnector(OUT, sends=True), **options)


def receiver_only(**options: Any) -> Stage:
    """A stage with an input edge only."""
    return make_stage(source=ScriptedConnector(IN, sends=False), **options)


def middle(**options: Any) -> Stage:
    """A stage with both edges."""
    return make_stage(source=ScriptedConnector(IN, sends=False), sink=ScriptedConnector(OUT, sends=True), **options)


def front(**options: Any) -> Stage:
    """A stage with both edges at which requests begin and end."""
    return middle(front=True, **options)


# Frames of the input edge


def opening(identity: Identity = R1) -> Frame:
    return Frame(IN, identity, FrameKind.OPEN)


def data(seq: int, payload: Any = None, identity: Identity = R1) -> Frame:
    return Frame(IN, identity, FrameKind.DATA, seq=seq, body=None if payload is None else encode(payload))


def ok_end(seq: int, payload: Any = None, identity: Identity = R1) -> Frame:
    body = None if payload is None else encode(payload)
    return Frame(IN, identity, FrameKind.END, seq=seq, cause=Cause(Outcome.OK), body=body)


def failed_end(reason: str = "boom", identity: Identity = R1, outcome: Outcome = Outcome.ERROR) -> Frame:
    return Frame(IN, identity, FrameKind.END, cause=Cause(outcome, reason))


def words(frame: Frame) -> str:
    """One frame in words: ``open``, ``data 0``, ``end 1 ok``, ``end error(boom)``."""
    seq = f" {frame.seq}" if frame.seq >= 0 else ""
    cause = f" {frame.cause}" if frame.cause is not None else ""
    return f"{frame.kind}{seq}{cause}"


def error(reason: str = "boom") -> Cause:
    return Cause(Outcome.ERROR, reason)


def cancelled(reason: str = "cancelled") -> Cause:
    return Cause(Outcome.CANCELLED, reason)


DONE = Cause(Outcome.DONE, "done")
ROOM = RoomReturned()


# Three stages in a ring, in one thread

F_EDGE, T_EDGE, K_EDGE = Edge("front", "thinker"), Edge("thinker", "talker"), Edge("talker", "front")


class Ring:
    """Front, thinker and talker, joined by three edges; the hosts of the last two pass on what they take.

    ``pairs`` makes the ends of an edge: scripted ones, or real ones.
    """

    def __init__(self, pairs: Callable[[Edge], tuple[Any, Any]] = scripted_pair, **settings: Any) -> None:
        self.clock = HandClock()
        ends = [pairs(edge) for edge in (F_EDGE, T_EDGE, K_EDGE)]
        self.sinks = [sending for sending, _ in ends]
        self.stages = [
            make_stage(
                stage=name,
                source=ends[n - 1][1],
                sink=ends[n][0],
                producer=CountingProducer(),
                clock=self.clock,
                host=AcceptingHost(name),
                front=n == 0,
                **settings,
            )
            for n, name in enumerate(("front", "thinker", "talker"))
        ]
        self.front = self.stages[0]
        self.names: list[dict[Identity, str]] = [{}, {}, {}]
        self.sent: dict[str, list[Any]] = {}
        self.got: dict[str, list[Any]] = {}
        self.opened: set[str] = set()
        self.ended: dict[str, str] = {}  # how each request ended at the front
        self.closed: set[str] = set()  # names that their own host has ended: it submits nothing more

    def open(self, identity: Identity) -> None:
        internal_id = f"front-{identity.external_id}-{identity.generation}"
        assert self.front.runtime.register(internal_id, identity).accepted
        self.names[0][identity] = internal_id
        self.sent[internal_id], self.got[internal_id] = [], []

    def submit(self, identity: Identity, item: Any) -> None:
        internal_id = self.names[0][identity]
        if self.front.runtime.submit_chunk(internal_id, item).accepted:
            self.sent[internal_id].append(item)

    def leave(self, identity: Identity) -> None:
        """The front cancels, which ends the request there."""
        self.front.runtime.cancel(self.names[0][identity])
        self.ended.setdefault(self.names[0][identity], "cancelled here")

    def work(self, n: int) -> bool:
        """One cycle of a stage's host. Returns whether there was anything."""
        told = self.stages[n].runtime.collect_feedback()
        for internal_id, identity in told.registered.items():
            self.names[n][identity] = internal_id
        if n == 0:
            self.opened |= told.opened.keys()
        for internal_id in told.ready:
            while (taken := self.stages[n].take(internal_id)).kind in ("chunk", "end"):
                self._consume(n, internal_id, taken)
        for internal_id, cause in told.failed.items():
            if n == 0:
                self.ended.setdefault(internal_id, str(cause))
            self.stages[n].runtime.release(internal_id)
        return bool(told)

    def _consume(self, n: int, internal_id: str, taken: Taken) -> None:
        runtime = self.stages[n].runtime
        if n == 0:
            if taken.kind == "end":
                self.ended.setdefault(internal_id, "ok")
                runtime.release(internal_id)
            else:
                self.got[internal_id].append(taken.payload)
        elif taken.kind == "end":
            self.closed.add(internal_id)
            runtime.end(internal_id, taken.payload)
        else:
            runtime.submit_chunk(internal_id, taken.payload)

    def end(self, internal_id: str) -> None:
        if internal_id in self.opened:
            self.closed.add(internal_id)
            self.front.runtime.end(internal_id)

    def settle(self) -> None:
        """Step every stage and host until nothing happens."""
        for _ in range(10_000):
            stepped = [stage.step() for stage in self.stages]
            worked = [self.work(n) for n in range(3)]
            if not any(stepped + worked):
                return
        raise AssertionError("the ring never settles")

    def drain(self, rounds: int = 40) -> None:
        """No more faults: room everywhere, time passes, the front ends what is open."""
        for _ in range(rounds):
            for sink in self.sinks:
                if isinstance(sink, ScriptedConnector):
                    sink.plan.clear()
                    sink.say(ROOM)
            for internal_id in self.sent:
                self.end(internal_id)
            self.settle()
            self.clock.advance(5.0)
            for stage in self.stages:
                stage.runtime.tick_once()
            self.settle()

    def held(self) -> list[dict[str, int]]:
        return [stage.held() for stage in self.stages]


class AcceptingHost(ScriptedHost):
    """Registers every offer under a name of its own."""

    def __init__(self, stage: str) -> None:
        super().__init__(lambda identity: Register(f"{stage}-{identity.external_id}-{identity.generation}"))
