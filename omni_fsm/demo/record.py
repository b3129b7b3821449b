"""What a stage of the demo remembers of its requests, for the report at the end: an observer, no more."""

from typing import Any

import msgspec

from omni_fsm.protocol.frames import Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.protocol.names import ReceiverEvent, ReceiverState, SenderEvent, SenderState
from omni_fsm.runtime import Failure, Transition


class Life(msgspec.Struct):
    """One life of a request in one stage.

    Attributes:
        external_id: Its external id.
        generation: Its generation.
        outcome: ``ok``, ``error`` or ``cancelled``, as this stage ended it; empty while it is open.
        reason: Its first cause.
        left_ns: CLOCK_MONOTONIC when its sender left active.
        left_by: The event by which it left.
        cause_ns: When the cause arose by which its sender left active, wherever that was; 0 when it ended by itself.
        arrived_ns: When its receiver got an end or failed.
        sender_lost: Whether its sender was open when it lost the receiver's process.
        receiver_lost: Whether its receiver was active when it lost the sender's process.
        late_forwards: Forwards of the model that began after its sender had left active for a failure or a cancel.
    """

    external_id: str
    generation: int
    outcome: str = ""
    reason: str = ""
    left_ns: int = 0
    left_by: str = ""
    cause_ns: int = 0
    arrived_ns: int = 0
    sender_lost: bool = False
    receiver_lost: bool = False
    late_forwards: int = 0


class Record:
    """Observer that keeps one `Life` for each request. Its table is a report, not state: nothing is decided by it."""

    def __init__(self) -> None:
        self.lives: dict[Identity, Life] = {}

    def life(self, identity: Identity) -> Life:
        """The life of a request, made when it is first heard of."""
        return self.lives.setdefault(identity, Life(identity.external_id, identity.generation))

    def on_transition(self, transition: Transition) -> None:
        """See `Observer`."""
        if transition.ignored or transition.before is transition.after:
            return
        life = self.life(transition.identity)
        if transition.machine == "sender":
            self._sender_moved(life, transition)
        elif transition.before is ReceiverState.ACTIVE:
            life.arrived_ns = transition.at_ns
            life.receiver_lost = transition.event is ReceiverEvent.PEER_LOST

    @staticmethod
    def _sender_moved(life: Life, transition: Transition) -> None:
        if transition.before is SenderState.ACTIVE:
            life.left_ns, life.left_by = transition.at_ns, str(transition.event)
            life.cause_ns = transition.cause.at_ns if transition.cause is not None else 0
        if transition.event is SenderEvent.PEER_LOST:
            life.sender_lost = True
        cause = transition.cause
        if cause is None:
            life.outcome = str(Outcome.OK)
        else:
            life.outcome = str(Outcome.ERROR if cause.outcome is Outcome.ERROR else Outcome.CANCELLED)
            life.reason = cause.reason

    def on_failure(self, failure: Failure) -> None:
        """See `Observer`."""

    def forward_begun(self, identity: Identity) -> None:
        """The model computes for this request now."""
        life = self.lives.get(identity)
        if life is not None and life.left_by and life.outcome != Outcome.OK:
            life.late_forwards += 1

    def report(self) -> list[dict[str, Any]]:
        """All lives as plain data."""
        return [msgspec.to_builtins(life) for life in self.lives.values()]
