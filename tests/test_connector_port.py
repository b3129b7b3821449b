"""What every connector of two ends must do, asked of the memory edge and of the shm edge alike."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from connector_peer import (
    EDGE,
    HELLO,
    PATIENCE_S,
    R1,
    End,
    blob,
    data,
    failed_end,
    grant_all,
    greet,
    opening,
    pattern,
)

from omni_fsm.connectors import LinkConnector, MemoryEdge, shm_receiver, shm_sender
from omni_fsm.connectors.ledger import UNCLAIMED_BYTES, UNCLAIMED_FRAMES
from omni_fsm.connectors.port import (
    BUSY,
    STORED,
    ConnectorClosedError,
    CreditReturned,
    EdgeRefused,
    Hello,
    PeerBack,
    PeerLost,
    PutStatus,
    RoomReturned,
    Stopped,
)
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity

MIB = 1 << 20


class Maker:
    """Makes ends of one edge, and closes them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.memory = MemoryEdge(capacity_bytes=4 * MIB, max_frame_bytes=32 * MIB)
        self.made: list[LinkConnector] = []

    def sender(self, hello: Hello = HELLO) -> End:
        if self.kind == "memory":
            return self._kept(self.memory.sender(hello))
        return self._kept(shm_sender(hello, self.folder, arena_bytes=4 * MIB, max_frame_bytes=32 * MIB, retry_s=0.01))

    def receiver(self, hello: Hello = HELLO) -> End:
        if self.kind == "memory":
            return self._kept(self.memory.receiver(hello))
        return self._kept(shm_receiver(hello, self.folder, max_frame_bytes=32 * MIB))

    def _kept(self, connector: LinkConnector) -> End:
        self.made.append(connector)
        return End(connector)


class Pair(NamedTuple):
    sender: End
    receiver: End


@pytest.fixture(params=["memory", "shm"])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(request.param, tmp_path / "edge")
    yield maker
    for connector in maker.made:
        connector.close()


@pytest.fixture
def pair(maker: Maker) -> Pair:
    pair = Pair(maker.sender(), maker.receiver())
    greet(pair.sender, pair.receiver)
    pair.sender.signals.clear()
    pair.receiver.signals.clear()
    return pair


def claimed(pair: Pair, identity: Identity = R1, **window: int) -> None:
    """The stream is open and has credit."""
    assert pair.sender.connector.put(opening(identity)) == STORED
    pair.receiver.turn()
    grant_all(pair.receiver, identity, **window)
    pair.sender.turn()


def entries(end: End) -> int:
    return sum(end.connector.health().entries.values())


def test_both_ends_say_that_the_peer_is_there_before_anything_else(maker: Maker) -> None:
    sender, receiver = maker.sender(), maker.receiver()
    greet(sender, receiver)
    assert sender.signals == receiver.signals == [PeerBack()]
    assert sender.connector.health().connected
    assert receiver.connector.health().connected
    assert sender.connector.edge == EDGE
    assert receiver.connector.hello() == HELLO


def test_frames_come_in_order_each_once_with_their_whole_header(pair: Pair) -> None:
    claimed(pair)
    cause = Cause(Outcome.OK, at_ns=5)
    put = [
        data(0, b"small"),
        Frame(EDGE, R1, FrameKind.DATA, segment=3, seq=1, segment_end=True, body=blob(b"a", b"", b"bc")),
        data(2, None),
        data(3, b""),
        data(4, pattern(4, 100_000)),
        data(5, pattern(5, 6 * MIB)),
        Frame(EDGE, R1, FrameKind.END, seq=6, cause=cause, body=blob(b"tail")),
    ]
    for frame in put:
        assert pair.sender.connector.put(frame) == STORED
    pair.receiver.until(lambda: len(pair.receiver.frames) == 1 + len(put))
    got = pair.receiver.frames[1:]
    assert [frame for frame, _ in got] == [
        Frame(f.edge, f.identity, f.kind, f.segment, f.seq, f.segment_end, f.cause) for f in put
    ]
    assert [body for _, body in got] == [None if f.body is None else b"".join(f.body.parts) for f in put]
    assert got[-1][0].cause is not None
    assert got[-1][0].cause.at_ns == 5
    pair.receiver.turn()
    assert len(pair.receiver.frames) == 1 + len(put)


