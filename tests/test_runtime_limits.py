"""Bounds of a stage: time to reconnect, credit in bytes, requests, tombstones, gets, stalls."""

from collections.abc import Callable
from typing import Any

import pytest
from scripted import (
    OTHER,
    OUT,
    R1,
    HandClock,
    ScriptedArrival,
    data,
    error,
    make_stage,
    ok_end,
    opening,
    receiver_only,
    sender_only,
)

from omni_fsm.connectors import Hello, MemoryEdge
from omni_fsm.connectors.port import BUSY, PeerLost
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Later, Register, TakenKind

KIB = 1024


# The time a lost peer has


def test_losing_the_input_again_and_again_does_not_postpone_the_failure() -> None:
    stage = receiver_only(reconnect_s=1.0)
    stage.open("r", R1)
    stage.lose_source()
    stage.pass_time(0.5)
    stage.lose_source()
    stage.pass_time(0.49)
    assert stage.collect().failed == {}
    stage.lose_source()
    stage.pass_time(0.02)
    assert stage.collect().failed == {"r": error("peer_lost")}


def test_losing_the_output_again_and_again_does_not_postpone_the_failure() -> None:
    stage = sender_only(reconnect_s=1.0)
    stage.sink.default = BUSY
    stage.open("r", R1)
    stage.hear(PeerLost())
    stage.pass_time(0.5)
    stage.hear(PeerLost())
    stage.pass_time(0.49)
    assert stage.collect().failed == {}
    stage.hear(PeerLost())
    stage.pass_time(0.02)
    assert stage.collect().failed == {"r": error("peer_lost")}


def test_a_peer_that_was_back_in_between_has_its_whole_time_again() -> None:
    stage = receiver_only(reconnect_s=1.0)
    stage.open("r", R1)
    stage.lose_source()
    stage.pass_time(0.9)
    stage.find_source()
    stage.pass_time(0.05)
    stage.lose_source()
    stage.pass_time(0.9)
    assert stage.collect().failed == {}
    stage.pass_time(0.2)
    assert stage.collect().failed == {"r": error("peer_lost")}


# Credit


def test_a_frame_beyond_the_credit_in_bytes_fails_its_stream_before_it_costs_memory() -> None:
    stage = receiver_only(window_bytes=600 * KIB)
    stage.open("r", R1)
    stage.open("o", OTHER)
    stage.come(opening(), opening(OTHER), data(0, b"x" * 290 * KIB), data(1, b"x" * 290 * KIB))
    beyond = stage.source.bring(data(2, b"x" * 30 * KIB))
    stage.run()
    assert (beyond.loads, beyond.discarded) == (0, True)
    reason = "frame_invalid: seq 2 came beyond the credit of 8 frames, 614400 bytes"
    assert stage.source.stopped == [(R1, error(reason))]
    assert stage.collect().failed == {"r": error(reason)}
    stage.come(data(0, "c0", OTHER))
    assert stage.take("o").payload == "c0"


def test_the_first_frame_may_have_any_size_and_room_comes_back_with_takes() -> None:
    stage = receiver_only(window_bytes=600 * KIB)
    stage.open("r", R1)
    large = b"x" * 2_000 * KIB
    stage.come(opening())
    for seq in range(3):
        stage.come(data(seq, large))
        assert stage.take("r").payload == large
    assert stage.source.stopped == []


def test_a_small_frame_behind_one_that_fills_the_window_has_no_credit() -> None:
    stage = receiver_only(window_bytes=600 * KIB)
    stage.open("r", R1)
    stage.come(opening(), data(0, b"x" * 2_000 * KIB), data(1, "c1"))
    assert [identity for identity, _ in stage.source.stopped] == [R1]


# Requests and tombstones


def test_requests_beyond_the_limit_are_refused_with_a_reason_and_their_senders_stopped() -> None:
    stage = receiver_only(requests_max=1, answer=lambda identity: Register(identity.external_id))
    stage.come(opening())
    assert stage.collect().registered == {"r1": R1}
    reason = "1 requests are registered, no more are taken"
    stage.come(opening(OTHER))
    assert stage.source.stopped == [(OTHER, error(reason))]
    assert stage.collect().registered == {}
    admission = stage.runtime.register("x", Identity("x", 1))
    assert (admission.accepted, admission.reason) == (False, reason)
    stage.runtime.release("r1")
    assert stage.runtime.register("x", Identity("x", 1)).accepted


