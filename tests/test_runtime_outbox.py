"""The sending side of a stage, stepped by hand: order, retries, busy, producers, generations."""

import threading
from typing import Any

import pytest
from scripted import (
    OTHER,
    R1,
    R2,
    REFUSED,
    RETRY,
    RETRY_BUT_STORED,
    ROOM,
    CountingProducer,
    Stage,
    middle,
    sender_only,
)

from omni_fsm.connectors.port import BUSY, STORED, CreditReturned, PeerBack, PeerLost, PutOutcome, Stopped
from omni_fsm.payload import decode, receive_buffer
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError
from omni_fsm.protocol.frames import Cause, Frame, Outcome
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import ProducerContext
from omni_fsm.state import Scope, StateRetiredError, StateView


def payloads(stage: Stage, identity: Identity = R1) -> list[Any]:
    """What the stored frames of a stream carry."""
    found = []
    for frame in stage.sink.stored:
        if frame.identity == identity and frame.body is not None:
            buffer = receive_buffer(frame.body.nbytes)
            buffer[:] = b"".join(frame.body.parts)
            found.append(decode(buffer))
    return found


def opened(**settings: Any) -> Stage:
    """A sending stage with one request whose opening is out."""
    stage = sender_only(**settings)
    stage.open("r", R1)
    return stage


# Order


def test_frames_of_a_request_go_out_in_the_order_of_the_submits() -> None:
    stage = opened()
    stage.submit("r", "a", "b", "c")
    stage.runtime.end("r", "tail")
    stage.run()
    assert stage.wire() == ["open", "data 0", "data 1", "data 2", "end 3 ok"]
    assert payloads(stage) == ["a", "b", "c", "tail"]
    assert stage.rest() == {}


def test_requests_take_turns() -> None:
    """A request with a hundred chunks delays another one by one frame."""
    stage = opened()
    stage.open("s", OTHER)
    stage.submit("r", "a", "b", "c")
    stage.submit("s", "x", "y")
    stage.run()
    order = [(frame.identity.external_id, frame.seq) for frame in stage.sink.stored if frame.seq >= 0]
    assert order == [("r1", 0), ("r2", 0), ("r1", 1), ("r2", 1), ("r1", 2)]


def test_the_opening_goes_out_first_and_before_any_credit() -> None:
    stage = sender_only()
    stage.sink.plan.append(STORED)
    stage.sink.default = BUSY
    stage.runtime.register("r", R1)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open"]


def test_a_new_request_s_opening_passes_by_the_frames_of_others() -> None:
    stage = opened()
    stage.submit("r", "a")
    stage.runtime.produce_once()
    stage.runtime.register("s", OTHER)
    stage.run()
    assert [(frame.identity, str(frame.kind)) for frame in stage.sink.stored[1:]] == [(OTHER, "open"), (R1, "data")]


# Retries


def test_a_retry_waits_20_then_40_then_80_ms_and_then_the_stream_fails_with_the_reason() -> None:
    stage = opened()
    stage.sink.plan.extend([RETRY] * 4)
    stage.submit("r", "a", "b")
    stage.run()
    tries = [len(stage.sink.tried)]
    for wait_ms in (19, 1, 39, 1, 79, 1):
        stage.pass_time(wait_ms / 1e3)
        tries.append(len(stage.sink.tried))
    assert tries == [2, 2, 3, 3, 4, 4, 6]  # the last is the end
    assert stage.wire() == ["open", "end error(put_given_up: no link)"]
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "put_given_up: no link")}
    assert stage.seen.reasons == [("failed", "r", "put_given_up: no link")]


def test_a_retry_keeps_its_place_and_its_frame_and_never_runs_the_producer_twice() -> None:
    producer = CountingProducer()
    stage = opened(producer=producer)
    stage.sink.plan.extend([RETRY, OSError("gone"), RETRY_BUT_STORED])
    stage.submit("r", "a", "b")
    for _ in range(4):
        stage.pass_time(0.1)
    assert payloads(stage) == ["a", "a", "b"]
    assert stage.wire() == ["open", "data 0", "data 0", "data 1"]
    assert [output for _, output in producer.calls] == ["a", "b"]


def test_a_connector_that_raises_counts_as_a_retry_and_its_words_are_kept() -> None:
    stage = opened(retries=0)
    stage.sink.plan.append(OSError("gone"))
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open", "end error(put_given_up: OSError: gone)"]


