"""`LinkConnector`: the connector port over any link that moves whole, ordered packets to and from one peer.

The connector knows in which order its owner hears of things: a peer before its frames, its loss after the last of them.
It is made of parts: `meeting` (hellos), `outgoing` (the sending end's credit and room), `control` (the receiving end's
notices) and `arrival` (one frame that has come). One short lock guards them and the link; it is never held while a
thread waits or a body of more than an inline one's size is copied.
"""

import threading
import time
from functools import partial

from omni_fsm.connectors.arrival import LinkArrival, checked_frame
from omni_fsm.connectors.control import ControlTable
from omni_fsm.connectors.link import Block, Gone, Link
from omni_fsm.connectors.meeting import Meeting, Phase
from omni_fsm.connectors.outgoing import OutgoingFrames
from omni_fsm.connectors.port import (
    STORED,
    ConnectorClosedError,
    Health,
    Hello,
    PeerBack,
    PeerLost,
    PutOutcome,
    PutStatus,
    Signal,
)
from omni_fsm.connectors.wire import Credit, frame_fault, stop_packet, tag_of, unpacked
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Edge, Identity

DEFAULT_MAX_FRAME_BYTES = 1 << 30

_NOTICES_AT_ONCE = 256


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
        self._meeting = Meeting(link, hello, max_frame_bytes)
        self._outgoing = OutgoingFrames(hello.edge, link)
        self._control = ControlTable(link)
        self._arrival: LinkArrival | None = None  # the last that was given out
        self._signals: list[Signal] = []
        self._back_pending = False  # PeerBack was not handed out yet
        self._fault: RemoteProtocolError | None = None
        self._woken = self._polling = False

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
            up = self._meeting.phase is Phase.UP
            held = int(self._arrival is not None and not self._arrival.done)
            return Health(
                connected=up,
                peer_pid=self._link.peer_pid if up else 0,
                entries={
                    "ledger": self._outgoing.accounts,
                    "blocks": self._outgoing.blocks,
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
                if self._meeting.phase is not Phase.UP:
                    return self._outgoing.no_peer()
                answer = self._outgoing.put(frame, parts, nbytes)
                if isinstance(answer, PutOutcome):
                    return answer
                epoch = self._meeting.epoch
            return self._put_block(frame, parts, nbytes, answer, epoch)
        except OSError as error:  # no memory, no descriptor: nothing was stored
            return PutOutcome(PutStatus.RETRY, f"edge {self.edge}: {error}")

    def _refusal(self, frame: Frame, nbytes: int) -> str:
        limit_bytes = self._meeting.limit_bytes
        if self._meeting.phase is Phase.CLOSED:
            raise ConnectorClosedError(f"edge {self.edge} is closed: {frame.identity} cannot be put")
        if self._meeting.refusal:
            return self._meeting.refusal
        if frame.edge != self.edge or not self._sends:
            end = "sending" if self._sends else "receiving"
            return f"a frame of edge {frame.edge} cannot be put at the {end} end of {self.edge}"
        if nbytes > limit_bytes:
            return f"the payload has {nbytes} bytes, the frame limit of edge {self.edge} is {limit_bytes}"
        if frame.body is not None and frame.body.nbytes != nbytes:
            return f"the payload says that it has {frame.body.nbytes} bytes, its parts have {nbytes}"
        return frame_fault(frame, has_body=frame.body is not None) or ""

    def _put_block(
        self, frame: Frame, parts: tuple[memoryview, ...], nbytes: int, block: Block, epoch: int
    ) -> PutOutcome:
        sent = PutOutcome(PutStatus.RETRY)
        try:
            block.fill(parts)  # without the lock: copying may take milliseconds
            with self._lock:
                if self._meeting.epoch == epoch:
                    sent = self._outgoing.send(frame, block.place, nbytes, block)
                else:  # the peer died, or this end was closed, meanwhile: the next put tells
                    sent = self._outgoing.no_peer()
        finally:
            if sent is not STORED:
                with self._lock:
                    block.release()
        return sent

    # -- the receiving end -----------------------------------------------------------------------------------------

    def get(self) -> LinkArrival | None:
        """The next frame that has come on this edge, whatever its stream; None when nothing has.

        Raises:
            RemoteProtocolError: What the peer sent cannot be accepted; the edge is closed, ``PeerLost`` follows.
        """
        if self._arrival is not None:
            self._arrival.discard()
        with self._lock:
            self._arrival = None
            self._step(read=True)
            if self._meeting.phase is Phase.UP and not self._sends and not self._back_pending:
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
            self._control.acknowledge()  # not while frames are still coming: one acknowledgement serves a burst
            return None
        if packet is Gone.GONE:
            self._lose(PeerLost())
            return None
        try:
            header, frame = checked_frame(self.edge, packet, self._meeting.limit_bytes)
        except BaseException:
            packet.close()
            raise
        return LinkArrival(frame, header, packet, partial(self._body_done, self._meeting.epoch, header.nbytes))

    def _body_done(self, epoch: int, nbytes: int) -> None:
        """An arrival whose body held room of the sender's was loaded or discarded."""
        with self._lock:
            if self._meeting.phase is Phase.UP and self._meeting.epoch == epoch:
                self._control.add_body(nbytes)

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> None:
        """Tell the sender its credit for a stream, as absolute numbers. Without a peer it is dropped: see `stop`."""
        with self._lock:
            if self._meeting.phase is Phase.UP:
                self._control.add_credit(identity, Credit(frames, nbytes, taken_frames, taken_bytes))
                self._control.flush()

    def stop(self, identity: Identity, cause: Cause) -> None:
        """The stream is not wanted any more. Dropped without a peer: its streams end with it, the next knows none."""
        if cause.outcome is Outcome.OK:  # the peer would drop the edge for it
            raise ConfigError("cause", str(cause), "an outcome of error, cancelled or done")
        with self._lock:
            if self._meeting.phase is Phase.UP:
                self._control.add_stop(identity, stop_packet(identity, cause))
                self._control.flush()

    # -- both ends -------------------------------------------------------------------------------------------------

    def reclaim(self, identity: Identity, *, unread: bool) -> None:  # noqa: ARG002 - see its description
        """This life is over at this end: forget its credit. Notices that still wait go out: the sender needs them.

        Args:
            identity: The stream.
            unread: Makes no difference: unread frames are on their way, the receiver drops them as they come.
        """
        with self._lock:
            self._outgoing.forget(identity)

    def signals(self) -> list[Signal]:
        """Signals since the last call, in order."""
        with self._lock:
            if self._sends:
                self._step(read=True)
            self._fault = None  # PeerLost says it too
            found, self._signals = self._signals, []
            self._back_pending = False
            if self._meeting.phase is Phase.LOST:
                self._meeting.phase = Phase.ABSENT
            return found

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a frame or a signal may be there, ``close`` or ``wake`` was called, or the time is over."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._step(read=False)
            if self._meeting.phase is Phase.UP:
                self._control.acknowledge()
            if self._due():
                return True
        while True:
            with self._lock:
                if self._meeting.phase is Phase.CLOSED:
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
            if self._meeting.phase is not Phase.CLOSED:
                self._link.wake()

    def close(self) -> None:
        """Release sockets, arenas and names. Idempotent. The peer gets what was put, then ``PeerLost``."""
        with self._lock:
            if self._meeting.phase is Phase.CLOSED:
                return
            if self._meeting.phase is Phase.UP:
                self._control.acknowledge()
            self._leave(Phase.CLOSED)
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
        if self._woken or self._signals or self._fault is not None or self._meeting.phase is Phase.CLOSED:
            self._woken = False
            return True
        return readable and not self._sends and self._meeting.phase is Phase.UP

    def _polled(self) -> bool:
        """Take in what a poll saw; whether ``wait`` shall return."""
        self._polling = False
        if self._meeting.phase is Phase.CLOSED:
            self._link.release()
            return True
        ready = self._link.settle()
        self._woken = self._woken or ready.woken
        if ready.writable:
            self._link.watch_room(on=False)
            self._tell(self._outgoing.link_writable())
            self._control.flush()
        self._step(read=ready.readable)
        return self._due(readable=ready.readable)

    def _pause_s(self, deadline_s: float | None) -> float | None:
        """How long a poll may last: until the caller's deadline, or the meeting goes on without an event."""
        pause_s = self._meeting.pause_s()
        if deadline_s is None:
            return pause_s
        left_s = max(0.0, deadline_s - time.monotonic())
        return left_s if pause_s is None else min(left_s, pause_s)

    def _step(self, *, read: bool) -> None:
        """Go on with whatever can go on without waiting: meet, greet, and at the sending end read the notices."""
        try:
            answer = self._meeting.go_on()
            self._tell(answer)
            if isinstance(answer, PeerBack):
                self._back_pending = True
                self._control.peer_met(self._meeting.peer_arena_bytes)
                self._tell(self._outgoing.peer_met())
            if self._meeting.phase is Phase.UP and self._sends and read:
                self._read_notices()
        except RemoteProtocolError as error:
            self._break(error)
        except OSError as error:  # no descriptor, no memory: this peer is given up, the next try may do
            self._break(RemoteProtocolError(f"edge {self.edge}: {error}"))

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
                if rest:
                    raise RemoteProtocolError(f"edge {self.edge}: {len(rest)} bytes behind a {tag_of(header)}")
                self._tell(self._outgoing.take_notice(header))
            finally:
                packet.close()

    def _tell(self, signal: Signal | None) -> None:
        if signal is not None:
            self._signals.append(signal)

    def _break(self, error: RemoteProtocolError) -> None:
        self._fault = error
        self._lose(PeerLost(str(error)))

    def _lose(self, lost: PeerLost) -> None:
        self._leave(Phase.LOST)
        self._signals.append(lost)

    def _leave(self, phase: Phase) -> None:
        """Let go of the peer and of all that was under way; whatever held it finds another epoch."""
        self._meeting.leave(phase)
        self._outgoing.clear()
        self._control.clear()
