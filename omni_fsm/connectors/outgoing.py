"""Frames of the sending end: what credit and which blocks they hold at the peer, and what busy puts wait for."""

from collections import deque

from omni_fsm.connectors.ledger import CreditLedger
from omni_fsm.connectors.link import Block, Body, Link, Sent
from omni_fsm.connectors.port import BUSY, STORED, CreditReturned, PutOutcome, PutStatus, RoomReturned, Signal, Stopped
from omni_fsm.connectors.wire import (
    AckPacket,
    CreditPacket,
    Header,
    Place,
    StopPacket,
    frame_packet,
    identity_of,
    tag_of,
)
from omni_fsm.protocol.errors import RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Edge, Identity


class OutgoingFrames:
    """Sends frames as far as credit and room allow, and takes in the notices that give both back.

    Its owner holds a lock around each call. A put that is busy is remembered until something returns ``RoomReturned``
    or ``CreditReturned`` for it.
    """

    def __init__(self, edge: Edge, link: Link) -> None:
        self._edge, self._link = edge, link
        self._ledger = CreditLedger()
        self._blocks: deque[Block] = deque()  # sent and not acknowledged, oldest first
        self._acked = 0
        # What busy puts wait for, besides credit:
        self._wants_peer = False
        self._wants_link = False  # it is full, until poll says writable
        self._wanted_bytes: int | None = None  # the smallest block

    @property
    def accounts(self) -> int:
        """How many streams have an account of credit."""
        return len(self._ledger)

    @property
    def blocks(self) -> int:
        """How many blocks are sent and not acknowledged."""
        return len(self._blocks)

    def put(self, frame: Frame, parts: tuple[memoryview, ...], nbytes: int) -> PutOutcome | Block:
        """Send a frame to the peer that is there.

        Args:
            frame: It was found to be one that may cross the edge.
            parts: Its body.
            nbytes: What these have together.

        Returns:
            ``STORED``, ``BUSY`` or ``REFUSED``; or a block, when the body needs one: it is to be filled, given to `send`, and
            released if that does not store it.

        Raises:
            OSError: No memory, no descriptor: nothing was sent.
        """
        if self._ledger.is_unheard_of(frame):
            return PutOutcome(PutStatus.REFUSED, "the peer never heard of this life")
        if not self._ledger.allows(frame, nbytes) or self._wants_link:
            return BUSY
        if frame.body is None:
            return self.send(frame, "none", nbytes, parts)
        if nbytes <= self._link.inline_bytes:
            return self.send(frame, "inline", nbytes, parts)
        block = self._link.reserve(nbytes)
        if block is None:
            wanted = self._wanted_bytes
            self._wanted_bytes = nbytes if wanted is None else min(nbytes, wanted)
            return BUSY
        return block

    def send(self, frame: Frame, place: Place, nbytes: int, body: Body) -> PutOutcome:
        """Send a frame whose body is ready, ``STORED`` or ``BUSY``."""
        block = None if isinstance(body, tuple) else body
        packet = frame_packet(frame, place, nbytes, 0 if block is None else block.offset)
        sent = self._link.send(packet, body)
        if sent is Sent.DONE:
            self._ledger.count(frame, nbytes)
            if block is not None:
                self._blocks.append(block)
            return STORED
        if sent is Sent.FULL:
            self._wants_link = True
            self._link.watch_room(on=True)
            return BUSY
        return self.no_peer()  # the I/O thread finds out why, after it has read what is left

    def no_peer(self) -> PutOutcome:
        """``BUSY``, until a peer is met."""
        self._wants_peer = True
        return BUSY

    def take_notice(self, header: Header) -> Signal | None:
        """A notice of the receiving end has come; what the runtime is to be told.

        Raises:
            RemoteProtocolError: It is none, or cannot be true.
        """
        match header:
            case CreditPacket():
                identity = identity_of(self._edge, header.id, header.generation)
                returned = self._ledger.grant(
                    identity,
                    frames=header.frames,
                    nbytes=header.nbytes,
                    taken_frames=header.taken_frames,
                    taken_bytes=header.taken_bytes,
                )
                return CreditReturned(identity) if returned else None
            case StopPacket():
                identity = identity_of(self._edge, header.id, header.generation)
                if header.outcome is Outcome.OK:
                    raise RemoteProtocolError(f"edge {self._edge}: a stop of {identity} with outcome ok")
                return Stopped(identity, Cause(header.outcome, header.reason, header.at_ns))
            case AckPacket():
                return self._acknowledged(header.upto)
            case _:
                raise RemoteProtocolError(f"edge {self._edge}: a {tag_of(header)} came where only notices come")

    def _acknowledged(self, upto: int) -> RoomReturned | None:
        count = upto - self._acked
        if not 0 <= count <= len(self._blocks):
            raise RemoteProtocolError(
                f"edge {self._edge}: body {upto} acknowledged, the next is {self._acked + 1} of {len(self._blocks)}"
            )
        for _ in range(count):
            self._blocks.popleft().release()
        self._acked = upto
        if self._wanted_bytes is None or not self._link.fits(self._wanted_bytes):
            return None
        self._wanted_bytes = None
        return RoomReturned()

    def link_writable(self) -> RoomReturned | None:
        """The link takes packets again."""
        wanted, self._wants_link = self._wants_link, False
        return RoomReturned() if wanted else None

    def peer_met(self) -> RoomReturned | None:
        """A peer is there."""
        wanted, self._wants_peer = self._wants_peer, False
        return RoomReturned() if wanted else None

    def forget(self, identity: Identity) -> None:
        """The life is over: its credit is too. Idempotent."""
        self._ledger.drop(identity)

    def clear(self) -> None:
        """The peer is lost, and with it every stream and block; busy puts wait for the next one."""
        self._ledger.clear()
        self._blocks.clear()
        self._acked = 0
        self._wants_peer = self._wants_peer or self._wants_link or self._wanted_bytes is not None
        self._wants_link, self._wanted_bytes = False, None
