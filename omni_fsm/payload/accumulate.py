"""Payloads that belong together are gathered piece by piece, and joined once, when they are taken.

A key is named by its path, joined with dots: ``codes.audio`` is ``audio`` in the dict ``codes``, and also a key that is spelt
so. What a key does with a further value depends on its name and on what was gathered:

========================================  ===============================  ================================
a further value                           `ChunkAccumulator`               `FullPayload`
========================================  ===============================  ================================
of a declared key                         replaces                         replaces
None                                      says nothing new                 says nothing new
dict after dict                           key by key                       key by key
tensor (array) that can be joined         rows appended, from 1 dim on     rows appended, from 2 dims on
list after list                           appended                         replaces
whatever else, after what is joined       `AccumulateError`                replaces
whatever else                             replaces                         replaces
========================================  ===============================  ================================

Rows can be joined if kind, dtype, device and all dims but the first are equal. Where only dtype or device differ, both classes
raise: to convert would change the data, to replace would lose it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch

from omni_fsm.payload.sizes import tree_nbytes
from omni_fsm.protocol.errors import ConfigError, OmniFsmError

DEFAULT_LIMIT_BYTES: Final = 1 << 30
FLAG_KEYS: Final = ("finished", "meta.finished", "meta.stream_finished", "meta.is_segment_finished")

Key = str | tuple[str | int, ...]
"""How a key is declared: by its name, or by its path. ``"codes.audio"`` and ``("codes", "audio")`` are the same."""

_Path = tuple[str | int, ...]
_MOST_DEPTH = 200


class AccumulateError(OmniFsmError, ValueError):
    """A piece does not go with what was gathered before it. Nothing of the piece was added.

    Attributes:
        key: Name of the key; ``payload`` for the whole payload.
        held: What was gathered there, in words.
        came: What came, in words.
        accepted: What could have come.
    """

    def __init__(self, key: str, held: str, came: str, accepted: str) -> None:
        self.key, self.held, self.came, self.accepted = key, held, came, accepted
        super().__init__(f"{key}: {came} does not go with {held}; accepted: {accepted}")


class AccumulateLimitError(OmniFsmError):
    """A piece would pass the bound in bytes. Nothing of the piece was added.

    Attributes:
        key: Name of the key that passes it.
        held_bytes: What was gathered before the piece.
        came_bytes: What came for this key.
        limit_bytes: The bound.
    """

    def __init__(self, key: str, held_bytes: int, came_bytes: int, limit_bytes: int) -> None:
        self.key, self.held_bytes, self.came_bytes, self.limit_bytes = key, held_bytes, came_bytes, limit_bytes
        super().__init__(
            f"{key}: {came_bytes} bytes more than the {held_bytes} that are gathered pass the limit of {limit_bytes}"
        )


class _Kind(StrEnum):
    DICT = "dict"
    LIST = "list"
    ROWS = "rows"
    LATEST = "latest"


@dataclass(slots=True)
class _Slot:
    """What is gathered under one key: pieces in their order; for ``latest`` one, for ``dict`` none (its keys have their own)."""

    kind: _Kind
    pieces: list[Any]
    nbytes: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class _Change:
    """What one piece does to one key: a slot in the place of the old one, or a further piece for it."""

    path: _Path
    slot: _Slot
    appends: bool


@dataclass(slots=True)
class _Plan:
    """What one payload would do; made and checked as a whole before anything is done."""

    replaced: frozenset[str]
    position: int | None
    nbytes: int
    changes: list[_Change] = field(default_factory=list)


class _Accumulator:
    """The core of both: plan a payload against the slots, carry the plan out, join the slots when taken.

    One object a request, used by one thread at a time. Adding costs what the piece has keys; taking costs what was gathered has
    bytes, however many pieces it came in.
    """

    _LEAST_DIMS: int
    _JOINS_LISTS: bool
    _MAY_CHANGE_KIND: bool

    def __init__(self, replaced: frozenset[str], limit_bytes: int) -> None:
        if type(limit_bytes) is not int or limit_bytes < 1:
            raise ConfigError("limit_bytes", limit_bytes, "an int of 1 or more")
        self._replaced, self._limit_bytes = replaced, limit_bytes
        self._slots: dict[_Path, _Slot] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Roughly how many bytes are gathered: what ``limit_bytes`` bounds."""
        return self._nbytes

    def take(self) -> Any:
        """Hand over all that was added since the last take, and begin anew.

        Returns:
            The payload; None if nothing was added. An empty dict, or rows of which there are none, is a payload. It is the
            caller's: dicts and joined lists are new ones, joined rows are new memory; what came in one piece is that piece, not
            copied. The accumulator keeps nothing of it, so that what is added later never shows in it.
        """
        if not self._slots:
            return None
        whole: dict[str | int, Any] = {}  # the payload is its only value
        for path, slot in self._slots.items():
            place = whole
            for key in ("", *path)[:-1]:
                place = place[key]
            place[("", *path)[-1]] = _joined(slot)
        self._slots, self._nbytes = {}, 0
        return whole[""]

    def _add(self, payload: Any, replaced: frozenset[str], position: int | None = None) -> None:
        plan = _Plan(replaced, position, self._nbytes)
        self._look(plan, (), payload)
        for change in plan.changes:
            self._carry_out(change)
        self._nbytes = plan.nbytes

    def _carry_out(self, change: _Change) -> None:
        if change.appends:
            held = self._slots[change.path]
            held.pieces += change.slot.pieces
            held.nbytes += change.slot.nbytes
            held.rows += change.slot.rows
            return
        for path in self._below(change.path):
            del self._slots[path]
        self._slots[change.path] = change.slot

    def _below(self, path: _Path) -> list[_Path]:
        """The keys of the dict that is gathered there."""
        held = self._slots.get(path)
        if held is None or held.kind is not _Kind.DICT:
            return []
        return [other for other in self._slots if len(other) > len(path) and other[: len(path)] == path]

    # Planning

    def _look(self, plan: _Plan, path: _Path, value: Any, *, anew: bool = False) -> None:
        """Plan what a value does to its key; ``anew``: what is held there goes with a dict around it that is replaced."""
        name, held = _name(path), None if anew else self._slots.get(path)
        if len(path) > _MOST_DEPTH:
            raise AccumulateError(name, "the dicts around it", "a further level", f"{_MOST_DEPTH} levels at most")
        declared = anew or (bool(path) and name in plan.replaced)
        if value is None and (not path or (held is not None and not declared)):
            return
        kind = self._kind(value)
        slot = _Slot(kind, [] if kind is _Kind.DICT else [value], _nbytes(name, kind, value), _rows(kind, value))
        joins = held is not None and not declared and self._goes_with(name, held, slot)
        change = _Change(path, slot, joins)
        self._enter(plan, change if declared else self._aligned(plan, change), held)
        if kind is _Kind.DICT:
            for key, child in value.items():
                self._look(plan, (*path, key), child, anew=declared)

    def _kind(self, value: Any) -> _Kind:
        if isinstance(value, dict):
            return _Kind.DICT
        if isinstance(value, list) and self._JOINS_LISTS:
            return _Kind.LIST
        return _Kind.ROWS if _dims(value) >= self._LEAST_DIMS else _Kind.LATEST

    def _goes_with(self, name: str, held: _Slot, slot: _Slot) -> bool:
        """Whether the piece is joined to what is held; if not, it takes its place."""
        if held.kind is _Kind.LATEST:
            return False
        if held.kind is not _Kind.ROWS:
            if held.kind is slot.kind:
                return True
        elif slot.pieces and _dims(slot.pieces[0]) >= 1:
            if _is_void(slot.pieces[0]):
                return True
            if _is_void(held.pieces[0]):
                return False
            if slot.kind is _Kind.ROWS and _same_rows(name, held.pieces[0], slot.pieces[0]):
                return True
        if self._MAY_CHANGE_KIND:
            return False
        raise AccumulateError(
            name, _words(held), _words(slot), f"more of {_words(held)}, or a key declared as replaced"
        )

    def _aligned(self, plan: _Plan, change: _Change) -> _Change:
        """The change, made to begin at the row that was asked for: rows from there on, held from before, give way."""
        position, slot, held = plan.position, change.slot, self._slots.get(change.path)
        if position is None or slot.kind is not _Kind.ROWS:
            return change
        rows = held.rows if held is not None and change.appends else 0
        if position > rows:
            raise AccumulateError(
                _name(change.path), f"{rows} rows", f"a piece at row {position}", f"a piece at row {rows} or before"
            )
        if held is None or position == rows:
            return change
        pieces = [*_head(held.pieces, position), *slot.pieces]
        kept_nbytes = sum(int(piece.nbytes) for piece in pieces[:-1])
        return _Change(
            change.path, _Slot(_Kind.ROWS, pieces, kept_nbytes + slot.nbytes, position + slot.rows), appends=False
        )

    def _enter(self, plan: _Plan, change: _Change, held: _Slot | None) -> None:
        """Count the change, and put it into the plan if it does anything."""
        if change.appends and (change.slot.kind is _Kind.DICT or _is_empty(change.slot.pieces[0])):
            return
        plan.nbytes += change.slot.nbytes
        if held is not None and not change.appends:
            plan.nbytes -= held.nbytes + sum(self._slots[path].nbytes for path in self._below(change.path))
        if plan.nbytes > self._limit_bytes:
            raise AccumulateLimitError(_name(change.path), self._nbytes, change.slot.nbytes, self._limit_bytes)
        plan.changes.append(change)


