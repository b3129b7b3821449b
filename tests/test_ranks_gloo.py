"""A stage on several ranks in processes of their own, over torch.distributed with gloo: equal, and killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from rank_peer import Plan, main

TP2 = (((0, 1),),)
TP4 = (((0, 1, 2, 3),),)
TP2_SP2 = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
WITHIN_S = 100.0


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Processes come from a server that has imported torch once."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["rank_peer"])
    return server


class World:
    """The processes of one test, and what they said: each on a pipe of its own, for a killed one leaves no lock behind."""

    def __init__(self, context: ForkServerContext, world: int, store: Path, plan: Plan) -> None:
        self.said: dict[Connection, int] = {}
        self.processes: list[ForkServerProcess] = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=main, args=(rank, world, str(store), plan, theirs))
            process.start()
            theirs.close()
            self.said[ours] = rank
            self.processes.append(process)

    def hear(self, *ranks: int) -> dict[int, Any]:
        """What each of these says next, by rank."""
        heard: dict[int, Any] = {}
        until_s = time.monotonic() + WITHIN_S
        while len(heard) < len(ranks):
            missing = [pipe for pipe, rank in self.said.items() if rank in ranks and rank not in heard]
            came = wait(missing, until_s - time.monotonic())
            assert came, f"only {sorted(heard)} said something"
            for pipe in missing:
                if pipe in came:
                    word = pipe.recv()
                    assert not isinstance(word, dict) or "error" not in word, (self.said[pipe], word)
                    heard[self.said[pipe]] = word
        return heard

    def signal(self, rank: int, sig: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, sig)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.said:
            pipe.close()


@contextmanager
def world_of(context: ForkServerContext, world: int, directory: Path, plan: Plan) -> Iterator[World]:
    ranks = World(context, world, directory / "store", plan)
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.mark.parametrize(("layouts", "world"), [(TP2, 2), (TP4, 4), (TP2_SP2, 4)], ids=["TP2", "TP4", "TP2xSP2"])
def test_every_rank_over_gloo_sees_the_same_cycles_and_nothing_is_left(
    context: ForkServerContext, tmp_path: Path, layouts: Any, world: int
) -> None:
    with world_of(context, world, tmp_path, Plan(layouts, 30.0, requests=80, cycles=300)) as ranks:
        said = ranks.hear(*range(world))
    assert len({(each["digest"], each["cycles"]) for each in said.values()}) == 1
    assert [each["held"] for each in said.values()] == [{}] * world
    counts = said[0]["counts"]
    assert said[0]["cycles"] >= 300
    for kind in ("chunk", "end", "left", "failed", "deadline_passed", "the front failed", "asked on this rank", "over"):
        assert counts.get(kind, 0) > 0, counts
    assert counts["registered"] == counts["over"] == 81


@pytest.mark.parametrize("killed", [0, 1, 3])
@pytest.mark.parametrize(("layouts", "world"), [(TP4, 4), (TP2_SP2, 4)], ids=["TP4", "TP2xSP2"])
def test_a_rank_over_gloo_that_is_killed_fails_every_request_on_the_others(
    context: ForkServerContext, tmp_path: Path, layouts: Any, world: int, killed: int
) -> None:
    """The groups' time-out is far away: each rank notices because the one before it leaves."""
    with world_of(context, world, tmp_path, Plan(layouts, 60.0, requests=0)) as ranks:
        assert set(ranks.hear(*range(world)).values()) == {"ready"}
        killed_s = time.monotonic()
        ranks.signal(killed, signal.SIGKILL)
        said = ranks.hear(*(rank for rank in range(world) if rank != killed))
    for each in said.values():
        assert each["told_s"] - killed_s < 2.0
        assert len(each["failed"]) == 4
        assert all(reason.startswith("error(rank_lost: ") for reason in each["failed"].values())
        assert each["then"].startswith("RankLostError: no cycle can begin: rank_lost: ")
        assert each["held"] == {}
    if killed:
        for neighbour in ("front", "last"):
            assert len(said[0][neighbour]) == 4
            assert all(reason.startswith("error(rank_lost: ") for reason in said[0][neighbour].values())


@pytest.mark.vllm
@pytest.mark.parametrize(("layouts", "world"), [(TP2, 2), (TP2_SP2, 4)], ids=["TP2", "TP2xSP2"])
def test_vllm_s_own_coordinators_are_groups_over_gloo_as_they_are(
    context: ForkServerContext, tmp_path: Path, layouts: Any, world: int
) -> None:
    plan = Plan(layouts, 30.0, requests=40, cycles=100, coordinator="vllm")
    with world_of(context, world, tmp_path, plan) as ranks:
        said = ranks.hear(*range(world))
    assert len({(each["digest"], each["cycles"]) for each in said.values()}) == 1
    assert [each["held"] for each in said.values()] == [{}] * world
    assert said[0]["counts"]["registered"] == said[0]["counts"]["over"] == 41


@pytest.mark.vllm
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_of_vllm_s_own_coordinator_fails_every_request_over_gloo(
    context: ForkServerContext, tmp_path: Path, killed: int
) -> None:
    with world_of(context, 2, tmp_path, Plan(TP2, 60.0, requests=0, coordinator="vllm")) as ranks:
        assert set(ranks.hear(0, 1).values()) == {"ready"}
        killed_s = time.monotonic()
        ranks.signal(killed, signal.SIGKILL)
        (said,) = ranks.hear(1 - killed).values()
    assert said["told_s"] - killed_s < 2.0
    assert len(said["failed"]) == 4
    assert all(reason.startswith("error(rank_lost: ") for reason in said["failed"].values())
    assert said["held"] == {}


def test_a_rank_over_gloo_that_hangs_is_lost_when_the_time_is_over(context: ForkServerContext, tmp_path: Path) -> None:
    with world_of(context, 2, tmp_path, Plan(TP2, 1.0, requests=0)) as ranks:
        ranks.hear(0, 1)
        stopped_s = time.monotonic()
        ranks.signal(0, signal.SIGSTOP)
        said = ranks.hear(1)
    assert len(said[1]["failed"]) == 4
    assert 0.9 < said[1]["lost_s"] - stopped_s < 2.0


def test_case_69_ranks_over_gloo_that_are_not_in_the_plan_are_not_waited_for(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """Four ranks, of which the groups hold two: the others take no part, and the two come to their end."""
    with world_of(context, 4, tmp_path, Plan((((0, 1), (2, 3)),), 30.0, requests=5)) as ranks:
        said = ranks.hear(0, 1, 2, 3)
    assert said[2] == said[3] == {"idle": True}
    assert said[0]["digest"] == said[1]["digest"]
    assert said[0]["held"] == said[1]["held"] == {}
