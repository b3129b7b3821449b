"""The shm edge with real processes, real deaths and hostile peers."""

import array
import contextlib
import fcntl
import os
import random
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from connector_peer import (
    EDGE,
    HELLO,
    NOTICED_S,
    PATIENCE_S,
    R1,
    End,
    data,
    failed_end,
    fds,
    grant_all,
    greet,
    opening,
    pattern,
    receiving_stage,
    sending_stage,
    stage,
)

from omni_fsm.connectors import shm_receiver, shm_sender, wire
from omni_fsm.connectors.arena import SEALS
from omni_fsm.connectors.port import (
    BUSY,
    STORED,
    ConnectorClosedError,
    EdgeRefused,
    Hello,
    PeerBack,
    PeerLost,
    PutStatus,
    RoomReturned,
)
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge, Identity

MIB = 1 << 20
MIXED = [10, 100_000, 0, 32_768, 300_000, 5, 5 * MIB, 40_000] * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "edge"


@pytest.fixture
def no_leaks(folder: Path) -> Iterator[None]:
    """No descriptor and no file is left when both ends are closed."""
    with stage(_nothing, folder):  # the fork server's own descriptors are there from now on
        pass
    before = fds()
    yield
    assert fds() == before
    assert list(folder.iterdir()) == []


def _nothing(pipe: object, folder: str) -> None:
    pass


@contextlib.contextmanager
def closing(*ends: End) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.connector.close()


# -- death -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_sender_is_noticed_within_a_second_after_all_it_had_put(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), stage(sending_stage, folder, MIXED) as sender:
        receiver.until(lambda: receiver.frames)
        assert list(folder.iterdir()) == []  # nothing is named while they are connected
        grant_all(receiver)
        assert sender.hears() == len(MIXED)
        assert receiver.get_once()
        receiver.connector.stop(R1, failed_end().cause)  # unread at its death: the socket is reset
        sender.kill()
        killed_s = time.monotonic()
        receiver.until(lambda: receiver.seen(PeerLost))
        assert time.monotonic() - killed_s < NOTICED_S
        assert [body for _, body in receiver.frames[1:]] == [pattern(seq, size) for seq, size in enumerate(MIXED)]
        receiver.turn(0.02)
        assert receiver.signals == [PeerBack(), PeerLost()]
        assert receiver.faults == []
        assert len(list(folder.iterdir())) == 1  # it listens again


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_receiver_is_noticed_and_its_successor_gets_new_frames(folder: Path) -> None:
    sender = End(shm_sender(HELLO, folder, arena_bytes=4 * MIB))
    with closing(sender):
        for life in (1, 2):
            identity = Identity("r1", life)
            with stage(receiving_stage, folder) as receiver:
                greet(sender)
                sender.put(opening(identity))
                assert receiver.hears() == ("open", -1, 0)
                for seq, size in enumerate(MIXED):
                    sender.put(data(seq, pattern(seq, size), identity))
                for seq, size in enumerate(MIXED):
                    assert receiver.hears() == ("data", seq, zlib.crc32(pattern(seq, size)))
                receiver.kill()
                killed_s = time.monotonic()
                sender.until(lambda n=life: sender.seen(PeerLost) == n)
                assert time.monotonic() - killed_s < NOTICED_S
            assert sum(sender.connector.health().entries.values()) == 0
            assert sender.connector.put(opening()) == BUSY
        assert sender.seen(PeerBack) == 2
        assert sender.seen(RoomReturned) > 0


