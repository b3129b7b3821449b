"""Faults that were met in the field, each as the sequence that showed it.

``omni_fsm/verify/cases.toml`` says where every one of them stands.
"""

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    DONE,
    IN,
    OTHER,
    OUT,
    R1,
    R2,
    ROOM,
    AcceptingHost,
    CountingProducer,
    HandClock,
    Ring,
    ScriptedHost,
    Stage,
    cancelled,
    data,
    error,
    failed_end,
    front,
    make_stage,
    middle,
    ok_end,
    opening,
    receiver_only,
    scripted_pair,
    sender_only,
)

from omni_fsm.connectors import memory_pair
from omni_fsm.connectors.port import BUSY, STORED, Hello, PeerBack, PeerLost, PutOutcome, PutStatus
from omni_fsm.payload import encode
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Later, ProducerContext, Refuse, Register, TakenKind
from omni_fsm.verify.report import field_cases

PATIENCE_S = 10.0
HERE = Path(__file__).parent
TALKER_R1, TALKER_R2, TALKER_OTHER = "talker-r1-1", "talker-r1-2", "talker-r2-1"


class Two:
    """A stage that sends and the next one, joined by one edge; the next one's host takes part only where a test says so."""

    def __init__(
        self,
        *,
        pairs: Callable[[Edge], tuple[Any, Any]] = scripted_pair,
        producer: Any = None,
        host: ScriptedHost | None = None,
        **settings: Any,
    ) -> None:
        self.clock = HandClock()
        self.sink, self.source = pairs(OUT)
        self.first = make_stage(
            stage="thinker", sink=self.sink, producer=producer or CountingProducer(), clock=self.clock, **settings
        )
        self.next = make_stage(
            stage="talker", source=self.source, host=host or AcceptingHost("talker"), clock=self.clock, **settings
        )

    def settle(self) -> None:
        """Step both until nothing happens."""
        for _ in range(10_000):
            self.source.wait(0)
            self.sink.wait(0)
            if not any([self.first.step(), self.next.step()]):
                return
        raise AssertionError("no end of steps")

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for stage in (self.first, self.next):
            stage.runtime.tick_once()
        self.settle()

    def open(self, internal_id: str, identity: Identity) -> None:
        assert self.first.runtime.register(internal_id, identity).accepted
        self.settle()

    def send(self, internal_id: str, *outputs: Any) -> None:
        self.first.submit(internal_id, *outputs)
        self.settle()

    def taken(self, internal_id: str) -> list[Any]:
        """All that the next stage can take now: payloads, then how it ended if it did."""
        given: list[Any] = []
        while (taken := self.next.take(internal_id)).kind in ("chunk", "end", "failed"):
            if taken.kind is TakenKind.CHUNK:
                given.append(taken.payload)
                self.settle()
            else:
                given.append((str(taken.kind), taken.payload, str(taken.cause)))
                break
        return given

    def held(self) -> list[dict[str, int]]:
        """Residue of both after every time-out has passed and feedback was collected."""
        for _ in range(2):
            self.pass_time(1_000_000.0)
        for stage in (self.first, self.next):
            stage.collect()
        return [self.first.held(), self.next.held()]


def real_pair(edge: Edge) -> tuple[Any, Any]:
    return memory_pair(Hello(edge, "digest"))


# The list


FIELDS = {"passes": {"test"}, "cannot_arise": {"why"}, "waits": {"requirement"}}
REQUIREMENTS = {f"A{n}" for n in range(1, 16)} | {f"C{n}" for n in range(1, 12)}
WAITING_AT_MOST = 1
"""May only fall: a case that a layer was built for stops waiting."""

CASES = field_cases()


