"""Races and corners of the stage runtime that were once wrong, each in its shortest sequence."""

from dataclasses import replace

import pytest
from scripted import (
    DONE,
    OTHER,
    R1,
    R2,
    RETRY,
    RETRY_BUT_STORED,
    ROOM,
    STORED,
    CountingProducer,
    Stage,
    data,
    failed_end,
    front,
    middle,
    ok_end,
    opening,
    receiver_only,
    sender_only,
)

from omni_fsm.connectors.port import BUSY, CreditReturned, PeerBack, PeerLost, PutOutcome, Stopped
from omni_fsm.payload import encode
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.runtime import Failure, Later, StageConfig, TakenKind


def test_a_front_that_was_told_done_still_hears_that_its_input_failed() -> None:
    """``done`` cancels nobody: the output still comes, and its failure must wake the scheduler."""
    stage = front()
    stage.open("r", R1)
    stage.come(opening())
    stage.hear(Stopped(R1, DONE))
    stage.collect()
    stage.come(failed_end("cuda"))
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "cuda")}


def test_a_front_is_not_told_that_a_request_failed_when_the_next_stage_has_had_enough() -> None:
    """A runner releases what failed; released here, the request would lose the output that is still to come."""
    stage = front()
    stage.open("r", R1)
    stage.come(opening())
    stage.hear(Stopped(R1, DONE))
    assert stage.collect().failed == {}


def test_done_does_not_take_away_that_a_front_s_input_is_ready() -> None:
    """The last stage ends early: its end has come and is not collected when the stop comes from the other side."""
    stage = front()
    stage.open("r", R1)
    stage.come(opening(), ok_end(0, "tail"))
    stage.hear(Stopped(R1, DONE))
    assert stage.collect().ready == {"r": None}


def test_a_waiting_successor_releases_a_predecessor_that_fails_after_it_came() -> None:
    """PROTOCOL, "One owner": at once, or noted until its marker is resolved."""
    stage = sender_only(producer=CountingProducer())
    stage.open("r", R1)
    stage.open("s", R2)
    stage.submit("s", "c0")
    stage.submit("r", ValueError("boom"))
    stage.run()
    assert stage.wire(R1) == ["open", "end error(ValueError: boom)"]
    assert stage.wire(R2) == ["open", "data 0"]


class RaisingObserver:
    """An observer of the kind that a full disk makes."""

    def on_transition(self, transition: object) -> None:
        raise OSError("disk full")

    def on_failure(self, failure: Failure) -> None:
        raise OSError("disk full")


def test_two_observers_that_raise_do_not_harm() -> None:
    """A report of a raise must not raise itself: what comes after the lock (stops, grants, wake-ups) would be lost."""
    stage = sender_only(observers=(RaisingObserver(), RaisingObserver()))
    stage.open("r", R1)
    assert stage.wire() == ["open"]


def test_an_end_has_a_stall_time_of_its_own() -> None:
    """A chunk was busy for 9 of 10 s when the request failed: its end may be busy for 10 s more."""
    stage = sender_only(send_stall_s=10.0)
    stage.open("r", R1)
    stage.sink.default = BUSY
    stage.submit("r", "c0")
    stage.run()
    stage.pass_time(9.0)
    stage.runtime.fail("r", "boom")
    stage.run()
    stage.pass_time(2.0)
    assert stage.collect().marker_lost == {}


def test_room_does_not_cut_a_retry_s_backoff_short() -> None:
    """A chunk that was busy, and then failed for now, waits its 20 ms whatever room comes back meanwhile."""
    stage = sender_only()
    stage.open("r", R1)
    stage.sink.plan.extend([BUSY, RETRY])
    stage.submit("r", "c0")
    stage.run()
    stage.hear(CreditReturned(R1))
    assert len(stage.sink.tried) == 3
    stage.hear(ROOM)
    assert len(stage.sink.tried) == 3


def _lose_peer_in_put(stage: Stage, *after: PeerBack) -> None:
    """The peer dies after the frame was stored, and the I/O thread is quicker than the outbox."""

    def lose(_frame: Frame) -> PutOutcome:
        stage.sink.say(PeerLost(), *after)
        stage.runtime.sink_once()
        return STORED

    stage.sink.plan.append(lose)


def test_a_peer_lost_while_the_opening_is_put_and_not_back_ends_the_life() -> None:
    stage = sender_only()
    _lose_peer_in_put(stage)
    stage.sink.default = BUSY  # there is no peer
    stage.open("r", R1)
    stage.pass_time(2.0)
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "peer_lost")}


