"""The scheduler's half of a stage: queues, slots, turns, and field cases; and a toy scheduler under random days."""

import heapq
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    IN,
    R1,
    HandClock,
    Stage,
    cancelled,
    data,
    error,
    failed_end,
    make_stage,
    middle,
    ok_end,
    opening,
    sender_only,
)

from omni_fsm.adapters import (
    Note,
    Place,
    Resume,
    SchedulerConfig,
    SchedulerCoordinator,
    Slots,
    Step,
)
from omni_fsm.adapters.scheduling import ASIDE
from omni_fsm.connectors.port import BUSY, STORED, PeerBack, PeerLost, RoomReturned, Stopped
from omni_fsm.payload import encode
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Feedback, Register, Standing

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


class BoomError(Exception):
    """The scheduler raises in its cycle."""


@dataclass(eq=False)
class Asked:
    """A scheduler's request. ``work`` is what it can compute without a chunk: again, after a preemption, or to drain."""

    request_id: str
    number: int = 0
    status: str = "waiting"
    work: int = 0
    computed: int = 0
    got: list[Any] = field(default_factory=list)
    unsent: list[Any] = field(default_factory=list)
    preempted: bool = False
    lossy: bool = False

    def __lt__(self, other: "Asked") -> bool:
        return self.number < other.number


class FirstCome(deque[Asked]):
    """A first-come queue with the methods of an engine's."""

    def add_request(self, request: Asked) -> None:
        self.append(request)

    def prepend_request(self, request: Asked) -> None:
        self.appendleft(request)

    def pop_request(self) -> Asked:
        return self.popleft()

    def peek_request(self) -> Asked:
        return self[0]

    def remove_request(self, request: Asked) -> None:
        self.remove(request)

    def remove_requests(self, requests: Iterable[Asked]) -> None:
        gone = set(requests)
        kept = [request for request in self if request not in gone]
        self.clear()
        self.extend(kept)


class ByPriority:
    """A queue that pops the smallest: it has an order of its own."""

    def __init__(self) -> None:
        self.heap: list[Asked] = []

    def add_request(self, request: Asked) -> None:
        heapq.heappush(self.heap, request)

    def remove_requests(self, requests: Iterable[Asked]) -> None:
        gone = set(requests)
        self.heap = [request for request in self.heap if request not in gone]
        heapq.heapify(self.heap)

    def __iter__(self) -> Iterator[Asked]:
        return iter(sorted(self.heap))

    def __len__(self) -> int:
        return len(self.heap)


class ToyRules:
    """Chunks are dicts: ``rows`` is what they cost, ``note`` is metadata."""

    def __init__(self) -> None:
        self.placed_in: dict[str, Place] = {}

    def needs_chunk(self, request: Asked) -> bool:
        return request.work == 0 and not request.unsent

    def describe(self, request: Asked, payload: Any) -> Note:
        if payload is None:
            return Note(0)
        if payload == "broken":
            raise ValueError("broken chunk")
        return Note(payload.get("rows", 0), payload.get("note"))

    def placed(self, request: Asked, place: Place) -> None:
        self.placed_in[request.request_id] = place
        request.status = "running" if place is Place.RUNNING else str(place)


class Toy:
    """A continuous-batching scheduler: results come ``depth`` cycles after their step."""

    def __init__(self, stage: Stage, *, queue: Any = None, depth: int = 0, **config: Any) -> None:
        self.stage = stage
        self.requests: dict[str, Asked] = {}
        self.waiting: Any = FirstCome() if queue is None else queue
        self.running: list[Asked] = []
        self.rules = ToyRules()
        self.coordinator = SchedulerCoordinator(
            stage.runtime,
            self.requests,
            SchedulerConfig(**{"max_running": 2} | config),
            rules=self.rules,
            clock=stage.clock,
        )
        self.depth = depth
        self.batches: deque[list[Step[Asked]]] = deque()
        self.ended: dict[str, str] = {}
        self.every: dict[str, Asked] = {}
        self.stepped: list[str] = []
        self.admitted: list[str] = []

    def add(self, *names: str, **fields: Any) -> None:
        for name in names:
            request = Asked(name, number=len(self.every), **fields)
            self.requests[name] = self.every[name] = request
            self.waiting.append(request) if isinstance(self.waiting, list) else self.waiting.add_request(request)

    def cycle(self, budget: int = 100, *, boom: int = -1, preempt: bool = False) -> None:
        """One cycle; with ``boom`` it raises at that point of its way."""
        try:
            with self.coordinator.cycle(self.waiting, self.running) as cycle:
                self.look(cycle.max_running)
                self.finish(cycle.failed, cycle.done)
                self.explode(boom, 0)
                if preempt and self.running:
                    self.preempt(boom)
                self.admit(cycle.max_running, boom)
                self.flush()
                steps = []
                for request in list(self.running):
                    step = None if request.unsent else cycle.step(request, budget)
                    if step is not None:
                        budget -= step.chunk.note.tokens if step.chunk else 1
                        steps.append(step)
                self.explode(boom, 3)
        except BoomError:
            return
        self.stepped = [step.request.request_id for step in steps]
        for step in steps:
            step.request.work -= step.chunk is None
        self.batches.append(steps)
        while len(self.batches) > self.depth:
            self.settle(self.batches.popleft())

    @staticmethod
    def explode(boom: int, point: int) -> None:
        if boom == point:
            raise BoomError

    def preempt(self, boom: int) -> None:
        request = self.running.pop()
        self.explode(boom, 1)
        request.work, request.computed = request.computed, 0
        request.status, request.preempted = "preempted", True
        self.waiting.insert(0, request)

    def admit(self, limit: int, boom: int) -> None:
        while self.waiting and len(self.running) < limit:
            request = self.waiting.popleft() if isinstance(self.waiting, deque) else self.waiting.pop(0)
            self.explode(boom, 2)
            request.status = "running"
            self.running.append(request)
            self.admitted.append(request.request_id)

    def flush(self) -> None:
        for request in self.running:
            while request.unsent:
                if not self.stage.runtime.submit_chunk(request.request_id, request.unsent[0]).accepted:
                    break
                request.unsent.pop(0)

    def settle(self, steps: list[Step[Asked]]) -> None:
        for step in steps:
            request = step.request
            if not self.coordinator.settle(step):
                request.lossy = True
                continue
            request.computed += 1
            if step.chunk is not None:
                request.got.append(step.chunk.payload)
                if self.stage.sink is not None:
                    request.unsent.append(b"x" * 40)
        self.flush()

    def finish(self, failed: dict[str, Cause], done: Iterable[str]) -> None:
        for name in done:
            self.stage.runtime.end(name)
        for name, how in [*((name, str(cause)) for name, cause in failed.items()), *((name, "ok") for name in done)]:
            assert name not in self.ended
            self.ended[name] = how
            self.coordinator.finish([name], self.waiting, self.running)
            self.requests.pop(name, None)

    def abort(self, name: str, reason: str = "left") -> None:
        self.ended.setdefault(name, "aborted")
        self.coordinator.abort([name], self.waiting, self.running, reason)
        self.requests.pop(name, None)

    def free(self, name: str) -> None:
        """Forget a request without a word to anybody."""
        self.ended.setdefault(name, "freed")
        self.requests.pop(name, None)

    def names(self, queue: Iterable[Asked]) -> list[str]:
        return [request.request_id for request in queue]

    def look(self, limit: int) -> None:
        """What must hold in every cycle, once it has begun."""
        places = self.coordinator.places
        parked = [name for name, place in places.items() if place in ASIDE]
        leaving = {name for name, place in places.items() if place is Place.LEAVING}
        everywhere = [*self.names(self.waiting), *self.names(self.running), *parked]
        assert sorted(everywhere) == sorted(self.requests.keys() - leaving)
        assert len(parked) == self.coordinator.num_parked
        assert len(self.running) <= limit <= self.coordinator._config.max_running
        kept = sum(self.coordinator._keeps(seat, seat.place) for seat in self.coordinator._seats.values())
        assert kept <= self.coordinator.num_reserved
        assert len(self.running) + kept <= self.coordinator._config.max_running
        arrived = [request.number for request in self.waiting if not request.preempted]
        assert arrived == sorted(arrived)
        for name in parked:
            seat = self.coordinator._seats[name]
            assert not (seat.place is Place.AWAITS_CHUNK and (seat.turn.in_flight or seat.chunk))
            assert not seat.request.preempted or seat.slot or seat.place is not Place.NO_SLOT


