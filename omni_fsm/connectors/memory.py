"""An edge inside one process: the same connector, over queues instead of a socket. For tests and colocated stages."""

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from omni_fsm.connectors.arena import copy_parts
from omni_fsm.connectors.connector import DEFAULT_MAX_FRAME_BYTES, LinkConnector
from omni_fsm.connectors.link import Body, Gone, Packet, Ready, Sent
from omni_fsm.connectors.port import Hello
from omni_fsm.connectors.wire import FramePacket, HelloPacket, Place
from omni_fsm.payload import receive_buffer
from omni_fsm.protocol.errors import ConfigError

DEFAULT_CAPACITY_BYTES = 64 << 20
MAX_WAITING_PACKETS = 1_024

_Role = Literal["sending", "receiving"]
_OTHER: dict[_Role, _Role] = {"sending": "receiving", "receiving": "sending"}


@dataclass(slots=True, eq=False)
class _Session:
    """One meeting of two ends: what is under way to each of them, and who has left."""

    under_way: dict[_Role, deque["MemoryPacket"]] = field(
        default_factory=lambda: {"sending": deque(), "receiving": deque()}
    )
    left: set[_Role] = field(default_factory=set)
    held_bytes: list[int] = field(default_factory=lambda: [0, 0])  # by bodies up to the capacity, and by larger ones


class MemoryBlock:
    """A body's private copy on its way to the other end."""

    place: Place = "own"
    offset = 0

    def __init__(self, held_bytes: list[int], kind: int, nbytes: int) -> None:
        self.buffer = receive_buffer(nbytes)
        self._held_bytes, self._kind, self._nbytes = held_bytes, kind, nbytes
        held_bytes[kind] += nbytes

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Copy the body."""
        copy_parts(self.buffer, parts)

    def release(self) -> None:
        """The receiver has it, or it was never sent."""
        nbytes, self._nbytes = self._nbytes, 0
        self._held_bytes[self._kind] -= nbytes


class MemoryPacket:
    """One packet, with the body's buffer where it has one: loading it hands the buffer over."""

    __slots__ = ("_body", "data")

    def __init__(self, data: bytes, body: memoryview | None) -> None:
        self.data, self._body = memoryview(data), body

    def check(self, header: FramePacket | None) -> None:
        """Nothing to doubt: both ends are this process."""

    def load(self, header: FramePacket) -> memoryview:
        """The private copy that ``put`` made."""
        body, self._body = self._body, None
        if body is None:
            raise AssertionError(f"a {header.place} body of {header.nbytes} bytes came without its buffer")
        return body

    def close(self) -> None:
        """Forget the body."""
        self._body = None


