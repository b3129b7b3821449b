"""A breadth-first explorer: every state of a small world, each action in each state, properties at every step."""

from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


class World(Protocol):
    """A small system, whole: a value that acts."""

    def key(self) -> Hashable:
        """Its value: two worlds of one key behave alike."""

    def actions(self) -> Iterator["Action"]:
        """All that can happen next."""

    def is_settled(self) -> bool:
        """Whether nothing is left to do: every half is final."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can happen.

    Attributes:
        name: As a trace shows it.
        run: Gives the world after it; raises `Violation` when a property is broken.
        fair: Whether it happens by itself, sooner or later; a fault or a change of mind is not fair.
    """

    name: str
    run: Callable[[], World]
    fair: bool


class Violation(Exception):  # noqa: N818 - the field's word
    """A property does not hold."""


@dataclass(slots=True)
class Found:
    """What an exploration found.

    Attributes:
        states: How many states were reached.
        transitions: How many actions were taken.
        problem: The broken property; empty when all hold.
        trace: The shortest path to it, as names of actions.
        complete: Whether every state was reached; not when a limit or a problem ended it.
    """

    states: int = 0
    transitions: int = 0
    problem: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = False


def explore(start: World, limit: int = 1_000_000) -> Found:
    """Explore every state that can be reached, nearest first.

    Checks at every step what the world checks itself; and once all states are known, that from each of them a settled
    one is reached by fair actions alone: nothing waits for ever once no more goes wrong.
    """
    found = Found()
    seen: dict[Hashable, int] = {start.key(): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    worlds: dict[int, World] = {0: start}
    before, after = array("q"), array("q")  # the fair steps
    settled: list[int] = []
    at = 0
    while worlds:
        world = worlds.pop(at)  # only the frontier is kept whole
        if world.is_settled():
            settled.append(at)
        for action in world.actions():
            found.transitions += 1
            try:
                reached = action.run()
            except Violation as violation:
                return _problem(found, seen, str(violation), [*_path(came_from, at), action.name])
            key = reached.key()
            number = seen.get(key)
            if number is None:
                number = seen[key] = len(seen)
                worlds[number] = reached
                came_from.append((at, action.name))
            if action.fair:
                before.append(at)
                after.append(number)
        at += 1
        if len(seen) > limit:
            found.states = len(seen)
            return found
    stuck = _stuck(len(seen), before, after, settled)
    if stuck is not None:
        return _problem(found, seen, "nothing settles from here, although no more goes wrong", _path(came_from, stuck))
    found.states, found.complete = len(seen), True
    return found


def _problem(found: Found, seen: dict[Hashable, int], problem: str, trace: list[str]) -> Found:
    found.states, found.problem, found.trace = len(seen), problem, trace
    return found


def _path(came_from: list[tuple[int, str]], at: int) -> list[str]:
    names = []
    while at > 0:
        at, name = came_from[at]
        names.append(name)
    return names[::-1]


def _stuck(count: int, before: "array[int]", after: "array[int]", settled: list[int]) -> int | None:
    """The first state from which no settled one is reached by fair steps; None when there is none."""
    into: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(before, after, strict=True):
        into[target].append(source)
    good = bytearray(count)
    stack = list(settled)
    for state in stack:
        good[state] = 1
    while stack:
        for source in into[stack.pop()]:
            if not good[source]:
                good[source] = 1
                stack.append(source)
    return next((state for state in range(count) if not good[state]), None)