def test_a_refused_frame_fails_at_once() -> None:
    stage = opened()
    stage.sink.plan.append(REFUSED)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open", "end error(put_given_up: too large)"]


def test_a_failed_end_that_cannot_be_put_is_reported_as_lost() -> None:
    stage = opened()
    stage.sink.plan.extend([REFUSED, REFUSED])
    stage.submit("r", "a")
    stage.run()
    assert stage.collect().marker_lost == {"r": Cause(Outcome.ERROR, "put_given_up: too large")}
    stage.runtime.release("r")
    assert stage.sink.reclaimed == [(R1, False)]  # its end may have been stored all the same
    assert stage.rest() == {}


def test_an_ok_end_that_is_given_up_is_followed_by_an_error_end() -> None:
    stage = opened()
    stage.sink.plan.append(REFUSED)
    stage.runtime.end("r")
    stage.run()
    assert stage.wire() == ["open", "end error(put_given_up: too large)"]


def test_a_failed_end_does_not_wait_for_a_retry_s_backoff() -> None:
    """The chunk is dropped, its seq burned."""
    stage = opened()
    stage.sink.plan.append(RETRY)
    stage.submit("r", "a")
    stage.run()
    stage.runtime.fail("r", "host")
    stage.run()
    assert stage.wire() == ["open", "end error(host)"]


def test_a_failed_end_passes_by_a_chunk_that_waits_for_credit() -> None:
    stage = opened()
    stage.sink.plan.append(BUSY)
    stage.submit("r", "a", "b")
    stage.run()
    stage.runtime.cancel("r", "user left")
    stage.run()
    assert stage.wire() == ["open", "end cancelled(user left)"]
    assert stage.rest() == {}


@pytest.mark.parametrize("outcome", [BUSY, RETRY])
def test_a_chunk_in_flight_that_comes_back_makes_way_for_a_failed_end(outcome: PutOutcome) -> None:
    """The request is cancelled while its chunk is being put."""
    stage = opened()

    def cancel(_frame: Frame) -> PutOutcome:
        stage.runtime.cancel("r")
        return outcome

    stage.sink.plan.append(cancel)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open", "end cancelled(cancelled)"]


# Busy


@pytest.mark.parametrize("signal", [CreditReturned(R1), ROOM, PeerBack()])
def test_busy_counts_no_attempt_and_waits_for_room(signal: Any) -> None:
    stage = opened(retries=0)
    stage.sink.plan.extend([BUSY] * 5)
    stage.submit("r", "a")
    stage.run()
    for tries in range(2, 7):
        assert len(stage.sink.tried) == tries
        stage.run()
        stage.hear(signal)
    assert stage.wire() == ["open", "data 0"]


def test_credit_of_another_stream_wakes_nobody() -> None:
    stage = opened()
    stage.sink.plan.append(BUSY)
    stage.submit("r", "a")
    stage.run()
    stage.hear(CreditReturned(OTHER))
    assert len(stage.sink.tried) == 2


@pytest.mark.parametrize("signal", [CreditReturned(R1), ROOM])
def test_room_that_comes_before_the_busy_put_is_fed_is_not_missed(signal: Any) -> None:
    """Race: the I/O thread hears of room while the outbox still holds the answer ``busy``."""
    stage = opened()

    def race(_frame: Frame) -> PutOutcome:
        stage.sink.say(signal)
        stage.runtime.sink_once()
        return BUSY

    stage.sink.plan.append(race)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open", "data 0"]


def test_one_busy_stream_blocks_no_other() -> None:
    stage = opened()
    stage.open("s", OTHER)
    stage.sink.plan.append(BUSY)
    stage.submit("r", "a")
    stage.submit("s", "x")
    stage.run()
    assert stage.wire(OTHER) == ["open", "data 0"]


def test_a_frame_that_is_busy_for_the_stall_time_is_given_up() -> None:
    stage = opened(send_stall_s=10.0)
    stage.sink.plan.extend([BUSY, BUSY])
    stage.submit("r", "a")
    stage.run()
    stage.pass_time(9.9)
    assert stage.wire() == ["open"]
    stage.pass_time(0.1)
    assert stage.wire() == ["open", "end error(send_stall: no credit or room for 10 s)"]


