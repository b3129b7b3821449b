"""What the connector tests share: frames, an end that is stepped by hand, and stages that run in other processes."""

import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from omni_fsm.connectors import LinkConnector, shm_receiver, shm_sender
from omni_fsm.connectors.port import BUSY, STORED, Hello, PeerBack, PeerLost, PutOutcome, Signal
from omni_fsm.protocol.errors import RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity

EDGE = Edge("thinker", "talker")
HELLO = Hello(EDGE, spec_digest="d1")
R1 = Identity("r1", 1)
PATIENCE_S = 20.0
NOTICED_S = 5.0
"""A death is noticed within milliseconds; a busy machine may take a while to run who notices it."""
WIDE = {"frames": 1 << 20, "nbytes": 1 << 40}


@dataclass(frozen=True)
class Blob:
    """A body: any bytes, in one or more parts."""

    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def owned(self) -> "Blob":
        return Blob((memoryview(b"".join(self.parts)),))


def blob(*parts: bytes | bytearray) -> Blob:
    return Blob(tuple(memoryview(part) for part in parts))


def pattern(seq: int, nbytes: int) -> bytes:
    """Bytes that depend on the seq and on the position, in a way that no misplaced block survives."""
    return ((np.arange(nbytes, dtype=np.uint32) * 2_654_435_761 + seq * 97) >> 13).astype(np.uint8).tobytes()


def opening(identity: Identity = R1) -> Frame:
    return Frame(EDGE, identity, FrameKind.OPEN)


def data(seq: int, body: bytes | None = b"x", identity: Identity = R1) -> Frame:
    return Frame(EDGE, identity, FrameKind.DATA, seq=seq, body=None if body is None else blob(body))


def failed_end(reason: str = "out of memory", identity: Identity = R1) -> Frame:
    return Frame(EDGE, identity, FrameKind.END, cause=Cause(Outcome.ERROR, reason, 17))


@dataclass
class End:
    """One end of an edge, and all that came out of it."""

    connector: LinkConnector
    frames: list[tuple[Frame, bytes | None]] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    faults: list[RemoteProtocolError] = field(default_factory=list)
    grants: bool = False

    def turn(self, timeout_s: float = 0.0) -> None:
        """One round of the loop that an I/O thread repeats."""
        self.connector.wait(timeout_s)
        while self.get_once():
            pass
        self.signals += self.connector.signals()

    def get_once(self) -> bool:
        try:
            arrival = self.connector.get()
        except RemoteProtocolError as error:
            self.faults.append(error)
            return False
        if arrival is None:
            return False
        body = arrival.load()
        self.frames.append((arrival.frame, None if body is None else bytes(body)))
        if self.grants:
            grant_all(self, arrival.frame.identity)
        return True

    def until(self, condition: Callable[[], object], *others: "End") -> None:
        """Turn this end, and others, until something holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not in {PATIENCE_S} s; signals {self.signals} faults {self.faults}"
            self.turn(0.0 if others else 0.05)
            for other in others:
                other.turn(0.001)

    def put(self, frame: Frame) -> None:
        """Put it, waiting while the edge is busy."""
        outcomes: list[PutOutcome] = []

        def stored() -> bool:
            outcomes.append(self.connector.put(frame))
            return outcomes[-1] == STORED

        self.until(stored)
        assert outcomes[:-1] == [BUSY] * (len(outcomes) - 1)

    def seen(self, kind: type) -> int:
        return sum(isinstance(signal, kind) for signal in self.signals)


def taken(end: End, identity: Identity = R1) -> tuple[int, int]:
    bodies = [body or b"" for frame, body in end.frames if frame.identity == identity and frame.uses_credit]
    return len(bodies), sum(map(len, bodies))


def grant_all(end: End, identity: Identity = R1, **window: int) -> None:
    """Grant a window beyond all that was taken so far."""
    frames, nbytes = taken(end, identity)
    end.connector.grant(identity, **({**WIDE, **window}), taken_frames=frames, taken_bytes=nbytes)


def greet(*ends: End) -> None:
    """Turn the ends until each has met its peer."""
    first, *others = ends
    first.until(lambda: all(end.seen(PeerBack) > end.seen(PeerLost) for end in ends), *others)


def fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# -- stages in processes of their own ----------------------------------------------------------------------------------


def sending_stage(pipe: Connection, folder: str, sizes: list[int], *, forks: bool = False) -> None:
    """Open r1, put data of the given sizes, say how many were stored, then wait to be killed."""
    end = End(shm_sender(HELLO, folder))
    if forks and os.fork() == 0:
        pipe.send(os.getpid())
        os.read(pipe.fileno(), 1)  # returns when the test's end is closed
        os._exit(0)
    end.until(lambda: end.seen(PeerBack))
    end.put(opening())
    for seq, size in enumerate(sizes):
        end.put(data(seq, pattern(seq, size)))
    pipe.send(len(sizes))
    while True:
        end.connector.wait(None)
        end.connector.get()
        end.connector.signals()


def receiving_stage(pipe: Connection, folder: str) -> None:
    """Take all that comes; say of each frame, as it comes, its seq and checksum."""
    end = End(shm_receiver(HELLO, folder), grants=True)
    while True:
        end.connector.wait(None)
        while end.get_once():
            frame, body = end.frames[-1]
            pipe.send((str(frame.kind), frame.seq, zlib.crc32(body or b"")))
        end.connector.signals()


_context = multiprocessing.get_context("forkserver")  # starts clean processes, without another import of torch
_context.set_forkserver_preload(["omni_fsm.connectors", "numpy"])  # this module is not on the server's path


@dataclass
class Stage:
    """A stage in another process."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def hears(self) -> object:
        assert self.pipe.poll(PATIENCE_S), "the other process said nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.join(PATIENCE_S)


@contextmanager
def stage(target: Callable[..., None], folder: Path, *args: object, **kwargs: object) -> Iterator[Stage]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=target, args=(theirs, str(folder), *args), kwargs=kwargs, daemon=True)
    process.start()
    theirs.close()
    running = Stage(process, ours)
    try:
        yield running
    finally:
        running.kill()
        process.close()
        ours.close()
