"""What the leading rank of a stage publishes once a cycle, and the receivers that it moves on every rank. Pure.

A stage that runs on several ranks has one rank that talks to the connector. Once a cycle it lists, in order, all that the
others have to know of the stage's input; every rank applies that list to receivers of its own, by the same table, the
leading rank not excepted. So a step is taken on every rank in the same cycle, or on none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from omni_fsm.payload import EncodedPayload, encode
from omni_fsm.protocol.errors import OmniFsmError, RemoteProtocolError
from omni_fsm.protocol.frames import MAX_REASON_CHARS, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import ReceiverEvent
from omni_fsm.protocol.receiver import ReceiverHalf, ReceiverMoved
from omni_fsm.runtime.feedback import Feedback, Taken, TakenKind
from omni_fsm.tables import receiver_table


class RankListError(RemoteProtocolError):
    """A published list cannot be applied; nothing of it was. This rank is out of step with the leading one.

    Attributes:
        cycle: The cycle that waits for its list.
        entry: The entry that does not fit, or None: the list as a whole does not.
        fault: What is wrong with it.
    """

    def __init__(self, cycle: int, entry: "RankEvent | None", fault: str) -> None:
        self.cycle, self.entry, self.fault = cycle, entry, fault
        where = f", entry {entry.number} ({entry.kind} of {entry.internal_id!r})" if entry is not None else ""
        super().__init__(f"list of cycle {cycle}{where} refused: {fault}")


class RankLostError(OmniFsmError):
    """A rank of this stage is gone, hangs or is out of step: no cycle can begin any more. All requests have failed.

    Attributes:
        cause: What was noticed first on this rank; its reason begins with ``rank_lost``.
    """

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        super().__init__(f"no cycle can begin: {cause.reason}; start the ranks of this stage anew")


class RankEventKind(StrEnum):
    """What an entry of a list says of its request."""

    REGISTERED = "registered"  # a life begins
    OPENED = "opened"  # every stage before this one knows it
    CHUNK = "chunk"  # a chunk was taken
    END = "end"  # the end was taken: the input is complete
    FAILED = "failed"  # it ends early, with the first cause; the host releases it
    LEFT = "left"  # the host has let go of its input: by cancel, fail, release, or by ending its output
    REFUSED = "refused"  # one call of the host was not accepted after all
    RESUMED = "resumed"  # refused for the backlog's sake, it may submit again
    OUTPUT_ENDED = "output_ended"  # its end is out, or can never be
    MARKER_LOST = "marker_lost"  # its end could not be delivered
    OVER = "over"  # nothing is left of it in this stage


class RankEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a list.

    Attributes:
        number: Counts the entries since the first cycle: one that is missing, repeated or out of order is refused.
        kind: What it says.
        internal_id: The host's name of the request.
        identity: External id and generation, with ``registered``.
        cause: Why, with ``failed``, ``left``, ``refused``, ``marker_lost``; of an ``end``, its ``ok``.
        seq: Of a ``chunk`` or ``end``: its place in the stream, from 0.
        segment: Number of the frame's segment.
        segment_end: Whether it is the last frame of its segment.
        nbytes: Size of its encoded payload in bytes; -1 where it brings none.
    """

    number: int
    kind: RankEventKind
    internal_id: str
    identity: Identity | None = None
    cause: Cause | None = None
    seq: int = -1
    segment: int = 0
    segment_end: bool = False
    nbytes: int = -1


class RankList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is published in one cycle, payloads aside; most lists are empty.

    Attributes:
        cycle: Number of the cycle, from 0.
        events: The entries, in order.
    """

    cycle: int
    events: tuple[RankEvent, ...] = ()

    @property
    def payload_sizes(self) -> dict[str, int]:
        """Bytes of each payload that travels with it, by the entry's number."""
        return {str(event.number): event.nbytes for event in self.events if event.nbytes >= 0}


encode_list = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RankList)


