"""What ``omni-fsm explore`` does and says."""

import multiprocessing
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import resources
from typing import Any

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.verify.ends import CellName
from omni_fsm.verify.explore import Found
from omni_fsm.verify.faults import FAULTS, Fault
from omni_fsm.verify.mutants import Seen, all_mutants, notice
from omni_fsm.verify.scopes import LIMIT, SCOPES, Named, all_rows, explore_named

PROCESSES = 2


@dataclass(frozen=True)
class Explored:
    """One scope, explored."""

    named: Named
    found: Found
    rows: set[CellName]
    seconds: float

    @property
    def problem(self) -> str:
        """The broken property, or a count that is not the pinned one; empty when all is well."""
        if self.found.problem or self.found.states == self.named.states:
            return self.found.problem
        return f"{self.found.states} states, pinned are {self.named.states}: it is another protocol now"


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))


def _timed(named: Named) -> Explored:
    begun = time.monotonic()
    found, rows = explore_named(named)
    return Explored(named, found, rows, time.monotonic() - begun)


def explore_all(*, deep: bool) -> Iterator[Explored]:
    """Explore every scope, several at a time, the deep ones only when asked; gives each as it is done."""
    chosen = [named for named in SCOPES if deep or not named.is_deep]
    with _pool() as pool:
        largest_first = sorted(chosen, key=lambda named: -named.states)
        for done in as_completed([pool.submit(_timed, named) for named in largest_first]):
            yield done.result()


def missing_rows(explored: list[Explored]) -> list[CellName]:
    """Rows that no scope reached."""
    reached = {row for each in explored for row in each.rows}
    return [row for row in all_rows() if row not in reached]


def chosen_faults(name: str) -> tuple[Fault, ...]:
    """The faults that a flag names.

    Raises:
        ConfigError: There is none of that name.
    """
    if name == "all":
        return FAULTS
    chosen = tuple(fault for fault in FAULTS if fault.name == name)
    if not chosen:
        raise ConfigError("--fault", name, f"all, or one of {', '.join(fault.name for fault in FAULTS)}")
    return chosen


def find_fault(fault: Fault) -> Found:
    """Put a fault in and look for it."""
    return fault.find(LIMIT)


def notice_mutants(every: int = 1) -> Iterator[Seen]:
    """Look for each mutant of both tables, or for every so many-th, several at a time; gives them in order."""
    with _pool() as pool:
        yield from pool.map(notice, list(all_mutants())[::every], chunksize=4)


def field_cases() -> list[dict[str, Any]]:
    """The faults met in the field: number, what must hold, where it stands (``passes``, ``cannot_arise``, ``waits``), test."""
    text = resources.files("omni_fsm.verify").joinpath("cases.toml").read_text(encoding="utf-8")
    cases: list[dict[str, Any]] = tomllib.loads(text)["case"]
    return cases