def test_an_opening_whose_put_crossed_a_restart_of_the_peer_is_put_again() -> None:
    """Nobody knows which process has it; the one that is back must have it, and to have it twice does no harm."""
    stage = sender_only()
    _lose_peer_in_put(stage, PeerBack())
    stage.open("r", R1)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open", "open", "data 0"]
    assert stage.collect().failed == {}


def test_a_put_that_outlives_its_life_leaves_nothing_in_the_connector() -> None:
    """The life was reclaimed while its frame was on the way: what was stored after that is nobody's."""
    stage = sender_only()
    stage.open("r", R1)
    _lose_peer_in_put(stage, PeerBack())
    stage.submit("r", "c0")
    stage.run()
    stage.runtime.release("r")
    assert stage.rest() == {}


def test_a_chunk_above_the_whole_backlog_does_not_pause_its_request_for_ever() -> None:
    """Nothing waits in the stage, so nothing can ever make room: the chunk is taken, or the request ends."""
    stage = sender_only(backlog_bytes=100)
    stage.open("r", R1)
    stage.collect()
    admission = stage.runtime.submit_chunk("r", b"x" * 1_000)
    stage.run()
    told = stage.collect()
    assert admission.accepted or "r" in told.resumed or "r" in told.failed


def test_a_frame_that_finds_no_room_makes_none_in_the_backlog() -> None:
    """In flight it still waits in this stage: the paused request would be told to go on, and be refused again."""
    stage = sender_only(backlog_bytes=1_000)
    stage.open("r", R1)
    stage.sink.default = BUSY
    stage.submit("r", b"x" * 600)
    assert not stage.runtime.submit_chunk("r", b"y" * 600).accepted
    stage.run()
    assert stage.collect().resumed == {}


def test_a_body_of_an_unregistered_request_is_fetched_again_when_it_fails_for_now() -> None:
    """The budget of gets holds for frames that wait for their registration too."""
    stage = receiver_only(answer=lambda _: Later())
    stage.come(opening())
    stage.source.bring(data(0, "c0"), faults=[OSError("not yet")])
    stage.run()
    stage.open("r", R1)
    assert stage.take("r").payload == "c0"


def test_tombstones_expire_in_time_although_one_was_renewed() -> None:
    stage = receiver_only(unclaimed_s=0.5, tombstone_s=60.0)
    stage.come(opening(R1))  # refused: a tombstone until 60 s
    stage.pass_time(10.0)
    stage.come(opening(OTHER))  # until 70 s
    stage.pass_time(40.0)
    stage.open("r", R1)
    stage.runtime.release("r")  # R1 again, until 110 s
    stage.pass_time(25.0)
    assert stage.runtime.residue()["tombstones"] == 1


def test_a_late_frame_of_a_request_that_is_registered_is_never_offered() -> None:
    """Its receiver is over and the tombstone has expired, but its sender still flushes."""
    stage = middle(tombstone_s=1.0)
    stage.open("r", R1)
    stage.come(opening())
    stage.sink.default = BUSY
    stage.submit("r", "c0")
    stage.runtime.end("r")
    stage.run()
    stage.pass_time(2.0)
    stage.come(failed_end("late"))
    assert stage.host.offered == []


def test_a_stage_name_with_a_lone_surrogate_names_the_field() -> None:
    with pytest.raises(ConfigError, match="stage"):
        StageConfig(stage="\ud800")


def test_an_opening_that_comes_twice_is_reported_once() -> None:
    """A put that reports failure may have been stored."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening())
    assert stage.collect().opened == {"r": None}
    stage.come(opening())
    assert stage.collect().opened == {}


def test_a_chunk_is_taken_by_nobody_after_a_failure() -> None:
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening(), data(0, "c0"), failed_end("boom"))
    assert stage.take("r").kind is TakenKind.FAILED


def test_a_crash_is_told_to_the_host_of_a_request_that_only_receives() -> None:
    """A last stage, or a front whose end is out: its scheduler waits for this request."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(opening())
    stage.collect()
    stage.runtime.crash(RuntimeError("bug"))
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "stage thinker: RuntimeError: bug")}


def test_a_front_can_fail_a_request_whose_output_the_next_stage_did_not_want() -> None:
    """Its sender owes a cancelled end already, which must not swallow the failure: the receiver still waits."""
    stage = front()
    stage.open("r", R1)
    stage.come(opening())
    stage.sink.say(Stopped(R1, DONE))
    stage.runtime.sink_once()
    stage.runtime.fail("r", "host")
    stage.run()
    assert stage.take("r").kind is not TakenKind.NOT_YET
    assert stage.source.stopped == [(R1, Cause(Outcome.ERROR, "host"))]