def rows(seq: int, count: int = 1, identity: Identity = R1, **more: Any) -> Frame:
    return data(seq, {"rows": count, "seq": seq} | more, identity)


def opened(*names: str, **settings: Any) -> Stage:
    """A stage in the middle that knows these requests, each under its external id."""
    stage = middle(**settings)
    for name in names:
        stage.open(name, Identity(name, 1))
        stage.come(opening(Identity(name, 1)))
    return stage


def one(name: str) -> Identity:
    return Identity(name, 1)


# Parking


def test_a_request_whose_receiver_waits_is_parked_and_comes_back_when_its_chunk_is_there() -> None:
    toy = Toy(opened("a", "b"))
    toy.add("a", "b")
    toy.stage.come(rows(0, identity=one("b")))
    toy.cycle()
    assert (toy.stepped, toy.coordinator.places) == (["b"], {"a": Place.AWAITS_CHUNK, "b": Place.WAITING})
    toy.stage.come(rows(0, identity=one("a")))
    toy.cycle()
    assert toy.stepped == ["a"]
    assert toy.rules.placed_in == {"a": Place.WAITING, "b": Place.AWAITS_CHUNK}


def test_restored_requests_stand_in_first_come_order_whoever_was_ready_first() -> None:
    toy = Toy(opened("a", "b", "c", "d"), max_running=1)
    toy.add("a", "b", "c", "d")
    toy.stage.come(rows(0, identity=one("d")), rows(0, identity=one("b")))
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert toy.names(toy.waiting) == ["b", "d"]
    toy.stage.come(rows(0, identity=one("c")), rows(0, identity=one("a")))
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert toy.names(toy.waiting) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("make", [list, deque, FirstCome])
def test_a_plain_list_a_deque_and_a_request_queue_are_all_waiting_queues(make: Any) -> None:
    toy = Toy(opened("a", "b", "c"), queue=FirstCome())
    toy.add("a", "b", "c")
    queue = make(toy.waiting)
    toy.stage.come(rows(0, identity=one("b")))
    toy.coordinator.begin_cycle(queue, toy.running)
    assert toy.names(queue) == ["b"]
    toy.stage.come(rows(0, identity=one("a")), rows(0, identity=one("c")))
    toy.coordinator.begin_cycle(queue, toy.running)
    assert toy.names(queue) == ["a", "b", "c"]


def test_a_queue_with_a_policy_of_its_own_orders_what_comes_back() -> None:
    toy = Toy(opened("a", "b", "c"), queue=ByPriority())
    toy.add("a", "b", "c")
    toy.every["a"].number = 9
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert len(toy.waiting) == 0
    toy.stage.come(*(rows(0, identity=one(name)) for name in "abc"))
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert toy.names(toy.waiting) == ["b", "c", "a"]


def test_a_request_of_a_stage_without_an_input_is_never_parked() -> None:
    toy = Toy(sender_only())
    toy.stage.open("a", R1)
    toy.add("a", work=2)
    for _ in range(3):
        toy.cycle()
    assert toy.every["a"].computed == 2
    assert toy.coordinator.places == {"a": Place.RUNNING}


def test_metadata_without_work_wakes_nobody_and_is_given_once() -> None:
    toy = Toy(opened("a"))
    toy.add("a")
    toy.stage.come(data(0, {"note": "next prompt: 7"}, one("a")), data(1, {"note": "8"}, one("a")))
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        assert cycle.metadata == {"a": ["next prompt: 7", "8"]}
        assert (toy.names(toy.waiting), cycle.chunks) == ([], {})
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        assert cycle.metadata == {}


