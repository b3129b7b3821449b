"""The explorer finds what is there to be found, and nothing in the real protocol."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from omni_fsm.cli import app
from omni_fsm.protocol.identity import Identity
from omni_fsm.verify import Action, Step, Violation, explore
from omni_fsm.verify.diagram import sequence_diagram
from omni_fsm.verify.faults import FAULTS, Fault
from omni_fsm.verify.mutants import SURVIVORS, all_mutants
from omni_fsm.verify.pipeline import line
from omni_fsm.verify.report import explore_all, find_fault, missing_rows, notice_mutants
from omni_fsm.verify.scopes import all_rows
from omni_fsm.verify.snapshot import freeze, thaw
from omni_fsm.verify.stages import build, run, value_of


@dataclass(frozen=True)
class Counter:
    """A world of one number that goes up to ``top``; ``trap`` has no fair way on, ``bad`` breaks the property. It owes something
    from one number to another."""

    top: int
    at: int = 0
    trap: int = -1
    bad: int = -1
    owed_from: int = 0
    paid_at: int = 0

    def key(self) -> int:
        return self.at

    @property
    def debts(self) -> tuple[str, ...]:
        return ("the debt is paid",)

    def owes(self) -> int:
        return int(self.owed_from <= self.at < self.paid_at)

    def left(self) -> str:
        return "" if self.at == self.top else f"{self.top - self.at} to go"

    def actions(self) -> Iterator[Action]:
        if self.at < self.top:
            yield Action(Step("one", "a", "b"), lambda: self._to(self.at + 1), fair=self.at != self.trap)
        if self.at + 2 <= self.top:
            yield Action(Step("two", "a", "b"), lambda: self._to(self.at + 2), fair=False)

    def _to(self, at: int) -> "Counter":
        if at == self.bad:
            raise Violation(f"{at} is reached")
        return replace(self, at=at)


def test_every_state_is_found_once() -> None:
    found = explore(Counter(top=10))
    assert (found.states, found.transitions, found.complete, found.problem) == (11, 19, True, "")


def test_the_trace_to_a_violation_is_the_shortest() -> None:
    found = explore(Counter(top=10, bad=5))
    assert (found.problem, found.complete) == ("5 is reached", False)
    assert len(found.trace) == 3
    assert sorted(step.name for step in found.trace) == ["one", "two", "two"]


def test_a_state_from_which_only_a_fault_leads_on_is_a_trap() -> None:
    found = explore(Counter(top=4, trap=2))
    assert found.problem == "never settles, although no more goes wrong: 4 to go"
    assert found.trace == []  # already the start leads there, if nothing goes wrong


def test_a_debt_that_nothing_pays_is_named_with_the_way_to_it() -> None:
    found = explore(Counter(top=9, trap=5, owed_from=4, paid_at=7))
    assert found.problem == "not so: the debt is paid"
    assert [step.name for step in found.trace] == ["two", "two"]


def test_a_debt_that_is_paid_by_itself_is_none() -> None:
    assert explore(Counter(top=9, owed_from=4, paid_at=7)).complete


def test_a_limit_ends_an_exploration_and_says_so() -> None:
    found = explore(Counter(top=100), limit=10)
    assert (found.complete, found.problem) == (False, "")


@pytest.mark.timeout(900)
def test_the_protocol_is_sound_in_every_scope_and_every_row_is_reached() -> None:
    explored = list(explore_all(deep=False))
    assert [(each.named.name, each.problem, each.found.trace) for each in explored if each.problem] == []
    assert all(each.found.complete for each in explored)
    assert missing_rows(explored) == []


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_that_is_put_back_is_found_with_its_trace(fault: Fault) -> None:
    found = find_fault(fault)
    assert found.problem, fault.what
    assert found.trace


def test_a_fault_leaves_the_sound_code_as_it_was() -> None:
    for fault in FAULTS:
        if fault.patch is not None:
            owner, name, faulty = fault.patch
            assert getattr(owner, name) is not faulty


@pytest.mark.timeout(900)
def test_a_sample_of_mutants_is_noticed_but_for_those_that_are_known_to_be_harmless() -> None:
    """All of them take minutes: ``omni-fsm explore --fault all``."""
    unexplained = [
        seen.mutant for seen in notice_mutants(every=30) if not seen.problem and seen.mutant not in SURVIVORS
    ]
    assert unexplained == []


def test_every_survivor_is_a_mutant_that_exists() -> None:
    assert set(SURVIVORS) <= {mutant.name for mutant in all_mutants()}
    assert all(SURVIVORS.values())


def test_there_is_a_mutant_for_every_cell_and_action() -> None:
    mutants = list(all_mutants())
    assert len(mutants) == len({mutant.name for mutant in mutants})
    touched = {(mutant.machine, mutant.state, mutant.event) for mutant in mutants}
    assert set(all_rows()) <= touched


def test_a_trace_is_drawn_with_its_participants_and_what_it_breaks() -> None:
    trace = [Step("put: stored; then #1", "sender", "wire"), Step("get", "wire", "receiver")]
    assert sequence_diagram(trace, "a chunk is lost").splitlines() == [
        "sequenceDiagram",
        "    participant sender",
        "    participant wire",
        "    participant receiver",
        "    sender->>wire: 1 put: stored, then no. 1",
        "    wire->>receiver: 2 get",
        "    Note over sender,receiver: a chunk is lost",
    ]


# The command


def explore_json(*flags: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["explore", *flags, "--json"])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_the_command_says_in_json_how_a_fault_was_found() -> None:
    code, said = explore_json("--fault", "cleanup_is_done_twice", "--diagram")
    assert (code, said) == (0, {"faults": [{"name": "cleanup_is_done_twice", "found": True, "steps": 4}]})


def test_the_command_lists_the_field_cases() -> None:
    code, said = explore_json("--cases")
    assert code == 0
    assert [case["number"] for case in said["cases"]] == list(range(1, 81))
    assert {case["status"] for case in said["cases"]} <= {"passes", "cannot_arise", "waits"}


def test_a_fault_that_nobody_knows_is_refused_with_the_names_that_are_known() -> None:
    done = CliRunner().invoke(app, ["explore", "--fault", "gremlin"])
    assert done.exit_code == 2
    assert "gremlin" in done.output
    assert "cancel_drops_the_end" in done.output


# A frozen stage


def test_a_thawed_stage_goes_on_as_the_frozen_one_would() -> None:
    thinker, _ = line(chunks=2)
    stage = build(thinker)
    run(stage, ("open", Identity("r", 1)))
    frozen = freeze(stage)
    for copy in (stage, thaw(frozen), thaw(frozen)):
        run(copy, ("put", "stored", None))
        run(copy, ("produce", None))
        run(copy, ("put", "stored", None))
        assert [letter.frame.kind for letter in copy.sink.out] == ["open", "data"]
    assert value_of(thaw(frozen)) == value_of(thaw(frozen))
    assert value_of(thaw(frozen)) != value_of(stage)
