"""A stage on several ranks, without processes: what is listed, what every rank makes of it, and what is refused."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    DONE,
    IN,
    OTHER,
    R1,
    R2,
    ROOM,
    Stage,
    cancelled,
    data,
    error,
    failed_end,
    middle,
    ok_end,
    opening,
    receiver_only,
)

from omni_fsm.adapters.ranks import Group, RankedStage
from omni_fsm.connectors.port import BUSY, STORED, PeerLost, Stopped
from omni_fsm.payload import encode
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Register, TakenKind
from omni_fsm.runtime.ranks import (
    CycleInput,
    RankEvent,
    RankEventKind,
    RankList,
    RankListError,
    RankLostError,
    RankReceivers,
    decode_list,
    encode_list,
)

K = RankEventKind


# Groups without processes: a broadcast is put into the boxes of the others, who come after


class Boxes:
    """What the members of one group have not received yet; ``dead`` ones fail whoever sends to them."""

    def __init__(self, world_size: int) -> None:
        self.boxes: list[deque[Any]] = [deque() for _ in range(world_size)]
        self.dead: set[int] = set()
        self.received = [0] * world_size


class BoxGroup:
    """One member's view of `Boxes`; what it gives is a copy, as over a wire."""

    def __init__(self, boxes: Boxes, rank: int) -> None:
        self.boxes, self.rank_in_group, self.world_size = boxes, rank, len(boxes.boxes)

    def _broadcast(self, given: Any, src: int) -> Any:
        if self.rank_in_group == src:
            if self.boxes.dead:
                raise RuntimeError("Connection closed by peer")
            for rank, box in enumerate(self.boxes.boxes):
                if rank != src:
                    box.append(given)
            return given
        if not self.boxes.boxes[self.rank_in_group]:
            raise TimeoutError("Timed out waiting 1000ms for recv operation to complete")
        self.boxes.received[self.rank_in_group] += 1
        return self.boxes.boxes[self.rank_in_group].popleft()

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        return self._broadcast(obj, src)

    def broadcast_tensor_dict(
        self, tensor_dict: dict[str, torch.Tensor] | None = None, src: int = 0
    ) -> dict[str, torch.Tensor] | None:
        copies = {key: tensor.clone() for key, tensor in tensor_dict.items()} if tensor_dict is not None else None
        given: dict[str, torch.Tensor] | None = self._broadcast(copies, src)
        return given


def lines(*sizes: int) -> list[list[Group]]:
    """The groups of each rank of a grid, in an order in which who sends comes before who receives."""
    grid: list[tuple[int, ...]] = [()]
    for size in sizes:
        grid = [(*place, n) for place in grid for n in range(size)]
    groups: dict[tuple[int, tuple[int, ...]], Boxes] = {}
    ranks: list[list[Group]] = []
    for place in sorted(grid, key=lambda place: place[::-1]):
        mine: list[Group] = []
        for axis, size in enumerate(sizes):
            others = (axis, place[:axis] + place[axis + 1 :])
            mine.append(BoxGroup(groups.setdefault(others, Boxes(size)), place[axis]))
        ranks.append(mine)
    return ranks


