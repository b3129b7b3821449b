"""Notices of the receiving end on their way to the sender: acknowledgements, stops and credit."""

from typing import Any

from omni_fsm.connectors.link import Link, Sent
from omni_fsm.connectors.wire import Credit, ack_packet, credit_packet
from omni_fsm.protocol.identity import Identity


class ControlTable:
    """Notices that wait for the link, bounded: one acknowledgement, one credit and one stop a stream.

    Its owner holds a lock around each call.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stops: dict[Identity, bytes] = {}
        self._credits: dict[Identity, Credit] = {}
        self._ack_upto = 0  # waits to be sent; 0 when none does
        self._bodies_done = self._bodies_told = 0  # loaded or discarded; acknowledged to the peer
        self._bytes_done = 0  # since the last acknowledgement
        self._peer_arena_bytes = 0

    def __len__(self) -> int:
        return len(self._stops) + len(self._credits) + (self._ack_upto > 0)

    def peer_met(self, arena_bytes: int) -> None:
        """A peer is there that shares an arena of this size."""
        self._peer_arena_bytes = arena_bytes

    def add_credit(self, identity: Identity, credit: Credit) -> None:
        """The larger of each number holds: grants of several threads may come in any order, and none takes back."""
        before = self._credits.get(identity, credit)
        self._credits[identity] = Credit(*map(max, before, credit))

    def add_stop(self, identity: Identity, packet: bytes) -> None:
        """The first cause is kept."""
        self._stops.setdefault(identity, packet)

    def add_body(self, nbytes: int) -> None:
        """A body that held room of the sender's was loaded or discarded."""
        self._bodies_done += 1
        self._bytes_done += nbytes
        if self._bytes_done * 8 >= self._peer_arena_bytes:  # the sender may be waiting for it
            self.acknowledge()

    def acknowledge(self) -> None:
        """One acknowledgement for all bodies that are done; it goes out with whatever else waits."""
        if self._bodies_done != self._bodies_told:
            self._ack_upto = self._bodies_told = self._bodies_done
            self._bytes_done = 0
        self.flush()

    def flush(self) -> None:
        """Send the notices that wait, as far as the link takes them; poll says when it takes more."""
        while len(self):
            try:
                sent = self._link.send(self._head())
            except OSError:  # no memory for it just now
                sent = Sent.FULL
            if sent is not Sent.DONE:
                if sent is Sent.FULL:
                    self._link.watch_room(on=True)
                return
            self._drop_head()

    def clear(self) -> None:
        """The peer is lost, and with it all that it was to be told."""
        self._stops.clear()
        self._credits.clear()
        self._ack_upto = self._bodies_done = self._bodies_told = self._bytes_done = 0

    def _head(self) -> bytes:
        if self._ack_upto:
            return ack_packet(self._ack_upto)
        if self._stops:
            return next(iter(self._stops.values()))
        return credit_packet(*next(iter(self._credits.items())))

    def _drop_head(self) -> None:
        if self._ack_upto:
            self._ack_upto = 0
        else:
            queue: dict[Identity, Any] = self._stops or self._credits
            del queue[next(iter(queue))]