@pytest.mark.parametrize("nbytes", [10, 32_768, 32_769, 6 * MIB])
def test_a_body_is_a_private_copy_on_both_sides(pair: Pair, nbytes: int) -> None:
    claimed(pair)
    source = bytearray(pattern(0, nbytes))
    frame = Frame(EDGE, R1, FrameKind.DATA, seq=0, body=blob(source))
    assert pair.sender.connector.put(frame) == STORED
    source[:] = bytes(nbytes)
    assert pair.receiver.connector.wait(PATIENCE_S)
    arrival = pair.receiver.connector.get()
    assert arrival is not None
    assert arrival.nbytes == nbytes
    body = arrival.load()
    assert body is not None
    assert not body.readonly
    body[0] ^= 255
    body[0] ^= 255
    pair.receiver.turn()
    pair.sender.turn()
    assert pair.sender.connector.put(Frame(EDGE, R1, FrameKind.DATA, seq=1, body=blob(source))) == STORED
    assert bytes(body) == pattern(0, nbytes)
    with pytest.raises(LocalProtocolError, match="refused in state done"):
        arrival.load()


def test_the_same_body_reaches_the_receiver_from_many_parts(pair: Pair) -> None:
    claimed(pair)
    for seq, size in enumerate((20, 2_000)):
        parts = [pattern(n, size) for n in range(200)]
        assert pair.sender.connector.put(Frame(EDGE, R1, FrameKind.DATA, seq=seq, body=blob(*parts))) == STORED
        pair.receiver.until(lambda seq=seq: len(pair.receiver.frames) == 2 + seq)
        assert pair.receiver.frames[-1][1] == b"".join(parts)


def test_an_unclaimed_stream_has_a_little_credit_and_more_when_granted(pair: Pair) -> None:
    put = pair.sender.connector.put
    assert put(opening()) == STORED
    for seq in range(UNCLAIMED_FRAMES):
        assert put(data(seq)) == STORED
    assert put(data(UNCLAIMED_FRAMES)) == BUSY
    pair.receiver.turn()
    pair.receiver.connector.grant(R1, frames=4, nbytes=1_000, taken_frames=0, taken_bytes=0)
    pair.sender.turn()
    assert pair.sender.signals == [CreditReturned(R1)]
    assert put(data(2)) == STORED
    assert put(data(3)) == STORED
    assert put(data(4)) == BUSY
    pair.receiver.turn()
    grant_all(pair.receiver, frames=4, nbytes=1_000)
    pair.sender.turn()
    assert pair.sender.signals == [CreditReturned(R1)] * 2
    assert put(data(4)) == STORED


def test_an_unclaimed_stream_may_not_put_a_big_frame(pair: Pair) -> None:
    assert pair.sender.connector.put(opening()) == STORED
    big = data(0, bytes(UNCLAIMED_BYTES + 1))
    assert pair.sender.connector.put(big) == BUSY
    pair.receiver.turn()
    grant_all(pair.receiver, frames=1, nbytes=10)
    pair.sender.turn()
    assert pair.sender.signals == [CreditReturned(R1)]
    assert pair.sender.connector.put(big) == STORED  # nothing is outstanding: any size may pass


def test_one_frame_of_any_size_passes_when_nothing_is_outstanding(pair: Pair) -> None:
    claimed(pair, frames=8, nbytes=100)
    assert pair.sender.connector.put(data(0, bytes(60))) == STORED
    assert pair.sender.connector.put(data(1, bytes(60))) == BUSY
    pair.receiver.turn()
    grant_all(pair.receiver, frames=8, nbytes=100)
    pair.sender.turn()
    assert pair.sender.connector.put(data(1, bytes(7 * MIB))) == STORED
    assert pair.sender.connector.put(data(2, b"1")) == BUSY


