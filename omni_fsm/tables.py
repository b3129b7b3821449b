"""Loads specs/: the one module of the core that opens a file.

A spec is read, checked and compiled once, when it is first asked for. Names are checked against the generated enums of
`omni_fsm.protocol.names`, so a stale enum cannot run.
"""

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import TypeVar

import msgspec
from transitions import Machine

from omni_fsm.protocol.errors import SpecError
from omni_fsm.protocol.names import (
    ConnectorBookkeeping,
    ConnectorEffect,
    ConnectorEvent,
    ConnectorState,
    KvTransferBookkeeping,
    KvTransferEffect,
    KvTransferEvent,
    KvTransferState,
    ReceiverBookkeeping,
    ReceiverEffect,
    ReceiverEvent,
    ReceiverState,
    SenderBookkeeping,
    SenderEffect,
    SenderEvent,
    SenderState,
)
from omni_fsm.protocol.table import Cell, Table

Name = TypeVar("Name", bound=StrEnum)
State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Bookkeeping = TypeVar("Bookkeeping", bound=StrEnum)
Effect = TypeVar("Effect", bound=StrEnum)


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A spec file as it is written; specs/FORMAT.md explains each key."""

    machine: str
    initial: str
    final: list[str]
    rows: list[tuple[str, str, str, list[str]]]
    ignore: list[tuple[str, list[str], str]]
    states: dict[str, str]
    events: dict[str, str]
    bookkeeping: dict[str, str]
    effects: dict[str, str]
    groups: dict[str, list[str]] = {}
    event_groups: dict[str, list[str]] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the matrix with all groups resolved, still as text."""

    state: str
    event: str
    next: str
    actions: tuple[str, ...] = ()
    ignored: str = ""


def specs_dir() -> Path:
    """Where the tables are: inside the installed package, or beside it in a checkout."""
    package = Path(str(resources.files("omni_fsm")))
    installed = package / "specs"
    return installed if installed.is_dir() else package.parent / "specs"


def read_spec(path: Path) -> Spec:
    """Read and check one spec.

    Raises:
        SpecError: It is not a sound machine; names the machine and the fault.
    """
    return check_spec(path.read_text(encoding="utf-8"), path.stem)


def check_spec(text: str, machine: str = "?") -> Spec:
    """Parse and check the text of a spec; see `read_spec`."""
    try:
        spec = msgspec.convert(tomllib.loads(text), Spec)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SpecError(machine, str(error)) from None
    check_rows(spec, list(resolved_rows(spec)))
    return spec


def check_rows(spec: Spec, rows: list[Row]) -> None:
    """Check a machine of these cells.

    Raises:
        SpecError: It is not sound; names the machine and the fault.
    """
    _check_uses(spec, rows)
    _check_walks(spec, spec_machine(spec, rows))


def _members(spec: Spec, kind: str, name: str) -> list[str]:
    """The states or events that ``name`` stands for: itself, or those of its group."""
    declared, groups = (spec.states, spec.groups) if kind == "state" else (spec.events, spec.event_groups)
    members = groups.get(name, [name])
    for member in members:
        if member not in declared:
            raise SpecError(spec.machine, f"{kind} {member!r} is not declared; declared: {', '.join(declared)}")
    return members


def resolved_rows(spec: Spec) -> Iterator[Row]:
    """Every cell of the matrix that is a row or an ignore, once.

    Raises:
        SpecError: Two rows or ignores meet in one cell, or a name is not declared.
    """
    seen: dict[tuple[str, str], Row] = {}
    for row in _written_rows(spec):
        cell = (row.state, row.event)
        if cell in seen:
            raise SpecError(spec.machine, f"state {row.state}, event {row.event}: given twice")
        seen[cell] = row
    wild: set[str] = set()
    for event, states, why in spec.ignore:
        if event == "*":
            members = [member for state in states for member in _members(spec, "state", state)]
            if twice := wild.intersection(members):
                raise SpecError(spec.machine, f"state {min(twice)}: the wildcard is given twice")
            wild.update(members)
            for state, name in product(members, spec.events):
                seen.setdefault((state, name), Row(state, name, state, ignored=why))
    yield from sorted(seen.values(), key=lambda r: (list(spec.states).index(r.state), list(spec.events).index(r.event)))


