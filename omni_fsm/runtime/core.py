"""The part of a stage that the outbox, the inbox and the public calls share: one lock, the tables, and effects.

Under the lock a happening moves a half, and its effects change tables or are put aside; what is put aside (connector calls,
hooks, observers) runs once the lock is free. `Turn` is that: the lock, and the list of what comes after.
"""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, assert_never

from omni_fsm.connectors.port import FULL_PAYLOAD, Connector
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import ReceiverEffect, SenderEffect, SenderState
from omni_fsm.protocol.receiver import ReceiverHalf, ReceiverMoved
from omni_fsm.protocol.sender import SenderHalf, SenderMoved
from omni_fsm.runtime.config import StageConfig
from omni_fsm.runtime.feedback import Feedback
from omni_fsm.runtime.ports import Clock, Observer, StageHost, Wakeups
from omni_fsm.runtime.reports import Reports
from omni_fsm.runtime.requests import Request, Tables
from omni_fsm.runtime.timers import Timers
from omni_fsm.state import Owner, StateStore

UNLIMITED = 2**62
"""Credit of a stream whose frames are discarded: nothing that is still owed may wait for it."""


class Turn:
    """A critical section, and what runs after it, in order, without the lock."""

    def __init__(self, core: "StageCore") -> None:
        self._core = core
        self._after: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def later(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``call(*args, **kwargs)`` once the lock is free."""
        self._after.append((call, args, kwargs))

    def __enter__(self) -> Self:
        self._core.lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._core.lock.release()
        for call, args, kwargs in self._after:
            self._core.reports.guarded(call, *args, **kwargs)
        self._core.reports.tell()


class StageCore:
    """Lock, tables, timers and effects of one stage. Its users are the modules of this package."""

    def __init__(  # noqa: PLR0913 - the ports of a stage
        self,
        config: StageConfig,
        *,
        source: Connector | None,
        sink: Connector | None,
        host: StageHost,
        clock: Clock,
        wakeups: Wakeups,
        observers: tuple[Observer, ...],
    ) -> None:
        self.config = config
        self.source = source
        self.sink = sink
        self.host = host
        self.clock = clock
        self.wakeups = wakeups
        self.reports = Reports(observers, clock)
        self.lock = threading.RLock()
        self.tables = Tables(config.tombstones_max)
        self.timers = Timers()
        self.state = StateStore(self.lock)
        self.feedback = Feedback()
        self.feedback_came = threading.Condition(self.lock)
        self.ready: deque[Request] = deque()  # a producer has to run
        self.puts: deque[Request] = deque()  # a frame has to be put
        self.urgent_puts: deque[Request] = deque()  # openings and failed ends: they pass by both queues
        self.backlog_bytes = 0
        self.paused: dict[str, None] = {}  # refused for the backlog's sake, to be told when there is room
        self.lost: dict[str, Cause] = {}  # by edge role: why the peer is gone, while it is
        self.losses = 0  # how often the output edge lost its peer: tells a put that it happened meanwhile
        whole = source is not None and source.hello().mode == FULL_PAYLOAD
        self.input_wait_s = (config.full_payload_wait_s if whole else config.input_wait_s) or 0.0
        self.closing: Cause | None = None  # why new work is refused, once it is

    def turn(self) -> Turn:
        """Enter the lock: ``with core.turn() as turn``."""
        return Turn(self)

    # Halves

    def sender_moved(self, turn: Turn, request: Request, moved: SenderMoved) -> SenderMoved:
        """Do what a transition of the sender asks for, and see whether its queue can go on."""
        half = request.sender
        if half is None:
            raise AssertionError(request)
        self.reports.transition(request, half, moved)
        for effect in moved.effects:
            self._do_for_sender(turn, request, half, effect)
        self._count_backlog(turn, request, half)
        if half.is_final and moved.before is not moved.after:
            self._sender_over(turn, request)
        else:
            if moved.after is SenderState.FAILED and moved.before is not moved.after:
                self.release_for_successor(turn, request)
            self.dispatch(turn, request)
        return moved

    def receiver_moved(self, turn: Turn, request: Request, moved: ReceiverMoved) -> ReceiverMoved:
        """Do what a transition of the receiver asks for, and set its stall clock."""
        half = request.receiver
        if half is None:
            raise AssertionError(request)
        self.reports.transition(request, half, moved)
        for effect in moved.effects:
            self._do_for_receiver(turn, request, half, effect)
        if self.config.front:
            self.dispatch(turn, request)  # its end may have waited for what just came
        key = ("deadline", request.identity)
        if half.waiting and self.input_wait_s:
            self.set_timer(turn, key, self.input_wait_s)
        else:
            self.timers.cancel(key)
        self._forget_if_over(request)
        return moved

    def _do_for_sender(self, turn: Turn, request: Request, half: SenderHalf, effect: SenderEffect) -> None:
        match effect:
            case SenderEffect.RESET_SEGMENT:
                self.state.reset_segment(request.identity)
            case SenderEffect.RECORD_FAILURE:
                self.tell_host(turn, request, half, cause_of(half))
            case SenderEffect.TELL_RECEIVER:
                self._tell_receiver(turn, request, half, cause_of(half))
            case SenderEffect.REPORT_MARKER_LOST:
                self.feedback.marker_lost[request.internal_id] = cause_of(half)
                self.woken(turn)
                self.reports.failure("marker_lost", request, half, cause_of(half))
            case SenderEffect.RELEASE:
                self.state.release(request.identity)
                if self.sink is not None:
                    turn.later(self.sink.reclaim, request.identity, unread=False)
            case SenderEffect.RECLAIM_UNREAD:
                if self.sink is not None:
                    turn.later(self.sink.reclaim, request.identity, unread=True)
            case _:
                assert_never(effect)

    def _do_for_receiver(self, turn: Turn, request: Request, half: ReceiverHalf, effect: ReceiverEffect) -> None:
        match effect:
            case ReceiverEffect.REPORT_OPEN:
                self.feedback.opened[request.internal_id] = None
                self.woken(turn)
            case ReceiverEffect.GRANT_CREDIT:
                self.grant(turn, half)
            case ReceiverEffect.WAKE_SCHEDULER:
                self.feedback.ready[request.internal_id] = None
                self.woken(turn)
            case ReceiverEffect.RECORD_FAILURE:
                self.waive_credit(turn, request.identity, half)
                self.tell_host(turn, request, half, cause_of(half))
            case ReceiverEffect.REPORT_END:
                self.feedback.input_ended[request.internal_id] = None
                self.woken(turn)
            case ReceiverEffect.TELL_SENDER:
                self._tell_sender(turn, request, cause_of(half))
            case ReceiverEffect.STOP_SENDER:
                if self.source is not None:
                    turn.later(self.source.stop, request.identity, cause_of(half))
            case ReceiverEffect.RETIRE:
                self.bury(turn, request.identity, cause_of(half), half)
                self.timers.cancel(("deadline", request.identity))
            case _:
                assert_never(effect)

    # The binding of a request's two halves

    def _tell_sender(self, turn: Turn, request: Request, cause: Cause) -> None:
        """The stage's receiver left early: what its sender is told."""
        sender = request.sender
        if sender is None:
            return
        if cause.outcome is Outcome.ERROR:
            self.sender_moved(turn, request, sender.on_upstream_failed(cause))
        else:
            self.sender_moved(turn, request, sender.on_cancelled(cause))

    def _tell_receiver(self, turn: Turn, request: Request, half: SenderHalf, cause: Cause) -> None:
        """The stage's sender failed, was stopped or lost its peer: what the host and its receiver are told.

        At the front the request begins and ends: nobody upstream has to stop, its receiver fails; and that the next stage
        is done with the prompt changes nothing.
        """
        if self.config.front and cause.outcome is Outcome.DONE:
            return
        self.tell_host(turn, request, half, cause)
        receiver = request.receiver
        if receiver is None or receiver.is_final:
            return
        if self.config.front:
            self.receiver_moved(turn, request, receiver.on_request_failed(cause))
        elif cause.outcome is Outcome.DONE:
            self.receiver_moved(turn, request, receiver.on_released(cause))
        else:
            self.receiver_moved(turn, request, receiver.on_cancelled(cause))

    # Lives and their queues

    def open_life(self, turn: Turn, request: Request) -> None:
        """The request's generation becomes the owner of its external id; its queue starts to move.

        One that failed while it waited, and has a successor by now, is released.
        """
        request.view = self.state.own(Owner(request.internal_id, request.identity))
        if request.receiver is not None and request.receiver.staged:
            self.feedback.ready[request.internal_id] = None  # a runner that needs the state had to leave them
            self.woken(turn)
        self.dispatch(turn, request)
        self.release_for_successor(turn, request)

    def dispatch(self, turn: Turn, request: Request) -> None:
        """Send the head of the queue on, if nothing is in flight and it need not wait."""
        half = request.sender
        if half is None or not half.ready or self.tables.owner(request) is not request:
            return
        head = half.queue[0]
        if request.hold is head or (head.is_ok_end and self._prompt_not_known(request)):
            return
        if request.hold is not None:
            self.unhold(request)
        if not head.runs_producer:
            self.begin_put(turn, request, half)
        elif not request.scheduled:
            request.scheduled = True
            self.ready.append(request)
            turn.later(self.wakeups.produce)

    def _prompt_not_known(self, request: Request) -> bool:
        """At the front: whether ``open`` is not back yet. Until then its end waits, so that a loss is noticed here."""
        receiver = request.receiver
        return self.config.front and receiver is not None and receiver.waiting and not receiver.opened

    def prompt_lost(self, turn: Turn, request: Request, cause: Cause) -> None:
        """The next stage is lost. At the front, until ``open`` is back nobody else may know the request: it fails here.

        Also where its sender had left already, for a reason that ends nothing here (``done``).
        """
        receiver = request.receiver
        if receiver is not None and self._prompt_not_known(request):
            self.tell_host(turn, request, receiver, cause)
            self.receiver_moved(turn, request, receiver.on_request_failed(cause))

    def begin_put(self, turn: Turn, request: Request, half: SenderHalf) -> None:
        """Take a head that needs no producer and queue its frame."""
        self.reports.transition(request, half, half.on_task_begun())
        self.queue_put(turn, request, half)

    def queue_put(self, turn: Turn, request: Request, half: SenderHalf) -> None:
        """Queue the built frame in flight for the outbox."""
        task = half.in_flight
        if task is None or task.frame is None or request.put_queued:
            return
        request.put_queued = True
        (self.puts if task.frame.uses_credit else self.urgent_puts).append(request)
        turn.later(self.wakeups.put)

    def release_for_successor(self, turn: Turn, request: Request) -> None:
        """A failed life that a successor waits for is released: at once, or as soon as its marker is resolved."""
        half = request.sender
        if half is not None and half.state is SenderState.FAILED and self.tables.has_successor(request):
            cause = Cause(Outcome.CANCELLED, "released for a successor", self.clock.now_ns())
            self.sender_moved(turn, request, half.on_released(cause))

    def unhold(self, request: Request) -> None:
        """The head of the queue need not wait any longer."""
        request.hold = None
        self.timers.cancel(("hold", request.identity))

    def _sender_over(self, turn: Turn, request: Request) -> None:
        self.unhold(request)
        self.feedback.output_ended[request.internal_id] = None
        self.woken(turn)
        self._forget_if_over(request)
        if not request.producing:
            self.end_life(turn, request)

    def end_life(self, turn: Turn, request: Request) -> None:
        """The external id is free for the life that waits for it, if one does."""
        successor = self.tables.end_life(request)
        if successor is not None:
            self.open_life(turn, successor)

    def _forget_if_over(self, request: Request) -> None:
        if request.is_over and self.tables.by_internal.get(request.internal_id) is request:
            self.tables.forget(request)
            self.paused.pop(request.internal_id, None)
            for edge in self.lost:
                self.timers.cancel(("lost", edge, request.identity))
            self.feedback_came.notify_all()  # whoever waits for the stage to be idle

    def _count_backlog(self, turn: Turn, request: Request, half: SenderHalf) -> None:
        self.backlog_bytes += half.held_bytes - request.backlog
        request.backlog = half.held_bytes
        if self.backlog_bytes <= self.config.backlog_bytes // 2 and self.paused:
            self.feedback.resumed.update(dict.fromkeys(self.paused))
            self.paused.clear()
            self.woken(turn)

    # Credit, tombstones, timers

    def grant(self, turn: Turn, half: ReceiverHalf) -> None:
        """Tell the sender of a registered stream what it may put."""
        if self.source is not None and half.opened:
            turn.later(
                self.source.grant,
                half.identity,
                frames=self.config.window_frames,
                nbytes=self.config.window_bytes,
                taken_frames=half.taken_frames,
                taken_bytes=half.taken_bytes,
            )

    def waive_credit(self, turn: Turn, identity: Identity, half: ReceiverHalf | None) -> None:
        """Later frames of this stream are discarded: they need no credit."""
        if self.source is not None:
            turn.later(
                self.source.grant,
                identity,
                frames=UNLIMITED,
                nbytes=UNLIMITED,
                taken_frames=half.taken_frames if half is not None else 0,
                taken_bytes=half.taken_bytes if half is not None else 0,
            )

    def bury(self, turn: Turn, identity: Identity, cause: Cause, half: ReceiverHalf) -> None:
        """Leave a tombstone: later frames of this identity are discarded, a later registration is refused.

        Args:
            turn: The critical section.
            identity: The stream.
            cause: How it ended.
            half: The receiver that ended.
        """
        self.tables.tombstones.bury(identity, cause, self._expiry_ns(turn))
        self._leave_stream(turn, identity, half)

    def turn_away(self, turn: Turn, identity: Identity, cause: Cause) -> None:
        """Leave a tombstone for an identity that nobody registered; a later registration fails with its cause."""
        self.tables.turned_away.bury(identity, cause, self._expiry_ns(turn))
        self._leave_stream(turn, identity, None)

    def _expiry_ns(self, turn: Turn) -> int:
        if ("tombstones",) not in self.timers:
            self.set_timer(turn, ("tombstones",), self.config.tombstone_s)
        return self.clock.now_ns() + int(self.config.tombstone_s * 1e9)

    def _leave_stream(self, turn: Turn, identity: Identity, half: ReceiverHalf | None) -> None:
        self.waive_credit(turn, identity, half)
        if self.source is not None:
            turn.later(self.source.reclaim, identity, unread=True)

    def set_timer(self, turn: Turn, key: tuple[Any, ...], after_s: float) -> None:
        """Set or move a timer."""
        before_ns = self.timers.next_due_ns()
        due_ns = self.clock.now_ns() + int(after_s * 1e9)
        self.timers.set(key, due_ns)
        if before_ns is None or due_ns < before_ns:
            turn.later(self.wakeups.tick)

    def await_peer(self, turn: Turn, edge: str, request: Request) -> None:
        """A half opens or waits on a lost edge: its peer has ``reconnect_s`` to come back, from the first loss on."""
        key = ("lost", edge, request.identity)
        if key not in self.timers:
            self.set_timer(turn, key, self.config.reconnect_s)

    def peer_back(self, edge: str) -> None:
        """The edge has a peer: nobody waits for one any longer."""
        self.lost.pop(edge, None)
        for request in self.tables.by_internal.values():
            self.timers.cancel(("lost", edge, request.identity))

    # Telling

    def tell_host(self, turn: Turn, request: Request, half: SenderHalf | ReceiverHalf, cause: Cause) -> None:
        """Record, once per request and under its internal id, why it ends early; a host that ended it itself knows."""
        if not request.reported:
            request.reported = True
            self.reports.failure("failed", request, half, cause)
        if not request.host_knows:
            request.host_knows = True
            self.feedback.ready.pop(request.internal_id, None)
            self.feedback.failed[request.internal_id] = cause
            self.woken(turn)

    def woken(self, turn: Turn) -> None:
        """There is feedback to collect."""
        self.feedback_came.notify_all()
        turn.later(self.host.feedback_ready)


def cause_of(half: SenderHalf | ReceiverHalf) -> Cause:
    """The cause of a half that leaves; there is one whenever an effect asks for it."""
    return half.cause or Cause(Outcome.OK)