def test_one_stream_without_credit_blocks_no_other(pair: Pair) -> None:
    other = Identity("other", 1)
    claimed(pair, frames=1)
    claimed(pair, other)
    assert pair.sender.connector.put(data(0)) == STORED
    assert pair.sender.connector.put(data(1)) == BUSY
    assert pair.sender.connector.put(data(0, identity=other)) == STORED


def test_a_failed_end_needs_no_credit(pair: Pair) -> None:
    claimed(pair, frames=0)
    assert pair.sender.connector.put(data(0)) == BUSY
    assert pair.sender.connector.put(failed_end()) == STORED
    pair.receiver.turn()
    assert pair.receiver.frames[-1][0].cause == Cause(Outcome.ERROR, "out of memory")


def test_a_stop_reaches_the_sender_with_its_cause(pair: Pair) -> None:
    cause = Cause(Outcome.CANCELLED, "client went away \udcff", 99)
    pair.receiver.connector.stop(R1, cause)
    pair.receiver.connector.reclaim(R1, unread=True)
    pair.sender.turn()
    (stopped,) = pair.sender.signals
    assert stopped == Stopped(R1, Cause(Outcome.CANCELLED, "client went away \\udcff"))
    assert stopped.cause.at_ns == 99


def test_hellos_that_differ_are_refused_with_both_values_on_both_sides(maker: Maker) -> None:
    sender, receiver = maker.sender(Hello(EDGE, "d1")), maker.receiver(Hello(EDGE, "d2"))
    receiver.until(lambda: sender.signals and receiver.signals, sender)
    for end, ours, theirs in ((sender, "d1", "d2"), (receiver, "d2", "d1")):
        (refused,) = end.signals
        assert isinstance(refused, EdgeRefused)
        assert (refused.error.field, refused.error.ours, refused.error.theirs) == ("spec_digest", ours, theirs)
        assert not end.connector.health().connected
    outcome = sender.connector.put(opening())
    assert outcome.status is PutStatus.REFUSED
    assert "'d1' here and 'd2' at the peer" in outcome.reason
    for end in (sender, receiver):
        end.turn(0.02)
        assert len(end.signals) == 1  # the edge stays closed


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (Hello(EDGE, "d1", version=2), "version is 1 here and 2 at the peer"),
        (Hello(EDGE, "d1", mode="full_payload"), "mode is 'chunks' here and 'full_payload' at the peer"),
    ],
)
def test_a_refused_hello_names_the_field(maker: Maker, hello: Hello, named: str) -> None:
    sender, receiver = maker.sender(HELLO), maker.receiver(hello)
    sender.until(lambda: sender.signals, receiver)
    assert named in str(sender.signals[0].error)


def test_after_close_the_peer_gets_what_was_put_and_then_learns_of_the_loss_once(pair: Pair) -> None:
    claimed(pair)
    for seq in range(5):
        assert pair.sender.connector.put(data(seq, pattern(seq, 50_000 * seq))) == STORED
    pair.receiver.connector.stop(R1, Cause(Outcome.DONE))  # unread at the sender: the socket is reset, not just ended
    pair.sender.connector.close()
    assert pair.receiver.signals == []
    while pair.receiver.get_once():
        assert pair.receiver.connector.health().connected
    assert [frame.seq for frame, _ in pair.receiver.frames[1:]] == [0, 1, 2, 3, 4]
    assert pair.receiver.frames[-1][1] == pattern(4, 200_000)
    pair.receiver.until(lambda: pair.receiver.signals)
    pair.receiver.turn(0.02)
    assert pair.receiver.signals == [PeerLost()]
    assert entries(pair.receiver) == 0


def test_the_sender_learns_of_a_closed_receiver_and_forgets_its_credit(pair: Pair) -> None:
    claimed(pair)
    assert pair.sender.connector.put(data(0, bytes(100_000))) == STORED
    assert entries(pair.sender) == 2
    pair.receiver.connector.stop(R1, Cause(Outcome.ERROR, "deadline"))
    pair.receiver.connector.close()
    pair.sender.until(lambda: pair.sender.seen(PeerLost))
    assert pair.sender.signals == [Stopped(R1, Cause(Outcome.ERROR, "deadline")), PeerLost()]
    assert entries(pair.sender) == 0
    assert pair.sender.connector.put(data(1)) == BUSY


