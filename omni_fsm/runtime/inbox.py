"""The receiving side of a stage: one step function that gets one frame and feeds it to its half."""

from collections.abc import Callable
from typing import Any

from omni_fsm.connectors.ledger import UNCLAIMED_BYTES, UNCLAIMED_FRAMES
from omni_fsm.connectors.port import (
    Arrival,
    CreditReturned,
    EdgeRefused,
    PeerBack,
    PeerLost,
    RoomReturned,
    Signal,
    Stopped,
)
from omni_fsm.payload import decode
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import ReceiverEvent
from omni_fsm.protocol.receiver import DEFAULT_GET_RETRIES, ReceiverHalf
from omni_fsm.runtime.core import StageCore, Turn
from omni_fsm.runtime.feedback import Admission
from omni_fsm.runtime.ports import Later, Offer, Refuse, Register
from omni_fsm.runtime.requests import HeldFrame, Request, Unclaimed

EDGE = "source"
HELD_FRAMES = UNCLAIMED_FRAMES + 6
"""How many frames of an unregistered identity are held: its small first credit, its opening, and ends that were retried."""


class Inbox:
    """Gets frames, finds their half by identity, and hears of the sending end's death."""

    def __init__(self, core: StageCore, register: Callable[[str, Identity], Admission]) -> None:
        self.core = core
        self.register = register

    def get_once(self) -> bool:
        """Get one frame and feed it; the body is copied and decoded outside the lock. Returns whether there was one.

        Called by: the I/O thread of the input edge.
        """
        source = self.core.source
        if source is None:
            return False
        try:
            arrival = source.get()
        except RemoteProtocolError as error:  # the connector has closed the edge: PeerLost follows
            self._report_edge(error)
            return True
        if arrival is None:
            return False
        frame = arrival.frame
        with self.core.turn() as turn:
            request = self.core.tables.receiver_of(frame.identity)
            half = request.receiver if request is not None else None
            wanted = self._wanted(turn, request, half, arrival)
            if wanted and request is not None and half is not None and arrival.nbytes:
                self.core.receiver_moved(turn, request, half.on_get_begun())
        if wanted:
            self._deliver(frame, *self._fetch(arrival, request, half))
        arrival.discard()
        return True

    def _wanted(self, turn: Turn, request: Request | None, half: ReceiverHalf | None, arrival: Arrival) -> bool:
        """Whether the frame's body is worth fetching; a frame that no half wants any more is dealt with here."""
        frame = arrival.frame
        if request is not None and half is not None:
            if half.wants_body:
                return self._in_credit(turn, request, half, arrival)
            self.core.receiver_moved(turn, request, half.on_frame(frame, at_ns=self.core.clock.now_ns()))
            left = half.cause
        else:
            left = self._left(frame.identity)
            if left is None:
                return self._may_hold(turn, arrival)
        if frame.kind is FrameKind.OPEN and left is not None and self.core.source is not None:
            # It opens after its receiver left: the stop and the waiver that were sent then found no sender.
            turn.later(self.core.source.stop, frame.identity, stop_of(left))
            self.core.waive_credit(turn, frame.identity, half)
        return False

    def _left(self, identity: Identity) -> Cause | None:
        """How a registration of this identity ended here; None when there was none, or none is remembered."""
        tables = self.core.tables
        cause = tables.tombstones.get(identity) or tables.turned_away.get(identity)
        if cause is not None:
            return cause
        request = self.core.tables.by_identity.get(identity)  # its sender may outlive the tombstone
        return request.receiver.cause if request is not None and request.receiver is not None else None

    def _in_credit(self, turn: Turn, request: Request, half: ReceiverHalf, arrival: Arrival) -> bool:
        """Whether the sender had credit for this frame; one that had not fails its stream before it costs memory."""
        frame, config = arrival.frame, self.core.config
        if not frame.uses_credit or frame.seq < half.next_seq or not half.staged:
            return True  # one that comes again has had its credit; the first may have any size
        frames = max(config.window_frames, UNCLAIMED_FRAMES)
        nbytes = max(config.window_bytes, UNCLAIMED_BYTES)
        staged_bytes = sum(staged.nbytes for staged in half.staged)
        if len(half.staged) < frames and staged_bytes + arrival.nbytes <= nbytes:
            return True
        cause = self._cause(f"frame_invalid: seq {frame.seq} came beyond the credit of {frames} frames, {nbytes} bytes")
        self.core.receiver_moved(turn, request, half.on_frame_invalid(cause))
        return False

    def _fetch(
        self, arrival: Arrival, request: Request | None, half: ReceiverHalf | None
    ) -> tuple[Any, int, Cause | None]:
        """Body of an arrival: its payload, its size, and why it cannot be accepted if it cannot."""
        retries = 0
        while True:
            try:
                body = arrival.load()
                break
            except RemoteProtocolError as error:
                return None, arrival.nbytes, self._cause(f"frame_invalid: {error}")
            except Exception as error:  # noqa: BLE001 - becomes an event: the get is retried, then given up
                cause = self._cause(f"get_given_up: {type(error).__name__}: {error}")
                if not self._may_get_again(request, half, cause, retries):
                    return None, arrival.nbytes, cause
                self.core.clock.pause(self.core.config.retry_wait_ms / 1e3 * 2**retries)
                retries += 1
        try:
            return (None if body is None else decode(body)), arrival.nbytes, None
        except Exception as error:  # noqa: BLE001 - whatever a body does to the decoder is the stream's failure
            return None, arrival.nbytes, self._cause(f"frame_invalid: {type(error).__name__}: {error}")

    def _may_get_again(self, request: Request | None, half: ReceiverHalf | None, cause: Cause, retries: int) -> bool:
        """Whether the budget of this body's gets allows another: the half counts, or nobody's does by itself."""
        if request is None or half is None or not half.getting:
            return retries < DEFAULT_GET_RETRIES
        with self.core.turn() as turn:
            moved = self.core.receiver_moved(turn, request, half.on_get_failed(cause))
        return moved.event is ReceiverEvent.GET_RETRIED and not moved.ignored

    def _deliver(self, frame: Frame, payload: Any, nbytes: int, invalid: Cause | None) -> None:
        """Feed a fetched frame to its half, or hold it for a registration to come."""
        held = HeldFrame(frame, payload, nbytes, invalid)
        with self.core.turn() as turn:
            request = self.core.tables.receiver_of(frame.identity)
            if request is not None:
                self.feed(turn, request, held)
            elif self._left(frame.identity) is None:
                self._hold(turn, held)

    def feed(self, turn: Turn, request: Request, held: HeldFrame) -> None:
        """Feed one frame to the receiver of a request."""
        half = request.receiver
        if half is None:
            return
        if held.invalid is not None:
            self.core.receiver_moved(turn, request, half.on_frame_invalid(held.invalid))
        else:
            self.core.receiver_moved(
                turn, request, half.on_frame(held.frame, held.payload, held.nbytes, self.core.clock.now_ns())
            )

    # Requests that nobody has registered

    def _hold(self, turn: Turn, held: HeldFrame) -> None:
        core = self.core
        identity = held.frame.identity
        waiting = core.tables.unclaimed.get(identity)
        if waiting is None:
            waiting = core.tables.unclaimed[identity] = Unclaimed()
            core.set_timer(turn, ("unclaimed", identity), core.config.unclaimed_s)
            turn.later(self._offer, identity)
        waiting.frames.append(held)

    def _may_hold(self, turn: Turn, arrival: Arrival) -> bool:
        """Whether a frame that nobody has registered for may be kept: within a small credit, for a bounded number of ids."""
        tables = self.core.tables
        identity = arrival.frame.identity
        waiting = tables.unclaimed.get(identity)
        frames = waiting.frames if waiting is not None else []
        if any(held.frame.key == arrival.frame.key for held in frames):
            return False  # it came before: its put had reported failure
        fits = len(frames) < HELD_FRAMES and sum(held.nbytes for held in frames) + arrival.nbytes <= UNCLAIMED_BYTES
        if not fits or (waiting is None and len(tables.unclaimed) >= self.core.config.unclaimed_max):
            self._turn_away(turn, identity, self._cause("unclaimed"))
            return False
        return True

    def drop_unclaimed(self, turn: Turn, identity: Identity, cause: Cause) -> None:
        """Nobody has registered it: turn it away."""
        if identity in self.core.tables.unclaimed:
            self._turn_away(turn, identity, cause)

    def _turn_away(self, turn: Turn, identity: Identity, cause: Cause) -> None:
        """Forget the frames of an unregistered identity, remember its name, stop its sender."""
        core = self.core
        core.tables.unclaimed.pop(identity, None)
        core.timers.cancel(("unclaimed", identity))
        if core.source is not None:
            turn.later(core.source.stop, identity, cause)  # before the waiver: with credit its sender would end well
        core.turn_away(turn, identity, cause)

    def _offer(self, identity: Identity) -> None:
        """Ask the host, outside the lock, what to do with a request it has not registered."""
        try:
            answer: Offer = self.core.host.stream_offered(identity)
        except Exception as error:  # noqa: BLE001 - a host that cannot answer refuses, with its own words
            answer = Refuse(f"{type(error).__name__}: {error}")
        match answer:
            case Register(internal_id):
                self._register_offered(internal_id, identity)
            case Refuse(reason):
                with self.core.turn() as turn:
                    self.drop_unclaimed(turn, identity, self._cause(reason))
            case Later():
                with self.core.turn() as turn:
                    if self.core.closing is not None:  # nobody registers it any more
                        self.drop_unclaimed(turn, identity, self.core.closing)
            case other:  # a host without types
                with self.core.turn() as turn:
                    self.drop_unclaimed(turn, identity, self._cause(f"stream_offered gave {other!r}"))

    def _register_offered(self, internal_id: str, identity: Identity) -> None:
        try:
            admission = self.register(internal_id, identity)
        except ConfigError as error:  # the host's own id is in use: its words go to the sender
            admission = Admission(accepted=False, reason=str(error))
        with self.core.turn() as turn:
            if admission.accepted:
                return
            self.drop_unclaimed(turn, identity, self.core.closing or self._cause(admission.reason))

    # The peer

    def on_signal(self, signal: Signal) -> None:
        """Feed one signal of the input edge. Called by: its I/O thread."""
        core = self.core
        with core.turn() as turn:
            match signal:
                case PeerBack():
                    core.peer_back(EDGE)
                case PeerLost(reason):
                    self._peer_lost(turn, reason)
                case EdgeRefused(error):
                    core.reports.edge_failure(core.source, self._cause(str(error)))
                    self._peer_lost(turn, str(error))
                case Stopped() | CreditReturned() | RoomReturned():
                    raise AssertionError(signal)

    def _peer_lost(self, turn: Turn, reason: str) -> None:
        """Streams that the lost process had opened fail now; the others if it is not back in time."""
        core = self.core
        cause = self._cause(reason)
        core.lost[EDGE] = cause
        for waiting in core.tables.unclaimed.values():
            waiting.orphaned = True
        for request in core.tables.snapshot():
            if request.receiver is None or request.receiver.is_final:
                continue
            if request.receiver.opened:
                core.receiver_moved(turn, request, request.receiver.on_peer_lost(cause))
            else:
                core.await_peer(turn, EDGE, request)

    def still_lost(self, turn: Turn, request: Request) -> None:
        """The peer did not come back in time: what waits on this edge fails."""
        cause = self.core.lost.get(EDGE)
        if cause is not None and request.receiver is not None:
            self.core.receiver_moved(turn, request, request.receiver.on_peer_lost(cause))

    def _cause(self, reason: str) -> Cause:
        return Cause(Outcome.ERROR, reason, self.core.clock.now_ns())

    def _report_edge(self, error: RemoteProtocolError) -> None:
        source = self.core.source
        with self.core.turn():
            self.core.reports.edge_failure(source, self._cause(str(error)))


def stop_of(cause: Cause) -> Cause:
    """The cause that a stop carries for a registration that ended with ``cause``."""
    return Cause(Outcome.DONE, "done", cause.at_ns) if cause.outcome is Outcome.OK else cause
