"""What it costs to gather the chunks of a request: it must grow with their number, not with its square."""

import statistics
import time
from typing import Any

import torch

from omni_fsm.payload import ChunkAccumulator

ROWS, WIDTH = 25, 16


def gather(chunks: int) -> float:
    """Gather chunks of ``[25, 16]`` float32 and take them once. Returns the seconds that it took."""
    pieces = [{"frames": torch.full((ROWS, WIDTH), float(n)), "ids": [n], "finished": False} for n in range(chunks)]
    accumulator = ChunkAccumulator()
    begun = time.perf_counter()
    for piece in pieces:
        accumulator.add(piece)
    taken = accumulator.take()
    seconds = time.perf_counter() - begun
    if taken["frames"].shape[0] != chunks * ROWS or taken["ids"] != list(range(chunks)):
        raise AssertionError(chunks)
    return seconds


def measure(*, few: int = 1_000, many: int = 10_000, rounds: int = 9) -> dict[str, Any]:
    """Gather few and many chunks, in turn.

    Args:
        few: The smaller number of chunks.
        many: The larger one.
        rounds: How often each is measured.

    Returns:
        ``few`` and ``many`` with the median seconds of each, and ``ratio``, the median of the rounds' ratios.
    """
    gather(few)
    pairs = [(gather(few), gather(many)) for _ in range(rounds)]
    return {
        "case": "accumulate",
        "rounds": rounds,
        "few": {"chunks": few, "median_s": statistics.median(pair[0] for pair in pairs)},
        "many": {"chunks": many, "median_s": statistics.median(pair[1] for pair in pairs)},
        "ratio": statistics.median(most / least for least, most in pairs),
    }


def in_words(found: dict[str, Any]) -> list[str]:
    """What `measure` found, a sentence a line."""
    sizes = [f"{found[size]['chunks']} chunks: {found[size]['median_s'] * 1e3:.1f} ms" for size in ("few", "many")]
    return [*sizes, f"ratio: {found['ratio']:.1f} (median of {found['rounds']} rounds)"]
