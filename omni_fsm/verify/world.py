"""The world of one edge: real halves, a wire, and an adversary who does whatever may be done at any moment."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from omni_fsm.protocol import Cause, Frame, FrameKind, Identity, Outcome
from omni_fsm.protocol.names import ReceiverEffect, ReceiverEvent, ReceiverState, SenderEffect, SenderEvent, SenderState
from omni_fsm.protocol.receiver import ReceiverHalf, ReceiverMoved, ReceiverTable
from omni_fsm.protocol.sender import SenderHalf, SenderMoved, SenderTable, SendTask, TaskKind
from omni_fsm.tables import receiver_table, sender_table
from omni_fsm.verify.ends import CellName
from omni_fsm.verify.explore import Action, Step, Violation
from omni_fsm.verify.life import EDGE, Chunks, Life

CANCELLED = Cause(Outcome.CANCELLED, "cancelled")
FAILED = Cause(Outcome.ERROR, "failed")
DONE = Cause(Outcome.DONE, "done")
ALL_FAULTS = frozenset({"put", "raise", "cancel", "kill", "deadline", "get"})

_LEFT = (SenderState.CANCELLED_CURRENT, SenderState.FAILED)

_LEAVES: dict[str, Callable[[SenderHalf], SenderMoved]] = {
    "cancel": lambda half: half.on_cancelled(CANCELLED),
    "release": lambda half: half.on_released(CANCELLED),
    "close": lambda half: half.on_closed(CANCELLED),
    "host fails": lambda half: half.on_host_failed(FAILED),
    "upstream fails": lambda half: half.on_upstream_failed(FAILED),
}

_FRAME = Frame(EDGE, Identity("r", 0), FrameKind.DATA, seq=0)
Late = Callable[[Any], Any]


def _ahead(half: ReceiverHalf, seqs: int, cause: Cause | None = None) -> ReceiverMoved:
    """A chunk, or an end, so many seqs ahead of what comes next."""
    kind = FrameKind.DATA if cause is None else FrameKind.END
    return half.on_frame(replace(_FRAME, kind=kind, seq=half.next_seq + seqs, cause=cause))


def _open_unknown(half: ReceiverHalf) -> ReceiverMoved:
    """An opening, for a half that has not had one: its first was lost."""
    half.opened = False
    return half.on_frame(Frame(EDGE, half.identity, FrameKind.OPEN))


_LATE_FRAMES: tuple[Late, ...] = (
    _open_unknown,
    lambda half: half.on_frame(Frame(EDGE, half.identity, FrameKind.OPEN)),
    lambda half: _ahead(half, -1),
    lambda half: _ahead(half, 0),
    lambda half: _ahead(half, 1),
    lambda half: _ahead(half, 0, Cause(Outcome.OK)),
    lambda half: _ahead(half, 0, FAILED),
    lambda half: half.on_frame_invalid(FAILED),
)
_RETURNS: tuple[Late, ...] = (*_LATE_FRAMES, lambda half: half.on_get_failed(FAILED))
_LATE_NOTICES: tuple[Late, ...] = (
    lambda half: half.on_deadline(FAILED),
    lambda half: half.on_peer_lost(FAILED),
    lambda half: half.on_request_failed(FAILED),
)
_LET_GO: tuple[Late, ...] = (
    lambda half: half.on_consumed()[1],
    lambda half: half.on_cancelled(CANCELLED),
    lambda half: half.on_released(DONE),
)
_LATE: dict[tuple[str, str], tuple[Late, ...]] = {
    ("sender", SenderState.FINALIZED): (
        *_LEAVES.values(),
        lambda half: half.submit_chunk(0),
        lambda half: half.submit_chunk(0, segment_end=True),
        lambda half: half.submit_end(0),
        lambda half: half.on_task_begun(),
        lambda half: half.on_produced(None),
        lambda half: half.on_producer_raised(FAILED),
        lambda half: half.on_stored(),
        lambda half: half.on_busy(_FRAME),
        lambda half: half.on_put_failed(FAILED, _FRAME),
        lambda half: half.on_given_up(FAILED),
        lambda half: half.on_receiver_stopped(CANCELLED),
        lambda half: half.on_peer_lost(FAILED),
    ),
    ("receiver", ReceiverState.TERMINAL_PENDING): (*_LATE_FRAMES, *_LATE_NOTICES),
    ("receiver", ReceiverState.CANCELLED_CURRENT): (*_LATE_NOTICES, *_LET_GO),
    ("receiver", ReceiverState.FAILED): (*_RETURNS, *_LATE_NOTICES),
    ("receiver", ReceiverState.FINALIZED): (
        *_RETURNS,
        *_LATE_NOTICES,
        lambda half: half.on_get_begun(),
        lambda half: half.on_unclaimed(FAILED),
        *_LET_GO,
    ),
}
"""What comes late in these states: it changes nothing, whatever it is."""

_ENDED_BEFORE = (ReceiverEvent.FAILED_END_ARRIVED, ReceiverEvent.PEER_LOST)
"""Its sender has ended already."""

_GOES_BACK = (SenderEvent.PUT_RETRIED, SenderEvent.PUT_DEFERRED)

Lane = tuple[str, str]
"""From whom a step comes, and to whom it happens."""

RUNNER: Lane = ("runner", "sender")
SENDER: Lane = ("sender", "sender")
PRODUCER: Lane = ("producer", "sender")
PUT: Lane = ("sender", "wire")
GET: Lane = ("wire", "receiver")
SCHEDULER: Lane = ("scheduler", "receiver")
STOP: Lane = ("receiver", "sender")

_DEBTS = (
    "a cancel leads to an end, or to a receiver that has left",
    "a raise or a put given up leads to an end, or to a receiver that has left",
    "a submitted end leads to an end, or to a receiver that has left",
    "a sender that is over leads to a receiver that has left",
)


@dataclass(frozen=True)
class Scope:
    """How large a world is, and what may go wrong in it.

    Attributes:
        generations: Lives of one external id; the next may be opened at any moment.
        chunks: Chunks that the runner of each life may submit.
        retries: Puts that may fail for now before a frame is given up.
        faults: Any of ``put`` (busy, failed, failed but stored, refused), ``raise``, ``cancel`` (by anybody, in any way that
            ends a request early), ``kill`` (of either process), ``deadline`` (too early), ``get`` (a body that cannot be
            fetched for now, or is invalid), ``segment`` (a chunk may be the last of its segment).
        sender: The sender's table, or a faulty one.
        receiver: The receiver's table, or a faulty one.
        half: The class of the sending half, or a faulty one.
        bugs: Names of faults of the runtime around the halves; see `omni_fsm.verify.faults`.
        cells: Filled with the cells of both tables that were used: rows and ignores.
        asked: Filled with the values of halves that were asked what comes late.
        lives: Filled with the values of lives, each with its number.
    """

    generations: int = 1
    chunks: int = 1
    retries: int = 1
    faults: frozenset[str] = ALL_FAULTS
    sender: SenderTable = field(default_factory=sender_table)
    receiver: ReceiverTable = field(default_factory=receiver_table)
    half: type[SenderHalf] = SenderHalf
    bugs: frozenset[str] = frozenset()
    cells: set[CellName] = field(default_factory=set)
    asked: set[Hashable] = field(default_factory=set)
    lives: dict[Hashable, int] = field(default_factory=dict)

    def world(self) -> "EdgeWorld":
        """The world at its beginning."""
        return EdgeWorld(self)


class EdgeWorld:
    """Lives of one external id on one edge, in any interleaving."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.lives: tuple[Life, ...] = ()
        self.wire: tuple[tuple[int, Frame], ...] = ()
        self.stops: frozenset[int] = frozenset()
        self.sender_alive = self.receiver_alive = True

    def key(self) -> Hashable:
        """See `omni_fsm.verify.World`."""
        known = self.scope.lives
        return (
            tuple([life.number_in(known) for life in self.lives]),
            tuple([(at, frame.kind, frame.seq, frame.cause and frame.cause.outcome) for at, frame in self.wire]),
            self.stops,
            self.sender_alive,
            self.receiver_alive,
        )

    @property
    def debts(self) -> tuple[str, ...]:
        """See `omni_fsm.verify.World`."""
        return tuple(f"{at}: {debt}" for at in range(self.scope.generations) for debt in _DEBTS)

    def owes(self) -> int:
        """See `omni_fsm.verify.World`."""
        owed = 0
        for at, life in enumerate(self.lives):
            owed |= life.owes() << at * len(_DEBTS)
        return owed

    def left(self) -> str:
        """See `omni_fsm.verify.World`."""
        if self.wire:
            return "a frame is under way"
        for at, life in enumerate(self.lives):
            if life.sender is not None and not life.sender.is_final:
                return f"{at}: the sender is {life.sender.state}"
            if life.receiver is not None and not life.receiver.is_final:
                return f"{at}: the receiver is {life.receiver.state}"
        return ""

    # What can happen

    def actions(self) -> Iterator[Action]:
        """See `omni_fsm.verify.World`."""
        if self.sender_alive and len(self.lives) < self.scope.generations:
            yield Action(Step(f"open {len(self.lives)}", *RUNNER), self._open, fair=False)
        if self.wire and self.receiver_alive:
            yield from self._deliver_actions()
        for at, life in enumerate(self.lives):
            if life.sender is not None and not life.sender.is_final:
                yield from self._runner_actions(at, life, life.sender)
                yield from self._outbox_actions(at, life.sender)
            if life.receiver is not None and not life.receiver.is_final:
                yield from self._receiver_actions(at, life, life.receiver)
        if "kill" in self.scope.faults and self.lives:
            if self.sender_alive:
                yield Action(Step("kill the sender's process", "sender", "sender"), self._kill_sender, fair=False)
            if self.receiver_alive:
                yield Action(
                    Step("kill the receiver's process", "receiver", "receiver"), self._kill_receiver, fair=False
                )

    def _runner_actions(self, at: int, life: Life, half: SenderHalf) -> Iterator[Action]:
        scope = self.scope
        active = half.state is SenderState.ACTIVE
        if active and life.accepted.bit_count() < scope.chunks:
            yield self._act(RUNNER, at, "submit a chunk", self._submit_chunk, fair=False)
            if "segment" in scope.faults:
                yield self._act(RUNNER, at, "submit the last chunk of a segment", self._submit_segment_end, fair=False)
        if active:
            yield self._act(RUNNER, at, "submit the end", self._submit_end, fair=True)
        if half.state is SenderState.TERMINAL_PENDING:
            yield self._act(RUNNER, at, "submit the end again", self._submit_end, fair=False)
        if half.state in _LEFT:
            yield self._act(RUNNER, at, "submit too late", self._submit_late, fair=False)
        if half.state is SenderState.FAILED and not half.release_noted:
            yield self._act(RUNNER, at, "release the failed", partial(self._leave, "release"), fair=True)
        if "cancel" in scope.faults:
            for name in _LEAVES:
                yield self._act(RUNNER, at, name, partial(self._leave, name), fair=False)

    def _outbox_actions(self, at: int, half: SenderHalf) -> Iterator[Action]:
        if at in self.stops:
            yield self._act(STOP, at, "the stop arrives", self._stopped, fair=True)
        if not self.receiver_alive:
            yield self._act(STOP, at, "the receiver's process is lost", self._receiver_lost, fair=True)
        task = half.in_flight
        if task is None:
            if half.ready and self._owns(at):
                yield self._act(SENDER, at, "begin the head", self._begin, fair=True)
        elif task.frame is None:
            yield from self._produce_actions(at, task)
        elif self.receiver_alive:
            yield from self._put_actions(at, task.frame)

    def _produce_actions(self, at: int, task: SendTask) -> Iterator[Action]:
        yield self._act(PRODUCER, at, f"the producer of the {task.kind} returns", self._produce, fair=True)
        if task.kind is TaskKind.CHUNK:
            yield self._act(PRODUCER, at, "the producer buffers", self._buffer, fair=False)
        if "raise" in self.scope.faults:
            yield self._act(PRODUCER, at, f"the producer of the {task.kind} raises", self._raise, fair=False)

    def _put_actions(self, at: int, frame: Frame) -> Iterator[Action]:
        name = _words(frame)
        yield self._act(PUT, at, f"put {name}: stored", self._put_stored, fair=True)
        if "put" in self.scope.faults:
            yield self._act(PUT, at, f"put {name}: busy", self._put_busy, fair=False)
            yield self._act(PUT, at, f"put {name}: failed", self._put_failed, fair=False)
            yield self._act(PUT, at, f"put {name}: reported failure, was stored", self._put_lied, fair=False)
            yield self._act(PUT, at, f"put {name}: refused", self._put_refused, fair=False)

    def _deliver_actions(self) -> Iterator[Action]:
        at, frame = self.wire[0]
        half = self.lives[at].receiver
        if half is not None and half.wants_body and not half.getting and frame.body is not None:
            yield self._act(GET, at, f"begin to get {_words(frame)}", self._begin_get, fair=True)
        else:
            yield self._act(GET, at, f"get {_words(frame)}", self._get, fair=True)
            if "get" in self.scope.faults and half is not None and half.getting:
                yield self._act(GET, at, f"get {_words(frame)}: failed", self._get_failed, fair=False)
                yield self._act(GET, at, f"get {_words(frame)}: invalid", self._get_invalid, fair=False)

    def _receiver_actions(self, at: int, life: Life, half: ReceiverHalf) -> Iterator[Action]:
        if half.staged:
            yield self._act(SCHEDULER, at, "consume", self._consume, fair=True)
        if half.state is ReceiverState.FAILED:
            yield self._act(SCHEDULER, at, "take the failure", self._consume, fair=False)
            yield self._act(
                SCHEDULER, at, "the receiver cancels", partial(self._receiver_leaves, CANCELLED), fair=False
            )
            yield self._act(
                SCHEDULER, at, "release the failed receiver", partial(self._receiver_leaves, DONE), fair=True
            )
        elif "cancel" in self.scope.faults and half.state is not ReceiverState.CANCELLED_CURRENT:
            yield self._act(
                SCHEDULER, at, "the receiver cancels", partial(self._receiver_leaves, CANCELLED), fair=False
            )
            yield self._act(SCHEDULER, at, "the receiver is released", partial(self._receiver_leaves, DONE), fair=False)
            yield self._act(SCHEDULER, at, "the request fails elsewhere", self._request_failed, fair=False)
        if not self.sender_alive and not self.wire:
            yield self._act(GET, at, "the sender's process is lost", self._sender_lost, fair=True)
        if half.waiting and (life.marker_lost or "deadline" in self.scope.faults):
            yield self._act(SCHEDULER, at, "the deadline passes", self._deadline, fair=life.marker_lost)

    def _act(
        self, lane: Lane, at: int, name: str, change: Callable[["EdgeWorld", int, Life], None], *, fair: bool
    ) -> Action:
        return Action(Step(f"{at}: {name}", *lane), partial(self._changed, at, change), fair)

    def _changed(self, at: int, change: Callable[["EdgeWorld", int, Life], None]) -> "EdgeWorld":
        twin = self._copy()
        life = self.lives[at].copy()
        twin.lives = (*self.lives[:at], life, *self.lives[at + 1 :])
        change(twin, at, life)
        return twin

    def _copy(self) -> "EdgeWorld":
        twin = EdgeWorld.__new__(EdgeWorld)
        twin.__dict__.update(self.__dict__)
        return twin

    def _owns(self, at: int) -> bool:
        return all(life.sender is None or life.sender.is_final for life in self.lives[:at])

    # What happens: the sending process

    def _open(self) -> "EdgeWorld":
        twin = self._copy()
        generation = len(self.lives)
        half = self.scope.half(self.scope.sender, EDGE, Identity("r", generation), self.scope.retries)
        twin.lives = (*self.lives, Life(half))
        return twin

    @staticmethod
    def _submit_chunk(world: "EdgeWorld", at: int, life: Life) -> None:
        bit = life.accepted + 1  # the lowest that is free: chunks are accepted in order
        world._sender_moved(at, life, life.own_sender().submit_chunk(bit))
        life.accepted |= bit

    @staticmethod
    def _submit_segment_end(world: "EdgeWorld", at: int, life: Life) -> None:
        bit = life.accepted + 1
        world._sender_moved(at, life, life.own_sender().submit_chunk(bit, segment_end=True))
        life.accepted |= bit

    @staticmethod
    def _submit_end(world: "EdgeWorld", at: int, life: Life) -> None:
        world._sender_moved(at, life, life.own_sender().submit_end(0))

    @staticmethod
    def _submit_late(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        offers = (half.submit_chunk(0), half.submit_chunk(0, segment_end=True), half.submit_end(0))
        for moved in offers:
            world._sender_moved(at, life, moved)
        if not all(moved.ignored for moved in offers):
            raise Violation("a life that has left accepts more")

    @staticmethod
    def _leave(name: str, world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        before = half.state
        world._sender_moved(at, life, _LEAVES[name](half))
        lets_go = before is SenderState.FAILED and name in ("cancel", "release", "close")
        if lets_go and not (half.is_final or half.release_noted):
            raise Violation("a failed life was let go, and does not remember it")
        flushes = before is SenderState.TERMINAL_PENDING and name in ("release", "close")
        if half.state is before and before not in _LEFT and not flushes:
            raise Violation("a life that was left goes on")

    @staticmethod
    def _stopped(world: "EdgeWorld", at: int, life: Life) -> None:
        world.stops -= {at}
        world._sender_moved(at, life, life.own_sender().on_receiver_stopped(CANCELLED))

    @staticmethod
    def _receiver_lost(world: "EdgeWorld", at: int, life: Life) -> None:
        world._sender_moved(at, life, life.own_sender().on_peer_lost(FAILED))

    @staticmethod
    def _begin(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        head = half.queue[0]
        if head.runs_producer and head.kind is not TaskKind.END and half.state in _LEFT:
            raise Violation("a producer begins for a life that has left")
        world._sender_moved(at, life, half.on_task_begun())

    @staticmethod
    def _produce(world: "EdgeWorld", at: int, life: Life) -> None:
        bits = world._run_producer(life)
        body = Chunks(life.held | bits) if life.held | bits else None
        life.held = 0
        world._sender_moved(at, life, life.own_sender().on_produced(body))

    @staticmethod
    def _buffer(world: "EdgeWorld", at: int, life: Life) -> None:
        life.held |= world._run_producer(life)
        world._sender_moved(at, life, life.own_sender().on_produced(None))

    @staticmethod
    def _raise(world: "EdgeWorld", at: int, life: Life) -> None:
        world._run_producer(life)
        half = life.own_sender()
        world._sender_moved(at, life, half.on_producer_raised(FAILED))
        if half.in_flight is not None and half.in_flight.frame is None:
            raise Violation("a producer has raised, and its task waits for it")

    def _run_producer(self, life: Life) -> int:
        """The chunk that the producer of the task in flight is given; none with an end."""
        task = life.sender.in_flight if life.sender is not None else None
        bits: int = task.item or 0 if task is not None else 0
        if bits & life.produced:
            raise Violation("a producer runs twice for one chunk")
        if life.released:
            raise Violation("a producer runs after its state was released")
        life.produced |= bits
        return bits

    @staticmethod
    def _put_stored(world: "EdgeWorld", at: int, life: Life) -> None:
        world._store(at, life)
        if "completions_by_id" in world.scope.bugs:
            at, life = len(world.lives) - 1, world.lives[-1].copy()  # whoever has the id now
            world.lives = (*world.lives[:-1], life)
        world._sender_moved(at, life, life.own_sender().on_stored())

    @staticmethod
    def _put_busy(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        world._sender_moved(at, life, half.on_busy(_frame_of(half)))

    @staticmethod
    def _put_failed(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        if "failed_put_taken_for_success" in world.scope.bugs:
            world._sender_moved(at, life, half.on_stored())
        else:
            world._feed_failure(at, life, half)

    @staticmethod
    def _put_lied(world: "EdgeWorld", at: int, life: Life) -> None:
        world._store(at, life)
        world._feed_failure(at, life, life.own_sender())

    def _feed_failure(self, at: int, life: Life, half: SenderHalf) -> None:
        task = half.in_flight
        last = task is not None and task.kind is TaskKind.END and task.attempts >= half.retries
        life.end_given_up |= last
        self._sender_moved(at, life, half.on_put_failed(FAILED, _frame_of(half)))

    @staticmethod
    def _put_refused(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_sender()
        life.end_given_up |= half.in_flight is not None and half.in_flight.kind is TaskKind.END
        world._sender_moved(at, life, half.on_given_up(FAILED))

    def _store(self, at: int, life: Life) -> None:
        """The frame in flight is on the wire."""
        frame = _frame_of(life.sender)
        bits = frame.body.bits if isinstance(frame.body, Chunks) else 0
        if not self._owns(at):
            raise Violation("two generations own the external id")
        if frame.kind is FrameKind.END:
            task = life.sender.in_flight if life.sender is not None else None
            if life.ends_put and not life.end_given_up and not (task is not None and task.attempts):
                raise Violation("a second end, and the first was not given up")
            life.ends_put = 1
            if frame.cause is not None and frame.cause.outcome is Outcome.OK and life.put | bits != life.accepted:
                raise Violation("an ok end, and an accepted chunk is not before it")
        elif life.ends_put and frame.kind is FrameKind.DATA:
            raise Violation("a frame after the end")
        life.put |= bits
        self.wire = (*self.wire, (at, frame))

    def _sender_moved(self, at: int, life: Life, moved: SenderMoved) -> None:
        self.scope.cells.add(("sender", moved.before, moved.event))
        self._check_moved(life.sender, moved)
        for effect in moved.effects:
            if effect is SenderEffect.RELEASE:
                if life.released:
                    raise Violation("state is released twice")
                life.released = True
            elif effect is SenderEffect.REPORT_MARKER_LOST:
                life.marker_lost = True
        if moved.after is SenderState.FINALIZED and moved.before is not moved.after:
            if not life.released:
                raise Violation("finalized, and its state was not released")
            if self.receiver_alive and not life.ends_put and not life.marker_lost:
                raise Violation("finalized without an end, and nobody was told")
            self.stops -= {at}

    def _check_moved(self, half: SenderHalf | None, moved: SenderMoved) -> None:
        if moved.before in _LEFT and moved.after not in (moved.before, SenderState.FINALIZED):
            raise Violation("a life that has left leaves again, for another cause")
        if half is not None and half.in_flight is not None and (half.is_final or moved.event in _GOES_BACK):
            raise Violation("a task that is over, or waits, is still in flight")
        if half is not None:
            self._check_late("sender", half)

    # What happens: the receiving process

    @staticmethod
    def _begin_get(world: "EdgeWorld", at: int, life: Life) -> None:
        world._receiver_moved(at, life, life.own_receiver().on_get_begun())

    @staticmethod
    def _get(world: "EdgeWorld", at: int, life: Life) -> None:
        _, frame = world.wire[0]
        world.wire = world.wire[1:]
        again = "registers_again" in world.scope.bugs and life.receiver is not None and life.receiver.is_final
        if life.receiver is None or again:
            life.receiver = ReceiverHalf(world.scope.receiver, EDGE, life.identity, world.scope.retries)
            life.got = 0
        half = life.own_receiver()
        if half.is_final and frame.kind is FrameKind.OPEN:
            world.stops |= {at}  # the stop that was sent found no sender
        world._judge_arrival(at, life, half, frame)

    def _judge_arrival(self, at: int, life: Life, half: ReceiverHalf, frame: Frame) -> None:
        bits = frame.body.bits if isinstance(frame.body, Chunks) else 0
        staged = len(half.staged)
        moved = half.on_frame(frame, bits)
        self._receiver_moved(at, life, moved)
        if moved.before is ReceiverState.ACTIVE and frame.kind is FrameKind.END and moved.after is not moved.before:
            if life.ended:
                raise Violation("a second end is accepted")
            life.ended = True
        if len(half.staged) == staged:
            return  # dropped or discarded
        if bits and life.got.bit_length() >= (bits & -bits).bit_length():
            raise Violation("a chunk is accepted twice or out of order")
        life.got |= bits
        if moved.event is ReceiverEvent.OK_END_ARRIVED and life.got != life.accepted:
            raise Violation("an ok end completes a stream that is not whole")

    @staticmethod
    def _get_failed(world: "EdgeWorld", at: int, life: Life) -> None:
        moved = life.own_receiver().on_get_failed(FAILED)
        world._receiver_moved(at, life, moved)
        if moved.event is not ReceiverEvent.GET_RETRIED or moved.ignored:
            world.wire = world.wire[1:]

    @staticmethod
    def _get_invalid(world: "EdgeWorld", at: int, life: Life) -> None:
        world.wire = world.wire[1:]
        world._receiver_moved(at, life, life.own_receiver().on_frame_invalid(FAILED))

    @staticmethod
    def _request_failed(world: "EdgeWorld", at: int, life: Life) -> None:
        world._receiver_moved(at, life, life.own_receiver().on_request_failed(FAILED))

    @staticmethod
    def _consume(world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_receiver()
        moved = half.on_consumed()[1]
        world._receiver_moved(at, life, moved)
        if moved.event is ReceiverEvent.END_CONSUMED and not half.is_final:
            raise Violation("the end was consumed, and the stream goes on")

    @staticmethod
    def _receiver_leaves(cause: Cause, world: "EdgeWorld", at: int, life: Life) -> None:
        half = life.own_receiver()
        world._receiver_moved(at, life, half.on_released(cause) if cause is DONE else half.on_cancelled(cause))
        if half.state not in (ReceiverState.FINALIZED, ReceiverState.CANCELLED_CURRENT):
            raise Violation("a receiver that was left goes on")

    @staticmethod
    def _sender_lost(world: "EdgeWorld", at: int, life: Life) -> None:
        world._receiver_moved(at, life, life.own_receiver().on_peer_lost(FAILED))

    @staticmethod
    def _deadline(world: "EdgeWorld", at: int, life: Life) -> None:
        world._receiver_moved(at, life, life.own_receiver().on_deadline(FAILED))

    def _receiver_moved(self, at: int, life: Life, moved: ReceiverMoved) -> None:
        self.scope.cells.add(("receiver", moved.before, moved.event))
        left = moved.before is ReceiverState.ACTIVE and moved.after not in (
            ReceiverState.ACTIVE,
            ReceiverState.TERMINAL_PENDING,
        )
        if left and moved.event not in _ENDED_BEFORE and ReceiverEffect.STOP_SENDER not in moved.effects:
            raise Violation("a receiver leaves, and its sender is not stopped")
        if ReceiverEffect.STOP_SENDER in moved.effects and life.sender is not None and not life.sender.is_final:
            self.stops |= {at}
        half = life.receiver
        if half is not None and half.is_final and half.staged:
            raise Violation("a frame is published after the cleanup")
        over = moved.after is ReceiverState.FINALIZED and moved.before is not moved.after
        if over and ReceiverEffect.RETIRE not in moved.effects:
            raise Violation("a registration ends, and leaves no tombstone")
        if half is not None:
            self._check_late("receiver", half)

    def _check_late(self, machine: str, half: SenderHalf | ReceiverHalf) -> None:
        """What comes late changes nothing; asked once for each value of a half."""
        late = _LATE.get((machine, half.state), ())
        kind = (machine, half.key()) if late else None
        if kind is None or kind in self.scope.asked:
            return
        self.scope.asked.add(kind)
        if half.state is ReceiverState.CANCELLED_CURRENT:
            self._check_returns(half)
        for happening in late:
            moved = happening(half.copy())
            self.scope.cells.add((machine, moved.before, moved.event))
            if not moved.ignored:
                raise Violation(f"{moved.event} comes late, in {moved.before}, and changes the {machine}")

    def _check_returns(self, half: Any) -> None:
        """A get that returns after the receiver left ends it, whatever it brings."""
        for happening in _RETURNS:
            left = half.copy()
            moved = happening(left)
            self.scope.cells.add(("receiver", moved.before, moved.event))
            if not left.is_final or left.getting or left.staged or ReceiverEffect.RETIRE not in moved.effects:
                raise Violation(f"{moved.event} does not end a receiver that has left")

    # Deaths

    def _kill_sender(self) -> "EdgeWorld":
        twin = self._copy()
        twin.sender_alive = False
        twin.stops = frozenset()
        twin.lives = tuple(life.copy() for life in self.lives)
        for life in twin.lives:
            life.sender = None
        return twin

    def _kill_receiver(self) -> "EdgeWorld":
        twin = self._copy()
        twin.receiver_alive = False
        twin.stops = frozenset()
        twin.wire = ()
        twin.lives = tuple(life.copy() for life in self.lives)
        for life in twin.lives:
            life.receiver = None
        return twin


def _frame_of(half: SenderHalf | None) -> Frame:
    task = half.in_flight if half is not None else None
    if task is None or task.frame is None:
        raise AssertionError(half)
    return task.frame


def _words(frame: Frame) -> str:
    if frame.cause is not None:
        return f"end({frame.cause.outcome})"
    return f"data {frame.seq}" if frame.kind is FrameKind.DATA else str(frame.kind)
