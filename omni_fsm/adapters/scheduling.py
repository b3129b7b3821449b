"""What a scheduler and its coordinator tell each other: places, settings, chunks, steps, and the scheduler's own rules."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol

from omni_fsm.adapters.queues import R, R_contra
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.runtime import Feedback


class Place(StrEnum):
    """Where a request is. In the first two the scheduler has it; from the others but the last it comes back."""

    WAITING = "waiting"
    RUNNING = "running"
    AWAITS_CHUNK = "awaits_chunk"  # its receiver waits, or is not registered yet, and it can do nothing without
    NO_ROOM = "no_room"  # its output was refused for the backlog's sake
    PAUSED = "paused"  # its segment is over, and the next one has not begun
    NO_SLOT = "no_slot"  # it is ready, and the slot that it had was lent
    OUTSIDE = "outside"  # as many streams are active as the window holds
    LEAVING = "leaving"  # it is over; the scheduler was told to finish it, or will be


QUEUED = frozenset({Place.WAITING, Place.RUNNING})
ASIDE = frozenset(Place) - QUEUED - {Place.LEAVING}


class Slots(StrEnum):
    """What becomes of a running request's slot while the request is set aside.

    Whatever is chosen, the slot of one that has no room for its output is lent: two stages whose slots are all held by
    requests that wait for each other would stand still for ever.
    """

    RESERVED = "reserved"  # it counts against the limit: the request has its place when it comes back
    LENT = "lent"  # another request may run in it; the request waits for the next free one when it comes back


class Resume(StrEnum):
    """What ends a pause. A stage without an input is always resumed by the scheduler."""

    BY_CHUNK = "by_chunk"  # the next chunk, as in a duplex session; or the scheduler
    BY_UPDATE = "by_update"  # the scheduler alone, as in turns: `SchedulerCoordinator.update`


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of a stage's scheduler side.

    Attributes:
        max_running: How many requests may run at once.
        slots: What becomes of the slot of a running request that is set aside.
        resume: What ends a pause.
        window: How many streams are active at once, first come first served, from when they are first seen until they are
            finished. None: no limit.
        step_tokens: How many tokens one step can hold; a chunk of more can never be scheduled whole and fails its request.
            None: no limit.
        pause_s: Seconds after which a request that pauses fails. 0 turns it off. A stage's receiver has its own clock, which
            runs in a pause too: the shorter of ``input_wait_s`` and this counts while nothing has come.
    """

    max_running: int
    slots: Slots = Slots.RESERVED
    resume: Resume = Resume.BY_CHUNK
    window: int | None = None
    step_tokens: int | None = None
    pause_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what cannot be used.

        Raises:
            ConfigError: Names the field, the value and what is accepted.
        """
        for name in ("max_running", "window", "step_tokens"):
            value = getattr(self, name)
            if not (type(value) is int and value > 0) and (value is not None or name == "max_running"):
                raise ConfigError(name, value, "an int of 1 or more")
        for name, kind in (("slots", Slots), ("resume", Resume)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    name, getattr(self, name), " or ".join(f"{kind.__name__}.{each.name}" for each in kind)
                )
        pause_s = self.pause_s
        if isinstance(pause_s, bool) or not isinstance(pause_s, int | float) or not 0 <= pause_s < math.inf:
            raise ConfigError("pause_s", pause_s, "a finite number, 0 (off) or more")


@dataclass(frozen=True, slots=True)
class Note:
    """What a scheduler needs to know of a payload.

    Attributes:
        tokens: How many tokens it makes the request compute. 0: nothing to compute, only metadata; it wakes nobody.
        metadata: Whatever the scheduler wants of it; light, for it outlives the payload.
    """

    tokens: int
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came for a request and is to be computed, whole.

    Attributes:
        payload: The payload tree; the stage's until its step is committed, then the step's.
        note: What the scheduler's rules say of it.
        segment: Number of its segment, as its sender counts.
        segment_end: Whether it is the last of its segment.
        is_end: Whether it is the tail that came with the end.
    """

    payload: Any
    note: Note
    segment: int
    segment_end: bool
    is_end: bool


class SchedulerRules(Protocol[R_contra]):
    """What the coordinator asks of its scheduler. Called by: the scheduler's thread, in ``begin_cycle`` and ``step``."""

    def needs_chunk(self, request: R_contra) -> bool:
        """Whether the request can do nothing until a chunk comes: all that came is computed, and it has no work of its own.

        Asked of requests without a chunk. One that is preempted and has to compute again needs none, nor does one that drains
        what it holds after the end of its input. One that needs a chunk when its input is over is finished.
        """

    def describe(self, request: R_contra, payload: Any) -> Note:
        """What the scheduler has to know of a payload, once for each. What it raises ends the request."""

    def placed(self, request: R_contra, place: Place) -> None:
        """The coordinator moved the request: write its status here, and nowhere else. Its queues are right already."""


class ChunkRules(Generic[R]):
    """The rules of a stage that computes chunk by chunk: a chunk is one token, and nothing is computed without one."""

    def needs_chunk(self, request: R) -> bool:  # noqa: ARG002 - the port's signature
        """See `SchedulerRules`."""
        return True

    def describe(self, request: R, payload: Any) -> Note:  # noqa: ARG002 - the port's signature
        """See `SchedulerRules`: an end without a payload is nothing to compute."""
        return Note(tokens=0 if payload is None else 1)

    def placed(self, request: R, place: Place) -> None:
        """See `SchedulerRules`."""


class FeedbackSink(Protocol):
    """Is given the stage's feedback at once, in the process of the stage."""

    def feedback(self, feedback: Feedback) -> None:
        """What just happened, each entry once, in order. Borrowed: read it, do not change it.

        Called by: whichever thread it happened on, one at a time, no lock held. Do not block.
        """


@dataclass(slots=True, eq=False)
class Turn:
    """What lasts as long as one segment of one request: replaced as a whole, so that nothing of it is left to reset.

    Attributes:
        segment: Number of the segment.
        in_flight: Steps whose results are to come.
        paused_ns: Since when the request pauses before this segment, in nanoseconds of the clock; None while it does not.
    """

    segment: int = 0
    in_flight: set[int] = field(default_factory=set)
    paused_ns: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step(Generic[R]):
    """One request's part in one step of the model. Keep it with the batch, and hand it back with the result.

    Attributes:
        request: The request.
        number: Unique in its coordinator.
        chunk: What it computes; None when it goes on with work of its own.
        turn: The segment that its result belongs to.
    """

    request: R
    number: int
    chunk: Chunk | None
    turn: Turn
