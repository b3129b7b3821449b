"""The fault catalogue: real kinds of fault, each put back as a small mutation that an exploration must find."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest import mock

from omni_fsm.connectors.ledger import CreditLedger
from omni_fsm.protocol.frames import Cause
from omni_fsm.protocol.identity import Identity
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
from omni_fsm.runtime import ProducerContext, intake
from omni_fsm.runtime.core import StageCore, Turn
from omni_fsm.runtime.inbox import Inbox
from omni_fsm.runtime.outbox import Outbox
from omni_fsm.runtime.requests import Request
from omni_fsm.state import StateRetiredError, StateStore
from omni_fsm.state.store import Owner, _Namespace, _Namespaces
from omni_fsm.tables import receiver_table, sender_table
from omni_fsm.verify.explore import Found, explore
from omni_fsm.verify.pipeline import PipelineScope, line, ring
from omni_fsm.verify.world import Scope

AnyTable = TypeVar("AnyTable", SenderTable, ReceiverTable)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: As ``omni-fsm explore --fault`` takes it.
        what: What it is.
        scope: Gives the scope in which it shows.
        patch: Where the fault is one of the runtime or the state store: the owner, the name and the faulty thing itself.
    """

    name: str
    what: str
    scope: Callable[[], Scope | PipelineScope]
    patch: tuple[object, str, object] | None = None

    def find(self, limit: int) -> Found:
        """Put the fault in, and explore."""
        with mock.patch.object(*self.patch) if self.patch is not None else nullcontext():
            return explore(self.scope().world(), limit)


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


class _SegmentRestartsTheCount(SenderHalf):
    def _next_segment(self) -> None:
        self.segment += 1
        self.next_seq = 0


# Faults of the runtime and of the state store


class _FencedView:
    """A view of producer state that asks whether the request is cancelled, not who owns it."""

    def __init__(self, half: SenderHalf, view: Any) -> None:
        self.half, self.view = half, view

    def get_or_create(self, namespace: str, factory: Callable[[], Any], *scope: Any) -> Any:
        if self.half.state is SenderState.CANCELLED_CURRENT:
            raise StateRetiredError(self.half.identity, None, namespace)
        return self.view.get_or_create(namespace, factory, *scope)


_context = Outbox._context


def _fenced_context(request: Request, half: SenderHalf, task: SendTask) -> ProducerContext:
    context = _context(request, half, task)
    return replace(context, state=_FencedView(half, context.state))  # type: ignore[arg-type]


def _recreate(self: StateStore, owner: Owner, namespace: str, factory: Callable[[], Any], scope: Any = None) -> Any:
    """The owner is asked before the factory runs, and not again after it."""
    with self._lock:
        held = self._namespaces(owner, namespace).get(namespace)
    if held is not None:
        return held.value
    made = _Namespace(factory(), scope)
    return self._entries.setdefault(owner.identity.external_id, _Namespaces()).setdefault(namespace, made).value


def _turn_away_in_silence(self: Inbox, turn: Turn, identity: Identity, cause: Cause) -> None:
    self.core.tables.unclaimed.pop(identity, None)
    self.core.timers.cancel(("unclaimed", identity))
    self.core.turn_away(turn, identity, cause)


def _turn_away_with_credit(self: Inbox, turn: Turn, identity: Identity, cause: Cause) -> None:
    """Credit without bound goes out before the stop."""
    _turn_away_in_silence(self, turn, identity, cause)
    if self.core.source is not None:
        turn.later(self.core.source.stop, identity, cause)


def _tell_nobody(*_: object) -> None:
    """The binding of a request's halves does nothing."""


def _tells_twice(self: StageCore, turn: Turn, request: Request, half: Any, cause: Cause) -> None:
    request.reported = False
    _tell_host(self, turn, request, half, cause)


_tell_host = StageCore.tell_host


def _reclaiming_table() -> SenderTable:
    cell = sender_table().cells[SenderState.FAILED, SenderEvent.RELEASED_AFTER_END]
    return _sender(
        SenderState.FAILED,
        SenderEvent.RELEASED_AFTER_END,
        replace(cell, effects=(*cell.effects, SenderEffect.RECLAIM_UNREAD)),
    )


def _ring(wrong: str) -> Callable[[], PipelineScope]:
    return lambda: PipelineScope(ring(), wrongs=frozenset({wrong}), budget=1, eager=True, meanwhile=True)


def _line(*wrongs: str, lives: int = 1) -> Callable[[], PipelineScope]:
    return lambda: PipelineScope(
        line(chunks=3, window_frames=1), wrongs=frozenset(wrongs), budget=1, meanwhile=True, lives=lives
    )


