"""Two stages in two processes over shared memory under load for a minute, with kills and restarts of both.

``OMNI_FSM_STRESS_SEED`` repeats the dice of a run, as far as two real processes allow; ``OMNI_FSM_STRESS_S`` makes it longer.
"""

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import stress_peer

SEED = os.environ.get("OMNI_FSM_STRESS_SEED") or str(random.SystemRandom().getrandbits(32))
LOAD_S = float(os.environ.get("OMNI_FSM_STRESS_S", "36"))
ROUNDS = (("worker",), ("front",), ("front", "worker"))
"""Who is killed: in the first two rounds one stage outlives every other, and must be as clean as new after it."""
KILLS_MIN = 2
"""How often at least a round kills, with SIGKILL; any further end may be a SIGTERM."""
HAPPENINGS = (
    *(f"whim: {whim}" for whim in ("cancel", "fail", "release", "raise")),
    *(f"failed: {why}" for why in ("peer_lost", "unclaimed", "done", "released", "planned refusal at the worker")),
    "reused at once",
    "refused: backlog",
    "registered later",
)
PATIENCE_S = 20.0
DRAIN_S = stress_peer.OVER_WITHIN_S + stress_peer.REST_WITHIN_S + PATIENCE_S
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written

_context = multiprocessing.get_context("forkserver")  # starts clean processes, without another import of torch
_context.set_forkserver_preload(["omni_fsm.adapters"])


@dataclass(eq=False)
class Child:
    """One stage's process."""

    role: str
    process: Any
    pipe: Connection
    reports: list[dict[str, Any]] = field(default_factory=list)
    is_up: bool = False
    down: dict[str, int] | None = None  # what it had counted, once it has left in order