def test_each_frame_has_a_stall_time_of_its_own() -> None:
    stage = opened(send_stall_s=10.0)
    stage.submit("r", "a", "b")
    for _ in range(2):
        stage.sink.plan.append(BUSY)
        stage.run()
        stage.clock.advance(9.0)
        stage.hear(ROOM)
    assert stage.wire() == ["open", "data 0", "data 1"]


def test_without_a_stall_time_a_busy_frame_waits_for_ever() -> None:
    stage = opened(send_stall_s=0)
    stage.sink.plan.append(BUSY)
    stage.submit("r", "a")
    stage.run()
    stage.pass_time(1e6)
    assert stage.wire() == ["open"]


# Producers


def test_a_slow_producer_delays_its_own_request_only_and_holds_no_lock() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def producer(context: ProducerContext) -> Any:
        if context.output == "slow":
            begun.set()
            assert go_on.wait(10)
        return context.output

    stage = opened(producer=producer)
    stage.open("s", OTHER)
    stage.submit("r", "slow", "b")
    worker = threading.Thread(target=stage.runtime.produce_once)
    worker.start()
    assert begun.wait(10)
    stage.submit("s", "x")
    stage.run()
    assert stage.wire(OTHER) == ["open", "data 0"]
    assert stage.wire(R1) == ["open"]
    go_on.set()
    worker.join(10)
    stage.run()
    assert payloads(stage) == ["slow", "b"]


def test_a_cancel_while_the_producer_runs_is_answered_at_once_and_the_end_follows() -> None:
    stage = sender_only()

    def producer(context: ProducerContext) -> Any:
        stage.runtime.cancel("r")
        return context.output

    stage.runtime._outbox.producer = producer
    stage.open("r", R1)
    stage.submit("r", "a", "b")
    stage.run()
    assert stage.wire() == ["open", "data 0", "end cancelled(cancelled)"]


def test_a_producer_that_raises_on_a_chunk_sends_an_error_end_and_no_later_chunk() -> None:
    stage = opened(producer=CountingProducer())
    stage.submit("r", "a", ValueError("boom"), "c")
    stage.runtime.end("r")
    stage.run()
    assert stage.wire() == ["open", "data 0", "end error(ValueError: boom)"]
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "ValueError: boom")}
    assert stage.seen.reasons == [("failed", "r", "ValueError: boom")]


def test_a_producer_that_raises_on_the_end_sends_it_empty_as_an_error() -> None:
    stage = opened(producer=CountingProducer())
    stage.submit("r", "a")
    stage.runtime.end("r", ValueError("flush"))
    stage.run()
    assert stage.wire() == ["open", "data 0", "end error(ValueError: flush)"]
    assert stage.sink.stored[-1].body is None


def test_a_producer_that_returns_nothing_buffers_until_its_flush() -> None:
    """No frame, no seq: the flush is frame 0."""

    def producer(context: ProducerContext) -> Any:
        held = context.state.get_or_create("test.held", list)
        if context.output is not None:
            held.append(context.output)
        return held if context.is_finished else None

    stage = opened(producer=producer)
    stage.submit("r", "a", "b")
    stage.runtime.end("r")
    stage.run()
    assert stage.wire() == ["open", "end 0 ok"]
    assert payloads(stage) == [["a", "b"]]


def test_a_payload_that_cannot_be_encoded_fails_the_request() -> None:
    stage = opened()
    stage.submit("r", object())
    stage.run()
    assert len(stage.wire()) == 2
    assert stage.wire()[1].startswith("end error(PayloadEncodeError: ")


def test_a_segment_s_end_makes_a_frame_and_resets_what_is_segment_scoped() -> None:
    def producer(context: ProducerContext) -> Any:
        segment = context.state.get_or_create("test.segment", list, Scope.SEGMENT)
        whole = context.state.get_or_create("test.whole", list)
        if context.output is not None:
            segment.append(context.output)
            whole.append(context.output)
        return (context.segment, list(segment), list(whole)) if context.output != "quiet" else None

    stage = opened(producer=producer)
    stage.submit("r", "a")
    stage.runtime.submit_chunk("r", "quiet", segment_end=True)
    stage.submit("r", "b")
    stage.run()
    assert [(frame.segment, frame.seq, frame.segment_end) for frame in stage.sink.stored[1:]] == [
        (0, 0, False),
        (0, 1, True),
        (1, 2, False),
    ]
    assert payloads(stage) == [(0, ["a"], ["a"]), (1, ["b"], ["a", "quiet", "b"])]


