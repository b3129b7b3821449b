"""The scheduler's half of a stage: which requests may compute now, and which are set aside until they can.

Where a request belongs is worked out anew each cycle, from the state of its halves and from the scheduler's own rules: a wait
is a view, nothing remembers that somebody waits. One function says where (`SchedulerCoordinator._place_of`), for every mode
alike, and one moves (`SchedulerCoordinator._move`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from omni_fsm.adapters.queues import R, Waiting, rewrite
from omni_fsm.adapters.scheduling import (
    ASIDE,
    QUEUED,
    Chunk,
    ChunkRules,
    FeedbackSink,
    Note,
    Place,
    Resume,
    SchedulerConfig,
    SchedulerRules,
    Slots,
    Step,
    Turn,
)
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.runtime import Clock, Feedback, StageRuntime, Standing, TakenKind
from omni_fsm.runtime.ports import MonotonicClock


@dataclass(slots=True, eq=False)
class _Seat(Generic[R]):
    """What the coordinator keeps of one request while the scheduler tracks it.

    Attributes:
        request: The scheduler's request.
        number: Its place in first-come order.
        seen_ns: When it was first seen.
        place: Where it is.
        slot: Whether it was running when the scheduler last had it.
        lent: Whether that slot was lent since.
        registered: Whether the stage has known it: unknown means over from then on.
        input_ended: Whether the end of its input was taken.
        turn: Its segment.
        chunk: The chunk that is staged first, once looked at.
        notes: Metadata that came without work and was not given in a cycle that ended well.
    """

    request: R
    number: int
    seen_ns: int
    place: Place
    slot: bool = False
    lent: bool = False
    registered: bool = False
    input_ended: bool = False
    turn: Turn = field(default_factory=Turn)
    chunk: Chunk | None = None
    notes: list[Any] = field(default_factory=list)


class Cycle(Generic[R]):
    """What one scheduling cycle is told, and the steps that it takes.

    Attributes:
        failed: Requests that end early, with their first cause: finish each as failed. Both its roles are over: what ended its
            receiver has ended its sender. They are out of the queues.
        done: Requests whose input is over and computed, and that have no work left: finish each as complete.
        chunks: What each request in the queues has to compute next, by internal id. Requests without an entry go on with
            work of their own.
        metadata: What came for a request without anything to compute, in order.
        max_running: How many requests the running list may hold in this cycle.
        feedback: All that the stage told since the last cycle that ended well.
        steps: The steps of this cycle, in the order in which they were asked for.
    """

    def __init__(
        self,
        next_step: Callable[["Cycle[R]", R, int, bool], Step[R] | None],
        feedback: Feedback,
        queued: dict[Place, list[R]],
    ) -> None:
        self.failed: dict[str, Cause] = {}
        self.done: dict[str, None] = {}
        self.chunks: dict[str, Chunk] = {}
        self.metadata: dict[str, list[Any]] = {}
        self.max_running = 0
        self.feedback = feedback
        self.steps: list[Step[R]] = []
        self.queued = queued
        self._next_step = next_step

    def step(self, request: R, budget_tokens: int, *, with_chunk: bool = True) -> Step[R] | None:
        """Give a request a part in this step: its chunk, whole and with its note, or, if it needs none, its own work.

        Called by: the scheduler, at most once a cycle for each request. The chunk is taken from the stage, and its credit
        goes back, when the cycle ends well.

        Args:
            request: A request of the queues.
            budget_tokens: Tokens that this step still has room for.
            with_chunk: Whether to compute the chunk that is there; False: go on with its own work.

        Returns:
            The step; None when the request has no part in this cycle: its chunk does not fit into the budget or belongs to
            the next segment while results of this one are to come, it waits, has a step in this cycle, or is over.
        """
        return self._next_step(self, request, budget_tokens, with_chunk)


class SchedulerCoordinator(Generic[R]):
    """Parks and restores the requests of a scheduler's queues, by the state of their receivers.

    A scheduler's cycle is ``with coordinator.cycle(waiting, running) as cycle:``, around what it does anyway. What it finishes
    or aborts it says by `finish` and `abort`; results it hands in by `settle`. All of that is the scheduler's thread's;
    `push_feedback` is any thread's. Nothing here waits.

    Args:
        runtime: The stage (of a `StageRunnerAdapter`: its ``runtime``). Only this coordinator collects its feedback and takes
            its chunks.
        requests: The scheduler's own table of its live requests, by internal id; borrowed, read in every cycle. A request
            that is not in it is freed: it never goes back into a queue.
        config: Settings.
        rules: What the scheduler knows better; None: `ChunkRules`.
        sink: Is pushed the feedback as well.
        clock: Time.

    Attributes:
        late_updates: Updates for requests that are not here, or not paused.
        stale_results: Results of a former segment, or of a request that is over, each counted once.
    """

    def __init__(  # noqa: PLR0913 - the ports of a scheduler
        self,
        runtime: StageRuntime,
        requests: Mapping[str, R],
        config: SchedulerConfig,
        *,
        rules: SchedulerRules[R] | None = None,
        sink: FeedbackSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._runtime = runtime
        self._requests = requests
        self._config = config
        self._rules: SchedulerRules[R] = rules or ChunkRules()
        self._clock = clock or MonotonicClock()
        self._told = _Told(runtime, sink)
        self._seats: dict[str, _Seat[R]] = {}  # in first-come order
        self._leaving: dict[str, Cause] = {}  # to be given; kept until a cycle that gave them has ended well
        self._early: dict[str, tuple[Cause, int]] = {}  # failed before the scheduler heard of them; kept until then
        self._cycle: Cycle[R] | None = None
        self._seen = 0
        self._steps = 0
        self.late_updates = 0
        self.stale_results = 0

    # What can be asked

    @property
    def places(self) -> dict[str, Place]:
        """Where each request was put in the last cycle, in first-come order: why it does not run, if it does not."""
        return {internal_id: seat.place for internal_id, seat in self._seats.items()}

    @property
    def num_parked(self) -> int:
        """How many requests are set aside. They are in none of the scheduler's queues: it has work while there are any."""
        return sum(seat.place in ASIDE for seat in self._seats.values())

    @property
    def num_paused(self) -> int:
        """How many pause between two segments."""
        return sum(seat.place is Place.PAUSED for seat in self._seats.values())

    @property
    def num_running_waiting_for_chunk(self) -> int:
        """How many running requests are set aside until a chunk comes."""
        return sum(seat.slot and seat.place is Place.AWAITS_CHUNK for seat in self._seats.values())

    @property
    def num_reserved(self) -> int:
        """How many slots running requests that are set aside keep, or are the next to get."""
        return sum(seat.place is Place.NO_SLOT or self._keeps(seat, seat.place) for seat in self._seats.values())

    @property
    def next_due_ns(self) -> int | None:
        """When the next deadline of a parked request passes, in nanoseconds of the clock; a cycle must run then."""
        dues = [self._due_ns(seat) for seat in self._seats.values() if seat.place is not Place.LEAVING]
        return min((due for due in dues if due is not None), default=None)

    # A cycle

    @contextmanager
    def cycle(self, waiting: Waiting[R], running: MutableSequence[R]) -> Iterator[Cycle[R]]:
        """``begin_cycle``, the block, ``end_cycle``; a block that raises loses no request, no chunk and no failure."""
        cycle = self.begin_cycle(waiting, running)
        try:
            yield cycle
        except BaseException:
            self.end_cycle(waiting, running, failed=True)
            raise
        self.end_cycle(waiting, running)

    def begin_cycle(self, waiting: Waiting[R], running: MutableSequence[R]) -> Cycle[R]:
        """Collect the feedback, take out of the queues what cannot compute, put back what can.

        Called by: the scheduler, once a cycle, before it schedules. When it raises, because one of the rules or a queue has,
        nothing is lost: the next one goes on from there.

        Args:
            waiting: The waiting queue, in the order in which it is served.
            running: The running list; changed in place.

        Returns:
            What the scheduler has to know, until ``end_cycle``.
        """
        if self._cycle is not None:
            self.end_cycle(waiting, running, failed=True)
        now_ns = self._clock.now_ns()
        queued = self._look_at_queues(waiting, running, now_ns)
        self._forget_freed()
        told = self._told.collect()
        self._hear(told.failed, now_ns)
        plan = self._plan(now_ns)
        cycle = self._cycle = Cycle(self._step, told, queued)
        self._move(plan, queued, waiting, running)
        self._fill(cycle)
        return cycle

    def end_cycle(self, waiting: Waiting[R], running: MutableSequence[R], *, failed: bool = False) -> None:
        """Take the chunks of the cycle's steps from the stage; what the cycle was given counts as given.

        Called by: `cycle`, or the scheduler, after it has scheduled; with ``failed`` from an exception's way out. Then its steps
        never were, its failures and metadata come again, and a request that got lost between the queues is put back.
        """
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            return
        if failed:
            self._put_back_lost(cycle, waiting, running)
            return
        for step in cycle.steps:
            self._commit(step)
        for internal_id in cycle.metadata.keys() & self._seats.keys():
            self._seats[internal_id].notes.clear()
        for internal_id in (*cycle.failed, *cycle.done):
            self._leaving.pop(internal_id, None)
        self._told.given()

    def settle(self, step: Step[R]) -> bool:
        """A result has come. Returns whether it counts: not twice, not for a former segment, not for a request that is over.

        Called by: the scheduler, for each step of each batch, before it uses the result.
        """
        if step.number not in step.turn.in_flight:
            return False
        step.turn.in_flight.discard(step.number)
        seat = self._seats.get(step.request.request_id)
        if seat is None or seat.turn is not step.turn or seat.place is Place.LEAVING:
            self.stale_results += 1
            return False
        return True

    # What the scheduler says

    def pause(self, internal_id: str) -> bool:
        """The request's segment is over here, and it rests until the next one begins; results still to come are stale.

        Called by: the scheduler of a resumable request. It is taken out of its queue by the next cycle.

        Returns:
            Whether the request is here.
        """
        seat = self._seats.get(internal_id)
        if seat is None or seat.place is Place.LEAVING:
            return False
        if seat.turn.paused_ns is None:
            seat.turn = Turn(seat.turn.segment, paused_ns=self._clock.now_ns())
        return True

    def update(self, internal_id: str) -> bool:
        """A paused request's next segment begins. One that is not here, or not paused, is not made: the update is counted.

        Returns:
            Whether the request was resumed.
        """
        seat = self._seats.get(internal_id)
        if seat is None or seat.place is Place.LEAVING or seat.turn.paused_ns is None:
            self.late_updates += 1
            return False
        seat.turn = Turn(seat.turn.segment)
        return True

    def finish(self, internal_ids: Iterable[str], waiting: Waiting[R], running: MutableSequence[R]) -> None:
        """The scheduler is through with these requests: they leave queues and stage, wherever they are.

        Called by: the scheduler, for every request that it ends, whatever its status says, those of ``Cycle.failed`` and
        ``Cycle.done`` included; end its output first. One whose output nobody ended is cancelled. Idempotent.
        """
        self._take_out(internal_ids, waiting, running, self._runtime.release)

    def abort(
        self, internal_ids: Iterable[str], waiting: Waiting[R], running: MutableSequence[R], reason: str = "aborted"
    ) -> None:
        """As `finish`, for requests that nobody wants any more: every other stage is told why."""
        self._take_out(internal_ids, waiting, running, lambda internal_id: self._runtime.cancel(internal_id, reason))

    def _take_out(
        self,
        internal_ids: Iterable[str],
        waiting: Waiting[R],
        running: MutableSequence[R],
        leave: Callable[[str], None],
    ) -> None:
        names = set(internal_ids)
        for queue in (waiting, running):
            rewrite(queue, [request for request in queue if request.request_id not in names])
        for internal_id in names:
            self._seats.pop(internal_id, None)
            self._leaving.pop(internal_id, None)
            self._early.pop(internal_id, None)
        self._let_go(names, leave)

    def _let_go(self, names: set[str], leave: Callable[[str], None]) -> None:
        """Leave these in the stage. What it has told of them is void: a later request may have the same name."""
        for internal_id in names:
            leave(internal_id)
        self._told.forget(names)

    def push_feedback(self) -> None:
        """Collect the stage's feedback now and hand it to the sink; the next cycle still acts on it.

        Called by: ``StageHost.feedback_ready``, on any thread.
        """
        self._told.push()

    # Looking

    def _look_at_queues(self, waiting: Waiting[R], running: MutableSequence[R], now_ns: int) -> dict[Place, list[R]]:
        """Seat whoever is in the queues. Where the scheduler has put a request, it is; once, and only if it is tracked."""
        queued: dict[Place, list[R]] = {Place.RUNNING: [], Place.WAITING: []}
        found: set[int] = set()
        for place, queue in ((Place.RUNNING, running), (Place.WAITING, waiting)):
            for request in queue:
                tracked = self._requests.get(request.request_id) is request
                if not tracked or id(request) in found:
                    continue
                found.add(id(request))
                seat = self._seat_of(request, now_ns)
                if seat.place is not Place.LEAVING:
                    seat.place, seat.slot, seat.lent = place, place is Place.RUNNING, False
                    queued[place].append(request)
        return queued

    def _seat_of(self, request: R, now_ns: int) -> _Seat[R]:
        internal_id = request.request_id
        seat = self._seats.get(internal_id)
        if seat is None or seat.request is not request:
            self._seats.pop(internal_id, None)
            self._seen += 1
            seat = self._seats[internal_id] = _Seat(request, self._seen, now_ns, Place.WAITING)
            if internal_id in self._early:
                self._leaving[internal_id] = self._early.pop(internal_id)[0]
        return seat

    def _forget_freed(self) -> None:
        """Requests that the scheduler no longer tracks are let go of, wherever they were."""
        freed: set[str] = set()
        for internal_id, seat in list(self._seats.items()):
            tracked = self._requests.get(internal_id)
            if tracked is not seat.request:
                del self._seats[internal_id]
                self._leaving.pop(internal_id, None)
                if tracked is None:
                    freed.add(internal_id)
        if freed:
            self._let_go(freed, self._runtime.release)

    def _hear(self, failed: Mapping[str, Cause], now_ns: int) -> None:
        """Failures of requests that the scheduler has, and of those that it may yet hear of: the engine is told later."""
        self._early = {name: early for name, early in self._early.items() if early[1] > now_ns}
        for internal_id, cause in failed.items():
            seat, request = self._seats.get(internal_id), self._requests.get(internal_id)
            if seat is None and request is not None:
                seat = self._seat_of(request, now_ns)
            if seat is None:
                self._early[internal_id] = (cause, now_ns + int(self._runtime.config.unclaimed_s * 1e9))
                self._runtime.release(internal_id)
            elif seat.place is not Place.LEAVING:
                self._leaving.setdefault(internal_id, cause)

    # Deciding

    def _plan(self, now_ns: int) -> dict[str, Place]:
        """Where each request belongs now."""
        standings = self._runtime.standings(self._seats)
        plan: dict[str, Place] = {}
        active = 0
        for internal_id, seat in self._seats.items():
            if seat.place is Place.LEAVING or internal_id in self._leaving:
                plan[internal_id] = Place.LEAVING
                continue
            standing = self._looked_into(seat, standings[internal_id])
            inside = seat.slot or self._config.window is None or active < self._config.window
            place = self._place_of(seat, standing, inside=inside)
            cause = self._cause_of_end(seat, standing, place, now_ns)
            if cause is not None:
                self._leaving[internal_id] = cause
                place = Place.LEAVING
            active += place is not Place.LEAVING
            plan[internal_id] = place
        self._give_slots(plan)
        return plan

    def _looked_into(self, seat: _Seat[R], standing: Standing) -> Standing:
        """Look at what is staged first, once. What is nothing to compute is taken here: it wakes nobody."""
        internal_id = seat.request.request_id
        seat.registered = seat.registered or standing is not Standing.UNKNOWN
        if standing not in (Standing.READY, Standing.NO_ROOM):
            seat.chunk = None  # what was staged went with the stream
        while standing is Standing.READY and seat.chunk is None:
            staged = self._runtime.peek(internal_id)
            if staged.kind not in (TakenKind.CHUNK, TakenKind.END):
                return self._standing(internal_id)  # it has failed meanwhile
            note = self._described(seat, staged.payload)
            is_end = staged.kind is TakenKind.END
            if note is None or (note.tokens > 0 and not self._fits(seat, note)):
                return Standing.FAILED
            if note.tokens > 0:
                seat.chunk = Chunk(staged.payload, note, staged.segment, staged.segment_end, is_end)
                return standing
            self._runtime.take(internal_id)
            seat.input_ended = seat.input_ended or is_end
            if note.metadata is not None:
                seat.notes.append(note.metadata)
            standing = self._standing(internal_id)
        return standing

    def _standing(self, internal_id: str) -> Standing:
        return self._runtime.standings([internal_id])[internal_id]

    def _described(self, seat: _Seat[R], payload: Any) -> Note | None:
        try:
            return self._rules.describe(seat.request, payload)
        except Exception as error:  # noqa: BLE001 - becomes an event: the request fails, all others are scheduled
            self._fail(seat, f"{type(error).__name__}: {error}")
            return None

    def _fits(self, seat: _Seat[R], note: Note) -> bool:
        """Whether a step can ever hold the chunk; one that it cannot would wait for ever."""
        limit = self._config.step_tokens
        if limit is None or note.tokens <= limit:
            return True
        self._fail(seat, f"a chunk of {note.tokens} tokens can never be scheduled whole: a step holds {limit}")
        return False

    def _fail(self, seat: _Seat[R], reason: str) -> Cause:
        internal_id = seat.request.request_id
        cause = Cause(Outcome.ERROR, reason, self._clock.now_ns())
        self._leaving[internal_id] = cause
        self._runtime.fail(internal_id, reason)
        return cause

    def _place_of(self, seat: _Seat[R], standing: Standing, *, inside: bool) -> Place:
        """Where a request belongs: the one table of waits, for every mode of every session."""
        if not inside:
            return Place.OUTSIDE
        if standing is Standing.NO_ROOM:
            return Place.NO_ROOM
        if self._rests(seat, standing):
            return Place.PAUSED
        home = Place.RUNNING if seat.slot else Place.WAITING
        if seat.chunk is not None or seat.turn.in_flight:
            return home
        waits = standing is Standing.WAITS or (standing is Standing.UNKNOWN and not seat.registered)
        return Place.AWAITS_CHUNK if waits and self._rules.needs_chunk(seat.request) else home

    def _rests(self, seat: _Seat[R], standing: Standing) -> bool:
        if seat.turn.paused_ns is None or _is_over(seat, standing):
            return False
        return self._config.resume is Resume.BY_UPDATE or seat.chunk is None

    def _cause_of_end(self, seat: _Seat[R], standing: Standing, place: Place, now_ns: int) -> Cause | None:
        """Why a request is over, if it is: failed, out of time, or with nothing left to do and nothing to come."""
        internal_id = seat.request.request_id
        if standing is Standing.FAILED:
            known = self._leaving.get(internal_id) or self._runtime.peek(internal_id).cause
            return known or Cause(Outcome.ERROR, "failed", now_ns)
        due_ns = self._due_ns(seat, place)
        if due_ns is not None and due_ns <= now_ns:
            if place is Place.PAUSED:
                return self._fail(seat, f"paused: not resumed for {self._config.pause_s:g} s")
            return self._fail(seat, f"unclaimed: not registered within {self._runtime.config.unclaimed_s:g} s")
        idle = place in QUEUED and seat.chunk is None and not seat.turn.in_flight
        if not (idle and _is_over(seat, standing) and self._rules.needs_chunk(seat.request)):
            return None
        if seat.input_ended:
            return Cause(Outcome.OK, at_ns=now_ns)
        return Cause(Outcome.CANCELLED, "its input was left in this stage before its end", now_ns)

    def _due_ns(self, seat: _Seat[R], place: Place | None = None) -> int | None:
        """When a pause or the wait for a registration has lasted too long. A registered receiver has the stage's deadline."""
        place = place or seat.place
        paused_ns = seat.turn.paused_ns
        if place is Place.PAUSED and paused_ns is not None:
            return paused_ns + int(self._config.pause_s * 1e9) if self._config.pause_s else None
        if place is Place.AWAITS_CHUNK and not seat.registered:
            return seat.seen_ns + int(self._runtime.config.unclaimed_s * 1e9)
        return None

    def _keeps(self, seat: _Seat[R], place: Place) -> bool:
        """Whether a running request that is set aside there still has its slot."""
        return seat.slot and place in ASIDE and not (seat.lent or self._lends(place))

    def _lends(self, place: Place) -> bool:
        return place is Place.NO_ROOM or self._config.slots is Slots.LENT

    def _give_slots(self, plan: dict[str, Place]) -> None:
        """Whoever returns to running gets the slot that it kept; the others share, in order, what is free."""
        slotted = [(seat, plan[internal_id]) for internal_id, seat in self._seats.items() if seat.slot]
        returning = [seat for seat, place in slotted if place is Place.RUNNING and seat.place is not Place.RUNNING]
        taken = sum(place is Place.RUNNING or self._keeps(seat, place) for seat, place in slotted) - len(returning)
        kept_first = sorted(returning, key=lambda seat: not self._keeps(seat, seat.place))
        for seat in kept_first[max(0, self._config.max_running - taken) :]:
            plan[seat.request.request_id] = Place.NO_SLOT

    # Moving

    def _move(
        self,
        plan: dict[str, Place],
        queued: dict[Place, list[R]],
        waiting: Waiting[R],
        running: MutableSequence[R],
    ) -> None:
        """The one place where the coordinator changes where a request is: its seat, the queues, then its status."""
        moved: list[_Seat[R]] = []
        back: dict[Place, list[_Seat[R]]] = {Place.RUNNING: [], Place.WAITING: []}
        for internal_id, place in plan.items():
            seat = self._seats[internal_id]
            if place is seat.place:
                continue
            moved.append(seat)
            if place in QUEUED:
                back[place].append(seat)
            seat.place = place
            seat.slot = seat.slot and place is not Place.LEAVING
            seat.lent = place in ASIDE and (seat.lent or self._lends(place))
        for seat in self._seats.values():
            if seat.turn.paused_ns is not None and seat.place in QUEUED:
                seat.turn = Turn(seat.turn.segment)
        for place in (Place.RUNNING, Place.WAITING):
            staying = [request for request in queued[place] if self._seats[request.request_id].place is place]
            queued[place] = self._in_order(staying, back[place])
        rewrite(running, queued[Place.RUNNING])
        rewrite(waiting, queued[Place.WAITING])
        for seat in moved:
            self._rules.placed(seat.request, seat.place)

    def _in_order(self, staying: list[R], back: list[_Seat[R]]) -> list[R]:
        """Requests that come back go behind the last that came before them; the scheduler's own order is kept."""
        coming = sorted(back, key=lambda seat: seat.number)
        merged: list[R] = []  # from the last to the first
        for request in reversed(staying):
            while coming and coming[-1].number > self._number_of(request):
                merged.append(coming.pop().request)
            merged.append(request)
        merged.extend(seat.request for seat in reversed(coming))
        return merged[::-1]

    def _number_of(self, request: R) -> int:
        """Its place in first-come order; one that was not seen yet came last."""
        seat = self._seats.get(request.request_id)
        return seat.number if seat is not None and seat.request is request else self._seen + 1

    def _fill(self, cycle: Cycle[R]) -> None:
        cycle.max_running = max(self._config.max_running - self.num_reserved, len(cycle.queued[Place.RUNNING]))
        for internal_id, cause in self._leaving.items():
            if cause.outcome is Outcome.OK:
                cycle.done[internal_id] = None
            else:
                cycle.failed[internal_id] = cause
        for internal_id, seat in self._seats.items():
            if seat.notes:
                cycle.metadata[internal_id] = list(seat.notes)
            if seat.chunk is not None and seat.place in QUEUED:
                cycle.chunks[internal_id] = seat.chunk

    # Steps

    def _step(self, cycle: Cycle[R], request: R, budget_tokens: int, with_chunk: bool) -> Step[R] | None:  # noqa: FBT001
        seat = self._seats.get(request.request_id)
        if cycle is not self._cycle or seat is None or seat.request is not request or seat.place not in QUEUED:
            return None
        if seat.turn.paused_ns is not None or any(step.request is request for step in cycle.steps):
            return None
        chunk = seat.chunk if with_chunk else None
        if chunk is None and (budget_tokens < 1 or self._rules.needs_chunk(request)):
            return None
        if chunk is not None and not self._opens(seat, chunk, budget_tokens):
            return None
        self._steps += 1
        cycle.steps.append(Step(request, self._steps, chunk, seat.turn))
        return cycle.steps[-1]

    @staticmethod
    def _opens(seat: _Seat[R], chunk: Chunk, budget_tokens: int) -> bool:
        """Whether a chunk may be computed now; the first of a segment begins its turn, once the last one has settled."""
        if chunk.note.tokens > budget_tokens:
            return False
        if chunk.segment != seat.turn.segment:
            if seat.turn.in_flight:
                return False
            seat.turn = Turn(chunk.segment)
        return True

    def _commit(self, step: Step[R]) -> None:
        """A step is under way: take its chunk, which gives its credit back."""
        step.turn.in_flight.add(step.number)
        seat = self._seats.get(step.request.request_id)
        if seat is None or seat.request is not step.request or step.chunk is None:
            return
        seat.chunk = None
        taken = self._runtime.take(step.request.request_id)
        seat.input_ended = seat.input_ended or taken.kind is TakenKind.END

    def _put_back_lost(self, cycle: Cycle[R], waiting: Waiting[R], running: MutableSequence[R]) -> None:
        """A cycle raised with requests in its hands: popped from one queue, not yet in another."""
        held = {Place.RUNNING: list(running), Place.WAITING: list(waiting)}
        present = {id(request) for queue in held.values() for request in queue}
        room = self._config.max_running - self.num_reserved - len(running)
        lost: dict[Place, list[_Seat[R]]] = {Place.RUNNING: [], Place.WAITING: [], Place.NO_SLOT: []}
        for place, requests in cycle.queued.items():
            for request in requests:
                seat = self._seats.get(request.request_id)
                tracked = self._requests.get(request.request_id) is request
                if seat is None or seat.request is not request or not tracked or id(request) in present:
                    continue
                has_place = place is Place.WAITING or len(lost[place]) < room
                lost[place if has_place else Place.NO_SLOT].append(seat)
        for place, queue in ((Place.RUNNING, running), (Place.WAITING, waiting)):
            rewrite(queue, self._in_order(held[place], lost[place]))
        for place, seats in lost.items():
            for seat in seats:
                seat.place, seat.lent = place, place is Place.NO_SLOT
                self._rules.placed(seat.request, place)


