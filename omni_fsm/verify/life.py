"""One generation in an explored world: both halves, and the facts by which they are judged."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from omni_fsm.protocol import Edge, Identity
from omni_fsm.protocol.names import ReceiverState, SenderState
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf, SendTask

EDGE = Edge("a", "b")


@dataclass(frozen=True, slots=True)
class Chunks:
    """A body: the chunks that it carries, a bit each, so that what arrives can be compared with what was accepted."""

    bits: int

    @property
    def nbytes(self) -> int:
        """Every body has the same size here: nothing depends on it."""
        return 1

    @property
    def parts(self) -> tuple[memoryview, ...]:
        """Nothing is copied here."""
        return ()

    def owned(self) -> "Chunks":
        """It is immutable."""
        return self


class Life:
    """One generation. Copied when it changes; a copy's halves are its own once `own_sender` or `own_receiver` was called.

    Attributes:
        sender: The sending half; None when its process is gone.
        receiver: The receiving half; None before the stream is registered, and when its process is gone.
        accepted: Chunks that were accepted, a bit each.
        produced: Chunks whose producer has run.
        held: Chunks that the producer holds back, for a later frame.
        put: Chunks that are stored, in whatever frame.
        got: Chunks that the receiver has accepted.
        ended: Whether the receiver has accepted an end.
        ends_put: How many ends were stored.
        end_given_up: Whether an end was given up: another may follow it.
        marker_lost: Whether that was reported.
        released: Whether the state was released.
        number: Of its value, once somebody asked; see `number_in`.
    """

    def __init__(self, sender: SenderHalf) -> None:
        self.identity: Identity = sender.identity
        self.sender: SenderHalf | None = sender
        self.receiver: ReceiverHalf | None = None
        self.accepted = self.produced = self.held = self.put = self.got = 0
        self.ends_put = 0
        self.ended = self.end_given_up = self.marker_lost = self.released = False
        self.number: int | None = None

    def copy(self) -> "Life":
        """A life of the same value that shares its halves."""
        twin = Life.__new__(Life)
        twin.__dict__.update(self.__dict__)
        twin.number = None
        return twin

    def own_sender(self) -> SenderHalf:
        """The sending half, to be moved."""
        if self.sender is None:
            raise AssertionError(self.identity)
        self.sender = self.sender.copy()
        return self.sender

    def own_receiver(self) -> ReceiverHalf:
        """The receiving half, to be moved."""
        if self.receiver is None:
            raise AssertionError(self.identity)
        self.receiver = self.receiver.copy()
        return self.receiver

    def owes(self) -> int:
        """What it has promised and not yet kept, a bit each: a cancel, a failure, an end, the receiver's leave."""
        receiver_left = self.receiver is not None and self.receiver.state is not ReceiverState.ACTIVE
        if receiver_left:
            return 0
        if self.sender is not None and not self.sender.is_final:
            return 0 if self.ends_put or self.marker_lost else _OWES.get(self.sender.state, 0)
        return 8 if self.receiver is not None else 0

    def number_in(self, known: dict[Hashable, int]) -> int:
        """Stands for its `key`: worlds share the lives that do not change, and so work it out once."""
        if self.number is None:
            self.number = known.setdefault(self.key(), len(known))
        return self.number

    def key(self) -> Hashable:
        """Its value, without what can no longer decide how it goes on: the past of a half that is over."""
        sender, receiver = self.sender, self.receiver
        sends: Hashable = sender is None
        if sender is not None and not sender.is_final:
            sends = (
                _sender_key(sender),
                self.produced,
                self.held,
                self.put,
                self.ends_put,
                self.end_given_up,
                self.released,
            )
        gets: Hashable = receiver is None
        if receiver is not None and not receiver.is_final:
            gets = (_receiver_key(receiver), self.got, self.marker_lost)
        judged = self.accepted if not (isinstance(sends, bool) and isinstance(gets, bool)) else 0
        return (sends, gets, judged, self.ended)


_OWES = {SenderState.CANCELLED_CURRENT: 1, SenderState.FAILED: 2, SenderState.TERMINAL_PENDING: 4}


def _task_key(task: SendTask) -> Hashable:
    body: Any = task.frame.body if task.frame is not None else None
    outcome = task.cause.outcome if task.cause is not None else None
    return (task.kind, task.item, outcome, task.attempts, task.frame is not None, body and body.bits)


def _sender_key(half: SenderHalf) -> Hashable:
    return (
        half.state,
        tuple(_task_key(task) for task in half.queue),
        half.in_flight and _task_key(half.in_flight),
        half.next_seq,
        half.dropped,
        half.release_noted,
        half.marker_settled,
    )


def _receiver_key(half: ReceiverHalf) -> Hashable:
    return (
        half.state,
        half.next_seq,
        len(half.staged),
        half.getting,
        half.attempts if half.getting else 0,
        half.opened,
    )