def functions(name: str) -> set[str]:
    """The test functions at the top level of a test file."""
    tree = ast.parse((HERE / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_case_is_listed_once() -> None:
    assert [case["number"] for case in CASES] == list(range(1, 81))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"C{case['number']:02}")
def test_an_entry_says_what_the_case_is_and_where_it_stands(case: dict[str, Any]) -> None:
    """A case that waits may name the test of the part that exists already."""
    needed = {"number", "what", "status"} | FIELDS[case["status"]]
    optional = {"test"} if case["status"] == "waits" else set()
    assert needed <= case.keys() <= needed | optional
    assert all(isinstance(case[field], str) and case[field].strip() for field in case.keys() - {"number"})
    assert case.get("requirement", "A1") in REQUIREMENTS
    assert "\n" not in case.get("why", "")
    if "test" in case:
        name, _, function = case["test"].partition("::")
        assert function.startswith("test_")
        assert function in functions(name)


def test_a_test_named_after_a_case_belongs_to_one_that_names_a_test() -> None:
    """A layer may have tests of its own for a case: the list names the one that takes the whole of it."""
    tested = {case["number"] for case in CASES if "test" in case}
    files = [path.name for path in HERE.glob("test_*.py")]
    named = {int(name.split("_")[2]) for file in files for name in functions(file) if name.startswith("test_case_")}
    assert named <= tested


def test_no_further_case_waits() -> None:
    assert sum(case["status"] == "waits" for case in CASES) <= WAITING_AT_MOST


# The cases


@pytest.mark.parametrize(
    ("leave", "end"),
    [
        (lambda stage: stage.runtime.end("r"), "end 1 ok"),
        (lambda stage: stage.runtime.cancel("r", "left"), "end cancelled(left)"),
        (lambda stage: stage.runtime.fail("r", "aborted"), "end error(aborted)"),
        (lambda stage: stage.runtime.release("r"), "end cancelled(released)"),
    ],
)
def test_case_01_a_middle_stage_that_its_host_ends_tells_the_next_stage_at_once(
    leave: Callable[[Stage], Any], end: str
) -> None:
    """The end of its input has not come, no time passes, and it happens once however often the host repeats itself."""
    stage = middle()
    stage.open("r", R1)
    stage.come(opening(), data(0, "in"))
    assert stage.take("r").payload == "in"
    stage.submit("r", "c0")
    stage.run()
    leave(stage)
    leave(stage)
    stage.run()
    stage.come(ok_end(1))
    assert stage.wire() == ["open", "data 0", end]
    stage.runtime.release("r")
    assert stage.rest() == {}


def test_case_02_a_result_without_a_valid_row_reaches_the_consumer_as_an_empty_end() -> None:
    two = Two(producer=lambda context: None)
    two.open("a", R1)
    two.send("a", "nothing valid")
    assert two.taken(TALKER_R1) == []
    two.next.collect()
    assert two.first.runtime.end("a").accepted
    two.settle()
    assert two.next.collect().ready == {TALKER_R1: None}
    assert two.taken(TALKER_R1) == [("end", None, "ok")]
    assert two.held() == [{}, {}]


def test_case_05_an_empty_end_wakes_the_scheduler_and_leaves_nothing_of_its_stream() -> None:
    """What is built: the receiver is over with the take. The scheduler's slot comes with the scheduler."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening(), ok_end(0))
    assert stage.collect().ready == {"r": None}
    assert stage.take("r").kind is TakenKind.END
    assert stage.collect().input_ended == {"r": None}
    assert stage.take("r").kind is TakenKind.GONE
    assert stage.rest() == {}


def test_case_06_a_request_whose_chunk_never_comes_fails_in_time_and_both_neighbours_hear_of_it() -> None:
    stage = middle(input_wait_s=10.0)
    stage.open("r", R1)
    stage.come(opening())
    stage.collect()
    stage.pass_time(9.9)
    assert (stage.collect().failed, stage.wire()) == ({}, ["open"])
    stage.pass_time(0.2)
    late = error("deadline_passed: no frame for 10 s")
    assert stage.collect().failed == {"r": late}
    assert stage.wire() == ["open", "end error(deadline_passed: no frame for 10 s)"]
    assert stage.source.stopped == [(R1, late)]
    assert stage.seen.reasons == [("failed", "r", "deadline_passed: no frame for 10 s")]
    stage.runtime.release("r")
    assert stage.rest() == {}


def test_case_11_ids_that_nobody_opens_hold_up_nobody() -> None:
    """A thousand registrations whose sender never comes; then a real request in each direction."""
    stage = middle(workers=1, input_wait_s=10.0)
    for n in range(1_000):
        assert stage.runtime.register(f"ghost{n}", Identity(f"x{n}", 1)).accepted
    stage.run()
    stage.open("a", R1)
    stage.come(opening(), data(0, "in"))
    assert stage.take("a").payload == "in"
    stage.submit("a", "out")
    stage.run()
    assert stage.wire(R1) == ["open", "data 0"]
    stage.pass_time(10.1)
    assert len(stage.collect().failed) == 1_001
    for n in range(1_000):
        stage.runtime.release(f"ghost{n}")
    stage.runtime.release("a")
    assert stage.rest() == {}


def test_case_12_a_dead_sender_fails_every_receiver_that_waits_for_it() -> None:
    stage = middle()
    for name, identity in (("a", R1), ("b", OTHER)):
        stage.open(name, identity)
        stage.come(opening(identity))
    stage.collect()
    assert [stage.take(name).kind for name in ("a", "b")] == [TakenKind.NOT_YET] * 2
    stage.lose_source()
    assert stage.collect().failed == {"a": error("peer_lost"), "b": error("peer_lost")}
    assert stage.wire(R1) == stage.wire(OTHER) == ["open", "end error(peer_lost)"]


def test_case_16_cleanup_before_a_queued_put_leaves_nothing_of_it() -> None:
    """The scheduler lets go while c0 waits for its producer; another c0 while its frame waits for the outbox."""
    stage = sender_only()
    stage.open("r", R1)
    stage.open("s", OTHER)
    stage.submit("r", "c0")
    stage.submit("s", "c0")
    stage.runtime.release("r")
    while stage.runtime.produce_once():
        pass
    stage.runtime.release("s")
    stage.run()
    assert stage.wire(R1) == ["open", "end cancelled(released)"]
    assert stage.wire(OTHER) == ["open", "data 0", "end cancelled(released)"]
    assert stage.sink.kept == set()
    assert stage.rest() == {}


def test_case_17_what_comes_late_for_a_closed_id_makes_no_new_request() -> None:
    """From above and from the stage before. That the frames are counted too comes with the metrics."""
    stage = middle(answer=lambda _: Register("ghost"))
    stage.open("r", R1)
    stage.come(opening())
    stage.runtime.end("r")
    stage.run()
    stage.collect()
    assert not stage.runtime.submit_chunk("r", "late").accepted
    assert not stage.runtime.end("r").accepted
    stage.come(data(0, "late"), ok_end(1))
    assert stage.host.offered == []
    assert not stage.collect()
    assert stage.wire() == ["open", "end 0 ok"]
    assert stage.rest() == {}


def test_case_18_a_cancel_in_a_request_that_still_flushes_is_not_forgotten() -> None:
    """The host has ended it; its chunks wait for room when the client leaves."""
    stage = sender_only()
    stage.open("r", R1)
    stage.sink.default = BUSY
    stage.submit("r", "c0", "c1")
    stage.runtime.end("r")
    stage.run()
    stage.runtime.cancel("r", "left")
    stage.sink.default = STORED
    stage.hear(ROOM)
    assert stage.wire() == ["open", "end cancelled(left)"]
    assert stage.rest() == {}


def test_case_19_a_new_generation_has_its_own_record_and_the_old_cleanup_never_touches_it() -> None:
    """The end of generation 1 is queued, its cleanup deferred, when generation 2 opens and has d0."""
    two = Two()
    two.open("g1", R1)
    two.send("g1", "c0")
    two.first.runtime.end("g1")
    two.first.runtime.release("g1")
    assert two.first.runtime.register("g2", R2).accepted
    two.first.submit("g2", "d0")
    two.settle()
    two.first.runtime.release("g1")
    two.send("g2", "d1")
    assert two.first.wire(R1) == ["open", "data 0", "end 1 ok"]
    assert two.first.wire(R2) == ["open", "data 0", "data 1"]
    assert two.taken(TALKER_R1) == ["c0", ("end", None, "ok")]
    assert two.taken(TALKER_R2) == ["d0", "d1"]
    two.first.runtime.end("g2")
    two.settle()
    assert two.taken(TALKER_R2) == [("end", None, "ok")]
    assert two.held() == [{}, {}]


def test_case_24_an_id_in_use_is_refused_or_gets_a_life_of_its_own() -> None:
    two = Two()
    two.open("a", R1)
    with pytest.raises(ConfigError, match="not registered"):
        two.first.runtime.register("b", R1)
    with pytest.raises(ConfigError, match="not in use"):
        two.first.runtime.register("a", R2)
    two.open("b", R2)
    for name in ("a", "b"):
        two.send(name, f"of {name}")
        two.first.runtime.end(name)
        two.settle()
    assert two.taken(TALKER_R1) == ["of a", ("end", None, "ok")]
    assert two.taken(TALKER_R2) == ["of b", ("end", None, "ok")]
    assert two.held() == [{}, {}]


def test_case_25_two_requests_with_one_id_both_get_their_own_reply() -> None:
    ring = Ring()
    ring.open(R1)
    ring.open(R2)
    for life, item in ((R1, "first"), (R2, "second")):
        ring.submit(life, item)
    ring.settle()
    ring.drain()
    assert ring.ended == {"front-r1-1": "ok", "front-r1-2": "ok"}
    assert ring.got == {"front-r1-1": ["first"], "front-r1-2": ["second"]}
    assert ring.held() == [{}, {}, {}]


def test_case_26_asking_after_a_cleared_record_has_an_answer() -> None:
    """A and B share an external id; A completes and is cleared; both are asked again, and B goes on."""
    stage = receiver_only()
    stage.open("a", R1)
    stage.open("b", R2)
    stage.come(opening(R1), opening(R2), ok_end(0, "of a", identity=R1))
    assert stage.take("a").payload == "of a"
    assert stage.take("a").kind is TakenKind.GONE
    assert stage.runtime.state("a") is None
    assert stage.take("b").kind is TakenKind.NOT_YET
    stage.come(ok_end(0, "of b", identity=R2))
    assert stage.take("b").payload == "of b"
    assert stage.take("never").kind is TakenKind.GONE


def test_case_27_a_middle_stage_that_times_out_cleans_both_its_roles() -> None:
    def producer(context: ProducerContext) -> Any:
        context.state.get_or_create("codec.history", list).append(context.output)
        return context.output

    stage = middle(input_wait_s=10.0, producer=producer)
    stage.open("r", R1)
    stage.come(opening(), data(0, "c0"))
    assert stage.take("r").payload == "c0"
    stage.submit("r", "d0")
    stage.run()
    assert stage.held()["state"] == 1
    stage.pass_time(10.1)
    assert stage.wire() == ["open", "data 0", "end error(deadline_passed: no frame for 10 s)"]
    stage.runtime.release("r")
    assert stage.sink.kept == set()
    assert stage.rest() == {}


def test_case_28_closing_after_a_segment_s_end_makes_room_for_the_next_request() -> None:
    """What is built: the runtime's own limit. Sessions in the scheduler come with it."""
    stage = receiver_only(requests_max=1)
    stage.open("s", R1)
    stage.come(opening(), Frame(IN, R1, FrameKind.DATA, seq=0, segment_end=True, body=encode("c0")))
    assert stage.take("s").segment_end
    assert not stage.runtime.register("s2", OTHER).accepted
    stage.runtime.release("s")
    stage.runtime.release("s")
    assert stage.runtime.register("s2", OTHER).accepted
    assert stage.source.stopped == [(R1, DONE)]


def test_case_29_a_chunk_that_was_put_and_never_read_is_reclaimed_by_an_abort() -> None:
    two = Two(pairs=real_pair)
    two.settle()
    two.open("a", R1)
    two.first.submit("a", b"x" * 100_000)
    two.first.run()
    assert two.first.held()["sink.blocks"] == two.next.held()["source.arrived"] == 1
    two.first.runtime.cancel("a", "left")
    two.settle()
    assert two.taken(TALKER_R1)[-1][0] == "failed"
    two.next.runtime.release(TALKER_R1)
    assert two.held() == [{}, {}]
    lonely = sender_only()
    lonely.open("a", R1)
    lonely.submit("a", "c0")
    lonely.run()
    lonely.hear(PeerLost())
    assert (R1, True) in lonely.sink.reclaimed  # what the connector keeps, read or not
    assert lonely.rest() == {}


@pytest.mark.parametrize("make", [sender_only, receiver_only, middle, front])
def test_case_30_every_role_releases_all_of_a_request_that_ended_well(make: Callable[..., Stage]) -> None:
    stage = make()
    for n in range(5):
        name, identity = f"r{n}", Identity(f"e{n}", 1)
        stage.open(name, identity)
        if stage.source is not None:
            stage.come(opening(identity), data(0, "in", identity=identity), ok_end(1, identity=identity))
            assert [stage.take(name).kind for _ in range(2)] == [TakenKind.CHUNK, TakenKind.END]
        if stage.sink is not None:
            stage.submit(name, "out")
            stage.runtime.end(name)
            stage.run()
            assert stage.wire(identity) == ["open", "data 0", "end 1 ok"]
        assert stage.runtime.residue()["requests"] == 0
    assert stage.seen.failures == []
    assert stage.rest() == {}


def test_case_31_an_abort_reaches_every_layer_of_every_stage_each_time() -> None:
    ring = Ring()
    for n in range(1, 21):
        life = Identity("again", n)
        ring.open(life)
        ring.submit(life, "partial")
        ring.settle()
        assert [stage.runtime.residue()["requests"] for stage in ring.stages] == [1, 1, 1]
        ring.leave(life)
        ring.settle()
        assert [stage.runtime.residue()["requests"] for stage in ring.stages] == [0, 0, 0]
        assert [stage.runtime.residue()["state"] for stage in ring.stages] == [0, 0, 0]
    ring.drain()
    assert ring.held() == [{}, {}, {}]


def test_case_33_a_cancel_between_the_registration_and_its_opening_takes_both_back() -> None:
    """What is built: the opening still waits in the outbox. The engine's own submission comes with the engine."""
    stage = middle()
    assert stage.runtime.register("r", R1).accepted
    stage.runtime.cancel("r", "left")
    stage.run()
    assert stage.wire() == ["open", "end cancelled(left)"]
    stage.come(opening())
    assert {identity for identity, _ in stage.source.stopped} == {R1}
    assert {cause for _, cause in stage.source.stopped} == {cancelled("left")}
    assert stage.host.offered == []
    assert stage.rest() == {}


def test_case_34_a_rejection_at_the_front_door_releases_the_sender_at_once() -> None:
    """All of the request is offered, part of it is put, when the receiver's host says no."""
    two = Two(pairs=real_pair, host=ScriptedHost(lambda _: Refuse("no room")))
    two.settle()
    two.first.runtime.register("a", R1)
    two.first.submit("a", *range(20))
    two.first.runtime.end("a")
    two.first.run()
    assert two.first.held()["backlog_bytes"] > 0
    two.settle()
    assert two.first.collect().failed == {"a": error("no room")}
    assert two.first.held().keys() <= {"feedback"}
    assert two.held() == [{}, {}]


def test_case_35_a_load_that_completes_after_the_abort_is_settled_by_the_state_of_its_request() -> None:
    stage = receiver_only()
    stage.open("r", R1)
    stage.open("s", OTHER)
    stage.come(opening(), opening(OTHER))
    late = stage.source.bring(data(0, "c0"), during=lambda: stage.runtime.cancel("r", "left"))
    stage.run()
    assert (late.loads, late.discarded) == (1, True)
    assert (R1, True) in stage.source.reclaimed
    assert stage.take("r").kind is TakenKind.GONE
    assert stage.runtime.residue()["requests"] == 1
    stage.come(data(0, "of s", identity=OTHER))
    assert stage.take("s").payload == "of s"
    stage.runtime.release("s")
    assert stage.rest() == {}


def nothing_came(stage: Stage) -> None:
    pass


def a_chunk_waits(stage: Stage) -> None:
    stage.come(data(0, "c0"))


def a_chunk_was_taken(stage: Stage) -> None:
    stage.come(data(0, "c0"))
    stage.take("r")


@pytest.mark.parametrize("situation", [nothing_came, a_chunk_waits, a_chunk_was_taken])
def test_case_37_a_cancel_by_the_peer_is_heard_without_the_request_being_asked(
    situation: Callable[[Stage], None],
) -> None:
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening())
    situation(stage)
    stage.collect()
    stage.come(failed_end("left", outcome=Outcome.CANCELLED))
    told = stage.collect()
    assert (told.failed, told.ready) == ({"r": cancelled("left")}, {})
    stage.runtime.release("r")
    assert stage.rest() == {}


