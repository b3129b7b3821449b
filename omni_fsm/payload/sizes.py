"""How large a tree of anything is, roughly: for queues that are bounded in bytes."""

import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

_MOST_VALUES = 100_000  # looked at; each further one counts as a number
_NUMBER_NBYTES = 8
_NUMBERS = (type(None), bool, int, float, complex)


def tree_nbytes(tree: Any) -> int:
    """Approximate size of a runner's output in bytes, whatever it is made of.

    Tensors and arrays count their elements, bytes and str their length, numbers 8, anything else `sys.getsizeof`. What
    is met twice in containers counts once. Looks at 100,000 values at most. Never raises.
    """
    total, pending, seen = 0, [tree], set[int]()
    for _ in range(_MOST_VALUES):
        if not pending:
            break
        value = pending.pop()
        if type(value) in _NUMBERS:
            total += _NUMBER_NBYTES
        elif id(value) not in seen:
            seen.add(id(value))
            total += _measure(value, pending)
    return total + len(pending) * _NUMBER_NBYTES


def _measure(value: Any, pending: list[Any]) -> int:
    """Bytes of this value alone; what it contains is added to ``pending``."""
    kind = type(value)  # isinstance would ask the object itself, which may lie or raise
    try:
        if issubclass(kind, (torch.Tensor, np.ndarray, np.generic, memoryview)):
            return int(value.nbytes)
        if issubclass(kind, (bytes, bytearray, str)):
            return len(value)
        if issubclass(kind, dict):
            return _spread(value.keys(), pending) + _spread(value.values(), pending)
        if issubclass(kind, (list, tuple, set, frozenset)):
            return _spread(value, pending)
        return sys.getsizeof(value)
    except Exception:  # noqa: BLE001 - a sparse tensor, a broken __sizeof__, a dict that changes: never the queue's fault
        return object.__sizeof__(value)


def _spread(values: Iterable[Any], pending: list[Any]) -> int:
    pending.extend(islice(values, _MOST_VALUES))
    return _NUMBER_NBYTES
