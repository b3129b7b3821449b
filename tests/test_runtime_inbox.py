"""The receiving side of a stage, stepped by hand: takes, deadlines, peers, tombstones, requests nobody registered."""

import math
import warnings
from typing import Any

import pytest
from scripted import (
    DONE,
    IN,
    OTHER,
    OUT,
    R1,
    RETRY,
    CountingProducer,
    ScriptedConnector,
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
)

from omni_fsm.connectors.port import PeerLost, Stopped
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Admission, Later, Refuse, Register, StageConfig, TakenKind
from omni_fsm.runtime.core import UNLIMITED


def waiting(**settings: Any) -> Stage:
    """A receiving stage with one request whose sender has announced itself."""
    stage = receiver_only(**settings)
    stage.open("r", R1)
    stage.come(opening())
    stage.collect()
    return stage


def takes(stage: Stage, internal_id: str = "r") -> list[tuple[str, Any]]:
    """Take until nothing more is given."""
    found = []
    while (taken := stage.take(internal_id)).kind in ("chunk", "end"):
        found.append((str(taken.kind), taken.payload))
    return [*found, (str(taken.kind), str(taken.cause) if taken.cause else None)]


# Takes and feedback


def test_frames_are_taken_in_order_each_once_and_the_end_brings_its_payload() -> None:
    stage = waiting()
    stage.come(data(0, "a"), data(1, "b"), ok_end(2, "tail"))
    assert stage.collect().ready == {"r": None}
    assert takes(stage) == [("chunk", "a"), ("chunk", "b"), ("end", "tail"), ("gone", None)]
    assert stage.collect().input_ended == {"r": None}
    assert stage.rest() == {}


def test_an_input_that_was_taken_to_its_end_is_gone_although_the_stage_still_sends() -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening(), ok_end(0))
    kinds = [stage.take("r").kind for _ in range(2)]
    assert kinds == [TakenKind.END, TakenKind.GONE]
    assert stage.runtime.submit_chunk("r", "still sending").accepted


def test_feedback_is_given_once_and_again_after_a_take_that_left_more() -> None:
    stage = waiting()
    stage.come(data(0, "a"), data(1, "b"))
    assert (stage.collect().ready, stage.collect().ready) == ({"r": None}, {})
    stage.take("r")
    assert stage.collect().ready == {"r": None}
    stage.take("r")
    assert stage.collect().ready == {}
    assert stage.take("r").kind is TakenKind.NOT_YET


def test_an_end_without_payload_wakes_once() -> None:
    stage = waiting()
    stage.come(ok_end(0))
    assert (stage.collect().ready, stage.collect().ready) == ({"r": None}, {})
    assert takes(stage) == [("end", None), ("gone", None)]


def test_a_failure_drops_what_is_staged_and_is_given_as_often_as_asked() -> None:
    stage = waiting()
    stage.come(data(0, "a"), failed_end("boom"))
    told = stage.collect()
    assert (told.ready, told.failed) == ({}, {"r": error("boom")})
    assert takes(stage) == takes(stage) == [("failed", "error(boom)")]


def test_credit_is_granted_with_the_opening_returned_by_takes_and_waived_at_the_end() -> None:
    stage = waiting(window_frames=5)
    stage.come(data(0, "a"), ok_end(1))
    takes(stage)
    assert stage.source.granted == [(R1, 5, 0), (R1, 5, 1), (R1, UNLIMITED, 2)]


def test_a_repeated_frame_is_dropped_and_a_missing_one_fails() -> None:
    stage = waiting()
    stage.come(data(0, "a"), data(0, "a"), data(2, "c"))
    reason = "frame_ahead: seq 2 came, 1 was expected"
    assert takes(stage) == [("failed", f"error({reason})")]
    assert stage.source.stopped == [(R1, error(reason))]


def test_a_failed_end_is_taken_whatever_its_seq() -> None:
    stage = waiting()
    stage.come(data(0, "a"), failed_end("left", outcome=Outcome.CANCELLED))
    assert takes(stage) == [("failed", "cancelled(left)")]
    assert stage.source.stopped == []