def test_what_describing_a_chunk_raises_ends_that_request_in_its_own_words() -> None:
    toy = Toy(opened("a", "b"))
    toy.add("a", "b")
    toy.stage.come(data(0, "broken", one("a")), rows(0, identity=one("b")))
    toy.cycle()
    assert toy.ended == {"a": "error(ValueError: broken chunk)"}
    assert toy.stepped == ["b"]
    toy.stage.run()
    assert toy.stage.wire(one("a")) == ["open", "end error(ValueError: broken chunk)"]


def test_a_stage_that_has_no_room_for_output_sets_the_request_aside_and_lends_its_slot() -> None:
    """However slots are kept: two stages whose slots wait for each other would stand still for ever."""
    stage = opened("a", "b", backlog_bytes=100)
    stage.sink.default = BUSY
    toy = Toy(stage, max_running=1)
    toy.add("a", "b")
    for seq in range(4):
        stage.come(rows(seq, identity=one("a")))
        toy.cycle()
    stage.come(rows(0, identity=one("b")))
    toy.cycle()
    assert toy.coordinator.places["a"] is Place.NO_ROOM
    assert toy.names(toy.running) == ["b"]
    toy.cycle()
    stage.sink.default = STORED
    stage.hear(RoomReturned())
    toy.cycle()
    assert toy.coordinator.places["a"] in {Place.RUNNING, Place.NO_SLOT}


# Slots


def test_a_parked_running_request_keeps_its_slot() -> None:
    toy = Toy(opened("a", "b"), max_running=1)
    toy.add("a", "b")
    toy.stage.come(rows(0, identity=one("a")), rows(0, identity=one("b")))
    toy.cycle()
    toy.cycle()
    assert (toy.names(toy.running), toy.names(toy.waiting)) == ([], ["b"])
    assert (toy.coordinator.num_running_waiting_for_chunk, toy.coordinator.num_reserved) == (1, 1)
    toy.stage.come(rows(1, identity=one("a")))
    toy.cycle()
    assert (toy.stepped, toy.admitted) == (["a"], ["a"])


def test_a_lent_slot_lets_another_run_and_its_owner_takes_the_next_free_one() -> None:
    toy = Toy(opened("a", "b", "c"), max_running=1, slots=Slots.LENT)
    toy.add("a", "b", "c")
    toy.stage.come(*(rows(0, identity=one(name)) for name in "abc"))
    toy.cycle()
    toy.cycle()
    assert toy.stepped == ["b"]
    toy.stage.come(rows(1, identity=one("a")), rows(1, identity=one("b")))
    toy.cycle()
    assert (toy.stepped, toy.coordinator.places["a"]) == (["b"], Place.NO_SLOT)
    toy.cycle()
    assert (toy.stepped, toy.admitted) == (["a"], ["a", "b"])


def test_a_slot_that_was_kept_goes_to_its_owner_before_one_that_was_lent() -> None:
    """``a`` came first and had to lend its slot, for it has no room; ``b`` kept the one that it got."""
    stage = opened("a", "b", backlog_bytes=100)
    toy = Toy(stage, max_running=1)
    toy.add("a", "b")
    stage.sink.default = BUSY
    for seq in range(4):
        stage.come(rows(seq, identity=one("a")))
        toy.cycle()
    stage.come(rows(4, identity=one("a")), rows(0, identity=one("b")))
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        toy.admit(cycle.max_running, -1)
        step = cycle.step(toy.every["b"], 100)
    assert step is not None
    assert toy.coordinator.settle(step)
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert toy.coordinator.places == {"a": Place.NO_ROOM, "b": Place.AWAITS_CHUNK}
    stage.sink.default = STORED
    stage.hear(RoomReturned())
    stage.come(rows(1, identity=one("b")))
    toy.cycle()
    assert (toy.stepped, toy.coordinator.places) == (["b"], {"a": Place.NO_SLOT, "b": Place.RUNNING})


def test_a_window_serves_streams_first_come_first_served() -> None:
    toy = Toy(opened("a", "b", "c"), window=2, max_running=3)
    toy.add("a", "b", "c")
    toy.stage.come(rows(0, identity=one("c")), rows(0, identity=one("b")))
    toy.cycle()
    assert (toy.stepped, toy.coordinator.places["c"]) == (["b"], Place.OUTSIDE)
    toy.abort("a")
    toy.cycle()
    assert toy.stepped == ["c"]


# Ends


@pytest.mark.parametrize(
    ("happen", "reason"),
    [
        (lambda stage: stage.come(failed_end("boom", one("a"))), "error(boom)"),
        (lambda stage: stage.pass_time(51.0), "error(deadline_passed: no frame for 50 s)"),
        (lambda stage: stage.lose_source(), "error(peer_lost)"),
        (lambda stage: stage.hear(Stopped(one("a"), cancelled("left"))), "cancelled(left)"),
        (lambda stage: stage.hear(PeerLost()), "error(peer_lost)"),
    ],
    ids=["end", "deadline", "peer", "stop", "next peer"],
)
@pytest.mark.parametrize("parked", [True, False])
def test_a_failure_ends_both_roles_and_is_given_once(happen: Any, reason: str, parked: bool) -> None:  # noqa: FBT001
    stage = opened("a", input_wait_s=50.0)
    toy = Toy(stage, depth=1)
    toy.add("a")
    if not parked:
        stage.come(rows(0, identity=one("a")))
    toy.cycle()
    assert (toy.coordinator.num_parked == 1) is parked
    happen(stage)
    given = []
    for _ in range(3):
        with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
            given += [(name, str(cause)) for name, cause in cycle.failed.items()]
            assert (toy.names(toy.waiting), toy.names(toy.running)) == ([], [])
    assert given == [("a", reason)]
    toy.coordinator.finish(["a"], toy.waiting, toy.running)
    assert stage.rest() == {}


def test_a_failure_that_comes_while_a_cycle_begins_is_given_once() -> None:
    """After the feedback was collected, before the receivers are looked at: the feedback says it again later."""
    toy = Toy(opened("a"))
    toy.add("a")
    toy.cycle()
    collect = toy.coordinator._told.collect

    def collect_early() -> Feedback:
        told = collect()
        toy.stage.come(failed_end("boom", one("a")))
        return told

    toy.coordinator._told.collect = collect_early  # type: ignore[method-assign]
    given = []
    for _ in range(3):
        with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
            given += cycle.failed
    assert given == ["a"]


