"""The sending side of a stage, as two step functions: run one producer, put one frame."""

from collections.abc import Callable
from dataclasses import replace

from omni_fsm.connectors.port import (
    ConnectorClosedError,
    CreditReturned,
    EdgeRefused,
    PeerBack,
    PeerLost,
    PutOutcome,
    PutStatus,
    RoomReturned,
    Signal,
    Stopped,
)
from omni_fsm.payload import encode
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import SenderEvent
from omni_fsm.protocol.sender import SenderHalf, SenderMoved, SendTask, TaskKind
from omni_fsm.runtime.core import StageCore, Turn
from omni_fsm.runtime.device import handed_out
from omni_fsm.runtime.ports import Producer, ProducerContext
from omni_fsm.runtime.requests import Request

EDGE = "sink"


class Outbox:
    """Runs producers, puts frames, and hears what the receiving end says."""

    def __init__(self, core: StageCore, producer: Producer) -> None:
        self.core = core
        self.producer = producer

    # Producers

    def produce_once(self) -> bool:
        """Run the producer of one task, outside the lock. Returns whether there was one.

        Called by: the workers; any number at once, each on another request.
        """
        core = self.core
        with core.turn() as turn:
            if not core.ready:
                return False
            request = core.ready.popleft()
            request.scheduled = False
            half = request.sender
            if half is None or not half.ready or not half.queue[0].runs_producer:
                core.dispatch(turn, request)
                return True
            core.sender_moved(turn, request, half.on_task_begun())
            task = half.in_flight
            request.producing = True
        if task is not None:
            self._produce(request, half, task)
        return True

    def _produce(self, request: Request, half: SenderHalf, task: SendTask) -> None:
        core = self.core
        body, cause = None, None
        try:
            payload = self.producer(self._context(request, half, task))
            body = None if payload is None else encode(payload)
        except BaseException as error:  # noqa: BLE001 - becomes an event: the request ends with the producer's own words
            cause = Cause(Outcome.ERROR, f"{type(error).__name__}: {error}", core.clock.now_ns())
            request.exception = error
        with core.turn() as turn:
            request.producing = False
            was_final = half.is_final
            core.sender_moved(
                turn, request, half.on_produced(body) if cause is None else half.on_producer_raised(cause)
            )
            core.queue_put(turn, request, half)
            if was_final:
                core.end_life(turn, request)  # it ended while its producer ran: only now its successor opens

    @staticmethod
    def _context(request: Request, half: SenderHalf, task: SendTask) -> ProducerContext:
        if request.view is None:
            raise AssertionError(request)
        return ProducerContext(
            request=request.internal_id,
            identity=request.identity,
            output=handed_out(task.item),
            is_finished=task.kind is TaskKind.END,
            is_segment_finished=task.kind is not TaskKind.CHUNK,
            segment=half.segment,
            seq=half.next_seq,
            state=request.view,
        )

    # Frames

    def put_once(self) -> bool:
        """Put one frame, outside the lock; openings and failed ends first. Returns whether there was one.

        Called by: the outbox thread.
        """
        core = self.core
        with core.turn():
            queue = core.urgent_puts or core.puts
            if not queue:
                return False
            request = queue.popleft()
            request.put_queued = False
            half = request.sender
            task = half.in_flight if half is not None else None
            wakes, losses = request.wakes, core.losses
        if half is None or task is None or task.frame is None:
            return True  # peer loss ended the life while its frame was queued
        frame, outcome = self._put(task.frame)
        with core.turn() as turn:
            if core.losses != losses and outcome.status in (PutStatus.STORED, PutStatus.RETRY):
                self._crossed_a_loss(turn, request, half, frame)
            else:
                self._feed(turn, request, half, frame, outcome, woken=request.wakes != wakes)
        return True

    def _crossed_a_loss(self, turn: Turn, request: Request, half: SenderHalf, frame: Frame) -> None:
        """The peer was lost while this frame was put, and perhaps a new one came: nobody knows which of them has it.

        An opening is put again: to have it twice does no harm, and its life goes on. Any other frame is of a life that ended
        with the lost peer; what the connector keeps of it is dropped.
        """
        core = self.core
        if half.is_final:
            if core.sink is not None:
                turn.later(core.sink.reclaim, request.identity, unread=True)
        else:
            core.sender_moved(turn, request, half.on_busy(frame))

    def _put(self, frame: Frame) -> tuple[Frame, PutOutcome]:
        """One put; a frame that has to wait gets a body of its own."""
        sink = self.core.sink
        if sink is None:
            raise AssertionError(frame)
        try:
            outcome = sink.put(frame)
        except ConnectorClosedError as error:
            outcome = PutOutcome(PutStatus.REFUSED, str(error))
        except Exception as error:  # noqa: BLE001 - a connector's raise counts as a failed attempt
            outcome = PutOutcome(PutStatus.RETRY, f"{type(error).__name__}: {error}")
        if outcome.status in (PutStatus.BUSY, PutStatus.RETRY) and frame.body is not None:
            frame = replace(frame, body=frame.body.owned())
        return frame, outcome

    def _feed(  # noqa: PLR0913 - one happening
        self, turn: Turn, request: Request, half: SenderHalf, frame: Frame, outcome: PutOutcome, *, woken: bool
    ) -> None:
        now_ns = self.core.clock.now_ns()
        reason = outcome.reason or f"put {outcome.status}"
        cause = Cause(Outcome.ERROR, f"put_given_up: {reason}", now_ns)
        match outcome.status:
            case PutStatus.STORED:
                request.busy_key = None
                self.core.sender_moved(turn, request, half.on_stored())
            case PutStatus.BUSY:
                self._feed_busy(turn, request, half, frame, woken=woken)
            case PutStatus.RETRY:
                request.busy_key = None
                attempts = half.in_flight.attempts if half.in_flight else 0
                moved = half.on_put_failed(cause, frame)
                if moved.event is SenderEvent.PUT_RETRIED and not moved.ignored:
                    wait_s = self.core.config.retry_wait_ms / 1e3 * 2**attempts
                    self._hold(turn, request, half, wait_s, busy=False)
                self.core.sender_moved(turn, request, moved)
            case PutStatus.REFUSED:
                self.core.sender_moved(turn, request, half.on_given_up(cause))

    def _feed_busy(self, turn: Turn, request: Request, half: SenderHalf, frame: Frame, *, woken: bool) -> None:
        core = self.core
        now_ns = core.clock.now_ns()
        if request.busy_key != frame.key:
            request.busy_key, request.busy_since_ns = frame.key, now_ns
        stall_s = core.config.send_stall_s or 0.0
        left_s = stall_s - (now_ns - request.busy_since_ns) / 1e9
        if stall_s and left_s <= 0:
            missing = "credit or room" if core.sink is not None and core.sink.health().connected else "peer"
            cause = Cause(Outcome.ERROR, f"send_stall: no {missing} for {stall_s:g} s", now_ns)
            request.busy_key = None
            core.sender_moved(turn, request, half.on_given_up(cause))
            return
        moved = half.on_busy(frame)
        if moved.event is SenderEvent.PUT_DEFERRED and not moved.ignored and not woken:
            self._hold(turn, request, half, left_s if stall_s else None, busy=True)
        core.sender_moved(turn, request, moved)

    def _hold(self, turn: Turn, request: Request, half: SenderHalf, wait_s: float | None, *, busy: bool) -> None:
        """The frame that just went back to the head waits there."""
        request.hold, request.hold_is_busy = half.queue[0], busy
        if wait_s is not None:
            self.core.set_timer(turn, ("hold", request.identity), wait_s)

    # What the receiving end says

    def on_signal(self, signal: Signal) -> None:
        """Feed one signal of the output edge. Called by: its I/O thread."""
        core = self.core
        with core.turn() as turn:
            match signal:
                case Stopped(identity, cause):
                    self._with_sender(turn, identity, lambda half: half.on_receiver_stopped(cause))
                case CreditReturned(identity):
                    request = core.tables.by_identity.get(identity)
                    if request is not None:
                        self._room_came(turn, request)
                case RoomReturned():
                    self._wake_all(turn)
                case PeerBack():
                    core.peer_back(EDGE)
                    self._wake_all(turn)
                case PeerLost(reason):
                    self._peer_lost(turn, reason)
                case EdgeRefused(error):
                    core.reports.edge_failure(core.sink, Cause(Outcome.ERROR, str(error), core.clock.now_ns()))
                    self._peer_lost(turn, str(error))

    def _with_sender(self, turn: Turn, identity: Identity, happening: Callable[[SenderHalf], SenderMoved]) -> None:
        request = self.core.tables.by_identity.get(identity)
        if request is not None and request.sender is not None:
            self.core.sender_moved(turn, request, happening(request.sender))

    def _room_came(self, turn: Turn, request: Request) -> None:
        """A put of this request that was, or is about to be, found busy may succeed now."""
        request.wakes += 1
        if request.hold_is_busy:
            self.retry(turn, request)

    def retry(self, turn: Turn, request: Request) -> None:
        """The frame at the head has waited enough."""
        if request.hold is not None:
            self.core.unhold(request)
            self.core.dispatch(turn, request)

    def _wake_all(self, turn: Turn) -> None:
        for request in self.core.tables.snapshot():
            self._room_came(turn, request)

    def _peer_lost(self, turn: Turn, reason: str) -> None:
        """Lives that the peer had heard of end now; the others get it if the peer is not back in time."""
        core = self.core
        cause = Cause(Outcome.ERROR, reason, core.clock.now_ns())
        core.lost[EDGE] = cause
        core.losses += 1
        for request in core.tables.snapshot():
            half = request.sender
            if half is None:
                continue
            if not half.announced:
                core.await_peer(turn, EDGE, request)
                continue
            if not half.is_final:
                core.sender_moved(turn, request, half.on_peer_lost(cause))
            core.prompt_lost(turn, request, cause)

    def still_lost(self, turn: Turn, request: Request) -> None:
        """The peer did not come back in time: what opens on this edge fails."""
        cause = self.core.lost.get(EDGE)
        if cause is not None and request.sender is not None:
            self.core.sender_moved(turn, request, request.sender.on_peer_lost(cause))
