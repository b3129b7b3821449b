"""The receiving half: frames in order, each once, and an end or a failure that always comes."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.half import Half, Moved
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import ReceiverBookkeeping, ReceiverEffect, ReceiverEvent, ReceiverState
from omni_fsm.protocol.table import Table

ReceiverMoved = Moved[ReceiverState, ReceiverEvent, ReceiverEffect]
ReceiverTable = Table[ReceiverState, ReceiverEvent, ReceiverBookkeeping, ReceiverEffect]

DEFAULT_GET_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Staged:
    """A frame that waits for the scheduler.

    Attributes:
        seq: Its seq.
        segment: Its segment.
        segment_end: Whether it is the last of its segment.
        is_end: Whether it is the ``end(ok)``; its payload, if any, is the producer's flushed tail.
        payload: The decoded payload; owned by the half until consumed. No part of the value.
        nbytes: Size of its body in bytes, as it counts against the stream's credit.
    """

    seq: int
    segment: int = 0
    segment_end: bool = False
    is_end: bool = False
    payload: Any = field(default=None, compare=False)
    nbytes: int = field(default=0, compare=False)


class ReceiverHalf(Half[ReceiverState, ReceiverEvent, ReceiverBookkeeping, ReceiverEffect]):
    """The receiver of one registration. It is handed only frames of its own identity.

    Attributes:
        staged: Frames that came and are not consumed, in order.
        next_seq: The seq that comes next.
        getting: Whether the inbox fetches a body for it now.
        attempts: Gets of the body under way that failed.
        opened: Whether the sender announced itself: the stage before knows the request.
        taken_frames: Frames that the stage has taken or dropped since the beginning.
        taken_bytes: Their bytes.
        cause: How it ended, first cause; set also by ``end(ok)``.

    Source: PROTOCOL "Receiver"; specs/receiver.toml.
    """

    def __init__(
        self, table: ReceiverTable, edge: Edge, identity: Identity, retries: int = DEFAULT_GET_RETRIES
    ) -> None:
        super().__init__(table, edge, identity)
        self.retries = retries
        self.staged: deque[Staged] = deque()
        self.next_seq = 0
        self.getting = False
        self.attempts = 0
        self.opened = False
        self.taken_frames = 0
        self.taken_bytes = 0
        self.cause: Cause | None = None
        self._given: Staged | None = None  # what the bookkeeping of the move under way stages

    def key(self) -> Hashable:
        """See `Half.key`."""
        return (
            self.edge,
            self.identity,
            self.state,
            tuple(self.staged),
            self.next_seq,
            self.getting,
            self.attempts,
            self.opened,
            self.taken_frames,
            self.cause,
        )

    def copy(self) -> Self:
        """See `Half.copy`."""
        twin = super().copy()
        twin.staged = self.staged.copy()
        return twin

    @property
    def waiting(self) -> bool:
        """Whether the stall clock runs: nothing staged, nothing under way, and more is to come."""
        return self.accepts(ReceiverEvent.DEADLINE_PASSED) and not self.staged and not self.getting

    @property
    def wants_body(self) -> bool:
        """Whether the inbox should fetch the body of a frame, or discard it."""
        return self.accepts(ReceiverEvent.GET_BEGUN)

    # What the inbox says

    def on_get_begun(self) -> ReceiverMoved:
        """The inbox fetches the body of a frame of this stream, outside every lock."""
        return self._move(ReceiverEvent.GET_BEGUN)

    def on_get_failed(self, cause: Cause) -> ReceiverMoved:
        """Fetching failed for now; ``get_given_up`` when the budget is used up."""
        if self.attempts < self.retries:
            return self._move(ReceiverEvent.GET_RETRIED)
        return self._end_by(ReceiverEvent.GET_GIVEN_UP, cause)

    def on_frame(self, frame: Frame, payload: Any = None, nbytes: int = 0, at_ns: int = 0) -> ReceiverMoved:
        """A frame of this stream came out of the connector, whatever its order or age.

        Args:
            frame: Its header.
            payload: Its decoded body; the half owns it until it is consumed.
            nbytes: Size of the body in bytes.
            at_ns: CLOCK_MONOTONIC in nanoseconds, for the cause of a failure that arises here.
        """
        event, cause = self._classify(frame, at_ns)
        self._given = Staged(frame.seq, frame.segment, frame.segment_end, frame.kind is FrameKind.END, payload, nbytes)
        try:
            return self._move(event) if cause is None else self._end_by(event, cause)
        finally:
            self._given = None

    def _classify(self, frame: Frame, at_ns: int) -> tuple[ReceiverEvent, Cause | None]:
        """The event that a frame is, and the cause that it brings if it ends the stream."""
        if frame.kind is FrameKind.OPEN:
            return (ReceiverEvent.OPEN_REPEATED if self.opened else ReceiverEvent.OPEN_ARRIVED), None
        ended = frame.cause if frame.kind is FrameKind.END else None
        if frame.kind is FrameKind.END and (ended is None or ended.outcome is Outcome.DONE):
            invalid = Cause(Outcome.ERROR, f"frame_invalid: an end with outcome {ended}", at_ns)
            return ReceiverEvent.FRAME_INVALID, invalid
        if ended is not None and ended.outcome is not Outcome.OK:
            return ReceiverEvent.FAILED_END_ARRIVED, ended  # whatever its seq: a burned one may be missing before it
        if frame.seq < self.next_seq:
            return ReceiverEvent.FRAME_REPEATED, None
        if frame.seq > self.next_seq:
            ahead = f"frame_ahead: seq {frame.seq} came, {self.next_seq} was expected"
            return ReceiverEvent.FRAME_AHEAD, Cause(Outcome.ERROR, ahead, at_ns)
        return (ReceiverEvent.DATA_ARRIVED if ended is None else ReceiverEvent.OK_END_ARRIVED), ended

    def on_frame_invalid(self, cause: Cause) -> ReceiverMoved:
        """A frame of this stream cannot be accepted: its body or header is not what it says."""
        return self._end_by(ReceiverEvent.FRAME_INVALID, cause)

    # What the clock, the stage and the peer say

    def on_deadline(self, cause: Cause) -> ReceiverMoved:
        """It waited for the whole stall time."""
        return self._end_by(ReceiverEvent.DEADLINE_PASSED, cause)

    def on_peer_lost(self, cause: Cause) -> ReceiverMoved:
        """The sender's process is gone, and all that it had sent was handed in."""
        return self._end_by(ReceiverEvent.PEER_LOST, cause)

    def on_request_failed(self, cause: Cause) -> ReceiverMoved:
        """At the front: the request's own sender was stopped or lost its receiver."""
        return self._end_by(ReceiverEvent.REQUEST_FAILED, cause)

    def on_unclaimed(self, cause: Cause) -> ReceiverMoved:
        """It is registered after its frames were dropped unclaimed."""
        return self._end_by(ReceiverEvent.UNCLAIMED, cause)

    # What the scheduler and the runner say

    def on_consumed(self) -> tuple[Staged | None, ReceiverMoved]:
        """The scheduler takes what is staged first; in failed nothing is, and it is given the failure.

        Returns:
            The frame, or None, and the transition.

        Raises:
            LocalProtocolError: Nothing is staged, and nothing failed.
        """
        if not self.staged:
            return None, self._move(ReceiverEvent.FAILURE_CONSUMED)
        head = self.staged[0]
        return head, self._move(ReceiverEvent.END_CONSUMED if head.is_end else ReceiverEvent.CONSUMED)

    def on_cancelled(self, cause: Cause) -> ReceiverMoved:
        """The runner cancels, or the stage's own sender failed or was stopped."""
        return self._end_by(ReceiverEvent.CANCELLED_IN_GET if self.getting else ReceiverEvent.CANCELLED, cause)

    def on_released(self, cause: Cause) -> ReceiverMoved:
        """The runner has had enough."""
        return self._end_by(ReceiverEvent.RELEASED_IN_GET if self.getting else ReceiverEvent.RELEASED, cause)

    def _end_by(self, event: ReceiverEvent, cause: Cause) -> ReceiverMoved:
        """Move by an event that carries a cause; the first that ends a life is kept."""
        cell = self.table.cells.get((self.state, event))
        first = self.cause is None or self.cause.outcome is Outcome.OK
        if first and cell is not None and cell.next is not self.state:
            self.cause = cause
        return self._move(event)

    # Bookkeeping

    def _take_staged(self) -> None:
        if self.staged:
            self._count_taken(self.staged.popleft())

    def _drop_staged(self) -> None:
        while self.staged:
            self._count_taken(self.staged.popleft())

    def _count_taken(self, staged: Staged) -> None:
        self.taken_frames += 1
        self.taken_bytes += staged.nbytes

    def _stage_frame(self) -> None:
        if self._given is not None:
            self.staged.append(self._given)

    def _advance_seq(self) -> None:
        self.next_seq += 1

    def _begin_get(self) -> None:
        self.getting, self.attempts = True, 0

    def _end_get(self) -> None:
        self.getting = False

    def _count_attempt(self) -> None:
        self.attempts += 1

    def _note_open(self) -> None:
        self.opened = True

    _DO: ClassVar[Mapping[Any, Callable[[Any], None]]] = {
        ReceiverBookkeeping.NOTE_OPEN: _note_open,
        ReceiverBookkeeping.BEGIN_GET: _begin_get,
        ReceiverBookkeeping.END_GET: _end_get,
        ReceiverBookkeeping.COUNT_ATTEMPT: _count_attempt,
        ReceiverBookkeeping.STAGE_FRAME: _stage_frame,
        ReceiverBookkeeping.ADVANCE_SEQ: _advance_seq,
        ReceiverBookkeeping.TAKE_STAGED: _take_staged,
        ReceiverBookkeeping.DROP_STAGED: _drop_staged,
    }