@pytest.mark.parametrize("leaves", ["sender", "receiver"])
def test_an_end_that_is_replaced_is_met_again_and_new_frames_flow(maker: Maker, leaves: str) -> None:
    ends = {"sender": maker.sender(), "receiver": maker.receiver()}
    greet(*ends.values())
    for life in (1, 2):
        stays = "receiver" if leaves == "sender" else "sender"
        ends[leaves].connector.close()
        ends[stays].until(lambda s=stays, n=life: ends[s].seen(PeerLost) == n)
        ends[leaves] = maker.sender() if leaves == "sender" else maker.receiver()
        greet(*ends.values())
        ends["sender"].put(opening())
        ends["receiver"].frames.clear()
        ends["receiver"].until(lambda: ends["receiver"].frames)
        grant_all(ends["receiver"])
        for seq in range(3):
            ends["sender"].put(data(seq, pattern(seq, 80_000)))
        ends["receiver"].until(lambda: len(ends["receiver"].frames) == 4)
        told = [signal for signal in ends[stays].signals if isinstance(signal, PeerLost | PeerBack)]
        assert told == [PeerBack(), *[PeerLost(), PeerBack()] * life]


def test_what_was_put_without_a_peer_is_busy_and_told_when_it_comes(maker: Maker) -> None:
    sender = maker.sender()
    sender.turn()
    assert sender.connector.put(opening()) == BUSY
    receiver = maker.receiver()
    greet(sender, receiver)
    assert sender.signals == [PeerBack(), RoomReturned()]
    assert sender.connector.put(opening()) == STORED


def test_no_frame_is_given_out_before_its_peer_was_announced(maker: Maker) -> None:
    sender, receiver = maker.sender(), maker.receiver()
    greet(sender, receiver)
    sender.connector.close()
    receiver.until(lambda: receiver.seen(PeerLost))
    receiver.signals.clear()
    sender = maker.sender()
    deadline_s = time.monotonic() + PATIENCE_S
    while not receiver.connector.health().connected:
        assert time.monotonic() < deadline_s
        sender.turn(0.001)
        receiver.connector.wait(0.001)
    sender.until(lambda: sender.seen(PeerBack))
    assert sender.connector.put(opening()) == STORED
    assert receiver.connector.get() is None
    assert receiver.connector.signals() == [PeerBack()]
    receiver.until(lambda: receiver.frames)


def test_a_late_frame_of_an_old_life_never_reaches_a_peer_that_restarted(maker: Maker) -> None:
    """It would wait for the frames before it, or take a failed end for the whole of a request."""
    sender, receiver = maker.sender(), maker.receiver()
    greet(sender, receiver)
    sender.put(opening())
    sender.put(data(0))
    receiver.until(lambda: len(receiver.frames) == 2)
    receiver.connector.close()
    sender.until(lambda: sender.seen(PeerLost))
    receiver = maker.receiver()
    greet(sender, receiver)
    ok_end = Frame(EDGE, R1, FrameKind.END, seq=1, cause=Cause(Outcome.OK))
    for late in (data(1), data(0), ok_end):
        assert sender.connector.put(late) == BUSY
    refused = sender.connector.put(failed_end())  # it waits behind nothing: no credit will ever let it go
    assert (refused.status, refused.reason) == (PutStatus.REFUSED, "the peer never heard of this life")
    new = Identity("r1", 2)
    sender.put(opening(new))
    sender.put(data(0, b"new", new))
    receiver.until(lambda: len(receiver.frames) == 2)
    receiver.turn()
    assert [frame.identity for frame, _ in receiver.frames] == [new, new]


ODD_IDS = ["../../etc/passwd", "/", "a\0b", "x" * 4_000, "ünï-中文-🙂", ".", "r1\n#1", "é" * 8_192]


