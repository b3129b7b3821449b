"""What travels between the two ends of an edge: one msgpack header a packet, bytes of a small body behind it.

A packet is ``u32 length of the header | header | inline body``. Headers are tagged msgspec structs with bounded fields;
nothing is ever pickled. What a peer sent is validated into the frozen types of `omni_fsm.protocol` here and nowhere
else: whatever is malformed becomes a `RemoteProtocolError` that names the packet and the field.
"""

import struct
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from omni_fsm.connectors.port import Hello, HelloMismatchError
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError, shown
from omni_fsm.protocol.frames import MAX_REASON_CHARS, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import MAX_EXTERNAL_ID_BYTES, MAX_STAGE_NAME_BYTES, Edge, Identity

MAX_PACKET_BYTES = 65_536
"""No packet is larger: an inline body of 32 KiB, an id of 16 KiB, a reason of 8 KiB and the rest of the header."""

INLINE_BYTES = 32_768
"""The largest body that travels behind its header; measured: beyond this the arena is as fast."""

_PREFIX = struct.Struct("<I")
_NUMBER_MAX = 2**63 - 1

Number = Annotated[int, Meta(ge=0, le=_NUMBER_MAX)]
Seq = Annotated[int, Meta(ge=-1, le=_NUMBER_MAX)]
ExternalId = Annotated[str, Meta(min_length=1, max_length=MAX_EXTERNAL_ID_BYTES)]
StageName = Annotated[str, Meta(max_length=MAX_STAGE_NAME_BYTES)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Place = Literal["none", "inline", "arena", "own"]
"""Where a body is: there is none; behind its header; in the arena; in a region of its own that came with the packet."""


class HelloPacket(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """First packet in both directions. Unknown fields pass: a later version is refused by its number, with both values.

    Attributes:
        max_frame_bytes: The largest body that this end accepts; the smaller of both ends' limits holds.
        arena_bytes: Size of the sending end's arena, 0 without one.
    """

    version: int
    spec_digest: Annotated[str, Meta(max_length=256)]
    from_stage: StageName
    to_stage: StageName
    mode: Annotated[str, Meta(max_length=64)]
    max_frame_bytes: Number
    arena_bytes: Number = 0


class FramePacket(
    msgspec.Struct, frozen=True, tag="frame", kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Header of a frame, with the place of its body. The edge is not repeated: the hello has settled it."""

    id: ExternalId
    generation: Annotated[int, Meta(ge=0)]
    kind: FrameKind
    segment: Number = 0
    seq: Seq = -1
    segment_end: bool = False
    outcome: Outcome | None = None
    reason: Reason = ""
    at_ns: Number = 0
    place: Place = "none"
    nbytes: Number = 0
    offset: Number = 0


class CreditPacket(msgspec.Struct, frozen=True, tag="credit", kw_only=True, forbid_unknown_fields=True):
    """The receiver's credit for one stream, in absolute numbers."""

    id: ExternalId
    generation: Annotated[int, Meta(ge=0)]
    frames: Number
    nbytes: Number
    taken_frames: Number
    taken_bytes: Number


class StopPacket(msgspec.Struct, frozen=True, tag="stop", kw_only=True, forbid_unknown_fields=True):
    """The receiver wants no more of one stream."""

    id: ExternalId
    generation: Annotated[int, Meta(ge=0)]
    outcome: Outcome
    reason: Reason = ""
    at_ns: Number = 0


class AckPacket(msgspec.Struct, frozen=True, tag="ack", kw_only=True, forbid_unknown_fields=True):
    """The receiver is done with the first ``upto`` arena or own bodies of this connection."""

    upto: Number


Header = HelloPacket | FramePacket | CreditPacket | StopPacket | AckPacket


def tag_of(header: Header) -> str:
    """What kind of packet it is, as its tag and our messages say it."""
    return str(header.__struct_config__.tag)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def packed(header: Header) -> bytes:
    """A header as the first bytes of its packet."""
    encoded = _encoder.encode(header)
    return _PREFIX.pack(len(encoded)) + encoded


def unpacked(edge: Edge, packet: memoryview) -> tuple[Header, memoryview]:
    """Header and inline body of one packet.

    Raises:
        RemoteProtocolError: It is cut short, is not msgpack, or has an unknown, missing or out-of-range field.
    """
    if len(packet) < _PREFIX.size:
        raise RemoteProtocolError(f"edge {edge}: a packet of {len(packet)} bytes has no header")
    end = _PREFIX.size + _PREFIX.unpack_from(packet)[0]
    if end > len(packet):
        raise RemoteProtocolError(f"edge {edge}: a packet of {len(packet)} bytes says its header ends at {end}")
    try:
        return _decoder.decode(packet[_PREFIX.size : end]), packet[end:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"edge {edge}: a packet's header cannot be decoded: {error}") from error


def hello_packet(hello: Hello, *, max_frame_bytes: int, arena_bytes: int) -> bytes:
    """What this end says first."""
    return packed(
        HelloPacket(
            version=hello.version,
            spec_digest=hello.spec_digest,
            from_stage=hello.edge.from_stage,
            to_stage=hello.edge.to_stage,
            mode=hello.mode,
            max_frame_bytes=max_frame_bytes,
            arena_bytes=arena_bytes,
        )
    )


def hello_mismatch(ours: Hello, theirs: HelloPacket) -> HelloMismatchError | None:
    """The first field in which the two hellos differ, with both values; None when they agree."""
    pairs = (
        ("version", ours.version, theirs.version),
        ("spec_digest", ours.spec_digest, theirs.spec_digest),
        ("edge", str(ours.edge), f"{theirs.from_stage}->{theirs.to_stage}"),
        ("edge.from_stage", ours.edge.from_stage, theirs.from_stage),
        ("mode", ours.mode, theirs.mode),
    )
    for name, here, there in pairs:
        if here != there:
            return HelloMismatchError(ours.edge, name, here, there)
    return None


def frame_packet(frame: Frame, place: Place, nbytes: int, offset: int) -> bytes:
    """The header of a frame whose body is at ``place``."""
    cause = frame.cause
    return packed(
        FramePacket(
            id=frame.identity.external_id,
            generation=frame.identity.generation,
            kind=frame.kind,
            segment=frame.segment,
            seq=frame.seq,
            segment_end=frame.segment_end,
            outcome=None if cause is None else cause.outcome,
            reason="" if cause is None else _sendable(cause.reason),
            at_ns=0 if cause is None else cause.at_ns,
            place=place,
            nbytes=nbytes,
            offset=offset,
        )
    )


def frame_of(edge: Edge, packet: FramePacket) -> Frame:
    """The frame, without body, that a header announces.

    Raises:
        RemoteProtocolError: Its parts do not go together.
    """
    identity = identity_of(edge, packet.id, packet.generation)
    cause = None if packet.outcome is None else Cause(packet.outcome, packet.reason, packet.at_ns)
    frame = Frame(edge, identity, packet.kind, packet.segment, packet.seq, packet.segment_end, cause)
    fault = frame_fault(frame, has_body=packet.place != "none")
    if fault is not None:
        raise RemoteProtocolError(f"edge {edge}: frame of {identity}: {fault}")
    if packet.place == "none" and (packet.nbytes or packet.offset):
        raise RemoteProtocolError(f"edge {edge}: frame of {identity}: {packet.nbytes} bytes at no place")
    return frame


def frame_fault(frame: Frame, *, has_body: bool) -> str | None:
    """What makes this frame one that may not cross an edge, or None. The same question at both ends.

    Whether the frame is legal *now* is for the protocol; here only its parts must go together.
    """
    cause, kind = frame.cause, frame.kind
    if (kind is FrameKind.END) != (cause is not None):
        return f"kind {kind} {'without' if cause is None else 'with'} an outcome"
    if cause is not None and cause.outcome is Outcome.DONE:
        return "an end cannot have outcome done"
    if frame.uses_credit and frame.seq < 0:
        return f"kind {kind} needs a seq, got {frame.seq}"
    if has_body and not frame.uses_credit:
        return f"kind {kind if cause is None else f'{kind}({cause.outcome})'} carries no body"
    return None


def identity_of(edge: Edge, external_id: str, generation: int) -> Identity:
    """A peer's identity, checked.

    Raises:
        RemoteProtocolError: The id is longer than 16,384 UTF-8 bytes or the generation is not 64 bits.
    """
    try:
        return Identity(external_id, generation)
    except ConfigError as error:
        raise RemoteProtocolError(f"edge {edge}: identity {shown(external_id)}#{generation}: {error}") from error


class Credit(NamedTuple):
    """A stream's credit, as absolute numbers; see `omni_fsm.connectors.port.Connector.grant`."""

    frames: int
    nbytes: int
    taken_frames: int
    taken_bytes: int


def credit_packet(identity: Identity, credit: Credit) -> bytes:
    """A grant."""
    return packed(CreditPacket(id=identity.external_id, generation=identity.generation, **credit._asdict()))


def stop_packet(identity: Identity, cause: Cause) -> bytes:
    """A stop with its cause."""
    return packed(
        StopPacket(
            id=identity.external_id,
            generation=identity.generation,
            outcome=cause.outcome,
            reason=_sendable(cause.reason),
            at_ns=cause.at_ns,
        )
    )


def ack_packet(upto: int) -> bytes:
    """An acknowledgement of the first ``upto`` blocks."""
    return packed(AckPacket(upto=upto))


def _sendable(reason: str) -> str:
    """A reason without lone surrogates (the text of an OSError about a file may have some): they have no UTF-8."""
    try:
        reason.encode()
    except UnicodeEncodeError:
        return reason.encode(errors="backslashreplace").decode()[:MAX_REASON_CHARS]
    return reason
