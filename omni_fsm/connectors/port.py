"""The connector port: what the runtime needs of a data plane, one object per edge and process.

A connector moves frames of one edge in one direction and small notices in the other. It owns no protocol state: it does
not know what is legal. It never calls back; its owner blocks in ``wait`` and then asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.frames import Cause, Frame
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.tables import spec_digest


class ConnectorClosedError(OmniFsmError):
    """A call came after ``close``."""


class HelloMismatchError(OmniFsmError):
    """The two ends of an edge do not speak the same protocol. Carries both values."""

    def __init__(self, edge: Edge, field_name: str, ours: object, theirs: object) -> None:
        self.edge, self.field, self.ours, self.theirs = edge, field_name, ours, theirs
        super().__init__(f"edge {edge}: hello refused: {field_name} is {ours!r} here and {theirs!r} at the peer")


CHUNKS, FULL_PAYLOAD = "chunks", "full_payload"
MODES = (CHUNKS, FULL_PAYLOAD)


@dataclass(frozen=True, slots=True)
class Hello:
    """What both ends of an edge must agree on before the first frame.

    Attributes:
        version: Version of the wire format.
        spec_digest: Digest of specs/sender.toml and specs/receiver.toml (`omni_fsm.tables.spec_digest`).
        edge: The edge, with both stage names.
        mode: ``chunks``, or ``full_payload``: the sender gathers its payloads and sends one, with the end.
    """

    edge: Edge
    spec_digest: str = field(default_factory=spec_digest)
    mode: str = CHUNKS
    version: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no edge.

        Raises:
            ConfigError: It is something else, or there is no such mode.
        """
        if not isinstance(self.edge, Edge):
            raise ConfigError("hello.edge", self.edge, "an Edge")
        if self.mode not in MODES:
            raise ConfigError("hello.mode", self.mode, " or ".join(MODES))


class PutStatus(StrEnum):
    """What became of a put."""

    STORED = "stored"
    BUSY = "busy"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """Answer of ``put``: its status, and for ``REFUSED`` and ``RETRY`` the reason."""

    status: PutStatus
    reason: str = ""


STORED = PutOutcome(PutStatus.STORED)
BUSY = PutOutcome(PutStatus.BUSY)


class Arrival(Protocol):
    """A frame that has come, its body still where the connector put it."""

    @property
    def frame(self) -> Frame:
        """The header as a frame without body."""

    @property
    def nbytes(self) -> int:
        """Size of the body in bytes; 0 where there is none."""

    def load(self) -> memoryview | None:
        """Copy the body into private memory and acknowledge it; None when the frame has none.

        Raises:
            RemoteProtocolError: The frame's region is not inside what the peer shared. Anything else that it raises
                is for now: it may be called again.
        """

    def discard(self) -> None:
        """Acknowledge without copying: nobody wants it. Does nothing after ``load``."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Signal at the sender: the receiver of this stream wants no more."""

    identity: Identity
    cause: Cause


@dataclass(frozen=True, slots=True)
class CreditReturned:
    """Signal at the sender: a put of this stream that was busy may now succeed."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class RoomReturned:
    """Signal at the sender: puts that were busy for want of arena or socket room may now succeed."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Signal on both sides: the peer's process is gone, and all that it had sent has been got."""

    reason: str = "peer_lost"


@dataclass(frozen=True, slots=True)
class PeerBack:
    """Signal on both sides: a peer (the first, or one that restarted) said a valid hello."""


@dataclass(frozen=True, slots=True)
class EdgeRefused:
    """Signal on both sides: the hellos differ; the edge stays closed."""

    error: HelloMismatchError


Signal = Stopped | CreditReturned | RoomReturned | PeerLost | PeerBack | EdgeRefused


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot for people and metrics.

    Attributes:
        connected: Whether a peer has said hello and lives.
        peer_pid: Its process id, 0 while there is none.
        entries: What the connector holds now, by table (``ledger``, ``blocks``, ``control``, ``arrived``); all zero
            when no stream lives.
    """

    connected: bool
    peer_pid: int = 0
    entries: Mapping[str, int] = field(default_factory=dict)


class Connector(Protocol):
    """One end of one edge. Thread-safe; no method but ``wait`` blocks."""

    @property
    def edge(self) -> Edge:
        """The edge that it serves."""

    @property
    def sends(self) -> bool:
        """Whether this is the sending end."""

    def hello(self) -> Hello:
        """What this end says and expects."""

    def put(self, frame: Frame) -> PutOutcome:
        """Store one frame where the receiving stage can get it; ``frame.key`` is unique for ever.

        Called by: the outbox, on the sending end, one call at a time per stream, in order. No lock is held.

        Args:
            frame: Its body is borrowed until this returns and not written to.

        Returns:
            ``STORED``: the connector owns a copy. ``BUSY``: no credit or no room, nothing was stored, no attempt
            counts; a ``CreditReturned`` or ``RoomReturned`` follows when it may succeed. ``RETRY``: perhaps stored; the
            same frame comes again. ``REFUSED``: it never will be (larger than the frame limit, say); with a reason.

        Raises:
            ConnectorClosedError: After ``close``. Anything else that it raises counts as ``RETRY``.
        """

    def get(self) -> Arrival | None:
        """The next frame that has come on this edge, whatever its stream; None when nothing has.

        Called by: the inbox, on the receiving end, from one thread. Each arrival must be loaded or discarded, and
        is, before the next ``get``.

        Raises:
            RemoteProtocolError: A header that cannot be decoded; the edge is closed, ``PeerLost`` follows.
        """

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a frame or a signal may be there, ``close`` or ``wake`` was called, or the time is over.

        Called by: the I/O thread of this edge. Uses no CPU while it waits. Returns whether something may be there.
        """

    def wake(self) -> None:
        """Make a ``wait`` that is under way, or the next one, return. From any thread."""

    def signals(self) -> list[Signal]:
        """Signals since the last call, in order. ``PeerLost`` comes after the last frame of that peer was got."""

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> None:
        """On the receiving end: tell the sender its credit for a stream, as absolute numbers.

        Args:
            identity: The stream.
            frames: How many frames may be outstanding.
            nbytes: How many bytes may be outstanding; one frame of any size may be when none is.
            taken_frames: How many frames of the stream the stage has taken since it began.
            taken_bytes: How many bytes these had.
        """

    def stop(self, identity: Identity, cause: Cause) -> None:
        """On the receiving end: the stream is not wanted any more. Never busy, needs no credit."""

    def reclaim(self, identity: Identity, *, unread: bool) -> None:
        """This life is over at this end: forget what is kept of it here. Idempotent.

        Args:
            identity: The stream.
            unread: Whether frames that are stored and unread are to be dropped as well; after a normal end they are not,
                the receiver still gets them.
        """

    def health(self) -> Health:
        """How the edge is."""

    def close(self) -> None:
        """Release sockets, arenas and names. Idempotent. The peer gets what was put, then ``PeerLost``."""