class ChunkAccumulator(_Accumulator):
    """What a receiver gathers whose model takes its whole input so far: chunks in order, taken together.

    A key that would change its kind (a tensor after a list, other trailing dims) is an error: the chunks before it would be lost
    without a word. A tensor of shape ``[0]`` adds nothing to rows of any shape; it is how a producer says "no rows".

    Called by: the receiving side of a stage, ``add`` once a chunk, ``take`` when the scheduler takes the input over; one thread
    at a time.

    Args:
        override_keys: Keys of which each chunk carries all there is.
        flag_keys: End flags: keys of which the latest value counts even where it is a tensor with a dim. Bools need not be
            declared.
        limit_bytes: How many bytes may be gathered between two takes, roughly. A decoded tensor counts as itself, though it
            keeps its whole frame alive.

    Raises:
        ConfigError: A key or the limit cannot be used.

    >>> chunks = ChunkAccumulator(override_keys=["text"])
    >>> chunks.add({"codes": torch.tensor([1, 2]), "ids": [7], "text": ["he"], "finished": False})
    >>> chunks.add({"codes": torch.tensor([3]), "ids": [8], "text": ["hello"], "finished": True})
    >>> chunks.take()
    {'codes': tensor([1, 2, 3]), 'ids': [7, 8], 'text': ['hello'], 'finished': True}
    """

    _LEAST_DIMS = 1
    _JOINS_LISTS = True
    _MAY_CHANGE_KIND = False

    def __init__(
        self,
        override_keys: Iterable[Key] = (),
        *,
        flag_keys: Iterable[Key] = FLAG_KEYS,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        super().__init__(_names("override_keys", override_keys) | _names("flag_keys", flag_keys), limit_bytes)

    def add(self, payload: Any, *, override_keys: Iterable[Key] = ()) -> None:
        """Gather one chunk.

        Args:
            payload: A payload tree, normally a dict; None adds nothing. Given away and never written to: tensors of any dtype
                are kept as they are until the take, so leave them as they are too.
            override_keys: Keys that this chunk replaces besides those declared, such as it names itself.

        Raises:
            AccumulateError: A key changes its kind, dtype or device. Nothing was added.
            AccumulateLimitError: The bound in bytes is passed. Nothing was added.
            ConfigError: An override key cannot be used.
        """
        self._add(payload, self._replaced | _names("override_keys", override_keys))


class FullPayload(_Accumulator):
    """What a sender gathers over its steps and sends as one payload, with the end.

    Tensors of two or more dims are a request's rows, ``[rows, ...]``; all else describes it as a whole, so the latest holds. A
    tensor with other trailing dims is such a new whole; one of shape ``[0]``, after rows, is a step that had none.

    Called by: the sending side of a stage, ``add`` once a step, ``take`` when the request finishes or is cleaned up; one thread
    at a time.

    Args:
        replace_keys: Keys of which each step gives all there is so far, though their tensors look like rows.
        limit_bytes: How many bytes may be gathered, roughly.

    Raises:
        ConfigError: A key or the limit cannot be used.

    >>> full = FullPayload()
    >>> full.add({"codes": torch.tensor([[1, 2]]), "speed": 1.0})
    >>> full.add({"codes": torch.tensor([[3, 4]]), "speed": 1.5})
    >>> full.take()
    {'codes': tensor([[1, 2],
            [3, 4]]), 'speed': 1.5}
    """

    _LEAST_DIMS = 2
    _JOINS_LISTS = False
    _MAY_CHANGE_KIND = True

    def __init__(self, replace_keys: Iterable[Key] = (), *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        super().__init__(_names("replace_keys", replace_keys), limit_bytes)

    def add(self, output: Any, *, position: int | None = None) -> None:
        """Gather one step's output.

        Args:
            output: A payload tree, normally a dict; None adds nothing. Given away and never written to.
            position: Number of the first row of each of its rows, counted from the request's begin; None: they follow what is
                held. Rows from there on that are held already were computed before a preemption and give way, so that none is
                there twice.

        Raises:
            AccumulateError: Rows change their dtype or device, or begin after the last one that is held. Nothing was added.
            AccumulateLimitError: The bound in bytes is passed. Nothing was added.
            ConfigError: The position cannot be used.
        """
        if position is not None and (type(position) is not int or position < 0):
            raise ConfigError("position", position, "None, or an int of 0 or more")
        self._add(output, self._replaced, position)


def _names(what: str, keys: Iterable[Key]) -> frozenset[str]:
    accepted = 'a collection of keys, each a str such as "codes.audio" or a tuple of its parts'
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ConfigError(what, keys, accepted)
    names = set()
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if (
            not isinstance(parts, tuple | list)
            or not parts
            or not all(type(p) in (str, int) and p != "" for p in parts)
        ):
            raise ConfigError(what, key, accepted)
        names.add(_name(tuple(parts)))
    return frozenset(names)


def _name(path: _Path) -> str:
    return ".".join(map(str, path)) if path else "payload"


def _nbytes(name: str, kind: _Kind, value: Any) -> int:
    return tree_nbytes(None if kind is _Kind.DICT else value) + len(name)


def _rows(kind: _Kind, value: Any) -> int:
    return int(value.shape[0]) if kind is _Kind.ROWS else 0


def _dims(value: Any) -> int:
    """How many dims rows of it would have; -1 for what holds no rows."""
    if isinstance(value, torch.Tensor):
        return -1 if value.is_nested or value.layout is not torch.strided else value.dim()
    return value.ndim if type(value) is np.ndarray else -1


def _is_void(value: Any) -> bool:
    """Whether it is a tensor or array of shape ``[0]``, of whatever dtype."""
    return tuple(value.shape) == (0,)


def _is_empty(piece: Any) -> bool:
    return len(piece) == 0


def _same_rows(name: str, held: Any, came: Any) -> bool:
    """Whether both are rows of one tensor.

    Raises:
        AccumulateError: They would be, but for dtype or device.
    """
    if isinstance(held, torch.Tensor) is not isinstance(came, torch.Tensor) or held.shape[1:] != came.shape[1:]:
        return False
    if held.ndim != came.ndim:
        return False
    both = [(value.dtype, getattr(value, "device", None)) for value in (held, came)]
    if both[0] != both[1]:
        raise AccumulateError(name, _value_words(held), _value_words(came), f"rows of {_value_words(held)}")
    return True


def _head(pieces: list[Any], rows: int) -> Iterator[Any]:
    """The first rows of pieces, as views."""
    for piece in pieces:
        if rows <= 0:
            return
        yield piece[:rows]
        rows -= len(piece)


def _joined(slot: _Slot) -> Any:
    if slot.kind is _Kind.DICT:
        return {}
    if slot.kind is _Kind.LIST:
        return [item for piece in slot.pieces for item in piece]
    if len(slot.pieces) == 1:
        return slot.pieces[0]
    return torch.cat(slot.pieces) if isinstance(slot.pieces[0], torch.Tensor) else np.concatenate(slot.pieces)


def _words(slot: _Slot) -> str:
    return "a dict" if slot.kind is _Kind.DICT else _value_words(slot.pieces[0])


def _value_words(value: Any) -> str:
    if _dims(value) < 0:
        return "a list" if isinstance(value, list) else f"a value of type {type(value).__name__}"
    kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
    device = f" on {value.device}" if isinstance(value, torch.Tensor) and value.device.type != "cpu" else ""
    return f"{kind} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}{device}"