def _half(faulty: type[SenderHalf]) -> type[SenderHalf]:
    """The class with its own bookkeeping in the table of what is done."""
    changed = {name: method for name, method in vars(faulty).items() if name.startswith("_") and callable(method)}
    faulty._DO = {task: changed.get(getattr(method, "__name__", ""), method) for task, method in SenderHalf._DO.items()}
    return faulty


FAULTS: tuple[Fault, ...] = (
    Fault(
        "cancel_drops_the_end",
        "a cancel drops the end that it owes",
        lambda: Scope(
            faults=frozenset({"cancel"}),
            sender=_sender_without(SenderState.ACTIVE, SenderEvent.CANCELLED, SenderBookkeeping.QUEUE_END_CANCELLED),
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
            faults=frozenset({"raise"}),
            sender=_sender(
                SenderState.TERMINAL_PENDING,
                SenderEvent.END_PRODUCER_RAISED,
                Cell(SenderState.FAILED, (SenderBookkeeping.CLEAR_IN_FLIGHT,), (SenderEffect.RECORD_FAILURE,)),
            ),
        ),
    ),
    Fault(
        "failure_queues_no_end",
        "a producer's exception on a chunk puts no marker",
        lambda: Scope(
            faults=frozenset({"raise"}),
            sender=_sender_without(SenderState.ACTIVE, SenderEvent.PRODUCER_RAISED, SenderBookkeeping.QUEUE_END_ERROR),
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
            chunks=2,
            faults=frozenset({"put"}),
            sender=_sender_without(SenderState.ACTIVE, SenderEvent.DATA_PUT, SenderBookkeeping.ADVANCE_SEQ),
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
    Fault(
        "stale_completion_moves_the_successor",
        "a completion finds its request by external id, and moves the successor",
        lambda: Scope(generations=2, faults=frozenset({"cancel"}), bugs=frozenset({"completions_by_id"})),
    ),
    Fault(
        "segment_restarts_the_count",
        "the count of chunks begins again with a segment, and the next segment looks stale",
        lambda: Scope(chunks=2, faults=frozenset({"segment"}), half=_half(_SegmentRestartsTheCount)),
    ),
    Fault(
        "accessor_fenced_by_cancelled",
        "a cancelled generation cannot read its state while its end flushes",
        _line("cancel"),
        (Outbox, "_context", staticmethod(_fenced_context)),
    ),
    Fault(
        "factory_creates_again_after_cleanup",
        "a cleanup during a factory: what it makes creates the container again",
        _ring("kill"),
        (StateStore, "get_or_create", _recreate),
    ),
    Fault(
        "unclaimed_drop_is_not_told",
        "frames are dropped unclaimed, and their sender never hears of it",
        _line(),
        (Inbox, "_turn_away", _turn_away_in_silence),
    ),
    Fault(
        "waiver_overtakes_the_stop",
        "a stream is turned away, and its sender is given credit before it is stopped: it ends well, and nobody is told",
        _line(),
        (Inbox, "_turn_away", _turn_away_with_credit),
    ),
    Fault(
        "failed_receiver_spares_its_sender",
        "a failed receiver does not fail its stage's sender",
        _ring("kill"),
        (StageCore, "_tell_sender", _tell_nobody),
    ),
    Fault(
        "failed_sender_spares_its_receiver",
        "a failed sender tells neither its stage's receiver nor its host",
        _ring("refuse"),
        (StageCore, "_tell_receiver", _tell_nobody),
    ),
    Fault(
        "front_told_done_waits_for_the_dead",
        "the next stage says that it has had enough, and dies before its opening is back: the front waits for its deadline",
        lambda: PipelineScope(ring(chunks=0), wrongs=frozenset({"release", "kill"}), budget=2, eager=True),
        (StageCore, "prompt_lost", _tell_nobody),
    ),
    Fault(
        "failure_is_recorded_twice",
        "a request's failure is recorded by both of its halves",
        _ring("kill"),
        (StageCore, "tell_host", _tells_twice),
    ),
    Fault(
        "reclaim_takes_the_end",
        "a released life's stored end is dropped before the receiver has read it",
        _ring("raise"),
        (intake, "sender_table", _reclaiming_table),
    ),
    Fault(
        "end_of_an_unannounced_life_waits",
        "the failed end of a life whose opening was given up waits for credit that nobody can give",
        _ring("refuse"),
        (CreditLedger, "is_unheard_of", lambda *_: False),
    ),
)
