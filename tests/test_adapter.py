"""The facade of a stage, with its threads, over memory edges: what a runner writes."""

import threading
from typing import Any

import pytest
from scripted import F_EDGE, K_EDGE

from omni_fsm.adapters import AcceptAll, Generations, StageRunnerAdapter
from omni_fsm.connectors import memory_pair
from omni_fsm.connectors.port import Hello
from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Register, StageConfig, Taken, TakenKind

PATIENCE_S = 10.0


def two_stages() -> tuple[StageRunnerAdapter, StageRunnerAdapter]:
    """A front and a stage that answers it."""
    there, here = memory_pair(Hello(Edge("front", "thinker"), "digest"))
    back, home = memory_pair(Hello(Edge("thinker", "front"), "digest"))
    return (
        StageRunnerAdapter(StageConfig(stage="front", front=True), source=home, sink=there),
        StageRunnerAdapter(StageConfig(stage="thinker"), source=here, sink=back),
    )


def serve(stage: StageRunnerAdapter, stop: threading.Event) -> None:
    """The loop of a runner: double what comes."""
    while not stop.is_set():
        told = stage.collect_feedback(0.05)
        for internal_id in told.ready:
            while (taken := stage.take(internal_id)).kind in (TakenKind.CHUNK, TakenKind.END):
                if taken.kind is TakenKind.END:
                    stage.end(internal_id)
                else:
                    stage.submit_chunk(internal_id, taken.payload * 2)
        for internal_id in told.failed:
            stage.release(internal_id)


def finish(front: StageRunnerAdapter, internal_id: str) -> tuple[list[Any], Taken]:
    """Collect until the request ends."""
    found = []
    for _ in range(int(PATIENCE_S / 0.05)):
        front.collect_feedback(0.05)
        while (taken := front.take(internal_id)).kind is TakenKind.CHUNK:
            found.append(taken.payload)
        if taken.kind is not TakenKind.NOT_YET:
            return found, taken
    raise AssertionError(found)


def test_a_request_goes_to_the_next_stage_and_back() -> None:
    front, thinker = two_stages()
    stop = threading.Event()
    with front, thinker:
        runner = threading.Thread(target=serve, args=(thinker, stop))
        runner.start()
        internal_id, identity = front.open("r1")
        assert identity.external_id == "r1"
        for n in range(20):
            assert front.submit_chunk(internal_id, n).accepted
        front.end(internal_id)
        found, last = finish(front, internal_id)
        front.release(internal_id)
        stop.set()
        runner.join(PATIENCE_S)
    assert (found, last.kind) == ([2 * n for n in range(20)], TakenKind.END)


def test_a_cancel_at_the_front_reaches_the_next_stage() -> None:
    front, thinker = two_stages()
    with front, thinker:
        internal_id, _ = front.open("r1")
        front.submit_chunk(internal_id, 1)
        (name,) = thinker.collect_feedback(PATIENCE_S).registered or {"thinker-0": None}
        front.cancel(internal_id, "left")
        for _ in range(100):
            told = thinker.collect_feedback(0.1)
            if name in told.failed:
                break
        assert told.failed[name].reason == "left"


def test_a_shutdown_is_idempotent_and_leaves_no_thread() -> None:
    before = threading.active_count()
    front, thinker = two_stages()
    with front, thinker:
        front.open("r1")
    assert front.shutdown()
    assert threading.active_count() == before
    with pytest.raises(OmniFsmError, match="was not opened: shutdown"):
        front.open("r2")


def test_an_empty_external_id_is_refused_by_name() -> None:
    front, thinker = two_stages()
    with front, thinker, pytest.raises(ConfigError, match="external_id"):
        front.open("")


def test_generations_never_repeat_and_rise() -> None:
    numbers = Generations()
    given = [numbers.next() for _ in range(10_000)]
    assert sorted(set(given)) == given
    assert given[-1] < 2**64


def test_accept_all_gives_each_request_a_name_of_its_own() -> None:
    host = AcceptAll("thinker")
    assert host.stream_offered(Identity("r", 1)) == Register("thinker-0")
    assert host.stream_offered(Identity("r", 2)) == Register("thinker-1")


def test_an_edge_of_another_stage_is_refused_by_name() -> None:
    sending, receiving = memory_pair(Hello(K_EDGE, "digest"))
    with pytest.raises(ConfigError, match=r"^source: "):
        StageRunnerAdapter(StageConfig(stage="thinker"), source=receiving)
    with pytest.raises(ConfigError, match=r"^sink: "):
        StageRunnerAdapter(StageConfig(stage=F_EDGE.from_stage), sink=sending)
    sending.close(), receiving.close()
