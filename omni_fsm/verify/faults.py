"""The fault catalogue: real kinds of fault, each put back as a small mutation that an exploration must find."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from omni_fsm.protocol.names import (
    ReceiverBookkeeping,
    ReceiverEvent,
    ReceiverState,
    SenderBookkeeping,
    SenderEffect,
    SenderEvent,
    SenderState,
)
from omni_fsm.protocol.receiver import ReceiverTable
from omni_fsm.protocol.sender import SenderHalf, SenderTable, SendTask, TaskKind
from omni_fsm.protocol.table import Cell, Table
from omni_fsm.tables import receiver_table, sender_table
from omni_fsm.verify.world import Scope

AnyTable = TypeVar("AnyTable", SenderTable, ReceiverTable)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: As ``omni-fsm explore --fault`` takes it.
        what: What it is.
        scope: Gives the scope in which it shows.
    """

    name: str
    what: str
    scope: Callable[[], Scope]


def _sender(
    state: SenderState, event: SenderEvent, cell: Cell[SenderState, SenderBookkeeping, SenderEffect]
) -> SenderTable:
    table = sender_table()
    return Table(table.machine, table.initial, table.final, {**table.cells, (state, event): cell})


def _sender_without(state: SenderState, event: SenderEvent, dropped: SenderBookkeeping | SenderEffect) -> SenderTable:
    cell = sender_table().cells[state, event]
    kept = replace(
        cell,
        bookkeeping=tuple(task for task in cell.bookkeeping if task is not dropped),
        effects=tuple(effect for effect in cell.effects if effect is not dropped),
    )
    if kept == cell:
        raise AssertionError((state, event, dropped))
    return _sender(state, event, kept)


def _late_get_publishes() -> ReceiverTable:
    table = receiver_table()
    cell = replace(
        table.cells[ReceiverState.CANCELLED_CURRENT, ReceiverEvent.DATA_ARRIVED],
        bookkeeping=(ReceiverBookkeeping.END_GET, ReceiverBookkeeping.STAGE_FRAME),
    )
    return Table(
        table.machine,
        table.initial,
        table.final,
        {**table.cells, (ReceiverState.CANCELLED_CURRENT, ReceiverEvent.DATA_ARRIVED): cell},
    )


class _RetryGoesToTheTail(SenderHalf):
    def _requeue_at_head(self) -> None:
        if self.in_flight is not None:
            self.queue.append(self.in_flight)
        self.in_flight = None


class _RetryRunsTheProducerAgain(SenderHalf):
    def _requeue_at_head(self) -> None:
        if self.in_flight is not None:
            again = self.in_flight
            if again.kind is TaskKind.CHUNK and again.frame is not None:
                again = replace(again, frame=None, item=getattr(again.frame.body, "bits", None))
            self.queue.appendleft(again)
        self.in_flight = None


class _EndLosesTheTail(SenderHalf):
    def _keep_frame(self) -> None:
        given = self._given
        if given is not None and given.kind is TaskKind.END and given.frame is not None:
            given = replace(given, frame=replace(given.frame, body=None))
        self.in_flight = given


class _EndOvertakesTheChunks(SenderHalf):
    def _queue_given(self) -> None:
        if self._given is None:
            return
        if self._given.kind is TaskKind.END:
            head: deque[SendTask] = deque(task for task in self.queue if task.kind is TaskKind.OPEN)
            rest = [task for task in self.queue if task.kind is not TaskKind.OPEN]
            self.queue = deque([*head, self._given, *rest])
        else:
            self.queue.append(self._given)


def _half(faulty: type[SenderHalf]) -> type[SenderHalf]:
    """The class with its own bookkeeping in the table of what is done."""
    changed = {name: method for name, method in vars(faulty).items() if name.startswith("_") and callable(method)}
    faulty._DO = {  # noqa: SLF001 - a fault is put into the half itself
        task: changed.get(getattr(method, "__name__", ""), method)
        for task, method in SenderHalf._DO.items()  # noqa: SLF001
    }
    return faulty


FAULTS: tuple[Fault, ...] = (
    Fault(
        "cancel_drops_the_end",
        "a cancel drops the end that it owes",
        lambda: Scope(
            sender=_sender_without(SenderState.ACTIVE, SenderEvent.CANCELLED, SenderBookkeeping.QUEUE_END_CANCELLED)
        ),
    ),
    Fault(
        "failed_end_skips_the_cleanup",
        "a failed end that was put skips the deferred cleanup",
        lambda: Scope(
            sender=_sender_without(SenderState.FAILED, SenderEvent.END_PUT_AFTER_RELEASE, SenderEffect.RELEASE)
        ),
    ),
    Fault(
        "raise_on_the_end_puts_no_marker",
        "a producer's exception on the end puts no marker",
        lambda: Scope(
            sender=_sender(
                SenderState.TERMINAL_PENDING,
                SenderEvent.END_PRODUCER_RAISED,
                Cell(SenderState.FAILED, (SenderBookkeeping.CLEAR_IN_FLIGHT,), (SenderEffect.RECORD_FAILURE,)),
            )
        ),
    ),
    Fault(
        "failure_queues_no_end",
        "a producer's exception on a chunk puts no marker",
        lambda: Scope(
            sender=_sender_without(SenderState.ACTIVE, SenderEvent.PRODUCER_RAISED, SenderBookkeeping.QUEUE_END_ERROR)
        ),
    ),
    Fault(
        "retry_goes_to_the_tail",
        "a put that failed for now goes to the tail of the queue",
        lambda: Scope(chunks=2, half=_half(_RetryGoesToTheTail)),
    ),
    Fault(
        "retry_runs_the_producer_again",
        "a retry runs the producer again",
        lambda: Scope(half=_half(_RetryRunsTheProducerAgain)),
    ),
    Fault(
        "frame_after_the_end",
        "the end overtakes the chunks that were accepted before it",
        lambda: Scope(half=_half(_EndOvertakesTheChunks)),
    ),
    Fault(
        "end_loses_the_tail",
        "an end goes out without what its producer flushed",
        lambda: Scope(half=_half(_EndLosesTheTail)),
    ),
    Fault(
        "ok_end_after_dropped_chunks",
        "a cancel drops chunks, and the end stays ok",
        lambda: Scope(
            sender=_sender_without(
                SenderState.TERMINAL_PENDING, SenderEvent.CANCELLED, SenderBookkeeping.CANCEL_END_IF_DROPPED
            )
        ),
    ),
    Fault(
        "burned_seq_is_used_again",
        "a put chunk does not use up its seq",
        lambda: Scope(
            chunks=2, sender=_sender_without(SenderState.ACTIVE, SenderEvent.DATA_PUT, SenderBookkeeping.ADVANCE_SEQ)
        ),
    ),
    Fault(
        "late_get_publishes",
        "a get that returns after the cleanup publishes its frame",
        lambda: Scope(receiver=_late_get_publishes()),
    ),
    Fault(
        "registers_again_after_the_end",
        "a late frame registers a stream that has ended",
        lambda: Scope(bugs=frozenset({"registers_again"})),
    ),
    Fault(
        "failed_put_taken_for_success",
        "a put that reports failure is taken for success",
        lambda: Scope(bugs=frozenset({"failed_put_taken_for_success"})),
    ),
    Fault(
        "cleanup_is_done_twice",
        "a failed life is released while its marker is still owed",
        lambda: Scope(
            sender=_sender(
                SenderState.FAILED,
                SenderEvent.RELEASED,
                Cell(SenderState.FAILED, (SenderBookkeeping.NOTE_RELEASE,), (SenderEffect.RELEASE,)),
            )
        ),
    ),
)
