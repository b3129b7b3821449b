"""Three stages in one thread: the whole protocol from the front and back, under random faults."""

from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted import REFUSED, RETRY, RETRY_BUT_STORED, ROOM, Ring

from omni_fsm.connectors import memory_pair
from omni_fsm.connectors.port import BUSY, Hello, PeerBack, PeerLost
from omni_fsm.protocol.identity import Edge, Identity

LIVES = [Identity("a", 1), Identity("a", 2), Identity("b", 1), Identity("b", 2)]
FAULTS = {"busy": BUSY, "retry": RETRY, "stored": RETRY_BUT_STORED, "refused": REFUSED, "raises": OSError("gone")}
STEPS = ["produce_once", "put_once", "source_once", "sink_once"]

usual = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("work"), st.integers(0, 2), st.just(0)),
    st.tuples(st.sampled_from(["open", "submit", "submit", "end"]), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("turn"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
)
faulty = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.sampled_from(["cancel", "fail", "raise"]), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.sampled_from(["lost", "room", "time"]), st.integers(0, 2), st.integers(0, 1)),
)
scripts = st.lists(st.one_of(usual, usual, usual, usual, faulty), min_size=20, max_size=120)


def play(ring: Ring, script: list[tuple[str, int, int]]) -> None:
    """Two requests are under way, then the script goes on."""
    numbers = count(100)
    for life in (LIVES[0], LIVES[2]):
        ring.open(life)
        for n in range(3):
            ring.submit(life, f"c{n}")
    for what, n, k in script:
        act(ring, what, n, k, next(numbers))


def act(ring: Ring, what: str, n: int, k: int, number: int) -> None:  # noqa: C901, PLR0912 - one line an action
    life = LIVES[k % 4]
    stage = ring.stages[n % 3]
    name = ring.names[n % 3].get(life)
    match what:
        case "step":
            getattr(stage.runtime, STEPS[k])()
        case "work":
            ring.work(n)
        case "turn":
            stage.step()
            ring.work(n)
        case "settle":
            ring.settle()
        case "open" if LIVES[n] not in ring.names[0]:
            ring.open(LIVES[n])
        case "submit" if LIVES[n] in ring.names[0] and ring.names[0][LIVES[n]] not in ring.closed:
            ring.submit(LIVES[n], f"c{number}")
        case "end" if LIVES[n] in ring.names[0]:
            ring.end(ring.names[0][LIVES[n]])
        case "put":
            ring.sinks[n].plan.append(list(FAULTS.values())[k])
        case "cancel" if name and n == 0:
            ring.leave(life)
        case "cancel" if name:
            stage.runtime.cancel(name, "left")
        case "fail" if name and n == 0 and name not in ring.ended:
            stage.runtime.fail(name, "failed here")
            stage.runtime.release(name)
            ring.ended.setdefault(name, "failed here")
        case "fail" if name and n > 0:
            stage.runtime.fail(name, "failed there")
            stage.runtime.release(name)
        case "raise" if name and name not in ring.closed:
            stage.runtime.submit_chunk(name, ValueError("boom"))
        case "lost":
            ring.sinks[n].say(PeerLost(), *[PeerBack()][k:])
            ring.sinks[n].peer.say(PeerLost(), *[PeerBack()][k:])
        case "room":
            ring.sinks[n].say(ROOM)
        case "time":
            ring.clock.advance(0.03)
            for each in ring.stages:
                each.runtime.tick_once()
        case _:
            pass


@settings(max_examples=100, deadline=None, derandomize=True)
@given(scripts)
@example([("open", 0, 0), ("submit", 0, 0), ("settle", 0, 0), ("end", 0, 0)])
def test_every_request_ends_at_the_front_and_ok_means_complete(script: list[tuple[str, int, int]]) -> None:
    ring = Ring(input_wait_s=50.0, send_stall_s=20.0)
    play(ring, script)
    ring.drain()
    assert ring.ended.keys() == ring.sent.keys()
    for name, how in ring.ended.items():
        if how == "ok":
            assert ring.got[name] == ring.sent[name]
        else:
            assert ring.got[name] == ring.sent[name][: len(ring.got[name])]
    assert ring.held() == [{}, {}, {}]


def real_pair(edge: Edge) -> tuple[object, object]:
    return memory_pair(Hello(edge, "digest"))


@pytest.mark.parametrize("chunks", [0, 1, 3, 50])
def test_a_request_goes_round_over_real_connectors(chunks: int) -> None:
    """Fifty chunks are more than the window of eight: credit comes back as they are taken."""
    ring = Ring(real_pair)
    for sink, stage in zip(ring.sinks, [*ring.stages[1:], ring.stages[0]], strict=True):
        for _ in range(3):
            sink.wait(0)
            stage.source.wait(0)
    ring.open(LIVES[0])
    for n in range(chunks):
        ring.submit(LIVES[0], n)
    for _ in range(400):
        for stage in ring.stages:
            stage.source.wait(0)
            stage.sink.wait(0)
        ring.settle()
        ring.end("front-a-1")
    assert ring.ended == {"front-a-1": "ok"}
    assert ring.got["front-a-1"] == list(range(chunks))
    ring.clock.advance(100.0)
    for stage in ring.stages:
        stage.source.wait(0)
        stage.sink.wait(0)
        stage.runtime.tick_once()
    ring.settle()
    assert ring.held() == [{}, {}, {}]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stage_that_has_had_enough_ends_its_request_well(n: int) -> None:
    """It ends its output before its input is over: ``done`` goes back to the front and cancels nobody."""
    ring = Ring()
    ring.open(LIVES[0])
    ring.submit(LIVES[0], "prompt")
    ring.settle()
    name = ring.names[n][LIVES[0]]
    ring.closed.add(name)
    ring.stages[n].runtime.end(name)
    ring.settle()
    ring.drain()
    assert ring.ended == {"front-a-1": "ok"}
    assert ring.got == {"front-a-1": ["prompt"]}
