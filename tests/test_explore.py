"""The explorer finds what is there to be found, and nothing in the real protocol."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from omni_fsm.verify import Action, Step, Violation, explore
from omni_fsm.verify.faults import FAULTS, Fault
from omni_fsm.verify.report import explore_all, find_fault, missing_rows


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


@pytest.mark.timeout(600)
def test_the_protocol_is_sound_in_every_scope_and_every_row_is_reached() -> None:
    explored = list(explore_all(deep=False))
    assert [(each.named.name, each.problem, each.found.trace) for each in explored if each.problem] == []
    assert all(each.found.complete for each in explored)
    assert missing_rows(explored) == []


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_that_is_put_back_is_found_with_its_trace(fault: Fault) -> None:
    found = find_fault(fault)
    assert found["found"], fault.what
    assert found["trace"]