def test_case_38_what_was_put_for_a_stage_that_never_takes_it_is_dropped_on_both_sides() -> None:
    """The client has left: the next stage never registers the request whose chunks wait there."""
    two = Two(pairs=real_pair, host=ScriptedHost(lambda _: Later()), unclaimed_s=30.0)
    two.settle()
    two.open("a", R1)
    two.send("a", b"x" * 1_000)
    assert two.next.held()["unclaimed"] == 1
    two.pass_time(30.1)
    assert two.first.collect().failed == {"a": error("unclaimed")}
    assert two.held() == [{}, {}]


def test_case_40_a_completion_for_a_request_that_is_gone_is_noted_and_changes_nothing() -> None:
    """Its producer runs while its peer is lost and its life ends; its successor already waits."""

    def producer(context: ProducerContext) -> Any:
        if context.identity == R1:
            stage.hear(PeerLost(), PeerBack())
            assert stage.runtime.residue()["requests"] == 1
        return context.output

    stage = sender_only(producer=producer)
    stage.open("g1", R1)
    stage.submit("g1", "late")
    stage.open("g2", R2)
    stage.submit("g2", "d0")
    stage.run()
    late = [moved for moved in stage.seen.transitions if moved.ignored and moved.identity == R1]
    assert [(moved.before, moved.after) for moved in late] == [("finalized", "finalized")]
    assert stage.wire() == ["open", "open", "data 0"]
    stage.runtime.release("g2")
    assert stage.rest() == {}


