"""A frame that has come over a link: checked once, then loaded or discarded once."""

from collections.abc import Callable

from omni_fsm.connectors.link import Packet
from omni_fsm.connectors.wire import FramePacket, frame_of, tag_of, unpacked
from omni_fsm.protocol.errors import LocalProtocolError, RemoteProtocolError
from omni_fsm.protocol.frames import Frame
from omni_fsm.protocol.identity import Edge


def checked_frame(edge: Edge, packet: Packet, limit_bytes: int) -> tuple[FramePacket, Frame]:
    """What a packet says of the frame that it carries; after this its body can be loaded.

    Raises:
        RemoteProtocolError: It carries none, or one that cannot be accepted.
    """
    header, inline = unpacked(edge, packet.data)
    if not isinstance(header, FramePacket):
        raise RemoteProtocolError(f"edge {edge}: a {tag_of(header)} came where only frames come")
    frame = frame_of(edge, header)
    if header.nbytes > limit_bytes:
        raise RemoteProtocolError(
            f"edge {edge}: frame of {frame.identity}: {header.nbytes} bytes, the limit is {limit_bytes}"
        )
    announced = header.nbytes if header.place == "inline" else 0
    if len(inline) != announced:
        raise RemoteProtocolError(
            f"edge {edge}: frame of {frame.identity}: {len(inline)} inline bytes, announced were {announced}"
        )
    packet.check(header)
    return header, frame


class LinkArrival:
    """A frame that has come; see `omni_fsm.connectors.port.Arrival`.

    Args:
        frame: The frame, without body.
        header: What its packet said of it, checked.
        packet: Owned from now on.
        acknowledge: Called once, without a lock, when a body that holds room of the peer's was loaded or discarded.
    """

    __slots__ = ("_acknowledge", "_done", "_header", "_packet", "frame")

    def __init__(self, frame: Frame, header: FramePacket, packet: Packet, acknowledge: Callable[[], None]) -> None:
        self.frame, self._header, self._packet, self._acknowledge = frame, header, packet, acknowledge
        self._done = False

    @property
    def nbytes(self) -> int:
        """Size of the body in bytes; 0 where there is none."""
        return self._header.nbytes

    @property
    def done(self) -> bool:
        """Whether it was loaded or discarded."""
        return self._done

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
            if self._header.place in ("arena", "own"):
                self._acknowledge()
