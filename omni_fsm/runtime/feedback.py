"""What a stage tells its scheduler, collected once a cycle, and what it answers to the runner's calls."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omni_fsm.protocol.frames import Cause
from omni_fsm.protocol.identity import Identity


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to a call that offers something: accepted, or refused with a reason and nothing changed.

    Attributes:
        accepted: Whether it was accepted.
        reason: Why not.
        no_room: Whether it was refused for the backlog's sake alone: ``resumed`` tells when to offer it again.
    """

    accepted: bool
    reason: str = ""
    no_room: bool = False


ACCEPTED = Admission(accepted=True)


class TakenKind(StrEnum):
    """What a take gave: one value for each meaning."""

    CHUNK = "chunk"
    END = "end"
    FAILED = "failed"
    NOT_YET = "not_yet"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Taken:
    """Answer of ``take``.

    Attributes:
        kind: ``chunk`` and ``end`` bring a frame (an end's payload is the flushed tail, None if there was none),
            ``failed`` brings the cause, ``not_yet`` means that it waits, ``gone`` that nothing will come: consumed to the
            end, cancelled, released, or never registered.
        payload: The payload tree; owned by the caller.
        cause: How the stream ended, with ``end`` and ``failed``.
        segment: Number of the frame's segment.
        segment_end: Whether it is the last frame of its segment.
    """

    kind: TakenKind
    payload: Any = None
    cause: Cause | None = None
    segment: int = 0
    segment_end: bool = False


class Standing(StrEnum):
    """Where a request stands with this stage's edges: a view of its halves, nothing is taken or changed by looking.

    The first that holds counts, in this order.
    """

    UNKNOWN = "unknown"  # not registered here, or all of it is over
    FAILED = "failed"  # a take gives the failure
    NO_ROOM = "no_room"  # a submit was refused for the backlog's sake, and there is no room yet
    NO_INPUT = "no_input"  # the stage has no input edge
    READY = "ready"  # a take gives a chunk or the end
    WAITS = "waits"  # nothing is staged, more is to come
    OVER = "over"  # no more input comes: consumed to its end, or left


NOT_YET = Taken(TakenKind.NOT_YET)
GONE = Taken(TakenKind.GONE)


@dataclass(slots=True)
class Feedback:
    """What happened since the last collection; each entry is given exactly once.

    Attributes:
        registered: Requests registered because the host accepted an offer: internal id to identity.
        ready: Requests to take from. Listed again after a take that left more; the frame may be gone by then (taken before, or
            the request has ended), and ``take`` says so.
        opened: Requests that every stage before this one knows; at the front: the whole pipeline.
        input_ended: Requests whose whole input was consumed, ``end(ok)`` included.
        output_ended: Requests whose sender is over: its end is out, or can never be.
        failed: Requests that end early, with the first cause (``error``, ``cancelled``, or ``done`` when the next stage has
            had enough). The host releases them.
        resumed: Requests refused for the backlog's sake that may submit again.
        marker_lost: Requests whose end could not be delivered.
    """

    registered: dict[str, Identity] = field(default_factory=dict)
    ready: dict[str, None] = field(default_factory=dict)
    opened: dict[str, None] = field(default_factory=dict)
    input_ended: dict[str, None] = field(default_factory=dict)
    output_ended: dict[str, None] = field(default_factory=dict)
    failed: dict[str, Cause] = field(default_factory=dict)
    resumed: dict[str, None] = field(default_factory=dict)
    marker_lost: dict[str, Cause] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def add(self, later: "Feedback") -> None:
        """Add what was collected after this; who failed meanwhile is not ready any more."""
        for name in self.__slots__:
            getattr(self, name).update(getattr(later, name))
        for internal_id in later.failed:
            self.ready.pop(internal_id, None)
