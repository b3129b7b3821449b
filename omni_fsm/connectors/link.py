"""What a transport author implements: a link that moves whole, ordered packets to and from one peer.

`omni_fsm.connectors.connector.LinkConnector` makes a connector of any link. The link knows how bytes move, and nothing
of credit, streams or what a packet says.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from omni_fsm.connectors.wire import FramePacket, HelloPacket, Place


class Sent(Enum):
    """What became of a packet: on its way; no room now; the peer is not there (what it sent may still be read)."""

    DONE = auto()
    FULL = auto()
    GONE = auto()


class Gone(Enum):
    """Answer of ``Link.receive``: the peer is gone and all that it had sent was received."""

    GONE = auto()


class Ready(NamedTuple):
    """Why ``Link.poll`` returned."""

    woken: bool = False
    readable: bool = False
    writable: bool = False


class Block(Protocol):
    """Room for one body on its way to the peer."""

    @property
    def place(self) -> Place:
        """Where the peer finds it."""

    @property
    def offset(self) -> int:
        """Where in that place it begins."""

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Copy the body. Called once, without a lock."""

    def release(self) -> None:
        """The room is free again: it was never sent, or the peer is done with it. Idempotent."""


Body = tuple[memoryview, ...] | Block
"""A body on its way: parts that go behind their header, or the block that the header names."""


class Packet(Protocol):
    """One packet that came, with whatever came along."""

    @property
    def data(self) -> memoryview:
        """Its bytes, valid until the link's next ``receive``."""

    def check(self, header: FramePacket | None) -> None:
        """Make sure that a frame's body can be read, and that nothing came along that should not (None: of a notice).

        Raises:
            RemoteProtocolError: It cannot, or something did.
        """

    def load(self, header: FramePacket) -> memoryview:
        """Copy the checked body into private memory. Called without a lock."""

    def close(self) -> None:
        """Let go of whatever came along. Idempotent."""


class Link(Protocol):
    """Packets to and from one peer at a time.

    The connector's lock is held around every call but ``poll`` (and ``fill`` and ``load`` of what it gave out), and no
    other call blocks.
    """

    @property
    def peer_pid(self) -> int:
        """Process id of the peer that was met, 0 while there is none."""

    @property
    def arena_bytes(self) -> int:
        """What this end shares with its peer, told in the hello; 0 when it sends no frames."""

    @property
    def inline_bytes(self) -> int:
        """Largest body that goes behind its header; -1 when every body needs a block."""

    @property
    def unread(self) -> int:
        """How many packets wait here to be received, where that can be known; else 0."""

    def meet(self) -> bool:
        """Try to reach a peer. Returns whether there is one."""

    def retry_s(self) -> float | None:
        """Seconds until ``meet`` is worth another try without an event; None when only an event can help."""

    def part(self) -> None:
        """Let go of the peer and of all that was shared with it. ``meet`` looks for the next one."""

    def greet(self, packet: bytes) -> Sent:
        """Send the hello, with a handle of what this end shares."""

    def greeted(self, packet: Packet, header: HelloPacket) -> None:
        """The peer's hello has come and agrees: take what it shares.

        Raises:
            RemoteProtocolError: It cannot be used.
        """

    def send(self, packet: bytes, body: Body = ()) -> Sent:
        """Send one packet, with its inline body or with the block that its header names."""

    def receive(self) -> Packet | Gone | None:
        """The next packet; None when none has come.

        Raises:
            RemoteProtocolError: A packet larger than any may be.
        """

    def reserve(self, nbytes: int) -> Block | None:
        """Room for a body; None when there is none now."""

    def fits(self, nbytes: int) -> bool:
        """Whether ``reserve`` would give a block now."""

    def watch_room(self, *, on: bool) -> None:
        """Whether ``poll`` shall also return when packets can be sent again."""

    def poll(self, timeout_s: float | None) -> None:
        """Block until something may have come, or ``wake``."""

    def settle(self) -> Ready:
        """What the last ``poll`` saw."""

    def wake(self) -> None:
        """Make a ``poll`` that is under way, or the next one, return."""

    def close(self) -> None:
        """Let go of everything but what ``poll`` needs."""

    def release(self) -> None:
        """Let go of that too; nobody polls any more. Idempotent."""