def test_case_43_the_end_of_the_input_does_not_end_the_stage_s_own_work() -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening(), data(0, "in"), ok_end(1))
    assert [stage.take("r").kind for _ in range(2)] == [TakenKind.CHUNK, TakenKind.END]
    assert stage.collect().input_ended == {"r": None}
    stage.pass_time(1_000_000.0)
    assert stage.collect().output_ended == {}
    stage.submit("r", "d0", "d1")
    stage.runtime.end("r")
    stage.run()
    assert stage.wire() == ["open", "data 0", "data 1", "end 2 ok"]
    assert stage.collect().output_ended == {"r": None}
    assert stage.rest() == {}


def test_case_48_live_chunks_after_a_segment_s_end_are_never_taken_for_old_ones() -> None:
    two = Two()
    two.open("s", R1)
    assert two.first.runtime.submit_chunk("s", "c0", segment_end=True).accepted
    two.send("s", "d0", "d1")
    given = [two.next.take(TALKER_R1) for _ in range(3)]
    assert [(taken.payload, taken.segment) for taken in given] == [("c0", 0), ("d0", 1), ("d1", 1)]


def test_case_52_the_tail_of_an_accumulating_producer_comes_with_the_end() -> None:
    held: list[Any] = []

    def accumulate(context: ProducerContext) -> Any:
        if context.output is not None:
            held.append(context.output)
        return list(held) if context.is_finished else None

    two = Two(producer=accumulate)
    two.open("a", R1)
    two.send("a", "c0", "c1", "c2")
    assert two.taken(TALKER_R1) == []
    two.first.runtime.end("a")
    two.settle()
    assert two.taken(TALKER_R1) == [("end", ["c0", "c1", "c2"], "ok")]