def _written_rows(spec: Spec) -> Iterator[Row]:
    """Rows and ignores in the order of the file, groups resolved, without the wildcard."""
    for state_name, event_name, after, actions in spec.rows:
        for state, event in product(_members(spec, "state", state_name), _members(spec, "event", event_name)):
            target = state if after == "same" else after
            if target not in spec.states:
                raise SpecError(spec.machine, f"state {target!r} is not declared, but the next of {event} in {state}")
            yield Row(state, event, target, tuple(actions))
    for event_name, states, why in spec.ignore:
        if not why.strip():
            raise SpecError(spec.machine, f"ignore of {event_name}: says no reason")
        if event_name != "*":
            for state_name in states:
                for state, event in product(_members(spec, "state", state_name), _members(spec, "event", event_name)):
                    yield Row(state, event, state, ignored=why)


def _check_uses(spec: Spec, rows: list[Row]) -> None:
    """Every name that is used is declared, every declared name is used, and no group is named like a member."""
    _check_groups(spec)
    actions = {**spec.bookkeeping, **spec.effects}
    if both := spec.bookkeeping.keys() & spec.effects.keys():
        raise SpecError(spec.machine, f"both bookkeeping and effect: {', '.join(sorted(both))}")
    used = {action for row in rows for action in row.actions}
    if unknown := used - actions.keys():
        raise SpecError(spec.machine, f"effect {min(unknown)!r} is not declared")
    if unused := actions.keys() - used:
        raise SpecError(spec.machine, f"effect {min(unused)!r} is declared and never used")
    happening = {row.event for row in rows if not row.ignored}
    if idle := spec.events.keys() - happening:
        raise SpecError(spec.machine, f"event {min(idle)!r} has no row")
    for row in rows:
        if row.state in spec.final and row.next != row.state:
            raise SpecError(spec.machine, f"event {row.event} leaves the final state {row.state}")
        if row.state in spec.final and not row.ignored:
            raise SpecError(spec.machine, f"event {row.event} has a row in the final state {row.state}")


def _check_groups(spec: Spec) -> None:
    written = [(state, event) for state, event, _, _ in spec.rows]
    written += [(state, event) for event, states, _ in spec.ignore for state in states]
    for kind, groups, declared, used in (
        ("state", spec.groups, spec.states, {state for state, _ in written}),
        ("event", spec.event_groups, spec.events, {event for _, event in written}),
    ):
        for name in groups:
            _members(spec, kind, name)
            if name in declared:
                raise SpecError(spec.machine, f"{kind} group {name!r} is named like a {kind}")
            if name not in used:
                raise SpecError(spec.machine, f"{kind} group {name!r} is declared and never used")
    for name in (spec.initial, *spec.final):
        if name not in spec.states:
            raise SpecError(spec.machine, f"state {name!r} is not declared; declared: {', '.join(spec.states)}")


def spec_machine(spec: Spec, rows: list[Row] | None = None) -> Machine:
    """The same machine for the ``transitions`` library: for validation, drawing, and as the tests' interpreter.

    Ignored cells are internal transitions. A trigger without a row raises ``MachineError``.
    """
    return Machine(
        model=None,
        states=list(spec.states),
        initial=spec.initial,
        transitions=[
            {"trigger": row.event, "source": row.state, "dest": None if row.ignored else row.next}
            for row in (resolved_rows(spec) if rows is None else rows)
        ],
        auto_transitions=False,
        ignore_invalid_triggers=False,
        queued=False,
    )


