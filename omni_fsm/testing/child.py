"""One end of an edge in a process of its own, to be killed: what the connector rules put at the other end."""

import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from omni_fsm.connectors.port import Connector, PeerBack, PutStatus, Signal
from omni_fsm.protocol.frames import Frame, FrameKind
from omni_fsm.protocol.identity import Identity
from omni_fsm.testing.edge import WIDE_BYTES, WIDE_FRAMES, BytesBody, broken, pattern

OpenEnd = Callable[[], Connector]
"""Opens one end of an edge. Called in a process of its own, so it is pickled: a `functools.partial` of a function, say."""

_TURN_S = 0.01
_START_S = 60.0
"""How long a process may take to import what it needs; a rule's patience begins after it."""


def frame_of(end: Connector, identity: Identity, seq: int, nbytes: int = 0) -> Frame:
    """An opening (seq -1), or a chunk of a stream with the bytes that both processes know."""
    if seq < 0:
        return Frame(end.edge, identity, FrameKind.OPEN)
    body = BytesBody((memoryview(pattern(seq, nbytes)),))
    return Frame(end.edge, identity, FrameKind.DATA, seq=seq, body=body)


def send_all(pipe: Connection, open_end: OpenEnd, identity: Identity, sizes: list[int]) -> None:
    """Put an opening and chunks of these sizes, say so, then wait to be killed. Runs in the child."""
    pipe.send("started")
    end = open_end()
    signals: list[Signal] = []
    frames = [frame_of(end, identity, seq, nbytes) for seq, nbytes in enumerate([0, *sizes], -1)]
    while frames:
        end.wait(_TURN_S)
        signals += end.signals()
        while PeerBack() in signals and frames and end.put(frames[0]).status is PutStatus.STORED:
            frames.pop(0)
    pipe.send(len(sizes))
    while True:
        end.wait(None)
        end.signals()


def receive_all(pipe: Connection, open_end: OpenEnd) -> None:
    """Take all that comes, grant what was taken, say of each frame its seq and checksum. Runs in the child."""
    pipe.send("started")
    end = open_end()
    taken: dict[Identity, tuple[int, int]] = {}
    while True:
        end.wait(None)
        while (arrival := end.get()) is not None:
            frame, body = arrival.frame, bytes(arrival.load() or b"")
            frames, nbytes = taken.get(frame.identity, (0, 0))
            if frame.uses_credit:
                frames, nbytes = frames + 1, nbytes + len(body)
            taken[frame.identity] = frames, nbytes
            end.grant(frame.identity, frames=WIDE_FRAMES, nbytes=WIDE_BYTES, taken_frames=frames, taken_bytes=nbytes)
            pipe.send((frame.identity.generation, frame.seq, zlib.crc32(body)))
        end.signals()


@dataclass(frozen=True)
class Child:
    """A process with one end."""

    process: BaseProcess
    pipe: Connection

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def said(self, rule: str, patience_s: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """The next that it says; its being silent breaks the rule."""
        for _ in range(max(1, round(patience_s / _TURN_S))):
            if self.pipe.poll(_TURN_S):
                return self.pipe.recv()
            if not self.process.is_alive():
                broken(rule, f"the process of the other end died by itself, exit code {self.process.exitcode}")
            meanwhile()
        return broken(rule, f"the process of the other end did not get on within {patience_s} s")


@contextmanager
def child(rule: str, target: Callable[..., None], *args: Any) -> Iterator[Child]:
    """A process that runs ``target`` with its end of a pipe; killed at the latest when the context is left."""
    context = multiprocessing.get_context("forkserver")  # clean processes, without another import of all this
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    started = Child(process, ours)
    try:
        started.said(rule, _START_S)
        yield started
    finally:
        started.kill()
        process.close()
        ours.close()