@pytest.mark.usefixtures("no_leaks")
def test_a_receiver_killed_in_mid_stream_wakes_a_sender_that_is_busy(folder: Path) -> None:
    sender = End(shm_sender(HELLO, folder, arena_bytes=MIB))
    stop, busy = threading.Event(), threading.Event()

    def put_for_ever() -> None:
        seq = 0
        while not stop.is_set():
            try:
                outcome = sender.connector.put(data(seq, bytes(100_000)))
            except ConnectorClosedError:
                return  # the test has failed, and says why
            if outcome == STORED:
                seq += 1
            else:
                busy.set()
                stop.wait(0.001)

    with closing(sender):
        with stage(receiving_stage, folder) as receiver:
            greet(sender)
            sender.put(opening())
            thread = threading.Thread(target=put_for_ever)
            thread.start()
            sender.until(lambda: receiver.pipe.poll() and busy.is_set())
            receiver.kill()
            killed_s = time.monotonic()
            sender.until(lambda: sender.seen(PeerLost))
            assert time.monotonic() - killed_s < NOTICED_S
        stop.set()
        thread.join(PATIENCE_S)
        assert sender.seen(PeerLost) == 1
        assert sender.connector.health().entries["blocks"] == 0


@pytest.mark.usefixtures("no_leaks")
def test_a_forked_child_that_inherited_the_socket_does_not_keep_a_dead_peer_alive(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), stage(sending_stage, folder, [5], forks=True) as sender:
        grandchild = sender.hears()
        assert isinstance(grandchild, int)
        receiver.until(lambda: len(receiver.frames) == 2)
        watch = os.pidfd_open(grandchild)
        sender.kill()
        receiver.until(lambda: receiver.seen(PeerLost))
        assert select.select([watch], [], [], 0)[0] == []  # the grandchild still holds what it inherited
        os.close(watch)


@pytest.mark.usefixtures("no_leaks")
def test_a_restarted_sender_takes_over_with_a_fresh_arena(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver):
        for life in (1, 2):
            with stage(sending_stage, folder, [100_000, 20]) as sender:
                receiver.until(lambda n=life: len(receiver.frames) == 3 * n)
                assert sender.hears() == 2
                sender.kill()
                receiver.until(lambda n=life: receiver.seen(PeerLost) == n)
        assert receiver.signals == [PeerBack(), PeerLost()] * 2
        assert receiver.frames[:3] == receiver.frames[3:]


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(folder: Path, no_leaks: None) -> Iterator[tuple[End, End]]:
    sender = End(shm_sender(HELLO, folder, arena_bytes=MIB, max_frame_bytes=16 * MIB))
    receiver = End(shm_receiver(HELLO, folder), grants=True)
    with closing(sender, receiver):
        greet(sender, receiver)
        sender.put(opening())
        receiver.turn()
        sender.turn()
        yield sender, receiver