class MemoryLink:
    """One end of a `MemoryEdge`; see `omni_fsm.connectors.link.Link`."""

    inline_bytes = -1

    def __init__(self, edge: "MemoryEdge", role: _Role, capacity_bytes: int, max_frame_bytes: int) -> None:
        self._edge, self._role, self._other = edge, role, _OTHER[role]
        self._cond = edge.cond
        self._limits = (capacity_bytes, max_frame_bytes)
        self.session: _Session | None = None
        self._woken = self._wants_room = self._closed = False

    @property
    def peer_pid(self) -> int:
        """This process, while the other end is there."""
        return os.getpid() if self.session is not None else 0

    @property
    def arena_bytes(self) -> int:
        """The capacity, at the sending end."""
        return self._limits[0] if self._role == "sending" else 0

    @property
    def unread(self) -> int:
        """Packets that wait here."""
        return 0 if self.session is None else len(self.session.under_way[self._role])

    def meet(self) -> bool:
        """Meet the other end, once it exists and has let go of whom it met before."""
        with self._cond:
            other = self._edge.ends.get(self._other)
            if self.session is None and other is not None and other.session is None:
                self.session = other.session = _Session()
                self._cond.notify_all()
            return self.session is not None

    def retry_s(self) -> None:
        """The other end's arrival wakes this one."""

    def part(self) -> None:
        """Leave the session; the other end reads what it holds, then learns of it."""
        with self._cond:
            session, self.session = self.session, None
            self._wants_room = False
            if session is not None:
                session.left.add(self._role)
                session.under_way[self._role].clear()
            self._cond.notify_all()

    def greet(self, packet: bytes) -> Sent:
        """Say hello."""
        return self.send(packet)

    def greeted(self, packet: Packet, header: HelloPacket) -> None:
        """Nothing is shared."""

    def send(self, packet: bytes, body: Body = ()) -> Sent:
        """Queue one packet for the other end."""
        with self._cond:
            session = self.session
            if session is None or self._other in session.left:
                return Sent.GONE
            queue = session.under_way[self._other]
            if len(queue) >= MAX_WAITING_PACKETS:
                return Sent.FULL
            queue.append(MemoryPacket(packet, body.buffer if isinstance(body, MemoryBlock) else None))
            self._cond.notify_all()
            return Sent.DONE

    def receive(self) -> MemoryPacket | Gone | None:
        """The next packet of this session."""
        with self._cond:
            session = self.session
            if session is None:
                return None
            queue = session.under_way[self._role]
            if queue:
                if len(queue) == MAX_WAITING_PACKETS // 2:
                    self._cond.notify_all()
                return queue.popleft()
            return Gone.GONE if self._other in session.left else None

    def reserve(self, nbytes: int) -> MemoryBlock | None:
        """A buffer within the capacity, or for a larger body within the frame limit."""
        if self.session is None or not self.fits(nbytes):
            return None
        return MemoryBlock(self.session.held_bytes, int(nbytes > self._limits[0]), nbytes)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room."""
        kind = int(nbytes > self._limits[0])
        return self.session is not None and self.session.held_bytes[kind] + nbytes <= self._limits[kind]

    def watch_room(self, *, on: bool) -> None:
        """Whether ``poll`` shall return for room."""
        with self._cond:
            self._wants_room = on

    def poll(self, timeout_s: float | None) -> None:
        """Block until the other end did something that matters here."""
        with self._cond:
            self._cond.wait_for(self._stirred, timeout_s)

    def settle(self) -> Ready:
        """What there is."""
        with self._cond:
            ready = Ready(self._woken, self._readable(), self._writable())
            self._woken = False
            return ready

    def wake(self) -> None:
        """Make ``poll`` return."""
        with self._cond:
            self._woken = True
            self._cond.notify_all()

    def close(self) -> None:
        """Leave, and be met no more."""
        with self._cond:
            self.part()
            self._closed = True
            if self._edge.ends.get(self._role) is self:
                del self._edge.ends[self._role]

    def release(self) -> None:
        """Nothing is left."""

    def _readable(self) -> bool:
        session = self.session
        return session is not None and (bool(session.under_way[self._role]) or self._other in session.left)

    def _writable(self) -> bool:
        session = self.session
        return (
            self._wants_room and session is not None and len(session.under_way[self._other]) <= MAX_WAITING_PACKETS // 2
        )

    def _stirred(self) -> bool:
        if self._woken or self._readable() or self._writable():
            return True
        other = self._edge.ends.get(self._other)
        return not self._closed and self.session is None and other is not None and other.session is None


class MemoryEdge:
    """Where the two ends of an edge meet inside one process. An end that was closed may be replaced by a new one.

    Args:
        capacity_bytes: How much may be under way to the receiving end, body bytes, before puts are busy.
        max_frame_bytes: The largest body of one frame, and the most that bodies larger than the capacity hold together.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        if capacity_bytes <= 0:
            raise ConfigError("capacity_bytes", capacity_bytes, "an int above 0")
        self.cond = threading.Condition()
        self.ends: dict[_Role, MemoryLink] = {}
        self._capacity_bytes, self._max_frame_bytes = capacity_bytes, max_frame_bytes

    def sender(self, hello: Hello) -> LinkConnector:
        """The sending end.

        Raises:
            ConfigError: There is one already.
        """
        return self._end("sending", hello)

    def receiver(self, hello: Hello) -> LinkConnector:
        """The receiving end.

        Raises:
            ConfigError: There is one already.
        """
        return self._end("receiving", hello)

    def _end(self, role: _Role, hello: Hello) -> LinkConnector:
        with self.cond:
            if role in self.ends:
                raise ConfigError("edge", str(hello.edge), f"an edge whose {role} end is not open already")
            link = MemoryLink(self, role, self._capacity_bytes, self._max_frame_bytes)
            connector = LinkConnector(link, hello, sends=role == "sending", max_frame_bytes=self._max_frame_bytes)
            self.ends[role] = link
            self.cond.notify_all()
            return connector


def memory_pair(
    hello: Hello,
    receiver_hello: Hello | None = None,
    *,
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
) -> tuple[LinkConnector, LinkConnector]:
    """Sending and receiving end of an edge inside this process.

    Args:
        hello: What the sending end says, and the receiving end too unless it has its own.
        receiver_hello: What the receiving end says.
        capacity_bytes: See `MemoryEdge`.
        max_frame_bytes: See `MemoryEdge`.
    """
    edge = MemoryEdge(capacity_bytes=capacity_bytes, max_frame_bytes=max_frame_bytes)
    return edge.sender(hello), edge.receiver(receiver_hello or hello)
