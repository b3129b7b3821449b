"""One rank of a stage in a process of its own, for the tests over gloo.

The leading rank also holds the two neighbours of the stage, over real connectors: a front that opens requests, sends chunks of
random sizes, cancels, fails and falls silent, and a stage behind that takes what comes.
"""

import hashlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from omni_fsm.adapters import Edge, Hello, StageConfig, StageRunnerAdapter, memory_pair
from omni_fsm.adapters.ranks import Group, RankedStage, TorchGroup
from omni_fsm.payload import encode
from omni_fsm.runtime import TakenKind
from omni_fsm.runtime.ranks import CycleInput, RankEventKind, RankList, RankLostError, encode_list

IN, OUT = Edge("front", "model"), Edge("model", "last")
STOP = "stop"
SECONDS = 40.0


@dataclass(frozen=True)
class Plan:
    """What all ranks of one test do.

    Attributes:
        layouts: The ranks of each axis's groups.
        timeout_s: Of the groups.
        requests: How many the front opens in all; 0: it opens four and leaves them open.
        cycles: The fewest.
        coordinator: Whose groups: ``torch``, ours over torch.distributed, or ``vllm``, vLLM's own.
    """

    layouts: tuple[tuple[tuple[int, ...], ...], ...]
    timeout_s: float
    requests: int
    cycles: int = 0
    coordinator: str = "torch"


@dataclass
class Neighbours:
    """What is around the stage, on the leading rank: front, stage, and the one behind."""

    front: StageRunnerAdapter
    model: StageRunnerAdapter
    last: StageRunnerAdapter
    plan: Plan
    rng: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311 - repeatable
    open: dict[str, int] = field(default_factory=dict)
    opened: int = 0
    stopped: bool = False
    front_failed: dict[str, str] = field(default_factory=dict)
    last_failed: dict[str, str] = field(default_factory=dict)
    ended: int = 0

    def step(self, cycle: int) -> None:
        self._listen()
        if self.plan.requests == 0:
            while self.opened < 4:
                self._open(f"r{self.opened}")
            return
        while self.opened < self.plan.requests and len(self.open) < 8:
            self._open(f"r{self.opened}")
        for request, sent in list(self.open.items()):
            self._act(request, sent)
        if self.opened >= self.plan.requests and cycle >= self.plan.cycles and not self.stopped and self._is_idle():
            self.stopped = True
            request, _ = self.front.open(STOP)
            self.front.end(request)

    def _is_idle(self) -> bool:
        return not any(adapter.residue()["requests"] for adapter in (self.front, self.model, self.last))

    def _open(self, name: str) -> None:
        request, _ = self.front.open(name)
        self.open[request] = 0
        self.opened += 1

    def _act(self, request: str, sent: int) -> None:
        dice = self.rng.random()
        if dice < 0.45:
            numbers = torch.randint(0, 99, (self.rng.randint(0, 3_000),))
            payload = self.rng.choice([numbers, {"codes": numbers, "text": ("a", sent)}, sent, b"raw" * sent])
            self.front.submit_chunk(request, payload)
            self.open[request] += 1
        elif dice < 0.53:
            self.front.end(request, sent)
            del self.open[request]
        elif dice < 0.56:
            self.rng.choice([self.front.cancel, lambda name: self.front.fail(name, "the front failed")])(request)
            self.front.release(request)
            del self.open[request]
        elif dice < 0.58:
            del self.open[request]  # it falls silent: the stage's deadline ends it

    def _listen(self) -> None:
        told = self.front.collect_feedback()
        for request, cause in told.failed.items():
            self.front_failed[request] = str(cause)
            self.open.pop(request, None)
            self.front.release(request)
        told = self.last.collect_feedback()
        for request, cause in told.failed.items():
            self.last_failed[request] = str(cause)
            self.last.release(request)
        for request in told.ready:
            while (taken := self.last.take(request)).kind in (TakenKind.CHUNK, TakenKind.END):
                self.ended += taken.kind is TakenKind.END

    def residue(self) -> dict[str, int]:
        held = {}
        self._listen()
        for adapter in (self.front, self.model, self.last):
            held |= {f"{adapter.runtime.config.stage} {k}": n for k, n in adapter.residue().items() if n}
        return held


def neighbours(plan: Plan) -> Neighbours:
    first, second = memory_pair(Hello(IN)), memory_pair(Hello(OUT))
    settings = {"tombstone_s": 0.2, "unclaimed_s": 0.2, "shutdown_grace_s": 0.0}
    wait_s = 0.5 if plan.requests else 60.0
    front = StageRunnerAdapter(StageConfig(stage="front", **settings), sink=first[0])
    model = StageRunnerAdapter(
        StageConfig(stage="model", input_wait_s=wait_s, **settings), source=first[1], sink=second[0]
    )
    last = StageRunnerAdapter(StageConfig(stage="last", input_wait_s=60.0, **settings), source=second[1])
    for adapter in (front, model, last):
        adapter.start()
    return Neighbours(front, model, last, plan)


