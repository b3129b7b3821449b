"""One stage of the demo in a process of its own: ``python -m omni_fsm.demo.stage_process``.

It reads one JSON object a line from its standard input and writes one a line to its standard output. The first line it reads
is its `Plan`; it answers ``{"ready": true}`` when its model is loaded. After that, ``report`` is answered with what it has to
tell, once its tables are empty; ``exit``, the end of the input (the parent died) or SIGTERM ends it.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from omni_fsm.adapters import Role, StageRunnerAdapter
from omni_fsm.demo.engine import EngineThinker
from omni_fsm.demo.faults import Faults
from omni_fsm.demo.models import pin_threads
from omni_fsm.demo.pipeline import load_pipeline
from omni_fsm.demo.ranks import Code2WavRank, join_ranks
from omni_fsm.demo.record import Record
from omni_fsm.demo.runners import RUNNERS, StageRunner
from omni_fsm.runtime import on_sigterm

SETTLE_S = 10.0


class RankPlan(msgspec.Struct, frozen=True):
    """Which rank of its stage a process is.

    Attributes:
        rank: From 0, which leads.
        ranks: How many there are.
        meeting: The file by which they meet.
    """

    rank: int
    ranks: int
    meeting: str


class Plan(msgspec.Struct, frozen=True):
    """What a stage's process is told at start; ``rank`` where the stage has several, ``engine`` whether vLLM runs its model."""

    stage: str
    directory: str
    faults: Faults
    mode: str
    rank: RankPlan | None = None
    engine: bool = False

    @property
    def name(self) -> str:
        """The process's name: the stage's, with a number for a rank that does not lead."""
        return f"{self.stage}.{self.rank.rank}" if self.rank is not None and self.rank.rank else self.stage


Runner = StageRunner | Code2WavRank | EngineThinker


class Command(msgspec.Struct, frozen=True):
    """What it is told later: ``report`` or ``exit``."""

    do: str


def settled_residue(runner_residue: Any, within_s: float = SETTLE_S) -> dict[str, int]:
    """The residue once it is all zero, or what is left of it when the time is over.

    Args:
        runner_residue: Gives the residue.
        within_s: Seconds to wait at most.
    """
    until = time.monotonic() + within_s
    while any((residue := runner_residue()).values()) and time.monotonic() < until:
        time.sleep(0.02)
    return dict(residue)


def _say(output: IO[str], message: dict[str, Any]) -> None:
    output.write(msgspec.json.encode(message).decode() + "\n")
    output.flush()


def _report(runner: Runner) -> dict[str, Any]:
    return {
        "residue": settled_residue(runner.residue),
        "lives": runner.record.report(),
        "foreign_frames": runner.foreign_frames,
        **runner.report(),
    }


def _obey(runner: Runner, output: IO[str]) -> None:
    """Do what the parent says until it says ``exit`` or is gone."""
    for line in sys.stdin:
        if msgspec.json.decode(line, type=Command).do == "report":
            _say(output, _report(runner))
        else:
            break
    runner.stopping.set()


def _stage(plan: Plan) -> StageRunner | EngineThinker:
    pipeline = load_pipeline(plan.mode)
    ends = pipeline.wiring(Path(plan.directory)).open(plan.stage)
    runner = EngineThinker if plan.engine else RUNNERS[plan.stage]
    return runner(pipeline.config(plan.stage), ends, plan.faults)


def _rank(plan: Plan, rank: RankPlan) -> Code2WavRank:
    """One rank of code2wav: the one that leads has the stage's ends."""
    pipeline, record = load_pipeline(plan.mode), Record()
    wiring = pipeline.wiring(Path(plan.directory))
    group = join_ranks(rank.meeting, rank.rank, rank.ranks)
    adapter = None
    if wiring.role(plan.stage, rank.rank) is not Role.NONE:
        source, sink = wiring.open(plan.stage, local_rank=rank.rank)
        adapter = StageRunnerAdapter(pipeline.config(plan.stage), source=source, sink=sink, observers=[record])
    return Code2WavRank(group, wiring.input_edge(plan.stage), plan.faults, record, adapter)


def main() -> None:
    """Run the stage that the first line of the input asks for."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
    pin_threads()
    runner = _rank(plan, plan.rank) if plan.rank is not None else _stage(plan)
    if runner.adapter is not None:
        on_sigterm(runner.adapter.lifecycle, runner.stopping.set)
    with runner.adapter or contextlib.nullcontext():
        _say(output, {"ready": True})
        threading.Thread(target=_obey, args=(runner, output), name="commands", daemon=True).start()
        runner.run()


if __name__ == "__main__":
    main()
