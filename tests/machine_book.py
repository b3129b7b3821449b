"""Two oracles for `test_runtime_machine`: what a stage must do with whatever happens to it.

`Followers` is the ``transitions`` library: it reads the same tables and follows each event that the observers hear of.
`Book` knows no states: lists of what was accepted, made, put, staged and taken, and the first cause of each end.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

from scripted import DONE, REFUSED, RETRY, RETRY_BUT_STORED, STORED, S, cancelled, error
from transitions import Machine, MachineError

from omni_fsm.connectors.port import BUSY, PeerBack, PeerLost, PutOutcome, Signal, Stopped
from omni_fsm.payload import decode
from omni_fsm.protocol.frames import Body, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import ProducerContext, Taken, TakenKind, Transition
from omni_fsm.tables import Row, receiver_spec, resolved_rows, sender_spec, spec_machine

WAIT_S, STALL_S, RECONNECT_S, UNCLAIMED_S, WINDOW, RETRIES = 10.0, 4.0, 1.0, 5.0, 3, 2
LIMITS = {
    "input_wait_s": WAIT_S,
    "send_stall_s": STALL_S,
    "reconnect_s": RECONNECT_S,
    "unclaimed_s": UNCLAIMED_S,
    "window_frames": WINDOW,
    "retries": RETRIES,
    "backlog_bytes": 1_000,
    "tombstone_s": 100_000.0,
}
HELD_FRAMES = 8
TOLD = ("registered", "opened", "input_ended", "output_ended", "failed", "marker_lost")
PUTS: dict[str, PutOutcome | Exception] = {
    "stored": STORED,
    "busy": BUSY,
    "retry": RETRY,
    "retry but stored": RETRY_BUT_STORED,
    "refused": REFUSED,
    "raises": OSError("gone"),
    "raises but stored": OSError("gone"),
}


# The first oracle


class Follower:
    """A model for ``transitions``: it gets ``state`` and one method an event."""


class Followers:
    """An observer: one model of the library for each half follows what is reported of it."""

    specs: ClassVar[dict[str, Any]] = {spec.machine: spec for spec in (sender_spec(), receiver_spec())}
    machines: ClassVar[dict[str, Machine]] = {name: spec_machine(spec) for name, spec in specs.items()}
    rows: ClassVar[dict[tuple[str, str, str], Row]] = {
        (name, row.state, row.event): row for name, spec in specs.items() for row in resolved_rows(spec)
    }

    def __init__(self, reached: set[tuple[str, str, str]]) -> None:
        self.models: dict[tuple[str, Identity], Any] = {}
        self.reached = reached
        self.problems: list[str] = []

    def on_transition(self, transition: Transition) -> None:
        machine, event, before = transition.machine, str(transition.event), str(transition.before)
        model = self._model(machine, transition.identity)
        row = self.rows.get((machine, before, event))
        if model.state != before or row is None or self._after(model, event) != str(transition.after):
            self.problems.append(f"{transition} but {model.state}")
        elif (row.ignored, self._effects(machine, row)) != (transition.ignored, [*map(str, transition.effects)]):
            self.problems.append(f"{transition} is not {row}")
        elif not row.ignored:
            self.reached.add((machine, before, event))

    def on_failure(self, failure: object) -> None:
        """The recorder keeps them."""

    def _model(self, machine: str, identity: Identity) -> Any:
        if (machine, identity) not in self.models:
            self.models[machine, identity] = Follower()
            self.machines[machine].add_model(self.models[machine, identity])
        return self.models[machine, identity]

    def _effects(self, machine: str, row: Row) -> list[str]:
        return [name for name in row.actions if name in self.specs[machine].effects]

    @staticmethod
    def _after(model: Any, event: str) -> str:
        try:
            model.trigger(event)
        except MachineError as refusal:
            return str(refusal)
        return str(model.state)

    def states_of(self, identity: Identity) -> list[str]:
        models = [self.models.get((machine, identity)) for machine in ("sender", "receiver")]
        return ["active" if model is None else str(model.state) for model in models]

    def close(self) -> None:
        for (machine, _), model in self.models.items():
            self.machines[machine].remove_model(model)


# The second oracle


@dataclass(eq=False)
class Life:
    """What one life must have sent and what its host must have taken, in lists and marks."""

    name: str
    identity: Identity
    # The output
    accepted: list[tuple[int, str]] = field(default_factory=list)  # number; chunk, segment or end
    calls: int = 0
    calls_at_cause: int = -1
    producing: bool = False
    kept: list[int] = field(default_factory=list)  # what the producer keeps for the request
    kept_in_segment: list[int] = field(default_factory=list)
    made: list[tuple[int | None, int, bool, bool]] = field(default_factory=list)  # payload, segment; ends it, ends all
    settled: int = 0  # how many of those are stored, or never will be
    burned: int = 0
    after_cause: set[int] = field(default_factory=set)
    pending: Frame | None = None  # this frame must come again
    attempts: Counter[Any] = field(default_factory=Counter)
    busy: tuple[Any, int] = (None, 0)
    stored: list[Frame] = field(default_factory=list)
    announced: bool = False
    owned: bool = False
    cause: Cause | None = None  # why the output ends early
    end_as: Outcome = Outcome.OK
    end_is_out: bool = False
    let_go: bool = False
    over: bool = False
    lost_peer: bool = False
    # The input
    opened: bool = False
    getting: bool = False
    next_seq: int = 0
    staged: list[tuple[int | None, bool]] = field(default_factory=list)
    taken: int = 0
    left: Cause | None = None  # why nothing more is wanted, ``ok`` included
    failed: bool = False
    buried: bool = False
    heard_ns: int = 0
    awaits: dict[str, int] = field(default_factory=dict)  # by edge: when a half that has not opened gives up
    host_knows: bool = False

    @property
    def has_ended(self) -> bool:
        return bool(self.accepted) and self.accepted[-1][1] == "end"

    @property
    def is_open(self) -> bool:
        """Whether nothing has ended the output early, and its end is not out."""
        return self.cause is None and not self.over

    def is_submitting(self) -> bool:
        return self.is_open and not self.has_ended

    def is_receiving(self) -> bool:
        return self.left is None

    @property
    def is_gone(self) -> bool:
        """Whether a successor may open."""
        return self.over and not self.producing

    @property
    def is_forgotten(self) -> bool:
        return self.over and self.buried

    @property
    def is_waiting(self) -> bool:
        return self.left is None and not self.staged

    @property
    def is_unheard_of(self) -> bool:
        """Whether perhaps no other stage knows the request yet: a front waits for word of it."""
        return self.is_waiting and not self.opened and not self.getting

    # What the producer is asked

    def called(self, context: ProducerContext) -> None:
        """Once for each submit, in order, and never after something has ended the output."""
        number, kind = self.accepted[self.calls]
        before = [what for _, what in self.accepted[: self.calls]]
        assert (context.output, context.request) == (number, self.name)
        assert (context.is_finished, context.is_segment_finished) == (kind == "end", kind != "chunk")
        assert (context.segment, context.seq) == (before.count("segment"), len(self.made))
        assert self.owned
        assert not self.over
        assert self.cause is None or (kind == "end" and self.end_as is Outcome.CANCELLED)
        self.calls += 1
        self.producing = True
        self.kept.append(number)
        self.kept_in_segment.append(number)

    def returned(self, payload: int | None) -> None:
        kinds = [what for _, what in self.accepted[: self.calls]]
        if payload is not None or kinds[-1] != "chunk":
            self.made.append((payload, kinds[:-1].count("segment"), kinds[-1] == "segment", kinds[-1] == "end"))

    def owes_calls(self, *, is_front: bool) -> bool:
        """Whether a producer should have run by now: only a front's end waits, for word of its request."""
        waits = is_front and self.is_unheard_of
        owed = [kind for _, kind in self.accepted[self.calls :] if not (waits and kind == "end")]
        return bool(owed) and self.is_open and self.owned and self.announced and self.pending is None

    # What is put

    def check_put(self, frame: Frame) -> None:
        """Whether this frame may be put now: nothing out of turn, nothing twice, nothing after the end."""
        assert self.owned
        assert not self.over
        assert not self.end_is_out
        assert self.announced is (frame.kind is not FrameKind.OPEN)
        if frame.seq >= 0:
            self._check_numbered(frame)
        elif frame.kind is not FrameKind.OPEN:
            assert self.cause is not None
            cause = Cause(self.end_as, self.cause.reason)
            assert frame == Frame(frame.edge, self.identity, FrameKind.END, segment=frame.segment, cause=cause)

    def _check_numbered(self, frame: Frame) -> None:
        assert frame.seq == self.settled
        assert self.pending is None or self.pending.key == frame.key
        is_end = frame.kind is FrameKind.END
        assert (payload_of(frame.body), frame.segment, frame.segment_end, is_end) == self.made[frame.seq]
        if is_end:
            assert frame.cause == Cause(Outcome.OK)
            assert self._is_complete()
            assert self.end_as is not Outcome.ERROR or self.calls_at_cause == len(self.accepted)
        elif self.cause is not None:
            self.after_cause.add(frame.seq)
            assert len(self.after_cause) == 1

    def _is_complete(self) -> bool:
        """Whether all that was accepted, and not merely buffered, is stored, each once and in order."""
        numbered = list(dict.fromkeys(frame.seq for frame in self.stored if frame.kind is FrameKind.DATA))
        everything = self.has_ended and self.calls == len(self.accepted) and self.burned == 0
        return everything and numbered == list(range(len(self.made) - 1))

    def must_drop(self, frame: Frame) -> bool:
        """Whether a failed end waits behind this chunk."""
        may_end_well = self.has_ended and self.end_as is Outcome.CANCELLED
        return frame.kind is FrameKind.DATA and self.cause is not None and not may_end_well

    def leave(self, end_as: Outcome, cause: Cause) -> None:
        self.cause, self.end_as, self.calls_at_cause = cause, end_as, self.calls

    def drop_staged(self) -> None:
        self.taken += len(self.staged)
        self.staged.clear()