def decode_list(cycle: int, published: object) -> RankList:
    """A list as it came from the leading rank; ``cycle`` is the one that waits for it.

    Raises:
        RankListError: It is something else.
    """
    if not isinstance(published, bytes):
        raise RankListError(cycle, None, f"bytes were expected, {type(published).__name__} came")
    try:
        return _decoder.decode(published)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RankListError(cycle, None, f"unreadable: {error}") from error


@dataclass(frozen=True, slots=True)
class CycleInput:
    """The input of one cycle, the same on every rank.

    Attributes:
        cycle: Its number.
        events: All that happened, in order.
        payloads: Payload trees of chunks and ends by their entry's number; owned by the caller, CPU tensors that alias
            neither each other nor another rank's.
    """

    cycle: int
    events: tuple[RankEvent, ...]
    payloads: Mapping[int, Any] = field(default_factory=dict, compare=False)

    @property
    def taken(self) -> dict[str, list[Taken]]:
        """The frames taken in this cycle by request, as `StageRuntime.take` gives them."""
        frames: dict[str, list[Taken]] = {}
        for event in self.events:
            if event.kind in (RankEventKind.CHUNK, RankEventKind.END):
                kind = TakenKind.END if event.kind is RankEventKind.END else TakenKind.CHUNK
                payload = self.payloads.get(event.number)
                taken = Taken(kind, payload, event.cause, event.segment, event.segment_end)
                frames.setdefault(event.internal_id, []).append(taken)
        return frames

    @property
    def feedback(self) -> Feedback:
        """The same as `StageRuntime.collect_feedback` gives it; ``ready`` are those of whom something was taken."""
        told = Feedback()
        for event in self.events:
            _TELL.get(event.kind, _tell_nothing)(told, event)
        return told

    @property
    def refused(self) -> dict[str, list[str]]:
        """Reasons of refused calls by request, one a call in the order of the calls; what they offered was dropped."""
        refused: dict[str, list[str]] = {}
        for event in self.events:
            if event.kind is RankEventKind.REFUSED and event.cause is not None:
                refused.setdefault(event.internal_id, []).append(event.cause.reason)
        return refused


def _tell_nothing(told: Feedback, event: RankEvent) -> None:
    """What `CycleInput.refused` and ``events`` alone give."""


def _tell_registered(told: Feedback, event: RankEvent) -> None:
    if event.identity is not None:
        told.registered[event.internal_id] = event.identity


def _tell_end(told: Feedback, event: RankEvent) -> None:
    told.ready[event.internal_id] = None
    told.input_ended[event.internal_id] = None


def _tell_failed(told: Feedback, event: RankEvent) -> None:
    if event.cause is not None:
        told.failed[event.internal_id] = event.cause


def _tell_marker_lost(told: Feedback, event: RankEvent) -> None:
    if event.cause is not None:
        told.marker_lost[event.internal_id] = event.cause


_TELL = {
    RankEventKind.REGISTERED: _tell_registered,
    RankEventKind.OPENED: lambda told, event: told.opened.update({event.internal_id: None}),
    RankEventKind.CHUNK: lambda told, event: told.ready.update({event.internal_id: None}),
    RankEventKind.END: _tell_end,
    RankEventKind.FAILED: _tell_failed,
    RankEventKind.RESUMED: lambda told, event: told.resumed.update({event.internal_id: None}),
    RankEventKind.OUTPUT_ENDED: lambda told, event: told.output_ended.update({event.internal_id: None}),
    RankEventKind.MARKER_LOST: _tell_marker_lost,
}


# What every rank applies


@dataclass(slots=True)
class RankRequest:
    """One life of a request as the lists have told it.

    Attributes:
        identity: External id and generation.
        half: Its receiver, moved by lists alone.
        failed: The failure that the host was told; it may also be the output's.
        output_ended: Whether its output is over.
    """

    identity: Identity
    half: ReceiverHalf
    failed: Cause | None = None
    output_ended: bool = False

    def copy(self) -> "RankRequest":
        """An independent one of the same value."""
        return RankRequest(self.identity, self.half.copy(), self.failed, self.output_ended)

    @property
    def ended_early(self) -> Cause | None:
        """Why nothing of it is wanted any more, as far as this rank knows; None while it goes on or is complete."""
        left = self.half.cause
        return self.failed or (left if left is not None and left.outcome is not Outcome.OK else None)

    @property
    def is_complete(self) -> bool:
        """Whether input and output are over."""
        return self.half.is_final and self.output_ended


