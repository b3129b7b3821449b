"""The neighbours of a stage under test: the stage before it and the stage after it, as bare ends of memory edges.

They are no runtimes: what the stage sends is kept as it came, frame by frame, and what a real neighbour would do in between
(a grant for each frame taken, an end after a stop) is done here. Nothing blocks; the driver turns both.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omni_fsm.connectors import Hello, LinkConnector, MemoryEdge
from omni_fsm.connectors.port import PeerBack, PeerLost, PutStatus, Signal, Stopped
from omni_fsm.payload import decode, encode
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.testing.edge import WIDE_BYTES, WIDE_FRAMES


def cause(outcome: Outcome, reason: str = "") -> Cause:
    """A cause that arises now."""
    return Cause(outcome, reason, time.monotonic_ns())


class _Neighbour:
    """One end of an edge that may die and be replaced by a new one.

    Attributes:
        stage_end: The other end: the stage's own.
        end: This end, as it is now.
        heard: What this end has signalled, that of its predecessors included.
    """

    def __init__(self, edge: Edge, *, sends: bool) -> None:
        meeting = MemoryEdge()
        makers: list[Callable[[Hello], LinkConnector]] = [meeting.sender, meeting.receiver]
        self._make, make_other = makers if sends else reversed(makers)
        self._hello = Hello(edge)
        self.stage_end = make_other(self._hello)
        self.end = self._make(self._hello)
        self.heard: list[Signal] = []

    def die(self) -> None:
        """The neighbour's process is gone."""
        self.end.close()

    def return_as_new(self) -> None:
        """The neighbour's process was started again; it knows nothing."""
        self.end = self._make(self._hello)

    @property
    def is_met(self) -> bool:
        """Whether the stage's end and this one know each other."""
        met = sum(isinstance(signal, PeerBack) for signal in self.heard)
        return met > sum(isinstance(signal, PeerLost) for signal in self.heard) and self.end.health().connected


class Before(_Neighbour):
    """The stage before: queues frames, and puts each as soon as there is credit.

    Attributes:
        stops: The first stop of each request.
        idle_gets: How often the stage has asked for a frame and there was none.
    """

    def __init__(self, edge: Edge) -> None:
        super().__init__(edge, sends=True)
        self.stops: dict[Identity, Cause] = {}
        self._queues: dict[Identity, deque[Frame]] = {}
        self._seqs: dict[Identity, int] = {}
        self._over: set[Identity] = set()
        self.idle_gets = 0
        self._count_idle_gets()

    def _count_idle_gets(self) -> None:
        """Shadow ``get`` on this one object: a stage asks again, and gets nothing, once it has taken in what came."""
        get = self.stage_end.get

        def counted() -> Any:
            arrival = get()
            self.idle_gets += arrival is None
            return arrival

        vars(self.stage_end)["get"] = counted

    def turn(self) -> None:
        """Hear the stage, then put what can be put."""
        for signal in self.end.signals():
            self.heard.append(signal)
            if isinstance(signal, Stopped):
                self.stops.setdefault(signal.identity, signal.cause)
                self.fail(
                    signal.identity, cause(Outcome.CANCELLED, signal.cause.reason)
                )  # as any sender answers a stop
        for queue in self._queues.values():
            while queue and self.end.put(queue[0]).status is PutStatus.STORED:
                queue.popleft()

    @property
    def is_read(self) -> bool:
        """Whether the stage has got all that is out."""
        return self.stage_end.health().entries["arrived"] == 0

    def open(self, identity: Identity) -> None:
        """Announce a request."""
        self._seqs[identity] = 0
        self._queues[identity] = deque([Frame(self.end.edge, identity, FrameKind.OPEN)])

    def data(self, identity: Identity, payload: Any) -> None:
        """Feed one chunk; nothing of a request that is over."""
        self._feed(
            Frame(self.end.edge, identity, FrameKind.DATA, seq=self._seqs[identity], body=encode(payload).owned())
        )

    def finish(self, identity: Identity) -> None:
        """The input is complete."""
        self._feed(
            Frame(self.end.edge, identity, FrameKind.END, seq=self._seqs[identity], cause=cause(Outcome.OK)), over=True
        )

    def fail(self, identity: Identity, why: Cause) -> None:
        """The input ends early: what was fed and is not out yet is dropped."""
        if identity in self._queues and identity not in self._over:
            self._queues[identity] = deque(frame for frame in self._queues[identity] if frame.kind is FrameKind.OPEN)
            self._feed(Frame(self.end.edge, identity, FrameKind.END, cause=why), over=True)

    def _feed(self, frame: Frame, *, over: bool = False) -> None:
        if frame.identity in self._over:
            return
        self._queues[frame.identity].append(frame)
        self._seqs[frame.identity] += 1
        if over:
            self._over.add(frame.identity)

    def die(self) -> None:
        """See `_Neighbour`; what was not put yet is gone too."""
        super().die()
        self._over |= self._queues.keys()
        self._queues.clear()


@dataclass(slots=True)
class Output:
    """What has come of one life.

    Attributes:
        frames: All frames, in order, without their bodies.
        payloads: The payloads of those that had one.
    """

    frames: list[Frame] = field(default_factory=list)
    payloads: list[Any] = field(default_factory=list)

    @property
    def ends(self) -> list[Cause]:
        """How it ended; one cause if all is well."""
        return [frame.cause for frame in self.frames if frame.kind is FrameKind.END and frame.cause is not None]

    @property
    def ended_ok(self) -> bool:
        """Whether it ended, and well."""
        return bool(self.ends) and self.ends[0].outcome is Outcome.OK


class After(_Neighbour):
    """The stage after: takes every frame as it comes, and returns its credit.

    Attributes:
        outputs: What has come, by life.
        window_frames: How many frames of each life may be outstanding.
    """

    def __init__(self, edge: Edge) -> None:
        super().__init__(edge, sends=False)
        self.outputs: dict[Identity, Output] = {}
        self.window_frames = WIDE_FRAMES
        self._taken: dict[Identity, tuple[int, int]] = {}

    def turn(self, timeout_s: float = 0.0) -> None:
        """Take all that has come, after a wait of ``timeout_s`` seconds for it at most."""
        self.end.wait(timeout_s)
        while (arrival := self.end.get()) is not None:
            frame, body = arrival.frame, arrival.load()
            output = self.output(frame.identity)
            output.frames.append(frame)
            if body is not None:
                output.payloads.append(decode(body))
            self._grant(frame, arrival.nbytes)
        self.heard += self.end.signals()

    def output(self, identity: Identity) -> Output:
        """What has come of a life."""
        return self.outputs.setdefault(identity, Output())

    def stop(self, identity: Identity, why: Cause) -> None:
        """The stage after wants no more of a request."""
        self.end.stop(identity, why)

    def _grant(self, frame: Frame, nbytes: int) -> None:
        frames, held = self._taken.get(frame.identity, (0, 0))
        if frame.uses_credit:
            frames, held = frames + 1, held + nbytes
        self._taken[frame.identity] = frames, held
        self.end.grant(
            frame.identity, frames=self.window_frames, nbytes=WIDE_BYTES, taken_frames=frames, taken_bytes=held
        )
