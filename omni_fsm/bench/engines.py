"""What the protocol costs two vLLM engines: their tokens a second, against the same engines with a plain queue."""

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from omni_fsm.demo.engine_pair import SETTLE_S, EnginePair, pair_args, prompts
from omni_fsm.demo.models import require_vllm

_OURS, _QUEUE = "omni_fsm", "queue"

QUEUE = "omni_fsm_bench_queue"
"""Where in their ``additional_config`` the engines find the path of the queue's socket."""

_LENGTHS = 32
"""How many lengths of prompts there are, from 5 tokens on."""

_SCHEDULERS = {
    _OURS: ["omni_fsm.adapters.vllm.scheduler.StageScheduler"] * 2,
    _QUEUE: ["omni_fsm.bench.queue_engines.QueueSender", "omni_fsm.bench.queue_engines.QueueReceiver"],
}
"""The first engine's and the second's."""


def measure(*, pairs: int = 9, requests: int = 256, max_tokens: int = 64) -> dict[str, Any]:
    """Let both pipelines of two engines answer the same requests, in turn; each is first in every other round.

    Args:
        pairs: How often each is measured.
        requests: How many are sent at once; an engine computes 32 of them at a time.
        max_tokens: Of each answer, at either engine.

    Returns:
        ``tokens_per_s`` of each, the median over the rounds of what both its engines sampled; ``ratio``, the median of the
        rounds' ratios of omni_fsm to the queue, and ``ratios``, all of them.

    Raises:
        MissingPackageError: vLLM is not installed.
    """
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="omni_fsm_") as path:
        rounds = asyncio.run(_rounds(Path(path), pairs, requests, max_tokens))
    ratios = [spent[_QUEUE] / spent[_OURS] for spent in rounds]
    tokens = 2 * requests * max_tokens
    return {
        "case": "engines",
        "rounds": pairs,
        "requests": requests,
        "tokens": tokens,
        "tokens_per_s": {name: statistics.median(tokens / spent[name] for spent in rounds) for name in _SCHEDULERS},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def in_words(found: dict[str, Any]) -> list[str]:
    """What `measure` found, a sentence a line."""
    speeds = [f"{name}: {speed:.0f} tokens a second" for name, speed in found["tokens_per_s"].items()]
    ratios = f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f}"
    return [*speeds, f"ratio: {found['ratio']:.3f} (median of {found['rounds']} pairs, {ratios})"]


async def _rounds(directory: Path, pairs: int, requests: int, max_tokens: int) -> list[dict[str, float]]:
    """The seconds that each pipeline took in each round."""
    pipelines: dict[str, EnginePair] = {}
    try:
        for name in _SCHEDULERS:
            pipelines[name] = _pipeline(name, directory / name)
            await _seconds(pipelines[name], requests, max_tokens)  # warms it up
        found = []
        for number in range(pairs):
            order = list(pipelines)[:: 1 if number % 2 == 0 else -1]
            found.append({name: await _seconds(pipelines[name], requests, max_tokens) for name in order})
        return found
    finally:
        for pipeline in pipelines.values():
            pipeline.close()


def _pipeline(name: str, directory: Path) -> EnginePair:
    directory.mkdir()
    both = pair_args(directory)
    for arguments, scheduler in zip(both, _SCHEDULERS[name], strict=True):
        arguments.scheduler_cls = scheduler
        arguments.enable_prefix_caching = False  # each round asks the same
        arguments.additional_config[QUEUE] = str(directory / "queue")
    return EnginePair(*both)


async def _seconds(pipeline: EnginePair, requests: int, max_tokens: int) -> float:
    await asyncio.sleep(SETTLE_S)  # the other pipeline's workers
    begun_s = time.perf_counter()
    asked = enumerate(itertools.islice(itertools.cycle(prompts(_LENGTHS)), requests))
    said = await asyncio.gather(*(pipeline.both(f"r{number}", ids, max_tokens=max_tokens) for number, ids in asked))
    spent_s = time.perf_counter() - begun_s
    if any(len(each.token_ids) != max_tokens for both in said for each in both):
        raise AssertionError([(each.finish_reason, each.stop_reason) for both in said for each in both])
    return spent_s