@pytest.mark.parametrize("ready", [True, False])
def test_a_request_that_its_runner_left_without_a_word_is_ended_too(ready: bool) -> None:  # noqa: FBT001
    toy = Toy(opened("a"))
    toy.add("a")
    if ready:
        toy.stage.come(rows(0, identity=one("a")))
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        assert ("a" in cycle.chunks) is ready
    toy.stage.runtime.cancel("a", "by the runner")
    toy.cycle()
    assert toy.ended == {"a": "cancelled(its input was left in this stage before its end)"}


def test_a_request_that_the_stage_never_hears_of_is_unclaimed_in_time() -> None:
    stage = middle(unclaimed_s=30.0)
    toy = Toy(stage)
    toy.add("ghost")
    toy.cycle()
    assert toy.coordinator.next_due_ns == stage.clock.now_ns() + 30 * 10**9
    stage.pass_time(31.0)
    toy.cycle()
    assert toy.ended == {"ghost": "error(unclaimed: not registered within 30 s)"}


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.told: list[Feedback] = []

    def feedback(self, feedback: Feedback) -> None:
        self.told.append(feedback)


def test_feedback_is_pushed_at_once_and_the_cycle_still_acts_on_it() -> None:
    class Pushing:
        """A host that pushes when there is something."""

        coordinator: Any = None

        def stream_offered(self, identity: Identity) -> Register:
            return Register(identity.external_id)

        def feedback_ready(self) -> None:
            if self.coordinator is not None:
                self.coordinator.push_feedback()

    host, sink = Pushing(), Sink()
    stage = middle(host=host)
    toy = Toy(stage)
    toy.coordinator = host.coordinator = SchedulerCoordinator(
        stage.runtime, toy.requests, SchedulerConfig(max_running=2), rules=toy.rules, sink=sink, clock=stage.clock
    )
    stage.come(opening(one("a")))
    toy.add("a")
    toy.cycle()
    stage.come(failed_end("boom", one("a")))
    assert [list(told.failed) for told in sink.told if told.failed] == [["a"]]
    toy.cycle()
    toy.cycle()
    assert toy.ended == {"a": "error(boom)"}
    assert [list(told.registered) for told in sink.told if told.registered] == [["a"]]
    assert [list(told.failed) for told in sink.told if told.failed] == [["a"]]


def test_a_name_that_was_finished_may_be_used_again_at_once() -> None:
    """What the stage had told of the old life, and nobody had collected, is not the new one's."""
    stage = opened("a")
    toy = Toy(stage)
    toy.add("a")
    toy.cycle()
    stage.come(failed_end("boom", one("a")))
    toy.abort("a")
    stage.run()
    stage.open("a", Identity("a", 2))
    stage.come(opening(Identity("a", 2)), rows(0, identity=Identity("a", 2)))
    toy.add("a")
    toy.cycle()
    assert toy.stepped == ["a"]


def test_looking_takes_nothing() -> None:
    stage = opened("a", "b")
    stage.come(rows(0, identity=one("a")))
    for _ in range(3):
        assert stage.runtime.peek("a").payload == {"rows": 1, "seq": 0}
    assert stage.runtime.standings(["a", "b", "c"]) == {
        "a": Standing.READY,
        "b": Standing.WAITS,
        "c": Standing.UNKNOWN,
    }
    assert stage.take("a").payload == {"rows": 1, "seq": 0}
    stage.come(ok_end(1, identity=one("a")), failed_end("boom", one("b")))
    assert stage.take("a").kind == stage.runtime.peek("a").kind.END
    assert stage.runtime.standings(["a", "b"]) == {"a": Standing.OVER, "b": Standing.FAILED}
    assert stage.runtime.peek("b").cause == error("boom")


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("max_running", 0),
        ("max_running", None),
        ("max_running", True),
        ("window", 0),
        ("step_tokens", -1),
        ("pause_s", -1.0),
        ("pause_s", float("nan")),
        ("slots", "reserved"),
        ("resume", None),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(field_name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field_name}: "):
        SchedulerConfig(**{"max_running": 1} | {field_name: value})


# Field cases


def test_case_05_an_empty_end_finishes_its_request_and_frees_its_slot_at_once() -> None:
    toy = Toy(opened("a", "b"), max_running=1)
    toy.add("a", "b")
    toy.stage.come(rows(0, identity=one("a")), rows(0, identity=one("b")))
    toy.cycle()
    toy.stage.come(ok_end(1, identity=one("a")))
    toy.cycle()
    assert (toy.ended, toy.stepped) == ({"a": "ok"}, ["b"])
    toy.stage.run()
    assert toy.stage.wire(one("a")) == ["open", "data 0", "end 1 ok"]


def test_case_09_a_paused_session_that_nobody_resumes_gives_its_slot_to_the_next() -> None:
    stage = opened("s1", "s2", "s3")
    toy = Toy(stage, pause_s=60.0)
    toy.add("s1", "s2", "s3")
    stage.come(*(rows(0, identity=one(name)) for name in ("s1", "s2", "s3")))
    toy.cycle()
    for name in ("s1", "s2"):
        toy.coordinator.pause(name)
    toy.cycle()
    assert (toy.coordinator.num_paused, toy.coordinator.num_reserved, toy.stepped) == (2, 2, [])
    assert toy.coordinator.next_due_ns == stage.clock.now_ns() + 60 * 10**9
    stage.pass_time(60.0)
    toy.cycle()
    assert toy.ended == dict.fromkeys(("s1", "s2"), "error(paused: not resumed for 60 s)")
    assert (toy.stepped, toy.coordinator.num_paused) == (["s3"], 0)
    stage.run()
    assert stage.wire(one("s1"))[-1] == "end error(paused: not resumed for 60 s)"