def test_case_56_what_a_skipped_cycle_did_not_collect_is_given_later_and_once() -> None:
    """One result, a cycle that collects nothing, another result, then the cycle that reads both."""
    stage = receiver_only()
    for name, identity in (("a", R1), ("b", OTHER)):
        stage.open(name, identity)
        stage.come(opening(identity))
    stage.collect()
    stage.come(failed_end("first", identity=R1))
    stage.pass_time(0.1)
    stage.come(data(0, "b0", identity=OTHER))
    told = stage.collect()
    assert (told.failed, told.ready) == ({"a": error("first")}, {"b": None})
    assert not stage.collect()


def test_case_57_a_frame_with_an_index_that_was_not_due_fails_its_stream_only() -> None:
    """That the two ends agree on the mode is checked when they meet; see the two processes that do not."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.open("s", OTHER)
    stage.come(opening(), opening(OTHER), data(1, "c1"), data(0, "of s", identity=OTHER))
    (failed,) = stage.collect().failed.items()
    assert failed[0] == "r"
    assert failed[1].outcome is Outcome.ERROR
    assert failed[1].reason.startswith("frame_ahead")
    assert stage.take("s").payload == "of s"


def test_case_58_a_paused_request_that_is_closed_is_not_counted_as_paused_any_more() -> None:
    """What is built: the backlog. The scheduler's count of paused sessions comes with it."""
    stage = sender_only(backlog_bytes=1_000)
    stage.open("t", OTHER)
    stage.open("s", R1)
    stage.sink.default = lambda frame: BUSY if frame.kind is FrameKind.DATA else STORED
    stage.submit("t", b"x" * 900)
    assert not stage.runtime.submit_chunk("s", b"y" * 900).accepted
    assert stage.runtime.residue()["paused"] == 1
    stage.runtime.release("s")
    stage.run()
    assert stage.runtime.residue()["paused"] == 0
    stage.sink.default = STORED
    stage.hear(ROOM)
    assert stage.collect().resumed == {}
    stage.open("s2", R2)
    stage.submit("s2", b"z" * 900)
    stage.run()
    assert stage.wire(R2) == ["open", "data 0"]


