"""Seeded random walks over one half, for the tests of both."""

import random
from collections.abc import Callable
from typing import Any, Protocol

from omni_fsm.protocol import LocalProtocolError, Table


class Walker(Protocol):
    """One life that checks itself while it walks; ``trace`` holds each state and event."""

    trace: list[tuple[str, str]]

    def live(self, steps: int) -> object: ...


def check_walks(
    begin: Callable[[random.Random], Walker], table: Table[Any, Any, Any, Any], *, walks: int, steps: int, floor: int
) -> None:
    """Walk many times, the same every time, and reach at least ``floor`` rows; of walks that fail the shortest is shown."""
    reached: set[tuple[str, str]] = set()
    failures: list[tuple[int, list[tuple[str, str]], Exception]] = []
    for seed in range(walks):
        life = begin(random.Random(seed))  # noqa: S311 - a test's dice
        try:
            life.live(steps)
        except (AssertionError, LocalProtocolError) as fault:
            failures.append((seed, life.trace, fault))
        reached.update(life.trace)
    if failures:
        seed, trace, fault = min(failures, key=lambda failure: len(failure[1]))
        fault.add_note(f"seed {seed}: {' -> '.join(f'{event} in {state}' for state, event in trace)}")
        raise fault
    rows = {(str(state), str(event)) for (state, event), cell in table.cells.items() if not cell.ignored}
    assert len(rows & reached) >= floor, sorted(rows - reached)