def test_case_15_what_was_freed_while_it_was_parked_is_not_put_back() -> None:
    toy = Toy(opened("a", "b"))
    toy.add("a", "b")
    toy.cycle()
    toy.free("a")
    toy.stage.come(rows(0, identity=one("a")), rows(0, identity=one("b")))
    toy.cycle()
    assert (toy.stepped, toy.coordinator.places) == (["b"], {"b": Place.WAITING})
    toy.stage.run()
    assert one("a") in {identity for identity, _ in toy.stage.source.stopped}
    assert toy.stage.runtime.standings(["a"]) == {"a": Standing.UNKNOWN}


def test_case_17_a_late_update_makes_no_request_and_is_counted() -> None:
    toy = Toy(opened("s"))
    toy.add("s")
    toy.cycle()
    toy.coordinator.finish(["s"], toy.waiting, toy.running)
    toy.requests.clear()
    assert not toy.coordinator.update("s")
    assert not toy.coordinator.update("never seen")
    toy.cycle()
    assert (toy.coordinator.late_updates, toy.coordinator.places) == (2, {})


def test_case_18_a_cancel_dominates_a_retract_that_puts_the_request_back() -> None:
    toy = Toy(opened("a"), depth=1)
    toy.add("a")
    toy.stage.come(rows(0, identity=one("a")))
    toy.cycle()
    (drained,) = toy.running
    toy.running.clear()  # the retract holds it while its step drains
    toy.abort("a")
    toy.waiting.insert(0, drained)
    toy.cycle()
    assert (toy.names(toy.waiting), toy.names(toy.running), toy.coordinator.places) == ([], [], {})


@pytest.mark.parametrize("resumed", [True, False])
def test_case_22_a_late_result_of_the_last_segment_is_dropped_once(resumed: bool) -> None:  # noqa: FBT001
    """It comes when the next segment has begun, or while the session still rests."""
    toy = Toy(opened("s"), resume=Resume.BY_UPDATE)
    toy.add("s")
    toy.stage.come(rows(0, identity=one("s")))
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        toy.admit(2, -1)
        late = cycle.step(toy.every["s"], 100)
    assert late is not None
    toy.coordinator.pause("s")
    toy.stage.come(rows(1, identity=one("s")))
    if resumed:
        assert toy.coordinator.update("s")
        toy.cycle()
    assert [toy.coordinator.settle(late) for _ in range(2)] == [False, False]
    assert toy.coordinator.stale_results == 1
    assert toy.every["s"].got == [{"rows": 1, "seq": 1}][:resumed]


def test_case_23_what_is_in_flight_from_the_last_turn_is_not_counted_against_the_new_one() -> None:
    toy = Toy(opened("s"), depth=2)
    toy.add("s")
    toy.stage.come(rows(0, identity=one("s")))
    toy.cycle()
    toy.coordinator.pause("s")
    toy.cycle()
    assert toy.coordinator.places == {"s": Place.PAUSED}
    toy.stage.come(rows(1, identity=one("s")))
    toy.cycle()
    assert (toy.stepped, toy.names(toy.waiting), toy.names(toy.running)) == (["s"], [], ["s"])
    assert toy.coordinator.stale_results == 1
    toy.cycle()
    toy.cycle()
    assert toy.every["s"].got == [{"rows": 1, "seq": 1}]


def test_case_23_a_chunk_of_the_next_segment_waits_until_the_last_one_has_settled() -> None:
    toy = Toy(opened("s"), depth=1)
    toy.add("s")
    last = Frame(IN, one("s"), FrameKind.DATA, seq=0, segment_end=True, body=encode({"rows": 1, "seq": 0}))
    first = Frame(IN, one("s"), FrameKind.DATA, seq=1, segment=1, body=encode({"rows": 1, "seq": 1}))
    toy.stage.come(last, first)
    toy.cycle()
    toy.cycle()
    assert toy.stepped == []
    toy.cycle()
    toy.cycle()
    assert [chunk["seq"] for chunk in toy.every["s"].got] == [0, 1]
    assert toy.coordinator.stale_results == 0


@pytest.mark.parametrize("slots", list(Slots))
def test_case_28_closing_a_paused_session_releases_all_of_it_once(slots: Slots) -> None:
    toy = Toy(opened("s", "s2"), max_running=1, slots=slots)
    toy.add("s", "s2")
    toy.stage.come(rows(0, identity=one("s")), rows(0, identity=one("s2")))
    toy.cycle()
    toy.coordinator.pause("s")
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    assert toy.coordinator.places["s"] is Place.PAUSED
    for _ in range(2):
        toy.abort("s", "closed")
    toy.cycle()
    assert (toy.stepped, toy.coordinator.num_reserved) == (["s2"], 0)
    toy.stage.run()
    assert toy.stage.wire(one("s"))[-1] == "end cancelled(closed)"
    assert [cause for identity, cause in toy.stage.source.stopped if identity == one("s")] == [cancelled("closed")]


def test_case_33_a_failure_that_comes_before_the_request_itself_meets_it() -> None:
    """The stage knows the request and loses it while the engine's own submission is under way."""
    stage = opened("a", unclaimed_s=30.0)
    toy = Toy(stage)
    stage.come(failed_end("boom", one("a")))
    toy.cycle()
    assert toy.ended == {}
    toy.add("a")
    toy.cycle()
    assert toy.ended == {"a": "error(boom)"}
    stage.open("b", one("b"))
    stage.come(opening(one("b")), failed_end("boom", one("b")))
    toy.cycle()
    stage.pass_time(31.0)
    toy.cycle()
    toy.add("b")
    toy.cycle()
    assert "b" not in toy.ended  # forgotten by then: it is like any request that was never registered
    assert toy.coordinator.places == {"b": Place.AWAITS_CHUNK}


def test_case_44_an_aborted_request_is_removed_whatever_its_status_says() -> None:
    toy = Toy(opened("a", "b"), max_running=1)
    toy.add("a", "b")
    toy.stage.come(*(rows(seq, identity=one(name)) for seq in range(2) for name in "ab"))
    toy.cycle()
    toy.every["a"].status = "waiting"  # in the running list
    toy.abort("a")
    toy.cycle()
    assert (toy.stepped, toy.names(toy.running)) == (["b"], ["b"])
    parked = Toy(opened("a"), max_running=1)
    parked.add("a")
    parked.cycle()
    parked.every["a"].status = "running"  # in no queue at all
    parked.abort("a")
    parked.cycle()
    assert parked.coordinator.places == {}