def test_case_59_a_request_that_has_used_up_what_came_waits_for_more() -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening(), data(0, "c0"))
    assert stage.take("r").payload == "c0"
    stage.collect()
    assert [stage.take("r").kind for _ in range(3)] == [TakenKind.NOT_YET] * 3
    told = stage.collect()
    assert (told.input_ended, told.failed, stage.source.stopped) == ({}, {}, [])
    stage.come(data(1, "c1"), ok_end(2))
    assert stage.take("r").payload == "c1"
    assert stage.take("r").kind is TakenKind.END


def test_case_61_a_consumer_may_drain_after_the_end_of_its_input() -> None:
    """What is built: the runtime waits for the host's own end. The scheduler that waits too comes later."""
    ring = Ring()
    ring.open(R1)
    ring.settle()
    last, name = ring.stages[2], ring.names[2][R1]
    ring.stages[1].runtime.end(ring.names[1][R1])
    ring.stages[1].run()
    last.run()
    assert last.take(name).kind is TakenKind.END
    for _ in range(3):
        last.run()
    last.submit(name, "tail of the vocoder")
    last.runtime.end(name)
    ring.settle()
    assert ring.got["front-r1-1"] == ["tail of the vocoder"]
    assert ring.ended == {"front-r1-1": "ok"}


