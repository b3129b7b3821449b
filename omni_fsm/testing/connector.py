"""What every connector must do: the rules of `omni_fsm.connectors.port`, each a test that names what is broken."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest

from omni_fsm.connectors.port import (
    Connector,
    ConnectorClosedError,
    CreditReturned,
    PeerBack,
    PeerLost,
    PutStatus,
    RoomReturned,
    Stopped,
)
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.testing.edge import (
    IDS,
    MAX_IDLE_CPU,
    MAX_IDLE_WAITS,
    R1,
    WIDE_BYTES,
    WIDE_FRAMES,
    BytesBody,
    EdgeDriver,
    Ends,
    _check_equal,
    broken,
    idle,
    named,
    pattern,
)
from omni_fsm.testing.peers import PeerRules

_MIB = 1 << 20


class ConnectorConformance(PeerRules):
    """Base class of a pytest class: give it ends, and each rule of the port is a test.

    Attributes:
        patience_s: How long something may take that must happen.
        settle_s: How long a frame or notice is under way at most, when nothing else is.
        large_bytes: Size of the large bodies; above the connector's own buffers, if it has any, and below its frame limit.
        room_bytes: How much is put unread to run out of room; a connector that takes all of it is not asked for more.
        frame_limit_bytes: The largest body of one frame; None where there is no limit.
        loss_s: How long after the death of its process a peer may be taken for alive.
    """

    patience_s: float = 10.0
    settle_s: float = 0.015
    large_bytes: int = 6 << 20
    room_bytes: int = 128 << 20
    frame_limit_bytes: int | None = 1 << 30
    loss_s: float = 1.0

    def make_edge(self) -> Ends | AbstractContextManager[Ends]:
        """A new edge: its sending and its receiving end, in this order; or a context manager that gives them.

        Called by: each test, once or more. The kit closes both ends.
        """
        raise NotImplementedError

    @contextmanager
    def _edge(self) -> Iterator[EdgeDriver]:
        """An edge whose ends have met."""
        made = self.make_edge()
        context = made if isinstance(made, AbstractContextManager) else nullcontext(made)
        with context as ends:
            driver = EdgeDriver(ends, self.patience_s, self.settle_s)
            try:
                driver.until(
                    "meeting",
                    "both ends did not say PeerBack",
                    lambda: PeerBack() in driver.told and PeerBack() in driver.heard,
                )
                yield driver
            finally:
                for end in ends:
                    end.close()

    # -- frames ----------------------------------------------------------------------------------------------------

    def test_ends_know_their_roles(self) -> None:
        """Rule meeting: both ends say PeerBack once, name the same edge, and which end sends."""
        with self._edge() as edge:
            edge.settle()
            if edge.sender.edge != edge.receiver.edge or edge.sender.hello().edge != edge.sender.edge:
                broken("meeting", f"the ends name {edge.sender.edge} and {edge.receiver.edge}")
            if not edge.sender.sends or edge.receiver.sends:
                broken("meeting", "make_edge gives the sending end first; `sends` says otherwise")
            for name, end, signals in (
                ("sending", edge.sender, edge.told),
                ("receiving", edge.receiver, edge.heard),
            ):
                if not end.health().connected or signals.count(PeerBack()) != 1:
                    broken("meeting", f"the {name} end said {signals}, connected is {end.health().connected}")

    def test_frames_come_in_order_each_once(self) -> None:
        """Rule exactly-once: every frame that was stored comes once. Rule in-order: and a stream's in order."""
        with self._edge() as edge:
            edge.claim()
            frames = [edge.data(seq, pattern(seq, 1_000 * seq)) for seq in range(12)]
            edge.store("exactly-once", *frames, edge.end(12))
            edge.expect(*frames, edge.end(12))

    def test_a_header_comes_whole(self) -> None:
        """Rule header: segment, seq, segment end, outcome, reason and time stamp come as they were put."""
        with self._edge() as edge:
            edge.claim()
            frames = [
                replace(edge.data(0), segment=3),
                replace(edge.data(1, None), segment=3, segment_end=True),
                replace(edge.data(2), segment=4),
                replace(edge.end(-1), cause=Cause(Outcome.ERROR, "out of mémory", 17)),
            ]
            edge.store("header", *frames)
            edge.expect(*frames)

    def test_bodies_of_any_size_come_whole(self) -> None:
        """Rule body: none, empty, small and large bodies, in one part or many, come with the very bytes."""
        with self._edge() as edge:
            edge.claim()
            sizes = [0, 1, 4_096, 32_768, 32_769, 100_000, self.large_bytes]
            parts = BytesBody(tuple(memoryview(pattern(n, 700)) for n in range(200)))
            frames = [edge.data(0, None), replace(edge.data(1), body=parts)]
            frames += [edge.data(2 + at, pattern(at, size)) for at, size in enumerate(sizes)]
            edge.store("body", *frames)
            edge.expect(*frames)

    def test_a_body_is_a_private_copy(self) -> None:
        """Rule private: a body is borrowed until put returns and not written to; what was loaded never changes."""
        for nbytes in (10, 40_000, self.large_bytes):
            with self._edge() as edge:
                edge.claim()
                source = bytearray(pattern(0, nbytes))
                edge.store("private", edge.data(0, source))
                if source != pattern(0, nbytes):
                    broken("private", f"put wrote to a body of {nbytes} bytes")
                source[:] = bytes(nbytes)
                arrival = edge.next_arrival()
                if arrival.nbytes != nbytes:
                    broken("body", f"an arrival with {nbytes} bytes says that it has {arrival.nbytes}")
                body = arrival.load()
                if body is None or body != pattern(0, nbytes):
                    broken("private", f"a body of {nbytes} bytes changed with the memory that it was put from")
                edge.store("private", edge.data(1, pattern(9, nbytes)))
                edge.until("exactly-once", "frame data 1 never came", partial(edge.came, 1))
                if body != pattern(0, nbytes):
                    broken("private", f"a loaded body of {nbytes} bytes changed when the next frame came")

    def test_discarded_frames_leave_the_rest_unharmed(self) -> None:
        """Rule discard: a frame that nobody wants is discarded unread; later ones come whole."""
        with self._edge() as edge:
            edge.claim()
            edge.store("discard", edge.data(0, pattern(0, 100_000)))
            arrival = edge.next_arrival()
            arrival.discard()
            arrival.discard()
            edge.store("discard", edge.data(1, pattern(1, 100_000)))
            edge.expect(edge.data(1, pattern(1, 100_000)))

    def test_any_id_crosses_unchanged(self) -> None:
        """Rule ids: an id is any text, a generation any unsigned 64-bit number; both come back with a stop, too."""
        cause = Cause(Outcome.ERROR, "r" * 2_048)
        with self._edge() as edge:
            for identity in IDS:
                edge.store("ids", edge.open(identity), edge.data(0, identity.external_id.encode(), identity))
            edge.until("ids", "not every id came", lambda: len(edge.got) >= 2 * len(IDS))
            for identity in IDS:
                if [body for _, body in edge.of(identity)] != [None, identity.external_id.encode()]:
                    broken("ids", f"the frames of {identity} came under another id")
                edge.receiver.stop(identity, cause)
            for identity in IDS:
                edge.until("ids", f"no stop of {identity} came", partial(edge.was_told, Stopped(identity, cause)))

    def test_generations_of_an_id_are_streams_of_their_own(self) -> None:
        """Rule generations: two lives of one id share neither frames nor credit."""
        old, new = R1, Identity(R1.external_id, 2)
        with self._edge() as edge:
            edge.claim(old, frames=1)
            edge.store("generations", edge.data(0, b"old", old))
            edge.busy("generations", edge.data(1, b"old", old), "generation 1 has used its credit")
            edge.claim(new, frames=1)
            edge.store("generations", edge.data(0, b"new", new))
            edge.sender.reclaim(old, unread=True)
            edge.busy("generations", edge.data(1, b"new", new), "generation 2 has used its credit")
            edge.expect(edge.data(0, b"new", new), identity=new)

    # -- credit ----------------------------------------------------------------------------------------------------

    def test_credit_bounds_the_frames_outstanding(self) -> None:
        """Rule credit: beyond its frames a put is busy and stores nothing; CreditReturned comes after a grant."""
        with self._edge() as edge:
            edge.claim(frames=2)
            frames = [edge.data(seq) for seq in range(3)]
            edge.store("credit", *frames[:2])
            edge.busy("credit", frames[2], "2 frames were outstanding and 2 were granted")
            edge.settle()
            if edge.came(2):
                broken("credit", "frame data 2 came, though its put was busy")
            edge.expect(*frames[:2])
            edge.grant(2, WIDE_BYTES)
            edge.until("credit", "no CreditReturned came after a grant", lambda: CreditReturned(R1) in edge.told)
            edge.store("credit", frames[2])
            edge.expect(*frames)

    def test_credit_bounds_the_bytes_but_one_frame_of_any_size(self) -> None:
        """Rule one-frame: a frame of any size passes when nothing of its stream is outstanding; else bytes bound it."""
        with self._edge() as edge:
            edge.claim(frames=8, nbytes=100)
            edge.store("credit", edge.data(0, bytes(60)))
            edge.busy("credit", edge.data(1, bytes(60)), "60 bytes were outstanding and 100 were granted")
            edge.expect(edge.data(0, bytes(60)))
            edge.grant(8, 100)
            edge.settle()
            large = edge.data(1, pattern(1, self.large_bytes))
            edge.store("one-frame", large)
            edge.busy("credit", edge.data(2), f"{self.large_bytes} bytes were outstanding and 100 were granted")
            edge.expect(edge.data(0, bytes(60)), large)

    def test_grants_are_absolute(self) -> None:
        """Rule absolute: a grant that comes twice gives no more than it did once."""
        with self._edge() as edge:
            edge.claim(frames=1)
            for _ in range(3):
                edge.grant(1, WIDE_BYTES)
            edge.settle()
            edge.store("absolute", edge.data(0))
            edge.busy("absolute", edge.data(1), "1 frame was granted, in four equal grants")

    def test_open_and_failed_ends_need_no_credit(self) -> None:
        """Rule free: open and failed ends pass without credit."""
        with self._edge() as edge:
            edge.claim(frames=0)
            edge.busy("credit", edge.data(0), "no frame was granted")
            failed = replace(edge.end(-1), cause=Cause(Outcome.CANCELLED, "client went away", 17))
            for frame in (edge.open(Identity("r2", 1)), failed):
                if edge.put(frame) is PutStatus.BUSY:
                    broken("free", f"{named(frame)} was busy: it needs no credit")
                edge.store("free", frame)
            edge.until(
                "free", "the failed end never came", lambda: any(frame.key == failed.key for frame, _ in edge.got)
            )

    def test_no_stream_blocks_another(self) -> None:
        """Rule no-blocking: a stream without credit is busy alone."""
        other = Identity("other", 1)
        with self._edge() as edge:
            edge.claim(frames=1)
            edge.claim(other)
            edge.store("no-blocking", edge.data(0))
            edge.busy("credit", edge.data(1), "1 frame was outstanding and 1 was granted")
            frames = [edge.data(seq, pattern(seq, 1_000), other) for seq in range(5)]
            for frame in frames:
                edge.store("no-blocking", frame)
                edge.busy("credit", edge.data(1), "no credit of this stream was returned")
                edge.turn()
            edge.expect(*frames, identity=other)

    def test_a_frame_that_is_put_again_does_no_harm(self) -> None:
        """Rule repeated: a stored frame that is put again may come twice, takes no second credit, changes no other."""
        with self._edge() as edge:
            edge.claim(frames=2)
            frames = [edge.data(seq, pattern(seq, 50_000)) for seq in range(2)]
            for frame in frames:
                edge.store("repeated", frame, frame)
            edge.until("repeated", "frame data 1 never came", partial(edge.came, 1))
            edge.settle()
            firsts: dict[int, tuple[Frame, bytes | None]] = {}
            for frame, body in edge.of(R1)[1:]:
                _check_equal(frames[frame.seq], frame, body)
                firsts.setdefault(frame.seq, (frame, body))
            if list(firsts) != [0, 1]:
                broken("repeated", f"frames {list(firsts)} came where 0 and 1 were put twice each")

    def test_room_that_returns_is_told(self) -> None:
        """Rule room: a put that is busy for want of room stores nothing; once there is room, RoomReturned says so."""
        with self._edge() as edge:
            edge.claim()
            frames = []
            for seq in range(self.room_bytes // _MIB):
                frames.append(edge.data(seq, pattern(seq, _MIB)))
                if (status := edge.put_unread(frames[-1])) is not PutStatus.STORED:
                    break
            else:
                pytest.skip(f"{self.room_bytes} bytes are not more than there is room for")
            if status is not PutStatus.BUSY:
                broken("room", f"{named(frames[-1])} was {status}, not busy, where there was no room for it")
            told = len(edge.told)

            def returned() -> bool:
                return RoomReturned() in edge.told[told:] or CreditReturned(R1) in edge.told[told:]

            edge.until("room", "no RoomReturned came once all was read", returned)
            edge.store("room", frames[-1])
            edge.expect(*frames)

    def test_a_body_over_the_limit_is_refused(self) -> None:
        """Rule refused: it is refused with a reason, costs neither credit nor room, and harms no other frame."""
        if self.frame_limit_bytes is None:
            pytest.skip("frame_limit_bytes says that there is no limit")
        block = memoryview(bytes(_MIB))  # the same one again and again: a body of any size costs no memory here
        parts = (block,) * (self.frame_limit_bytes // _MIB) + (block[: self.frame_limit_bytes % _MIB + 1],)
        with self._edge() as edge:
            edge.claim(frames=1)
            small = edge.data(0, b"small")
            outcome = edge.sender.put(replace(small, body=BytesBody(parts)))
            if outcome.status is not PutStatus.REFUSED:
                broken("refused", f"a body of {self.frame_limit_bytes + 1} bytes was {outcome.status}, not refused")
            if not outcome.reason:
                broken("refused", f"a body of {self.frame_limit_bytes + 1} bytes was refused without a reason")
            if edge.put(small) is not PutStatus.STORED:
                broken("refused", "the next frame of the stream was not stored, though a refused one uses no credit")
            edge.expect(small)

    # -- notices and ends ------------------------------------------------------------------------------------------

    def test_a_stop_comes_with_its_cause(self) -> None:
        """Rule stop: it reaches the sender with outcome, reason and time stamp, whatever credit there is."""
        cause = Cause(Outcome.CANCELLED, "client went away: ünï", 99)
        with self._edge() as edge:
            edge.claim(frames=0)
            edge.receiver.stop(R1, cause)
            edge.receiver.reclaim(R1, unread=True)

            def stops() -> list[Stopped]:
                return [signal for signal in edge.told if isinstance(signal, Stopped)]

            edge.until("stop", "no Stopped came", stops)
            found = stops()[0]
            if found != Stopped(R1, cause) or found.cause.at_ns != cause.at_ns:
                broken("stop", f"{R1} was stopped with {cause} and the sender was told {found}")

    def test_a_closed_sender_s_frames_come_before_its_loss(self) -> None:
        """Rule close: the peer gets what was put, then PeerLost, once."""
        with self._edge() as edge:
            edge.claim()
            frames = [edge.data(seq, pattern(seq, 40_000 * seq)) for seq in range(5)]
            got = len(edge.got)
            for frame in frames:
                edge.store("close", frame)
            edge.close_sender()
            deadline_s = time.monotonic() + self.patience_s
            while not any(isinstance(signal, PeerLost) for signal in edge.heard):
                if time.monotonic() > deadline_s:
                    broken("close", f"no PeerLost came within {self.patience_s} s")
                edge.receiver.wait(0.005)
                edge.heard += edge.receiver.signals()
                edge.get_once()
            if len(edge.got) < got + len(frames):
                broken("close", f"PeerLost came before {named(frames[len(edge.got) - got])}")
            edge.expect(*frames)
            if sum(isinstance(signal, PeerLost) for signal in edge.heard) > 1:
                broken("close", "PeerLost came twice")

    def test_a_closed_receiver_is_lost_to_the_sender(self) -> None:
        """Rule peer-lost: the sender learns that the receiver is gone, after its last stop; puts are not stored."""
        cause = Cause(Outcome.ERROR, "deadline")
        with self._edge() as edge:
            edge.claim()
            edge.receiver.stop(R1, cause)
            edge.close_receiver()
            edge.until("peer-lost", "no PeerLost came", lambda: any(isinstance(one, PeerLost) for one in edge.told))
            if Stopped(R1, cause) not in edge.told:
                broken("peer-lost", "the stop before the close never came")
            if edge.put(edge.data(0)) is PutStatus.STORED:
                broken("peer-lost", "frame data 0 was stored without a peer")

    def test_a_put_after_close_raises(self) -> None:
        """Rule closed: put raises ConnectorClosedError after close; close, reclaim and notices do nothing."""
        with self._edge() as edge:
            edge.claim()
            for end in (edge.sender, edge.receiver):
                for _ in range(2):
                    end.close()
                    end.reclaim(R1, unread=True)
                end.wake()
            edge.receiver.stop(R1, Cause(Outcome.DONE))
            edge.grant(1, 1)
            try:
                outcome = edge.sender.put(edge.data(0))
            except ConnectorClosedError:
                return
            broken("closed", f"a put after close gave {outcome.status}, not ConnectorClosedError")

    def test_a_reclaimed_life_leaves_nothing(self) -> None:
        """Rule reclaim: every entry of health is zero once its streams are reclaimed; reclaim is idempotent."""
        with self._edge() as edge:
            edge.claim()
            frames = [edge.data(seq, pattern(seq, 100_000)) for seq in range(3)]
            edge.store("reclaim", *frames)
            edge.expect(*frames)
            edge.grant(WIDE_FRAMES, WIDE_BYTES)
            edge.settle()
            for end in (edge.sender, edge.receiver):
                for unread in (False, True, True):
                    end.reclaim(R1, unread=unread)

            def held() -> dict[str, int]:
                both = (edge.sender.health().entries, edge.receiver.health().entries)
                return {name: count for entries in both for name, count in entries.items() if count}

            edge.until("reclaim", lambda: f"entries {held()} did not go", lambda: not held())

    # -- threads ---------------------------------------------------------------------------------------------------

    def test_an_idle_wait_uses_no_cpu(self) -> None:
        """Rule idle: wait blocks without computing, for as long as it was told."""
        idle_s = 0.15
        with self._edge() as edge:
            edge.settle()
            for name, end in (("sending", edge.sender), ("receiving", edge.receiver)):
                waits: list[tuple[float, int]] = []
                thread = threading.Thread(target=idle, args=(end, idle_s, waits), daemon=True)
                thread.start()
                thread.join(self.patience_s)
                if not waits:
                    broken("idle", f"wait({idle_s}) of the {name} end did not return in {self.patience_s} s")
                used_s, count = waits[0]
                if used_s > MAX_IDLE_CPU * idle_s or count > MAX_IDLE_WAITS:
                    told = f"computed for {used_s:.3f} s, in {count} waits"
                    broken("idle", f"an idle wait of {idle_s} s at the {name} end {told}")

    def test_a_wait_is_ended_by_what_comes(self) -> None:
        """Rule wakes: a wait under way ends with a frame, a notice, wake and close."""
        with self._edge() as edge:
            edge.settle()
            sender, receiver = edge.sender, edge.receiver
            self._wakes(receiver, "a frame", lambda: edge.put(edge.open()))
            edge.settle()
            self._wakes(sender, "a stop", lambda: receiver.stop(R1, Cause(Outcome.DONE)))
            edge.settle()
            for name, end in (("sending", sender), ("receiving", receiver)):
                self._wakes(end, f"wake() at the {name} end", end.wake)
                edge.settle()
            for name, end in (("sending", sender), ("receiving", receiver)):
                self._wakes(end, f"close() at the {name} end", end.close)

    def test_a_wake_before_the_wait_counts(self) -> None:
        """Rule wakes: the next wait returns where none is under way."""
        with self._edge() as edge:
            edge.settle()
            for name, end in (("sending", edge.sender), ("receiving", edge.receiver)):
                end.wake()
                self._wakes(end, f"a wake() of the {name} end before it", lambda: None)

    def _wakes(self, end: Connector, what: str, act: Callable[[], object]) -> None:
        thread = threading.Thread(target=end.wait, args=(None,), daemon=True)
        thread.start()
        thread.join(0.01)
        act()
        thread.join(self.patience_s)
        if thread.is_alive():
            broken("wakes", f"a wait was not ended by {what} within {self.patience_s} s")

    def test_threads_that_put_at_once_mix_nothing(self) -> None:
        """Rule threads: puts of different streams at once lose, repeat and mix nothing."""
        identities = [Identity("t", n) for n in range(4)]
        sizes = [(n * 7_919) % 90_000 for n in range(25)]
        over, raised = threading.Event(), list[BaseException]()
        with self._edge() as edge:
            edge.window = (4, 1 << 20)
            streams = {one: [edge.data(n, pattern(n, size), one) for n, size in enumerate(sizes)] for one in identities}

            def put_all(identity: Identity) -> None:
                try:
                    for frame in (edge.open(identity), *streams[identity]):
                        while edge.put_once(frame) is not PutStatus.STORED and not over.wait(0.001):
                            pass
                except Exception as error:  # noqa: BLE001 - told below, by the test's own thread
                    raised.append(error)

            threads = [threading.Thread(target=put_all, args=(one,), daemon=True) for one in identities]
            for thread in threads:
                thread.start()
            wanted = sum(map(len, streams.values())) + len(streams)
            try:
                edge.until("threads", "not every frame came", lambda: raised or len(edge.got) >= wanted)
            finally:
                over.set()
                for thread in threads:
                    thread.join(self.patience_s)
            if raised:
                broken("threads", f"a put raised {raised[0]!r}")
            for identity, frames in streams.items():
                edge.expect(*frames, identity=identity)