class Ranks:
    """All ranks of one stage, the leading one first, with the real stage stepped by hand."""

    def __init__(self, stage: Stage, *sizes: int) -> None:
        self.stage = stage
        self.groups = lines(*sizes)
        self.ranks = [
            RankedStage(groups, IN, stage.runtime if n == 0 else None) for n, groups in enumerate(self.groups)
        ]
        self.leader = self.ranks[0]

    def cycle(self, wants: Callable[[str], int] | None = None) -> CycleInput:
        """One cycle on all ranks; each has the same input as the leading one."""
        self.stage.run()
        inputs = [rank.begin_cycle(wants) for rank in self.ranks]
        for other in inputs[1:]:
            assert other == inputs[0]
            for number, payload in inputs[0].payloads.items():
                assert b"".join(encode(other.payloads[number]).parts) == b"".join(encode(payload).parts)
        return inputs[0]

    def say(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The runner, the same on every rank, calls a method; every rank gives the same answer."""
        answers = [getattr(rank, name)(*args, **kwargs) for rank in self.ranks]
        assert answers[1:] == answers[:-1]
        return answers[0]

    def rest(self) -> list[dict[str, int]]:
        """Residue of every rank after all time-outs."""
        for _ in range(3):
            self.stage.pass_time(1_000_000.0)
            self.cycle()
        return [{name: count for name, count in rank.residue().items() if count} for rank in self.ranks]


def accept(identity: Identity) -> Register:
    return Register(f"{identity.external_id}-{identity.generation}")


def ranks_of(*sizes: int, **options: Any) -> Ranks:
    return Ranks(middle(answer=accept, **options), *sizes)


def told(cycle: CycleInput) -> list[str]:
    """A cycle's events in words."""
    return [f"{e.kind} {e.internal_id}" + (f" {e.cause}" if e.cause is not None else "") for e in cycle.events]


A, B = "r1-1", "r2-1"

GRIDS = [(), (2,), (4,), (2, 2), (2, 1, 3)]


@pytest.mark.parametrize("sizes", GRIDS)
def test_every_rank_gets_what_the_leading_one_takes_and_computes_the_same(sizes: tuple[int, ...]) -> None:
    ranks = ranks_of(*sizes)
    hidden = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    ranks.stage.come(opening(), data(0, {"hidden": hidden, "speaker": ("amy", 1)}), data(1))
    cycle = ranks.cycle()
    assert told(cycle) == ["registered r1-1", "opened r1-1", "chunk r1-1", "chunk r1-1"]
    assert cycle.feedback.registered == {A: R1}
    first, second = cycle.taken[A]
    assert torch.equal(first.payload["hidden"], hidden)
    assert first.payload["speaker"] == ("amy", 1)
    assert second.payload is None
    assert ranks.say("submit_chunk", A, 7).accepted
    ranks.stage.come(ok_end(2, "tail"))
    cycle = ranks.cycle()
    assert told(cycle) == ["end r1-1 ok"]
    assert [(taken.kind, taken.payload) for taken in cycle.taken[A]] == [("end", "tail")]
    assert list(cycle.feedback.input_ended) == [A]
    assert ranks.say("end", A).accepted
    assert told(ranks.cycle()) == ["output_ended r1-1", "over r1-1"]
    assert ranks.stage.wire() == ["open", "data 0", "end 1 ok"]
    assert ranks.rest() == [{}] * len(ranks.ranks)


@pytest.mark.parametrize("sizes", GRIDS[1:])
def test_each_rank_receives_each_list_once(sizes: tuple[int, ...]) -> None:
    ranks = ranks_of(*sizes)
    for _ in range(5):
        assert ranks.cycle().events == ()
    boxes = {id(group.boxes): group.boxes for groups in ranks.groups for group in groups if isinstance(group, BoxGroup)}
    assert sum(sum(each.received) for each in boxes.values()) == 5 * (len(ranks.ranks) - 1)


def test_failures_deadlines_and_cancels_reach_every_rank_by_the_list_alone() -> None:
    ranks = ranks_of(2, 2, input_wait_s=5.0)
    third, fourth = Identity("r3", 1), Identity("r4", 1)
    ranks.stage.come(*(opening(identity) for identity in (R1, OTHER, third, fourth)))
    ranks.cycle()
    ranks.stage.come(failed_end("boom"))
    assert told(ranks.cycle()) == ["failed r1-1 error(boom)"]
    ranks.leader.cancel(B, "bored")  # on one rank, at any time
    for rank in ranks.ranks[1:]:
        rank.cancel("r3-1")  # changes nothing there
    assert told(ranks.cycle()) == ["left r2-1 cancelled(bored)", "output_ended r2-1", "over r2-1"]
    ranks.stage.hear(Stopped(fourth, DONE))
    assert told(ranks.cycle())[0] == "failed r4-1 done(done)"
    ranks.stage.pass_time(6.0)
    assert told(ranks.cycle())[:1] == ["failed r3-1 error(deadline_passed: no frame for 5 s)"]
    for name in (A, "r3-1", "r4-1"):
        assert not ranks.say("submit_chunk", name, 1).accepted
        ranks.say("release", name)
    assert ranks.rest() == [{}] * 4


def test_a_policy_takes_as_many_frames_as_it_wants_and_misses_none() -> None:
    ranks = ranks_of(2)
    ranks.stage.come(opening(), data(0, 0), data(1, 1), data(2, 2))

    def payloads(want: int) -> list[Any]:
        return [taken.payload for taken in ranks.cycle(lambda _: want).taken.get(A, [])]

    seen = [payloads(want) for want in (0, 1, 0, 2)]
    assert seen == [[], [0], [], [1, 2]]


def test_an_answer_is_the_same_on_every_rank_and_a_late_refusal_comes_with_the_next_list() -> None:
    """The backlog is the leading rank's; what was offered behind a refused chunk must not overtake it."""
    ranks = ranks_of(2, backlog_bytes=1_000)
    ranks.stage.sink.default = BUSY
    ranks.stage.come(opening())
    ranks.cycle()
    for output in (b"x" * 900, b"y" * 900, b"z"):
        assert ranks.say("submit_chunk", A, output).accepted
    assert ranks.say("end", A).accepted
    with pytest.raises(LocalProtocolError, match="after the runner's own end"):
        ranks.ranks[1].submit_chunk(A, 1)
    cycle = ranks.cycle()
    assert [reason.partition(":")[0] for reason in cycle.refused[A]] == [
        "backlog",
        "it was offered behind one that was refused",
        "it was offered behind one that was refused",
    ]
    ranks.stage.sink.default = STORED
    ranks.stage.hear(ROOM)
    assert told(ranks.cycle()) == ["resumed r1-1"]
    assert ranks.say("submit_chunk", A, b"y").accepted
    assert ranks.say("end", A).accepted
    assert not ranks.say("end", A).accepted
    assert ranks.cycle().refused == {}
    assert ranks.stage.wire() == ["open", "data 0", "data 1", "end 2 ok"]


def test_a_host_registers_on_every_rank_and_what_the_stage_refuses_is_told() -> None:
    ranks = Ranks(middle(), 2)
    assert ranks.say("register", "mine", R1).accepted
    with pytest.raises(ConfigError, match="not in use"):
        ranks.ranks[1].register("mine", R2)
    assert not ranks.say("submit_chunk", "mine", 1).accepted  # known from the next cycle on
    assert told(ranks.cycle()) == ["registered mine"]
    assert ranks.say("register", "other", R1).accepted
    ranks.leader.cancel("mine")
    cycle = ranks.cycle()
    assert "a life that is not registered (it is, as 'mine')" in cycle.refused["other"][0]
    assert "left mine cancelled(cancelled)" in told(cycle)
    assert ranks.say("register", "again", R1).accepted
    assert "has ended here" in ranks.cycle().refused["again"][0]
    assert ranks.rest() == [{}, {}]


def test_a_name_that_is_used_again_at_once_is_over_before_it_is_registered() -> None:
    """The host's names are external ids: the stage forgets a life and registers the next between two cycles."""
    stage = receiver_only(answer=lambda identity: Register(identity.external_id))
    ranks = Ranks(stage, 2)
    stage.come(opening(), data(0, 0))
    ranks.cycle()
    stage.runtime.release("r1")
    stage.run()
    stage.come(opening(R2), data(0, 1, R2))
    ranks.say("cancel", "r1")  # which means the old life, and meets the new one in the stage
    assert told(ranks.cycle()) == ["left r1 cancelled(cancelled)", "over r1", "registered r1", "opened r1"]
    assert told(ranks.cycle()) == ["over r1"]
    assert ranks.rest() == [{}, {}]


def test_a_stage_without_an_output_is_over_with_the_end_of_its_input() -> None:
    ranks = Ranks(receiver_only(answer=accept), 2)
    ranks.stage.come(opening(), ok_end(0))
    assert told(ranks.cycle()) == ["registered r1-1", "opened r1-1", "end r1-1 ok", "over r1-1"]
    assert told(ranks.cycle()) == []


def test_only_the_rank_that_leads_every_group_has_the_stage() -> None:
    stage = middle()
    groups = lines(2, 2)
    for rank in groups[1:]:
        with pytest.raises(ConfigError, match="runtime"):
            RankedStage(rank, IN, stage.runtime)
    with pytest.raises(ConfigError, match="runtime"):
        RankedStage(groups[0], IN)
    with pytest.raises(ConfigError, match="edge"):
        RankedStage(groups[0], Edge("front", "other"), stage.runtime)


# A rank is lost


def test_a_lost_rank_fails_every_request_on_every_rank_and_towards_both_neighbours() -> None:
    ranks = ranks_of(2)
    ranks.stage.come(opening(), opening(OTHER), data(0, 0))
    ranks.cycle()
    boxes = ranks.groups[0][0].boxes  # type: ignore[attr-defined]
    boxes.dead.add(1)
    ranks.stage.come(data(1, 1))
    lost = ranks.leader.begin_cycle()
    reason = "rank_lost: RuntimeError: Connection closed by peer"
    assert told(lost) == [f"failed r1-1 error({reason})", f"failed r2-1 error({reason})"]
    ranks.stage.run()
    assert ranks.stage.wire(R1)[-1] == f"end error({reason})"
    assert [(identity, str(cause)) for identity, cause in ranks.stage.source.stopped] == [
        (R1, f"error({reason})"),
        (OTHER, f"error({reason})"),
    ]
    late = ranks.ranks[1].begin_cycle()  # nothing came
    assert [str(cause)[:28] for cause in late.feedback.failed.values()] == ["error(rank_lost: TimeoutErro"] * 2
    for rank in ranks.ranks:
        with pytest.raises(RankLostError, match="no cycle can begin: rank_lost"):
            rank.begin_cycle()
        assert not rank.submit_chunk(A, 1).accepted
        assert rank.lost is not None
        rank.release(A)
        assert {name for name, count in rank.residue().items() if count} <= {"tombstones", "timers"}
    ranks.stage.come(opening(Identity("late", 1)))
    assert ranks.stage.source.stopped[-1][1] == ranks.leader.lost  # nobody is left to drive it
    assert ranks.stage.rest() == {}


def test_what_was_complete_or_left_before_a_rank_was_lost_does_not_fail() -> None:
    ranks = ranks_of(2)
    third = Identity("r3", 1)
    ranks.stage.come(opening(), opening(OTHER), opening(third), ok_end(0, None, third))
    ranks.cycle()
    ranks.say("end", "r3-1")
    ranks.cycle()
    ranks.stage.sink.default = BUSY
    ranks.leader.cancel(B)
    ranks.cycle()
    lost = ranks.ranks[1].begin_cycle()
    assert list(lost.feedback.failed) == [A]


def test_a_list_that_a_rank_refuses_ends_it_loudly() -> None:
    ranks = ranks_of(2)
    ranks.leader.begin_cycle()
    ranks.leader.begin_cycle()
    ranks.groups[1][0].broadcast_object()  # this rank misses one
    assert ranks.ranks[1].begin_cycle().events == ()
    with pytest.raises(RankLostError, match="list of cycle 0 refused: it is of cycle 1"):
        ranks.ranks[1].begin_cycle()


def test_payloads_that_are_not_what_the_list_announces_are_refused() -> None:
    ranks = ranks_of(2)
    ranks.stage.come(opening(), data(0, b"payload"))
    ranks.leader.begin_cycle()
    box = ranks.groups[1][0].boxes.boxes[1]  # type: ignore[attr-defined]
    box[1] = {key: tensor[:-1] for key, tensor in box[1].items()}
    ranks.ranks[1].begin_cycle()
    assert "its payloads are not what it announces" in str(ranks.ranks[1].lost)


def test_a_policy_that_raises_is_not_swallowed() -> None:
    ranks = ranks_of(2)
    ranks.stage.come(opening(), data(0))
    assert told(ranks.leader.begin_cycle(lambda _: 1 // 0)) == []
    assert "ZeroDivisionError" in str(ranks.leader.lost)


# The list alone

IDS = ["a", "b", "c"]


class Writer:
    """Writes lists that a leading rank could write, from steps that a test draws."""

    def __init__(self) -> None:
        self.lists: list[RankList] = []
        self.number = 0
        self.lives = 0
        self.seqs: dict[str, int] = {}
        self.opened: set[str] = set()
        self.failed: set[str] = set()
        self.closed: set[str] = set()  # no frame comes any more
        self.left: set[str] = set()

    def cycle(self, steps: Sequence[tuple[str, str]]) -> None:
        events = []
        for kind, name in steps:
            event = self._event(RankEventKind(kind), name)
            if event is not None:
                events.append(event)
                self.number += 1
        self.lists.append(RankList(len(self.lists), tuple(events)))

    def _event(self, kind: RankEventKind, name: str) -> RankEvent | None:
        if not self._possible(kind, name):
            return None
        cause = {K.FAILED: error(), K.LEFT: cancelled(), K.END: Cause(Outcome.OK), K.MARKER_LOST: error()}.get(kind)
        seq = self.seqs[name] if kind in (K.CHUNK, K.END) else -1
        self._note(kind, name)
        identity = Identity(name, self.lives) if kind is K.REGISTERED else None
        return RankEvent(self.number, kind, name, identity, cause, seq)

    def _possible(self, kind: RankEventKind, name: str) -> bool:
        if kind is K.REGISTERED:
            return name not in self.seqs
        impossible = {K.OPENED: self.opened | self.closed, K.CHUNK: self.closed, K.END: self.closed}
        impossible |= {K.FAILED: self.failed, K.LEFT: self.left}
        return name in self.seqs and name not in impossible.get(kind, set())

    def _note(self, kind: RankEventKind, name: str) -> None:
        if kind is K.REGISTERED:
            self.seqs[name] = 0
            self.lives += 1
        elif kind is K.OVER:
            del self.seqs[name]
            for names in (self.opened, self.failed, self.closed, self.left):
                names.discard(name)
        elif kind is K.CHUNK:
            self.seqs[name] += 1
        noted = {K.OPENED: [self.opened], K.FAILED: [self.failed, self.closed], K.END: [self.closed, self.left]}
        noted |= {K.LEFT: [self.left, self.closed]}
        for names in noted.get(kind, []):
            names.add(name)


kinds = st.sampled_from([str(kind) for kind in K if kind is not K.REFUSED] + ["registered", "chunk", "chunk", "opened"])
cycles = st.lists(st.lists(st.tuples(kinds, st.sampled_from(IDS)), max_size=8), min_size=1, max_size=8)


def written(steps: Sequence[Sequence[tuple[str, str]]]) -> list[RankList]:
    writer = Writer()
    for each in steps:
        writer.cycle(each)
    return writer.lists


def value(receivers: RankReceivers) -> Any:
    requests = {name: receivers.get(name) for name in receivers.internal_ids}
    return receivers.cycle, receivers.number, {name: dataclasses.replace(r) for name, r in requests.items() if r}


def applied(lists: Sequence[RankList]) -> RankReceivers:
    receivers = RankReceivers(IN)
    for published in lists:
        receivers.apply(decode_list(receivers.cycle, encode_list(published)))
    return receivers


@settings(max_examples=200)
@given(cycles)
def test_the_same_lists_make_the_same_receivers(steps: list[list[tuple[str, str]]]) -> None:
    lists = written(steps)
    assert value(applied(lists)) == value(applied(lists))


@settings(max_examples=300)
@given(cycles, st.data())
def test_a_list_with_an_entry_dropped_repeated_or_moved_is_refused_and_changes_nothing(
    steps: list[list[tuple[str, str]]], draw: st.DataObject
) -> None:
    *before, last = written(steps)
    if not last.events:
        return
    at = draw.draw(st.integers(0, len(last.events) - 1))
    events = list(last.events)
    match draw.draw(st.sampled_from(["drop", "repeat", "swap", "lists"])):
        case "drop" if at < len(events) - 1:
            del events[at]
        case "swap" if at < len(events) - 1:
            events[at], events[at + 1] = events[at + 1], events[at]
        case "lists":
            whole = applied([*before, last])
            with pytest.raises(RankListError, match="it is of cycle"):
                whole.apply(last)
            return
        case _:
            events.insert(at, events[at])
    receivers = applied(before)
    value_before = value(receivers)
    with pytest.raises(RankListError, match="was expected"):
        receivers.apply(RankList(last.cycle, tuple(events)))
    assert value(receivers) == value_before
    receivers.apply(last)


@settings(max_examples=300)
@given(cycles, st.data())
def test_the_machine_refuses_a_repeated_or_missing_step_even_where_the_numbers_agree(
    steps: list[list[tuple[str, str]]], draw: st.DataObject
) -> None:
    """Whoever writes the numbers anew cannot hide a repeated registration, opening, frame, failure or leave."""
    *before, last = written(steps)
    moving = {K.REGISTERED, K.OPENED, K.CHUNK, K.END, K.FAILED, K.LEFT, K.OVER}
    places = [n for n, event in enumerate(last.events) if event.kind in moving]
    if not places:
        return
    at = draw.draw(st.sampled_from(places))
    events = list(last.events)
    events.insert(at, events[at])
    first = last.events[0].number
    numbered = tuple(msgspec.structs.replace(event, number=n) for n, event in enumerate(events, first))
    receivers = applied(before)
    with pytest.raises(RankListError):
        receivers.apply(RankList(last.cycle, numbered))


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (RankEvent(2, K.CHUNK, "a", seq=1), "the receiver took it for frame_ahead"),
        (RankEvent(2, K.CHUNK, "b", seq=0), "it is not registered"),
        (RankEvent(2, K.OPENED, "a"), "the receiver took it for open_repeated"),
        (RankEvent(2, K.REGISTERED, "a", R1), "it is registered"),
        (RankEvent(2, K.REGISTERED, "b"), "it has no identity"),
        (RankEvent(2, K.FAILED, "a"), "it has no cause"),
        (RankEvent(2, K.LEFT, "a"), "there is nothing to leave"),
        (RankEvent(3, K.CHUNK, "a", seq=0), "entry 2 was expected"),
    ],
)
def test_a_refusal_names_cycle_entry_and_fault(event: RankEvent, fault: str) -> None:
    receivers = applied([RankList(0, (RankEvent(0, K.REGISTERED, "a", R1), RankEvent(1, K.OPENED, "a")))])
    with pytest.raises(RankListError, match=fault) as refused:
        receivers.apply(RankList(1, (event,)))
    assert refused.value.entry == event
    assert refused.value.cycle == 1


@pytest.mark.parametrize("published", [b"", b"\xc1", b"\x93\x00\x90\x00", encode_list({"cycle": 0}), "text", None])
def test_what_is_no_list_is_refused(published: object) -> None:
    with pytest.raises(RankListError, match="list of cycle 5 refused"):
        decode_list(5, published)


# A real stage, any script

ACTS = [
    "open",
    "data",
    "data",
    "ok",
    "failed_end",
    "cancel",
    "fail",
    "release",
    "end",
    "submit",
    "stop",
    "time",
    "lost",
]
ACTS += ["cycle", "cycle", "busy"]
acts = st.tuples(st.sampled_from(ACTS), st.integers(0, 3), st.integers(0, 2))

PLAYED = [Identity("x", 1), Identity("x", 2), Identity("y", 1), Identity("z", 1)]


class Player:
    """Plays a script on a real stage with ranks; the runner is the same on all of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.seqs = dict.fromkeys(PLAYED, 0)
        self.names: set[str] = set()
        self.ended: set[str] = set()

    def play(self, act: str, n: int, k: int) -> None:  # noqa: C901 - one case a happening
        identity = PLAYED[n]
        name, stage = accept(identity).internal_id, self.ranks.stage
        match act:
            case "open":
                stage.come(opening(identity))
            case "data":
                stage.come(data(self.seqs[identity], {"n": self.seqs[identity], "x": torch.ones(k)}, identity))
                self.seqs[identity] += 1
            case "ok":
                stage.come(ok_end(self.seqs[identity], None, identity))
            case "failed_end":
                stage.come(failed_end("upstream", identity))
            case "cancel" | "fail" | "release":
                getattr(self.ranks.ranks[k], act)(name, *(["why"] if act == "fail" else []))
            case "end" if name in self.names and name not in self.ended:
                self.ranks.say("end", name)
                self.ended.add(name)
            case "submit" if name in self.names and name not in self.ended:
                self.ranks.say("submit_chunk", name, k)
            case "stop":
                stage.hear(Stopped(identity, DONE if k else cancelled("stopped")))
            case "time":
                stage.pass_time(4.0)
            case "lost" if k == 2:
                stage.source.say(PeerLost())
                stage.run()
            case "busy":
                stage.sink.default = BUSY if stage.sink.default is STORED else STORED
            case _:
                self.cycle(k)

    def cycle(self, want: int) -> None:
        cycle = self.ranks.cycle(None if want == 2 else lambda _: want)
        self.names |= cycle.feedback.registered.keys()
        for name in cycle.feedback.failed:
            self.ranks.say("release", name)
        for event in cycle.events:
            if event.kind is K.OVER:
                self.names.discard(event.internal_id)
                self.ended.discard(event.internal_id)


@settings(max_examples=150)
@given(st.lists(acts, max_size=40))
def test_any_happenings_give_every_rank_the_same_cycles_and_leave_nothing(script: list[tuple[str, int, int]]) -> None:
    ranks = ranks_of(2, 2, input_wait_s=9.0, send_stall_s=9.0)
    player = Player(ranks)
    for act, n, k in script:
        player.play(act, n, k)
        assert [rank.lost for rank in ranks.ranks] == [None] * 4
    ranks.stage.sink.default = STORED
    player.cycle(2)
    for name in list(player.names):
        ranks.say("release", name)
    assert ranks.rest() == [{}] * 4


# Field cases


def test_case_04_a_failure_of_one_broadcast_is_a_failure_for_every_receiver() -> None:
    """One of two receivers cannot be reached: the stream fails there, at the other one, and at both neighbours."""
    ranks = ranks_of(3)
    ranks.stage.come(opening(), data(0, 0))
    ranks.cycle()
    ranks.groups[0][0].boxes.dead.add(2)  # type: ignore[attr-defined]
    ranks.stage.come(data(1, 1))
    for rank in ranks.ranks:
        assert list(rank.begin_cycle().feedback.failed) == [A]
    ranks.stage.run()
    assert ranks.stage.wire(R1)[-1].startswith("end error(rank_lost")
    assert str(ranks.stage.source.stopped[-1][1]).startswith("error(rank_lost")


def test_case_70_cancels_in_any_order_leave_the_queues_of_all_ranks_equal() -> None:
    """Each rank is asked in an order and with a delay of its own; only the leading one's word counts, and once."""
    ranks = ranks_of(4)
    lives = [Identity(f"q{n}", 1) for n in range(20)]
    names = [accept(identity).internal_id for identity in lives]
    ranks.stage.come(*(opening(identity) for identity in lives))
    queues: list[list[str]] = [[] for _ in ranks.ranks]

    def cycle() -> None:
        ranks.stage.run()
        for queue, rank in zip(queues, ranks.ranks, strict=True):
            for event in rank.begin_cycle().events:
                if event.kind is K.REGISTERED:
                    queue.append(event.internal_id)
                elif event.kind is K.LEFT:
                    queue.remove(event.internal_id)
        assert queues[1:] == queues[:-1]

    cycle()
    for k in range(0, 20, 2):
        for n, rank in enumerate(ranks.ranks):
            rank.cancel(names[(k * (2 * n + 1) + 6 * n) % 20])
        cycle()
    assert len(queues[0]) == 10
    for name in queues[0]:
        ranks.say("release", name)
    assert ranks.rest() == [{}] * 4


def test_a_taken_frame_is_the_value_that_a_take_gives() -> None:
    ranks = ranks_of(2)
    ranks.stage.come(opening(), data(0, 5), ok_end(1, 6))
    taken = ranks.cycle().taken[A]
    assert [(each.kind, each.payload, each.cause) for each in taken] == [
        (TakenKind.CHUNK, 5, None),
        (TakenKind.END, 6, Cause(Outcome.OK)),
    ]