def test_case_44_a_request_in_two_queues_is_left_in_one() -> None:
    toy = Toy(opened("a"))
    toy.add("a")
    toy.stage.come(rows(0, identity=one("a")))
    toy.running.extend([toy.every["a"], toy.every["a"]])
    toy.cycle()
    assert (toy.names(toy.waiting), toy.names(toy.running), toy.stepped) == ([], ["a"], ["a"])
    assert toy.admitted == []


@pytest.mark.parametrize("boom", [0, 1, 2, 3])
def test_case_45_a_cycle_that_raises_loses_nothing(boom: int) -> None:
    """Requests that are parked or in the scheduler's hands, the chunk of a step that never was, and a failure."""
    stage = opened("a", "b", "c", "d")
    toy = Toy(stage)
    toy.add("a", "b", "c", "d")
    stage.come(*(rows(0, identity=one(name)) for name in "ab"))
    toy.cycle()
    stage.come(rows(1, identity=one("a")), rows(1, identity=one("b")), failed_end("boom", one("d")))
    stage.come(rows(0, identity=one("c")))

    def raise_at(boom: int) -> None:
        with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
            assert cycle.failed == {"d": error("boom")}
            toy.explode(boom, 0)
            toy.running.pop()
            toy.explode(boom, 1)
            toy.waiting.popleft()
            toy.add("e")
            toy.explode(boom, 2)
            assert cycle.step(toy.every["a"], 100) is not None
            toy.explode(boom, 3)

    with pytest.raises(BoomError):
        raise_at(boom)
    assert (toy.names(toy.running), toy.names(toy.waiting)) == (["a", "b"], ["c", "e"] if boom > 1 else ["c"])
    toy.cycle()
    assert (toy.stepped, toy.ended) == (["a", "b"], {"d": "error(boom)"})
    assert toy.every["a"].got == [{"rows": 1, "seq": 0}, {"rows": 1, "seq": 1}]


def test_case_45_a_queue_that_raises_loses_nothing_either() -> None:
    class Failing(FirstCome):
        raises = True

        def add_request(self, request: Asked) -> None:
            if self.raises and request.request_id == "b":
                self.raises = False
                raise BoomError
            super().add_request(request)

    toy = Toy(opened("a", "b"), queue=Failing())
    toy.waiting.raises = False
    toy.add("a", "b")
    toy.cycle()
    toy.stage.come(rows(0, identity=one("a")), rows(0, identity=one("b")))
    toy.waiting.raises = True
    with pytest.raises(BoomError):
        toy.coordinator.begin_cycle(toy.waiting, toy.running)
    toy.cycle()
    assert toy.stepped == ["a", "b"]


def test_case_45_a_request_that_lost_its_slot_in_a_cycle_that_raised_waits_for_the_next() -> None:
    """It was popped to make room, another was admitted, and then the cycle raised."""
    toy = Toy(opened("a", "b"), max_running=1)
    toy.add("a", "b")
    toy.stage.come(*(rows(seq, identity=one(name)) for seq in range(2) for name in "ab"))
    toy.cycle()

    def raise_late() -> None:
        with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
            toy.running.pop()
            toy.admit(cycle.max_running, -1)
            toy.add("c")
            raise BoomError

    with pytest.raises(BoomError):
        raise_late()
    assert (toy.names(toy.running), toy.coordinator.places["a"]) == (["b"], Place.NO_SLOT)
    assert (toy.names(toy.waiting), toy.rules.placed_in["a"]) == (["c"], Place.NO_SLOT)
    toy.cycle()
    toy.abort("b")
    toy.cycle()
    assert toy.stepped == ["a"]


def test_case_45_a_rule_that_raises_loses_nothing_either() -> None:
    class Raising(ToyRules):
        raises = False

        def placed(self, request: Asked, place: Place) -> None:
            if self.raises:
                raise BoomError
            super().placed(request, place)

    toy = Toy(opened("a", "b"))
    rules = toy.coordinator._rules = Raising()
    toy.add("a", "b")
    toy.cycle()
    toy.stage.come(rows(0, identity=one("a")), failed_end("boom", one("b")))
    rules.raises = True
    with pytest.raises(BoomError):
        toy.coordinator.begin_cycle(toy.waiting, toy.running)
    rules.raises = False
    toy.cycle()
    assert (toy.stepped, toy.ended) == (["a"], {"b": "error(boom)"})


def test_case_46_parking_preempts_nobody_and_a_preempted_request_computes_again() -> None:
    toy = Toy(opened("a", "b"), max_running=2)
    toy.add("a", "b")
    toy.stage.come(*(rows(seq, identity=one("a")) for seq in range(3)))
    for _ in range(4):
        toy.cycle()
    assert (toy.coordinator.places["a"], toy.every["a"].computed) == (Place.AWAITS_CHUNK, 3)
    toy.stage.come(rows(3, identity=one("a")))
    toy.cycle()
    assert (toy.every["a"].computed, toy.every["a"].status, toy.names(toy.running)) == (4, "running", ["a"])
    toy.every["a"].unsent.clear()
    toy.stage.come(rows(4, identity=one("a")))
    toy.cycle(preempt=True)
    assert toy.coordinator.num_reserved == 0
    for _ in range(6):
        toy.cycle()
    assert [chunk["seq"] for chunk in toy.every["a"].got] == [0, 1, 2, 3, 4]
    assert toy.every["a"].work == 0