def test_a_view_that_is_kept_past_the_end_reaches_nothing() -> None:
    views: list[StateView] = []

    def producer(context: ProducerContext) -> Any:
        views.append(context.state)
        context.state.get_or_create("test.kept", list)

    stage = opened(producer=producer)
    stage.submit("r", "a")
    stage.runtime.end("r")
    stage.run()
    with pytest.raises(StateRetiredError):
        views[0].get_or_create("test.kept", list)
    assert stage.rest() == {}


# Generations


def test_a_successor_waits_in_order_and_starts_at_seq_0() -> None:
    stage = opened()
    stage.submit("r", "a")
    stage.open("s", R2)
    stage.submit("s", "x", "y")
    stage.run()
    assert stage.wire(R2) == []
    stage.runtime.end("r")
    stage.run()
    assert stage.wire() == ["open", "data 0", "end 1 ok", "open", "data 0", "data 1"]
    assert payloads(stage, R2) == ["x", "y"]


def test_a_successor_never_sees_its_predecessor_s_state() -> None:
    def producer(context: ProducerContext) -> Any:
        seen = context.state.get_or_create("test.seen", list)
        seen.append(context.output)
        return list(seen)

    stage = opened(producer=producer)
    stage.open("s", R2)
    stage.submit("r", "a")
    stage.submit("s", "x")
    stage.runtime.end("r")
    stage.run()
    assert payloads(stage, R2) == [["x"]]


def test_a_successor_releases_a_failed_predecessor_at_once() -> None:
    stage = opened(producer=CountingProducer())
    stage.submit("r", ValueError("boom"))
    stage.run()
    stage.open("s", R2)
    assert stage.wire() == ["open", "end error(ValueError: boom)", "open"]


def test_a_successor_releases_a_failed_predecessor_when_its_end_is_out() -> None:
    stage = opened()
    stage.sink.plan.append(RETRY)
    stage.runtime.fail("r", "host")
    stage.run()
    stage.open("s", R2)
    assert stage.wire() == ["open"]
    stage.pass_time(0.02)
    assert stage.wire() == ["open", "end error(host)", "open"]


@pytest.mark.parametrize(
    ("leave", "end"),
    [
        (lambda stage: stage.runtime.cancel("s", "left"), "end cancelled(left)"),
        (lambda stage: stage.runtime.fail("s", "host"), "end error(host)"),
        (lambda stage: stage.sink.say(Stopped(R2, Cause(Outcome.ERROR, "gone"))), "end cancelled(gone)"),
    ],
)
def test_a_life_that_ends_while_it_waits_drops_its_submits_and_sends_its_end(leave: Any, end: str) -> None:
    stage = opened()
    stage.open("s", R2)
    stage.submit("s", "x")
    leave(stage)
    stage.run()
    stage.runtime.cancel("s", "later")
    assert not stage.runtime.submit_chunk("s", "y").accepted
    stage.runtime.end("r")
    stage.run()
    assert stage.wire(R2) == ["open", end]


def test_a_waiting_life_has_no_state_and_is_ready_again_once_it_has() -> None:
    stage = middle()
    stage.open("r", R1)
    stage.open("s", R2)
    assert stage.runtime.state("s") is None
    stage.runtime.cancel("r")
    stage.run()
    assert stage.runtime.state("s") is not None


# The peer


def test_a_lost_peer_ends_every_life_that_it_had_heard_of() -> None:
    stage = opened()
    stage.submit("r", "a")
    stage.sink.say(PeerLost())
    stage.runtime.sink_once()
    told = stage.collect()
    assert told.failed == {"r": Cause(Outcome.ERROR, "peer_lost")}
    assert stage.wire() == ["open"]
    assert stage.sink.reclaimed == [(R1, False), (R1, True)]
    assert stage.rest() == {}


def test_a_life_that_opens_on_a_lost_edge_waits_for_the_peer() -> None:
    stage = sender_only(reconnect_s=1.0)
    stage.hear(PeerLost())
    stage.sink.plan.append(BUSY)
    stage.open("r", R1)
    stage.pass_time(0.5)
    stage.hear(PeerBack())
    stage.pass_time(5.0)
    assert stage.wire() == ["open"]
    assert stage.collect().failed == {}


