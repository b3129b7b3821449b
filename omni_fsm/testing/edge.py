"""Drives both ends of an edge for the connector rules: puts, gets, and says which rule is broken."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final, NoReturn

import numpy as np

from omni_fsm.connectors.port import (
    Arrival,
    Connector,
    ConnectorClosedError,
    PutStatus,
    Signal,
)
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import MAX_GENERATION, FrameKey, Identity

Ends = tuple[Connector, Connector]
"""The sending end and the receiving end of one edge."""

R1: Final = Identity("r1", 1)
WIDE_FRAMES: Final = 1 << 20
WIDE_BYTES: Final = 1 << 40
MAX_RETRIES: Final = 20
MIN_TURNS: Final = 20  # a machine that stood still was not patient
MAX_IDLE_CPU: Final = 0.3
"""The part of an idle wait's time that its thread may compute."""
MAX_IDLE_WAITS: Final = 50
"""How often an idle wait may return before its time: on a busy machine one that spins computes little."""

IDS: Final = (
    Identity("../../etc/passwd", 0),
    Identity("/", MAX_GENERATION),
    Identity("a\0b", 7),
    Identity("x" * 4_000, 8),
    Identity("ünï-中文-🙂", 9),
    Identity("r1\n#1", 10),
)


def broken(rule: str, words: str) -> NoReturn:
    """Say that a rule is broken, and how.

    Raises:
        AssertionError: Always.
    """
    raise AssertionError(f"rule {rule}: {words}")


@dataclass(frozen=True)
class BytesBody:
    """A body: any bytes, in one or more parts."""

    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(part.nbytes for part in self.parts)

    def owned(self) -> "BytesBody":
        """The same bytes in one private part."""
        return BytesBody((memoryview(b"".join(self.parts)),))


def pattern(seq: int, nbytes: int) -> bytes:
    """Bytes that depend on the seq and on the position: no misplaced block survives a comparison."""
    return ((np.arange(nbytes, dtype=np.uint32) * 2_654_435_761 + seq * 97) >> 13).astype(np.uint8).tobytes()


def named(frame: Frame) -> str:
    """Name a frame in a message."""
    return f"frame {frame.kind} {frame.seq}" if frame.seq >= 0 else f"frame {frame.kind}"


def _joined(frame: Frame) -> bytes | None:
    return None if frame.body is None else b"".join(frame.body.parts)


