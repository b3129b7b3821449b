"""Hostile peers by the thousand: frames that no sender would send, bodies that no codec made, packets that are garbage.

Whatever comes, a stage answers with the failure of that one stream or the loss of that one edge, and a reason; it holds no
more than its settings allow, and everybody else is served.
"""

import array
import contextlib
import fcntl
import os
import re
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from connector_peer import EDGE, HELLO, R1, End, fds, greet, pattern
from connector_peer import data as bytes_data
from connector_peer import opening as bytes_opening
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import IN, Recorder, ScriptedHost, Stage, front, middle, receiver_only

from omni_fsm.connectors import Hello, memory_pair, shm_receiver, shm_sender, wire
from omni_fsm.connectors.arena import SEALS, OwnedFd
from omni_fsm.connectors.arrival import checked_frame
from omni_fsm.connectors.outgoing import OutgoingFrames
from omni_fsm.connectors.port import EdgeRefused, PeerBack, PeerLost, Stopped
from omni_fsm.connectors.shm_bodies import ShmPacket
from omni_fsm.payload import decode, encode
from omni_fsm.payload import wire as payload_wire
from omni_fsm.protocol.errors import OmniFsmError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Later, Offer, Refuse, Register, StageConfig, StageRuntime, StageThreads, TakenKind

KIB, MIB = 1 << 10, 1 << 20


