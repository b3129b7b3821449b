"""Encode a payload tree: one walk that lists its nodes and borrows its memory."""

import json
import reprlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from omni_fsm.payload import wire
from omni_fsm.payload.wire import DEFAULT_LIMITS, Limits, PayloadEncodeError

_ACCEPTED = (
    "None, bool, int, float, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter, numpy.ndarray, numpy numbers, "
    "and dict, list and tuple of them (these very types: a subclass would arrive as something else)"
)
_ZEROS = memoryview(bytes(wire.ALIGNMENT))
_SHOWN_CHARS = 40
_TORCH_NAMES = {dtype: name for name, dtype in wire.TORCH_DTYPES.items()}
_NUMPY_NAMES = {dtype: name for name, dtype in wire.NUMPY_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class EncodedPayload:
    """A payload as bytes. Satisfies `omni_fsm.protocol.frames.Body`.

    Attributes:
        nbytes: Size on the wire.
        parts: Read-only one-dimensional byte views, ``nbytes`` together, to be written one after the other. Borrowed
            where the tree's tensors and arrays are contiguous and on the CPU: leave those as they are until then.
        borrowed: Whether a part may be memory of the tree.
    """

    nbytes: int
    parts: tuple[memoryview, ...]
    borrowed: bool

    def owned(self) -> "EncodedPayload":
        """The same bytes in one private read-only buffer; itself if nothing is borrowed."""
        if not self.borrowed:
            return self
        buffer, at = wire.receive_buffer(self.nbytes), 0
        for part in self.parts:
            buffer[at : at + part.nbytes] = part
            at += part.nbytes
        return EncodedPayload(self.nbytes, (buffer.toreadonly(),), borrowed=False)


def encode(tree: Any, limits: Limits = DEFAULT_LIMITS) -> EncodedPayload:
    """Describe a tree in a header and borrow its tensors.

    Called by: the stage that produced the payload, once, outside the lock.

    Args:
        tree: Not written to. Types are kept exactly: tuple and list, 1 and ``np.int64(1)``, a number and a 0-dim
            tensor. Only a Parameter arrives as a tensor, without its gradient, and a bytearray as bytes. What is not
            contiguous or not on the CPU is copied, and arrives so. A tensor in two places arrives as two.
        limits: What it may cost.

    Returns:
        The payload; its parts are borrowed from the tree until ``owned`` is called.

    Raises:
        PayloadEncodeError: A value is of another type, a dtype has no portable bytes, a str has a lone surrogate, a
            container holds itself, or a limit is passed. Names the place in the tree.
    """
    walk = _Walk(limits)
    walk.add(tree)
    header = wire.encode_header(walk.nodes)
    if len(header) > limits.max_header_bytes:
        walk.refuse(f"a header of {len(header)} bytes", f"{limits.max_header_bytes} at most; long text may go as bytes")
    head = wire.PREFIX.pack(wire.MAGIC, wire.VERSION, len(header), zlib.crc32(header)) + header
    parts, nbytes = [memoryview(head)], len(head)
    for region in walk.regions:
        start = wire.aligned(nbytes)
        parts += [part for part in (_ZEROS[: start - nbytes], region) if part.nbytes]
        nbytes = start + region.nbytes
    if nbytes > limits.max_frame_bytes:
        walk.refuse(f"a payload of {nbytes} bytes", f"{limits.max_frame_bytes} at most")
    return EncodedPayload(nbytes, tuple(parts), borrowed=bool(walk.regions))


class _Walk:
    """One pass over a tree, in pre-order.

    Attributes:
        nodes: The header so far.
        regions: The raw bytes so far, each of one node.
        open: The containers around the present value, by id, each with the key that leads on.
    """

    __slots__ = ("limits", "nbytes", "nodes", "open", "regions")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nodes: list[wire.Node] = []
        self.regions: list[memoryview] = []
        self.open: dict[int, object] = {}
        self.nbytes = wire.PREFIX.size

    def add(self, value: Any) -> None:
        if len(self.nodes) >= self.limits.max_nodes:
            self.refuse("a further value", f"{self.limits.max_nodes} values at most")
        add = _ADD.get(type(value))
        if add is None:
            add = _add_number if isinstance(value, np.generic) else _refuse_type
        add(self, value)

    def add_children(self, container: object, children: Iterable[tuple[object, object]]) -> None:
        me = id(container)
        if me in self.open:
            self.refuse(f"a {type(container).__name__} inside itself", "a tree")
        if len(self.open) >= self.limits.max_depth:
            self.refuse(f"a {type(container).__name__} at this depth", f"{self.limits.max_depth} levels at most")
        for key, child in children:
            self.open[me] = key
            self.add(child)
        self.open.pop(me, None)

    def reserve(self, what: str, nbytes: int) -> None:
        """Refuse a region without room before its bytes are gathered: an expanded tensor may exceed all memory."""
        self.nbytes = wire.aligned(self.nbytes) + nbytes
        if self.nbytes > self.limits.max_frame_bytes:
            self.refuse(f"{what} of {nbytes} bytes", f"{self.limits.max_frame_bytes} bytes for the whole payload")

    def refuse(self, found: str, accepted: str) -> NoReturn:
        path = "payload" + "".join(f"[{_key_text(key)}]" for key in self.open.values())
        raise PayloadEncodeError(path, found, accepted)


def _add_plain(walk: _Walk, value: wire.Plain) -> None:
    walk.nodes.append(value)


def _add_int(walk: _Walk, value: int) -> None:
    if wire.SMALLEST_INT <= value <= wire.LARGEST_INT:
        walk.nodes.append(value)
        return
    bits = (value if value >= 0 else ~value).bit_length() + 1  # with its sign, in two's complement
    if bits > wire.MAX_INT_BYTES * 8:
        walk.refuse(f"an int of {bits} bits", f"{wire.MAX_INT_BYTES * 8} bits at most")
    walk.nodes.append(wire.IntNode(value.to_bytes((bits + 7) // 8, "little", signed=True)))


def _add_str(walk: _Walk, value: str) -> None:
    _check_text(walk, value)
    walk.nodes.append(value)


def _add_bytes(walk: _Walk, value: bytes | bytearray) -> None:
    walk.reserve("bytes", len(value))
    walk.nodes.append(wire.BytesNode(len(value)))
    walk.regions.append(memoryview(bytes(value)))  # a view of a bytearray would keep its owner from resizing it


def _add_dict(walk: _Walk, value: dict[Any, Any]) -> None:
    for key in value:
        if type(key) is str:
            _check_text(walk, key)
        elif type(key) is not int or not wire.SMALLEST_INT <= key <= wire.LARGEST_INT:
            walk.refuse(f"the key {_value_text(key)}", "str, and int of at most 64 bits, as keys")
    walk.nodes.append(wire.DictNode(list(value)))
    walk.add_children(value, value.items())


def _add_list(walk: _Walk, value: list[Any]) -> None:
    walk.nodes.append(wire.ListNode(len(value)))
    walk.add_children(value, enumerate(value))


def _add_tuple(walk: _Walk, value: tuple[Any, ...]) -> None:
    walk.nodes.append(wire.TupleNode(len(value)))
    walk.add_children(value, enumerate(value))


def _add_tensor(walk: _Walk, value: torch.Tensor) -> None:
    name = _TORCH_NAMES.get(value.dtype)
    if name is None:
        walk.refuse(f"a tensor of dtype {value.dtype}", f"dtypes {', '.join(wire.TORCH_DTYPES)}")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        kind = "nested" if value.is_nested else "meta" if value.is_meta else str(value.layout)
        walk.refuse(f"a {kind} tensor", "dense tensors that hold their elements, such as x.to_dense()")
    if value.dim() > wire.MAX_DIMS:
        walk.refuse(f"a tensor of {value.dim()} dimensions", f"{wire.MAX_DIMS} at most")
    walk.reserve(f"a tensor {list(value.shape)} of {name}", value.nbytes)
    walk.nodes.append(wire.TensorNode(name, list(value.shape)))
    try:
        plain = _on_cpu(value.detach().resolve_conj().resolve_neg()).contiguous()
        octets = plain.view(-1).view(torch.uint8).numpy().data
    except RuntimeError as error:  # inside vmap, a lost device, ...: torch has many tensors that are not memory
        walk.refuse(f"a tensor without readable memory ({error})", "tensors that can be copied to the CPU")
    walk.regions.append(octets.toreadonly())


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """From a GPU into pinned memory: it is copied at the bus's full speed, and torch keeps the memory for the next one."""
    if not value.is_cuda:
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value)


def _add_array(walk: _Walk, value: np.ndarray[Any, Any]) -> None:
    name = _numpy_name(walk, value.dtype)
    walk.reserve(f"an array {list(value.shape)} of {name}", value.nbytes)
    walk.nodes.append(wire.ArrayNode(name, list(value.shape)))
    walk.regions.append(value.ravel().view(np.uint8).data.toreadonly())


def _add_number(walk: _Walk, value: np.generic) -> None:
    walk.nodes.append(wire.NumberNode(_numpy_name(walk, value.dtype), value.tobytes()))


def _refuse_type(walk: _Walk, value: object) -> None:
    walk.refuse(_value_text(value), _ACCEPTED)


_ADD: dict[type, Callable[[_Walk, Any], None]] = {
    type(None): _add_plain,
    bool: _add_plain,
    float: _add_plain,
    int: _add_int,
    str: _add_str,
    bytes: _add_bytes,
    bytearray: _add_bytes,
    dict: _add_dict,
    list: _add_list,
    tuple: _add_tuple,
    torch.Tensor: _add_tensor,
    torch.nn.Parameter: _add_tensor,
    np.ndarray: _add_array,
}


def _check_text(walk: _Walk, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        walk.refuse(f"a str with the lone surrogate {text[error.start]!a} at {error.start}", "text that UTF-8 can hold")


def _numpy_name(walk: _Walk, dtype: np.dtype[Any]) -> str:
    name = _NUMPY_NAMES.get(dtype)
    if name is None:
        walk.refuse(f"numpy dtype {dtype!s}", f"native byte order and one of {', '.join(wire.NUMPY_DTYPES)}")
    return name


def _key_text(key: object) -> str:
    return json.dumps(key[:_SHOWN_CHARS], ensure_ascii=False) if isinstance(key, str) else str(key)


def _value_text(value: object) -> str:
    """The value and its type, in one bounded line, whatever its repr does."""
    try:
        text = reprlib.repr(value)
    except Exception:  # noqa: BLE001 - the refusal is what must be heard, not the repr
        text = "that has no repr"
    return f"{type(value).__module__}.{type(value).__qualname__} {text}".removeprefix("builtins.")
