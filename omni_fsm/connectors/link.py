"""`LinkConnector`: the connector port over any link that moves whole, ordered packets to and from one peer.

The connector knows hellos, credit, acknowledgements, signals and the order in which a lost peer is told; the link
knows how bytes move. One short lock guards both; it is never held while a thread waits or a body of more than an inline
one's size is copied.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from omni_fsm.connectors.ledger import CreditLedger
from omni_fsm.connectors.port import (
    BUSY,
    STORED,
    ConnectorClosedError,
    CreditReturned,
    EdgeRefused,
    Health,
    Hello,
    PeerBack,
    PeerLost,
    PutOutcome,
    PutStatus,
    RoomReturned,
    Signal,
    Stopped,
)
from omni_fsm.connectors.wire import (
    AckPacket,
    Credit,
    CreditPacket,
    FramePacket,
    Header,
    HelloPacket,
    Place,
    StopPacket,
    ack_packet,
    credit_packet,
    frame_fault,
    frame_of,
    frame_packet,
    hello_mismatch,
    hello_packet,
    identity_of,
    stop_packet,
    unpacked,
)
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Edge, Identity

DEFAULT_MAX_FRAME_BYTES = 1 << 30
HELLO_S = 5.0
"""How long a peer that was reached may take to say hello before it is dropped."""

_NOTICES_AT_ONCE = 256


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


class _Phase(Enum):
    ABSENT = auto()  # no peer
    GREETING = auto()  # our hello is on its way, theirs has not come
    UP = auto()
    LOST = auto()  # PeerLost was not handed out yet: no new peer before the owner knows
    REFUSED = auto()
    CLOSED = auto()


class _Control:
    """Notices that wait for the socket, bounded: one acknowledgement, one credit and one stop a stream."""

    def __init__(self) -> None:
        self.ack_upto = 0
        self._stops: dict[Identity, bytes] = {}
        self._credits: dict[Identity, Credit] = {}

    def __len__(self) -> int:
        return len(self._stops) + len(self._credits) + (self.ack_upto > 0)

    def add_credit(self, identity: Identity, credit: Credit) -> None:
        """The larger of each number holds: grants of several threads may come in any order, and none takes back."""
        before = self._credits.get(identity, credit)
        self._credits[identity] = Credit(*map(max, before, credit))

    def add_stop(self, identity: Identity, packet: bytes) -> None:
        self._stops.setdefault(identity, packet)  # the first cause is kept

    def head(self) -> bytes:
        if self.ack_upto:
            return ack_packet(self.ack_upto)
        if self._stops:
            return next(iter(self._stops.values()))
        return credit_packet(*next(iter(self._credits.items())))

    def sent(self) -> None:
        if self.ack_upto:
            self.ack_upto = 0
        else:
            queue: dict[Identity, Any] = self._stops or self._credits
            del queue[next(iter(queue))]

    def clear(self) -> None:
        self.ack_upto = 0
        self._stops.clear()
        self._credits.clear()


class LinkArrival:
    """A frame that has come; see `omni_fsm.connectors.port.Arrival`."""

    __slots__ = ("_connector", "_done", "_header", "_packet", "epoch", "frame")

    def __init__(
        self, connector: "LinkConnector", frame: Frame, header: FramePacket, packet: Packet, epoch: int
    ) -> None:
        self._connector, self._header, self._packet = connector, header, packet
        self.frame, self.epoch = frame, epoch
        self._done = False

    @property
    def nbytes(self) -> int:
        """Size of the body in bytes; 0 where there is none."""
        return self._header.nbytes

    @property
    def done(self) -> bool:
        """Whether it was loaded or discarded."""
        return self._done

    @property
    def has_block(self) -> bool:
        """Whether its body holds room of the peer's until it is acknowledged."""
        return self._header.place in ("arena", "own")

    def load(self) -> memoryview | None:
        """Copy the body into private memory and acknowledge it; None when the frame has none.

        Raises:
            LocalProtocolError: It was loaded or discarded before.
            RemoteProtocolError: The frame's region is not inside what the peer shared. After anything else, no memory
                for example, it may be called again.
        """
        if self._done:
            raise LocalProtocolError(
                machine="arrival", stream=str(self.frame.identity), event="load", state="done", detail="load it once"
            )
        try:
            body = None if self._header.place == "none" else self._packet.load(self._header)
        except RemoteProtocolError:
            self.discard()
            raise
        self.discard()
        return body

    def discard(self) -> None:
        """Acknowledge without copying: nobody wants it. Does nothing after ``load``."""
        if not self._done:
            self._done = True
            self._packet.close()
            self._connector.acknowledge(self)


