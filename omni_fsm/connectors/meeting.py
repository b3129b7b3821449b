"""How two ends meet: the hellos, what they agree on, and what comes after a peer that is lost."""

import time
from enum import Enum, auto

from omni_fsm.connectors.link import Gone, Link, Sent
from omni_fsm.connectors.port import EdgeRefused, Hello, PeerBack
from omni_fsm.connectors.wire import HelloPacket, hello_mismatch, hello_packet, tag_of, unpacked
from omni_fsm.protocol.errors import RemoteProtocolError

HELLO_S = 5.0
"""How long a peer that was reached may take to say hello before it is dropped."""


class Phase(Enum):
    """How far an end has come with its peer."""

    ABSENT = auto()  # no peer
    GREETING = auto()  # our hello is on its way, theirs has not come
    UP = auto()
    LOST = auto()  # PeerLost was not handed out yet: no new peer before the owner knows
    REFUSED = auto()
    CLOSED = auto()


class Meeting:
    """Meets one peer after the other, and settles with each what holds for both ends.

    Its owner holds a lock around each call.

    Attributes:
        phase: How far it has come.
        epoch: Grows with each peer that is lost.
        limit_bytes: The largest body: the smaller of both ends' limits, once they have met.
        peer_arena_bytes: What the last peer that said hello shares.
        refusal: Why the hellos differ, in ``REFUSED``.
    """

    def __init__(self, link: Link, hello: Hello, max_frame_bytes: int) -> None:
        self._link, self._hello = link, hello
        self._own_limit_bytes = self.limit_bytes = max_frame_bytes
        self.phase = Phase.ABSENT
        self.epoch = 0
        self.peer_arena_bytes = 0
        self.refusal = ""
        self._deadline_s = 0.0  # for the peer's hello

    def go_on(self) -> PeerBack | EdgeRefused | None:
        """Meet and greet, as far as that goes without waiting. Returns the peer's answer when it has come.

        Raises:
            RemoteProtocolError: It is no hello, or what it shares cannot be used.
            OSError: No descriptor or no memory.
        """
        if self.phase is Phase.ABSENT and self._link.meet():
            self._greet()
        return self._read_hello() if self.phase is Phase.GREETING else None

    def pause_s(self) -> float | None:
        """Seconds until the next try for a peer, or a silent peer's end; None when only an event can help."""
        if self.phase is Phase.GREETING:
            return max(0.0, self._deadline_s - time.monotonic())
        return self._link.retry_s() if self.phase is Phase.ABSENT else None

    def leave(self, phase: Phase) -> None:
        """Let go of the peer, and of what was agreed with it."""
        self._link.part()
        self.epoch += 1
        self.limit_bytes = self._own_limit_bytes
        self.phase = phase

    def _greet(self) -> None:
        packet = hello_packet(self._hello, max_frame_bytes=self._own_limit_bytes, arena_bytes=self._link.arena_bytes)
        if self._link.greet(packet) is Sent.DONE:
            self.phase = Phase.GREETING
            self._deadline_s = time.monotonic() + HELLO_S
        else:
            self._link.part()

    def _read_hello(self) -> PeerBack | EdgeRefused | None:
        packet = self._link.receive()
        if packet is None or packet is Gone.GONE:
            if packet is Gone.GONE or time.monotonic() >= self._deadline_s:
                self._link.part()
                self.phase = Phase.ABSENT
            return None
        try:
            edge = self._hello.edge
            header, rest = unpacked(edge, packet.data)
            if not isinstance(header, HelloPacket) or rest:
                raise RemoteProtocolError(f"edge {edge}: a {tag_of(header)} came before the hello")
            mismatch = hello_mismatch(self._hello, header)
            if mismatch is not None:
                self.leave(Phase.REFUSED)
                self._link.close()
                self.refusal = str(mismatch)
                return EdgeRefused(mismatch)
            self._link.greeted(packet, header)
        finally:
            packet.close()
        self.phase = Phase.UP
        self.limit_bytes = min(self._own_limit_bytes, header.max_frame_bytes)
        self.peer_arena_bytes = header.arena_bytes
        return PeerBack()