def test_any_id_crosses_unchanged(pair: Pair) -> None:
    identities = [
        Identity(odd, generation) for odd, generation in zip(ODD_IDS, (0, 2**64 - 1, 7, 8, 9, 10, 11, 12), strict=True)
    ]
    for identity in identities:
        assert pair.sender.connector.put(opening(identity)) == STORED
        assert pair.sender.connector.put(data(0, bytes(32_768), identity)) == STORED
    pair.receiver.until(lambda: len(pair.receiver.frames) == 2 * len(ODD_IDS))
    assert [frame.identity for frame, _ in pair.receiver.frames[::2]] == identities
    for identity in identities:
        pair.receiver.connector.stop(identity, Cause(Outcome.ERROR, "r" * 2_048))
    pair.sender.until(lambda: pair.sender.seen(Stopped) == len(ODD_IDS))
    assert [signal.identity for signal in pair.sender.signals] == identities


def test_odd_stage_names_meet_too(maker: Maker) -> None:
    hello = Hello(Edge("a/../\0b", "日本" * 40), "d1")
    sender, receiver = maker.sender(hello), maker.receiver(hello)
    greet(sender, receiver)
    if maker.kind == "shm":
        assert [entry.name for entry in maker.folder.iterdir()] == []


def test_a_frame_over_the_limit_is_refused_with_both_numbers(pair: Pair) -> None:
    claimed(pair)
    outcome = pair.sender.connector.put(data(0, bytes(32 * MIB + 1)))
    assert outcome.status is PutStatus.REFUSED
    assert "33554433 bytes" in outcome.reason
    assert "33554432" in outcome.reason


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (Frame(Edge("x", "y"), R1, FrameKind.OPEN), "edge x->y cannot be put at the sending end of thinker->talker"),
        (Frame(EDGE, R1, FrameKind.DATA), "needs a seq, got -1"),
        (Frame(EDGE, R1, FrameKind.END), "end without an outcome"),
        (Frame(EDGE, R1, FrameKind.OPEN, body=blob(b"x")), "open carries no body"),
        (Frame(EDGE, R1, FrameKind.END, cause=Cause(Outcome.ERROR, "e"), body=blob(b"x")), "end(error) carries no"),
        (Frame(EDGE, R1, FrameKind.END, cause=Cause(Outcome.DONE)), "an end cannot have outcome done"),
    ],
)
def test_a_frame_whose_parts_do_not_go_together_is_refused(pair: Pair, frame: Frame, named: str) -> None:
    outcome = pair.sender.connector.put(frame)
    assert outcome.status is PutStatus.REFUSED
    assert named in outcome.reason


def test_frames_cannot_be_put_at_the_receiving_end(pair: Pair) -> None:
    assert pair.receiver.connector.put(opening()).status is PutStatus.REFUSED


def test_a_full_edge_is_busy_until_the_receiver_has_copied(pair: Pair) -> None:
    claimed(pair)
    put = itertools.takewhile(
        lambda seq: pair.sender.connector.put(data(seq, pattern(seq, MIB - 64))) == STORED, itertools.count()
    )
    assert list(put) == [0, 1, 2, 3]
    pair.sender.turn()
    assert pair.sender.signals == []
    assert entries(pair.sender) == 1 + 4
    pair.receiver.turn()
    pair.receiver.turn()
    pair.sender.until(lambda: pair.sender.signals)
    assert pair.sender.signals == [RoomReturned()]
    assert pair.sender.connector.put(data(4, pattern(4, MIB - 64))) == STORED


def test_a_full_queue_of_small_frames_is_busy_until_the_receiver_reads(pair: Pair) -> None:
    claimed(pair)
    stored = 0
    while pair.sender.connector.put(data(stored, bytes(20_000 if stored % 2 else 10))) == STORED:
        stored += 1
    assert stored > 20
    pair.receiver.until(lambda: len(pair.receiver.frames) == 1 + stored)
    pair.receiver.turn()
    pair.sender.until(lambda: pair.sender.signals)
    assert set(pair.sender.signals) == {RoomReturned()}
    assert pair.sender.connector.put(data(stored, bytes(10))) == STORED
    pair.receiver.until(lambda: len(pair.receiver.frames) == 2 + stored)