def test_a_frame_is_queued_for_the_outbox_once() -> None:
    """The end of a request whose producer raised is dispatched by the move, and must not be queued again after it."""
    stage = sender_only(producer=CountingProducer())
    stage.open("r", R1)
    stage.submit("r", ValueError("boom"))
    stage.runtime.produce_once()
    assert stage.runtime.residue()["puts"] == 1


def test_a_frame_that_comes_again_at_the_edge_of_its_credit_is_dropped_and_fails_nobody() -> None:
    """A put that reported failure was stored, and its retry comes while the whole window waits to be taken."""
    stage = receiver_only(window_frames=3)
    stage.open("r", R1)
    stage.come(opening(), data(0, "a"), data(1, "b"), data(2, "c"), data(2, "c"))
    assert [stage.take("r").payload for _ in range(3)] == ["a", "b", "c"]
    assert stage.source.stopped == []


def test_an_unclaimed_frame_that_comes_again_does_not_use_up_the_first_credit() -> None:
    """As above, before the request is registered."""
    stage = receiver_only(answer=lambda _: Later())
    large = b"x" * 300 * 1024
    stage.come(opening(), data(0, large), data(0, large))
    stage.open("r", R1)
    assert stage.take("r").payload == large


@pytest.mark.parametrize("raises", [False, True])
def test_a_put_that_reports_failure_after_its_life_was_lost_leaves_nothing_in_the_connector(*, raises: bool) -> None:
    """It may have been stored; and nobody is left to read it."""
    stage = sender_only()
    stage.open("r", R1)

    def lose(frame: Frame) -> PutOutcome:
        stage.sink.say(PeerLost())
        stage.runtime.sink_once()
        if raises:
            stage.sink._store(frame)
            raise OSError("gone")
        return RETRY_BUT_STORED

    stage.sink.plan.append(lose)
    stage.submit("r", "c0")
    stage.run()
    stage.runtime.release("r")
    assert stage.rest() == {}


def test_the_end_of_a_front_goes_out_when_its_input_ends_without_an_opening() -> None:
    """It waits for ``open``, or for anything else that says that nothing more is to come."""
    stage = front()
    stage.open("r", R1)
    stage.runtime.end("r")
    stage.run()
    stage.come(ok_end(0))
    assert stage.take("r").kind is TakenKind.END
    stage.run()
    assert stage.wire() == ["open", "end 0 ok"]


def test_the_stored_end_of_a_failed_life_is_not_reclaimed_with_it() -> None:
    """Its receiver has perhaps not read it yet, and would wait for its deadline."""
    stage = sender_only()
    stage.open("r", R1)
    stage.runtime.fail("r", "boom")
    stage.run()
    stage.runtime.release("r")
    assert stage.wire() == ["open", "end error(boom)"]
    assert stage.sink.reclaimed == [(R1, False)]


@pytest.mark.parametrize("fails", ["unclaimed", "frame_invalid"])
def test_a_stop_goes_out_before_the_credit_that_lets_the_rest_come(fails: str) -> None:
    """With credit first the sender could end well, and its host would never hear of the stop."""
    stage = receiver_only(answer=lambda _: Later())
    said: list[str] = []
    stage.source.stop = lambda *_: said.append("stop")
    stage.source.grant = lambda *_, frames, **__: said.append("waiver" if frames > 100 else "credit")
    if fails == "unclaimed":
        stage.come(opening())
        stage.pass_time(100.0)
    else:
        stage.open("r", R1)
        stage.come(opening(), data(5, "a"))
    assert [word for word in said if word != "credit"][:2] == ["stop", "waiver"]


def test_a_front_that_was_told_done_fails_when_the_next_stage_dies_before_its_opening() -> None:
    """``done`` cancelled nobody, and nobody else may know the request: only the loss can end its receiver in time."""
    stage = front()
    stage.open("r", R1)
    stage.runtime.end("r")
    stage.hear(Stopped(R1, DONE))
    stage.hear(PeerLost(), PeerBack())
    stage.lose_source()
    stage.find_source()
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "peer_lost")}
    assert stage.take("r").kind is TakenKind.FAILED


def test_an_opening_with_a_body_does_not_leave_its_get_open() -> None:
    """Our connectors refuse such a frame; another's may let it through."""
    stage = receiver_only()
    stage.open("r", R1)
    stage.come(replace(opening(), body=encode("odd")))
    stage.runtime.release("r")
    assert stage.rest() == {}
