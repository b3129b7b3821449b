"""The wire format of a payload tree, its limits and its errors. Both sides of the codec read it from here.

::

    prefix   magic with the byte order, version, header length, crc32 of the header    16 bytes
    header   msgpack: the tree's nodes in pre-order, one flat list
    regions  raw bytes of the tensors, arrays and byte strings, in the order of their nodes;
             each starts at the next multiple of 64 from the frame's start, gaps are zero

A region's place and size follow from the nodes before it, so they are not on the wire: two regions cannot overlap.
A node refers to no other node, so a hostile header cannot nest.
"""

import re
import struct
import sys
from dataclasses import dataclass, fields
from typing import Annotated, Final

import msgspec
import numpy as np
import torch
from msgspec import Meta

from omni_fsm.protocol.errors import ConfigError, OmniFsmError, RemoteProtocolError, shown

MAGIC: Final = (
    b"OFP<" if sys.byteorder == "little" else b"OFP>"
)  # regions are in the host's order: the other is refused
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sIII")
ALIGNMENT: Final = 64
MAX_DIMS: Final = 64
MAX_INT_BYTES: Final = 512  # 4,096 bits: below the size from which Python refuses to print an int
SMALLEST_INT: Final = -(2**63)
LARGEST_INT: Final = 2**64 - 1

_MOST = {"max_depth": 200, "max_header_bytes": 2**32 - 1}  # both sides recurse once a level; a prefix field of 4 bytes
_TORCH_NAMES = re.compile(r"bool|bfloat16|u?int(8|16|32|64)|float(16|32|64)|float8_\w+|complex\d+")
_NUMPY_CODES = "?bhiqBHIQefdFD"  # bool, ints, floats, complex; no longdouble: its bytes differ between machines

TORCH_DTYPES: Final = {
    name: dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and _TORCH_NAMES.fullmatch(name)
}
NUMPY_DTYPES: Final = {name: np.dtype(name) for name in (np.dtype(code).name for code in _NUMPY_CODES)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one payload may cost. Above it encode raises PayloadEncodeError, decode PayloadDecodeError.

    Attributes:
        max_frame_bytes: The whole encoded payload.
        max_header_bytes: The header: all keys, numbers and strings; tensors, arrays and bytes do not count.
        max_depth: Containers inside containers, 200 at most.
        max_nodes: Values of the tree, containers included; a value that is shared counts each time.
    """

    max_frame_bytes: int = 1 << 30
    max_header_bytes: int = 4 << 20
    max_depth: int = 32
    max_nodes: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), _MOST.get(field.name, 2**63 - 1)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"Limits.{field.name}", value, f"an int from 1 to {most:,}")


DEFAULT_LIMITS: Final = Limits()


class PayloadEncodeError(OmniFsmError, TypeError):
    """A tree of this process cannot be encoded. Nothing was sent.

    Attributes:
        path: Where in the tree, such as ``payload["codes"][3]``.
        found: The offending value, in words.
        accepted: What could stand there.
    """

    def __init__(self, path: str, found: str, accepted: str) -> None:
        self.path, self.found, self.accepted = path, found, accepted
        super().__init__(f"{path}: {found} cannot be encoded; accepted: {accepted}")


class PayloadDecodeError(RemoteProtocolError):
    """A peer's bytes are not a payload. Its stream fails.

    Attributes:
        offset: Bytes from the frame's start to what is wrong; for a node, to the header that holds it.
        fault: What is wrong.
        expected: What would have been accepted there.
        found: What stands there.
    """

    def __init__(self, offset: int, fault: str, *, expected: str, found: object) -> None:
        self.offset, self.fault, self.expected, self.found = offset, fault, expected, found
        super().__init__(f"payload refused at byte {offset}: {fault}; expected: {expected}, found: {shown(found)}")


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Shape = Annotated[list[Count], Meta(max_length=MAX_DIMS)]
_Bits = Annotated[bytes, Meta(max_length=MAX_INT_BYTES)]


class _Node(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A value that msgpack has no word for. On the wire: a list of its tag and its fields."""


class DictNode(_Node, tag="dict"):
    """A dict; its values follow, one node (with all below it) a key."""

    keys: list[str | int]


class ListNode(_Node, tag="list"):
    """A list; its items follow."""

    length: Count


class TupleNode(_Node, tag="tuple"):
    """A tuple; its items follow."""

    length: Count


class IntNode(_Node, tag="int"):
    """An int beyond 64 bits, little-endian two's complement."""

    bits: _Bits


class NumberNode(_Node, tag="number"):
    """A numpy number (``np.float32(1)``), which is neither a Python number nor an array."""

    dtype: str
    bits: _Bits


class TensorNode(_Node, tag="tensor"):
    """A torch tensor; its elements are the next region."""

    dtype: str
    shape: Shape


class ArrayNode(_Node, tag="array"):
    """A numpy array; its elements, in C order, are the next region."""

    dtype: str
    shape: Shape


class BytesNode(_Node, tag="bytes"):
    """A byte string; it is the next region."""

    length: Count


Plain = None | bool | int | float | str
Node = Plain | DictNode | ListNode | TupleNode | IntNode | NumberNode | TensorNode | ArrayNode | BytesNode

encode_header: Final = msgspec.msgpack.Encoder().encode
decode_header: Final = msgspec.msgpack.Decoder(list[Node]).decode


def aligned(offset: int) -> int:
    """The next offset at which a region may start."""
    return offset + -offset % ALIGNMENT


def receive_buffer(nbytes: int) -> memoryview:
    """A private, writable, uninitialised buffer at a 64-byte-aligned address: what is decoded from it is not copied.

    Called by: a connector, once a frame, before it copies the frame's bytes in. The caller owns it.
    """
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes].numpy().data