class EdgeDriver:
    """Both ends of one edge, stepped by hand as the I/O threads of two stages would, and all that came out of them."""

    def __init__(self, ends: Ends, patience_s: float, settle_s: float) -> None:
        self.sender, self.receiver = ends
        self.patience_s, self.settle_s = patience_s, settle_s
        self.got: list[tuple[Frame, bytes | None]] = []
        self.told: list[Signal] = []  # signals of the sending end
        self.heard: list[Signal] = []  # signals of the receiving end
        self.window: tuple[int, int] | None = None  # granted anew with each frame, where it is given
        self.raised = "nothing"  # by the last put that raised
        self._again: set[FrameKey] = set()  # may come twice: a put of them was answered with "perhaps"
        self._seen: set[FrameKey] = set()
        self._taken: Counter[tuple[Identity, str]] = Counter()
        self._lives = {"sender", "receiver"}

    # -- frames ----------------------------------------------------------------------------------------------------

    def open(self, identity: Identity = R1) -> Frame:
        """An opening."""
        return Frame(self.sender.edge, identity, FrameKind.OPEN)

    def data(self, seq: int, body: bytes | bytearray | None = b"x", identity: Identity = R1) -> Frame:
        """A chunk; its body is borrowed, not copied."""
        carried = None if body is None else BytesBody((memoryview(body),))
        return Frame(self.sender.edge, identity, FrameKind.DATA, seq=seq, body=carried)

    def end(self, seq: int, identity: Identity = R1) -> Frame:
        """An end with outcome ok."""
        return Frame(self.sender.edge, identity, FrameKind.END, seq=seq, cause=Cause(Outcome.OK, at_ns=5))

    # -- steps -----------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float = 0.0) -> None:
        """One round of the loops that the I/O threads repeat."""
        if "sender" in self._lives:
            self.sender.wait(0.0)
            self.told += self.sender.signals()
        if "receiver" in self._lives:
            self.receiver.wait(timeout_s)
            while self.get_once():
                pass
            self.heard += self.receiver.signals()

    def get_once(self) -> bool:
        """Get one frame, if one has come. Returns whether one had."""
        arrival = self.receiver.get()
        if arrival is None:
            return False
        frame, loaded = arrival.frame, arrival.load()
        self.got.append((frame, None if loaded is None else bytes(loaded)))
        if frame.uses_credit and frame.key not in self._seen:
            self._taken[frame.identity, "frames"] += 1
            self._taken[frame.identity, "nbytes"] += len(loaded or b"")
        self._seen.add(frame.key)
        if self.window is not None:
            self.grant(*self.window, frame.identity)
        return True

    def next_arrival(self) -> Arrival:
        """The frame that comes next, neither loaded nor discarded."""
        deadline_s, turns = time.monotonic() + self.patience_s, 0
        while time.monotonic() < deadline_s or turns < MIN_TURNS:
            turns += 1
            self.sender.wait(0.0)
            self.told += self.sender.signals()
            self.receiver.wait(0.005)
            arrival = self.receiver.get()
            if arrival is not None:
                return arrival
            self.heard += self.receiver.signals()
        broken("exactly-once", f"a frame that was stored never came within {self.patience_s} s")

    def settle(self) -> None:
        """Give what is under way the time to arrive."""
        for _ in range(2):
            self.turn(self.settle_s)

    def until(self, rule: str, words: str | Callable[[], str], condition: Callable[[], object]) -> None:
        """Turn until something holds; the rule is broken when it does not."""
        deadline_s, turns = time.monotonic() + self.patience_s, 0
        while not condition():
            turns += 1
            if time.monotonic() > deadline_s and turns > MIN_TURNS:
                broken(rule, f"{words if isinstance(words, str) else words()} within {self.patience_s} s")
            self.turn(0.005)

    def put(self, frame: Frame) -> PutStatus:
        """What a put answers, after its retries."""
        for _ in range(MAX_RETRIES):
            status = self.put_once(frame)
            if status is not PutStatus.RETRY:
                return status
            self.turn(0.001)
        return PutStatus.RETRY

    def put_once(self, frame: Frame) -> PutStatus:
        """What one put answers. Called by: any thread."""
        try:
            status = self.sender.put(frame).status
        except ConnectorClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - "anything else that it raises counts as RETRY"
            status, self.raised = PutStatus.RETRY, repr(error)
        if status is PutStatus.RETRY:
            self._again.add(frame.key)
        return status

    def put_unread(self, frame: Frame) -> PutStatus:
        """What a put answers, after its retries, while the receiving end stands still."""
        status = PutStatus.RETRY
        for _ in range(MAX_RETRIES):
            if status is PutStatus.RETRY:
                status = self.put_once(frame)
        return status

    def store(self, rule: str, *frames: Frame) -> None:
        """Put frames that must be stored in the end, whatever room they wait for."""

        def stored(frame: Frame) -> bool:
            status = self.put(frame)
            if status is PutStatus.REFUSED:
                broken(rule, f"{named(frame)} of {frame.identity} was refused: {self.sender.put(frame).reason}")
            return status is PutStatus.STORED

        def unstored(frame: Frame) -> str:
            return f"{named(frame)} of {frame.identity} was not stored (puts raised {self.raised})"

        for frame in frames:
            self.until(rule, partial(unstored, frame), partial(stored, frame))

    def busy(self, rule: str, frame: Frame, why: str) -> None:
        """Put a frame that has no credit."""
        status = self.put(frame)
        if status is not PutStatus.BUSY:
            broken(rule, f"{named(frame)} was {status}, not busy, though {why}")

    def grant(self, frames: int, nbytes: int, identity: Identity = R1) -> None:
        """Grant credit, with what was taken so far."""
        self.receiver.grant(
            identity,
            frames=frames,
            nbytes=nbytes,
            taken_frames=self._taken[identity, "frames"],
            taken_bytes=self._taken[identity, "nbytes"],
        )

    def claim(self, identity: Identity = R1, frames: int = WIDE_FRAMES, nbytes: int = WIDE_BYTES) -> None:
        """Open a stream and give it credit."""
        opening = self.open(identity)
        self.store("free", opening)
        self.until("exactly-once", f"frame open of {identity} never came", lambda: opening.key in self._seen)
        self.grant(frames, nbytes, identity)
        self.settle()

    def was_told(self, signal: Signal) -> bool:
        """Whether the sending end has heard this signal."""
        return signal in self.told

    def close_sender(self) -> None:
        """Close the sending end; it is not driven any more."""
        self._lives.discard("sender")
        self.sender.close()

    def close_receiver(self) -> None:
        """Close the receiving end; it is not driven any more."""
        self._lives.discard("receiver")
        self.receiver.close()

    # -- checks ----------------------------------------------------------------------------------------------------

    def of(self, identity: Identity) -> list[tuple[Frame, bytes | None]]:
        """What has come of one life, with its bodies, in order."""
        return [(frame, body) for frame, body in self.got if frame.identity == identity]

    def expect(self, *frames: Frame, identity: Identity = R1) -> None:
        """The frames of a stream came, besides its open: each once, in order, whole."""
        put = [frame for frame in frames if frame.kind is not FrameKind.OPEN]

        def missing() -> list[str]:
            return [named(frame) for frame in put if frame.key not in self._seen]

        self.until("exactly-once", lambda: f"{missing()[0]} never came", lambda: not missing())
        self.settle()
        self.check_came(put, identity)

    def came(self, seq: int) -> bool:
        """Whether a frame of this seq has come."""
        return any(frame.seq == seq for frame, _ in self.got)

    def check_came(self, put: Sequence[Frame], identity: Identity = R1) -> None:
        """Compare what has come with what was put: every frame once, in order, with its header and body."""
        came = [(frame, body) for frame, body in self.of(identity) if frame.kind is not FrameKind.OPEN]
        counts = Counter(frame.key for frame, _ in came)
        for frame, _ in came:
            if counts[frame.key] > 1 and frame.key not in self._again:
                broken("exactly-once", f"{named(frame)} came {_times(counts[frame.key])}")
        for (before, _), (after, _) in pairwise(came):
            if 0 <= after.seq < before.seq and after.key not in self._again:
                broken("in-order", f"{named(after)} came after {named(before)}")
        wanted = {frame.key: frame for frame in put}
        for frame, body in came:
            if frame.key not in wanted:
                broken("exactly-once", f"{named(frame)} came and was not put")
            _check_equal(wanted[frame.key], frame, body)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"  # noqa: PLR2004 - twice is two


