"""Drives one stage for the runner rules: its neighbours, its loop a cycle at a time, and what came of each request."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Lifecycle
from omni_fsm.testing.edge import MIN_TURNS, broken
from omni_fsm.testing.neighbours import After, Before, Output

Cycle = Callable[[], object]
"""Runs one cycle of a runner's loop. Called by: one thread of the kit, always the same for a stage."""

Made = tuple[StageRunnerAdapter | Lifecycle, Cycle]
"""A stage under test and its cycle."""

KEPT_ON_PURPOSE: Final = frozenset({"tombstones", "timers"})
"""What a stage holds for a while after a request is over: the tombstone, and the timer that will remove it."""

_TURN_S = 0.002
_QUIET_CYCLES = 2


class OneCycle(threading.Event):
    """A stop event for a loop that asks ``is_set()`` before each cycle: it lets one pass, then ends the loop.

    A loop that is called again and again with the same one runs one cycle a call.

    >>> stopping, cycles = OneCycle(), []
    >>> while not stopping.is_set():
    ...     cycles.append("a cycle")
    >>> cycles
    ['a cycle']
    """

    _passed = True

    def is_set(self) -> bool:
        """Whether the loop shall end: every second time."""
        self._passed = not self._passed
        return self._passed


class _Loop:
    """The scheduler's thread of the stage under test: runs one cycle whenever it is told to."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._wanted = threading.Semaphore(0)
        self._over = False
        self.resting = threading.Event()
        self.resting.set()
        self.begun_s = 0.0
        self.raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kit-loop", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a cycle, unless one is under way."""
        if self.resting.is_set():
            self.begun_s = time.monotonic()
            self.resting.clear()
            self._wanted.release()

    def end(self, patience_s: float) -> None:
        """Let the thread end after its cycle, and wait for it."""
        self._over = True
        self._wanted.release()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._over:
                return
            try:
                self._cycle()
            except BaseException as error:  # noqa: BLE001 - told by the test's own thread
                self.raised = error
            self.resting.set()


