"""What the runtime expects of the world around it: producer, host, clock, observers, threads."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from omni_fsm.protocol.frames import Cause
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.state import StateView


@dataclass(frozen=True, slots=True)
class ProducerContext:
    """What a producer is called with.

    Attributes:
        request: The host's internal id.
        identity: External id and generation.
        output: What the runner submitted: owned by the producer from here on. None where an end came without output.
        is_finished: Whether this is the last call for the request; what it returns goes out with the end.
        is_segment_finished: Whether this is the last call for the segment.
        segment: Number of the segment, from 0.
        seq: Seq that the frame will have if one is made.
        state: The request's producer state.
    """

    request: str
    identity: Identity
    output: Any
    is_finished: bool
    is_segment_finished: bool
    segment: int
    seq: int
    state: StateView


Producer = Callable[[ProducerContext], Any]
"""Turns one step's output into the next stage's payload, or None: nothing to send yet.

Called by: a worker, outside every lock, one call at a time per request, in the order of the submits, and never twice for one
submit. What it returns is given away until the frame is put. What it raises ends the request with ``end(error)``, its own
words as the reason.
"""


def passthrough(context: ProducerContext) -> Any:
    """The producer of a stage that sends what its runner submits."""
    return context.output


@dataclass(frozen=True, slots=True)
class Register:
    """Answer to an offer: register the stream under this internal id."""

    internal_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer to an offer: nobody here wants it; its sender is stopped with this reason, as an error."""

    reason: str = "unclaimed"


@dataclass(frozen=True, slots=True)
class Later:
    """Answer to an offer: hold its frames; ``register`` comes by itself, within ``unclaimed_s``."""


Offer = Register | Refuse | Later


class StageHost(Protocol):
    """What the runtime calls back. No lock is held during a call.

    What a hook raises is reported as ``hook_raised``; a raise in ``stream_offered`` refuses the stream, in its own words.
    """

    def stream_offered(self, identity: Identity) -> Offer:
        """The stage before has a request that this stage has not registered.

        Called by: the I/O thread of the input edge, once per identity. Answer quickly: the edge waits.
        """

    def feedback_ready(self) -> None:
        """``collect_feedback`` has something to give. Called by: any thread; set an event, do not collect here."""


class Clock(Protocol):
    """Time as a port."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC, in nanoseconds."""

    def pause(self, seconds: float) -> None:
        """Let the calling thread wait; called only by the inbox between two gets of one body, without the lock."""


class MonotonicClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns()

    def pause(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(seconds)


class Wakeups(Protocol):
    """How the runtime tells its threads that a step has work. No lock is held; each call stands for one step."""

    def produce(self) -> None:
        """``produce_once`` has a task."""

    def put(self) -> None:
        """``put_once`` has a frame."""

    def tick(self) -> None:
        """The next timer may be due earlier than the timer thread thinks."""


class NoThreads:
    """Wake-ups of a runtime whose steps somebody else calls."""

    def produce(self) -> None:
        """See `Wakeups`."""

    def put(self) -> None:
        """See `Wakeups`."""

    def tick(self) -> None:
        """See `Wakeups`."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition, for observers.

    Attributes:
        machine: ``sender``, ``receiver`` or ``kv_transfer``.
        edge: The edge.
        internal_id: The host's name of the request.
        identity: External id and generation.
        seq: The next seq of the half, after the transition.
        event: What happened.
        before: The state before.
        after: The state after.
        effects: What the runtime was told to do.
        ignored: Why nothing happened; empty for a row.
        cause: Why the half ends, once it does: the first cause.
        at_ns: CLOCK_MONOTONIC in nanoseconds.
    """

    machine: str
    edge: Edge
    internal_id: str
    identity: Identity
    seq: int
    event: StrEnum
    before: StrEnum
    after: StrEnum
    effects: tuple[StrEnum, ...]
    ignored: str
    cause: Cause | None
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, reported once.

    Attributes:
        what: ``failed`` (a request), ``marker_lost`` (its end cannot be delivered), ``edge`` (a connector), ``hook_raised``
            (a hook, observer or connector call), ``crashed`` (the stage).
        machine: ``sender``, ``receiver`` or ``kv_transfer``; ``connector`` or ``stage`` where no request is concerned.
        edge: The edge, if one is concerned.
        internal_id: The host's name of the request, or empty.
        identity: External id and generation, or None.
        cause: Why.
        seq: The next seq of the half, or -1.
        exception: What was raised here, with its traceback, if that is the cause.
    """

    what: str
    machine: str
    edge: Edge | None
    internal_id: str
    identity: Identity | None
    cause: Cause
    seq: int = -1
    exception: BaseException | None = None


@runtime_checkable
class Observer(Protocol):
    """Is told of what happened, after it happened. No lock is held during a call.

    A producer that has these methods is an observer of its stage, so that it can let go of what it keeps. An observer that also
    has ``wants_transitions() -> bool`` is told of no transition while that is False. It is asked before each, under the stage's
    lock: it may look at a setting, and nothing else.
    """

    def on_transition(self, transition: Transition) -> None:
        """A half moved, or ignored an event."""

    def on_failure(self, failure: Failure) -> None:
        """Something failed."""
