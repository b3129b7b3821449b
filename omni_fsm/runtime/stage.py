"""A stage's runtime: what a runner and a scheduler call, and the steps that threads repeat."""

from collections.abc import Callable, Iterable
from typing import Any

from omni_fsm.connectors.port import FULL_PAYLOAD, Connector, Health
from omni_fsm.payload import tree_nbytes
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import ReceiverEvent, SenderEvent
from omni_fsm.protocol.receiver import ReceiverMoved, Staged
from omni_fsm.protocol.sender import SenderHalf, SenderMoved
from omni_fsm.runtime import inbox as inbox_module
from omni_fsm.runtime import outbox as outbox_module
from omni_fsm.runtime.config import StageConfig
from omni_fsm.runtime.core import StageCore, Turn
from omni_fsm.runtime.device import handed_in
from omni_fsm.runtime.ending import Ending
from omni_fsm.runtime.feedback import ACCEPTED, GONE, NOT_YET, Admission, Feedback, Standing, Taken, TakenKind
from omni_fsm.runtime.full_payload import FullPayloadProducer
from omni_fsm.runtime.inbox import Inbox
from omni_fsm.runtime.intake import Intake
from omni_fsm.runtime.outbox import Outbox
from omni_fsm.runtime.ports import (
    Clock,
    MonotonicClock,
    NoThreads,
    Observer,
    Producer,
    StageHost,
    Wakeups,
    passthrough,
)
from omni_fsm.runtime.requests import Request
from omni_fsm.state import RawPayloads, StateView

_UNKNOWN = Admission(accepted=False, reason="not registered here, or its life is over")


