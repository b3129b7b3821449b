"""Decode a payload tree: check everything a peer could have made up, then take views of the buffer."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar, assert_never

import msgspec
import numpy as np
import torch

from omni_fsm.payload import wire
from omni_fsm.payload.wire import DEFAULT_LIMITS, Limits, PayloadDecodeError

_Dtype = TypeVar("_Dtype")

_LARGEST_ITEM = 16  # complex128; an address that suits it suits every dtype


def decode(buffer: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Rebuild the tree that ``encode`` was given.

    Called by: the receiving stage, once a frame.

    Args:
        buffer: A whole payload and nothing more, contiguous, best from ``receive_buffer``. Handed over: the tensors
            and arrays of the result are views of it, and keep all of it alive as long as one of them lives. A
            read-only or badly aligned one is copied once instead.
        limits: What it may cost.

    Returns:
        The tree. Its tensors are on the CPU, contiguous and writable, and alias neither each other nor the sender.

    Raises:
        PayloadDecodeError: The peer sent something else. The only error, whatever the bytes are.
    """
    view = memoryview(buffer).cast("B")
    if view.nbytes > limits.max_frame_bytes:
        raise _fault(0, "payload too large", f"{limits.max_frame_bytes} bytes at most", view.nbytes)
    start, end = wire.PREFIX.size, _header_end(view, limits)
    try:
        nodes = wire.decode_header(view[start:end])
    except msgspec.DecodeError as error:
        raise _fault(start, "header unreadable", "msgpack: one flat list of nodes", str(error)) from error
    if len(nodes) > limits.max_nodes:
        raise _fault(start, "too many values", f"{limits.max_nodes} at most", len(nodes))
    return _Builder(_usable(view), nodes, end, limits.max_depth).whole()


def _header_end(view: memoryview, limits: Limits) -> int:
    """Where the header ends, once prefix and checksum are found sound."""
    start = wire.PREFIX.size
    if view.nbytes < start:
        raise _fault(0, "payload ends in its prefix", f"{start} bytes at least", view.nbytes)
    magic, version, length, checksum = wire.PREFIX.unpack_from(view)
    if magic != wire.MAGIC:
        raise _fault(0, "wrong magic or byte order", repr(wire.MAGIC), magic)
    if version != wire.VERSION:
        raise _fault(4, "unknown version", str(wire.VERSION), version)
    end = start + int(length)
    if length > limits.max_header_bytes:
        raise _fault(8, "header too long", f"{limits.max_header_bytes} bytes at most", length)
    if end > view.nbytes:
        raise _fault(8, "payload ends in its header", f"{end} bytes at least", view.nbytes)
    if zlib.crc32(view[start:end]) != checksum:
        raise _fault(12, "wrong checksum", f"{zlib.crc32(view[start:end])} for this header", checksum)
    return end


def _usable(view: memoryview) -> memoryview:
    """The same bytes where tensors may lie: writable and aligned."""
    address = int(np.frombuffer(view, np.uint8).ctypes.data)
    if not view.readonly and address % _LARGEST_ITEM == 0:
        return view
    copy = wire.receive_buffer(view.nbytes)
    copy[:] = view
    return copy


