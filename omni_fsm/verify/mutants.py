"""Every one-cell defect of both tables, and whether the explorations notice it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

from omni_fsm.protocol.errors import SpecError
from omni_fsm.protocol.table import Cell, Table
from omni_fsm.runtime import intake
from omni_fsm.tables import Row, Spec, check_rows, receiver_spec, receiver_table, sender_spec, sender_table
from omni_fsm.verify.ends import CellName
from omni_fsm.verify.explore import explore
from omni_fsm.verify.pipeline import EVERY_WRONG, PipelineScope, line, ring
from omni_fsm.verify.scopes import all_rows
from omni_fsm.verify.world import ALL_FAULTS, Scope

_GROWTH, _GROWTH_MIN = 4, 2_000
AnyTable = Table[Any, Any, Any, Any]
AnyCell = Cell[Any, Any, Any]


@dataclass(frozen=True)
class Mutant:
    """A table with one cell changed.

    Attributes:
        machine: ``sender`` or ``receiver``.
        state: Of the cell.
        event: Of the cell.
        what: What was done to it.
        cell: The cell now; None where it was dropped.
    """

    machine: str
    state: Any
    event: Any
    what: str
    cell: AnyCell | None

    @property
    def name(self) -> str:
        """As reports show it."""
        return f"{self.machine}: {self.event} in {self.state}: {self.what}"

    def table(self) -> AnyTable:
        """The whole table with it."""
        table = TABLES[self.machine]()
        cells = {key: cell for key, cell in table.cells.items() if key != (self.state, self.event)}
        if self.cell is not None:
            cells[self.state, self.event] = self.cell
        return Table(table.machine, table.initial, table.final, cells)


SPECS: dict[str, Callable[[], Spec]] = {"sender": sender_spec, "receiver": receiver_spec}
TABLES: dict[str, Callable[[], AnyTable]] = {"sender": sender_table, "receiver": receiver_table}


def all_mutants() -> Iterator[Mutant]:
    """Every row dropped, ignored, with another target, without one of its actions; every ignore made a row."""
    for machine, table in TABLES.items():
        states = dict.fromkeys(state for state, _ in table().cells)
        for (state, event), cell in table().cells.items():
            changed = partial(Mutant, machine, state, event)
            if cell.ignored:
                yield from _made_rows(changed, table(), event, state)
                continue
            yield changed("row dropped", None)
            yield changed("row made an ignore", Cell(state, ignored="mutated"))
            for target in states:
                if target is not cell.next:
                    yield changed(f"leads to {target}, not {cell.next}", replace(cell, next=target))
            for action in (*cell.bookkeeping, *cell.effects):
                yield changed(f"without {action}", _without(cell, action))


def _made_rows(changed: Callable[..., Mutant], table: AnyTable, event: Any, state: Any) -> Iterator[Mutant]:
    """An ignore made a row: the row that the event has in another state, where it has one."""
    for (at, happened), cell in table.cells.items():
        if happened is event and at is not state and not cell.ignored:
            yield changed(f"ignore made a row, as in {at}", cell)
            return


def _without(cell: AnyCell, action: Any) -> AnyCell:
    return replace(
        cell,
        bookkeeping=tuple(task for task in cell.bookkeeping if task is not action),
        effects=tuple(effect for effect in cell.effects if effect is not action),
    )


AnyScope = Scope | PipelineScope
_TWO = ring("front", "thinker")

SCOPES: tuple[Callable[[], AnyScope], ...] = (
    partial(Scope, faults=frozenset()),
    *(partial(Scope, faults=frozenset({fault})) for fault in sorted(ALL_FAULTS | {"segment"})),
    partial(PipelineScope, _TWO, eager=True),
    partial(PipelineScope, _TWO, eager=True, hiccups=1),
    partial(PipelineScope, line(chunks=2, segments=True)),
    partial(PipelineScope, line(chunks=3, window_frames=1)),
    *(
        partial(PipelineScope, stages, wrongs=frozenset({wrong}), budget=1, eager=eager, meanwhile=True)
        for stages, eager in ((line(window_frames=1), False), (_TWO, True))
        for wrong in sorted(EVERY_WRONG)
    ),
    partial(PipelineScope, ring("front", "thinker", answer="later"), eager=True),
    partial(PipelineScope, line(chunks=2), wrongs=frozenset({"lose"}), budget=1),
    partial(PipelineScope, ring("front", "thinker", chunks=2), wrongs=frozenset({"lose"}), budget=1, eager=True),
    partial(PipelineScope, line(chunks=2, segments=True), wrongs=frozenset({"cancel", "raise", "refuse"}), budget=1),
    partial(Scope, chunks=2, faults=frozenset({"put", "raise"})),
    partial(Scope, faults=ALL_FAULTS | {"segment"}),
    partial(Scope, generations=2, retries=0, faults=frozenset({"cancel", "raise"})),
)
"""Small scopes first."""


@dataclass(frozen=True)
class Seen:
    """What became of a mutant: what noticed it, or nothing."""

    mutant: str
    problem: str
    scope: int = -1


@dataclass(frozen=True)
class Sound:
    """What the sound tables do in a scope: the cells that they use, and their states."""

    cells: frozenset[CellName]
    states: int


@cache
def sound(number: int) -> Sound:
    """The sound tables in a scope."""
    scope = SCOPES[number]()
    states = explore(scope.world()).states
    return Sound(frozenset(scope.cells), states)


def notice(mutant: Mutant) -> Seen:
    """Explore, in one scope after the other, until something notices the mutant."""
    refusal = _refusal(mutant)
    if refusal:
        return Seen(mutant.name, refusal)
    cell = (mutant.machine, mutant.state, mutant.event)
    for number in range(len(SCOPES)):
        if cell in sound(number).cells:
            problem = _problem(mutant, number)
            if problem:
                return Seen(mutant.name, problem, number)
    return Seen(mutant.name, "")


def _refusal(mutant: Mutant) -> str:
    """Why the loader of the specs would not take the mutant; empty when it would."""
    rows = [
        Row(str(state), str(event), str(cell.next), tuple(map(str, (*cell.bookkeeping, *cell.effects))), cell.ignored)
        for (state, event), cell in mutant.table().cells.items()
    ]
    try:
        check_rows(SPECS[mutant.machine](), rows)
    except SpecError as error:
        return f"refused at start: {error}"
    return ""


def _problem(mutant: Mutant, number: int) -> str:
    scope, patch = _with(SCOPES[number](), mutant)
    with patch:
        found = explore(scope.world(), _GROWTH * sound(number).states + _GROWTH_MIN)
    if found.problem:
        return found.problem
    if not found.complete:
        return f"grows: more than {_GROWTH} times the {sound(number).states} states of the sound tables"
    never = sorted((sound(number).cells - scope.cells) & _rows())
    return f"never reached: {' '.join(never[0])}" if never else ""


def _with(scope: AnyScope, mutant: Mutant) -> tuple[AnyScope, AbstractContextManager[Any]]:
    table = mutant.table()
    if isinstance(scope, Scope):
        changed = replace(scope, sender=table) if mutant.machine == "sender" else replace(scope, receiver=table)
        return changed, nullcontext()
    return scope, mock.patch.object(intake, f"{mutant.machine}_table", return_value=table)


@cache
def _rows() -> frozenset[CellName]:
    return frozenset(all_rows())


_HARMLESS: dict[str, tuple[str, ...]] = {
    "tell_receiver tells the host too and records the failure, once, whichever of both comes first": (
        "sender: producer_raised in active: without record_failure",
        "sender: data_given_up in active: without record_failure",
        "sender: host_failed in active: without record_failure",
        "sender: peer_lost in active: without record_failure",
        "sender: producer_raised in terminal_pending: without record_failure",
        "sender: end_producer_raised in terminal_pending: without record_failure",
        "sender: data_given_up in terminal_pending: without record_failure",
        "sender: ok_end_given_up in terminal_pending: without record_failure",
        "sender: host_failed in terminal_pending: without record_failure",
        "sender: peer_lost in terminal_pending: without record_failure",
    ),
    "the stage's receiver has recorded the failure: once a request": (
        "sender: upstream_failed in active: without record_failure",
        "sender: upstream_failed in terminal_pending: without record_failure",
    ),
    "the host's fail ends the stage's receiver itself": (
        "sender: host_failed in active: without tell_receiver",
        "sender: host_failed in terminal_pending: without tell_receiver",
    ),
    "no frame with a seq can follow: all that this life still sends is an end without one": (
        "sender: data_given_up in active: without advance_seq",
        "sender: data_given_up in terminal_pending: without advance_seq",
        "sender: ok_end_given_up in terminal_pending: without advance_seq",
        "sender: put_abandoned in cancelled_current: without advance_seq",
        "sender: data_given_up in cancelled_current: without advance_seq",
        "sender: data_put in failed: without advance_seq",
        "sender: segment_end_put in failed: without advance_seq",
        "sender: put_abandoned in failed: without advance_seq",
        "sender: data_given_up in failed: without advance_seq",
        "sender: ok_end_given_up in failed: without advance_seq",
    ),
    "no chunk can follow in a failed life: its segment does not matter any more": (
        "sender: segment_end_put in failed: without next_segment",
        "sender: segment_end_put in failed: without reset_segment",
    ),
    "the worlds' wires, as our connectors, drop a dead peer's frames themselves; it is said for connectors that store": (
        "sender: peer_lost in active: without reclaim_unread",
        "sender: peer_lost in terminal_pending: without reclaim_unread",
        "sender: peer_lost in cancelled_current: without reclaim_unread",
        "sender: peer_lost in failed: without reclaim_unread",
    ),
    "our senders give an opening no body, so it is never fetched; another's connector may let one through": (
        "receiver: open_arrived in active: without end_get",
        "receiver: open_repeated in active: without end_get",
    ),
    "an opening that comes again to the same process had its credit with the first": (
        "receiver: open_repeated in active: row made an ignore",
        "receiver: open_repeated in active: without grant_credit",
    ),
    "no frame is looked at after the end": ("receiver: ok_end_arrived in active: without advance_seq",),
    "whoever cancels the receiver ends the stage's sender as well": (
        "receiver: cancelled in active: without tell_sender",
        "receiver: cancelled_in_get in active: without tell_sender",
        "receiver: cancelled in terminal_pending: without tell_sender",
    ),
    "its sender has put all that it had: its credit does not matter any more": (
        "receiver: consumed in terminal_pending: without grant_credit",
    ),
    "nothing is staged then": (
        "receiver: deadline_passed in active: without drop_staged",
        "receiver: unclaimed in active: without drop_staged",
    ),
    "whoever fails the request has told the host before": (
        "receiver: request_failed in active: without record_failure",
    ),
    "its sender was stopped when its frames were dropped": ("receiver: unclaimed in active: without stop_sender",),
    "a failed receiver is let go in one way, whether or not a get is under way": (
        "receiver: get_given_up in active: without end_get",
        "receiver: failed_end_arrived in active: without end_get",
        "receiver: frame_ahead in active: without end_get",
        "receiver: frame_invalid in active: without end_get",
    ),
}

SURVIVORS: dict[str, str] = {name: reason for reason, names in _HARMLESS.items() for name in names}
"""Mutants that no exploration notices, each with the reason why it is harmless."""
