"""How large a tree of anything is, roughly: for queues that are bounded in bytes."""

import sys
from collections.abc import Collection
from itertools import islice
from typing import Any

import numpy as np
import torch

_MOST_VALUES = 100_000
_SLOT_NBYTES = 8
_NUMBERS = (type(None), bool, int, float)


def tree_nbytes(tree: Any) -> int:
    """Approximate size of a runner's output in bytes, whatever it is made of.

    Each value costs 8, its place in what holds it. Tensors and arrays add their elements, bytes and str their length,
    numbers nothing, anything else `sys.getsizeof`. What is met again adds nothing. Looks into 100,000 values at most
    and counts the places of the rest. Never raises.

    >>> tree_nbytes({"codes": torch.zeros(25), "seq": 3})
    148
    """
    total, pending, seen = _SLOT_NBYTES, [tree], set[int]()
    for _ in range(_MOST_VALUES):
        if not pending:
            break
        value = pending.pop()
        if type(value) not in _NUMBERS and id(value) not in seen:
            seen.add(id(value))
            total += _measure(value, pending)
    return total


def _measure(value: Any, pending: list[Any]) -> int:
    """Bytes of this value alone and of the places in it; what stands there is added to ``pending``."""
    kind = type(value)  # isinstance would ask the object itself, which may lie or raise
    try:
        if issubclass(kind, (torch.Tensor, np.ndarray, np.generic, memoryview)):
            return int(value.nbytes)
        if issubclass(kind, (bytes, bytearray, str)):
            return len(value)
        if issubclass(kind, dict):
            return _open(value.keys(), pending) + _open(value.values(), pending)
        if issubclass(kind, (list, tuple, set, frozenset)):
            return _open(value, pending)
        return sys.getsizeof(value)
    except Exception:  # noqa: BLE001 - a sparse tensor, a broken __sizeof__, a dict that changes: never the queue's fault
        return object.__sizeof__(value)


def _open(values: Collection[Any], pending: list[Any]) -> int:
    pending.extend(islice(values, _MOST_VALUES))
    return len(values) * _SLOT_NBYTES