class _Told:
    """The stage's feedback: collected once, kept until a cycle that was given it has ended well, pushed in order."""

    def __init__(self, runtime: StageRuntime, sink: FeedbackSink | None) -> None:
        self._runtime = runtime
        self._sink = sink
        self._lock = threading.Lock()
        self._pushing = threading.Lock()
        self._news = Feedback()  # collected, for the next cycle
        self._unpushed: deque[Feedback] = deque()
        self._cycle = Feedback()

    def push(self) -> None:
        """Collect, and let the sink know."""
        with self._lock:  # so that batches lie in the order in which they were collected
            self._collect()
        while self._sink is not None and self._unpushed and self._pushing.acquire(blocking=False):
            try:
                while self._unpushed:
                    self._sink.feedback(self._unpushed.popleft())
            finally:
                self._pushing.release()

    def _collect(self) -> None:
        told = self._runtime.collect_feedback()
        if told:
            self._news.add(told)
            if self._sink is not None:
                self._unpushed.append(told)

    def collect(self) -> Feedback:
        """What the cycle that begins is given."""
        self.push()
        with self._lock:
            self._cycle.add(self._news)
            self._news = Feedback()
        return self._cycle

    def forget(self, names: set[str]) -> None:
        """These were let go of: that they failed is nobody's news."""
        self.push()
        with self._lock:
            for internal_id in names:
                self._news.failed.pop(internal_id, None)
                self._cycle.failed.pop(internal_id, None)

    def given(self) -> None:
        """The cycle that was given it has ended well."""
        self._cycle = Feedback()


def _is_over(seat: _Seat[R], standing: Standing) -> bool:
    """Whether no input comes any more for a request that had some."""
    return standing is Standing.OVER or (standing is Standing.UNKNOWN and seat.registered)