class RankReceivers:
    """The receivers of one rank. Equal lists make equal receivers, whatever the rank.

    Not thread-safe: moved by the model thread; others may look up a request.

    Args:
        edge: The stage's input edge.
    """

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.cycle = 0
        self.number = 0
        self._requests: dict[str, RankRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, internal_id: str) -> bool:
        return internal_id in self._requests

    def get(self, internal_id: str) -> RankRequest | None:
        """The request, from its ``registered`` to its ``over``. Not to be changed."""
        return self._requests.get(internal_id)

    @property
    def internal_ids(self) -> tuple[str, ...]:
        """All requests, in the order of their registration."""
        return tuple(self._requests)

    def apply(self, published: RankList) -> None:
        """Apply the list of one cycle, all of it or nothing.

        Raises:
            RankListError: It is not the next list, or an entry is no step that its receiver can take.
        """
        if published.cycle != self.cycle:
            raise RankListError(self.cycle, None, f"it is of cycle {published.cycle}")
        changed: dict[str, RankRequest | None] = {}
        for number, event in enumerate(published.events, self.number):
            if event.number != number:
                raise RankListError(self.cycle, event, f"entry {number} was expected")
            self._apply(changed, event)
        for internal_id, request in changed.items():
            if request is None:
                self._requests.pop(internal_id, None)
            else:
                self._requests[internal_id] = request
        self.cycle += 1
        self.number += len(published.events)

    def _apply(self, changed: dict[str, RankRequest | None], event: RankEvent) -> None:
        """One entry, to a copy of its request."""
        internal_id, kind = event.internal_id, event.kind
        if internal_id not in changed:
            held = self._requests.get(internal_id)
            changed[internal_id] = held.copy() if held is not None else None
        request = changed[internal_id]
        if kind is RankEventKind.REFUSED:
            return  # perhaps of a registration
        if kind is RankEventKind.REGISTERED:
            if request is not None or event.identity is None:
                raise RankListError(self.cycle, event, "it is registered" if request else "it has no identity")
            half = ReceiverHalf(receiver_table(), self.edge, event.identity)
            changed[internal_id] = RankRequest(event.identity, half)
            return
        if request is None:
            raise RankListError(self.cycle, event, "it is not registered")
        if kind is RankEventKind.OVER:
            changed[internal_id] = None
        elif kind is RankEventKind.OUTPUT_ENDED:
            request.output_ended = True
        else:
            self._move(request, event)

    def _move(self, request: RankRequest, event: RankEvent) -> None:
        half = request.half
        match event.kind:
            case RankEventKind.OPENED:
                opening = Frame(self.edge, request.identity, FrameKind.OPEN)
                self._expect(event, half.on_frame(opening), ReceiverEvent.OPEN_ARRIVED)
            case RankEventKind.CHUNK:
                self._expect(event, half.on_frame(self._frame(request, event)), ReceiverEvent.DATA_ARRIVED)
                half.on_consumed()
            case RankEventKind.END:
                self._expect(event, half.on_frame(self._frame(request, event)), ReceiverEvent.OK_END_ARRIVED)
                half.on_consumed()
            case RankEventKind.FAILED:
                self._fail(request, event)
            case RankEventKind.LEFT:
                self._leave(half, event)
            case _:
                pass  # told to the host, nothing moves

    def _frame(self, request: RankRequest, event: RankEvent) -> Frame:
        is_end = event.kind is RankEventKind.END
        kind, cause = (FrameKind.END, Cause(Outcome.OK)) if is_end else (FrameKind.DATA, None)
        return Frame(self.edge, request.identity, kind, event.segment, event.seq, event.segment_end, cause)

    def _expect(self, event: RankEvent, moved: ReceiverMoved, expected: ReceiverEvent) -> None:
        if moved.event is not expected or moved.ignored:
            raise RankListError(self.cycle, event, f"in state {moved.before} the receiver took it for {moved.event}")

    def _fail(self, request: RankRequest, event: RankEvent) -> None:
        """A failure is told once. The output may fail when the input is over: then its receiver has nothing to do."""
        cause = event.cause
        if cause is None or cause.outcome is Outcome.OK or request.failed is not None:
            raise RankListError(self.cycle, event, "it has failed" if request.failed else "it has no cause")
        request.failed = cause
        if request.half.is_final:
            return
        if cause.outcome is Outcome.DONE:
            request.half.on_released(cause)
        else:
            request.half.on_frame(Frame(self.edge, request.identity, FrameKind.END, cause=cause))

    def _leave(self, half: ReceiverHalf, event: RankEvent) -> None:
        cause = event.cause
        if cause is None or half.is_final:
            raise RankListError(self.cycle, event, f"there is nothing to leave in state {half.state}")
        _ = half.on_released(cause) if cause.outcome is Outcome.DONE else half.on_cancelled(cause)

    def lose(self, cause: Cause, registering: Iterable[str] = ()) -> tuple[RankEvent, ...]:
        """A rank is lost: every receiver fails, and all are forgotten.

        Args:
            cause: Why.
            registering: Requests that the host has registered and no list has told of yet.

        Returns:
            One ``failed`` for each request whose end the host does not know yet.
        """
        going_on: list[str] = []
        for internal_id, request in self._requests.items():
            if request.ended_early is None and not request.is_complete:
                request.half.on_peer_lost(cause)
                going_on.append(internal_id)
        self._requests.clear()
        return tuple(
            RankEvent(number, RankEventKind.FAILED, internal_id, cause=_sendable(cause))
            for number, internal_id in enumerate([*going_on, *registering], self.number)
        )


