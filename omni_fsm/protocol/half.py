"""What both halves share: moving by the table, and doing the row's bookkeeping."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Self, TypeVar

from omni_fsm.protocol.errors import LocalProtocolError
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.table import Table, step

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Bookkeeping = TypeVar("Bookkeeping", bound=StrEnum)
Effect = TypeVar("Effect", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Moved(Generic[State, Event, Effect]):
    """One transition: what a happening was classified as, and what it led to.

    Attributes:
        event: The event.
        before: The state before.
        after: The state after.
        effects: What the runtime has to do, in order.
        ignored: Why nothing happened; empty when a row was taken.
    """

    event: Event
    before: State
    after: State
    effects: tuple[Effect, ...]
    ignored: str


class Half(ABC, Generic[State, Event, Bookkeeping, Effect]):
    """One side of one life of one stream.

    Methods named ``on_...`` and ``submit_...`` take what happened, classify it into an event by the counters, move by the
    table, do the row's bookkeeping and return the `Moved`. They perform no effect. A refused event raises
    ``LocalProtocolError`` and changes nothing.

    Not thread-safe: the stage's runtime calls it under its lock. Hashable and copyable by value, so that an explorer can
    keep a set of what it has seen; payloads are no part of that value.
    """

    _DO: ClassVar[Mapping[Any, Callable[[Any], None]]]

    def __init__(self, table: Table[State, Event, Bookkeeping, Effect], edge: Edge, identity: Identity) -> None:
        self.table = table
        self.edge = edge
        self.identity = identity
        self.state = table.initial

    @property
    def stream(self) -> str:
        """Edge and identity, as errors and logs show them."""
        return f"{self.identity} {self.edge}"

    @property
    def is_final(self) -> bool:
        """Whether nothing is left of this life at this half."""
        return self.state in self.table.final

    def accepts(self, event: Event) -> bool:
        """Whether ``event`` has a row in the present state."""
        cell = self.table.cells.get((self.state, event))
        return cell is not None and not cell.ignored

    def _move(self, event: Event) -> Moved[State, Event, Effect]:
        before = self.state
        cell = step(self.table, before, event, self)
        self.state = cell.next
        for task in cell.bookkeeping:
            self._DO[task](self)
        return Moved(event, before, cell.next, cell.effects, cell.ignored)

    def _misused(self, event: Event, detail: str) -> LocalProtocolError:
        """The refusal of a happening that the counters say cannot have happened."""
        return LocalProtocolError(
            machine=self.table.machine,
            stream=self.stream,
            event=event,
            state=self.state,
            accepted=self.table.accepted(self.state),
            detail=detail,
        )

    @abstractmethod
    def key(self) -> Hashable:
        """The value of this half: all that decides how it behaves from here on."""

    def copy(self) -> Self:
        """An independent half of the same value."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __str__(self) -> str:
        return self.stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Half) and type(self) is type(other) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())