def test_the_arena_wraps_around_for_thousands_of_sizes_and_a_slow_receiver(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    chance = random.Random(7)  # noqa: S311 - the same walk in every run
    sizes = [int(32_769 * 10 ** chance.uniform(0, 1.4)) for _ in range(2_500)]
    busy = seq = got = 0
    while got < len(sizes):
        while seq < len(sizes):
            if sender.connector.put(data(seq, pattern(seq, sizes[seq]))) == BUSY:
                busy += 1
                break
            seq += 1
        for _ in range(chance.randrange(4)):
            got += receiver.get_once()
        while receiver.frames:
            frame, body = receiver.frames.pop()
            assert frame.seq < 0 or body == pattern(frame.seq, sizes[frame.seq])
        grant = sum(sizes[:got])
        receiver.connector.grant(R1, frames=1 << 20, nbytes=1 << 40, taken_frames=got, taken_bytes=grant)
        receiver.connector.wait(0)
        sender.turn()
    assert busy > 100
    assert sender.seen(RoomReturned) > 50
    receiver.turn()
    sender.turn()
    assert sender.connector.health().entries["blocks"] == 0


def test_a_body_that_fits_the_arena_exactly_and_one_that_never_fits(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    for seq, size in enumerate((MIB, MIB + 1, 16 * MIB)):
        assert sender.connector.put(data(seq, pattern(seq, size))) == STORED
        receiver.until(lambda n=seq: len(receiver.frames) == 2 + n, sender)
        assert receiver.frames[-1][1] == pattern(seq, size)


def test_bodies_beyond_the_arena_are_bounded_together(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    assert sender.connector.put(data(0, bytes(9 * MIB))) == STORED
    assert sender.connector.put(data(1, bytes(9 * MIB))) == BUSY
    receiver.turn()
    sender.until(lambda: sender.seen(RoomReturned))
    assert sender.connector.put(data(1, bytes(9 * MIB))) == STORED


def test_the_smaller_frame_limit_of_both_ends_holds(folder: Path) -> None:
    sender, receiver = End(shm_sender(HELLO, folder)), End(shm_receiver(HELLO, folder, max_frame_bytes=1_000))
    with closing(sender, receiver):
        greet(sender, receiver)
        outcome = sender.connector.put(data(0, bytes(1_001)))
        assert outcome.status is PutStatus.REFUSED
        assert "1001 bytes" in outcome.reason


# -- the directory and the path ----------------------------------------------------------------------------------------


def test_the_socket_is_named_by_a_digest_in_a_private_directory(folder: Path) -> None:
    hello = Hello(Edge("../evil", "b\0"), "d")
    with closing(End(shm_receiver(hello, folder))):
        (path,) = folder.iterdir()
        assert path.is_socket()
        assert len(path.name) == 37
        assert set(path.stem) <= set("0123456789abcdef")
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("make", [shm_sender, shm_receiver])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o750)
    with pytest.raises(ConfigError, match="mode is 0750"):
        make(HELLO, open_folder)
    link = tmp_path / "link"
    link.symlink_to(open_folder)
    with pytest.raises(ConfigError, match="no link"):
        make(HELLO, link)
    with pytest.raises(ConfigError, match="at most"):
        make(HELLO, tmp_path / ("x" * 90))
    with pytest.raises(ConfigError, match="No such file"):
        make(HELLO, tmp_path / "missing" / "edge")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user for a moment")
def test_a_directory_and_a_peer_of_another_user_are_refused(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 65_534, 65_534)
    with pytest.raises(ConfigError, match="uid 65534"):
        shm_receiver(HELLO, foreign)
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), raw_socket() as raw:
        raw.connect(os.fspath(next(folder.iterdir())))
        os.seteuid(65_534)  # now the waiting peer is of another user: root
        try:
            receiver.turn(0.02)
        finally:
            os.seteuid(0)
        assert raw.recv(100) == b""
        assert len(list(folder.iterdir())) == 1
        assert receiver.signals == receiver.faults == []


def test_a_stale_socket_file_is_replaced(folder: Path) -> None:
    with closing(End(shm_receiver(HELLO, folder))):
        (path,) = folder.iterdir()
    with raw_socket() as stale:
        stale.bind(os.fspath(path))
    assert path.is_socket()
    with closing(End(shm_receiver(HELLO, folder))):
        assert path.is_socket()
    assert not path.exists()


def test_a_listener_that_closes_leaves_its_successors_path_alone(folder: Path) -> None:
    first = shm_receiver(HELLO, folder)
    (path,) = folder.iterdir()
    path.unlink()
    with closing(End(shm_receiver(HELLO, folder))):
        first.close()
        assert path.is_socket()


@pytest.mark.parametrize("bad", [{"arena_bytes": 0}, {"max_frame_bytes": 0}, {"retry_s": 0}])
def test_numbers_that_cannot_be_used_are_refused_by_name(folder: Path, bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        shm_sender(HELLO, folder, **bad)


# -- hostile peers -----------------------------------------------------------------------------------------------------


def raw_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def memfd(nbytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("raw", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def send(raw: socket.socket, packet: bytes, *passed: int) -> None:
    """Send a packet with descriptors, which are closed here."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    raw.sendmsg([packet], rights)
    for fd in passed:
        os.close(fd)


def hello(arena_bytes: int = 0, **changes: object) -> bytes:
    said = {
        "type": "hello",
        "version": 1,
        "spec_digest": "d1",
        "from_stage": EDGE.from_stage,
        "to_stage": EDGE.to_stage,
        "mode": "chunks",
        "max_frame_bytes": 1 << 30,
        "arena_bytes": arena_bytes,
    }
    return prefixed({**said, **changes})


def frame(**changes: object) -> bytes:
    said = {"type": "frame", "id": "r1", "generation": 1, "kind": "data", "seq": 0}
    inline = changes.pop("inline", b"")
    assert isinstance(inline, bytes)
    return prefixed({**said, **changes}) + inline


def prefixed(header: object) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return len(encoded).to_bytes(4, "little") + encoded


BAD_GREETINGS = {
    "garbage": (b"\xff" * 50, [], "header ends at"),
    "one byte": (b"x", [], "has no header"),
    "no msgpack": (b"\4\0\0\0abcd", [], "cannot be decoded"),
    "a frame first": (frame(), [], "came before the hello"),
    "no arena": (hello(), [], "expected 1 arenas"),
    "an arena without its descriptor": (hello(MIB), [], "0 descriptors"),
    "an unsealed arena": (hello(MIB), [(MIB, 0)], "has seals 0x0"),
    "a half sealed arena": (hello(MIB), [(MIB, SEALS & ~fcntl.F_SEAL_SHRINK)], "has seals"),
    "an arena shorter than said": (hello(MIB), [(4_096, SEALS)], "4096 bytes"),
    "two arenas": (hello(MIB), [(MIB, SEALS)] * 2, "2 descriptors"),
    "a pipe for an arena": (hello(MIB), ["pipe"], "file mode"),
    "a file for an arena": (hello(1), ["file"], "no memfd"),
    "more descriptors than fit": (hello(MIB), [(MIB, SEALS)] * 20, "descriptors or more"),
    "a wrong field": (hello(MIB, version="1"), [(MIB, SEALS)], "version"),
    "too large": (hello(mode="m" * 70_000), [], "the limits are"),
}

BAD_FRAMES = {
    "an empty packet is an end": (b"", [], ""),
    "garbage": (os.urandom(3) + b"\0" + b"z" * 300, [], ""),
    "cut short": (frame()[:-5], [], "header ends at"),
    "a second hello": (hello(MIB), [], "a hello came where only frames come"),
    "an ack to the receiver": (wire.ack_packet(1), [], "a ack came where only frames come"),
    "an unknown field": (frame(color="red"), [], "color"),
    "a missing field": (prefixed({"type": "frame", "id": "r1"}), [], "missing required field"),
    "an unknown kind": (frame(kind="datum"), [], "Invalid enum value"),
    "an empty id": (frame(id=""), [], "length"),
    "a long id": (frame(id="é" * 16_000), [], "16384 UTF-8 bytes"),
    "a generation of 65 bits": (frame(generation=-1), [], "generation"),
    "a negative offset": (frame(place="arena", offset=-64, nbytes=10), [], "offset"),
    "outside the arena": (frame(place="arena", offset=MIB - 9, nbytes=10), [], "outside the arena"),
    "an offset that overflows": (frame(place="arena", offset=2**63 - 1, nbytes=2**30), [], "outside the arena"),
    "over the limit": (frame(place="own", nbytes=2**31), [], "the limit is"),
    "fewer inline bytes than said": (frame(place="inline", nbytes=4, inline=b"abc"), [], "3 inline bytes"),
    "inline bytes at no place": (frame(inline=b"abc"), [], "3 inline bytes"),
    "bytes at no place": (frame(nbytes=5), [], "at no place"),
    "its own region without a descriptor": (frame(place="own", nbytes=10), [], "0 descriptors"),
    "its own region unsealed": (frame(place="own", nbytes=10), [(10, 0)], "has seals"),
    "its own region too short": (frame(place="own", nbytes=10), [(9, SEALS)], "9 bytes"),
    "a descriptor too many": (frame(place="own", nbytes=10), [(10, SEALS)] * 2, "2 descriptors"),
    "a descriptor with a frame that needs none": (frame(), [(10, SEALS)], "1 descriptors"),
    "many descriptors": (frame(), [(10, SEALS)] * 30, "descriptors or more"),
    "an end without an outcome": (frame(kind="end"), [], "end without an outcome"),
    "an outcome on data": (frame(outcome="ok"), [], "data with an outcome"),
    "data without a seq": (frame(seq=-1), [], "needs a seq"),
    "a failed end with a body": (
        frame(kind="end", outcome="error", place="inline", nbytes=1, inline=b"x"),
        [],
        "no body",
    ),
    "an end that is done": (frame(kind="end", outcome="done"), [], "done"),
    "too large": (frame(id="r" * 70_000), [], "the limits are"),
}

BAD_NOTICES = {
    "garbage": (b"\0\1\2\3\4", [], "header ends at"),
    "a frame to the sender": (frame(), [], "a frame came where only notices come"),
    "a second hello": (hello(), [], "a hello came"),
    "an ack for what was never sent": (wire.ack_packet(1), [], "body 1 acknowledged"),
    "more taken than put": (
        wire.credit_packet(R1, wire.Credit(1, 1, 1, 0)),
        [],
        "1 frames and 0 bytes taken, but 0 and 0 were put",
    ),
    "negative credit": (wire.credit_packet(R1, wire.Credit(-1, 1, 0, 0)), [], "frames"),
    "bytes behind a notice": (wire.ack_packet(0) + b"x", [], "1 bytes behind a ack"),
    "a descriptor with a notice": (wire.ack_packet(0), [(10, SEALS)], "1 descriptors"),
    "a stop of nobody": (prefixed({"type": "stop", "id": "", "generation": 1, "outcome": "error"}), [], "id"),
    "a stop that is ok": (
        prefixed({"type": "stop", "id": "r1", "generation": 1, "outcome": "ok"}),
        [],
        "a stop of r1#1 with outcome ok",
    ),
}


def passed(wanted: list[object], tmp_path: Path) -> list[int]:
    """The descriptors that a hostile packet carries."""
    opened: list[int] = []
    for what in wanted:
        if what == "pipe":
            reading, writing = os.pipe()
            os.close(writing)
            opened.append(reading)
        elif what == "file":
            (tmp_path / "file").write_bytes(b"x")
            opened.append(os.open(tmp_path / "file", os.O_RDWR))
        else:
            assert isinstance(what, tuple)
            opened.append(memfd(*what))
    return opened


@pytest.mark.parametrize("case", BAD_GREETINGS)
@pytest.mark.usefixtures("no_leaks")
def test_a_sender_that_greets_badly_is_named_and_the_next_one_is_met(case: str, folder: Path, tmp_path: Path) -> None:
    packet, wanted, named = BAD_GREETINGS[case]
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver):
        with raw_socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
            raw.connect(os.fspath(next(folder.iterdir())))
            send(raw, packet, *passed(wanted, tmp_path))
            receiver.until(lambda: receiver.faults)
        assert named in str(receiver.faults[0])
        receiver.turn()
        assert receiver.signals == [PeerLost(str(receiver.faults[0]))]
        sender = End(shm_sender(HELLO, folder))
        with closing(sender):
            sender.until(lambda: sender.seen(PeerBack), receiver)
            sender.put(opening())
            receiver.until(lambda: receiver.frames)


@pytest.mark.parametrize("case", BAD_FRAMES)
@pytest.mark.usefixtures("no_leaks")
def test_a_hostile_sender_is_named_and_lost_after_its_good_frames(case: str, folder: Path, tmp_path: Path) -> None:
    packet, wanted, named = BAD_FRAMES[case]
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), raw_socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
        raw.connect(os.fspath(next(folder.iterdir())))
        send(raw, hello(MIB), memfd(MIB))
        send(raw, frame(place="arena", offset=MIB - 10, nbytes=10))
        send(raw, packet, *passed(wanted, tmp_path))
        receiver.until(lambda: receiver.seen(PeerLost))
        assert [body for _, body in receiver.frames] == [bytes(10)]
        if packet:
            assert named in str(receiver.faults[0])
            assert receiver.signals == [PeerBack(), PeerLost(str(receiver.faults[0]))]
        else:
            assert receiver.signals == [PeerBack(), PeerLost()]


@pytest.mark.parametrize("case", BAD_NOTICES)
@pytest.mark.usefixtures("no_leaks")
def test_a_hostile_receiver_is_named_and_lost(case: str, folder: Path, tmp_path: Path) -> None:
    packet, wanted, named = BAD_NOTICES[case]
    with closing(End(shm_receiver(HELLO, folder))):
        path = next(folder.iterdir())
    sender = End(shm_sender(HELLO, folder))
    with closing(sender), raw_socket() as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        sender.turn()
        with listener.accept()[0] as raw:
            _, rights, _, _ = raw.recvmsg(wire.MAX_PACKET_BYTES, 100)
            os.close(array.array("i", rights[0][2])[0])
            send(raw, hello())
            sender.until(lambda: sender.seen(PeerBack))
            sender.put(opening())
            send(raw, packet, *passed(wanted, tmp_path))
            path.unlink()
            sender.until(lambda: sender.seen(PeerLost))
        assert named in sender.signals[-1].reason
        assert sender.connector.put(opening()) == BUSY


@pytest.mark.usefixtures("no_leaks")
def test_a_later_version_of_the_hello_is_refused_by_its_number(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), raw_socket() as raw:
        raw.connect(os.fspath(next(folder.iterdir())))
        send(raw, hello(MIB, version=9, compression="zstd"), memfd(MIB))
        receiver.until(lambda: receiver.signals)
        (refused,) = receiver.signals
        assert isinstance(refused, EdgeRefused)
        assert (refused.error.ours, refused.error.theirs) == (1, 9)
        assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_leaks")
def test_peers_that_leave_before_they_say_hello_are_no_loss(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver):
        for _ in range(3):
            with raw_socket() as raw:
                raw.connect(os.fspath(next(folder.iterdir())))
                receiver.turn()
            receiver.until(lambda: list(folder.iterdir()))
        sender = End(shm_sender(HELLO, folder))
        with closing(sender):
            sender.until(lambda: sender.seen(PeerBack), receiver)
        assert receiver.signals[0] == PeerBack()
        assert receiver.faults == []


def test_unconnected_ends_use_next_to_no_cpu(folder: Path) -> None:
    receiver = End(shm_receiver(HELLO, folder))
    sender = End(shm_sender(Hello(Edge("nobody", "there"), "d"), folder))
    with closing(receiver, sender):
        for end in (receiver, sender):
            before_s = time.thread_time()
            assert end.connector.wait(0.3) is False
            assert time.thread_time() - before_s < 0.03


def test_a_long_silence_before_the_hello_does_not_hold_the_edge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_fsm.connectors.meeting.HELLO_S", 0.05)
    receiver = End(shm_receiver(HELLO, folder))
    with closing(receiver), raw_socket() as raw:
        raw.connect(os.fspath(next(folder.iterdir())))
        raw.settimeout(0)
        heard: list[bytes] = []

        def hung_up() -> bool:
            with contextlib.suppress(BlockingIOError):
                heard.append(raw.recv(wire.MAX_PACKET_BYTES))
            return b"" in heard

        receiver.until(hung_up)
        assert len(heard) == 2  # its hello, then the end
        receiver.until(lambda: list(folder.iterdir()))
        assert receiver.signals == []