class LinkConnector:
    """One end of one edge over a link; see `omni_fsm.connectors.port.Connector` for the contract.

    The same loop serves both ends: ``wait``, then ``get`` until it gives None, then ``signals``. After ``PeerLost`` no
    new peer is met, and after a ``PeerBack`` no frame is given out, before ``signals`` has handed it over. After
    ``close``, ``wait`` returns at once, ``get`` and ``signals`` give nothing, ``put`` raises and notices are dropped.

    Args:
        link: Moves the packets; owned from now on.
        hello: What this end says and expects.
        sends: Whether this is the sending end.
        max_frame_bytes: The largest body; the smaller of both ends' limits holds once they have met.
    """

    def __init__(
        self, link: Link, hello: Hello, *, sends: bool, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    ) -> None:
        if max_frame_bytes <= 0:
            raise ConfigError("max_frame_bytes", max_frame_bytes, "an int above 0")
        self._lock = threading.Lock()
        self._link, self._hello, self._sends = link, hello, sends
        self._own_limit = self._limit = max_frame_bytes
        self._phase = _Phase.ABSENT
        self._epoch = 0  # grows with each peer that is lost
        self._hello_deadline_s = 0.0
        self._signals: list[Signal] = []
        self._back_pending = False
        self._fault: RemoteProtocolError | None = None
        self._refused = ""
        self._woken = self._polling = False
        self._control = _Control()
        # Of the sending end:
        self._ledger = CreditLedger()
        self._blocks: deque[Block] = deque()  # sent and not acknowledged, oldest first
        self._acked = 0
        self._full = False  # the socket; until poll says writable
        self._wants_peer = False
        self._wanted_bytes: int | None = None
        # Of the receiving end:
        self._arrival: LinkArrival | None = None
        self._blocks_done = self._blocks_told = 0  # loaded or discarded; acknowledged to the peer
        self._bytes_done = 0  # since the last acknowledgement
        self._peer_arena_bytes = 0

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def edge(self) -> Edge:
        """The edge that it serves."""
        return self._hello.edge

    @property
    def sends(self) -> bool:
        """Whether this is the sending end."""
        return self._sends

    def hello(self) -> Hello:
        """What this end says and expects."""
        return self._hello

    def health(self) -> Health:
        """How the edge is."""
        with self._lock:
            up = self._phase is _Phase.UP
            held = int(self._arrival is not None and not self._arrival.done)
            return Health(
                connected=up,
                peer_pid=self._link.peer_pid if up else 0,
                entries={
                    "ledger": len(self._ledger),
                    "blocks": len(self._blocks),
                    "control": len(self._control),
                    "arrived": held + (0 if self._sends else self._link.unread),
                },
            )

    # -- the sending end -------------------------------------------------------------------------------------------

    def put(self, frame: Frame) -> PutOutcome:
        """Store one frame where the receiving stage can get it; see the port.

        Raises:
            ConnectorClosedError: After ``close``.
        """
        parts = () if frame.body is None else tuple(frame.body.parts)
        nbytes = sum(part.nbytes for part in parts)
        try:
            with self._lock:
                refusal = self._refusal(frame, nbytes)
                if refusal:
                    return PutOutcome(PutStatus.REFUSED, refusal)
                if not self._may_put(frame, nbytes):
                    return BUSY
                if nbytes <= self._link.inline_bytes or frame.body is None:
                    return self._send_frame(frame, "none" if frame.body is None else "inline", nbytes, parts)
                block = self._link.reserve(nbytes)
                epoch = self._epoch
                if block is None:
                    wanted = self._wanted_bytes
                    self._wanted_bytes = nbytes if wanted is None else min(nbytes, wanted)
                    return BUSY
            return self._put_block(frame, parts, nbytes, block, epoch)
        except OSError as error:  # no memory, no descriptor: nothing was stored
            return PutOutcome(PutStatus.RETRY, f"edge {self.edge}: {error}")

    def _refusal(self, frame: Frame, nbytes: int) -> str:
        if self._phase is _Phase.CLOSED:
            raise ConnectorClosedError(f"edge {self.edge} is closed: {frame.identity} cannot be put")
        if self._refused:
            return self._refused
        if frame.edge != self.edge or not self._sends:
            end = "sending" if self._sends else "receiving"
            return f"a frame of edge {frame.edge} cannot be put at the {end} end of {self.edge}"
        if nbytes > self._limit:
            return f"the payload has {nbytes} bytes, the frame limit of edge {self.edge} is {self._limit}"
        if frame.body is not None and frame.body.nbytes != nbytes:
            return f"the payload says that it has {frame.body.nbytes} bytes, its parts have {nbytes}"
        return frame_fault(frame, has_body=frame.body is not None) or ""

    def _may_put(self, frame: Frame, nbytes: int) -> bool:
        if self._phase is not _Phase.UP:
            self._wants_peer = True
            return False
        return self._ledger.allows(frame, nbytes) and not self._full

    def _put_block(
        self, frame: Frame, parts: tuple[memoryview, ...], nbytes: int, block: Block, epoch: int
    ) -> PutOutcome:
        sent = PutOutcome(PutStatus.RETRY)
        try:
            block.fill(parts)  # without the lock: copying may take milliseconds
            with self._lock:
                if self._epoch == epoch:
                    sent = self._send_frame(frame, block.place, nbytes, block)
                else:  # the peer died, or this end was closed, meanwhile: the next put tells
                    self._wants_peer = True
                    sent = BUSY
        finally:
            if sent is not STORED:
                with self._lock:
                    block.release()
        return sent

    def _send_frame(self, frame: Frame, place: Place, nbytes: int, body: Body) -> PutOutcome:
        block = None if isinstance(body, tuple) else body
        packet = frame_packet(frame, place, nbytes, 0 if block is None else block.offset)
        sent = self._link.send(packet, body)
        if sent is Sent.DONE:
            self._ledger.count(frame, nbytes)
            if block is not None:
                self._blocks.append(block)
            return STORED
        if sent is Sent.FULL:
            self._full = True
            self._link.watch_room(on=True)
        else:  # the I/O thread finds out why, after it has read what is left
            self._wants_peer = True
        return BUSY

    # -- the receiving end -----------------------------------------------------------------------------------------

    def get(self) -> LinkArrival | None:
        """The next frame that has come on this edge, whatever its stream; None when nothing has.

        Raises:
            RemoteProtocolError: What the peer sent cannot be accepted; the edge is closed, ``PeerLost`` follows.
        """
        arrival = self._arrival
        if arrival is not None and not arrival.done:
            arrival.discard()
        with self._lock:
            self._arrival = None
            self._step(read=True)
            if self._phase is _Phase.UP and not self._sends and not self._back_pending:
                try:
                    self._arrival = self._next_arrival()
                except RemoteProtocolError as error:
                    self._break(error)
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            return self._arrival

    def _next_arrival(self) -> LinkArrival | None:
        packet = self._link.receive()
        if packet is None:
            self._flush_ack()  # not while frames are still coming: one acknowledgement serves a burst
            return None
        if packet is Gone.GONE:
            self._lose(PeerLost())
            return None
        try:
            header, frame = self._checked_frame(packet)
        except BaseException:
            packet.close()
            raise
        return LinkArrival(self, frame, header, packet, self._epoch)

    def _checked_frame(self, packet: Packet) -> tuple[FramePacket, Frame]:
        header, inline = unpacked(self.edge, packet.data)
        if not isinstance(header, FramePacket):
            raise RemoteProtocolError(f"edge {self.edge}: a {_tag(header)} came where only frames come")
        frame = frame_of(self.edge, header)
        if header.nbytes > self._limit:
            raise RemoteProtocolError(
                f"edge {self.edge}: frame of {frame.identity}: {header.nbytes} bytes, the limit is {self._limit}"
            )
        announced = header.nbytes if header.place == "inline" else 0
        if len(inline) != announced:
            raise RemoteProtocolError(
                f"edge {self.edge}: frame of {frame.identity}: {len(inline)} inline bytes, announced were {announced}"
            )
        packet.check(header)
        return header, frame

    def acknowledge(self, arrival: LinkArrival) -> None:
        """Called by: an arrival that was loaded or discarded, once."""
        if not arrival.has_block:
            return
        with self._lock:
            if arrival.epoch != self._epoch or self._phase is not _Phase.UP:
                return
            self._blocks_done += 1
            self._bytes_done += arrival.nbytes
            if self._bytes_done * 8 >= self._peer_arena_bytes:  # the sender may be waiting for it
                self._flush_ack()

    def _flush_ack(self) -> None:
        if self._blocks_done != self._blocks_told:
            self._control.ack_upto = self._blocks_told = self._blocks_done
            self._bytes_done = 0
        self._flush()

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> None:
        """Tell the sender its credit for a stream, as absolute numbers. Without a peer it is dropped: see `stop`."""
        with self._lock:
            if self._phase is _Phase.UP:
                self._control.add_credit(identity, Credit(frames, nbytes, taken_frames, taken_bytes))
                self._flush()

    def stop(self, identity: Identity, cause: Cause) -> None:
        """The stream is not wanted any more. Dropped without a peer: its streams end with it, the next knows none."""
        with self._lock:
            if self._phase is _Phase.UP:
                self._control.add_stop(identity, stop_packet(identity, cause))
                self._flush()

    # -- both ends -------------------------------------------------------------------------------------------------

    def reclaim(self, identity: Identity, *, unread: bool) -> None:  # noqa: ARG002 - see its description
        """This life is over at this end: forget its credit. Notices that still wait go out: the sender needs them.

        Args:
            identity: The stream.
            unread: Makes no difference: unread frames are on their way, the receiver drops them as they come.
        """
        with self._lock:
            self._ledger.drop(identity)

    def signals(self) -> list[Signal]:
        """Signals since the last call, in order."""
        with self._lock:
            if self._sends:
                self._step(read=True)
            self._fault = None  # PeerLost says it too
            found, self._signals = self._signals, []
            self._back_pending = False
            if self._phase is _Phase.LOST:
                self._phase = _Phase.ABSENT
            return found

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a frame or a signal may be there, ``close`` or ``wake`` was called, or the time is over."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._step(read=False)
            if self._phase is _Phase.UP:
                self._flush_ack()
            if self._due():
                return True
        while True:
            with self._lock:
                if self._phase is _Phase.CLOSED:
                    return True
                pause_s = self._pause_s(deadline_s)
                self._polling = True
            try:
                self._link.poll(pause_s)
            finally:
                with self._lock:
                    due = self._polled()
            if due or (deadline_s is not None and time.monotonic() >= deadline_s):
                return due

    def wake(self) -> None:
        """Make a ``wait`` that is under way, or the next one, return. From any thread."""
        with self._lock:
            if self._phase is not _Phase.CLOSED:
                self._link.wake()

    def close(self) -> None:
        """Release sockets, arenas and names. Idempotent. The peer gets what was put, then ``PeerLost``."""
        with self._lock:
            if self._phase is _Phase.CLOSED:
                return
            if self._phase is _Phase.UP:
                self._flush_ack()
            self._forget_peer()
            self._phase = _Phase.CLOSED
            self._signals.clear()
            self._fault = None
            self._link.close()
            if self._polling:
                self._link.wake()  # the thread that polls releases the rest
            else:
                self._link.release()

    # -- under the lock --------------------------------------------------------------------------------------------

    def _due(self, *, readable: bool = False) -> bool:
        """Whether the owner of ``wait`` has something to do."""
        if self._woken or self._signals or self._fault is not None or self._phase is _Phase.CLOSED:
            self._woken = False
            return True
        return readable and not self._sends and self._phase is _Phase.UP

    def _polled(self) -> bool:
        """Take in what a poll saw; whether ``wait`` shall return."""
        self._polling = False
        if self._phase is _Phase.CLOSED:
            self._link.release()
            return True
        ready = self._link.settle()
        self._woken = self._woken or ready.woken
        if ready.writable:
            self._link.watch_room(on=False)
            if self._full:
                self._full = False
                self._signals.append(RoomReturned())
            self._flush()
        self._step(read=ready.readable)
        return self._due(readable=ready.readable)

    def _pause_s(self, deadline_s: float | None) -> float | None:
        """How long a poll may last: until the caller's deadline, the next try for a peer, or a silent peer's end."""
        now_s = time.monotonic()
        waits_s = [] if deadline_s is None else [deadline_s - now_s]
        if self._phase is _Phase.GREETING:
            waits_s.append(self._hello_deadline_s - now_s)
        elif self._phase is _Phase.ABSENT:
            retry_s = self._link.retry_s()
            if retry_s is not None:
                waits_s.append(retry_s)
        return max(0.0, min(waits_s)) if waits_s else None

    def _step(self, *, read: bool) -> None:
        """Go on with whatever can go on without waiting: meet, greet, and at the sending end read the notices."""
        try:
            if self._phase is _Phase.ABSENT and self._link.meet():
                self._greet()
            if self._phase is _Phase.GREETING:
                self._read_hello()
            if self._phase is _Phase.UP and self._sends and read:
                self._read_notices()
        except RemoteProtocolError as error:
            self._break(error)
        except OSError as error:  # no descriptor, no memory: this peer is given up, the next try may do
            self._break(RemoteProtocolError(f"edge {self.edge}: {error}"))

    def _greet(self) -> None:
        packet = hello_packet(self._hello, max_frame_bytes=self._own_limit, arena_bytes=self._link.arena_bytes)
        if self._link.greet(packet) is Sent.DONE:
            self._phase = _Phase.GREETING
            self._hello_deadline_s = time.monotonic() + HELLO_S
        else:
            self._link.part()

    def _read_hello(self) -> None:
        packet = self._link.receive()
        if packet is None or packet is Gone.GONE:
            if packet is Gone.GONE or time.monotonic() >= self._hello_deadline_s:
                self._link.part()
                self._phase = _Phase.ABSENT
            return
        try:
            header, rest = unpacked(self.edge, packet.data)
            if not isinstance(header, HelloPacket) or rest:
                raise RemoteProtocolError(f"edge {self.edge}: a {_tag(header)} came before the hello")
            mismatch = hello_mismatch(self._hello, header)
            if mismatch is not None:
                self._forget_peer()
                self._link.close()
                self._phase, self._refused = _Phase.REFUSED, str(mismatch)
                self._signals.append(EdgeRefused(mismatch))
                return
            self._link.greeted(packet, header)
        finally:
            packet.close()
        self._phase, self._back_pending = _Phase.UP, True
        self._limit = min(self._own_limit, header.max_frame_bytes)
        self._peer_arena_bytes = header.arena_bytes
        self._signals.append(PeerBack())
        if self._wants_peer:
            self._wants_peer = False
            self._signals.append(RoomReturned())

    def _read_notices(self) -> None:
        for _ in range(_NOTICES_AT_ONCE):
            packet = self._link.receive()
            if packet is None:
                return
            if packet is Gone.GONE:
                self._lose(PeerLost())
                return
            try:
                packet.check(None)
                header, rest = unpacked(self.edge, packet.data)
                self._take_notice(header, rest)
            finally:
                packet.close()

    def _take_notice(self, header: Header, rest: memoryview) -> None:
        if rest:
            raise RemoteProtocolError(f"edge {self.edge}: {len(rest)} bytes behind a {_tag(header)}")
        match header:
            case CreditPacket():
                identity = identity_of(self.edge, header.id, header.generation)
                if self._ledger.grant(
                    identity,
                    frames=header.frames,
                    nbytes=header.nbytes,
                    taken_frames=header.taken_frames,
                    taken_bytes=header.taken_bytes,
                ):
                    self._signals.append(CreditReturned(identity))
            case StopPacket():
                identity = identity_of(self.edge, header.id, header.generation)
                if header.outcome is Outcome.OK:
                    raise RemoteProtocolError(f"edge {self.edge}: a stop of {identity} with outcome ok")
                self._signals.append(Stopped(identity, Cause(header.outcome, header.reason, header.at_ns)))
            case AckPacket():
                self._free(header.upto)
            case _:
                raise RemoteProtocolError(f"edge {self.edge}: a {_tag(header)} came where only notices come")

    def _free(self, upto: int) -> None:
        count = upto - self._acked
        if not 0 <= count <= len(self._blocks):
            raise RemoteProtocolError(
                f"edge {self.edge}: body {upto} acknowledged, the next is {self._acked + 1} of {len(self._blocks)}"
            )
        for _ in range(count):
            self._blocks.popleft().release()
        self._acked = upto
        if self._wanted_bytes is not None and self._link.fits(self._wanted_bytes):
            self._wanted_bytes = None
            self._signals.append(RoomReturned())

    def _flush(self) -> None:
        """Send the notices that wait, as far as the socket takes them; poll says when it takes more."""
        while self._control:
            try:
                sent = self._link.send(self._control.head())
            except OSError:  # no memory for it just now
                sent = Sent.FULL
            if sent is not Sent.DONE:
                if sent is Sent.FULL:
                    self._link.watch_room(on=True)
                return
            self._control.sent()

    def _break(self, error: RemoteProtocolError) -> None:
        self._fault = error
        self._lose(PeerLost(str(error)))

    def _lose(self, lost: PeerLost) -> None:
        self._forget_peer()
        self._phase = _Phase.LOST
        self._signals.append(lost)

    def _forget_peer(self) -> None:
        self._link.part()
        self._epoch += 1
        self._ledger.clear()
        self._control.clear()
        self._blocks.clear()
        self._acked = self._blocks_done = self._blocks_told = self._bytes_done = 0
        self._wants_peer = self._wants_peer or self._full or self._wanted_bytes is not None
        self._full, self._wanted_bytes = False, None
        self._limit = self._own_limit


def _tag(header: Header) -> str:
    return type(header).__name__.removesuffix("Packet").lower()