def test_case_49_after_a_segment_s_end_only_duplex_receivers_resume_by_themselves() -> None:
    duplex = Toy(opened("s"), resume=Resume.BY_CHUNK)
    turns = Toy(opened("s"), resume=Resume.BY_UPDATE)
    sends = Toy(sender_only(), resume=Resume.BY_CHUNK)
    sends.stage.open("s", one("s"))
    for toy in (duplex, turns):
        toy.add("s")
        toy.stage.come(rows(0, identity=one("s")))
    sends.add("s", work=1)
    for toy in (duplex, turns, sends):
        toy.cycle()
        toy.every["s"].work = 0
        toy.coordinator.pause("s")
        toy.cycle()
        assert toy.coordinator.places == {"s": Place.PAUSED}
    for toy in (duplex, turns):
        toy.stage.come(rows(1, identity=one("s")))
    sends.every["s"].work = 1
    for toy in (duplex, turns, sends):
        toy.cycle()
    assert [toy.coordinator.places["s"] for toy in (duplex, turns, sends)] == [
        Place.RUNNING,
        Place.PAUSED,
        Place.PAUSED,
    ]
    for toy in (turns, sends):
        assert toy.coordinator.update("s")
        toy.cycle()
        assert toy.stepped == ["s"]


@pytest.mark.parametrize("resume", list(Resume))
@pytest.mark.parametrize("slots", list(Slots))
def test_case_50_every_mode_follows_one_script_of_segments_by_the_same_rules(resume: Resume, slots: Slots) -> None:
    """Chunk, pause, next chunk and update, pause, end: the modes differ in when they resume and in nothing else."""
    toy = Toy(opened("s"), resume=resume, slots=slots)
    toy.add("s")
    for seq in range(2):
        toy.stage.come(rows(seq, identity=one("s")))
        toy.coordinator.update("s")
        toy.cycle()
        assert toy.stepped == ["s"]
        toy.coordinator.pause("s")
        toy.cycle()
        assert (toy.coordinator.places, toy.coordinator.num_paused) == ({"s": Place.PAUSED}, 1)
    toy.stage.come(ok_end(2, identity=one("s")))
    toy.cycle()
    assert toy.ended == {"s": "ok"}
    assert [chunk["seq"] for chunk in toy.every["s"].got] == [0, 1]


def test_case_51_what_belongs_to_a_segment_is_replaced_as_a_whole() -> None:
    toy = Toy(opened("s"), depth=3)
    toy.add("s")
    toy.stage.come(rows(0, identity=one("s")))
    toy.cycle()
    before = toy.coordinator._seats["s"].turn
    assert before.in_flight
    toy.coordinator.pause("s")
    toy.stage.come(rows(1, identity=one("s")))
    toy.coordinator.begin_cycle(toy.waiting, toy.running)
    after = toy.coordinator._seats["s"].turn
    assert after is not before
    assert (after.in_flight, after.paused_ns) == (set(), None)


def test_case_55_a_chunk_is_scheduled_whole_with_its_metadata_or_not_in_this_cycle() -> None:
    toy = Toy(opened("a", "b"), step_tokens=10)
    toy.add("a", "b")
    toy.stage.come(rows(0, 6, one("a"), note="six"), rows(0, 6, one("b"), note="six too"))
    with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
        toy.admit(2, -1)
        assert {name: chunk.note for name, chunk in cycle.chunks.items()} == {
            "a": Note(6, "six"),
            "b": Note(6, "six too"),
        }
        step = cycle.step(toy.every["a"], 10)
        assert step is not None
        assert step.chunk is not None
        assert (step.chunk.note.metadata, step.chunk.payload["rows"]) == ("six", 6)
        assert cycle.step(toy.every["b"], 10 - 6) is None
        assert cycle.step(toy.every["a"], 10) is None  # once a cycle
    toy.settle([step])
    toy.cycle(budget=10)
    assert toy.stepped == ["b"]


def test_case_55_a_chunk_that_no_step_can_hold_fails_its_request() -> None:
    toy = Toy(opened("a"), step_tokens=10)
    toy.add("a")
    toy.stage.come(rows(0, 11, one("a")))
    toy.cycle()
    assert toy.ended == {"a": "error(a chunk of 11 tokens can never be scheduled whole: a step holds 10)"}


def test_case_56_what_skipped_cycles_did_not_see_is_given_later_and_once() -> None:
    toy = Toy(opened("a", "b"))
    toy.add("a", "b")
    toy.cycle()
    toy.stage.come(failed_end("first", one("a")))
    toy.cycle(boom=0)  # told, and then lost its mind
    toy.stage.come(rows(0, identity=one("b")), failed_end("second", one("b")))
    told = []
    for _ in range(3):
        with toy.coordinator.cycle(toy.waiting, toy.running) as cycle:
            told.append(sorted(cycle.failed))
    assert toy.ended == {"a": "error(first)"}
    assert told == [["b"], [], []]


def test_case_58_the_number_of_paused_requests_is_right_however_one_is_closed() -> None:
    toy = Toy(opened("s1", "s2", "s3", "s4"), max_running=4, pause_s=60.0)
    names = ["s1", "s2", "s3", "s4"]
    toy.add(*names)
    toy.stage.come(*(rows(0, identity=one(name)) for name in names))
    toy.cycle()
    for name in names:
        toy.coordinator.pause(name)
        toy.coordinator.pause(name)
    toy.cycle()
    assert toy.coordinator.num_paused == 4
    toy.every["s1"].status = "running"  # restored past every counter
    toy.abort("s1")
    assert toy.coordinator.num_paused == 3
    toy.free("s2")
    toy.stage.come(failed_end("boom", one("s3")))
    toy.cycle()
    assert toy.coordinator.num_paused == 1
    toy.stage.pass_time(61.0)
    toy.cycle()
    assert (toy.coordinator.num_paused, toy.coordinator.num_reserved) == (0, 0)


def test_case_59_used_up_is_not_finished() -> None:
    toy = Toy(opened("a"))
    toy.add("a")
    toy.stage.come(rows(0, identity=one("a")))
    for _ in range(4):
        toy.cycle()
    assert (toy.ended, toy.coordinator.places) == ({}, {"a": Place.AWAITS_CHUNK})
    toy.stage.come(rows(1, identity=one("a")), ok_end(2, identity=one("a")))
    for _ in range(3):
        toy.cycle()
    assert (toy.ended, len(toy.every["a"].got)) == ({"a": "ok"}, 2)


