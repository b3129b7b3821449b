"""The loader of specs/ refuses what is not a sound machine, and the compiled tables refuse what is no row."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from omni_fsm.protocol.errors import LocalProtocolError, SpecError
from omni_fsm.protocol.names import KvTransferEvent, KvTransferState, ReceiverState, SenderEvent, SenderState
from omni_fsm.protocol.table import Table, step
from omni_fsm.tables import (
    Spec,
    check_spec,
    compile_table,
    connector_spec,
    connector_table,
    kv_spec,
    kv_table,
    read_spec,
    receiver_spec,
    receiver_table,
    sender_spec,
    sender_table,
    spec_digest,
    specs_dir,
)

GATE = """
machine = "gate"
initial = "shut"
final = ["gone"]
rows = [
  ["shut", "opened", "open", ["swing"]],
  ["open", "shut_again", "shut", ["swing"]],
  ["open", "passed", "same", ["count_passer"]],
  ["usable", "removed", "gone", ["log_removal"]],
]
ignore = [
  ["opened", ["open"], "it is open already"],
  ["shut_again", ["shut"], "it is shut already"],
  ["turns", ["gone"], "nothing turns"],
  ["*", ["gone"], "nothing is left"],
]
[groups]
usable = ["shut", "open"]
[event_groups]
turns = ["opened", "shut_again"]
[states]
shut = "nobody passes"
open = "anybody passes"
gone = "there is no gate"
[events]
opened = "a porter opens it"
shut_again = "a porter shuts it"
passed = "somebody passes"
removed = "a builder takes it away"
[bookkeeping]
swing = "the hinges turn"
count_passer = "one more has passed"
[effects]
log_removal = "somebody writes it down"
"""


def changed(old: str, new: str) -> str:
    """The gate with one fault in it."""
    assert GATE.count(old) == 1, old
    return GATE.replace(old, new)


def after(line: str, added: str) -> str:
    return changed(line, f"{line}\n{added}")


ROW = '  ["open", "passed", "same", ["count_passer"]],'
IGNORE = '  ["shut_again", ["shut"], "it is shut already"],'
STATE = 'gone = "there is no gate"'
EVENT = 'removed = "a builder takes it away"'
GROUP = 'usable = ["shut", "open"]'


class GateState(StrEnum):
    SHUT = "shut"
    OPEN = "open"
    GONE = "gone"


class GateEvent(StrEnum):
    OPENED = "opened"
    SHUT_AGAIN = "shut_again"
    PASSED = "passed"
    REMOVED = "removed"


class GateBookkeeping(StrEnum):
    SWING = "swing"
    COUNT_PASSER = "count_passer"


class GateEffect(StrEnum):
    LOG_REMOVAL = "log_removal"


def test_the_sound_gate_is_compiled_with_groups_and_same_resolved() -> None:
    table = compile_table(check_spec(GATE), GateState, GateEvent, GateBookkeeping, GateEffect)
    passed = step(table, GateState.OPEN, GateEvent.PASSED)
    assert (passed.next, passed.bookkeeping, passed.effects) == (GateState.OPEN, (GateBookkeeping.COUNT_PASSER,), ())
    for state in (GateState.SHUT, GateState.OPEN):
        removed = step(table, state, GateEvent.REMOVED)
        assert (removed.next, removed.bookkeeping) == (GateState.GONE, ())
        assert removed.effects == (GateEffect.LOG_REMOVAL,)
    whys = {event: step(table, GateState.GONE, event).ignored for event in GateEvent}
    assert whys == {
        "opened": "nothing turns",  # the wildcard takes only what is not named
        "shut_again": "nothing turns",
        "passed": "nothing is left",
        "removed": "nothing is left",
    }
    with pytest.raises(LocalProtocolError, match="event passed refused in state shut"):
        step(table, GateState.SHUT, GateEvent.PASSED)


FAULTS = {
    # the cell is given twice
    "two rows": (after(ROW, '["open", "passed", "shut", ["swing"]],'), "state open, event passed: given twice"),
    "row and group row": (after(ROW, '["open", "removed", "gone", []],'), "state open, event removed: given twice"),
    "row and ignore": (after(IGNORE, '["passed", ["open"], "why"],'), "state open, event passed: given twice"),
    "row and ignore by group": (after(IGNORE, '["removed", ["usable"], "why"],'), "event removed: given twice"),
    "row and ignore by event group": (
        after(IGNORE, '["turns", ["shut"], "x"],'),
        "state shut, event opened: given twice",
    ),
    "two ignores": (after(IGNORE, '["shut_again", ["shut"], "why"],'), "state shut, event shut_again: given twice"),
    "a state twice in a group": (changed(GROUP, 'usable = ["shut", "open", "open"]'), "given twice"),
    "two wildcards": (after(IGNORE, '["*", ["gone"], "another reason"],'), "given twice"),
    # names that nobody declared
    "unknown state of a row": (after(ROW, '["ajar", "passed", "open", []],'), "state 'ajar' is not declared"),
    "unknown event of a row": (after(ROW, '["shut", "kicked", "open", []],'), "event 'kicked' is not declared"),
    "unknown next state": (after(ROW, '["shut", "passed", "ajar", []],'), "state 'ajar' is not declared"),
    "a group as next state": (after(ROW, '["shut", "passed", "usable", []],'), "'usable' is not"),
    "unknown effect": (after(ROW, '["shut", "passed", "open", ["ring"]],'), "effect 'ring' is not declared"),
    "unknown ignored event": (after(IGNORE, '["kicked", ["shut"], "why"],'), "event 'kicked' is not declared"),
    "unknown ignoring state": (after(IGNORE, '["passed", ["ajar"], "why"],'), "state 'ajar' is not declared"),
    "unknown state under a wildcard": (after(IGNORE, '["*", ["ajar"], "why"],'), "state 'ajar' is not declared"),
    "unknown state in a group": (changed(GROUP, 'usable = ["shut", "open", "ajar"]'), "state 'ajar' is not declared"),
    "unknown event in a group": (
        changed('turns = ["opened", "shut_again"]', 'turns = ["opened", "kicked"]'),
        "event 'kicked' is not declared",
    ),
    "unknown initial state": (changed('initial = "shut"', 'initial = "ajar"'), "state 'ajar' is not declared"),
    "unknown final state": (changed('final = ["gone"]', 'final = ["gone", "ajar"]'), "state 'ajar' is not declared"),
    # names that nobody uses
    "unused event": (after(EVENT, 'kicked = "somebody kicks it"'), "event 'kicked' has no row"),
    "event that is only ignored": (
        after(EVENT, 'kicked = "somebody kicks it"').replace(IGNORE, f'{IGNORE}\n["kicked", ["shut"], "why"],'),
        "event 'kicked' has no row",
    ),
    "unused effect": (
        after('log_removal = "somebody writes it down"', 'ring = "x"'),
        "effect 'ring' is declared and never",
    ),
    "unused bookkeeping": (after('swing = "the hinges turn"', 'creak = "x"'), "effect 'creak' is declared and never"),
    "unused group": (after(GROUP, 'early = ["shut"]'), "early"),
    "unused event group": (after('turns = ["opened", "shut_again"]', 'passes = ["passed"]'), "passes"),
    "bookkeeping and effect at once": (
        after('log_removal = "somebody writes it down"', 'swing = "x"'),
        "both bookkeeping and effect: swing",
    ),
    # walks
    "unreachable state": (after(STATE, 'ajar = "a cat passes"'), "state ajar cannot be reached from shut"),
    "state reached from itself only": (
        after(STATE, 'ajar = "a cat passes"').replace(ROW, f'{ROW}\n["ajar", "opened", "open", []],'),
        "state ajar cannot be reached from shut",
    ),
    "dead end": (
        after(STATE, 'stuck = "rusted"').replace(ROW, f'{ROW}\n["shut", "passed", "stuck", []],'),
        "state stuck is a dead end",
    ),
    "no final state": (changed('final = ["gone"]', "final = []"), "is a dead end"),
    "row that leaves a final state": (
        after(ROW, '["gone", "passed", "shut", []],'),
        "event passed leaves the final state gone",
    ),
    "row in a final state": (
        after(ROW, '["gone", "passed", "gone", []],'),
        "event passed has a row in the final state gone",
    ),
    # ignores and form
    "ignore without a reason": (after(IGNORE, '["passed", ["shut"], ""],'), "ignore of passed: says no reason"),
    "ignore with a blank reason": (after(IGNORE, '["passed", ["shut"], "  "],'), "ignore of passed: says no reason"),
    "wildcard without a reason": (changed('"nothing is left"', '""'), "says no reason"),
    "no TOML": (changed('machine = "gate"', "machine = gate"), "line 2"),
    "unknown key": (changed('initial = "shut"', 'initial = "shut"\ncolour = "red"'), "colour"),
    "missing key": (changed('initial = "shut"\n', ""), "initial"),
    "row of three columns": (after(ROW, '["shut", "passed", "open"],'), "rows"),
    "key of another type": (changed('final = ["gone"]', 'final = "gone"'), "final"),
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_spec_is_refused_by_machine_and_fault(text: str, fault: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_spec(text, "gate")
    assert refused.value.machine == "gate"
    assert fault in refused.value.fault
    assert str(refused.value) == f"spec gate: {refused.value.fault}"


def test_an_unreadable_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "turnstile.toml"
    path.write_text("machine = ")
    with pytest.raises(SpecError, match=r"^spec turnstile: "):
        read_spec(path)


class TurnedGateState(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    GONE = "gone"


class ShortGateEvent(StrEnum):
    OPENED = "opened"
    SHUT_AGAIN = "shut_again"
    PASSED = "passed"


class OtherGateEffect(StrEnum):
    LOG_REMOVAL = "log_the_removal"


@pytest.mark.parametrize(
    ("enums", "stale"),
    [
        ((TurnedGateState, GateEvent, GateBookkeeping, GateEffect), "TurnedGateState"),
        ((GateState, ShortGateEvent, GateBookkeeping, GateEffect), "ShortGateEvent"),
        ((GateState, GateEvent, GateEffect, GateEffect), "GateEffect"),
        ((GateState, GateEvent, GateBookkeeping, OtherGateEffect), "OtherGateEffect"),
    ],
)
def test_a_stale_enum_is_refused_with_the_way_out(enums: tuple[type[StrEnum], ...], stale: str) -> None:
    with pytest.raises(SpecError) as refused:
        compile_table(check_spec(GATE), *enums)
    assert str(refused.value) == f"spec gate: {stale} is stale: run `make gen`"


# The real tables

AnyTable = Table[Any, Any, Any, Any]
LIVES = [
    pytest.param(sender_spec(), sender_table(), id="sender"),
    pytest.param(receiver_spec(), receiver_table(), id="receiver"),
    pytest.param(kv_spec(), kv_table(), id="kv_transfer"),
]
LIFE_TABLES = pytest.mark.parametrize(("spec", "table"), LIVES)
TABLES = pytest.mark.parametrize(
    ("spec", "table"), [*LIVES, pytest.param(connector_spec(), connector_table(), id="connector")]
)
ENDS = {
    "sender": ("active", {"finalized"}),
    "receiver": ("active", {"finalized"}),
    "kv_transfer": ("idle", {"released"}),
    "connector": ("created", {"closed"}),
}

PARTING = {"sender": "release", "receiver": "retire", "kv_transfer": "free_blocks"}
CANNOT_BE_LATE = {("connector", event) for event in ("started", "lent", "flushed", "grace_over")}
"""A stage that was shut down does not start again, and is flushed once."""


@TABLES
def test_a_real_spec_loads_and_says_what_every_name_means(spec: Spec, table: AnyTable) -> None:
    assert read_spec(specs_dir() / f"{table.machine}.toml") == spec
    assert (table.initial, table.final) == ENDS[table.machine]
    for clauses in (spec.states, spec.events, spec.bookkeeping, spec.effects):
        assert all(clause.strip() for clause in clauses.values())


@TABLES
def test_case_78_every_blank_cell_is_refused_with_all_that_it_takes_to_find_the_fault(
    spec: Spec, table: AnyTable
) -> None:
    blanks = [(s, e) for s in spec.states for e in spec.events if (s, e) not in {(a, b) for a, b in table.cells}]
    assert blanks
    states, events = type(table.initial), type(next(iter(table.cells))[1])
    for state, event in blanks:
        rows = [row for row in spec.events if (cell := table.cells.get((state, row))) and not cell.ignored]
        with pytest.raises(LocalProtocolError) as refused:
            step(table, states(state), events(event), "r7#2 a->b")
        error = refused.value
        assert (error.machine, error.stream, error.state, error.event) == (table.machine, "r7#2 a->b", state, event)
        assert list(error.accepted) == rows
        assert str(error) == (
            f"{table.machine} r7#2 a->b: event {event} refused in state {state};\n  accepted: {', '.join(rows) or 'nothing'}"
        )


@TABLES
def test_in_the_final_state_everything_is_ignored_and_says_why(spec: Spec, table: AnyTable) -> None:
    (final,) = table.final
    for event in spec.events:
        if (table.machine, event) in CANNOT_BE_LATE:
            continue
        cell = table.cells[final, event]
        assert cell.next == final
        assert cell.ignored
        assert not cell.bookkeeping
        assert not cell.effects


@LIFE_TABLES
def test_one_effect_alone_reaches_the_final_state_and_each_such_row_has_it(spec: Spec, table: AnyTable) -> None:
    parting = PARTING[table.machine]
    for (state, _event), cell in table.cells.items():
        leaves = cell.next in table.final and state not in table.final
        assert (parting in cell.effects) == leaves


def test_the_blanks_of_the_sender_are_these() -> None:
    """Each is a decision: a submit after one's own end is a bug of the runner, the others cannot happen."""
    blank = {
        state: sorted(event for event in SenderEvent if (state, event) not in sender_table().cells)
        for state in SenderState
    }
    ends = ["end_given_up", "end_given_up_after_release"]
    assert blank == {
        "active": sorted(
            [
                *ends,
                "end_producer_raised",
                "end_put",
                "end_put_after_release",
                "ok_end_given_up",
                "put_abandoned",
                "released_after_end",
            ]
        ),
        "terminal_pending": sorted(
            [*ends, "chunk_submitted", "segment_end_submitted", "put_abandoned", "released_after_end"]
        ),
        "cancelled_current": ["released_after_end"],
        "failed": [],
        "finalized": [],
    }


