"""A stage without threads, on borrowed ends: its caller's thread does all the work, and the owner closes the ends."""

import threading
from typing import Any

import pytest

from omni_fsm.adapters import (
    Failure,
    Feedback,
    Hello,
    ProducerContext,
    StageConfig,
    StageRunnerAdapter,
    TakenKind,
    Transition,
    memory_pair,
)
from omni_fsm.connectors import Connector
from omni_fsm.protocol.errors import LocalProtocolError
from omni_fsm.protocol.identity import Edge

HELLO = Hello(Edge("thinker", "talker"))


class Pair:
    """Two stages on one edge in memory, neither with a thread."""

    def __init__(self, **settings: Any) -> None:
        self.sink, self.source = memory_pair(HELLO)
        self.thinker = StageRunnerAdapter(StageConfig(stage="thinker", **settings), sink=self.sink, synchronous=True)
        self.talker = StageRunnerAdapter(StageConfig(stage="talker", **settings), source=self.source, synchronous=True)
        self.told = Feedback()
        for stage in (self.thinker, self.talker):
            stage.start()

    def turn(self, *stages: StageRunnerAdapter) -> None:
        """Let each stage do what it can, a few times."""
        for _ in range(4):
            for stage in stages or (self.thinker, self.talker):
                self.told.add(stage.collect_feedback())


def test_a_stream_goes_through_two_stages_of_one_thread() -> None:
    threads = threading.active_count()
    pair = Pair(tombstone_s=0.0)
    request, identity = pair.thinker.open("r")
    for number in range(20):  # more than the window: credit comes back by turns
        assert pair.thinker.submit_chunk(request, number).accepted
    assert pair.thinker.end(request, "tail").accepted
    pair.turn()
    assert pair.told.registered == {"talker-0": identity}
    taken: list[Any] = []
    while not taken or taken[-1].kind is not TakenKind.END:
        taken.append(pair.talker.take("talker-0"))
        pair.turn()
        assert len(taken) < 40
    assert [each.payload for each in taken if each.payload is not None] == [*range(20), "tail"]
    pair.turn()
    assert pair.told.output_ended == {request: None}
    assert threading.active_count() == threads
    for stage in (pair.thinker, pair.talker):
        assert stage.shutdown()
        assert not any(stage.residue().values()), stage.residue()


def test_a_shutdown_flushes_and_leaves_the_ends_to_their_owner() -> None:
    pair = Pair()
    request, _ = pair.thinker.open("r")
    assert pair.thinker.submit_chunk(request, 1).accepted
    pair.turn()
    assert pair.thinker.lifecycle.state == "borrowed"
    assert pair.thinker.shutdown()
    assert pair.thinker.shutdown()  # again changes nothing
    assert pair.thinker.lifecycle.state == "closed"
    pair.turn(pair.talker)
    assert [(cause.outcome, cause.reason) for cause in pair.told.failed.values()] == [("cancelled", "shutdown")]
    assert pair.sink.health().connected
    with pytest.raises(LocalProtocolError, match="connector thinker: event lent refused in state closed"):
        pair.thinker.start()
    again = StageRunnerAdapter(StageConfig(stage="thinker"), sink=pair.sink, synchronous=True)
    again.start()
    _, identity = again.open("r2")
    again.collect_feedback()
    pair.turn(pair.talker)
    assert identity in pair.told.registered.values()


def test_what_cannot_be_flushed_within_the_grace_is_reported() -> None:
    sink, _ = memory_pair(HELLO)  # nobody takes from the other end: nothing connects it
    thinker = StageRunnerAdapter(StageConfig(stage="thinker"), sink=sink, synchronous=True)
    thinker.start()
    thinker.open("r")
    assert thinker.shutdown(0.03) is False
    assert thinker.lifecycle.state == "closed"


def test_a_deadline_passes_while_the_caller_waits() -> None:
    pair = Pair(input_wait_s=0.05)
    pair.thinker.open("r")
    pair.turn()
    while not pair.told.failed:
        pair.told.add(pair.talker.collect_feedback(0.02))
    assert [cause.reason for cause in pair.told.failed.values()] == ["deadline_passed: no frame for 0.05 s"]


class Broken:
    """An end whose signals cannot be read."""

    def __init__(self, end: Connector) -> None:
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def signals(self) -> list[Any]:
        raise RuntimeError("a bug of the connector")


def test_a_step_that_raises_is_heard_by_the_caller_and_by_the_peer() -> None:
    pair = Pair()
    pair.thinker.open("r")
    pair.turn()
    talker = StageRunnerAdapter(StageConfig(stage="talker"), source=Broken(pair.source), synchronous=True)
    talker.start()
    with pytest.raises(RuntimeError, match="a bug of the connector"):
        talker.collect_feedback()
    assert talker.lifecycle.state == "broken"
    pair.turn(pair.thinker)
    assert [cause.reason for cause in pair.told.failed.values()] == ["peer_lost"]
    assert not talker.shutdown()  # no end went out
    assert talker.lifecycle.state == "closed"


def test_a_shutdown_before_the_start_leaves_the_ends_open_too() -> None:
    pair = Pair()
    stage = StageRunnerAdapter(StageConfig(stage="thinker"), sink=pair.sink, synchronous=True)
    assert stage.shutdown()
    pair.turn()
    assert pair.sink.health().connected


def test_a_stage_that_has_given_its_ends_back_takes_nothing_from_its_successor() -> None:
    pair = Pair()
    pair.turn()
    assert pair.talker.shutdown()
    new = StageRunnerAdapter(StageConfig(stage="talker"), source=pair.source, synchronous=True)
    request, identity = pair.thinker.open("r")
    pair.thinker.submit_chunk(request, 1)
    pair.turn(pair.thinker)
    assert not pair.talker.collect_feedback()
    assert list(new.collect_feedback().registered.values()) == [identity]
    pair.turn(pair.thinker, new)
    assert pair.told.failed == {}


class ShutsDown:
    """An observer that shuts the stage down when something fails in it."""

    def __init__(self) -> None:
        self.stage: StageRunnerAdapter | None = None
        self.answers: list[bool] = []

    def on_transition(self, transition: Transition) -> None:
        """Nothing to do."""

    def on_failure(self, failure: Failure) -> None:
        if self.stage is not None:
            self.answers.append(self.stage.shutdown())


@pytest.mark.timeout(30)  # where it waits for itself
def test_a_shutdown_from_a_hook_in_the_middle_of_a_shutdown_does_not_wait_for_itself() -> None:
    def producer(context: ProducerContext) -> Any:
        if context.is_finished:
            raise ValueError("the flush failed")
        return context.output

    pair, observer = Pair(), ShutsDown()
    observer.stage = stage = StageRunnerAdapter(
        StageConfig(stage="thinker"), sink=pair.sink, producer=producer, observers=[observer], synchronous=True
    )
    pair.turn(stage, pair.talker)
    request, _ = stage.open("r")
    stage.end(request, 1)
    stage.shutdown()
    assert observer.answers == [False]  # it was called on the thread that shuts down
    assert stage.lifecycle.state == "closed"