def test_case_61_a_request_that_drains_after_the_end_of_its_input_is_finished_when_it_has_drained() -> None:
    toy = Toy(opened("a"), depth=1)
    toy.add("a")
    toy.stage.come(rows(0, identity=one("a")), ok_end(1, {"rows": 1, "seq": "tail"}, one("a")))
    toy.cycle()
    toy.cycle()
    toy.every["a"].work = 2  # the tail of its vocoder
    for _ in range(3):
        toy.cycle()
        assert toy.ended == {}
    for _ in range(3):
        toy.cycle()
    assert toy.ended == {"a": "ok"}
    assert [chunk["seq"] for chunk in toy.every["a"].got] == [0, "tail"]


# Random days

KINDS = (
    *["arrive"] * 16,
    *["chunk"] * 60,
    *["note", "end", "pause", "update", "preempt", "busy", "room", "tight"] * 6,
    *["failed_end", "abort", "free", "stop", "time"] * 2,
    *["boom", "boom and preempt"] * 4,
    "lost",
)
days = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 4)), min_size=80, max_size=200)


class Day:
    """A toy scheduler's day: streams come and go, things break, and every happening is followed by a cycle."""

    def __init__(self, **config: Any) -> None:
        self.stage = make_stage(
            source=middle().source,
            sink=middle().sink,
            answer=lambda identity: Register(identity.external_id),
            clock=HandClock(),
            input_wait_s=50.0,
            send_stall_s=40.0,
            unclaimed_s=30.0,
            backlog_bytes=100,
        )
        self.toy = Toy(self.stage, **config)
        self.sent: dict[str, list[Any]] = {}
        self.seqs: dict[str, int] = {}
        self.over: set[str] = set()
        self.names: list[str] = []
        self.late: list[Callable[[], None]] = []  # what of the last arrival is still to come
        self.cycles = 0

    def act(self, what: str, who: int, n: int) -> None:  # noqa: C901, PLR0912 - one line an action
        toy, stage = self.toy, self.stage
        live = [name for name in self.seqs if name not in self.over and name not in toy.ended]
        name = live[who % len(live)] if live else "nobody"
        match what:
            case "arrive":
                self.arrive(n)
            case "chunk" if live:
                self.put(name, {"rows": n + 1, "seq": self.seqs[name]})
            case "note" if live:
                self.put(name, {"note": n})
            case "end" if live:
                self.over.add(name)
                stage.come(ok_end(self.seqs[name], identity=one(name)))
            case "failed_end" if live:
                self.over.add(name)
                stage.come(failed_end("boom", one(name)))
            case "abort" if name in toy.requests:
                toy.abort(name)
            case "free" if name in toy.requests:
                toy.free(name)
            case "stop" if live:
                stage.hear(Stopped(one(name), cancelled("stop")))
            case "pause":
                toy.coordinator.pause(name)
            case "update":
                toy.coordinator.update(name)
            case "busy":
                stage.sink.default = BUSY
            case "room":
                self.room()
            case "time":
                stage.pass_time(20.0 if n == 0 else 1.0)
            case "lost":
                stage.source.say(PeerLost(), PeerBack())
                stage.run()
                self.over |= self.seqs.keys()
            case _:
                pass
        boom = n % 4 if what.startswith("boom") else -1
        toy.cycle(2 if what == "tight" else 6, boom=boom, preempt="preempt" in what)
        stage.run()
        toy.cycle()
        self.cycles += 2

    def arrive(self, n: int) -> None:
        """The engine and the stage hear of a request at once; or one of them does only when the next one arrives."""
        while self.late:
            self.late.pop()()
        name = f"r{len(self.names)}"
        self.names.append(name)
        halves = [partial(self.toy.add, name), partial(self.begin, name)]
        for half in halves if n > 1 else halves[n:][:1]:
            half()
        self.late = [] if n > 1 else [halves[1 - n]]

    def begin(self, name: str) -> None:
        self.seqs[name], self.sent[name] = 0, []
        self.stage.come(opening(one(name)))

    def put(self, name: str, payload: dict[str, Any]) -> None:
        self.stage.come(data(self.seqs[name], payload, one(name)))
        self.seqs[name] += 1
        if "rows" in payload:
            self.sent[name].append(payload)

    def room(self) -> None:
        self.stage.sink.default = STORED
        self.stage.hear(RoomReturned())

    def evening(self) -> None:
        """No more faults: all that is open ends, deadlines pass."""
        self.arrive(2)
        for _ in self.seqs:
            self.act("end", 0, 0)
        for _ in range(12):
            self.room()
            for name in self.toy.every:
                self.toy.coordinator.update(name)
            for _ in range(10):
                self.toy.cycle()
                self.stage.run()
            self.stage.pass_time(20.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    day=days,
    limit=st.integers(1, 3),
    slots=st.sampled_from(list(Slots)),
    resume=st.sampled_from(list(Resume)),
    window=st.sampled_from([None, 2]),
    depth=st.integers(0, 2),
)
def test_no_request_is_lost_or_doubled_and_all_of_them_end(
    *, day: list[tuple[str, int, int]], limit: int, slots: Slots, resume: Resume, window: int | None, depth: int
) -> None:
    """Hundreds of cycles a day; `Toy.look` checks queues, slots and order in each of them."""
    world = Day(max_running=limit, slots=slots, resume=resume, window=window, depth=depth, pause_s=45.0)
    for happening in day:
        world.act(*happening)
    world.evening()
    toy = world.toy
    assert (toy.requests, toy.names(toy.waiting), toy.names(toy.running)) == ({}, [], [])
    assert toy.ended.keys() == toy.every.keys()
    for name, how in toy.ended.items():
        request, sent = toy.every[name], world.sent.get(name, [])
        if not request.lossy:
            assert request.got == (sent if how == "ok" else sent[: len(request.got)])
    toy.cycle()
    assert toy.coordinator.places == {}
    for name in world.seqs.keys() - toy.every.keys():
        world.stage.runtime.release(name)  # the engine never heard of these
    assert world.stage.rest() == {}


def test_the_guide_s_scheduler_runs_and_prints_what_it_says() -> None:
    section = GUIDE.read_text(encoding="utf-8").split("\n## A scheduler\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"It prints `{done.stdout.strip()}`." in section
