"""The compiled form of a spec, and ``step``: the one function that changes a state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from omni_fsm.protocol.errors import LocalProtocolError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Bookkeeping = TypeVar("Bookkeeping", bound=StrEnum)
Effect = TypeVar("Effect", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Cell(Generic[State, Bookkeeping, Effect]):
    """What one event does in one state.

    Attributes:
        next: The state after.
        bookkeeping: What the half does to its own queue and counters, in order.
        effects: What the runtime does, in order.
        ignored: Why nothing happens; empty for a row.
    """

    next: State
    bookkeeping: tuple[Bookkeeping, ...] = ()
    effects: tuple[Effect, ...] = ()
    ignored: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Table(Generic[State, Event, Bookkeeping, Effect]):
    """A validated machine, ready to look up.

    Attributes:
        machine: Its name in errors and logs.
        initial: The state it starts in.
        final: The states it never leaves.
        cells: Every row and every ignore; a pair that is missing is refused.
    """

    machine: str
    initial: State
    final: frozenset[State]
    cells: Mapping[tuple[State, Event], Cell[State, Bookkeeping, Effect]]

    def accepted(self, state: State) -> tuple[Event, ...]:
        """The events that have a row in ``state``, in the order of the spec."""
        return tuple(event for (at, event), cell in self.cells.items() if at is state and not cell.ignored)


def step(
    table: Table[State, Event, Bookkeeping, Effect], state: State, event: Event, stream: object = "-"
) -> Cell[State, Bookkeeping, Effect]:
    """Look up what ``event`` does in ``state``. Pure: the caller stores ``cell.next``, and nobody else does.

    Args:
        table: The machine.
        state: The state before.
        event: What happened, already classified.
        stream: Edge and identity, for the error only: nothing is made of it before.

    Returns:
        The cell, whose ``ignored`` says why if nothing happens.

    Raises:
        LocalProtocolError: The pair is neither a row nor ignored. Nothing changed.
    """
    cell = table.cells.get((state, event))
    if cell is None:
        raise LocalProtocolError(
            machine=table.machine, stream=str(stream), event=event, state=state, accepted=table.accepted(state)
        )
    return cell
