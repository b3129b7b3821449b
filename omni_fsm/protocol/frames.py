"""What crosses a connector, and why a stream ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from omni_fsm.protocol.identity import Edge, FrameKey, Identity

MAX_REASON_CHARS = 2_048


class FrameKind(StrEnum):
    """``open`` announces a request before its first chunk, ``data`` carries a chunk, ``end`` is the terminal marker."""

    OPEN = "open"
    DATA = "data"
    END = "end"


class Outcome(StrEnum):
    """How a stream ended. All but ``ok`` come with a reason."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    DONE = "done"  # of a stop only: the receiver has had enough, nobody is cancelled


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a request ends: made once where it arose, then carried unchanged through every stage.

    Attributes:
        outcome: ``ok``, ``error``, ``cancelled``; ``done`` on a stop.
        reason: The first words that were said of it; empty for ``ok``. Cut to 2,048 characters.
        at_ns: CLOCK_MONOTONIC in nanoseconds when it arose, of the host where it arose. No part of equality.
    """

    outcome: Outcome
    reason: str = ""
    at_ns: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_REASON_CHARS:
            object.__setattr__(self, "reason", self.reason[: MAX_REASON_CHARS - 3] + "...")

    def __str__(self) -> str:
        return f"{self.outcome}({self.reason})" if self.reason else str(self.outcome)


class Body(Protocol):
    """An encoded payload, as `omni_fsm.payload.encode` makes it. The protocol never looks inside."""

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""

    @property
    def parts(self) -> Sequence[memoryview]:
        """What to copy to the wire, in order; borrowed from the payload's tensors unless ``owned`` was called."""

    def owned(self) -> "Body":
        """The same bytes in private memory, for a frame that must wait while its producer reuses its buffers."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of one stream. Its header is everything but ``body``.

    Attributes:
        edge: The edge it crosses.
        identity: The stream and its generation.
        kind: ``open``, ``data`` or ``end``.
        segment: Input turn that it belongs to, from 0.
        seq: Contiguous from 0 over ``data`` and ``end(ok)``; -1 where the kind carries none.
        segment_end: Whether it is the last frame of its segment.
        cause: Of an end: its outcome, first reason and time stamp.
        body: The encoded payload, or None where there is none.
    """

    edge: Edge
    identity: Identity
    kind: FrameKind
    segment: int = 0
    seq: int = -1
    segment_end: bool = False
    cause: Cause | None = None
    body: Body | None = None

    @property
    def key(self) -> FrameKey:
        """The key of this frame; a failed end has a key of its own, so that a burned seq is never met again."""
        slot = self.seq if self.seq >= 0 else str(self.kind)
        return FrameKey(self.edge, self.identity, slot)

    @property
    def uses_credit(self) -> bool:
        """Whether it counts against the stream's credit: all but ``open`` and the failed ends."""
        return self.kind is FrameKind.DATA or (self.cause is not None and self.cause.outcome is Outcome.OK)