# What the leading rank lists


def said(kind: RankEventKind, internal_id: str, identity: Identity | None, cause: Cause | None = None) -> RankEvent:
    """Something that the leading rank's host said, to be listed in the next cycle.

    Args:
        kind: ``registered``, ``left`` or ``refused``.
        internal_id: The request.
        identity: Which life of it was meant: by now another may have its name.
        cause: Why.
    """
    return RankEvent(-1, kind, internal_id, identity, cause)


class Listing:
    """The list of one cycle while the leading rank writes it, with the payloads that go with it.

    Attributes:
        payloads: Payload trees by the entry's number.
        encoded: The same, encoded; borrowed from the trees.
    """

    def __init__(self, receivers: RankReceivers) -> None:
        self._receivers = receivers
        self._events: list[RankEvent] = []
        self._lives: dict[str, Identity | None] = {}  # of what this list itself registers or ends
        self._left: set[str] = set()
        self._seqs: dict[str, int] = {}
        self.payloads: dict[int, Any] = {}
        self.encoded: dict[str, EncodedPayload] = {}

    @property
    def list(self) -> RankList:
        """What is written so far."""
        return RankList(self._receivers.cycle, tuple(self._events))

    def write(  # noqa: PLR0913 - the fields of an entry
        self,
        kind: RankEventKind,
        internal_id: str,
        *,
        identity: Identity | None = None,
        cause: Cause | None = None,
        seq: int = -1,
        taken: Taken | None = None,
    ) -> None:
        """Add one entry."""
        number = self._receivers.number + len(self._events)
        encoded = encode(taken.payload) if taken is not None and taken.payload is not None else None
        if encoded is not None and taken is not None:
            self.encoded[str(number)] = encoded
            self.payloads[number] = taken.payload
        event = RankEvent(
            number,
            kind,
            internal_id,
            identity,
            _sendable(cause),
            seq,
            taken.segment if taken is not None else 0,
            taken.segment_end if taken is not None else False,
            encoded.nbytes if encoded is not None else -1,
        )
        self._events.append(event)
        if kind in (RankEventKind.REGISTERED, RankEventKind.OVER):
            self._lives[internal_id] = identity
            self._seqs.pop(internal_id, None)

    def write_said(self, word: RankEvent) -> None:
        """Add what the host said; leaving a life that is over or has been left is nothing new."""
        if word.kind is RankEventKind.LEFT:
            request = self._receivers.get(word.internal_id)
            life = self._lives.get(word.internal_id, request.identity if request is not None else None)
            is_over = request is not None and request.half.is_final
            if word.identity != life or is_over or word.internal_id in self._left:
                return
            self._left.add(word.internal_id)
        identity = word.identity if word.kind is RankEventKind.REGISTERED else None
        self.write(word.kind, word.internal_id, identity=identity, cause=word.cause)

    def write_taken(self, internal_id: str, taken: Taken) -> None:
        """Add one frame; frames are numbered as they were taken."""
        request = self._receivers.get(internal_id)
        first = 0 if internal_id in self._lives or request is None else request.half.next_seq
        seq = self._seqs.get(internal_id, first)
        self._seqs[internal_id] = seq + 1
        kind = RankEventKind.END if taken.kind is TakenKind.END else RankEventKind.CHUNK
        self.write(kind, internal_id, cause=taken.cause, seq=seq, taken=taken)