class _Builder:
    """Reads the nodes in order, and the regions along with them.

    Attributes:
        index: Nodes read.
        at: Bytes of the frame that are accounted for.
        depth: Containers around the present node.
    """

    __slots__ = ("at", "depth", "index", "max_depth", "nodes", "view")

    def __init__(self, view: memoryview, nodes: list[wire.Node], at: int, max_depth: int) -> None:
        self.view, self.nodes, self.at, self.max_depth = view, nodes, at, max_depth
        self.index = self.depth = 0

    def whole(self) -> Any:
        tree = self.value()
        if self.index != len(self.nodes):
            raise self.fault("nodes left over", f"{self.index} nodes", len(self.nodes))
        if self.at != self.view.nbytes:
            raise _fault(self.at, "bytes left over", f"{self.at} bytes", self.view.nbytes)
        return tree

    def value(self) -> Any:  # noqa: C901, PLR0911 - one line a kind of node
        if self.index == len(self.nodes):
            raise self.fault("nodes missing", "a further node", "the end of the header")
        node = self.nodes[self.index]
        self.index += 1
        match node:
            case None | bool() | int() | float() | str():
                return node
            case wire.DictNode(keys):
                if len(set(keys)) != len(keys):
                    raise self.fault("duplicate key in a dict", "each key once", keys)
                return dict(zip(keys, self.children(len(keys)), strict=True))
            case wire.ListNode(length):
                return self.children(length)
            case wire.TupleNode(length):
                return tuple(self.children(length))
            case wire.TensorNode(name, shape):
                return self.tensor(name, shape)
            case wire.ArrayNode(name, shape):
                return self.array(name, shape)
            case wire.BytesNode(length):
                return bytes(self.region(length))
            case wire.NumberNode(name, bits):
                return self.number(name, bits)
            case wire.IntNode(bits):
                return int.from_bytes(bits, "little", signed=True)
            case _:
                assert_never(node)

    def children(self, count: int) -> list[Any]:
        if self.depth >= self.max_depth:
            raise self.fault("containers too deep", f"{self.max_depth} levels at most", self.depth + 1)
        self.depth += 1
        values = [self.value() for _ in range(count)]
        self.depth -= 1
        return values

    def tensor(self, name: str, shape: list[int]) -> torch.Tensor:
        dtype = self.known(name, wire.TORCH_DTYPES)
        octets = self.elements(name, shape, dtype.itemsize)
        try:
            if not octets:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(octets, dtype=dtype).view(shape)
        except (RuntimeError, ValueError) as error:
            raise self.fault("impossible shape of a tensor", "a shape that torch can hold", shape) from error

    def array(self, name: str, shape: list[int]) -> np.ndarray[Any, Any]:
        dtype = self.known(name, wire.NUMPY_DTYPES)
        octets = self.elements(name, shape, dtype.itemsize)
        try:
            return np.ndarray(shape, dtype, octets)
        except ValueError as error:
            raise self.fault("impossible shape of an array", "a shape that numpy can hold", shape) from error

    def number(self, name: str, bits: bytes) -> np.generic:
        dtype = self.known(name, wire.NUMPY_DTYPES)
        if len(bits) != dtype.itemsize or (name == "bool" and bits > b"\1"):
            raise self.fault("malformed number", f"{dtype.itemsize} bytes that hold a {name}", bits)
        number: np.generic = np.frombuffer(bits, dtype)[0]
        return number

    def elements(self, name: str, shape: list[int], itemsize: int) -> memoryview:
        """The region of a tensor or array. A bool is 0 or 1: torch and numpy leave open what else would mean."""
        octets = self.region(math.prod(shape) * itemsize)
        if name == "bool" and octets and (highest := np.frombuffer(octets, np.uint8).max()) > 1:
            raise self.fault("a bool that is neither 0 nor 1", "0 or 1", int(highest))
        return octets

    def region(self, nbytes: int) -> memoryview:
        start = wire.aligned(self.at)
        end = start + nbytes
        if end > self.view.nbytes:
            raise _fault(self.at, f"payload ends in the region of node {self.index}", f"{end} bytes", self.view.nbytes)
        if any(self.view[self.at : start]):
            raise _fault(self.at, "padding is not zero", "zeros", bytes(self.view[self.at : start]))
        self.at = end
        return self.view[start:end]

    def known(self, name: str, dtypes: Mapping[str, _Dtype]) -> _Dtype:
        if name not in dtypes:
            raise self.fault("unknown dtype", ", ".join(dtypes), name)
        return dtypes[name]

    def fault(self, what: str, expected: str, found: object) -> PayloadDecodeError:
        return _fault(wire.PREFIX.size, f"{what} (header, node {self.index})", expected, found)


def _fault(offset: int, what: str, expected: str, found: object) -> PayloadDecodeError:
    return PayloadDecodeError(offset, what, expected=expected, found=found)