def test_case_64_a_stage_that_fails_by_its_own_rule_fails_the_stage_that_waits_for_it() -> None:
    two = Two()
    two.open("a", R1)
    two.send("a", "c0")
    assert two.taken(TALKER_R1) == ["c0"]
    two.next.collect()
    two.first.runtime.fail("a", "preempted")
    two.settle()
    assert two.next.collect().failed == {TALKER_R1: error("preempted")}
    assert two.taken(TALKER_R1) == [("failed", None, "error(preempted)")]


def test_case_68_a_cancelled_put_is_no_error_and_touches_no_other_request() -> None:
    """A waits for room when it is aborted."""
    stage = sender_only()
    stage.open("a", R1)
    stage.open("b", OTHER)
    stage.sink.plan.append(BUSY)
    stage.submit("a", "a0")
    stage.run()
    stage.runtime.cancel("a", "left")
    stage.submit("b", "b0")
    stage.run()
    assert stage.wire(R1) == ["open", "end cancelled(left)"]
    assert stage.wire(OTHER) == ["open", "data 0"]
    told = stage.collect()
    assert (told.failed, told.marker_lost) == ({}, {})
    assert [failure for failure in stage.seen.failures if failure.cause.outcome is Outcome.ERROR] == []


def test_case_71_a_cleanup_under_the_internal_id_finds_what_is_kept_under_the_external_one() -> None:
    def producer(context: ProducerContext) -> Any:
        context.state.get_or_create("codec.history", list).append(context.output)
        return context.output

    stage = middle(producer=producer)
    stage.open("internal", Identity("external", 7))
    stage.come(opening(Identity("external", 7)))
    stage.submit("internal", "c0")
    stage.run()
    assert stage.held()["state"] == 1
    stage.runtime.cancel("internal")
    stage.run()
    assert stage.runtime.residue()["state"] == 0
    assert {identity for identity, _ in stage.sink.reclaimed} == {Identity("external", 7)}
    assert stage.rest() == {}


def test_case_72_chunks_of_ids_that_begin_alike_go_to_their_own_requests() -> None:
    ids = ["a", "a-1", "a-1-1", "a_1", "A", "chatcmpl-" + "0" * 200, "chatcmpl-" + "0" * 199, "a#1", " a"]
    two = Two()
    for n, external_id in enumerate(ids):
        two.open(f"n{n}", Identity(external_id, 1))
    for n, external_id in reversed(list(enumerate(ids))):
        two.send(f"n{n}", external_id)
    for external_id in ids:
        assert two.taken(f"talker-{external_id}-1") == [external_id]


def test_case_73_what_is_put_under_a_key_is_got_under_the_same_key() -> None:
    sending, receiving = memory_pair(Hello(OUT, "digest"))
    for end in (sending, receiving, sending):
        end.wait(0)
        end.signals()
    frame = Frame(OUT, Identity("any/id:with#marks", 3), FrameKind.OPEN)
    assert sending.put(frame) == STORED
    receiving.wait(0)
    arrival = receiving.get()
    assert arrival is not None
    assert arrival.frame.key == frame.key
    assert str(arrival.frame.key) == str(frame.key)
    arrival.discard()


