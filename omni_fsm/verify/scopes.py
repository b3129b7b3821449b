"""The scopes that are explored, each with the count of its states: a new count is a new protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from omni_fsm.tables import receiver_table, sender_table
from omni_fsm.verify.ends import CellName
from omni_fsm.verify.explore import Found, explore
from omni_fsm.verify.pipeline import EVERY_WRONG, PipelineScope, line, ring
from omni_fsm.verify.world import ALL_FAULTS, Scope

LIMIT = 5_000_000


@dataclass(frozen=True)
class Named:
    """A scope with a name, and how many states it has.

    Attributes:
        name: As reports show it.
        states: The pinned count.
        scope: Its bounds and faults.
        is_deep: Whether it takes minutes.
    """

    name: str
    states: int
    scope: "partial[Scope] | partial[PipelineScope]"
    is_deep: bool = False


SCOPES = (
    Named("one chunk, nothing goes wrong", 71, partial(Scope, faults=frozenset())),
    Named("one chunk, every fault, segments", 25_793, partial(Scope, faults=ALL_FAULTS | {"segment"})),
    Named("three chunks, every fault", 430_548, partial(Scope, chunks=3)),
    Named(
        "two generations of one chunk, reused at any moment",
        209_579,
        partial(Scope, generations=2, retries=0, faults=frozenset({"put", "cancel", "raise"})),
    ),
    Named(
        "three bound stages, one chunk, one thing goes wrong anywhere",
        308_331,
        partial(PipelineScope, ring(), wrongs=EVERY_WRONG, budget=1, eager=True),
    ),
    Named(
        "credit for one frame, three chunks, registered late or never, one thing goes wrong",
        101_651,
        partial(PipelineScope, line(chunks=3, window_frames=1), wrongs=EVERY_WRONG, budget=1, meanwhile=True),
    ),
    Named(
        "two lives of one chunk between two stages, reused at any moment",
        93_688,
        partial(PipelineScope, line(window_frames=1), lives=2),
    ),
    Named(
        "two chunks between two stages, a frame is lost",
        2_560,
        partial(PipelineScope, line(chunks=2), wrongs=frozenset({"lose"}), budget=1),
    ),
    Named(
        "two generations of one chunk, with retries",
        2_838_523,
        partial(Scope, generations=2, faults=frozenset({"put", "cancel", "raise"})),
        is_deep=True,
    ),
    Named(
        "two lives of one chunk between two stages, a host cancels one",
        744_113,
        partial(PipelineScope, line(window_frames=1), lives=2, wrongs=frozenset({"cancel"}), budget=1, meanwhile=True),
        is_deep=True,
    ),
)


def explore_named(named: Named) -> tuple[Found, set[CellName]]:
    """Explore one scope; also gives the rows that it reached."""
    scope = named.scope()
    found = explore(scope.world(), LIMIT)
    return found, scope.cells & set(all_rows())


def all_rows() -> Iterator[CellName]:
    """Every row of both tables."""
    for (state, event), cell in sender_table().cells.items():
        if not cell.ignored:
            yield ("sender", str(state), str(event))
    for (at, happened), row in receiver_table().cells.items():
        if not row.ignored:
            yield ("receiver", str(at), str(happened))
