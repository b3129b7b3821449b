"""Lives of one external id, producers that end badly, the front's end, and what the host and the observers hear of it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from scripted import (
    OTHER,
    R1,
    R2,
    ROOM,
    STORED,
    ScriptedHost,
    Stage,
    data,
    error,
    failed_end,
    front,
    middle,
    ok_end,
    opening,
    sender_only,
)

from omni_fsm.connectors.port import BUSY, PeerBack, PeerLost
from omni_fsm.protocol.frames import Frame
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Feedback, ProducerContext, Register, StageRuntime, TakenKind
from omni_fsm.state import StateRetiredError

PATIENCE_S = 10.0
R3 = Identity("r1", 3)


# Successors


def test_a_life_that_failed_while_it_waited_is_released_when_its_turn_comes() -> None:
    """Its own successor waits behind it, and nobody will touch either again."""
    stage = sender_only()
    stage.open("g1", R1)
    stage.open("g2", R2)
    stage.runtime.fail("g2", "host")
    stage.open("g3", R3)
    assert stage.wire() == ["open"]
    stage.runtime.end("g1")
    stage.run()
    assert stage.wire() == ["open", "end 0 ok", "open", "end error(host)", "open"]
    stage.submit("g3", "c0")
    stage.run()
    assert stage.wire(R3) == ["open", "data 0"]
    stage.runtime.release("g3")
    assert stage.rest() == {}


def test_the_successor_of_a_life_that_failed_while_it_waited_opens_when_that_end_is_out() -> None:
    stage = sender_only()
    stage.open("g1", R1)
    stage.open("g2", R2)
    stage.runtime.fail("g2", "host")
    stage.open("g3", R3)
    stage.runtime.end("g1")
    stage.sink.plan.extend([STORED, STORED, BUSY])
    stage.run()
    assert stage.wire() == ["open", "end 0 ok", "open"]
    stage.hear(ROOM)
    assert stage.wire() == ["open", "end 0 ok", "open", "end error(host)", "open"]


def test_a_late_raw_write_of_a_lost_life_is_refused_and_its_successor_waits_for_its_producer() -> None:
    """The producer runs while the peer dies: what it writes then would be the successor's state."""
    running, go_on = threading.Event(), threading.Event()
    refused: list[BaseException] = []
    found: list[bool] = []

    def producer(context: ProducerContext) -> Any:
        raw = stage.runtime.request_payload
        if context.identity == R2:
            found.append("r1" in raw)
            return context.output
        raw["r1"] = "first"
        running.set()
        assert go_on.wait(PATIENCE_S)
        try:
            raw["r1"] = "late"
        except StateRetiredError as retired:
            refused.append(retired)
            raise
        return context.output

    stage = sender_only(producer=producer)
    stage.open("g1", R1)
    stage.submit("g1", "c0")
    worker = threading.Thread(target=stage.runtime.produce_once)
    worker.start()
    assert running.wait(PATIENCE_S)
    stage.open("g2", R2)
    stage.submit("g2", "x")
    stage.hear(PeerLost())
    stage.hear(PeerBack())
    told = stage.collect()
    assert (told.failed, stage.wire(R2)) == ({"g1": error("peer_lost")}, [])
    go_on.set()
    worker.join(PATIENCE_S)
    stage.run()
    assert len(refused) == 1
    assert stage.wire() == ["open", "open", "data 0"]
    assert found == [False]
    assert stage.seen.reasons == [("failed", "g1", "peer_lost")]
    assert stage.collect().failed == {}


# Producers that raise


def raise_what_comes(context: ProducerContext) -> Any:
    if isinstance(context.output, BaseException):
        raise context.output
    return context.output


@pytest.mark.parametrize(
    ("raised", "end"),
    [
        (asyncio.CancelledError("left"), "end error(CancelledError: left)"),
        (SystemExit(3), "end error(SystemExit: 3)"),
        (KeyboardInterrupt("key"), "end error(KeyboardInterrupt: key)"),
    ],
)
def test_whatever_a_producer_raises_ends_its_own_request_only(raised: BaseException, end: str) -> None:
    stage = sender_only(producer=raise_what_comes)
    stage.open("r", R1)
    stage.open("o", OTHER)
    stage.submit("r", raised)
    stage.submit("o", "c0")
    stage.run()
    assert stage.wire(R1) == ["open", end]
    assert stage.wire(OTHER) == ["open", "data 0"]
    (failure,) = stage.seen.failures
    assert (failure.what, failure.internal_id, failure.exception) == ("failed", "r", raised)


def raise_in_flush(context: ProducerContext) -> Any:
    if context.is_finished:
        raise ValueError("flush")
    return context.output


@pytest.mark.parametrize("make", [sender_only, middle, front])
def test_observers_hear_once_of_a_failure_that_the_host_declared(make: Callable[[], Stage]) -> None:
    stage = make()
    stage.open("r", R1)
    stage.runtime.fail("r", "host")
    stage.runtime.fail("r", "again")
    stage.run()
    assert stage.seen.reasons == [("failed", "r", "host")]
    assert stage.collect().failed == {}