def list_cycle(
    receivers: RankReceivers,
    words: Sequence[RankEvent],
    told: Feedback,
    taken: Iterable[tuple[str, Taken]],
    over: Iterable[str],
) -> Listing:
    """Write the list of one cycle.

    What the host said comes before what happened since, but for openings: those were reported before a host could leave.

    Args:
        receivers: This rank's; read only.
        words: What the host said since the last cycle, collected before ``told`` was.
        told: The stage's feedback.
        taken: The frames taken in this cycle, in order.
        over: Requests of which nothing is left and of which no more feedback comes.
    """
    listing, offered = Listing(receivers), told.registered
    registered = [word for word in words if word.kind is RankEventKind.REGISTERED]
    for word in registered:
        listing.write_said(word)
    for internal_id in [name for name in told.opened if name not in offered]:
        listing.write(RankEventKind.OPENED, internal_id)
    for word in [word for word in words if word.kind is not RankEventKind.REGISTERED]:
        listing.write_said(word)
    for internal_id, identity in offered.items():
        if internal_id in receivers:
            listing.write(RankEventKind.OVER, internal_id)  # its name is in use again already
        listing.write(RankEventKind.REGISTERED, internal_id, identity=identity)
        if internal_id in told.opened:
            listing.write(RankEventKind.OPENED, internal_id)
    _write_happenings(listing, told, taken)
    for internal_id in over:
        listing.write(RankEventKind.OVER, internal_id)
    return listing


def _write_happenings(listing: Listing, told: Feedback, taken: Iterable[tuple[str, Taken]]) -> None:
    for internal_id, frame in taken:
        listing.write_taken(internal_id, frame)
    for internal_id, cause in told.failed.items():
        listing.write(RankEventKind.FAILED, internal_id, cause=cause)
    for internal_id in told.resumed:
        listing.write(RankEventKind.RESUMED, internal_id)
    for internal_id in told.output_ended:
        listing.write(RankEventKind.OUTPUT_ENDED, internal_id)
    for internal_id, cause in told.marker_lost.items():
        listing.write(RankEventKind.MARKER_LOST, internal_id, cause=cause)


def _sendable(cause: Cause | None) -> Cause | None:
    """A cause whose reason has UTF-8: the text of an OSError about a file may have lone surrogates."""
    if cause is None:
        return None
    reason = cause.reason.encode(errors="backslashreplace").decode()[:MAX_REASON_CHARS]
    return cause if reason == cause.reason else Cause(cause.outcome, reason, cause.at_ns)