def test_nothing_counts_after_the_end() -> None:
    stage = waiting()
    stage.come(data(0, "a"), ok_end(1), failed_end("late"), data(2, "late"))
    stage.lose_source()
    stage.pass_time(10_000)
    assert takes(stage) == [("chunk", "a"), ("end", None), ("gone", None)]


# Bodies


def test_a_body_that_fails_for_now_is_fetched_again_three_times_and_then_given_up() -> None:
    stage = waiting()
    kept = stage.source.bring(data(0, "a"), faults=[OSError("not yet")] * 3)
    stage.run()
    assert (kept.loads, stage.take("r").payload) == (4, "a")
    stage.source.bring(data(1, "b"), faults=[OSError("not yet")] * 4)
    stage.run()
    assert takes(stage) == [("failed", "error(get_given_up: OSError: not yet)")]
    assert stage.source.stopped == [(R1, error("get_given_up: OSError: not yet"))]


def test_a_body_outside_what_is_shared_fails_the_stream_only() -> None:
    stage = waiting()
    stage.open("s", OTHER)
    stage.source.bring(data(0, "a"), faults=[RemoteProtocolError("outside")])
    stage.come(data(0, "x", OTHER))
    assert takes(stage) == [("failed", "error(frame_invalid: outside)")]
    assert stage.take("s").payload == "x"


@pytest.mark.parametrize(("leave", "stop"), [("cancel", cancelled()), ("release", DONE), ("fail", error("host"))])
def test_a_frame_that_comes_while_its_request_is_left_is_never_published(leave: str, stop: Cause) -> None:
    """The request is left inside the get: it keeps its name until the get has returned."""
    stage = waiting()
    words = ("host",) if leave == "fail" else ()
    stage.source.bring(data(0, "a"), during=lambda: getattr(stage.runtime, leave)("r", *words))
    stage.run()
    assert stage.collect().ready == {}
    assert stage.take("r").kind is TakenKind.GONE
    assert stage.source.stopped == [(R1, stop)]
    assert stage.rest() == {}


def test_every_arrival_is_loaded_or_discarded() -> None:
    stage = waiting()
    stage.come(data(0, "a"), data(0, "a"), failed_end(), data(1, "b"), data(0, "x", OTHER))
    assert all(arrival.discarded or arrival.loads for arrival in stage.source.got)


# Deadlines


def test_the_stall_clock_runs_while_waiting_only_and_restarts_with_each_frame() -> None:
    stage = waiting(input_wait_s=10.0)
    stage.pass_time(9.0)
    stage.come(data(0, "a"))
    stage.pass_time(1_000.0)  # staged: no clock
    stage.take("r")
    stage.pass_time(9.0)
    stage.come(data(0, "a"))  # a repetition is a sign of life too
    stage.pass_time(9.0)
    assert stage.collect().failed == {}
    stage.pass_time(1.0)
    reason = "deadline_passed: no frame for 10 s"
    assert stage.collect().failed == {"r": error(reason)}
    assert stage.source.stopped == [(R1, error(reason))]


def test_a_request_whose_sender_never_comes_has_a_deadline() -> None:
    stage = receiver_only(input_wait_s=10.0)
    stage.open("r", R1)
    stage.pass_time(10.0)
    assert stage.take("r").kind is TakenKind.FAILED


def test_a_stall_time_of_0_turns_the_deadline_off_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="input_wait_s is 0 in stage thinker"):
        stage = waiting(input_wait_s=0)
    stage.pass_time(1e7)
    assert stage.take("r").kind is TakenKind.NOT_YET


