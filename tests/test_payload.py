"""The payload codec: what is kept, what is refused, what a hostile peer can and cannot do, and what is not copied."""

import struct
import sys
import warnings
import zlib
from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.payload import (
    EncodedPayload,
    Limits,
    PayloadDecodeError,
    PayloadEncodeError,
    decode,
    encode,
    receive_buffer,
    tree_nbytes,
)
from omni_fsm.payload.wire import MAGIC, NUMPY_DTYPES, PREFIX, TORCH_DTYPES, VERSION
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped kind is what runners use


class Colour(IntEnum):
    RED = 1


def wire_bytes(payload: EncodedPayload) -> bytes:
    return b"".join(payload.parts)


def received(payload: EncodedPayload) -> memoryview:
    """What a connector does: one copy into a private buffer."""
    buffer = receive_buffer(payload.nbytes)
    buffer[:] = wire_bytes(payload)
    return buffer


def sent(tree: Any) -> Any:
    return decode(received(encode(tree)))


def frame(nodes: Any, body: bytes = b"") -> bytearray:
    """A frame with a sound checksum around any header; the body starts at the first region."""
    return signed(msgspec.msgpack.encode(nodes), body)


def signed(header: bytes, body: bytes = b"") -> bytearray:
    head = PREFIX.pack(MAGIC, VERSION, len(header), zlib.crc32(header)) + header
    return bytearray(head + bytes(-len(head) % 64 if body else 0) + body)


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(left: Any, right: Any) -> bool:
    """Equal in type, order, dtype, shape and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and octets(left) == octets(right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return struct.pack("d", left) == struct.pack("d", right) if type(left) is float else left == right


def random_bytes(count: int, seed: int, *, is_bool: bool) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2 if is_bool else 256, count, np.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(TORCH_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = random_bytes(count, draw(st.integers(0, 99)), is_bool=dtype is torch.bool)
    tensor = torch.from_numpy(bits).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.movedim(0, -1) if draw(st.booleans()) and shape else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(list(NUMPY_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    array = np.ndarray(shape, dtype, random_bytes(count, draw(st.integers(0, 99)), is_bool=dtype.kind == "b"))
    return array.T if draw(st.booleans()) else array


keys = st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.integers(-(2**4095), 2**4095 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=100)
    | tensors()
    | arrays()
    | arrays().filter(lambda array: array.size).map(lambda array: array.flat[0])
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
settings.register_profile("payload", derandomize=True, deadline=None, max_examples=300)
quick = settings.get_profile("payload")

SAMPLE: dict[Any, Any] = {
    "codes": torch.arange(6, dtype=torch.int16).view(2, 3),
    "flags": torch.tensor([True, False]),
    7: (1, -1.5, None, True, "größe", 2**70),
    "audio": np.linspace(0, 1, 5, dtype=np.float32),
    "blob": b"\x00\x01\x02",
    "last": [np.float32(0.5), torch.empty(0, 4)],
}


# What is kept


@quick
@given(trees)
def test_any_tree_arrives_as_it_was_sent(tree: Any) -> None:
    payload = encode(tree)
    assert sum(part.nbytes for part in payload.parts) == payload.nbytes
    assert same(tree, decode(received(payload)))


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 2**40), (3,), (2, 3, 4)])
def test_every_dtype_and_shape_arrives_bit_equal(name: str, shape: tuple[int, ...]) -> None:
    dtype = TORCH_DTYPES[name]
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = torch.from_numpy(random_bytes(count, 1, is_bool=name == "bool"))
    tensor = bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(tensor, sent(tensor))


def test_the_dtypes_are_those_with_portable_bytes() -> None:
    """Written by hand, for torch 2.9 or later; a newer one may add float8 kinds."""
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    floats = {"float16", "float32", "float64", "bfloat16"}
    eights = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
    complexes = {"complex64", "complex128"}
    found = set(TORCH_DTYPES)
    assert {"bool", "complex32"} | integers | floats | eights | complexes <= found
    assert all(name.startswith("float8_") for name in found - ({"bool", "complex32"} | integers | floats | complexes))
    assert set(NUMPY_DTYPES) == {"bool"} | integers | (floats - {"bfloat16"}) | complexes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::5],
        torch.ones(1).expand(4, 5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch._neg_view(torch.ones(3)),
        torch.arange(12).view(3, 4)[1:, 2:],
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negated", "window", "in a graph"],
)
def test_a_tensor_that_is_not_plain_memory_arrives_plain(tensor: torch.Tensor) -> None:
    arrived = sent(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous()
    assert (arrived.requires_grad, arrived.is_conj(), arrived.is_neg()) == (False, False, False)


def test_a_parameter_arrives_as_a_tensor() -> None:
    arrived = sent(torch.nn.Parameter(torch.ones(2)))
    assert type(arrived) is torch.Tensor
    assert not arrived.requires_grad


def test_a_bytearray_arrives_as_bytes_and_stays_resizable() -> None:
    source = bytearray(b"abc")
    payload = encode(source)
    source += b"d"
    assert same(decode(received(payload)), b"abc")


@pytest.mark.parametrize(
    "number", [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**4095 - 1, -(2**4095)]
)
def test_ints_on_both_sides_of_64_bits_arrive(number: int) -> None:
    assert same(sent(number), number)


def test_nan_bits_and_the_sign_of_zero_arrive() -> None:
    odd_nan = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0]
    assert same(sent([odd_nan, -0.0, float("-inf")]), [odd_nan, -0.0, float("-inf")])


def test_the_order_of_keys_is_kept() -> None:
    assert list(sent({"b": 1, 2: 2, "a": 3, "2": 4})) == ["b", 2, "a", "2"]


def test_a_value_in_two_places_arrives_twice() -> None:
    tensor = torch.zeros(2)
    left, right = sent([tensor, tensor])
    left += 1
    assert right.tolist() == [0, 0]


# What is not copied, and what is


def test_a_contiguous_tensor_and_array_are_borrowed_not_copied() -> None:
    tensor, array = torch.zeros(100), np.zeros(100)
    addresses = {address(part) for part in encode({"t": tensor, "a": array}).parts}
    assert {tensor.data_ptr(), array.ctypes.data} <= addresses


def test_all_that_a_chunk_copies_is_its_header() -> None:
    tree = {"hidden": torch.zeros(25, 3006), "seq": 3, "num_tokens": 25, "is_last": False}
    copied = [part for part in encode(tree).parts if address(part) != tree["hidden"].data_ptr()]
    assert sum(part.nbytes for part in copied) == 128


def test_parts_are_read_only_byte_views() -> None:
    for part in encode(SAMPLE).parts:
        assert (part.format, part.ndim, part.contiguous, part.readonly) == ("B", 1, True, True)


def test_decoded_tensors_and_arrays_are_writable_views_of_an_aligned_buffer() -> None:
    buffer = received(encode({"t": torch.zeros(4), "a": np.zeros(4)}))
    tree = decode(buffer)
    tree["t"][0] = tree["a"][3] = 1
    assert bytes(buffer[tree["t"].data_ptr() - address(buffer) :][:4]) == struct.pack("f", 1)
    assert bytes(buffer[-8:]) == struct.pack("d", 1)
    assert tree["t"].data_ptr() % 64 == tree["a"].ctypes.data % 64 == 0


def test_a_read_only_buffer_is_copied_without_a_warning() -> None:
    wire = wire_bytes(encode(torch.zeros(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(wire)[0] = 1
    assert decode(wire).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shift", range(1, 17))
def test_a_buffer_at_any_address_decodes_to_aligned_tensors(shift: int) -> None:
    wire = wire_bytes(encode(torch.ones(2, dtype=torch.complex128)))
    buffer = receive_buffer(len(wire) + shift)[shift:]
    buffer[:] = wire
    tensor = decode(buffer)
    assert tensor.tolist() == [1, 1]
    assert tensor.data_ptr() % 16 == 0


def test_what_was_decoded_does_not_alias_the_source() -> None:
    source = torch.zeros(4)
    arrived = sent(source)
    source += 1
    assert arrived.tolist() == [0, 0, 0, 0]


def test_an_owned_payload_is_not_touched_when_its_producer_reuses_the_tensor() -> None:
    source = torch.zeros(4)
    borrowed = encode(source)
    owned = borrowed.owned()
    source += 1
    assert decode(wire_bytes(owned)).tolist() == [0, 0, 0, 0]
    assert decode(wire_bytes(borrowed)).tolist() == [1, 1, 1, 1]


def test_owned_is_one_buffer_of_the_same_bytes_and_owning_twice_changes_nothing() -> None:
    borrowed = encode(SAMPLE)
    owned = borrowed.owned()
    assert owned is not borrowed
    assert len(owned.parts) == 1
    assert wire_bytes(owned) == wire_bytes(borrowed)
    assert owned.nbytes == borrowed.nbytes
    assert owned.owned() is owned


def test_a_payload_without_tensors_is_owned_from_the_start() -> None:
    payload = encode({"a": 1})
    assert payload.owned() is payload


def test_the_tensor_outlives_every_other_name_of_its_buffer() -> None:
    arrived = [sent(torch.full((1000,), float(number))) for number in range(20)]
    assert [tensor.sum().item() for tensor in arrived] == [number * 1000 for number in range(20)]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 5000])
def test_a_receive_buffer_is_aligned_writable_and_as_long_as_asked(nbytes: int) -> None:
    buffer = receive_buffer(nbytes)
    assert (buffer.nbytes, buffer.format, buffer.readonly) == (nbytes, "B", False)
    assert nbytes == 0 or address(buffer) % 64 == 0


# What is refused before it is sent


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({1, 2}, "set {1, 2} cannot be encoded; accepted: None, bool, int"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (Point(1, 2), "Point(x=1, y=2)"),
        (Colour.RED, "Colour"),
        (1j, "complex 1j"),
        (torch.float32, "torch.dtype torch.float32"),
        (torch.ones(2).shape, "torch.Size"),
        (memoryview(b"a"), "memoryview"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (torch.ones(2).to_sparse(), "a torch.sparse_coo tensor cannot be encoded; accepted: dense tensors"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        (
            torch.empty(2, dtype=torch.uint4),
            "a tensor of dtype torch.uint4 cannot be encoded; accepted: dtypes bfloat16",
        ),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "a tensor of dtype torch.float4_e2m1fn_x2"),
        (torch.empty([1] * 65), "a tensor of 65 dimensions cannot be encoded; accepted: 64 at most"),
        (np.array(["a"]), "numpy dtype <U1"),
        (np.array([object()]), "numpy dtype object"),
        (np.zeros(1, "M8[s]"), "numpy dtype datetime64[s]"),
        (np.zeros(1, [("a", "f4")]), "numpy dtype [('a', '<f4')]"),
        (np.zeros(1, ">f4"), "numpy dtype >f4 cannot be encoded; accepted: native byte order"),
        (np.longdouble(1), "numpy dtype float128"),
        (np.str_("a"), "numpy dtype <U1"),
        ("a\ud800", "a str with the lone surrogate '\\ud800' at 1"),
        ({"a\udfff": 1}, "a str with the lone surrogate '\\udfff' at 1"),
        ({True: 1}, "the key bool True cannot be encoded; accepted: str, and int of at most 64 bits"),
        ({None: 1}, "the key NoneType None"),
        ({1.5: 1}, "the key float 1.5"),
        ({2**64: 1}, "the key int 18446744073709551616"),
        (2**4095, "an int of 4097 bits cannot be encoded; accepted: 4096 bits at most"),
        (-(2**4095) - 1, "an int of 4097 bits cannot be encoded; accepted: 4096 bits at most"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_cross_is_refused_with_its_place_its_value_and_what_is_accepted(value: Any, found: str) -> None:
    with pytest.raises(PayloadEncodeError) as caught:
        encode({"a": [0, (), {"other": 1}, {7: value}]})
    text = str(caught.value)
    assert text.startswith('payload["a"][3][7]: ')
    assert found in text
    assert caught.value.path == 'payload["a"][3][7]'
    assert text == f"{caught.value.path}: {caught.value.found} cannot be encoded; accepted: {caught.value.accepted}"
    assert isinstance(caught.value, TypeError)


@pytest.mark.filterwarnings("ignore")  # torch deprecates the one and calls the other a prototype
def test_quantized_and_nested_tensors_are_refused() -> None:
    with pytest.raises(PayloadEncodeError, match=r"payload: a tensor of dtype torch.qint8"):
        encode(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    with pytest.raises(PayloadEncodeError, match="payload: a nested tensor"):
        encode(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))


def test_a_tensor_inside_vmap_is_refused() -> None:
    with pytest.raises(PayloadEncodeError, match="a tensor without readable memory"):
        torch.vmap(lambda row: encode(row) and row)(torch.ones(2, 3))


def test_a_value_whose_repr_raises_is_refused_all_the_same() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise ValueError

    with pytest.raises(PayloadEncodeError, match="Mute"):
        encode(Mute())
    with pytest.raises(PayloadEncodeError, match="set that has no repr"):
        encode({10**5000})


def test_a_container_inside_itself_is_refused_where_it_closes() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(PayloadEncodeError) as caught:
        encode(loop)
    assert str(caught.value) == 'payload[1]["again"]: a list inside itself cannot be encoded; accepted: a tree'


def test_a_tensor_larger_than_memory_is_refused_before_it_is_gathered() -> None:
    with pytest.raises(
        PayloadEncodeError, match=r"payload\[0\]: a tensor \[4398046511104\] of float32 of 17592186044416"
    ):
        encode([torch.ones(1).expand(2**42)])
    with pytest.raises(PayloadEncodeError, match="an array"):
        encode(np.broadcast_to(np.zeros(1), 2**42))


# Limits, on both sides: exactly at the limit passes


def nested(levels: int) -> Any:
    tree: Any = 1
    for level in range(levels):
        tree = {"k": tree} if level % 2 else [tree]
    return tree


ROOMY = Limits(max_depth=200)
AT_LIMIT = [
    ("max_depth", nested(3), nested(4), 3),
    ("max_depth", [[[1], [2]], [[3]]], [[[1], [2]], [[[3]]]], 3),
    ("max_nodes", [1, 2], [1, 2, 3], 3),
    ("max_header_bytes", "abc", "abcd", 5),
    ("max_frame_bytes", torch.zeros(64, dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8), 128),
    ("max_frame_bytes", "a" * 14, "a" * 15, 32),
]


@pytest.mark.parametrize(("name", "fits", "exceeds", "limit"), AT_LIMIT)
def test_each_limit_holds_on_both_sides(name: str, fits: Any, exceeds: Any, limit: int) -> None:
    limits = Limits(**{name: limit})
    assert same(decode(received(encode(fits, limits)), limits), fits)
    with pytest.raises(PayloadEncodeError, match=str(limit)):
        encode(exceeds, limits)
    with pytest.raises(PayloadDecodeError, match=f"{limit}.* at most"):
        decode(received(encode(exceeds)), limits)


def test_the_deepest_tree_that_limits_allow_needs_no_deeper_stack() -> None:
    assert same(decode(received(encode(nested(200), ROOMY)), ROOMY), nested(200))


def test_a_tree_of_shared_lists_is_bounded_by_its_values_not_its_objects() -> None:
    tree: Any = []
    for _ in range(30):
        tree = [tree, tree]
    with pytest.raises(PayloadEncodeError, match="100000 values at most"):
        encode(tree)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1", 201])
def test_a_limit_that_means_nothing_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Limits.max_depth"):
        Limits(max_depth=value)


def test_a_frame_may_be_allowed_more_than_4_gib_but_its_header_may_not() -> None:
    assert Limits(max_frame_bytes=2**40).max_frame_bytes == 2**40
    with pytest.raises(ConfigError, match=r"Limits.max_header_bytes"):
        Limits(max_header_bytes=2**32)


# What a peer may do


def test_a_decode_error_is_the_peers_and_says_where_and_what() -> None:
    wire = wire_bytes(encode(1))
    with pytest.raises(PayloadDecodeError) as caught:
        decode(b"XXXX" + wire[4:])
    error = caught.value
    assert str(error) == f"payload refused at byte 0: wrong magic or byte order; expected: {MAGIC!r}, found: b'XXXX'"
    assert (error.offset, error.found) == (0, b"XXXX")
    assert isinstance(error, RemoteProtocolError)


@pytest.mark.parametrize(
    "tree", [SAMPLE, 1, {"t": torch.ones(3)}, torch.empty(0)], ids=["sample", "int", "one", "empty"]
)
def test_a_payload_cut_anywhere_or_too_long_is_refused(tree: Any) -> None:
    wire = wire_bytes(encode(tree))
    for length in range(len(wire)):
        with pytest.raises(PayloadDecodeError):
            decode(wire[:length])
    for tail in (b"\0", b"x", bytes(64)):
        with pytest.raises(PayloadDecodeError):
            decode(wire + tail)


def test_a_changed_byte_is_refused_in_the_head_and_harmless_behind_it() -> None:
    wire = bytearray(wire_bytes(encode(SAMPLE)))
    head_end = PREFIX.size + int.from_bytes(wire[8:12], "little")
    padding_end = -(-head_end // 64) * 64
    outcomes = set()
    for at in range(len(wire)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            wire[at] ^= mask
            outcome = decodes(wire)
            wire[at] ^= mask
            assert outcome is False or at >= padding_end
            outcomes.add(outcome)
    assert outcomes == {True, False}
    assert decodes(wire)


def decodes(wire: bytes | bytearray) -> bool:
    """Whether it does; anything but a tree or the typed error is an error of the test that asks."""
    try:
        decode(wire)
    except PayloadDecodeError:
        return False
    return True


def test_a_changed_header_with_a_sound_checksum_gives_a_tree_or_the_typed_error() -> None:
    """The checksum keeps accidents out, not enemies: every single-byte change of the header is signed anew."""
    wire = wire_bytes(encode(SAMPLE))
    head_end = PREFIX.size + int.from_bytes(wire[8:12], "little")
    header, body = wire[PREFIX.size : head_end], wire[-(-head_end // 64) * 64 :]
    assert decodes(signed(header, body))
    outcomes = [
        decodes(signed(header[:at] + bytes([value]) + header[at + 1 :], body))
        for at in range(len(header))
        for value in range(256)
    ]
    assert outcomes.count(True) > 256
    assert outcomes.count(False) > 256


@settings(quick, max_examples=500)
@given(st.binary(max_size=40), st.binary(max_size=200))
def test_any_bytes_at_all_give_a_tree_or_the_typed_error(header: bytes, body: bytes) -> None:
    decodes(header + body)
    decodes(signed(header, body))


tags = st.sampled_from(["dict", "list", "tuple", "int", "number", "tensor", "array", "bytes", "float32", "bool", "x"])
numbers = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
fields = tags | numbers | st.binary(max_size=9) | st.lists(tags | numbers, max_size=4)


@settings(quick, max_examples=1500)
@given(
    st.lists(numbers | tags | st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(fields, max_size=2)), max_size=5)
)
def test_any_nodes_at_all_give_a_tree_or_the_typed_error(nodes: list[Any]) -> None:
    decodes(frame(nodes))
    decodes(frame(nodes, bytes(48)))


HOSTILE = [
    ("no node", frame([]), "nodes missing"),
    ("two roots", frame([1, 2]), "nodes left over"),
    ("header is no list", frame({"a": 1}), "header unreadable"),
    ("bytes after the header's list", signed(msgspec.msgpack.encode([1]) + b"\xc0"), "header unreadable"),
    ("nested node", frame([["list", [["list", 0]]]]), "header unreadable"),
    ("deep msgpack", signed(b"\x91" * 100_000), "header unreadable"),
    ("msgpack array larger than memory", signed(b"\xdd\xff\xff\xff\xff"), "header unreadable"),
    ("unknown kind", frame([["set", 1]]), "header unreadable"),
    ("kind without name", frame([[]]), "header unreadable"),
    ("extra field", frame([["list", 0, 0]]), "header unreadable"),
    ("extension type", signed(b"\x91\xd4\x01\x00"), "header unreadable"),
    ("text that is not UTF-8", signed(b"\x91\xa2\xff\xff"), "header unreadable"),
    ("bool key", frame([["dict", [True]], 1]), "header unreadable"),
    ("negative length", frame([["list", -1]]), "header unreadable"),
    ("list of more than there is", frame([["list", 2**40]]), "nodes missing"),
    ("tuple one short", frame([["tuple", 2], 1]), "nodes missing"),
    ("inner list takes an outer one's item", frame([["list", 2], ["list", 2], 1, 2]), "nodes missing"),
    ("dict one short", frame([["dict", ["a", "b"]], 1]), "nodes missing"),
    ("duplicate str key", frame([["dict", ["a", "a"]], 1, 2]), "duplicate key"),
    ("duplicate int key", frame([["dict", [1, 2, 1]], 1, 2, 3]), "duplicate key"),
    ("too deep", frame([["list", 1]] * 33 + [1]), "containers too deep"),
    ("too many values", frame([["list", 100_000], *[0] * 100_000]), "too many values"),
    ("tensor larger than the frame", frame([["tensor", "uint8", [2**40]]], bytes(64)), "payload ends in the region"),
    (
        "tensor whose size overflows",
        frame([["tensor", "int64", [2**62, 2**62]]], bytes(64)),
        "payload ends in the region",
    ),
    ("tensor of 65 dimensions", frame([["tensor", "uint8", [1] * 65]], bytes(1)), "header unreadable"),
    ("dimension beyond 63 bits", frame([["tensor", "uint8", [2**63, 0]]]), "header unreadable"),
    ("negative dimension", frame([["tensor", "uint8", [-1]]], bytes(1)), "header unreadable"),
    ("second region missing", frame([["list", 2], *[["bytes", 64]] * 2], bytes(64)), "payload ends in the region"),
    ("bytes larger than the frame", frame([["bytes", 2**62]], bytes(64)), "payload ends in the region"),
    ("unknown dtype", frame([["tensor", "qint8", [1]]], bytes(1)), "unknown dtype"),
    ("dtype of the other library", frame([["array", "bfloat16", [1]]], bytes(2)), "unknown dtype"),
    ("tensor bool of 2", frame([["tensor", "bool", [2]]], b"\x01\x02"), "neither 0 nor 1"),
    ("array bool of 255", frame([["array", "bool", [1]]], b"\xff"), "neither 0 nor 1"),
    ("number bool of 2", frame([["number", "bool", b"\x02"]]), "malformed number"),
    ("number too short", frame([["number", "float32", b"\0\0"]]), "malformed number"),
    ("number too long", frame([["number", "float32", bytes(8)]]), "malformed number"),
    ("int too long to print", frame([["int", bytes(513)]]), "header unreadable"),
    ("bytes left over", frame([1], b"x"), "bytes left over"),
    (
        "padding not zero",
        frame([["bytes", 1]], b"x")[:40] + b"\1" + frame([["bytes", 1]], b"x")[41:],
        "padding is not zero",
    ),
]


@pytest.mark.parametrize(("wire", "fault"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_frame_is_refused_by_its_fault(wire: bytearray, fault: str) -> None:
    with pytest.raises(PayloadDecodeError, match=fault):
        decode(wire)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_shape_that_no_library_can_hold_is_the_peers_fault(kind: str) -> None:
    empty_region = frame([[kind, "int64", [2**62, 2**62, 0]]])
    empty_region += bytes(-len(empty_region) % 64)
    with pytest.raises(PayloadDecodeError, match="impossible shape"):
        decode(empty_region)


@pytest.mark.parametrize(
    ("field", "fault"),
    [({"version": 2}, "unknown version"), ({"length": 2**31}, "header too long"), ({"checksum": 0}, "wrong checksum")],
)
def test_a_wrong_prefix_is_refused_by_its_fault(field: dict[str, int], fault: str) -> None:
    header = msgspec.msgpack.encode([1])
    parts = {"version": VERSION, "length": len(header), "checksum": zlib.crc32(header)} | field
    with pytest.raises(PayloadDecodeError, match=fault):
        decode(PREFIX.pack(MAGIC, *parts.values()) + header)


# Sizes of anything


@pytest.mark.parametrize(
    ("tree", "nbytes"),
    [
        (1, 8),
        (None, 8),
        (torch.zeros(25, 3006), 8 + 25 * 3006 * 4),
        (np.zeros(5), 8 + 40),
        (b"abc", 8 + 3),
        ("abc", 8 + 3),
        ([1, 2.5, True], 8 + 3 * 8),
        ({"ab": (1, 2)}, 8 + (8 + 2) + (8 + 16)),
        ([[1, 2]] * 3, 8 + 24 + 16),
        ([0] * 10_000_000, 8 + 80_000_000),
    ],
    ids=["int", "none", "tensor", "array", "bytes", "str", "list", "dict", "shared", "long"],
)
def test_a_tree_costs_its_contents_and_8_bytes_a_place(tree: Any, nbytes: int) -> None:
    assert tree_nbytes(tree) == nbytes


def test_the_size_of_a_loop_and_of_a_very_deep_tree_is_found() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert tree_nbytes(loop) == 8 + 16
    deep: Any = 1
    for _ in range(150_000):
        deep = [deep]
    assert tree_nbytes(deep) == 8 + 100_000 * 8


def test_the_size_of_an_object_that_fights_back_is_found() -> None:
    class Liar(dict):
        def values(self) -> Any:
            raise KeyError

        def __sizeof__(self) -> int:
            raise KeyError

        @property
        def __class__(self) -> Any:
            raise KeyError

    class Plain:
        pass

    assert tree_nbytes(Liar(a=1)) > 8
    assert tree_nbytes(Plain()) == 8 + sys.getsizeof(Plain())
    assert tree_nbytes(torch.ones(2).to_sparse()) > 8
    assert tree_nbytes([torch.empty(3, device="meta"), 1]) == 8 + 16 + 12