def test_discarded_frames_give_their_room_back_too(pair: Pair) -> None:
    claimed(pair)
    for seq in range(40):
        pair.sender.put(data(seq, bytes(MIB)))
        arrival = pair.receiver.connector.get()
        assert arrival is not None
        assert arrival.frame.seq == seq
        if seq % 3 == 0:
            arrival.discard()
            arrival.discard()
        elif seq % 3 == 1:
            assert arrival.load() is not None
            arrival.discard()  # does nothing
        pair.receiver.turn()  # a get discards what was neither loaded nor discarded
    pair.sender.turn()
    assert pair.sender.connector.health().entries["blocks"] == 0


def test_notices_are_never_lost_when_the_sender_does_not_read(pair: Pair) -> None:
    identities = [Identity(f"{n}-" + "i" * 3_000, n) for n in range(2_000)]
    for identity in identities:
        for count in range(2):
            pair.receiver.connector.grant(identity, frames=count, nbytes=1, taken_frames=0, taken_bytes=0)
        pair.receiver.connector.stop(identity, Cause(Outcome.ERROR, str(identity.generation)))
    waiting = pair.receiver.connector.health().entries["control"]
    assert 0 < waiting <= 2 * len(identities)
    pair.sender.until(lambda: pair.sender.seen(Stopped) == len(identities), pair.receiver)
    stopped = [signal for signal in pair.sender.signals if isinstance(signal, Stopped)]
    assert {signal.identity: signal.cause.reason for signal in stopped} == {i: str(i.generation) for i in identities}
    pair.sender.until(lambda: pair.receiver.connector.health().entries["control"] == 0, pair.receiver)


def test_grants_that_overtake_each_other_while_the_edge_is_full_take_nothing_back(pair: Pair) -> None:
    """Two threads take frames: the grant of the earlier take may come last, and only one waits for the socket."""
    assert pair.sender.connector.put(opening()) == STORED
    for seq in range(2):
        assert pair.sender.connector.put(data(seq)) == STORED
    pair.receiver.turn()
    stopped = 0
    while pair.receiver.connector.health().entries["control"] == 0:
        assert stopped < 10_000, "the edge is never full"
        pair.receiver.connector.stop(Identity("i" * 3_000, stopped), Cause(Outcome.ERROR, "full"))
        stopped += 1
    pair.receiver.connector.grant(R1, frames=8, nbytes=1_000, taken_frames=2, taken_bytes=2)
    pair.receiver.connector.grant(R1, frames=4, nbytes=2_000, taken_frames=1, taken_bytes=1)
    pair.sender.until(
        lambda: pair.sender.seen(Stopped) == stopped and pair.receiver.connector.health().entries["control"] == 0,
        pair.receiver,
    )
    pair.sender.turn()
    put = itertools.takewhile(lambda seq: pair.sender.connector.put(data(seq)) == STORED, itertools.count(2))
    assert len(list(put)) == 8


def test_notices_without_a_peer_are_dropped(maker: Maker) -> None:
    receiver = maker.receiver()
    receiver.connector.stop(R1, Cause(Outcome.ERROR, "nobody"))
    receiver.connector.grant(R1, frames=1, nbytes=1, taken_frames=0, taken_bytes=0)
    assert entries(receiver) == 0
    sender = maker.sender()
    greet(sender, receiver)
    sender.turn(0.01)
    assert sender.signals == [PeerBack()]


def test_a_reclaimed_life_leaves_nothing(pair: Pair) -> None:
    claimed(pair)
    pair.sender.put(data(0, bytes(100_000)))
    pair.receiver.until(lambda: len(pair.receiver.frames) == 2)
    pair.receiver.turn()
    grant_all(pair.receiver)
    pair.sender.turn()
    for end in pair:
        end.connector.reclaim(R1, unread=False)
        end.connector.reclaim(R1, unread=True)
        assert entries(end) == 0