def test_a_flood_of_requests_that_are_turned_away_pushes_out_no_tombstone() -> None:
    """A late frame of the ended life would be offered as a new request."""
    stage = receiver_only(tombstones_max=2)
    stage.open("r", R1)
    stage.come(opening(), ok_end(0))
    assert stage.take("r").kind is TakenKind.END
    stage.come(*[opening(Identity(f"flood-{n}", 1)) for n in range(20)])
    assert len(stage.host.offered) == 20
    assert stage.runtime.residue()["tombstones"] == 3
    stage.come(opening())
    assert R1 not in stage.host.offered
    again = stage.runtime.register("again", R1)
    assert (again.accepted, again.reason) == (False, "r1#1 has ended here: ok")


# Gets


class PausesNoted(HandClock):
    """A clock that notes how long a thread waited."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        super().pause(seconds)


@pytest.mark.parametrize("registered", [True, False])
def test_a_get_that_fails_for_now_is_tried_again_after_20_40_and_80_ms(*, registered: bool) -> None:
    clock = PausesNoted()
    stage = receiver_only(clock=clock, answer=lambda _: Later())
    stage.open("r", R1) if registered else stage.come(opening())
    arrival = stage.source.bring(data(0, "c0"), faults=[OSError("not yet")] * 3)
    stage.run()
    assert clock.pauses == pytest.approx([0.020, 0.040, 0.080])
    assert arrival.loads == 4
    if not registered:
        stage.open("r", R1)
    assert stage.take("r").payload == "c0"


def test_the_first_pause_of_a_get_is_a_setting_and_the_fourth_failure_is_the_last() -> None:
    clock = PausesNoted()
    stage = receiver_only(clock=clock, retry_wait_ms=5.0)
    stage.open("r", R1)
    stage.source.bring(data(0, "c0"), faults=[OSError("not yet")] * 9)
    stage.run()
    assert clock.pauses == pytest.approx([0.005, 0.010, 0.020])
    assert stage.collect().failed == {"r": error("get_given_up: OSError: not yet")}


class NoBuffer(ScriptedArrival):
    """A connector's bug: what it loads is nothing that can be decoded."""

    def load(self) -> Any:
        super().load()
        return 7


def no_buffer(stage: Any) -> None:
    stage.source.arrivals.append(NoBuffer(data(0), b"body", (), lambda: None))
    stage.run()


def hostile_body(stage: Any) -> None:
    arrival = ScriptedArrival(data(0), b"\xff" * 64, (), lambda: None)
    stage.source.arrivals.append(arrival)
    stage.run()


@pytest.mark.parametrize("bring", [no_buffer, hostile_body])
def test_whatever_decoding_raises_is_the_stream_s_failure(bring: Callable[[Any], None]) -> None:
    stage = receiver_only()
    stage.open("r", R1)
    stage.open("o", OTHER)
    bring(stage)
    (cause,) = stage.collect().failed.values()
    assert cause.reason.startswith("frame_invalid: ")
    stage.come(opening(OTHER), data(0, "c0", OTHER))
    assert stage.take("o").payload == "c0"


# Stalls


def test_a_stall_without_a_peer_says_so() -> None:
    stage = make_stage(sink=MemoryEdge().sender(Hello(OUT)), send_stall_s=10.0)
    stage.open("r", R1)
    stage.pass_time(10.0)
    assert stage.collect().failed == {"r": error("send_stall: no peer for 10 s")}


def test_a_stall_with_a_peer_speaks_of_credit() -> None:
    stage = sender_only(send_stall_s=10.0)
    stage.sink.default = BUSY
    stage.open("r", R1)
    stage.pass_time(10.0)
    assert stage.collect().failed == {"r": error("send_stall: no credit or room for 10 s")}
