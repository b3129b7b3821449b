"""One stage of the demo in a process of its own: ``python -m omni_fsm.demo.stage_process``.

It reads one JSON object a line from its standard input and writes one a line to its standard output. The first line it reads
is its `Plan`; it answers ``{"ready": true}`` when its model is loaded. After that, ``report`` is answered with what it has to
tell, once its tables are empty; ``exit``, the end of the input (the parent died) or SIGTERM ends it.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from omni_fsm.demo.faults import Faults
from omni_fsm.demo.models import pin_threads
from omni_fsm.demo.pipeline import load_pipeline
from omni_fsm.demo.runners import RUNNERS, StageRunner
from omni_fsm.runtime import on_sigterm

SETTLE_S = 10.0


class Plan(msgspec.Struct, frozen=True):
    """What a stage's process is told at start."""

    stage: str
    directory: str
    faults: Faults
    mode: str


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


def _report(runner: StageRunner) -> dict[str, Any]:
    return {
        "residue": settled_residue(runner.adapter.residue),
        "lives": runner.record.report(),
        "foreign_frames": runner.foreign_frames,
    }


def _obey(runner: StageRunner, output: IO[str]) -> None:
    """Do what the parent says until it says ``exit`` or is gone."""
    for line in sys.stdin:
        if msgspec.json.decode(line, type=Command).do == "report":
            _say(output, _report(runner))
        else:
            break
    runner.stopping.set()


def main() -> None:
    """Run the stage that the first line of the input asks for."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
    pin_threads()
    pipeline = load_pipeline(plan.mode)
    ends = pipeline.connectors(plan.stage, Path(plan.directory))
    runner = RUNNERS[plan.stage](pipeline.config(plan.stage), ends, plan.faults)
    on_sigterm(runner.adapter.threads, runner.stopping.set)
    with runner.adapter:
        _say(output, {"ready": True})
        threading.Thread(target=_obey, args=(runner, output), name="commands", daemon=True).start()
        runner.run()


if __name__ == "__main__":
    main()