class Life:
    """One life of a request, whose input is fed as the test says.

    Attributes:
        identity: External id and generation.
        number: Which of the author's inputs it has.
        left: The payloads that were not fed yet.
    """

    def __init__(self, before: Before, identity: Identity, number: int, inputs: list[Any]) -> None:
        self._before = before
        self.identity, self.number = identity, number
        self.left = deque(inputs)
        before.open(identity)

    def feed(self, count: int | None = None) -> None:
        """Feed the next payloads; all that are left, and the end, unless ``count`` says how many."""
        for _ in range(len(self.left) if count is None else min(count, len(self.left))):
            self._before.data(self.identity, self.left.popleft())
        if count is None:
            self.finish()

    def feed_half(self) -> None:
        """Feed the first half of the payloads, at least one, and no end."""
        self.feed((len(self.left) + 1) // 2)

    def feed_one(self) -> None:
        """Feed what comes next: a payload, or the end."""
        if self.left:
            self.feed(1)
        else:
            self.finish()

    def finish(self) -> None:
        """The input is complete."""
        self._before.finish(self.identity)


class StageDriver:
    """A stage under test between its neighbours.

    Attributes:
        before: The stage before.
        after: The stage after.
        submits: How often the runner has submitted a chunk.
        loop_rule: The rule that a raise of the author's cycle breaks.
    """

    def __init__(self, stage: str, patience_s: float) -> None:
        self.before, self.after = Before(Edge("kit-before", stage)), After(Edge(stage, "kit-after"))
        self._patience_s = patience_s
        self.submits = 0
        self.loop_rule = "cycle"

    @contextmanager
    def running(self, made: Made) -> Iterator["StageDriver"]:
        """Run the author's stage; shut it down afterwards."""
        stage, cycle = made
        self.lifecycle = stage if isinstance(stage, Lifecycle) else stage.lifecycle
        self._count_submits()
        self._loop = _Loop(cycle)
        self.lifecycle.start()
        try:
            self.until("peers", "the stage did not meet its neighbours", lambda: self._met, cycles=False)
            yield self
        finally:
            self.lifecycle.shutdown(0.0)
            self._loop.end(self._patience_s)
            for end in (self.before.end, self.after.end, self.before.stage_end, self.after.stage_end):
                end.close()

    def _count_submits(self) -> None:
        """Shadow the runtime's method on this one object: a submit of a request that is over leaves no other trace."""
        runtime = self.lifecycle.runtime
        submit_chunk = runtime.submit_chunk

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.submits += 1
            return submit_chunk(*args, **kwargs)

        vars(runtime)["submit_chunk"] = counted

    @property
    def _met(self) -> bool:
        return self.before.is_met and self.after.is_met

    # Steps

    def turn(self) -> None:
        """One round of both neighbours' loops."""
        self.before.turn()
        self.after.turn(_TURN_S)

    def until(
        self, rule: str, words: str | Callable[[], str], condition: Callable[[], object], *, cycles: bool = True
    ) -> None:
        """Turn, and let the runner cycle, until something holds; the rule is broken when it does not."""
        deadline_s, turns = time.monotonic() + self._patience_s, 0
        while not condition():
            turns += 1
            self._check_loop()
            if time.monotonic() > deadline_s and turns > MIN_TURNS:
                self._check_cycle_length()
                broken(rule, f"{words if isinstance(words, str) else words()} within {self._patience_s} s")
            if cycles:
                self._loop.begin()
            self.turn()
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop.raised is not None:
            raised = self._loop.raised
            raise AssertionError(f"rule {self.loop_rule}: a cycle raised {raised!r}") from raised

    def _check_cycle_length(self) -> None:
        """Nothing came in time: say so where it is the cycle that hangs."""
        took_s = time.monotonic() - self._loop.begun_s
        if not self._loop.resting.is_set() and took_s > self._patience_s / 2:
            broken("cycle", f"a cycle did not return in {took_s:.1f} s")

    def rest(self) -> None:
        """Wait until no cycle is under way."""
        self.until("cycle", "a cycle did not return", self._loop.resting.is_set, cycles=False)

    def cycle(self, count: int = 1) -> None:
        """Run whole cycles, on what has arrived by now."""
        for _ in range(count):
            self.rest()
            self._loop.begin()
            self.rest()

    def catch_up(self) -> None:
        """Run cycles until the runner has done what can be done with the input so far."""
        quiet, deadline_s = 0, time.monotonic() + self._patience_s
        while quiet < _QUIET_CYCLES and time.monotonic() < deadline_s:
            submits = self.submits
            self.cycle()
            quiet = quiet + 1 if self.submits == submits else 0

    def arrived(self) -> None:
        """Wait until the stage has taken in what was fed, as far as its credit allows; the runner does not cycle."""
        self.rest()
        self.turn()
        words = "the stage did not read its input"
        self.until("peers", words, lambda: self.before.is_read, cycles=False)
        idle_gets = self.before.idle_gets
        self.before.stage_end.wake()
        self.until("peers", words, lambda: self.before.idle_gets > idle_gets, cycles=False)

    # Requests

    def until_announced(self, *lives: Life) -> None:
        """The next stage has heard of every life: what happens to the stage from here on concerns it too."""

        def unknown() -> list[str]:
            return [str(life.identity) for life in lives if not self.output(life).frames]

        self.until("peers", lambda: f"{unknown()[0]} was not announced to the next stage", lambda: not unknown())

    def ended(self, life: Life) -> bool:
        """Whether the life has ended downstream."""
        return bool(self.after.output(life.identity).ends)

    def until_ended(self, rule: str, *lives: Life) -> None:
        """Every life ends downstream."""

        def open_ones() -> list[Life]:
            return [life for life in lives if not self.ended(life)]

        def words() -> str:
            life = open_ones()[0]
            count = len(self.after.output(life.identity).payloads)
            return f"{life.identity} gave {count} payloads and did not end"

        self.until(rule, words, lambda: not open_ones())

    def check_ends(self) -> None:
        """No life ended twice, and nothing of it came after its end."""
        for identity, output in self.after.outputs.items():
            if len(output.ends) > 1:
                told = " and ".join(map(str, output.ends))
                broken("one-end", f"{identity} ended {len(output.ends)} times: {told}")
            if output.ends and output.frames[-1].cause is None:
                broken("one-end", f"{identity} ended with {output.ends[0]}, and frames came after it")

    def output(self, life: Life) -> Output:
        """What has come of a life."""
        return self.after.output(life.identity)

    # The stage

    def shutdown(self, rule: str) -> bool:
        """Shut the stage down while its loop goes on and its neighbours listen. Returns whether it flushed."""
        flushed: list[bool] = []
        thread = threading.Thread(target=lambda: flushed.append(self.lifecycle.shutdown()), daemon=True)
        thread.start()
        self.until(rule, "the shutdown did not return", lambda: flushed)
        thread.join()
        return flushed[0]

    def residue(self) -> dict[str, int]:
        """What the stage holds and should not."""
        held = self.lifecycle.runtime.residue()
        return {name: count for name, count in held.items() if count and name not in KEPT_ON_PURPOSE}