class Runner:
    """The loop of a model runner, the same on every rank."""

    def __init__(self, stage: RankedStage, around: Neighbours | None, rank: int) -> None:
        self.stage, self.around, self.rank = stage, around, rank
        self.rng = random.Random(rank)  # noqa: S311 - what this rank's own callers do differs from rank to rank
        self.digest = hashlib.sha256()
        self.cycles = 0
        self.counts: dict[str, int] = {}
        self.stop = ""

    def cycle(self) -> CycleInput:
        if self.around is not None:
            self.around.step(self.cycles)
        cycle = self.stage.begin_cycle(lambda name: len(name) % 3 + 1)
        self.cycles += 1
        self._note(cycle)
        for name, frames in cycle.taken.items():
            for taken in frames:
                if taken.kind is TakenKind.END:
                    self._note_answer(self.stage.end(name, taken.payload))
                else:
                    self._note_answer(self.stage.submit_chunk(name, taken.payload))
        for name in cycle.feedback.failed:
            self.stage.release(name)
        for name, identity in cycle.feedback.registered.items():
            self.stop = name if identity.external_id == STOP else self.stop
            if self.rng.random() < 0.15 and not self.stop:
                self.stage.cancel(name, "asked on this rank")
        return cycle

    def _note(self, cycle: CycleInput) -> None:
        self.digest.update(encode_list(RankList(cycle.cycle, cycle.events)))
        for number, payload in cycle.payloads.items():
            self.digest.update(b"%d" % number + b"".join(encode(payload).parts))
        for event in cycle.events:
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
            if event.cause is not None:
                reason = event.cause.reason.partition(":")[0]
                self.counts[reason] = self.counts.get(reason, 0) + 1

    def _note_answer(self, admission: Any) -> None:
        self.digest.update(repr(admission).encode())

    def is_over(self, cycle: CycleInput) -> bool:
        return any(e.kind is RankEventKind.OVER and e.internal_id == self.stop for e in cycle.events)


def run_all(runner: Runner) -> dict[str, Any]:
    """Cycle until the request that says so has come and gone; on every rank in the same cycle."""
    until = time.monotonic() + SECONDS
    began = time.monotonic()
    while not runner.is_over(runner.cycle()):
        assert time.monotonic() < until, f"no end after {runner.cycles} cycles: {runner.counts}"
    took = time.monotonic() - began
    held = {name: count for name, count in runner.stage.residue().items() if count and name.startswith("ranks")}
    if runner.around is not None:
        while runner.around.residue() and time.monotonic() < until:
            time.sleep(0.02)
        held |= runner.around.residue()
    return {
        "digest": runner.digest.hexdigest(),
        "cycles": runner.cycles,
        "counts": runner.counts,
        "held": held,
        "took": took,
    }


def run_until_lost(runner: Runner, say: Callable[..., None]) -> dict[str, Any]:
    """Cycle with requests that stay open until a rank is lost."""
    until = time.monotonic() + SECONDS
    ready = False
    while runner.stage.lost is None:
        assert time.monotonic() < until
        cycle = runner.cycle()
        if not ready and runner.counts.get("opened", 0) == 4:
            ready = True
            say("ready")
        time.sleep(0.005)
    lost_s = time.monotonic()
    try:
        runner.stage.begin_cycle()
        then = "no error"
    except RankLostError as error:
        then = f"{type(error).__name__}: {error}"
    around: dict[str, Any] = {}
    if runner.around is not None:
        while len(runner.around.front_failed) + len(runner.around.last_failed) < 8 and time.monotonic() < lost_s + 2:
            runner.around._listen()
            time.sleep(0.01)
        around = {"front": runner.around.front_failed, "last": runner.around.last_failed}
    told_s = time.monotonic()
    if runner.around is not None:
        while runner.around.residue() and time.monotonic() < until:
            time.sleep(0.02)
        around["held"] = runner.around.residue()
    failed = {name: str(cause) for name, cause in cycle.feedback.failed.items()}
    held = {name: count for name, count in runner.stage.residue().items() if count and name.startswith("ranks")}
    return {"failed": failed, "lost_s": lost_s, "told_s": told_s, "then": then, "held": held, **around}


def main(rank: int, world: int, store: str, plan: Plan, said: Connection) -> None:
    """Be one rank; tell the test what came of it."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        groups = [group_of(layout, rank, plan) for layout in plan.layouts]
        leads = all(group.rank_in_group == 0 for group in groups)
        around = neighbours(plan) if leads and rank == 0 else None
        idle = leads and rank != 0  # leads a group in which nothing is ranked
        if not idle and groups[0].world_size > 1 and (rank == 0 or not leads) and rank in plan_ranks(plan):
            stage = RankedStage(groups, IN, around.model.runtime if around is not None else None)
            runner = Runner(stage, around, rank)
            result = run_all(runner) if plan.requests else run_until_lost(runner, said.send)
        else:
            result = {"idle": True}
    except BaseException as error:
        said.send({"error": f"{type(error).__name__}: {error}"})
        raise
    said.send(result)
    os._exit(0)  # a default group whose peer was killed may wait in its destructor


def group_of(layout: Any, rank: int, plan: Plan) -> Group:
    """This rank's group along one axis."""
    if plan.coordinator == "torch":
        return TorchGroup.split(layout, plan.timeout_s)
    from vllm.distributed.parallel_state import init_model_parallel_group  # noqa: PLC0415 - where it is installed

    coordinator: Group = init_model_parallel_group(
        [list(ranks) for ranks in layout], rank, "gloo", use_device_communicator=False
    )
    return coordinator


def plan_ranks(plan: Plan) -> set[int]:
    """The ranks that are reached from rank 0."""
    reached = {0}
    for layout in plan.layouts:
        reached |= {rank for ranks in layout if reached & set(ranks) for rank in ranks}
    return reached