def test_wait_blocks_until_a_frame_comes_from_another_thread(pair: Pair) -> None:
    waiting = threading.Event()
    woken: list[bool] = []

    def wait() -> None:
        waiting.set()
        woken.append(pair.receiver.connector.wait(PATIENCE_S))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    started_s = time.monotonic()
    assert pair.sender.connector.put(opening()) == STORED
    thread.join(PATIENCE_S)
    assert woken == [True]
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert pair.receiver.connector.get() is not None


def test_wait_is_over_after_its_time_and_says_so(pair: Pair) -> None:
    for end in pair:
        end.turn()
        started_s = time.monotonic()
        assert end.connector.wait(0.03) is False
        assert time.monotonic() - started_s >= 0.03
        assert end.connector.wait(0) is False


@pytest.mark.parametrize("how", ["wake", "close"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("connected", [True, False])
def test_wait_is_ended_from_any_thread(maker: Maker, how: str, side: str, *, connected: bool) -> None:
    ends = {"sender": maker.sender(), "receiver": maker.receiver()} if connected else {side: getattr(maker, side)()}
    if connected:
        greet(*ends.values())
    connector = ends[side].connector
    connector.signals()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(connector.wait(None)))
    thread.start()
    getattr(connector, how)()  # before or during the wait: both must end it
    thread.join(PATIENCE_S)
    assert results == [True]


def test_a_closed_end_is_quiet(pair: Pair) -> None:
    claimed(pair)
    for end in pair:
        end.connector.close()
        end.connector.close()
        assert end.connector.wait(None) is True
        assert end.connector.get() is None
        assert end.connector.signals() == []
        end.connector.wake()
        end.connector.stop(R1, Cause(Outcome.DONE))
        grant_all(end)
        end.connector.reclaim(R1, unread=True)
        assert entries(end) == 0
        assert not end.connector.health().connected
        with pytest.raises(ConnectorClosedError, match="thinker->talker is closed"):
            end.connector.put(opening())


def test_an_edge_has_one_receiving_end(maker: Maker) -> None:
    receiver = maker.receiver()
    with pytest.raises(ConfigError, match="thinker->talker"):
        maker.receiver()
    receiver.connector.close()
    maker.receiver()


def test_idle_ends_use_no_cpu(pair: Pair) -> None:
    used_s: list[float] = []

    def idle(end: End) -> None:
        end.turn()
        before_s = time.thread_time()
        end.connector.wait(0.3)
        used_s.append(time.thread_time() - before_s)

    threads = [threading.Thread(target=idle, args=(end,)) for end in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert max(used_s) < 0.03


def test_threads_that_put_at_once_lose_and_mix_nothing(pair: Pair) -> None:
    """Four outbox threads, one I/O thread at each end, a small arena: every stream whole and in order."""
    identities = [Identity("t", n) for n in range(4)]
    sizes = [(n * 7_919) % 180_000 for n in range(60)]
    pair.receiver.grants = True
    done = threading.Event()
    room = threading.Condition()

    def attend() -> None:
        while not done.is_set():
            pair.sender.turn(0.5)
            with room:
                room.notify_all()

    def put_all(identity: Identity) -> None:
        for frame in [opening(identity), *(data(n, pattern(n, size), identity) for n, size in enumerate(sizes))]:
            while pair.sender.connector.put(frame) == BUSY:
                with room:
                    room.wait(0.05)

    io = threading.Thread(target=attend)
    putters = [threading.Thread(target=put_all, args=(identity,)) for identity in identities]
    for thread in (io, *putters):
        thread.start()
    pair.receiver.until(lambda: len(pair.receiver.frames) == len(identities) * (1 + len(sizes)))
    done.set()
    pair.sender.connector.wake()
    for thread in (io, *putters):
        thread.join(PATIENCE_S)
    for identity in identities:
        got = [(frame.seq, body) for frame, body in pair.receiver.frames if frame.identity == identity]
        assert [seq for seq, _ in got] == [-1, *range(len(sizes))]
        assert all(body == pattern(seq, sizes[seq]) for seq, body in got[1:])