def test_the_stall_time_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_FSM_INPUT_WAIT_TIMEOUT_S", "12.5")
    config = StageConfig(stage="s")
    assert (config.input_wait_s, config.send_stall_s) == (12.5, 12.5)
    assert StageConfig(stage="s", input_wait_s=3.0, send_stall_s=4.0).send_stall_s == 4.0


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "ten", "", "-0.1"])
def test_an_environment_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OMNI_FSM_INPUT_WAIT_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match="OMNI_FSM_INPUT_WAIT_TIMEOUT_S"):
        StageConfig(stage="s")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, bad)
            for name in ("input_wait_s", "send_stall_s", "reconnect_s")
            for bad in (-1, math.nan, math.inf, "1")
        ),
        ("unclaimed_s", True),
        ("retry_wait_ms", -1),
        ("tombstones_max", 0),
        ("window_frames", 1.0),
        ("workers", 0),
        ("retries", -1),
        ("backlog_policy", "drop"),
        ("stage", ""),
        ("stage", "x" * 256),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        StageConfig(**{"stage": "s", field: value})
    assert caught.value.field == field
    assert field in str(caught.value)


def test_an_edge_of_another_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^source: "):
        make_stage(source=ScriptedConnector(OUT, sends=False))
    with pytest.raises(ConfigError, match=r"^sink: "):
        make_stage(sink=ScriptedConnector(IN, sends=True))
    with pytest.raises(ConfigError, match="source, sink"):
        make_stage()


# The peer


def test_a_lost_peer_fails_at_once_whoever_it_had_opened() -> None:
    stage = waiting()
    stage.open("s", OTHER)
    stage.lose_source()
    assert stage.collect().failed == {"r": error("peer_lost")}


def test_a_peer_that_is_back_in_time_saves_who_still_waits_for_it() -> None:
    stage = waiting(reconnect_s=1.0)
    stage.open("s", OTHER)
    stage.lose_source()
    stage.pass_time(0.9)
    stage.find_source()
    stage.pass_time(5.0)
    assert stage.collect().failed == {"r": error("peer_lost")}


def test_who_waits_on_a_lost_edge_fails_after_a_second() -> None:
    stage = receiver_only(reconnect_s=1.0)
    stage.lose_source()
    stage.pass_time(5.0)
    stage.open("r", R1)
    stage.pass_time(0.9)
    assert stage.collect().failed == {}
    stage.pass_time(0.1)
    assert stage.collect().failed == {"r": error("peer_lost")}


def test_what_a_lost_peer_had_sent_is_read_first_and_a_committed_end_wins() -> None:
    stage = waiting()
    stage.source.bring(data(0, "a"))
    stage.source.bring(ok_end(1))
    stage.lose_source()
    assert takes(stage) == [("chunk", "a"), ("end", None), ("gone", None)]


@pytest.mark.parametrize(
    ("frames", "given"),
    [
        ([opening(), data(0, "a"), ok_end(1)], [("chunk", "a"), ("end", None), ("gone", None)]),
        ([opening(), data(0, "a")], [("failed", "error(peer_lost)")]),
    ],
)
def test_unclaimed_frames_of_a_lost_peer(frames: list[Any], given: list[Any]) -> None:
    stage = receiver_only(answer=lambda _: Later())
    stage.come(*frames)
    stage.lose_source()
    stage.open("r", R1)
    assert takes(stage) == given


# Requests that nobody registered


def test_an_unknown_request_is_offered_once_and_replayed_in_order_when_registered() -> None:
    stage = receiver_only(answer=lambda _: Later())
    stage.come(opening(), data(0, "a"), data(1, "b"))
    assert stage.host.offered == [R1]
    stage.open("r", R1)
    stage.come(data(2, "c"), ok_end(3))
    assert [payload for _, payload in takes(stage)] == ["a", "b", "c", None, None]


def test_a_host_that_registers_is_told_of_the_identity() -> None:
    stage = receiver_only(answer=lambda _: Register("r"))
    stage.come(opening(), data(0, "a"))
    told = stage.collect()
    assert (told.registered, told.opened, told.ready) == ({"r": R1}, {"r": None}, {"r": None})


def test_a_host_may_register_inside_the_offer() -> None:
    stage = receiver_only()

    def answer(identity: Identity) -> Later:
        assert stage.runtime.register("r", identity).accepted
        return Later()

    stage.host.answer = answer
    stage.come(opening(), data(0, "a"))
    assert stage.take("r").payload == "a"