def _check_equal(put: Frame, got: Frame, body: bytes | None) -> None:
    """What came is what was put."""
    header = replace(put, body=None)
    if got != header or (got.cause and got.cause.at_ns) != (put.cause and put.cause.at_ns):
        broken("header", f"{named(put)} was put as {header} and came as {got}")
    sent = _joined(put)
    if sent == body:
        return
    if sent is None or body is None:
        broken("body", f"{named(put)} {_size(sent)} was put and came {_size(body)}")
    first = next((at for at, (a, b) in enumerate(zip(sent, body, strict=False)) if a != b), min(len(sent), len(body)))
    broken("body", f"{named(put)} {_size(sent)} was put, came {_size(body)} and differs from byte {first} on")


def _size(body: bytes | None) -> str:
    return "without a body" if body is None else f"with {len(body)} bytes"


def idle(end: Connector, idle_s: float, waits: list[tuple[float, int]]) -> None:
    """Repeat an idle wait until the time is over; say how much of it was computed, in seconds, and in how many waits."""
    deadline_s, before_s, count = time.monotonic() + idle_s, time.thread_time(), 0
    while (left_s := deadline_s - time.monotonic()) > 0:
        end.wait(left_s)
        end.signals()
        count += 1
    waits.append((time.thread_time() - before_s, count))