def fuzz(examples: int) -> settings:
    """Repeatable; what a test asserts of all its examples together needs them all."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


# -- hostile bodies ----------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, -1])
TREES = [None, 7, b"x" * 200, {"codes": torch.arange(6).view(2, 3), 7: (1, -1.5, "größe")}, [[[]], torch.empty(0, 4)]]
WIRES = [b"".join(encode(tree).parts) for tree in TREES]
DTYPES = st.sampled_from(["float32", "bool", "uint8", "complex128", "object", ""])
NODES = st.one_of(
    st.none(),
    st.integers(-9, 9),
    st.text(max_size=4),
    st.tuples(st.sampled_from(["list", "tuple", "bytes", "no such tag"]), NUMBERS),
    st.tuples(st.sampled_from(["tensor", "array"]), DTYPES, st.lists(NUMBERS, max_size=4)),
    st.tuples(st.just("dict"), st.lists(st.text(max_size=1) | st.integers(0, 2), max_size=3)),
    st.tuples(st.just("number"), DTYPES, st.binary(max_size=16)),
    st.tuples(st.just("int"), st.binary(max_size=9)),
)


def signed(header: bytes, rest: bytes = b"") -> bytes:
    """A payload with a sound checksum around any header."""
    prefix = payload_wire.PREFIX.pack(payload_wire.MAGIC, payload_wire.VERSION, len(header), zlib.crc32(header))
    return prefix + header + (bytes(-(len(prefix) + len(header)) % 64) + rest if rest else b"")


def altered(octets: bytes, changes: list[tuple[int, int]]) -> bytes:
    target = bytearray(octets)
    for at, value in changes:
        target[at % len(target)] = value
    return bytes(target)


CHANGES = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 255)), min_size=1, max_size=4)
HOSTILE_BODIES = st.one_of(
    st.binary(max_size=80),
    st.builds(altered, st.sampled_from(WIRES), CHANGES),
    st.builds(lambda octets, length: octets[:length], st.sampled_from(WIRES), st.integers(0, 200)),
    st.builds(lambda octets, tail: octets + tail, st.sampled_from(WIRES), st.binary(min_size=1, max_size=9)),
    st.builds(
        lambda nodes, rest: signed(msgspec.msgpack.encode(nodes), rest),
        st.lists(NODES, max_size=5),
        st.binary(max_size=80),
    ),
    st.builds(
        lambda octets, changes: signed(altered(octets[16:40], changes), octets[64:]),
        st.sampled_from(WIRES[2:4]),
        CHANGES,
    ),
)

# -- the inbox ---------------------------------------------------------------------------------------------------------

WELL = Identity("well", 1)
HOSTILE = [Identity(external_id, generation) for external_id in "ab" for generation in (1, 2)]
SETTINGS: dict[str, Any] = {
    "input_wait_s": 10_000.0,
    "unclaimed_s": 30.0,
    "unclaimed_max": 3,
    "requests_max": 6,
    "tombstones_max": 5,
    "tombstone_s": 60.0,
    "window_frames": 3,
    "window_bytes": 600 * KIB,
    "retries": 1,
}
HELD_FRAMES_MAX, HELD_BYTES_MAX = 8, 512 * KIB
REASONS = {
    "missing": r"frame_ahead: seq \d+ came, \d+ was expected",
    "no payload": r"frame_invalid: PayloadDecodeError: payload refused at byte \d+: .*",
    "outside": r"frame_invalid: outside",
    "no end": r"frame_invalid: an end with outcome .*",
    "no credit": r"frame_invalid: seq \d+ came beyond the credit of 3 frames, 614400 bytes",
    "no memory": r"get_given_up: (MemoryError|OSError|ValueError): .*",
    "unclaimed": r"unclaimed",
    "refused": r"nobody wants it|6 requests are registered, no more are taken",
    "its own": r"the sender's words|cancelled|released|host|done",
    "deadline": r"deadline_passed: no frame for 10000 s",
}
FAULTS = [RemoteProtocolError("outside"), OSError("not yet"), MemoryError("huge"), ValueError("odd")]


@dataclass(frozen=True)
class Coming:
    """A frame that comes; ``declared`` is how many bytes it says that it has, where that is not the truth."""

    identity: Identity
    kind: FrameKind
    seq: int
    cause: Cause | None
    segment: int
    segment_end: bool
    body: bytes | str | None
    faults: list[Exception]
    declared: int | None


IDENTITIES = st.sampled_from(HOSTILE)
CAUSES = st.sampled_from([Cause(outcome, "the sender's words") for outcome in Outcome])
SOUND, LARGE = "sound", "large"
COMING = st.builds(
    Coming,
    IDENTITIES,
    st.sampled_from([FrameKind.DATA, FrameKind.DATA, FrameKind.DATA, FrameKind.OPEN, FrameKind.END]),
    st.integers(-1, 5) | NUMBERS,
    st.none() | CAUSES,
    NUMBERS,
    st.booleans(),
    st.just(SOUND) | st.sampled_from([SOUND, LARGE, None]) | HOSTILE_BODIES,
    st.just([]) | st.lists(st.sampled_from(FAULTS), max_size=5),
    st.none(),
)
HUGE = st.builds(
    Coming,
    IDENTITIES,
    st.just(FrameKind.DATA),
    st.integers(0, 2),
    st.none(),
    st.just(0),
    st.just(False),  # noqa: FBT003 - a strategy
    st.just(SOUND),
    st.just([MemoryError("huge")] * 9),
    st.sampled_from([2**31, 2**40, 2**62]),
)
INORDER = st.tuples(st.just("in order"), IDENTITIES, st.integers(1, 6), st.sampled_from([SOUND, LARGE]))
STEPS = st.one_of(
    COMING,
    COMING,
    HUGE,
    INORDER,
    st.tuples(st.sampled_from(["register", "take"]), IDENTITIES),
    st.tuples(st.sampled_from(["register", "take", "cancel", "release", "fail", "submit", "end"]), IDENTITIES),
    st.tuples(st.just("time"), st.sampled_from([0.05, 1.0, 40.0, 11_000.0])),
    st.tuples(st.just("flood"), st.integers(1, 12)),
    st.tuples(st.just("well")),
)
STAGES = st.sampled_from([receiver_only, middle, front])
OFFERS = st.sampled_from([Later(), Later(), Refuse("nobody wants it"), Register("")])


class World:
    """A stage, its hostile peer, and one stream that behaves."""

    def __init__(self, make: Callable[..., Stage], offer: Offer, known: list[Identity]) -> None:
        self.offer = offer
        self.stage = make(answer=self.answer, **SETTINGS)
        self.flooded = 0
        self.brought = self.taken = 0
        self.next_seq: dict[Identity, int] = {}
        self.stage.open("well", WELL)
        self.stage.come(Frame(IN, WELL, FrameKind.OPEN))
        for identity in known:
            self.stage.open(name_of(identity), identity)

    def answer(self, identity: Identity) -> Offer:
        return Register(name_of(identity)) if isinstance(self.offer, Register) else self.offer

    def do(self, step: Any) -> None:
        match step:
            case Coming():
                self.bring(step)
            case ("in order", identity, count, body):
                self.bring_in_order(identity, count, body)
            case ("time", seconds):
                self.pass_time(seconds)
            case ("flood", count):
                self.flood(count)
            case ("well",):
                self.be_well()
            case (what, identity):
                with contextlib.suppress(OmniFsmError):  # a wrong call of the host, named as such
                    self.call(what, identity)
        self.stage.run()
        self.check()

    def pass_time(self, seconds: float) -> None:
        if self.taken == self.brought:
            self.be_well()  # the clock of a stream runs only while it waits
        self.stage.pass_time(seconds)
        for name in self.stage.collect().failed:
            self.stage.runtime.release(name)

    def flood(self, count: int) -> None:
        for _ in range(count):
            self.flooded += 1
            self.stage.come(Frame(IN, Identity(f"flood {self.flooded}", 1), FrameKind.OPEN))

    def bring(self, coming: Coming) -> None:
        frame = Frame(IN, coming.identity, coming.kind, coming.segment, coming.seq, coming.segment_end, coming.cause)
        body = body_of(coming) if frame.uses_credit else None  # no connector lets any other have one
        arrival = self.stage.source.bring(frame, faults=coming.faults)
        arrival._body, arrival.nbytes = body, len(body or b"") if coming.declared is None else coming.declared
        self.stage.run()

    def bring_in_order(self, identity: Identity, count: int, body: str) -> None:
        for _ in range(count):
            seq = self.next_seq.get(identity, 0)
            self.next_seq[identity] = seq + 1
            self.bring(Coming(identity, FrameKind.DATA, seq, None, 0, False, body, [], None))  # noqa: FBT003 - a value

    def call(self, what: str, identity: Identity) -> None:
        runtime, name = self.stage.runtime, name_of(identity)
        match what:
            case "register":
                runtime.register(name, identity)
            case "take":
                self.take(identity)
            case "fail":
                runtime.fail(name, "host")
            case "submit":
                runtime.submit_chunk(name, 1)
            case _:
                getattr(runtime, what)(name)

    def take(self, identity: Identity) -> None:
        """Whatever is given came under this very identity."""
        assert of(self.stage.take(name_of(identity)).payload) in (None, str(identity))

    def be_well(self) -> None:
        """One more frame of the stream that behaves, taken when its window is full."""
        frame = Frame(IN, WELL, FrameKind.DATA, seq=self.brought, body=encode(pattern(self.brought, 900)))
        self.brought += 1
        self.stage.come(frame)
        if self.brought - self.taken == SETTINGS["window_frames"]:
            self.take_well()

    def take_well(self) -> None:
        while self.taken < self.brought:
            taken = self.stage.take("well")
            assert (taken.kind, taken.payload) == (TakenKind.CHUNK, pattern(self.taken, 900))
            self.taken += 1

    def check(self) -> None:
        """No more is held than the settings allow, and nothing failed but streams of the hostile peer."""
        residue, tables = self.stage.runtime.residue(), self.stage.runtime._core.tables
        assert residue["requests"] <= SETTINGS["requests_max"]
        assert residue["unclaimed"] <= SETTINGS["unclaimed_max"]
        assert residue["tombstones"] <= 2 * SETTINGS["tombstones_max"]
        for waiting in tables.unclaimed.values():
            assert len(waiting.frames) <= HELD_FRAMES_MAX
            assert sum(held.nbytes for held in waiting.frames) <= HELD_BYTES_MAX
        for request in tables.snapshot():
            staged = request.receiver.staged
            assert len(staged) <= HELD_FRAMES_MAX
            next_seq = request.receiver.next_seq
            assert [frame.seq for frame in staged] == list(range(next_seq - len(staged), next_seq))
            assert {of(frame.payload) for frame in staged} <= {None, str(request.identity)}
            assert len(staged) <= 1 or sum(frame.nbytes for frame in staged) <= SETTINGS["window_bytes"]
        for failure in self.stage.seen.failures:
            assert failure.what == "failed", failure
            assert failure.identity != WELL, failure
            assert kind_of(failure.cause.reason), failure

    def finish(self) -> None:
        """The stream that behaves ends well; then nothing is left of anybody."""
        self.take_well()
        self.stage.come(Frame(IN, WELL, FrameKind.END, seq=self.brought, cause=Cause(Outcome.OK)))
        assert self.stage.take("well").kind is TakenKind.END
        self.stage.runtime.end("well")
        floods = [Identity(f"flood {number + 1}", 1) for number in range(self.flooded)]
        for name in [*map(name_of, HOSTILE + floods), "well"]:
            self.stage.runtime.release(name)
        assert self.stage.rest() == {}
        self.check()


def of(payload: Any) -> str | None:
    """Whose a sound payload says that it is."""
    return payload.get("of") if isinstance(payload, dict) else None


def name_of(identity: Identity) -> str:
    return f"{identity.external_id}/{identity.generation}"


def body_of(coming: Coming) -> bytes | None:
    if coming.body in (SOUND, LARGE):
        size = 250 * KIB if coming.body == LARGE else 20
        return b"".join(encode({"of": str(coming.identity), "x": bytes(size)}).parts)
    assert not isinstance(coming.body, str)
    return coming.body


def kind_of(reason: str) -> str:
    return next((kind for kind, text in REASONS.items() if re.fullmatch(text, reason, re.DOTALL)), "")


def test_a_hostile_sender_fails_its_own_streams_only_and_costs_no_more_than_the_settings_allow() -> None:
    reached: set[str] = set()

    @fuzz(300)
    @given(STAGES, OFFERS, st.sampled_from([HOSTILE, []]), st.lists(STEPS, min_size=5, max_size=40))
    def attack(make: Callable[..., Stage], offer: Offer, known: list[Identity], steps: list[Any]) -> None:
        world = World(make, offer, known)
        for step in steps:
            world.do(step)
        world.finish()
        stopped = {cause.reason for _, cause in world.stage.source.stopped}
        reached.update(map(kind_of, stopped | {reason for _, _, reason in world.stage.seen.reasons}))

    attack()
    missing = sorted(REASONS.keys() - reached)
    assert len(missing) <= 2, missing


# -- packets -----------------------------------------------------------------------------------------------------------

ARENA_BYTES, LIMIT_BYTES = 64 * KIB, 48 * KIB
LAST_TEN = ARENA_BYTES - 10
IN_THE_ARENA = {
    "type": "frame",
    "id": "r1",
    "generation": 1,
    "kind": "data",
    "seq": 0,
    "place": "arena",
    "nbytes": 10,
    "offset": LAST_TEN,
}
HEADERS: list[dict[str, Any]] = [
    {"type": "frame", "id": "r1", "generation": 1, "kind": "data", "seq": 0},
    IN_THE_ARENA,
    {**IN_THE_ARENA, "offset": LAST_TEN + 1},
    {**IN_THE_ARENA, "offset": 0, "nbytes": LIMIT_BYTES + 1},
    {"type": "frame", "id": "r1", "generation": 1, "kind": "data", "seq": 0, "place": "own", "nbytes": 100},
    {"type": "frame", "id": "r2", "generation": 1, "kind": "open"},
    {"type": "frame", "id": "r1", "generation": 2, "kind": "end", "outcome": "error", "reason": "boom", "at_ns": 5},
    {"type": "credit", "id": "r1", "generation": 1, "frames": 8, "nbytes": 900, "taken_frames": 0, "taken_bytes": 0},
    {"type": "credit", "id": "r1", "generation": 1, "frames": 8, "nbytes": 900, "taken_frames": 9, "taken_bytes": 0},
    {"type": "stop", "id": "r1", "generation": 1, "outcome": "cancelled", "reason": "enough", "at_ns": 5},
    {"type": "ack", "upto": 0},
    {"type": "ack", "upto": 7},
    {"type": "hello", "version": 1, "spec_digest": "d1", "from_stage": "thinker", "to_stage": "talker", "mode": "chunks",
     "max_frame_bytes": 1 << 20, "arena_bytes": ARENA_BYTES},
]  # fmt: skip
FRAMES, NOTICES, HELLOS = HEADERS[:7], HEADERS[7:12], HEADERS[12:]
COUNTS = st.sampled_from([0, 1, 10, 100, ARENA_BYTES - 9, ARENA_BYTES, 3 * MIB, 2**62, 2**63 - 1])
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(["nbytes", "offset", "upto", "taken_frames", "taken_bytes", "seq", "segment", "frames"], COUNTS),
    "kind": st.sampled_from(["data", "open", "end"]),
    "outcome": st.sampled_from(["ok", "error", "cancelled", "done", None]),
    "place": st.sampled_from(["none", "inline", "arena", "own"]),
}
VALUES = st.one_of(
    NUMBERS.map(lambda number: number * 2 + 1 if number > 2**62 else number),
    st.sampled_from(["", "r1", "x" * 5_000, "é" * 9_000]),
    st.none() | st.booleans() | st.binary(max_size=4) | st.floats() | st.just([]),
)


def prefixed(header: object, rest: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return len(encoded).to_bytes(4, "little") + encoded + rest


RARELY = st.sampled_from([False] * 6 + [True] + [False] * 5)


@st.composite
def packets(draw: st.DrawFn, headers: list[dict[str, Any]] = HEADERS) -> bytes:
    """A sound packet with fields changed or missing, or with bytes changed, or cut; or noise."""
    if draw(RARELY):
        return draw(st.binary(min_size=1, max_size=64))
    header = dict(draw(st.sampled_from(headers)))
    for name in draw(st.lists(st.sampled_from([*sorted(header), "place", "nbytes", "outcome", "color"]), max_size=2)):
        header[name] = draw(VALUES if draw(RARELY) else PLAUSIBLE.get(name, VALUES))
    if draw(RARELY):
        header.pop(draw(st.sampled_from(sorted(header))))
    packet = prefixed(header, b"0123456789" if header.get("place") == "inline" or draw(RARELY) else b"")
    if draw(RARELY):
        packet = altered(packet, draw(CHANGES))
    return packet[: draw(st.integers(1, len(packet)))] if draw(RARELY) else packet


class NoLink:
    """A link that has room for all and sends nothing."""

    def fits(self, nbytes: int) -> bool:
        return True


@fuzz(1_000)
@given(packets())
def test_a_packet_is_a_sound_frame_or_notice_or_is_refused(packet: bytes) -> None:
    arena = memoryview(bytes(ARENA_BYTES))
    with contextlib.suppress(RemoteProtocolError):
        header, frame = checked_frame(EDGE, ShmPacket(memoryview(packet), [], arena), LIMIT_BYTES)
        body = ShmPacket(memoryview(packet), [], arena).load(header)
        assert body.nbytes == header.nbytes <= LIMIT_BYTES
        assert header.place != "arena" or header.offset + header.nbytes <= ARENA_BYTES
        assert frame.seq >= (0 if frame.uses_credit else -1)
        assert (frame.cause is not None) == (frame.kind is FrameKind.END)
        assert frame.segment >= 0
    with contextlib.suppress(RemoteProtocolError):
        notice, _ = wire.unpacked(EDGE, memoryview(packet))
        outgoing = OutgoingFrames(EDGE, NoLink())  # type: ignore[arg-type]
        outgoing._ledger.count(bytes_opening(R1), 0)
        signal = outgoing.take_notice(notice)
        assert outgoing.accounts == 1  # nobody is remembered for a notice
        assert not isinstance(notice, wire.AckPacket) or notice.upto == 0
        if isinstance(notice, wire.CreditPacket) and (notice.id, notice.generation) == ("r1", 1):
            assert (notice.taken_frames, notice.taken_bytes) == (0, 0)  # nothing was put
        assert not isinstance(signal, Stopped) or signal.cause.outcome is not Outcome.OK


# -- edges -------------------------------------------------------------------------------------------------------------

REGIONS = st.tuples(
    st.sampled_from([0, 10, 100, ARENA_BYTES]), st.sampled_from([SEALS, 0, SEALS & ~fcntl.F_SEAL_SHRINK])
)


@st.composite
def garbage(draw: st.DrawFn, *headers: list[dict[str, Any]]) -> tuple[bytes, list[tuple[int, int]]]:
    """A packet made of some of these headers, and the descriptors that come with it."""
    packet = draw(packets(headers[0] if len(headers) == 1 else draw(st.sampled_from(headers))))
    if b"own" in packet and not draw(RARELY):
        return packet, [draw(REGIONS)]
    return packet, draw(st.lists(REGIONS, min_size=1, max_size=3)) if draw(RARELY) else []


def memfds(wanted: list[tuple[int, int]]) -> list[OwnedFd]:
    opened = []
    for nbytes, seals in wanted:
        fd = OwnedFd(os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.number, nbytes)
        fcntl.fcntl(fd.number, fcntl.F_ADD_SEALS, seals)
        opened.append(fd)
    return opened


@contextlib.contextmanager
def edge_folder() -> Iterator[Path]:
    """A place to meet, for each example a new one."""
    with tempfile.TemporaryDirectory() as name:  # mode 0700
        yield Path(name)


@contextlib.contextmanager
def closing(*ends: End) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.connector.close()


def talk(sender: End, receiver: End, identity: Identity) -> None:
    """A stream that behaves passes from end to end."""
    for frame in (bytes_opening(identity), bytes_data(0, pattern(0, 40_000), identity)):
        until_put(sender, receiver, frame)
    receiver.until(
        lambda: receiver.frames and receiver.frames[-1][0].identity == identity and receiver.frames[-1][0].seq == 0
    )
    assert receiver.frames[-1][1] == pattern(0, 40_000)


def until_put(sender: End, receiver: End, frame: Frame) -> None:
    sender.until(lambda: sender.connector.put(frame).status == "stored", receiver)


TOLD = st.lists(
    st.tuples(st.just("to the receiver"), garbage(FRAMES, FRAMES, HEADERS))
    | st.tuples(st.just("to the sender"), garbage(NOTICES, NOTICES, HEADERS)),
    min_size=1,
    max_size=6,
)
LOSSES = (
    "has no header",
    "says its header ends at",
    "cannot be decoded",
    "came where only frames come",
    "came where only notices come",
    "inline bytes, announced were",
    "outside the arena",
    "descriptors came with a packet",
    "shared region has",
    "acknowledged, the next is",
    "taken, but",
)


def test_an_edge_that_is_told_garbage_is_lost_with_a_reason_and_meets_again() -> None:
    before, reasons = fds(), set[str]()

    @fuzz(250)
    @given(TOLD)
    def attack(told: list[Any]) -> None:
        reasons.update(losses_of(told))

    attack()
    assert fds() == before
    missing = [words for words in LOSSES if not any(words in reason for reason in reasons)]
    assert len(missing) <= 3, missing


def losses_of(told: list[Any]) -> set[str]:
    """An edge both of whose ends also say what no end would say, and why it was lost to whom."""
    with edge_folder() as folder:
        sender = End(shm_sender(HELLO, folder, arena_bytes=ARENA_BYTES, retry_s=0.001))
        receiver = End(shm_receiver(HELLO, folder, max_frame_bytes=LIMIT_BYTES, retry_s=0.001))
        with closing(sender, receiver):
            greet(sender, receiver)
            until_put(sender, receiver, bytes_opening(Identity("r1", 1)))
            for whom, (packet, descriptors) in told:
                liar = sender if whom == "to the receiver" else receiver
                liar.connector._link._send([packet], memfds(descriptors))
                for end in (sender, receiver, sender, receiver):
                    end.turn()
                if not sender.connector.health().connected:
                    assert sum(sender.connector.health().entries.values()) == 0
                greet(sender, receiver)
                until_put(sender, receiver, bytes_opening(Identity("r1", 1)))
            talk(sender, receiver, Identity("good", 7))
            for end in (sender, receiver):
                assert end.seen(PeerBack) == end.seen(PeerLost) + 1
            return {
                signal.reason for end in (sender, receiver) for signal in end.signals if isinstance(signal, PeerLost)
            }


@fuzz(150)
@given(garbage(HELLOS))
def test_a_hello_is_met_refused_or_lost_with_a_reason(said: tuple[bytes, list[tuple[int, int]]]) -> None:
    with edge_folder() as folder:
        receiver = End(shm_receiver(HELLO, folder, retry_s=0.001))
        with closing(receiver):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.connect(os.fspath(next(folder.iterdir())))
                say(raw, *said)
                receiver.until(lambda: receiver.signals)
            if isinstance(receiver.signals[0], PeerBack):
                receiver.until(lambda: receiver.seen(PeerLost))
            elif isinstance(receiver.signals[0], EdgeRefused):
                assert list(folder.iterdir()) == []
            else:
                assert receiver.signals == [PeerLost(str(receiver.faults[0]))]


# -- a stage with threads ----------------------------------------------------------------------------------------------


class Attacked:
    """A stage with its threads: one edge has a hostile peer, the other one that behaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = shm_receiver(HELLO, folder, max_frame_bytes=LIMIT_BYTES, retry_s=0.001)
        sink, listening = memory_pair(Hello(Edge("talker", "next")))
        self.next = End(listening, grants=True)
        self.seen = Recorder()
        self.runtime = StageRuntime(
            StageConfig(stage="talker", reconnect_s=60.0, tombstone_s=0.01),
            source=self.source,
            sink=sink,
            host=ScriptedHost(lambda identity: Register(name_of(identity))),
            observers=(self.seen,),
        )
        self.threads = StageThreads(self.runtime)
        self.served = 0

    def suffer(self, said: list[Any]) -> None:
        """A sender says a good hello, then garbage, and leaves."""
        reported = len(self.edge_failures())
        self.next.until(lambda: list(self.folder.iterdir()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(os.fspath(next(self.folder.iterdir())))
            raw.recv(wire.MAX_PACKET_BYTES)  # the stage's hello: it listens no more
            say(raw, prefixed(HELLOS[0]), [(ARENA_BYTES, SEALS)])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
                for packet, descriptors in said:
                    say(raw, packet, descriptors)
        self.next.until(lambda: list(self.folder.iterdir()))
        expected = reported + any(is_refused(*one) for one in said)
        self.next.until(lambda: len(self.edge_failures()) >= expected)
        assert len(self.edge_failures()) == expected
        for failed in self.runtime.collect_feedback().failed:
            self.runtime.release(failed)

    def edge_failures(self) -> list[str]:
        assert {failure.what for failure in self.seen.failures} <= {"failed", "edge"}, self.seen.failures
        return [failure.cause.reason for failure in self.seen.failures if failure.what == "edge"]

    def serve_the_other_edge(self) -> None:
        self.served += 1
        identity = Identity("served", self.served)
        assert self.runtime.register(f"served {self.served}", identity).accepted
        assert self.runtime.submit_chunk(f"served {self.served}", pattern(self.served, 5_000)).accepted
        self.runtime.end(f"served {self.served}")
        self.next.until(
            lambda: (
                self.next.frames and self.next.frames[-1][0].identity == identity and self.next.frames[-1][0].seq == 1
            )
        )
        bodies = [body for frame, body in self.next.frames if frame.identity == identity and body is not None]
        assert [decode(body) for body in bodies] == [pattern(self.served, 5_000)]

    def serve_a_good_sender(self) -> None:
        sender = End(shm_sender(HELLO, self.folder, retry_s=0.001))
        good, octets = Identity("good", 1), pattern(0, 40_000)
        with closing(sender):
            sender.until(lambda: sender.seen(PeerBack))
            for frame in (
                Frame(EDGE, good, FrameKind.OPEN),
                Frame(EDGE, good, FrameKind.DATA, seq=0, body=encode(octets)),
            ):
                sender.put(frame)
            sender.until(lambda: name_of(good) in self.runtime.collect_feedback(0.01).ready)
            assert self.runtime.take(name_of(good)).payload == octets


def is_refused(packet: bytes, descriptors: list[tuple[int, int]]) -> bool:
    """Whether this packet must cost its sender the edge."""
    try:
        checked_frame(
            EDGE, ShmPacket(memoryview(packet), memfds(descriptors), memoryview(bytes(ARENA_BYTES))), LIMIT_BYTES
        )
    except RemoteProtocolError:
        return True
    return False


def test_the_threads_of_a_stage_outlive_every_hostile_sender_and_serve_the_others(tmp_path: Path) -> None:
    attacked = Attacked(tmp_path / "edges")
    attacked.threads.start()
    try:

        @fuzz(60)
        @given(st.lists(garbage(FRAMES, HEADERS), min_size=1, max_size=4))
        def attack(said: list[Any]) -> None:
            attacked.suffer(said)
            attacked.serve_the_other_edge()

        attack()
        assert len(attacked.edge_failures()) > 20
        attacked.serve_a_good_sender()
    finally:
        attacked.threads.shutdown(0.0)
        attacked.next.connector.close()


def say(raw: socket.socket, packet: bytes, descriptors: list[tuple[int, int]]) -> None:
    opened = memfds(descriptors)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.number for fd in opened]))] if opened else []
    raw.sendmsg([packet], rights)