class RaisingHost(ScriptedHost):
    def stream_offered(self, identity: Identity) -> Any:
        raise KeyError("no slot")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (ScriptedHost(lambda _: Refuse()), "unclaimed"),
        (ScriptedHost(lambda _: Refuse("full")), "full"),
        (RaisingHost(), "KeyError: 'no slot'"),
        (ScriptedHost(lambda _: Register("")), "internal_id: '' cannot be used; accepted: a str that is not empty"),
    ],
)
def test_an_offer_that_is_not_taken_stops_the_sender(host: ScriptedHost, reason: str) -> None:
    stage = receiver_only(host=host)
    stage.come(opening(), data(0, "a"))
    assert stage.source.stopped == [(R1, error(reason))]
    assert stage.rest() == {}


def test_an_unclaimed_request_is_dropped_in_time_and_fails_whoever_registers_it_later() -> None:
    stage = receiver_only(answer=lambda _: Later(), unclaimed_s=5.0)
    stage.come(opening(), data(0, "a"))
    stage.pass_time(5.0)
    assert stage.source.stopped == [(R1, error("unclaimed"))]
    stage.open("r", R1)
    assert takes(stage) == [("failed", "error(unclaimed)")]
    stage.runtime.release("r")
    assert not stage.runtime.register("again", R1).accepted
    assert stage.rest() == {}


def test_more_frames_than_the_first_credit_are_dropped() -> None:
    stage = receiver_only(answer=lambda _: Later())
    stage.come(opening(), *(data(n, "a") for n in range(8)))
    assert stage.source.stopped == [(R1, error("unclaimed"))]
    assert stage.runtime.residue()["unclaimed"] == 0


# Tombstones


def test_an_ended_registration_is_remembered() -> None:
    """Late frames are acknowledged and discarded, a late opening gets the stop again, a registration is refused."""
    stage = waiting()
    stage.runtime.cancel("r", "left")
    late = stage.source.bring(data(0, "a"))
    stage.run()
    assert (late.loads, late.discarded) == (0, True)
    assert stage.runtime.register("again", R1) == Admission(
        accepted=False, reason="r1#1 has ended here: cancelled(left)"
    )
    stage.come(opening())
    assert stage.source.stopped == [(R1, cancelled("left"))] * 2
    assert stage.host.offered == []


def test_tombstones_are_bounded_in_number_and_time() -> None:
    stage = receiver_only(tombstones_max=3, tombstone_s=60.0)
    for n in range(5):
        stage.open(f"r{n}", Identity("r", n))
        stage.runtime.release(f"r{n}")
    assert stage.runtime.residue()["tombstones"] == 3
    stage.pass_time(59.0)
    assert stage.runtime.residue()["tombstones"] == 3
    stage.pass_time(1.0)
    assert stage.rest(0) == {}


# The binding of both ends


@pytest.mark.parametrize(
    ("frame", "end"),
    [
        (failed_end("cuda"), "end error(cuda)"),
        (failed_end("left", outcome=Outcome.CANCELLED), "end cancelled(left)"),
        (data(5, "x"), "end error(frame_ahead: seq 5 came, 0 was expected)"),
    ],
)
def test_what_ends_the_input_ends_the_output_with_the_first_reason(frame: Any, end: str) -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening(), frame)
    assert stage.wire() == ["open", end]
    assert len(stage.collect().failed) == 1
    assert len(stage.seen.failures) == 1


def test_a_deadline_and_a_lost_peer_end_the_output_too() -> None:
    stage = middle(input_wait_s=10.0)
    stage.open("r", R1)
    stage.open("s", OTHER)
    stage.come(opening())
    stage.lose_source()
    stage.find_source()
    stage.pass_time(10.0)
    assert stage.wire(R1) == ["open", "end error(peer_lost)"]
    assert stage.wire(OTHER) == ["open", "end error(deadline_passed: no frame for 10 s)"]


