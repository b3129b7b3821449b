"""A breadth-first explorer: every state of a small world, each action in each state, properties at every step."""

import gc
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class World(Protocol):
    """A small system, whole: a value that acts."""

    @property
    def debts(self) -> tuple[str, ...]:
        """What may be owed, in words: "a cancel leads to an end". See `owes`."""

    def key(self) -> Hashable:
        """Its value: two worlds of one key behave alike."""

    def actions(self) -> Iterator["Action"]:
        """All that can happen next."""

    def owes(self) -> int:
        """The debts that stand now, a bit each: what was promised and has not come yet."""

    def left(self) -> str:
        """What is left to do, in words; empty when every half is final and nothing is held: the world has settled."""


class Step(NamedTuple):
    """One step of a trace.

    Attributes:
        name: What happens.
        source: From whom it comes.
        target: To whom it happens.
    """

    name: str
    source: str
    target: str


class Action(NamedTuple):
    """Something that can happen.

    Attributes:
        step: As a trace shows it.
        run: Gives the world after it; raises `Violation` when a property is broken.
        fair: Whether it happens by itself, sooner or later; a fault or a change of mind is not fair.
    """

    step: Step
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
        trace: The shortest path to it.
        complete: Whether every state was reached; not when a limit or a problem ended it.
    """

    states: int = 0
    transitions: int = 0
    problem: str = ""
    trace: list[Step] = field(default_factory=list)
    complete: bool = False


def explore(start: World, limit: int = 1_000_000) -> Found:
    """Explore every state that can be reached, nearest first, and check four kinds of property.

    Always: what the world checks itself at each step, and that no step is refused or raises. Leads-to: from every state that owes
    something, one that does not owe it is reached by fair actions. Eventually: from every state a settled one is, so nothing
    waits for ever once no more goes wrong. (Sometimes, that every row is reached, is checked over several explorations.)
    """
    try:
        return _Search(start).run(limit)
    finally:
        gc.unfreeze()


_FREEZE_EVERY = 4096
"""So many states: the collector then leaves alone what is known for good, a quarter of the time otherwise."""


class _Search:
    """One exploration; states are numbered in the order in which they were met."""

    def __init__(self, start: World) -> None:
        self.found = Found()
        self.debts = start.debts
        self.seen: dict[Hashable, int] = {start.key(): 0}
        self.came_from: list[tuple[int, Step]] = [(-1, Step("", "", ""))]
        self.frontier: dict[int, World] = {0: start}  # only these are kept whole
        self.before, self.after = array("q"), array("q")  # the fair steps
        self.owed, self.left = array("q"), list[str]()

    def run(self, limit: int) -> Found:
        """Go on until all is known, a property is broken or the limit is passed."""
        at = 0
        while self.frontier:
            world = self.frontier.pop(at)
            self.owed.append(world.owes())
            self.left.append(world.left())
            for action in world.actions():
                problem = self._take(at, action)
                if problem:
                    return self._broken(problem, [*self._path(at), action.step])
            at += 1
            if not at % _FREEZE_EVERY:
                gc.freeze()
            if len(self.seen) > limit:
                self.found.states = len(self.seen)
                return self.found
        return self._judge()

    def _take(self, at: int, action: Action) -> str:
        """Take one action; gives the property that it broke, or nothing."""
        self.found.transitions += 1
        try:
            reached = action.run()
        except Violation as violation:
            return str(violation)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is what was looked for
            return f"{type(error).__name__}: {error}"
        key = reached.key()
        number = self.seen.get(key)
        if number is None:
            number = self.seen[key] = len(self.seen)
            self.frontier[number] = reached
            self.came_from.append((at, action.step))
        if action.fair:
            self.before.append(at)
            self.after.append(number)
        return ""

    def _judge(self) -> Found:
        """All states are known: check what leads to what."""
        into: list[list[int]] = [[] for _ in self.seen]
        for source, target in zip(self.before, self.after, strict=True):
            into[target].append(source)
        for bit, debt in enumerate(self.debts):
            stuck = _never_reaches(into, [not owed >> bit & 1 for owed in self.owed])
            if stuck is not None:
                return self._broken(f"not so: {debt}", self._path(stuck))
        stuck = _never_reaches(into, [not left for left in self.left])
        if stuck is not None:
            return self._broken(f"never settles, although no more goes wrong: {self.left[stuck]}", self._path(stuck))
        self.found.states, self.found.complete = len(self.seen), True
        return self.found

    def _broken(self, problem: str, trace: list[Step]) -> Found:
        self.found.states, self.found.problem, self.found.trace = len(self.seen), problem, trace
        return self.found

    def _path(self, at: int) -> list[Step]:
        steps = []
        while at > 0:
            at, step = self.came_from[at]
            steps.append(step)
        return steps[::-1]


def _never_reaches(into: list[list[int]], good: list[bool]) -> int | None:
    """The first state from which no good one is reached by fair steps; None when there is none."""
    reaches = bytearray(good)
    stack = [state for state, is_good in enumerate(good) if is_good]
    while stack:
        for source in into[stack.pop()]:
            if not reaches[source]:
                reaches[source] = 1
                stack.append(source)
    return next((state for state, does in enumerate(reaches) if not does), None)