def test_case_75_a_scheduler_goes_on_while_the_transport_puts() -> None:
    """During A's put, B and C are submitted and A is cancelled, on another thread that never waits for the put."""
    stage = sender_only()
    for name, identity in (("a", R1), ("b", OTHER), ("c", Identity("r3", 1))):
        stage.open(name, identity)
    done: list[bool] = []

    def scheduler() -> None:
        done.append(stage.runtime.submit_chunk("b", "b0").accepted)
        done.append(stage.runtime.submit_chunk("c", "c0").accepted)
        stage.runtime.cancel("a", "left")

    def slow(_frame: Frame) -> PutOutcome:
        thread = threading.Thread(target=scheduler)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return PutOutcome(PutStatus.RETRY, "no link")

    stage.sink.plan.append(slow)
    stage.submit("a", "a0")
    stage.run()
    stage.pass_time(1.0)
    assert done == [True, True]
    assert stage.wire(R1) == ["open", "end cancelled(left)"]
    assert stage.wire(OTHER) == ["open", "data 0"]
    assert stage.wire(Identity("r3", 1)) == ["open", "data 0"]


def test_case_76_a_slow_consumer_makes_its_producer_wait_within_bounds() -> None:
    """Ten chunks are offered for each one that is taken."""
    chunk = 10_000
    two = Two(pairs=real_pair, window_frames=4, window_bytes=4 * chunk + 4_000, backlog_bytes=5 * chunk + 5_000)
    two.settle()
    two.open("a", R1)
    sent: list[int] = []
    got: list[int] = []
    refused = 0
    for n in range(200):
        if two.first.runtime.submit_chunk("a", [n, b"x" * chunk]).accepted:
            sent.append(n)
        else:
            refused += 1
        two.settle()
        assert two.next.runtime.residue()["staged"] <= 4
        assert two.first.runtime.residue()["backlog_bytes"] <= 5 * chunk + 5_000
        if n % 10 == 9:
            got.append(two.next.take(TALKER_R1).payload[0])
            two.settle()
    assert refused > 100
    assert got == sent[: len(got)]
    two.first.runtime.end("a")
    two.settle()
    rest = two.taken(TALKER_R1)
    assert got + [payload[0] for payload in rest[:-1]] == sent
    assert rest[-1] == ("end", None, "ok")
    assert two.held() == [{}, {}]


@pytest.mark.parametrize(
    ("close", "how"),
    [
        (failed_end("reset"), "error(reset)"),
        (failed_end("left", outcome=Outcome.CANCELLED), "cancelled(left)"),
        (ok_end(0), "ok"),
    ],
)
def test_case_77_a_closed_stream_remembers_how_it_was_closed(close: Frame, how: str) -> None:
    """Then a late frame comes, and somebody asks for the stream again."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening(), close)
    assert str(stage.take("r").cause) == how
    stage.runtime.release("r")
    stage.come(data(0, "late"))
    admission = stage.runtime.register("again", R1)
    assert (admission.accepted, admission.reason) == (False, f"{R1} has ended here: {how}")
    assert stage.host.offered == []


def test_case_80_a_hundred_requests_do_not_wait_for_the_one_whose_producer_is_slow() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def producer(context: ProducerContext) -> Any:
        if context.request == "n0":
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return context.output

    stage = sender_only(producer=producer)
    ids = [Identity(f"e{n}", 1) for n in range(100)]
    for n, identity in enumerate(ids):
        stage.open(f"n{n}", identity)
    stage.submit("n0", "slow")
    worker = threading.Thread(target=stage.runtime.produce_once)
    worker.start()
    assert begun.wait(PATIENCE_S)
    for n in range(1, 100):
        stage.submit(f"n{n}", n)
    stage.run()
    assert stage.runtime.state("n0") is not None
    assert stage.runtime.residue()["requests"] == 100
    assert all(stage.wire(identity) == ["open", "data 0"] for identity in ids[1:])
    assert stage.wire(ids[0]) == ["open"]
    go_on.set()
    worker.join(PATIENCE_S)
    stage.run()
    assert stage.wire(ids[0]) == ["open", "data 0"]
