"""A second interpreter of specs/: the ``transitions`` library and ``step`` agree on every walk of raw events."""

import tomllib
from enum import StrEnum
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transitions import MachineError

from omni_fsm.protocol.errors import LocalProtocolError
from omni_fsm.protocol.names import ConnectorEvent, KvTransferEvent, ReceiverEvent, SenderEvent
from omni_fsm.protocol.table import Table, step
from omni_fsm.tables import (
    Spec,
    connector_spec,
    connector_table,
    kv_spec,
    kv_table,
    receiver_spec,
    receiver_table,
    sender_spec,
    sender_table,
    spec_machine,
    specs_dir,
)

AnyTable = Table[Any, Any, Any, Any]
MACHINES = pytest.mark.parametrize(
    ("spec", "table", "events"),
    [
        (sender_spec(), sender_table(), SenderEvent),
        (receiver_spec(), receiver_table(), ReceiverEvent),
        (kv_spec(), kv_table(), KvTransferEvent),
        (connector_spec(), connector_table(), ConnectorEvent),
    ],
    ids=["sender", "receiver", "kv_transfer", "connector"],
)


class Walker:
    """A model for ``transitions``; it gets ``state`` and one method an event."""

    state: str


def walker(spec: Spec) -> Walker:
    model = Walker()
    spec_machine(spec).add_model(model)
    return model


def by_library(model: Any, event: str) -> str | None:
    """The state after, None for a refusal."""
    try:
        model.trigger(event)
    except MachineError:
        return None
    return str(model.state)


def by_step(table: AnyTable, state: StrEnum, event: StrEnum) -> StrEnum | None:
    try:
        return step(table, state, event).next
    except LocalProtocolError:
        return None


@MACHINES
@given(data=st.data())
@settings(derandomize=True, max_examples=150, deadline=None)
def test_transitions_is_an_independent_interpreter(
    spec: Spec, table: AnyTable, events: type[StrEnum], data: st.DataObject
) -> None:
    model, state = walker(spec), table.initial
    assert model.state == state
    for event in data.draw(st.lists(st.sampled_from(list(events)), max_size=60)):
        after = by_step(table, state, event)
        assert by_library(model, event) == after
        state = state if after is None else after
        assert model.state == state


@MACHINES
def test_both_interpreters_agree_on_every_cell(spec: Spec, table: AnyTable, events: type[StrEnum]) -> None:
    """Walks may miss a cell; this does not."""
    model = walker(spec)
    for state, event in product(spec.states, events):
        model.state = state
        assert by_library(model, event) == by_step(table, type(table.initial)(state), event)


@MACHINES
def test_a_plain_reading_of_the_file_gives_the_same_cells(spec: Spec, table: AnyTable, events: type[StrEnum]) -> None:
    """`spec_machine` and the table share the loader's groups and wildcards; this reading shares nothing."""
    raw = tomllib.loads((specs_dir() / f"{table.machine}.toml").read_text())

    def states(name: str) -> list[str]:
        return raw["groups"].get(name, [name]) if "groups" in raw else [name]

    def names(name: str) -> list[str]:
        return raw["event_groups"].get(name, [name]) if "event_groups" in raw else [name]

    cells: dict[tuple[str, str], tuple[str, list[str], str]] = {}
    for group, event_group, after, actions in raw["rows"]:
        for state, event in product(states(group), names(event_group)):
            cells[state, event] = (state if after == "same" else after, actions, "")
    for event_group, groups, why in raw["ignore"]:
        for group in groups:
            for state in states(group):
                for event in raw["events"] if event_group == "*" else names(event_group):
                    cells.setdefault((state, event), (state, [], why))
    compiled = {
        (str(state), str(event)): (str(cell.next), sorted([*cell.bookkeeping, *cell.effects]), cell.ignored)
        for (state, event), cell in table.cells.items()
    }
    assert compiled == {key: (after, sorted(actions), why) for key, (after, actions, why) in cells.items()}


@MACHINES
def test_the_compiled_columns_keep_the_order_of_the_file(spec: Spec, table: AnyTable, events: type[StrEnum]) -> None:
    for written in spec.rows:
        for state in spec.groups.get(written[0], [written[0]]):
            for event in spec.event_groups.get(written[1], [written[1]]):
                cell = table.cells[state, event]
                assert [action for action in written[3] if action in spec.bookkeeping] == list(cell.bookkeeping)
                assert [action for action in written[3] if action in spec.effects] == list(cell.effects)