class StageRuntime:
    """One stage's end of the protocol: requests, producer state, outbox, inbox, deadlines, cleanup.

    All methods are thread-safe. None but those with a time-out blocks; none does I/O under the lock. The
    steps (``produce_once``, ``put_once``, ``source_once``, ``sink_once``, ``tick_once``) do nothing by themselves:
    `StageThreads` repeats them, tests call them by hand.

    Args:
        config: The stage's settings.
        source: Receiving end of the input edge; None in a stage without one. Owned from here on.
        sink: Sending end of the output edge; None in a stage without one. Owned from here on.
        producer: Makes payloads of what the runner submits.
        host: The runner; see `StageHost`.
        clock: Time.
        wakeups: Told when a step has work.
        observers: Told of every transition and failure; so is the producer, if it is an `Observer`.

    Raises:
        ConfigError: An edge does not belong to the stage, or the stage has none.
    """

    def __init__(  # noqa: PLR0913 - the ports of a stage
        self,
        config: StageConfig,
        *,
        source: Connector | None,
        sink: Connector | None,
        host: StageHost,
        producer: Producer = passthrough,
        clock: Clock | None = None,
        wakeups: Wakeups | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        if source is None and sink is None:
            raise ConfigError("source, sink", None, "a connector for at least one edge")
        if source is not None and (source.sends or source.edge.to_stage != config.stage):
            raise ConfigError("source", _end_name(source), f"the receiving end of an edge to {config.stage}")
        if sink is not None and (not sink.sends or sink.edge.from_stage != config.stage):
            raise ConfigError("sink", _end_name(sink), f"the sending end of an edge from {config.stage}")
        self.config = config
        self._core = StageCore(
            config,
            source=source,
            sink=sink,
            host=host,
            clock=clock or MonotonicClock(),
            wakeups=wakeups or NoThreads(),
            observers=_observers(observers, producer),
        )
        whole = sink is not None and sink.hello().mode == FULL_PAYLOAD
        self._outbox = Outbox(self._core, FullPayloadProducer(producer, config.replace_keys) if whole else producer)
        self._inbox = Inbox(self._core, self._register_offered)
        self._intake = Intake(self._core, self._inbox)
        self._ending = Ending(self._core, self._inbox)

    @property
    def source(self) -> Connector | None:
        """Receiving end of the input edge."""
        return self._core.source

    @property
    def sink(self) -> Connector | None:
        """Sending end of the output edge."""
        return self._core.sink

    @property
    def request_payload(self) -> RawPayloads:
        """The producer state of all requests as legacy producers use it, raw, by external id."""
        return self._core.state.raw

    @property
    def closing(self) -> Cause | None:
        """Why the stage takes no more, once it shuts down or has died."""
        return self._core.closing

    @property
    def ends(self) -> tuple[Connector, ...]:
        """The ends of its edges, one or two."""
        return tuple(end for end in (self.source, self.sink) if end is not None)

    def drive(self, wakeups: Wakeups) -> None:
        """Hand over the wake-ups of the threads that repeat the steps. Called once, before the first request."""
        self._core.wakeups = wakeups

    # Registering

    def register(self, internal_id: str, identity: Identity) -> Admission:
        """Begin a life of a request in this stage: its receiver waits, its sender opens or queues.

        Called by: the host, once per request, or the runtime itself for an accepted offer. On the front it is what begins
        the request for the whole pipeline.

        Args:
            internal_id: This stage's own name of the request; not empty, not in use.
            identity: External id and generation.

        Returns:
            Accepted, or refused with a reason: the stage shuts down, or this life was registered before and has ended.

        Raises:
            ConfigError: The internal id is empty or in use, or the identity is registered under another one.
        """
        return self._intake.register(internal_id, identity, offered=False)

    def _register_offered(self, internal_id: str, identity: Identity) -> Admission:
        return self._intake.register(internal_id, identity, offered=True)

    # What the runner says

    def submit_chunk(self, internal_id: str, output: Any, *, segment_end: bool = False) -> Admission:
        """Offer one step's output to the next stage. Never waits.

        Args:
            internal_id: The request.
            output: Anything the producer understands; given away. What the calling thread's CUDA stream has still to compute of
                it, the producer's stream waits for.
            segment_end: Whether it is the last of its segment; makes a frame even if the producer returns nothing.

        Returns:
            Accepted, or refused with a reason: cancelled, failed, over, shutting down, or no room in the backlog.

        Raises:
            LocalProtocolError: The runner has ended this request itself.
        """
        core = self._core
        item, nbytes = handed_in(output), tree_nbytes(output)
        with core.turn() as turn:
            request, half = self._sender(internal_id)
            if request is None or half is None:
                return _UNKNOWN
            if core.closing is not None:
                return Admission(accepted=False, reason=core.closing.reason)
            over = core.backlog_bytes > 0 and core.backlog_bytes + nbytes > core.config.backlog_bytes
            if over and half.accepts(SenderEvent.CHUNK_SUBMITTED):
                return self._over_backlog(turn, request, half)
            return self._admit(turn, request, half.submit_chunk(item, nbytes, segment_end=segment_end))

    def end(self, internal_id: str, output: Any = None) -> Admission:
        """Say that the request's output is complete; ``output``, if any, goes into the producer's last call.

        A stage that has ended its output needs no more input: its receiver is released, which stops the stage before. The
        front goes on receiving, and its end waits in the queue until every stage knows the request. A repeated end changes
        nothing.
        """
        core = self._core
        item, nbytes = handed_in(output), tree_nbytes(output)
        with core.turn() as turn:
            request, half = self._sender(internal_id)
            if request is None or half is None:
                return _UNKNOWN
            moved = half.submit_end(core.clock.now_ns(), item, nbytes)
            admission = self._admit(turn, request, moved)
            if request.receiver is not None and not core.config.front and not moved.ignored:
                self._release_receiver(turn, request)
            return admission

    def fail(self, internal_id: str, reason: str) -> None:
        """End a request with an error; the next stage and the one before learn it at once. Idempotent, first reason kept.

        Producer state stays until the host releases the request.
        """
        cause = Cause(Outcome.ERROR, reason or "failed", self._core.clock.now_ns())
        with self._core.turn() as turn:
            request = self._leaving(internal_id)
            if request is None:
                return
            self._fail(turn, request, cause)

    def _fail(self, turn: Turn, request: Request, cause: Cause) -> None:
        """End both halves with an error, also where the sender is over or leaves for another reason."""
        if request.sender is not None:
            self._core.sender_moved(turn, request, request.sender.on_host_failed(cause))
        if request.receiver is not None:
            self._core.receiver_moved(turn, request, request.receiver.on_cancelled(cause))

    def cancel(self, internal_id: str, reason: str = "cancelled") -> None:
        """Cancel a request in this stage, and with it in every other one. Idempotent, first reason kept."""
        cause = Cause(Outcome.CANCELLED, reason or "cancelled", self._core.clock.now_ns())
        with self._core.turn() as turn:
            request = self._leaving(internal_id)
            if request is None:
                return
            if request.receiver is not None:
                self._core.receiver_moved(turn, request, request.receiver.on_cancelled(cause))
            if request.sender is not None:
                self._core.sender_moved(turn, request, request.sender.on_cancelled(cause))

    def release(self, internal_id: str) -> None:
        """Let go of a request: the host wants nothing more of it. A stream that nobody ended is cancelled. Idempotent."""
        cause = Cause(Outcome.CANCELLED, "released", self._core.clock.now_ns())
        with self._core.turn() as turn:
            request = self._leaving(internal_id)
            if request is None:
                return
            if request.receiver is not None:
                self._release_receiver(turn, request)
            if request.sender is not None:
                self._core.sender_moved(turn, request, request.sender.on_released(cause))

    def _leaving(self, internal_id: str) -> Request | None:
        """The request that its host leaves; the host need not be told why it ends."""
        request = self._core.tables.by_internal.get(internal_id)
        if request is not None:
            request.host_knows = True
        return request

    def _release_receiver(self, turn: Turn, request: Request) -> None:
        if request.receiver is not None:
            done = Cause(Outcome.DONE, "done", self._core.clock.now_ns())
            self._core.receiver_moved(turn, request, request.receiver.on_released(done))

    def _sender(self, internal_id: str) -> tuple[Request | None, SenderHalf | None]:
        request = self._core.tables.by_internal.get(internal_id)
        return request, request.sender if request is not None else None

    def _admit(self, turn: Turn, request: Request, moved: SenderMoved) -> Admission:
        self._core.sender_moved(turn, request, moved)
        if not moved.ignored:
            return ACCEPTED
        cause = request.sender.cause if request.sender is not None else None
        return Admission(accepted=False, reason=f"{moved.before}: {cause or moved.ignored}")

    def _over_backlog(self, turn: Turn, request: Request, half: SenderHalf) -> Admission:
        reason = f"backlog: {self._core.backlog_bytes} of {self._core.config.backlog_bytes} bytes wait in this stage"
        if self._core.config.backlog_policy == "fail":
            cause = Cause(Outcome.ERROR, reason, self._core.clock.now_ns())
            self._core.sender_moved(turn, request, half.on_host_failed(cause))
        else:
            self._core.paused[request.internal_id] = None
        return Admission(accepted=False, reason=reason, no_room=self._core.config.backlog_policy != "fail")

    def state(self, internal_id: str) -> StateView | None:
        """The request's producer state, for a runner that shares it with the producer.

        Returns:
            A view fenced like a producer's. None while a predecessor still owns the external id (the request is reported as
            ready again when it does not), and when the request is over.
        """
        with self._core.lock:
            request = self._core.tables.by_internal.get(internal_id)
            return request.view if request is not None else None

    # What the scheduler says

    def collect_feedback(self, timeout_s: float = 0.0) -> Feedback:
        """Take what happened since the last collection; each entry is given once.

        Args:
            timeout_s: How long to wait for something, in seconds.
        """
        core = self._core
        with core.lock:
            if not core.feedback and timeout_s > 0:
                core.feedback_came.wait_for(lambda: bool(core.feedback), timeout_s)
            collected, core.feedback = core.feedback, Feedback()
            return collected

    def take(self, internal_id: str) -> Taken:
        """Take the next frame of a request's input; its credit goes back to the sender. Never waits.

        Returns:
            A chunk, the end, the failure, "not yet" or "gone"; see `Taken`.
        """
        core = self._core
        with core.turn() as turn:
            request = core.tables.by_internal.get(internal_id)
            half = request.receiver if request is not None else None
            if request is None or half is None:
                return GONE
            if not half.staged and not half.accepts(ReceiverEvent.FAILURE_CONSUMED):
                return NOT_YET if half.accepts(ReceiverEvent.DATA_ARRIVED) else GONE
            staged, moved = half.on_consumed()
            core.receiver_moved(turn, request, moved)
            if half.staged:
                core.feedback.ready[internal_id] = None
                core.woken(turn)
            return _taken(staged, moved, half.cause)

    def peek(self, internal_id: str) -> Taken:
        """What a take would give, without taking: its credit stays here, and its payload belongs to the stage."""
        with self._core.lock:
            request = self._core.tables.by_internal.get(internal_id)
            half = request.receiver if request is not None else None
            if half is None:
                return GONE
            if half.staged:
                return _given(half.staged[0], half.cause)
            if half.accepts(ReceiverEvent.FAILURE_CONSUMED):
                return Taken(TakenKind.FAILED, cause=half.cause)
            return NOT_YET if half.accepts(ReceiverEvent.DATA_ARRIVED) else GONE

    def standings(self, internal_ids: Iterable[str]) -> dict[str, Standing]:
        """Where each of these requests stands, all at one moment; see `Standing`.

        Called by: a scheduler, once a cycle for all its requests.
        """
        with self._core.lock:
            return {internal_id: self._standing(internal_id) for internal_id in internal_ids}

    def _standing(self, internal_id: str) -> Standing:
        request = self._core.tables.by_internal.get(internal_id)
        if request is None:
            return Standing.UNKNOWN
        half = request.receiver
        if half is not None and half.accepts(ReceiverEvent.FAILURE_CONSUMED):
            return Standing.FAILED
        if internal_id in self._core.paused:
            return Standing.NO_ROOM
        if half is None:
            return Standing.NO_INPUT
        if half.staged:
            return Standing.READY
        return Standing.WAITS if half.accepts(ReceiverEvent.DATA_ARRIVED) else Standing.OVER

    # Steps

    def produce_once(self) -> bool:
        """Run one producer; see `Outbox.produce_once`."""
        return self._outbox.produce_once()

    def put_once(self) -> bool:
        """Put one frame; see `Outbox.put_once`."""
        return self._outbox.put_once()

    def source_once(self) -> bool:
        """Get one frame, or what the sending end says when there is none. Returns whether there was anything."""
        if self._inbox.get_once():
            return True
        return self._signals(self.source, self._inbox.on_signal)

    def sink_once(self) -> bool:
        """Hear what the receiving end says. Returns whether there was anything."""
        return self._signals(self.sink, self._outbox.on_signal)

    @staticmethod
    def _signals(connector: Connector | None, feed: Callable[[Any], None]) -> bool:
        signals = connector.signals() if connector is not None else []
        for signal in signals:
            feed(signal)
        return bool(signals)

    def tick_once(self) -> int | None:
        """Let every timer that is due go off. Returns when the next one is due, in nanoseconds of the clock."""
        core = self._core
        while True:
            with core.turn() as turn:
                key = core.timers.pop_due(core.clock.now_ns())
                if key is None:
                    return core.timers.next_due_ns()
                self._go_off(turn, key)

    def _go_off(self, turn: Turn, key: Any) -> None:
        core = self._core
        match key:
            case ("deadline", identity):
                request = core.tables.receiver_of(identity)
                if request is not None and request.receiver is not None and request.receiver.waiting:
                    reason = f"deadline_passed: no frame for {core.input_wait_s:g} s"
                    cause = Cause(Outcome.ERROR, reason, core.clock.now_ns())
                    core.receiver_moved(turn, request, request.receiver.on_deadline(cause))
            case ("hold", identity):
                request = core.tables.by_identity.get(identity)
                if request is not None:
                    self._outbox.retry(turn, request)
            case ("unclaimed", identity):
                cause = Cause(Outcome.ERROR, "unclaimed", core.clock.now_ns())
                self._inbox.drop_unclaimed(turn, identity, cause)
            case ("lost", edge, identity):
                request = core.tables.by_identity.get(identity)
                if request is not None:
                    (self._inbox if edge == inbox_module.EDGE else self._outbox).still_lost(turn, request)
            case ("tombstones",):
                now_ns = core.clock.now_ns()
                tables = (core.tables.tombstones, core.tables.turned_away)
                due = [next_ns for table in tables if (next_ns := table.expire(now_ns)) is not None]
                if due:
                    core.set_timer(turn, ("tombstones",), (min(due) - now_ns) / 1e9)
            case _:
                raise AssertionError(key)

    # Cleanup

    def residue(self) -> dict[str, int]:
        """What this stage holds now, by table. All zero once every request is over and tombstones have expired."""
        core = self._core
        with core.lock:
            requests = core.tables.snapshot()
            held = {
                "requests": len(requests),
                "identities": len(core.tables.by_identity),
                "lives": sum(len(lives) for lives in core.tables.lives.values()),
                "staged": sum(len(r.receiver.staged) for r in requests if r.receiver is not None),
                "unclaimed": len(core.tables.unclaimed),
                "tombstones": len(core.tables.tombstones) + len(core.tables.turned_away),
                "ready": len(core.ready),
                "puts": len(core.puts) + len(core.urgent_puts),
                "timers": len(core.timers),
                "backlog_bytes": core.backlog_bytes,
                "paused": len(core.paused),
                "state": len(core.state),
                "feedback": sum(len(getattr(core.feedback, name)) for name in Feedback.__slots__),
            }
        for role, health in self.health().items():
            held |= {f"{role}.{name}": count for name, count in health.entries.items()}
        return held

    def begin_shutdown(self, cause: Cause | None = None) -> None:
        """Refuse new work and end every request. The ends still have to flush.

        Args:
            cause: What every request ends with, and each that is offered later; None: ``cancelled``, reason ``shutdown``.
                The first call's holds.
        """
        self._ending.begin_shutdown(cause)

    def abandon(self, grace_s: float) -> None:
        """The grace of a shutdown is over: report each request whose end did not go out."""
        self._ending.abandon(grace_s)

    def crash(self, error: BaseException) -> None:
        """A step raised what it never should; see `Ending.crash`. Called by: the driver."""
        self._ending.crash(error)

    def health(self) -> dict[str, Health]:
        """How the edges are, by role: ``source`` and ``sink``."""
        ends = {inbox_module.EDGE: self.source, outbox_module.EDGE: self.sink}
        return {role: end.health() for role, end in ends.items() if end is not None}

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is left, for ``timeout_s`` seconds at most. Returns whether none is."""
        core = self._core
        with core.lock:
            return core.feedback_came.wait_for(lambda: not core.tables.by_internal, timeout_s)


def _observers(observers: Iterable[Observer], producer: Producer) -> tuple[Observer, ...]:
    told = tuple(observers)
    if isinstance(producer, type) or not isinstance(producer, Observer) or any(each is producer for each in told):
        return told
    return (*told, producer)


def _end_name(connector: Connector) -> str:
    return f"the {'sending' if connector.sends else 'receiving'} end of {connector.edge}"


def _taken(staged: Staged | None, moved: ReceiverMoved, cause: Cause | None) -> Taken:
    if moved.event is ReceiverEvent.FAILURE_CONSUMED:
        return Taken(TakenKind.FAILED, cause=cause)
    return GONE if staged is None else _given(staged, cause)


def _given(staged: Staged, cause: Cause | None) -> Taken:
    kind = TakenKind.END if staged.is_end else TakenKind.CHUNK
    return Taken(kind, staged.payload, cause if staged.is_end else None, staged.segment, staged.segment_end)