def _check_walks(spec: Spec, machine: Machine) -> None:
    """Every state can be reached from the initial one, and a final one from every state."""
    steps = {
        (transition.source, transition.dest) for transition in machine.get_transitions() if transition.dest is not None
    }
    forward = _closure({spec.initial}, steps)
    if lost := [state for state in spec.states if state not in forward]:
        raise SpecError(spec.machine, f"state {lost[0]} cannot be reached from {spec.initial}")
    backward = _closure(set(spec.final), {(after, before) for before, after in steps})
    if trapped := [state for state in spec.states if state not in backward]:
        raise SpecError(spec.machine, f"state {trapped[0]} is a dead end: no final state can be reached from it")


def _closure(start: set[str], steps: set[tuple[str, str]]) -> set[str]:
    reached = set(start)
    while more := {after for before, after in steps if before in reached} - reached:
        reached |= more
    return reached


def _enum(spec: Spec, declared: dict[str, str], enum: type[Name]) -> type[Name]:
    if [member.value for member in enum] != list(declared):
        raise SpecError(spec.machine, f"{enum.__name__} is stale: run `make gen`")
    return enum


def compile_table(
    spec: Spec, states: type[State], events: type[Event], bookkeeping: type[Bookkeeping], effects: type[Effect]
) -> Table[State, Event, Bookkeeping, Effect]:
    """Compile a checked spec to the lookup that the hot path uses.

    Raises:
        SpecError: An enum of `omni_fsm.protocol.names` no longer says what the spec says.
    """
    _enum(spec, spec.states, states), _enum(spec, spec.events, events)
    _enum(spec, spec.bookkeeping, bookkeeping), _enum(spec, spec.effects, effects)
    cells = {
        (states(row.state), events(row.event)): Cell(
            next=states(row.next),
            bookkeeping=tuple(bookkeeping(name) for name in row.actions if name in spec.bookkeeping),
            effects=tuple(effects(name) for name in row.actions if name in spec.effects),
            ignored=row.ignored,
        )
        for row in resolved_rows(spec)
    }
    return Table(spec.machine, states(spec.initial), frozenset(states(name) for name in spec.final), cells)


def spec_digest() -> str:
    """Digest of the stream tables, for the hello: two ends with different tables do not talk to each other."""
    digest = hashlib.sha256()
    for name in ("sender", "receiver"):
        digest.update((specs_dir() / f"{name}.toml").read_bytes())
    return digest.hexdigest()[:32]


@cache
def sender_spec() -> Spec:
    """The checked spec of the sending half."""
    return read_spec(specs_dir() / "sender.toml")


@cache
def receiver_spec() -> Spec:
    """The checked spec of the receiving half."""
    return read_spec(specs_dir() / "receiver.toml")


@cache
def sender_table() -> Table[SenderState, SenderEvent, SenderBookkeeping, SenderEffect]:
    """The compiled table of the sending half."""
    return compile_table(sender_spec(), SenderState, SenderEvent, SenderBookkeeping, SenderEffect)


@cache
def receiver_table() -> Table[ReceiverState, ReceiverEvent, ReceiverBookkeeping, ReceiverEffect]:
    """The compiled table of the receiving half."""
    return compile_table(receiver_spec(), ReceiverState, ReceiverEvent, ReceiverBookkeeping, ReceiverEffect)


@cache
def kv_spec() -> Spec:
    """The checked spec of a KV transfer."""
    return read_spec(specs_dir() / "kv_transfer.toml")


@cache
def kv_table() -> Table[KvTransferState, KvTransferEvent, KvTransferBookkeeping, KvTransferEffect]:
    """The compiled table of a KV transfer."""
    return compile_table(kv_spec(), KvTransferState, KvTransferEvent, KvTransferBookkeeping, KvTransferEffect)


@cache
def connector_spec() -> Spec:
    """The checked spec of a stage's connectors."""
    return read_spec(specs_dir() / "connector.toml")


@cache
def connector_table() -> Table[ConnectorState, ConnectorEvent, ConnectorBookkeeping, ConnectorEffect]:
    """The compiled table of a stage's connectors."""
    return compile_table(connector_spec(), ConnectorState, ConnectorEvent, ConnectorBookkeeping, ConnectorEffect)