class Stress:
    """Starts, loads, kills and drains the two stages, and keeps what they say is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chance = random.Random(SEED)  # noqa: S311 - a test's dice
        self.started = Counter[str]()
        self.children: dict[str, Child] = {}
        self.pids: list[int] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stories: list[str] = []  # what the other stage remembers of a life that is wrong in one
        self.log: list[str] = []
        self.began_s = time.monotonic()

    def note(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self.began_s:6.2f} s: {what}")

    def start(self, role: str) -> None:
        ours, theirs = _context.Pipe()
        number = self.started[role]
        self.started[role] += 1
        args = (theirs, role, SEED, number, str(self.folder))
        process = _context.Process(target=stress_peer.serve, args=args, daemon=True)
        process.start()
        theirs.close()
        self.pids.append(process.pid or 0)
        self.children[role] = Child(role, process, ours)
        self.note(f"{role} {number} starts as process {process.pid}")

    def end(self, role: str, sig: signal.Signals) -> None:
        """Kill a stage, or ask it to leave, and wait until it is gone."""
        child = self.children.pop(role)
        self.note(f"{sig.name} to {role} {self.started[role] - 1}")
        os.kill(child.process.pid, sig)
        child.process.join(PATIENCE_S)
        self.counts[f"{sig.name} {role}"] += 1
        if child.process.exitcode != (0 if sig is signal.SIGTERM else -sig):
            self.wrong.append(f"{role}: exit code {child.process.exitcode} after {sig.name}")
        self.close(child)

    def close(self, child: Child) -> None:
        while self.read(child):
            pass
        child.process.kill()
        child.process.join(PATIENCE_S)
        child.process.close()
        child.pipe.close()

    def listen(self, timeout_s: float) -> None:
        """Take in what the stages say, until the time is over or something was said."""
        pipes = {child.pipe: child for child in self.children.values()}
        for pipe in wait(list(pipes), timeout_s):
            child = pipes[pipe]  # type: ignore[index]
            if not self.read(child) and child.down is None:
                self.close(self.children.pop(child.role))
                self.wrong.append(f"{child.role}: the process died by itself")

    def read(self, child: Child) -> bool:
        """One message. Returns whether there may be another."""
        try:
            if not child.pipe.poll():
                return False
            what, said = child.pipe.recv()
        except (EOFError, ConnectionResetError):
            return False
        if what == "wrong":
            identity, words = said
            self.wrong.append(f"{child.role}: {words}")
            for other in self.children.values():
                if identity is not None and other is not child:
                    other.pipe.send(identity)
        elif what == "story":
            self.stories.append(said)
        elif what == "over":
            child.reports.append(said)
            self.counts.update({f"{child.role}: {name}": count for name, count in said["counts"].items()})
        elif what == "down":
            child.down = said
        else:
            child.is_up = True
        return True

    def until(self, condition: Any, within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, self.told(f"not within {within_s} s: {what}")
            self.listen(left_s)
            self.check()

    # Rounds

    def load(self, victims: tuple[str, ...], seconds: float) -> None:
        """Let the stages work, and end victims at random moments; each comes back after a while."""
        self.command("load")
        until_s = time.monotonic() + seconds
        for number in itertools.count():
            if number >= KILLS_MIN and time.monotonic() >= until_s:
                return
            self.listen_for(self.chance.uniform(0.3, 3.0))
            role = victims[number % len(victims)]
            in_order = number >= KILLS_MIN and self.chance.random() < 0.25
            self.end(role, signal.SIGTERM if in_order else signal.SIGKILL)
            self.listen_for(self.chance.choice((0.0, 0.0, 0.0, self.chance.uniform(0.5, 3.0))))
            self.start(role)
            self.until_up()
            self.children[role].pipe.send("load")

    def until_up(self) -> None:
        self.until(lambda: all(child.is_up for child in self.children.values()), PATIENCE_S, "both stages are up")

    def listen_for(self, seconds: float) -> None:
        moment_s = time.monotonic() + seconds
        while (left_s := moment_s - time.monotonic()) > 0:
            self.listen(left_s)
            self.check()

    def command(self, command: str) -> None:
        for child in self.children.values():
            child.pipe.send(command)

    def drain(self) -> None:
        """No more load: both stages must come to rest, and hold what they held at their last rest."""
        before = {role: len(child.reports) for role, child in self.children.items()}
        self.note("the load stops")
        self.command("drain")
        self.until(
            lambda: all(len(child.reports) > before[role] for role, child in self.children.items()),
            DRAIN_S,
            "both stages are at rest",
        )
        for role, child in self.children.items():
            report = child.reports[-1]
            self.note(f"{role}: over after {report['over_s']:.2f} s, {report['fds']} descriptors")
            if report["fds"] != child.reports[0]["fds"]:
                self.wrong.append(f"{role}: descriptors at rest {[report['fds'] for report in child.reports]}")
        self.check()

    def stop(self) -> None:
        """Both stages leave in order."""
        self.command("stop")
        self.until(lambda: all(child.down is not None for child in self.children.values()), PATIENCE_S, "both are down")
        for child in list(self.children.values()):
            child.process.join(PATIENCE_S)
            if child.process.exitcode != 0:
                self.wrong.append(f"{child.role}: exit code {child.process.exitcode} after its stop")
        self.kill_all()

    def kill_all(self) -> None:
        for role in list(self.children):
            self.close(self.children.pop(role))

    # What is told

    def check(self) -> None:
        if not self.wrong:
            return
        deadline_s = time.monotonic() + 1.0
        while (left_s := deadline_s - time.monotonic()) > 0:  # the other stage has its say
            self.listen(left_s)
        pytest.fail(self.told(f"{len(self.wrong)} things are wrong"), pytrace=False)

    def told(self, what: str) -> str:
        lines = [
            *self.wrong[:10],
            *self.stories[:10],
            *self.log,
            *(f"{n} {name}" for name, n in sorted(self.counts.items())),
        ]
        return f"OMNI_FSM_STRESS_SEED={SEED}: {what}\n" + "\n".join(lines)


@pytest.fixture
def stress(tmp_path: Path) -> Iterator[Stress]:
    folder = tmp_path / "edges"
    folder.mkdir(mode=0o700)
    running = Stress(folder)
    try:
        yield running
    finally:
        running.kill_all()


def are_gone(pids: list[int]) -> bool:
    """Whether not even a zombie is left of these processes."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.timeout(120 + 4 * LOAD_S)
def test_no_byte_is_wrong_and_nothing_is_left_after_a_minute_of_load_cancels_reuse_and_kills(stress: Stress) -> None:
    print(f"OMNI_FSM_STRESS_SEED={SEED}")  # noqa: T201 - shown when the test fails
    shared_before = set(SHARED_MEMORY.iterdir())
    for role in stress_peer.ROLES:
        stress.start(role)
    stress.until_up()
    for victims in ROUNDS:
        stress.load(victims, LOAD_S / len(ROUNDS))
        stress.drain()
    stress.stop()
    stress.check()
    stress.until(lambda: are_gone(stress.pids), PATIENCE_S, "no process is left")
    assert list(stress.folder.iterdir()) == [], stress.told("files are left where the edges meet")
    stress.until(lambda: set(SHARED_MEMORY.iterdir()) <= shared_before, PATIENCE_S, f"{SHARED_MEMORY} is as it was")
    counts = stress.counts
    print(stress.told("all is well"))  # noqa: T201 - shown by -s
    assert all(counts[f"SIGKILL {role}"] > KILLS_MIN for role in stress_peer.ROLES), stress.told("too few kills")
    assert all(counts[f"{role}: whole"] > 100 for role in stress_peer.ROLES), stress.told("too few requests were whole")
    never = [what for what in HAPPENINGS if not any(counts[f"{role}: {what}"] for role in stress_peer.ROLES)]
    assert never == [], stress.told("not all happened that was planned")