@pytest.mark.parametrize("make", [sender_only, middle])
def test_observers_hear_once_of_a_flush_that_raises_after_the_host_let_go(make: Any) -> None:
    """The host wants nothing more of the request, but nobody may lose the words of the raise."""
    stage = make(producer=raise_in_flush)
    stage.open("r", R1)
    stage.submit("r", "c0")
    stage.runtime.end("r")
    stage.runtime.release("r")
    stage.run()
    assert stage.wire() == ["open", "data 0", "end error(ValueError: flush)"]
    assert stage.seen.reasons == [("failed", "r", "ValueError: flush")]
    told = stage.collect()
    assert (told.failed, told.marker_lost, told.output_ended) == ({}, {}, {"r": None})
    assert stage.rest() == {}


# The front's end


def ended_at_once() -> Stage:
    """A front that submitted its whole prompt before any stage has answered."""
    stage = front()
    stage.open("r", R1)
    stage.submit("r", "c0")
    assert stage.runtime.end("r").accepted
    stage.run()
    return stage


def test_a_front_s_end_waits_until_every_stage_knows_the_request() -> None:
    stage = ended_at_once()
    assert stage.wire() == ["open", "data 0"]
    stage.come(opening())
    assert stage.wire() == ["open", "data 0", "end 1 ok"]
    assert stage.collect().opened == {"r": None}


def test_a_peer_lost_before_every_stage_knows_the_request_fails_it() -> None:
    """Were the end out, nobody here would notice: the request would wait for its deadline."""
    stage = ended_at_once()
    stage.hear(PeerLost())
    assert stage.wire() == ["open", "data 0"]
    assert stage.collect().failed == {"r": error("peer_lost")}
    assert stage.take("r").kind is not TakenKind.NOT_YET


def test_a_peer_lost_after_the_end_went_out_is_left_to_the_stages_in_between() -> None:
    stage = ended_at_once()
    stage.come(opening())
    stage.hear(PeerLost())
    assert stage.collect().failed == {}
    stage.come(data(0, "answer"))
    assert stage.take("r").payload == "answer"


def receiver_fails(stage: Stage) -> None:
    stage.come(failed_end("cuda"))


def deadline_passes(stage: Stage) -> None:
    stage.pass_time(10.0)


def input_is_lost(stage: Stage) -> None:
    stage.lose_source()
    stage.pass_time(1.0)


@pytest.mark.parametrize(
    ("fail", "end"),
    [
        (receiver_fails, "end error(cuda)"),
        (deadline_passes, "end error(deadline_passed: no frame for 10 s)"),
        (input_is_lost, "end error(peer_lost)"),
        (lambda stage: stage.runtime.cancel("r", "left"), "end cancelled(left)"),
        (lambda stage: stage.runtime.fail("r", "host"), "end error(host)"),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_a_front_that_fails_does_not_hold_its_failed_end(
    *, ended: bool, fail: Callable[[Stage], None], end: str
) -> None:
    stage = front(input_wait_s=10.0)
    stage.open("r", R1)
    if ended:
        assert stage.runtime.end("r").accepted
        stage.run()
    fail(stage)
    stage.run()
    # A cancel keeps an end(ok) from which nothing was dropped: it need not wait any more either.
    expected = "end 0 ok" if ended and end.startswith("end cancelled") else end
    assert stage.wire() == ["open", expected]


# What the host hears first


class EagerHost(ScriptedHost):
    """A scheduler that is as quick as can be: it collects whenever the lock is free."""

    def __init__(self) -> None:
        super().__init__(lambda _: Register("r"))
        self.runtime: StageRuntime | None = None
        self.told: list[Feedback] = []

    def feedback_ready(self) -> None:
        if self.runtime is not None:
            self.told.append(self.runtime.collect_feedback())


def named(feedback: Feedback) -> set[str]:
    """Every internal id that one collection speaks of, but for the registrations themselves."""
    return {name for field in Feedback.__slots__ if field != "registered" for name in getattr(feedback, field)}


@pytest.mark.parametrize(
    "frames",
    [
        [opening()],
        [opening(), data(0, "c0"), ok_end(1)],
        [data(0, "c0"), opening()],
        [opening(), failed_end()],
        [failed_end()],
        [ok_end(0)],
        [data(7, "ahead")],
    ],
)
def test_a_request_is_reported_as_registered_no_later_than_anything_else_of_it(frames: list[Frame]) -> None:
    host = EagerHost()
    stage = middle(host=host)
    host.runtime = stage.runtime
    stage.source.unlocked = stage.sink.unlocked = host.feedback_ready
    stage.come(*frames)
    host.feedback_ready()
    known: set[str] = set()
    for feedback in host.told:
        known |= feedback.registered.keys()
        assert named(feedback) <= known
    assert known == {"r"}
    assert set().union(*map(named, host.told)) == {"r"}