class Book:
    """The reference: each happening, and what it must lead to."""

    def __init__(self, *, is_front: bool) -> None:
        self.is_front = is_front
        self.lives: dict[Identity, Life] = {}
        self.lost: dict[str, Cause] = {}
        self.closing = False
        self.held: dict[Identity, list[tuple[Frame, Cause | None]]] = {}
        self.held_until: dict[Identity, int] = {}
        self.orphans: set[Identity] = set()
        self.turned_away: dict[Identity, Cause] = {}
        self.stops: defaultdict[Identity, list[Cause]] = defaultdict(list)
        self.reclaims: defaultdict[Identity, list[bool]] = defaultdict(list)  # whether what is unread goes too
        self.reported: dict[str, Cause] = {}
        self.told: dict[str, dict[str, Any]] = {name: {} for name in TOLD}

    @property
    def known(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.is_forgotten]

    def named(self, name: str) -> Life:
        return next(life for life in self.lives.values() if life.name == name)

    # Lives

    def register(self, identity: Identity, now_ns: int) -> None:
        life = self.lives[identity] = Life(name_of(identity), identity, heard_ns=now_ns)
        self.promote()
        self.held_until.pop(identity, None)
        for frame, problem in self.held.pop(identity, []):
            self.receive(life, frame, problem, now_ns)
        if identity in self.orphans:
            self.fail_input(life, error("peer_lost"), stops=False)
        life.awaits.update(dict.fromkeys(self.lost, now_ns + int(RECONNECT_S * S)))
        if identity in self.turned_away:
            self.fail_input(life, self.turned_away[identity])

    def promote(self) -> None:
        """The oldest life owns the external id; one that waits for it lets a failed owner go."""
        for external_id in {identity.external_id for identity in self.lives}:
            while lives := self._lives_of(external_id):
                owner, *others = lives
                owner.owned = True
                owner.let_go |= bool(others) and owner.end_as is Outcome.ERROR
                if owner.end_is_out and owner.let_go:
                    self.finish(owner)
                if not owner.is_gone:
                    break

    def _lives_of(self, external_id: str) -> list[Life]:
        return [life for life in self.lives.values() if life.identity.external_id == external_id and not life.is_gone]

    def finish(self, life: Life) -> None:
        if not life.over:
            life.over, life.pending = True, None
            self.told["output_ended"][life.name] = None
            self.reclaims[life.identity].append(False)
            self.promote()

    def tell(self, life: Life, cause: Cause) -> None:
        self.reported.setdefault(life.name, cause)
        if not life.host_knows:
            life.host_knows = True
            self.told["failed"][life.name] = cause

    # What ends an output

    def fail_output(self, life: Life, cause: Cause) -> None:
        """Its producer raised, its frame was given up, or its host failed it."""
        if life.is_open:
            life.leave(Outcome.ERROR, cause)
            self.tell(life, cause)
            self._tell_input(life, cause)
            self.promote()

    def stop_output(self, life: Life, cause: Cause) -> None:
        if life.is_open:
            life.leave(Outcome.CANCELLED, cause)
            if not (self.is_front and cause.outcome is Outcome.DONE):
                self.tell(life, cause)
                self._tell_input(life, cause)

    def cancel_output(self, life: Life, cause: Cause) -> None:
        if life.is_open:
            life.leave(Outcome.CANCELLED, cause)
        life.let_go |= life.end_as is Outcome.ERROR
        self.promote()

    def release_output(self, life: Life, cause: Cause) -> None:
        """A stream that nobody ended is cancelled; one that its host has ended still flushes."""
        life.let_go = True
        if life.is_submitting():
            life.leave(Outcome.CANCELLED, cause)
        self.promote()

    def _tell_input(self, life: Life, cause: Cause) -> None:
        if self.is_front:
            self.fail_input(life, cause, tells=False)
        else:
            self.leave_input(life, cause, tells=False)

    # What ends an input

    def fail_input(self, life: Life, cause: Cause, *, stops: bool = True, tells: bool = True) -> None:
        if life.left is not None:
            return
        life.left, life.failed = cause, True
        life.drop_staged()
        self.tell(life, cause)
        if stops:
            self._stop(life.identity, cause)
        if tells:
            self._tell_output(life, cause)

    def leave_input(self, life: Life, cause: Cause, *, tells: bool) -> None:
        """Its host has enough of it, or something cancelled it: later frames meet a tombstone."""
        if life.buried:
            return
        life.buried = True
        life.drop_staged()
        if life.failed:
            return
        if life.left is None:
            self._stop(life.identity, cause)
        life.left = cause
        if tells:
            self._tell_output(life, cause)

    def _tell_output(self, life: Life, cause: Cause) -> None:
        if cause.outcome is not Outcome.ERROR:
            self.cancel_output(life, cause)
        elif life.is_open:
            life.leave(Outcome.ERROR, cause)
            self.promote()

    def _stop(self, identity: Identity, cause: Cause) -> None:
        self.stops[identity].append(DONE if cause.outcome is Outcome.OK else cause)

    # What the host says

    def cancel(self, life: Life, cause: Cause) -> None:
        life.host_knows = True
        self.leave_input(life, cause, tells=True)
        self.cancel_output(life, cause)

    def release(self, life: Life) -> None:
        life.host_knows = True
        self.leave_input(life, DONE, tells=False)
        self.release_output(life, cancelled("released"))

    def fail(self, life: Life, cause: Cause) -> None:
        life.host_knows = True
        self.fail_output(life, cause)
        self.leave_input(life, cause, tells=True)

    def end(self, life: Life, number: int) -> None:
        life.accepted.append((number, "end"))
        if not self.is_front:
            self.leave_input(life, DONE, tells=False)

    def close(self) -> None:
        self.closing = True
        cause = cancelled("shutdown")
        for identity in list(self.held):
            self.turn_away(identity, cause)
        for life in self.known:
            life.host_knows = True
            self.leave_input(life, cause, tells=True)
            self.release_output(life, cause)

    def take(self, life: Life, now_ns: int) -> Taken:
        """What the host must be given, and what it leaves."""
        if life.failed and not life.buried:
            return Taken(TakenKind.FAILED, cause=life.left)
        if not life.staged:
            return Taken(TakenKind.NOT_YET if life.left is None else TakenKind.GONE)
        payload, is_end = life.staged.pop(0)
        life.taken += 1
        life.heard_ns = now_ns
        if not is_end:
            return Taken(TakenKind.CHUNK, payload)
        life.buried = True
        self.told["input_ended"][life.name] = None
        return Taken(TakenKind.END, payload, Cause(Outcome.OK))

    # What becomes of a put

    def put(self, life: Life, frame: Frame, how: str, now_ns: int, *, crossed: bool) -> None:
        """One put's outcome; ``crossed`` when the peer was lost meanwhile: whether this frame is with it, nobody knows."""
        if how.endswith("stored"):
            life.stored.append(frame)
        unsure = crossed and how not in ("busy", "refused")
        if life.over:
            self.reclaims[life.identity].extend([True] * unsure)
            return
        life.pending = frame
        if unsure:
            assert frame.kind is FrameKind.OPEN  # any other frame's life has ended with its peer
        elif how == "stored":
            self._stored(life, frame)
        elif how == "busy":
            self._busy(life, frame, now_ns)
        elif how == "refused":
            self._given_up(life, frame, "put_given_up: too large")
        else:
            self._again(life, frame, getattr(PUTS[how], "reason", "OSError: gone"))
        self.promote()

    def _busy(self, life: Life, frame: Frame, now_ns: int) -> None:
        if life.busy[0] != frame.key:
            life.busy = frame.key, now_ns
        if now_ns - life.busy[1] >= STALL_S * S:
            life.busy = None, 0
            self._given_up(life, frame, f"send_stall: no credit or room for {STALL_S:g} s")
        elif life.must_drop(frame):
            self._given_up(life, frame, "a failed end waits")

    def _again(self, life: Life, frame: Frame, reason: str) -> None:
        life.busy = None, 0
        life.attempts[frame.key] += 1
        if life.attempts[frame.key] > RETRIES or life.must_drop(frame):
            self._given_up(life, frame, f"put_given_up: {reason}")

    def _stored(self, life: Life, frame: Frame) -> None:
        life.busy = None, 0
        self._settle(life, frame)
        if frame.segment_end:
            life.kept_in_segment.clear()
        if frame.kind is FrameKind.END:
            self._end_is_out(life)

    def _given_up(self, life: Life, frame: Frame, reason: str) -> None:
        self._settle(life, frame)
        life.burned += frame.seq >= 0
        if frame.kind is FrameKind.END and (frame.seq < 0 or life.end_as is Outcome.CANCELLED):
            self.told["marker_lost"][life.name] = life.cause
            self._end_is_out(life)
        self.fail_output(life, error(reason))

    def _settle(self, life: Life, frame: Frame) -> None:
        life.pending = None
        life.announced = True
        life.settled += frame.seq >= 0

    def _end_is_out(self, life: Life) -> None:
        life.end_is_out = True
        if life.end_as is not Outcome.ERROR:
            self.finish(life)

    # What comes

    def beyond_credit(self, frame: Frame) -> bool:
        life = self.lives.get(frame.identity)
        if life is None or life.left is not None or not frame.uses_credit or frame.seq < life.next_seq:
            return False
        return len(life.staged) >= WINDOW

    def receive(self, life: Life, frame: Frame, problem: Cause | None, now_ns: int) -> None:
        """A frame of a registered life; ``problem`` says why its body cannot be had."""
        if life.left is not None:
            if frame.kind is FrameKind.OPEN:
                self._stop(life.identity, life.left)
            return
        life.heard_ns = now_ns
        if problem is not None:
            self.fail_input(life, problem)
        elif frame.kind is FrameKind.OPEN:
            if not life.opened:
                self.told["opened"][life.name] = None
            life.opened = True
        else:
            self._receive_numbered(life, frame)

    def _receive_numbered(self, life: Life, frame: Frame) -> None:
        if frame.cause is not None and frame.cause.outcome is Outcome.DONE:
            self.fail_input(life, error("frame_invalid: an end with outcome done(done)"))
        elif frame.cause is not None and frame.cause.outcome is not Outcome.OK:
            self.fail_input(life, frame.cause, stops=False)
        elif frame.seq > life.next_seq:
            self.fail_input(life, error(f"frame_ahead: seq {frame.seq} came, {life.next_seq} was expected"))
        elif frame.seq == life.next_seq:
            life.staged.append((payload_of(frame.body), frame.kind is FrameKind.END))
            life.next_seq += 1
            life.left = frame.cause

    def hold(self, frame: Frame, problem: Cause | None, now_ns: int) -> bool:
        """A frame of nobody. Returns whether its identity is offered to the host now."""
        identity = frame.identity
        if identity in self.turned_away:
            if frame.kind is FrameKind.OPEN:
                self._stop(identity, self.turned_away[identity])
            return False
        held = self.held.setdefault(identity, [])
        is_new = not held
        if is_new:
            self.held_until[identity] = now_ns + int(UNCLAIMED_S * S)
        if any(other.key == frame.key for other, _ in held):
            return False
        if len(held) >= HELD_FRAMES:
            self.turn_away(identity, error("unclaimed"))
            return False
        held.append((frame, problem))
        return is_new

    def turn_away(self, identity: Identity, cause: Cause) -> None:
        self.held.pop(identity, None)
        self.held_until.pop(identity, None)
        self.orphans.discard(identity)
        self.turned_away[identity] = cause
        self._stop(identity, cause)

    # Edges and time

    def hear(self, signal: Signal, now_ns: int) -> None:
        """What the receiving end of the output edge says."""
        match signal:
            case Stopped(identity, cause) if identity in self.lives:
                self.stop_output(self.lives[identity], cause)
            case PeerLost():
                self.lose("sink", now_ns)
            case PeerBack():
                self.find("sink")

    def lose(self, edge: str, now_ns: int) -> None:
        self.lost[edge] = error(f"{edge} is gone")
        if edge == "source":
            self.orphans |= self.held.keys()
        for life in list(self.lives.values()):
            is_done, has_met = (life.over, life.announced) if edge == "sink" else (life.buried, life.opened)
            if has_met:
                self._lose_half(life, edge)
            elif not is_done:
                life.awaits.setdefault(edge, now_ns + int(RECONNECT_S * S))
            if has_met and edge == "sink" and self.is_front and life.is_unheard_of:
                self.fail_input(life, self.lost[edge], tells=False)

    def find(self, edge: str) -> None:
        self.lost.pop(edge, None)
        for life in self.lives.values():
            life.awaits.pop(edge, None)

    def _lose_half(self, life: Life, edge: str) -> None:
        cause = self.lost[edge]
        if edge == "source":
            self.fail_input(life, cause, stops=False)
        elif not life.over:
            self.fail_output(life, cause)
            life.lost_peer = True
            self.finish(life)
            self.reclaims[life.identity].append(True)

    def pass_time(self, now_ns: int) -> None:
        while due := [timer for timer in self._timers() if timer[0] <= now_ns]:
            _, goes_off, args = min(due, key=itemgetter(0))
            goes_off(*args)

    def _timers(self) -> Iterator[tuple[int, Callable[..., None], tuple[Any, ...]]]:
        for identity, until_ns in self.held_until.items():
            yield until_ns, self.turn_away, (identity, error("unclaimed"))
        late = error(f"deadline_passed: no frame for {WAIT_S:g} s")
        for life in self.lives.values():
            if life.is_waiting:
                yield life.heard_ns + int(WAIT_S * S), self.fail_input, (life, late)
            for edge, until_ns in life.awaits.items():
                yield until_ns, self._give_up_peer, (life, edge)

    def _give_up_peer(self, life: Life, edge: str) -> None:
        del life.awaits[edge]
        if not life.is_forgotten and edge in self.lost:
            self._lose_half(life, edge)


def name_of(identity: Identity) -> str:
    return f"{identity.external_id}-{identity.generation}"


def payload_of(body: Body | None) -> Any:
    return None if body is None else decode(b"".join(body.parts))