STOPS = {
    "error": (error("gone"), "failed", "error(gone)"),
    "cancelled": (cancelled("left"), "failed", "cancelled(left)"),
    "done": (DONE, "not_yet", None),
}


@pytest.mark.parametrize(("cause", "kind", "given"), STOPS.values(), ids=STOPS)
def test_a_stop_fails_the_receiver_at_the_front_but_done_does_not(cause: Cause, kind: str, given: str | None) -> None:
    stage = front()
    stage.open("r", R1)
    stage.come(opening())
    stage.hear(Stopped(R1, cause))
    assert takes(stage) == [(kind, given)]
    assert stage.source.stopped == ([] if cause is DONE else [(R1, cause)])


@pytest.mark.parametrize("cause", [error("gone"), cancelled("left"), DONE])
def test_a_stop_goes_on_to_the_stage_before(cause: Cause) -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening())
    stage.hear(Stopped(R1, cause))
    assert stage.take("r").kind is TakenKind.GONE
    assert stage.source.stopped == [(R1, cause)]
    assert stage.collect().failed == {"r": cause}


@pytest.mark.parametrize("at_front", [True, False])
def test_a_lost_receiver_ends_the_input(at_front: bool) -> None:  # noqa: FBT001
    stage = middle(front=at_front)
    stage.open("r", R1)
    stage.come(opening())
    stage.hear(PeerLost())
    assert stage.source.stopped == [(R1, error("peer_lost"))]
    assert stage.take("r").kind is (TakenKind.FAILED if at_front else TakenKind.GONE)


@pytest.mark.parametrize("at_front", [True, False])
@pytest.mark.parametrize("how", ["raise", "give up", "fail"])
def test_a_sender_that_fails_stops_the_stage_before_with_its_reason(at_front: bool, how: str) -> None:  # noqa: FBT001
    stage = middle(front=at_front, retries=0, producer=CountingProducer())
    stage.open("r", R1)
    stage.come(opening())
    if how == "raise":
        stage.submit("r", ValueError("boom"))
    elif how == "give up":
        stage.sink.plan.append(RETRY)
        stage.submit("r", "a")
    else:
        stage.runtime.fail("r", "host")
    stage.run()
    reason = {"raise": "ValueError: boom", "give up": "put_given_up: no link", "fail": "host"}[how]
    assert stage.source.stopped == [(R1, error(reason))]
    assert stage.wire() == ["open", f"end error({reason})"]
    assert stage.collect().failed == ({} if how == "fail" else {"r": error(reason)})


@pytest.mark.parametrize("at_front", [True, False])
def test_an_end_releases_the_receiver_of_a_middle_stage_only(at_front: bool) -> None:  # noqa: FBT001
    stage = middle(front=at_front)
    stage.open("r", R1)
    stage.come(opening())
    stage.runtime.end("r")
    assert stage.source.stopped == ([] if at_front else [(R1, DONE)])


def test_a_cancel_reaches_both_neighbours_and_the_host_is_not_told_of_it() -> None:
    stage = middle()
    stage.open("r", R1)
    stage.come(opening())
    for reason in ("first", "second"):
        stage.runtime.cancel("r", reason)
    stage.runtime.fail("r", "third")
    stage.runtime.release("r")
    stage.run()
    assert stage.source.stopped == [(R1, cancelled("first"))]
    assert stage.wire() == ["open", "end cancelled(first)"]
    told = stage.collect()
    assert (told.failed, told.output_ended) == ({}, {"r": None})
    assert stage.seen.failures == []


# Shutdown, hooks


def test_a_shutdown_ends_everything_and_refuses_what_is_new() -> None:
    stage = middle(answer=lambda _: Register("late"))
    stage.open("r", R1)
    stage.come(opening())
    stage.submit("r", "a")
    stage.runtime.begin_shutdown()
    stage.runtime.begin_shutdown()
    stage.run()
    assert stage.wire() == ["open", "end cancelled(shutdown)"]
    assert stage.source.stopped == [(R1, cancelled("shutdown"))]
    assert not stage.runtime.register("s", OTHER).accepted
    stage.come(opening(OTHER))
    assert stage.source.stopped[1:] == [(OTHER, cancelled("shutdown"))]
    assert stage.rest() == {}