def test_a_life_that_opens_on_a_lost_edge_fails_when_the_peer_stays_away() -> None:
    stage = sender_only(reconnect_s=1.0)
    stage.hear(PeerLost())
    stage.pass_time(5.0)
    stage.sink.default = BUSY
    stage.open("r", R1)
    stage.pass_time(0.9)
    assert stage.collect().failed == {}
    stage.pass_time(0.2)
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "peer_lost")}
    assert stage.rest() == {}


def test_a_producer_that_returns_after_its_life_is_over_changes_nothing() -> None:
    stage = sender_only()

    def producer(context: ProducerContext) -> Any:
        stage.sink.say(PeerLost())
        stage.runtime.sink_once()
        return context.output

    stage.runtime._outbox.producer = producer
    stage.open("r", R1)
    stage.submit("r", "a")
    stage.run()
    assert stage.wire() == ["open"]
    assert stage.rest() == {}


# Refusals


def test_submits_after_the_own_end_raise_and_a_repeated_end_changes_nothing() -> None:
    stage = opened()
    stage.sink.default = BUSY
    assert stage.runtime.end("r").accepted
    assert not stage.runtime.end("r").accepted
    with pytest.raises(LocalProtocolError, match="chunk_submitted refused in state terminal_pending"):
        stage.runtime.submit_chunk("r", "a")


def test_a_submit_after_a_failure_is_refused_with_the_first_reason() -> None:
    stage = opened()
    stage.runtime.fail("r", "first")
    stage.runtime.fail("r", "second")
    admission = stage.runtime.submit_chunk("r", "a")
    assert (admission.accepted, admission.reason) == (False, "failed: error(first)")


def test_calls_for_ids_that_are_unknown_are_refused_or_do_nothing() -> None:
    stage = opened()
    for leave in (stage.runtime.cancel, stage.runtime.release, lambda name: stage.runtime.fail(name, "x")):
        leave("nobody")
    assert not stage.runtime.submit_chunk("nobody", "a").accepted
    assert not stage.runtime.end("nobody").accepted
    assert stage.take("nobody").kind == "gone"
    assert stage.runtime.state("nobody") is None


@pytest.mark.parametrize(
    ("internal_id", "identity", "field"),
    [("", OTHER, "internal_id"), (None, OTHER, "internal_id"), ("r", OTHER, "internal_id"), ("s", R1, "identity")],
)
def test_a_registration_that_cannot_be_names_its_field(internal_id: Any, identity: Identity, field: str) -> None:
    stage = opened()
    with pytest.raises(ConfigError) as caught:
        stage.runtime.register(internal_id, identity)
    assert caught.value.field == field


def test_the_backlog_refuses_and_says_when_there_is_room() -> None:
    stage = opened(backlog_bytes=1_000)
    stage.collect()
    stage.sink.plan.append(BUSY)
    stage.submit("r", b"x" * 600)
    admission = stage.runtime.submit_chunk("r", b"y" * 600)
    assert (admission.accepted, admission.reason) == (False, "backlog: 608 of 1000 bytes wait in this stage")
    stage.run()
    stage.hear(ROOM)
    assert stage.collect().resumed == {"r": None}
    stage.submit("r", b"y" * 600)


def test_the_backlog_fails_the_request_where_that_is_the_policy() -> None:
    stage = opened(backlog_bytes=1_000, backlog_policy="fail")
    stage.submit("r", b"x" * 600)
    assert not stage.runtime.submit_chunk("r", b"y" * 600).accepted
    assert stage.collect().failed == {"r": Cause(Outcome.ERROR, "backlog: 608 of 1000 bytes wait in this stage")}


@pytest.mark.parametrize("dropped", [True, False])
def test_an_end_stays_ok_after_a_cancel_only_if_nothing_was_dropped(dropped: bool) -> None:  # noqa: FBT001
    stage = opened()
    if dropped:
        stage.submit("r", "a")
    stage.runtime.end("r", "tail")
    stage.runtime.cancel("r", "left")
    stage.run()
    assert stage.wire()[1:] == (["end cancelled(left)"] if dropped else ["end 0 ok"])
