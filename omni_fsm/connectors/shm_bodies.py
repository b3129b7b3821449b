"""A body on its way through shared memory: out of one stage as a block, into the other with a packet."""

from collections.abc import Sequence

from omni_fsm.connectors.arena import Arena, OwnedFd, Ring, checked_region, copy_parts, own_region, read_region
from omni_fsm.connectors.wire import FramePacket, Place
from omni_fsm.payload import receive_buffer
from omni_fsm.protocol.errors import RemoteProtocolError


class ArenaBlock:
    """Room in the arena."""

    __slots__ = ("_ring", "_span", "_view", "offset")
    place: Place = "arena"

    def __init__(self, arena: Arena, nbytes: int) -> None:
        span = arena.ring.allocate(nbytes)
        if span is None:
            raise AssertionError(f"no room for {nbytes} bytes in the arena, though there was")
        self._ring: Ring = arena.ring
        self._span, self.offset = span, span.offset
        self._view = arena.view[span.offset : span.offset + nbytes]

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Copy the body into the arena."""
        copy_parts(self._view, parts)

    def release(self) -> None:
        """Give the room back."""
        self._ring.free(self._span)


class OwnBlock:
    """A region of its own, for a body larger than the arena. Held against a budget until it is acknowledged."""

    __slots__ = ("_budget", "_nbytes", "fd")
    place: Place = "own"
    offset = 0

    def __init__(self, budget: list[int], nbytes: int) -> None:
        self._budget, self._nbytes = budget, nbytes
        budget[0] += nbytes
        self.fd: OwnedFd | None = None

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Make the region."""
        self.fd = own_region(parts)

    def sent(self) -> None:
        """The packet holds it now."""
        if self.fd is not None:
            self.fd.close()

    def release(self) -> None:
        """The peer has it, or it was never sent."""
        self.sent()
        nbytes, self._nbytes = self._nbytes, 0
        self._budget[0] -= nbytes


class ShmPacket:
    """One packet, with the fds that came along and the peer's arena as it was then."""

    __slots__ = ("_arena", "data", "fds")

    def __init__(self, data: memoryview, fds: list[OwnedFd], arena: memoryview | None) -> None:
        self.data, self.fds, self._arena = data, fds, arena

    def check(self, header: FramePacket | None) -> None:
        """The region is inside what the peer shared, and sealed; no fd came along that should not."""
        place = "none" if header is None else header.place
        expected = int(place == "own")
        if len(self.fds) != expected:
            raise RemoteProtocolError(f"{len(self.fds)} descriptors came with a packet, expected {expected}")
        if header is None:
            return
        if place == "own":
            checked_region(self.fds[0], header.nbytes)
        elif place == "arena":
            held = 0 if self._arena is None else self._arena.nbytes
            if header.offset + header.nbytes > held:
                raise RemoteProtocolError(
                    f"a body at {header.offset} of {header.nbytes} bytes is outside the arena of {held} bytes"
                )

    def load(self, header: FramePacket) -> memoryview:
        """Copy the body into private memory."""
        nbytes = header.nbytes
        target = receive_buffer(nbytes)
        if header.place == "own":
            read_region(self.fds[0], target)
        elif header.place == "arena" and self._arena is not None:
            copy_parts(target, (self._arena[header.offset : header.offset + nbytes],))
        else:
            target[:] = self.data[self.data.nbytes - nbytes :]
        return target

    def close(self) -> None:
        """Close the fds and let go of the arena."""
        for fd in self.fds:
            fd.close()
        self._arena = None