class RaisingWaker(ScriptedHost):
    def feedback_ready(self) -> None:
        raise OSError("pipe")


class RaisingTransitions:
    def on_transition(self, transition: object) -> None:
        raise OSError("disk")

    def on_failure(self, failure: object) -> None:
        """Nothing to say."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": RaisingWaker()}, "RaisingWaker.feedback_ready raised OSError: pipe"),
        ({"observers": [RaisingTransitions()]}, "RaisingTransitions.on_transition raised OSError: disk"),
    ],
)
def test_a_hook_that_raises_is_reported_and_harms_nobody(options: dict[str, Any], words: str) -> None:
    stage = waiting(**options)
    stage.come(data(0, "a"), ok_end(1))
    assert takes(stage)[0] == ("chunk", "a")
    assert ("hook_raised", "", words) in stage.seen.reasons


def test_no_lock_is_held_during_a_connector_s_call() -> None:
    stage = middle()

    def unlocked() -> None:
        assert not stage.runtime._core.lock._is_owned()

    stage.sink.unlocked = stage.source.unlocked = unlocked
    stage.open("r", R1)
    stage.come(opening(), data(0, "a"))
    stage.submit("r", stage.take("r").payload)
    stage.runtime.cancel("r")
    stage.run()
    assert stage.seen.failures == []  # a raise in stop, grant or reclaim would be reported


# Residue


def _ok(stage: Stage) -> None:
    stage.come(opening(), data(0, "a"), ok_end(1))
    takes(stage)
    stage.submit("r", "a")
    stage.runtime.end("r")


def _take_half(stage: Stage) -> None:
    stage.come(opening(), data(0, "a"), data(1, "b"))
    stage.submit("r", stage.take("r").payload)


def _cancel(stage: Stage) -> None:
    _take_half(stage)
    stage.runtime.cancel("r")


def _raise(stage: Stage) -> None:
    _take_half(stage)
    stage.submit("r", ValueError("boom"))


def _give_up(stage: Stage) -> None:
    stage.sink.plan.extend([RETRY] * 8)
    _take_half(stage)


def _peer_lost_before(stage: Stage) -> None:
    _take_half(stage)
    stage.lose_source()


def _peer_lost_after(stage: Stage) -> None:
    _take_half(stage)
    stage.hear(PeerLost())


def _stop(stage: Stage) -> None:
    _take_half(stage)
    stage.hear(Stopped(R1, error("gone")))


def _release(stage: Stage) -> None:
    _take_half(stage)
    stage.runtime.release("r")


def _unclaimed(stage: Stage) -> None:
    stage.come(opening(OTHER), data(0, "a", OTHER))
    stage.pass_time(100.0)
    stage.open("late", OTHER)


ROADS = [
    _ok,
    _take_half,  # and then the deadline
    _cancel,
    _raise,
    _give_up,
    _peer_lost_before,
    _peer_lost_after,
    _stop,
    _release,
    lambda stage: stage.runtime.begin_shutdown(),
    _unclaimed,
]


@pytest.mark.parametrize("at_front", [True, False])
@pytest.mark.parametrize("road", ROADS)
def test_nothing_is_left_after_any_road(road: Any, at_front: bool) -> None:  # noqa: FBT001
    """The host releases what failed; then, once tombstones have expired, every table is empty."""
    stage = middle(front=at_front, producer=CountingProducer(), answer=lambda _: Later())
    stage.open("r", R1)
    stage.runtime.request_payload["r1"] = "legacy"
    road(stage)
    for _ in range(12):  # retries' backoffs, then deadlines
        takes(stage)
        stage.pass_time(300.0)
    told = stage.collect()
    for internal_id in told.failed:
        stage.runtime.release(internal_id)
    if at_front:
        stage.runtime.release("r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stage.rest() == {}
