"""The sending half: a FIFO of tasks, at most one in flight, and an end that always goes out."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from omni_fsm.protocol.frames import Body, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.half import Half, Moved
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import SenderBookkeeping, SenderEffect, SenderEvent, SenderState
from omni_fsm.protocol.table import Table

DEFAULT_RETRIES = 3

SenderMoved = Moved[SenderState, SenderEvent, SenderEffect]
SenderTable = Table[SenderState, SenderEvent, SenderBookkeeping, SenderEffect]


class TaskKind(StrEnum):
    """What a task becomes on the wire."""

    OPEN = "open"
    CHUNK = "chunk"
    SEGMENT_END = "segment_end"
    END = "end"


_IS_DATA = frozenset({TaskKind.CHUNK, TaskKind.SEGMENT_END})
_FRAME_KIND = {
    TaskKind.OPEN: FrameKind.OPEN,
    TaskKind.CHUNK: FrameKind.DATA,
    TaskKind.SEGMENT_END: FrameKind.DATA,
    TaskKind.END: FrameKind.END,
}


@dataclass(frozen=True, slots=True)
class SendTask:
    """One thing to send, in its place in the queue.

    Attributes:
        kind: What it becomes.
        cause: Of an end: how the stream ended.
        attempts: Puts that failed so far. Each end has a budget of its own.
        frame: The built frame, kept over retries; None until it is built.
        item: What the runner submitted, for the producer. Given away by the runner; no part of the value.
        nbytes: Size of ``item`` in bytes, as it counts against the stage's backlog.
    """

    kind: TaskKind
    cause: Cause | None = None
    attempts: int = 0
    frame: Frame | None = field(default=None, compare=False)
    item: Any = field(default=None, compare=False)
    nbytes: int = field(default=0, compare=False)

    @property
    def is_ok_end(self) -> bool:
        """Whether it is an ``end(ok)``."""
        return self.cause is not None and self.cause.outcome is Outcome.OK

    @property
    def runs_producer(self) -> bool:
        """Whether its frame is still to be made by the producer: chunks, and an end that is still ``ok``."""
        return self.frame is None and (self.kind in _IS_DATA or self.is_ok_end)

    @property
    def value(self) -> Hashable:
        """The part that decides how the half behaves."""
        return (self.kind, self.cause, self.attempts, self.frame is not None)


class SenderHalf(Half[SenderState, SenderEvent, SenderBookkeeping, SenderEffect]):
    """The sender of one life. Its queue begins with the ``open`` frame.

    Attributes:
        queue: Tasks in order, the one in flight not among them.
        in_flight: The task that a worker or the outbox has now.
        next_seq: The seq of the next frame that carries one.
        segment: The segment that frames built now belong to.
        queued_bytes: Bytes of what is in the queue.
        dropped: Whether an accepted chunk was dropped: an ``end(ok)`` would be a lie.
        release_noted: Whether the runner has let go while the end was still owed.
        marker_settled: In failed: whether the end is out or given up.
        cause: The first cause, once there is one.

    Source: PROTOCOL "Sender"; specs/sender.toml.
    """

    def __init__(self, table: SenderTable, edge: Edge, identity: Identity, retries: int = DEFAULT_RETRIES) -> None:
        super().__init__(table, edge, identity)
        self.retries = retries
        self.queue: deque[SendTask] = deque([SendTask(TaskKind.OPEN)])
        self.in_flight: SendTask | None = None
        self.next_seq = 0
        self.segment = 0
        self.queued_bytes = 0
        self.dropped = False
        self.release_noted = False
        self.marker_settled = False
        self.cause: Cause | None = None
        self._given: SendTask | None = None  # what the bookkeeping of the move under way queues or keeps

    def key(self) -> Hashable:
        """See `Half.key`."""
        return (
            self.edge,
            self.identity,
            self.state,
            tuple(task.value for task in self.queue),
            self.in_flight and self.in_flight.value,
            self.next_seq,
            self.segment,
            self.dropped,
            self.release_noted,
            self.marker_settled,
            self.cause,
        )

    def copy(self) -> Self:
        """See `Half.copy`."""
        twin = super().copy()
        twin.queue = self.queue.copy()
        return twin

    def _move_with(self, event: SenderEvent, given: SendTask) -> SenderMoved:
        self._given = given
        try:
            return self._move(event)
        finally:
            self._given = None

    # What the runner says

    def submit_chunk(self, item: Any, nbytes: int = 0, *, segment_end: bool = False) -> SenderMoved:
        """The runner offers a chunk. Ignored, which is a refusal with a reason, after a cancel or a failure.

        Raises:
            LocalProtocolError: The runner has ended the stream itself.
        """
        kind = TaskKind.SEGMENT_END if segment_end else TaskKind.CHUNK
        event = SenderEvent.SEGMENT_END_SUBMITTED if segment_end else SenderEvent.CHUNK_SUBMITTED
        return self._move_with(event, SendTask(kind, item=item, nbytes=nbytes))

    def submit_end(self, at_ns: int, item: Any = None, nbytes: int = 0) -> SenderMoved:
        """The runner says that the stream is complete; ``item`` goes to the producer's last call."""
        end = SendTask(TaskKind.END, cause=Cause(Outcome.OK, at_ns=at_ns), item=item, nbytes=nbytes)
        return self._move_with(SenderEvent.END_SUBMITTED, end)

    def on_cancelled(self, cause: Cause) -> SenderMoved:
        """The runner cancels, or the stage's own receiver was cancelled."""
        return self._leave(SenderEvent.CANCELLED, cause)

    def on_released(self, cause: Cause) -> SenderMoved:
        """The runner lets go, or a successor waits for the external id."""
        return self._leave(SenderEvent.RELEASED, cause)

    def on_closed(self, cause: Cause) -> SenderMoved:
        """The stage shuts down."""
        return self._leave(SenderEvent.CLOSED, cause)

    def on_host_failed(self, cause: Cause) -> SenderMoved:
        """The runner says that the request failed."""
        return self._end_by(SenderEvent.HOST_FAILED, cause)

    # What the stage and the peer say

    def on_upstream_failed(self, cause: Cause) -> SenderMoved:
        """The stage's own receiver failed."""
        return self._end_by(SenderEvent.UPSTREAM_FAILED, cause)

    def on_receiver_stopped(self, cause: Cause) -> SenderMoved:
        """The receiver wants no more."""
        return self._end_by(SenderEvent.RECEIVER_STOPPED, cause)

    def on_peer_lost(self, cause: Cause) -> SenderMoved:
        """The receiver's process is gone."""
        return self._end_by(SenderEvent.PEER_LOST, cause)

    # What becomes of a task

    @property
    def held_bytes(self) -> int:
        """Bytes that this life holds in the stage: what is queued, and what is in flight."""
        return self.queued_bytes + (self.in_flight.nbytes if self.in_flight is not None else 0)

    @property
    def announced(self) -> bool:
        """Whether the ``open`` frame was put: the peer's process has heard of this life."""
        head = self.in_flight or (self.queue[0] if self.queue else None)
        return head is None or head.kind is not TaskKind.OPEN

    @property
    def ready(self) -> bool:
        """Whether a worker may take the head of the queue."""
        return bool(self.queue) and self.in_flight is None

    def on_task_begun(self) -> SenderMoved:
        """A worker takes the head; if it needs no producer its frame is built at once.

        Raises:
            LocalProtocolError: A task is in flight already, or none is queued.
        """
        if not self.ready and not self.is_final:
            raise self._misused(
                SenderEvent.TASK_BEGUN, "a task is in flight" if self.in_flight else "the queue is empty"
            )
        moved = self._move(SenderEvent.TASK_BEGUN)
        task = self.in_flight
        if task is not None and task.frame is None and not task.runs_producer:
            self.in_flight = replace(task, frame=self._frame_of(task, None))
        return moved

    def on_produced(self, body: Body | None) -> SenderMoved:
        """The producer returned; without a body only an end and a segment's end make a frame."""
        task = self._flying(SenderEvent.FRAME_BUILT, built=False)
        if task is None:
            return self._move(SenderEvent.FRAME_BUILT)
        if body is None and task.kind is TaskKind.CHUNK:
            return self._move(SenderEvent.CHUNK_BUFFERED)
        built = replace(task, frame=self._frame_of(task, body), item=None, nbytes=body.nbytes if body else 0)
        return self._move_with(SenderEvent.FRAME_BUILT, built)

    def on_producer_raised(self, cause: Cause) -> SenderMoved:
        """The producer raised; ``cause`` carries its own words."""
        task = self._flying(SenderEvent.PRODUCER_RAISED, built=False)
        is_end = task is not None and task.kind is TaskKind.END
        return self._end_by(SenderEvent.END_PRODUCER_RAISED if is_end else SenderEvent.PRODUCER_RAISED, cause)

    def on_stored(self) -> SenderMoved:
        """The connector stored the frame in flight."""
        task = self._flying(SenderEvent.DATA_PUT)
        if task is None:
            return self._move(SenderEvent.DATA_PUT)
        match task.kind:
            case TaskKind.OPEN:
                return self._move(SenderEvent.OPEN_PUT)
            case TaskKind.CHUNK:
                return self._move(SenderEvent.DATA_PUT)
            case TaskKind.SEGMENT_END:
                return self._move(SenderEvent.SEGMENT_END_PUT)
            case TaskKind.END:
                return self._move(SenderEvent.END_PUT_AFTER_RELEASE if self.release_noted else SenderEvent.END_PUT)

    def on_busy(self, frame: Frame) -> SenderMoved:
        """The connector had no credit or no room: back to the head, no attempt is counted.

        Args:
            frame: The same frame, its body in memory of its own: it waits while the producer reuses its buffers.
        """
        self._keep_waiting(SenderEvent.PUT_DEFERRED, frame)
        return self._move(SenderEvent.PUT_ABANDONED if self._is_moot() else SenderEvent.PUT_DEFERRED)

    def on_put_failed(self, cause: Cause, frame: Frame) -> SenderMoved:
        """A put failed for now, or raised: back to the head, until the budget is used up. See `on_busy`."""
        self._keep_waiting(SenderEvent.PUT_RETRIED, frame)
        if self._is_moot():
            return self._move(SenderEvent.PUT_ABANDONED)
        if self.in_flight is not None and self.in_flight.attempts >= self.retries:
            return self.on_given_up(cause)
        return self._move(SenderEvent.PUT_RETRIED)

    def on_given_up(self, cause: Cause) -> SenderMoved:
        """The frame in flight will not be put: budget used up, refused, or busy for too long."""
        task = self._flying(SenderEvent.DATA_GIVEN_UP)
        if task is None or task.kind is not TaskKind.END:
            return self._end_by(SenderEvent.DATA_GIVEN_UP, cause)
        if task.is_ok_end:
            return self._end_by(SenderEvent.OK_END_GIVEN_UP, cause)
        late = self.release_noted
        return self._move(SenderEvent.END_GIVEN_UP_AFTER_RELEASE if late else SenderEvent.END_GIVEN_UP)

    # Classifying

    def _flying(self, event: SenderEvent, *, built: bool = True) -> SendTask | None:
        """The task that a completion is about; None in finalized, where a late completion changes nothing.

        Raises:
            LocalProtocolError: No task is in flight, or its frame is (not yet) built.
        """
        task = self.in_flight
        if self.is_final:
            return None
        if task is None:
            raise self._misused(event, "no task is in flight")
        if built is not (task.frame is not None):
            raise self._misused(event, "its frame is not built" if built else "its frame is built already")
        return task

    def _keep_waiting(self, event: SenderEvent, frame: Frame) -> None:
        task = self._flying(event)
        if task is not None:
            self.in_flight = replace(task, frame=frame)

    def _leave(self, event: SenderEvent, cause: Cause) -> SenderMoved:
        return self._end_by(SenderEvent.RELEASED_AFTER_END if self.marker_settled else event, cause)

    def _end_by(self, event: SenderEvent, cause: Cause) -> SenderMoved:
        """Move by an event that carries a cause; the first that changes the state of a life is kept."""
        cell = self.table.cells.get((self.state, event))
        if self.cause is None and cell is not None and cell.next is not self.state:
            self.cause = cause
        return self._move(event)

    def _is_moot(self) -> bool:
        """Whether the task in flight is data that a failed end waits behind."""
        task = self.in_flight
        return (
            task is not None
            and task.kind in _IS_DATA
            and any(waiting.kind is TaskKind.END and not waiting.is_ok_end for waiting in self.queue)
        )

    # Bookkeeping

    def _frame_of(self, task: SendTask, body: Body | None) -> Frame:
        carries_seq = task.kind in _IS_DATA or task.is_ok_end
        return Frame(
            edge=self.edge,
            identity=self.identity,
            kind=_FRAME_KIND[task.kind],
            segment=self.segment,
            seq=self.next_seq if carries_seq else -1,
            segment_end=task.kind is TaskKind.SEGMENT_END,
            cause=task.cause,
            body=body,
        )

    def _ended(self, outcome: Outcome) -> Cause:
        """The cause of an end that is queued now: the first cause, under this outcome."""
        return replace(self.cause, outcome=outcome) if self.cause else Cause(outcome)

    def _queue_end(self, outcome: Outcome) -> None:
        self.queue.append(SendTask(TaskKind.END, cause=self._ended(outcome)))

    def _queue_end_cancelled(self) -> None:
        self._queue_end(Outcome.CANCELLED)

    def _replace_end(self, outcome: Outcome) -> None:
        self.queue = deque(task for task in self.queue if task.kind is not TaskKind.END)
        self.queued_bytes = sum(task.nbytes for task in self.queue)
        self._queue_end(outcome)

    def _queue_end_error(self) -> None:
        ends = [task for task in (self.in_flight, *self.queue) if task is not None and task.kind is TaskKind.END]
        if any(end is self.in_flight or end.attempts for end in ends):
            return  # it may have been stored: that end decides, until it is given up
        self._replace_end(Outcome.ERROR)

    def _empty_end(self, outcome: Outcome) -> None:
        emptied = SendTask(TaskKind.END, cause=self._ended(outcome))
        self.in_flight = replace(emptied, frame=self._frame_of(emptied, None))

    def _empty_end_as_error(self) -> None:
        self._empty_end(Outcome.ERROR)

    def _empty_end_as_cancelled(self) -> None:
        self._empty_end(Outcome.CANCELLED)

    def _cancel_end_if_dropped(self) -> None:
        if self.dropped and any(task.is_ok_end for task in self.queue):
            self._replace_end(Outcome.CANCELLED)

    def _drop_chunks(self) -> None:
        kept = deque(task for task in self.queue if task.kind not in _IS_DATA)
        self.dropped = self.dropped or len(kept) < len(self.queue)
        self.queue = kept
        self.queued_bytes = sum(task.nbytes for task in kept)

    def _drop_in_flight(self) -> None:
        self.dropped = self.dropped or (self.in_flight is not None and self.in_flight.kind in _IS_DATA)
        self.in_flight = None

    def _drop_all(self) -> None:
        self.queue.clear()
        self.queued_bytes = 0
        self.in_flight = None

    def _take_head(self) -> None:
        self.in_flight = self.queue.popleft()
        self.queued_bytes -= self.in_flight.nbytes

    def _keep_frame(self) -> None:
        self.in_flight = self._given

    def _clear_in_flight(self) -> None:
        self.in_flight = None

    def _requeue_at_head(self) -> None:
        if self.in_flight is not None:
            self.queue.appendleft(self.in_flight)
            self.queued_bytes += self.in_flight.nbytes
        self.in_flight = None

    def _count_attempt(self) -> None:
        if self.in_flight is not None:
            self.in_flight = replace(self.in_flight, attempts=self.in_flight.attempts + 1)

    def _advance_seq(self) -> None:
        frame = self.in_flight.frame if self.in_flight else None
        if frame is not None and frame.seq >= 0:
            self.next_seq = frame.seq + 1

    def _queue_given(self) -> None:
        if self._given is not None:
            self.queue.append(self._given)
            self.queued_bytes += self._given.nbytes

    def _next_segment(self) -> None:
        self.segment += 1

    def _note_release(self) -> None:
        self.release_noted = True

    def _settle_marker(self) -> None:
        self.marker_settled = True

    _DO: ClassVar[Mapping[Any, Callable[[Any], None]]] = {
        SenderBookkeeping.QUEUE_CHUNK: _queue_given,
        SenderBookkeeping.QUEUE_SEGMENT_END: _queue_given,
        SenderBookkeeping.QUEUE_END: _queue_given,
        SenderBookkeeping.QUEUE_END_CANCELLED: _queue_end_cancelled,
        SenderBookkeeping.QUEUE_END_ERROR: _queue_end_error,
        SenderBookkeeping.EMPTY_END_AS_ERROR: _empty_end_as_error,
        SenderBookkeeping.EMPTY_END_AS_CANCELLED: _empty_end_as_cancelled,
        SenderBookkeeping.CANCEL_END_IF_DROPPED: _cancel_end_if_dropped,
        SenderBookkeeping.DROP_CHUNKS: _drop_chunks,
        SenderBookkeeping.DROP_IN_FLIGHT: _drop_in_flight,
        SenderBookkeeping.DROP_ALL: _drop_all,
        SenderBookkeeping.TAKE_HEAD: _take_head,
        SenderBookkeeping.KEEP_FRAME: _keep_frame,
        SenderBookkeeping.CLEAR_IN_FLIGHT: _clear_in_flight,
        SenderBookkeeping.REQUEUE_AT_HEAD: _requeue_at_head,
        SenderBookkeeping.COUNT_ATTEMPT: _count_attempt,
        SenderBookkeeping.ADVANCE_SEQ: _advance_seq,
        SenderBookkeeping.NEXT_SEGMENT: _next_segment,
        SenderBookkeeping.NOTE_RELEASE: _note_release,
        SenderBookkeeping.SETTLE_MARKER: _settle_marker,
    }
