"""The stages' processes, as the front sees them."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_fsm.demo.faults import Faults
from omni_fsm.demo.models import ENGINE_EXIT_S
from omni_fsm.demo.stage_process import Command, Plan, RankPlan
from omni_fsm.protocol.errors import OmniFsmError

START_S = 300.0
"""A stage that dies while it loads its model is noticed at once, so this may be long: an engine needs minutes on busy cores."""

EXIT_S = 15.0 + ENGINE_EXIT_S
"""What a stage's process has to exit before it is killed: its shutdown, then its engine's."""


class StageDiedError(OmniFsmError):
    """A stage's process ended before it was told to, or was killed because it said nothing in time."""

    def __init__(self, stage: str, how: str) -> None:
        self.stage, self.how = stage, how
        super().__init__(f"the process of stage {stage} {how}; what it printed stands above")


class StageProcess:
    """One stage's process. Started as a program of its own: nothing is inherited but the standard streams."""

    def __init__(self, plan: Plan) -> None:
        self.name = plan.name
        self.killed_ns: int | None = None
        command = [sys.executable, "-m", "omni_fsm.demo.stage_process"]
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a group of its own, with whatever processes its model starts
        )
        self._tell(msgspec.json.encode(plan))

    def _tell(self, message: bytes) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(message.decode() + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise StageDiedError(self.name, f"ended with code {self._ended()}") from None

    def answer(self, within_s: float) -> dict[str, Any]:
        """The next thing it says.

        Raises:
            StageDiedError: It is gone, or says nothing in time.
        """
        output = self._process.stdout
        if output is None:
            raise AssertionError(self.name)
        if not select.select([output], [], [], within_s)[0]:
            self._kill_group()
            raise StageDiedError(self.name, f"was killed: it said nothing for {within_s:.0f} s")
        line = output.readline()
        if not line:
            raise StageDiedError(self.name, f"ended with code {self._ended()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def ask(self) -> None:
        """Ask for its report; ``answer`` brings it."""
        self._tell(msgspec.json.encode(Command("report")))

    def kill(self) -> None:
        """SIGKILL."""
        self._kill_group()
        self.killed_ns = time.monotonic_ns()

    def _kill_group(self) -> None:
        """The processes of its model, too: a vLLM engine outlives whoever started it."""
        with contextlib.suppress(ProcessLookupError):  # all are gone
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> int:
        """Its exit code, once it has exited by itself or is killed; the processes of its model are gone then, too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self._kill_group()
        return self._process.wait()

    def dismiss(self) -> None:
        """Let it exit. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()  # the end of its input tells it to exit

    def close(self) -> None:
        """Let it exit, and make sure of it. Idempotent."""
        self.dismiss()
        self._ended()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def stage_processes(  # noqa: PLR0913 - what a run may ask for
    stages: list[str], directory: Path, faults: Faults, mode: str, *, ranks: int, engine: bool
) -> Iterator[dict[str, StageProcess]]:
    """Start every stage; all have loaded their models when this yields, and all have exited when it is left.

    Args:
        stages: Their names.
        directory: Where the edges' sockets are; mode 0700.
        faults: What they break.
        mode: See `load_pipeline`.
        ranks: Of the last stage, each in a process of its own.
        engine: Whether the first stage is a vLLM engine.

    Yields:
        The processes by name; a rank that follows has the stage's with its number.
    """
    plans = [Plan(stage, str(directory), faults, mode, engine=engine and stage == stages[0]) for stage in stages]
    with tempfile.TemporaryDirectory(prefix="omni-fsm-ranks-") as meeting:
        if ranks > 1:
            last = plans.pop()
            file = str(Path(meeting, "ranks"))
            plans += [msgspec.structs.replace(last, rank=RankPlan(rank, ranks, file)) for rank in range(ranks)]
        yield from _started(plans)


def _started(plans: list[Plan]) -> Iterator[dict[str, StageProcess]]:
    processes: dict[str, StageProcess] = {}
    try:
        for plan in plans:
            processes[plan.name] = StageProcess(plan)
        for process in processes.values():
            process.answer(START_S)
        yield processes
    finally:
        for process in processes.values():
            process.dismiss()  # all at once: the ranks of a stage do not take each other's leave for a loss
        for process in processes.values():
            process.close()
