"""What two vLLM engines cost while every request waits for the stage before: nothing is polled, so it must be next to nothing."""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from omni_fsm.demo.engine_pair import FIRST, SECOND, SETTLE_S, EnginePair, pair_args, prompts
from omni_fsm.demo.models import require_vllm

_MAX_TOKENS = 4

_CPU_CLOCK = 2
"""With a pid above it the number of the clock that ``clock_getcpuclockid(3)`` gives, which Python lacks."""


def measure(*, requests: int = 32, seconds: float = 10.0) -> dict[str, Any]:
    """Look at the CPU time of both engines' processes and of their client: first with no request, then with requests parked.

    Args:
        requests: How many are parked at the second engine. After it they are served, to see that they were only waiting.
        seconds: How long to look, each time.

    Returns:
        ``empty`` and ``parked``, each the CPU seconds of every process; ``share_empty`` and ``share_parked``, their sums over the
        time: 0.01 is one hundredth of a core.

    Raises:
        MissingPackageError: vLLM is not installed.
    """
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="omni_fsm_") as path:
        return asyncio.run(_measure(requests, seconds, Path(path)))


def in_words(found: dict[str, Any]) -> list[str]:
    """What `measure` found, a sentence a line."""
    spent = [
        f"{name}: {found['empty'][name] * 1e3:.1f} ms of CPU time with no request, {parked_s * 1e3:.1f} ms with them parked"
        for name, parked_s in found["parked"].items()
    ]
    shares = f"{found['share_parked']:.2%} of a core; with no request {found['share_empty']:.2%}"
    return [*spent, f"{found['requests']} parked requests, {found['seconds']:.1f} s: {shares}"]


async def _measure(requests: int, seconds: float, directory: Path) -> dict[str, Any]:
    pair = EnginePair(*pair_args(directory))
    try:
        await pair.both("first", prompts(1)[0], max_tokens=_MAX_TOKENS)
        return await parked(pair, requests, seconds, SETTLE_S)
    finally:
        pair.close()


async def parked(pair: EnginePair, requests: int, seconds: float, settle_s: float) -> dict[str, Any]:
    """As `measure`, with engines that run, from ``settle_s`` after the last step on."""
    await asyncio.sleep(settle_s)
    empty, _ = await _look(pair, seconds)
    lives = {f"parked-{number}": pair.generations.next() for number in range(requests)}
    waiting = [asyncio.create_task(pair.waits(*life, max_tokens=_MAX_TOKENS)) for life in lives.items()]
    await asyncio.sleep(settle_s)
    spent, spent_s = await _look(pair, seconds)
    begins = zip(lives.items(), prompts(requests), strict=True)
    await asyncio.gather(*(pair.begins(*life, ids, max_tokens=_MAX_TOKENS) for life, ids in begins))
    said = await asyncio.gather(*waiting)
    if any(each.finish_reason != "length" for each in said):
        raise AssertionError([(each.finish_reason, each.stop_reason) for each in said])
    return {
        "case": "idle",
        "requests": requests,
        "seconds": spent_s,
        "empty": empty,
        "parked": spent,
        "share_empty": sum(empty.values()) / spent_s,
        "share_parked": sum(spent.values()) / spent_s,
    }


async def _look(pair: EnginePair, seconds: float) -> tuple[dict[str, float], float]:
    """The CPU seconds of each process of a pair of engines and of this one, and how long it was looked."""
    pids = {"client": os.getpid()}
    for stage, engine in ((FIRST, pair.first), (SECOND, pair.second)):
        pids[stage] = engine.pid
        pids |= {f"{stage}, worker {number}": pid for number, pid in enumerate(engine.worker_pids)}
    begun_s, before = time.perf_counter(), {name: _cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    return {name: _cpu_s(pid) - before[name] for name, pid in pids.items()}, time.perf_counter() - begun_s


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, to the nanosecond: of all its threads, also of those that have ended."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