def test_the_blanks_of_the_kv_transfer_are_these() -> None:
    """An engine that reports on what it was never given is a bug here; a deadline and a drain end with what they wait for."""
    blank = {
        state: sorted(event for event in KvTransferEvent if (state, event) not in kv_table().cells)
        for state in KvTransferState
    }
    begins = ["begun", "begun_without_pieces"]
    assert blank == {
        "idle": sorted([*begins, "last_piece_acked", "outcome_drained", "piece_repeated", "went_quiet"]),
        "marked": ["last_piece_acked", "outcome_drained", "piece_repeated", "went_quiet"],
        "active": sorted([*begins, "outcome_drained"]),
        "completed": sorted([*begins, "companion_failed", "deadline_passed", "last_piece_acked", "piece_acked"]),
        "failed": sorted([*begins, "deadline_passed", "outcome_drained"]),
        "released": [],
    }


def test_no_row_gives_blocks_back_that_an_engine_may_still_touch() -> None:
    """What ends a transfer for everybody else never frees its blocks while it is active: only its own engine does."""
    frees = {(state, event) for (state, event), cell in kv_table().cells.items() if "free_blocks" in cell.effects}
    assert {event for state, event in frees if state == "active"} == {"went_quiet"}
    assert {event for state, event in frees if state == "failed"} == {"went_quiet", "last_piece_acked"}


def test_the_message_of_a_refusal_reads_as_in_the_style_guide() -> None:
    with pytest.raises(LocalProtocolError) as refused:
        step(sender_table(), SenderState.TERMINAL_PENDING, SenderEvent.CHUNK_SUBMITTED, "r7#2 0->1")
    lines = str(refused.value).split("\n")
    assert lines[0] == "sender r7#2 0->1: event chunk_submitted refused in state terminal_pending;"
    assert re.fullmatch(
        r"  accepted: task_begun, frame_built, chunk_buffered, open_put, data_put, .*peer_lost", lines[1]
    )


def test_no_receiver_state_accepts_a_get_but_active() -> None:
    """A body is fetched only for a stream that still wants it."""
    accepting = [s for s in ReceiverState if (c := receiver_table().cells.get((s, "get_begun"))) and not c.ignored]
    assert accepting == [ReceiverState.ACTIVE]


def test_the_digest_is_stable_and_short_enough_for_a_hello() -> None:
    assert re.fullmatch("[0-9a-f]{32}", spec_digest())
    assert spec_digest() == spec_digest()
