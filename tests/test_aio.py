"""A stage whose requests are coroutines: it keeps the rules of every runner, and hands out cancels and errors both ways."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from omni_fsm.adapters import (
    AsyncStage,
    Feedback,
    Hello,
    SegmentEnd,
    StageConfig,
    StageRequest,
    StageRunnerAdapter,
    TakenKind,
    memory_pair,
)
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge
from omni_fsm.testing import Made, RunnerConformance

IN, OUT = Edge("front", "adder"), Edge("adder", "last")
PATIENCE_S = 10.0


async def add(request: StageRequest) -> AsyncIterator[Any]:
    """Two running totals for each number."""
    total = 0
    async for taken in request.frames():
        if taken.kind is TakenKind.CHUNK:
            for _ in range(2):
                total += taken.payload
                yield total


class TestAsyncAdder(RunnerConformance):
    stage = "adder"
    bad_words = "TypeError: unsupported operand"

    def make_runner(self, source: Any, sink: Any) -> Made:
        loop = asyncio.new_event_loop()
        self.made = AsyncStage(StageConfig(stage="adder"), add, source=source, sink=sink)
        return self.made.adapter, lambda: loop.run_until_complete(self.made.cycle(0.02))

    def make_inputs(self, number: int) -> list[Any]:
        return [number + 1, 20, 300, 4_000, 50_000]

    def make_bad_inputs(self) -> list[Any]:
        return [1, "x"]

    def held(self) -> dict[str, int]:
        return {"requests": self.made.num_requests}


class Around:
    """The stages before and after, and what they were told."""

    def __init__(self, work: Callable[[StageRequest], Any], **settings: Any) -> None:
        first, second = memory_pair(Hello(IN)), memory_pair(Hello(OUT))
        self.front = StageRunnerAdapter(StageConfig(stage="front", tombstone_s=0.0), sink=first[0])
        config = StageConfig(stage="adder", tombstone_s=0.0, **settings)
        self.stage = AsyncStage(config, work, source=first[1], sink=second[0])
        self.last = StageRunnerAdapter(StageConfig(stage="last", tombstone_s=0.0), source=second[1])
        self.front_told, self.last_told = Feedback(), Feedback()
        self.taken: list[Any] = []

    def listen(self) -> None:
        self.front_told.add(self.front.collect_feedback())
        told = self.last.collect_feedback()
        self.last_told.add(told)
        for name in told.ready:
            while (taken := self.last.take(name)).kind in (TakenKind.CHUNK, TakenKind.END):
                self.taken.append(taken)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.listen()
                await asyncio.sleep(0.005)


def play(around: Around, script: Callable[[], Any]) -> None:
    """Serve while the script runs; afterwards nothing is left anywhere."""

    async def both() -> None:
        serving = asyncio.create_task(around.stage.serve())
        await script()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    with around.front, around.last:
        asyncio.run(both())
        assert around.stage.num_requests == 0
        left = {name for name, count in around.stage.adapter.residue().items() if count}
        # Tombstones go with time, and a ticket in ready whose request is over with the next worker: neither runs any more.
        assert left <= {"tombstones", "timers", "ready"}


def test_a_cancel_from_either_side_is_raised_in_the_generator_and_reaches_the_other_side() -> None:
    ended: list[str] = []

    async def work(request: StageRequest) -> AsyncIterator[Any]:
        try:
            async for taken in request.frames():
                yield taken.payload
        except asyncio.CancelledError:
            ended.append(f"{request.identity.external_id}: {request.cause}")
            raise

    around = Around(work)

    async def script() -> None:
        first, _ = around.front.open("first")
        second, _ = around.front.open("second")
        for request in (first, second):
            around.front.submit_chunk(request, request)
        await around.until(lambda: len(around.taken) == 2)
        around.front.cancel(first, "changed my mind")
        await around.until(lambda: len(around.last_told.failed) == 1)
        (name,) = set(around.last_told.registered) - set(around.last_told.failed)
        around.last.cancel(name, "heard enough")
        await around.until(lambda: around.front_told.failed)
        await around.until(lambda: len(ended) == 2)

    play(around, script)
    assert ended == ["first: cancelled(changed my mind)", "second: cancelled(heard enough)"]
    assert next(str(cause) for cause in around.last_told.failed.values()) == "cancelled(changed my mind)"
    assert [str(cause) for cause in around.front_told.failed.values()][-1] == "cancelled(heard enough)"


def test_what_the_generator_raises_ends_its_request_at_both_sides_and_no_other() -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        async for taken in request.frames():
            if taken.payload == "bad":
                raise ValueError("cannot say that")
            if taken.payload is not None:
                yield taken.payload

    around = Around(work)

    async def script() -> None:
        bad, _ = around.front.open("bad")
        good, _ = around.front.open("good")
        around.front.submit_chunk(bad, "bad")
        around.front.end(good, "good")
        await around.until(lambda: around.front_told.failed and around.last_told.failed)
        await around.until(lambda: any(taken.kind is TakenKind.END for taken in around.taken))

    play(around, script)
    for told in (around.front_told, around.last_told):
        assert [str(cause) for cause in told.failed.values()] == ["error(ValueError: cannot say that)"]
    assert [taken.payload for taken in around.taken] == ["good", None]


def test_segments_and_a_full_backlog_are_the_generators_to_say_and_to_wait_for() -> None:
    """The stage after takes nothing at first: the generator waits at its yield, and loses nothing."""

    async def work(request: StageRequest) -> AsyncIterator[Any]:
        async for taken in request.frames():
            if taken.kind is TakenKind.CHUNK:
                for number in range(30):
                    yield b"x" * 1_000 + b"%d" % number
                yield SegmentEnd(b"turn %d" % taken.payload)

    around = Around(work, backlog_bytes=8_000, window_frames=2)

    async def script() -> None:
        request, _ = around.front.open("talks")
        for turn in range(2):
            around.front.submit_chunk(request, turn)
        around.front.end(request)
        await around.until(lambda: around.taken and around.taken[-1].kind is TakenKind.END)

    play(around, script)
    payloads = [bytes(taken.payload) for taken in around.taken if taken.payload is not None]
    turn = [b"x" * 1_000 + b"%d" % number for number in range(30)]
    assert payloads == [*turn, b"turn 0", *turn, b"turn 1"]
    assert [taken.segment for taken in around.taken if taken.segment_end] == [0, 1]


def test_a_stage_that_stops_serving_cancels_what_runs_and_both_sides_are_told() -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        yield "begun"
        await asyncio.Event().wait()

    around = Around(work)

    async def script() -> None:
        around.front.open("waits")
        await around.until(lambda: around.taken)

    play(around, script)
    around.listen()
    assert [str(cause) for cause in around.front_told.failed.values()] == ["cancelled(shutdown)"]
    assert [str(cause) for cause in around.last_told.failed.values()] == ["cancelled(shutdown)"]


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda _: None, "ConfigError: work: None cannot be used; accepted: a function that gives an async generator"),
        (
            add,
            "ConfigError: work: 'int' cannot be used; accepted: a generator that yields nothing: the stage has no output",
        ),
    ],
)
def test_work_that_cannot_be_is_refused_where_it_is_used(work: Any, said: str) -> None:
    sink, source = memory_pair(Hello(IN))
    stage = AsyncStage(StageConfig(stage="adder"), work, source=source)
    failed: list[str] = []

    async def script() -> None:
        serving = asyncio.create_task(stage.serve())
        request, _ = front.open("r")
        front.submit_chunk(request, 1)
        async with asyncio.timeout(PATIENCE_S):
            while not failed:
                failed.extend(str(cause) for cause in front.collect_feedback().failed.values())
                await asyncio.sleep(0.005)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    with StageRunnerAdapter(StageConfig(stage="front"), sink=sink) as front:
        asyncio.run(script())
    assert failed[0].startswith(f"error({said}")
    with pytest.raises(ConfigError, match="source: None cannot be used"):
        AsyncStage(StageConfig(stage="adder"), work, source=None)  # type: ignore[arg-type]


async def echo(request: StageRequest) -> AsyncIterator[Any]:
    async for taken in request.frames():
        if taken.payload is not None:
            yield taken.payload


def test_room_that_comes_back_while_a_refusal_is_looked_at_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        async for taken in request.frames():
            if taken.payload is not None:
                for number in range(40):
                    yield b"x" * 1_000 + b"%d" % number

    around = Around(work, backlog_bytes=2_000)
    submit = around.stage.adapter.submit_chunk

    def slow(*given: Any, **named: Any) -> Any:
        admission = submit(*given, **named)
        if not admission.accepted:
            time.sleep(0.02)  # meanwhile the outbox makes room
        return admission

    monkeypatch.setattr(around.stage.adapter, "submit_chunk", slow)

    async def script() -> None:
        request, _ = around.front.open("r")
        around.front.end(request, 1)
        await around.until(lambda: around.taken and around.taken[-1].kind is TakenKind.END)

    play(around, script)
    assert len(around.taken) == 41
    assert around.last_told.failed == {}


@pytest.mark.parametrize("how", ["cancel", "shutdown"])
def test_a_generator_is_told_of_what_its_own_host_does(how: str) -> None:
    around = Around(echo)

    async def script() -> None:
        around.front.submit_chunk(around.front.open("r")[0], 1)
        await around.until(lambda: around.taken)
        if how == "cancel":
            around.stage.cancel("adder-0", "the operator")
        else:
            await asyncio.to_thread(around.stage.adapter.shutdown)
        await around.until(lambda: around.front_told.failed and not around.stage.num_requests)

    async def both() -> None:
        serving = asyncio.create_task(around.stage.serve())
        await script()
        if how == "cancel":
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)  # a shutdown ends it by itself

    with around.front, around.last:
        asyncio.run(asyncio.wait_for(both(), PATIENCE_S))
    said = "the operator" if how == "cancel" else "shutdown"
    assert [str(cause) for cause in around.front_told.failed.values()] == [f"cancelled({said})"]


def test_a_generator_that_swallows_its_cancel_gets_no_more_frames_and_keeps_nobody() -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        while True:
            try:
                async for taken in request.frames():
                    yield taken.payload
            except asyncio.CancelledError:
                continue
            if request.cause is not None:
                await asyncio.Event().wait()
            return

    around = Around(work, shutdown_grace_s=0.2)

    async def both() -> None:
        serving = asyncio.create_task(around.stage.serve())
        request, _ = around.front.open("r")
        around.front.submit_chunk(request, 1)
        await around.until(lambda: around.taken)
        around.front.fail(request, "broken")
        await around.until(lambda: around.last_told.failed)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert around.stage.adapter.lifecycle.state == "closed"

    with around.front, around.last:
        asyncio.run(asyncio.wait_for(both(), PATIENCE_S))


def test_a_cancel_that_nobody_asked_for_is_a_failure_of_the_work() -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        async for taken in request.frames():
            yield taken.payload
            raise asyncio.CancelledError

    around = Around(work)

    async def script() -> None:
        around.front.submit_chunk(around.front.open("r")[0], 1)
        await around.until(lambda: around.front_told.failed and around.last_told.failed)

    play(around, script)
    for told in (around.front_told, around.last_told):
        assert [str(cause) for cause in told.failed.values()] == ["error(CancelledError: inside the work)"]


def test_a_generator_that_never_waits_lets_others_live() -> None:
    async def work(request: StageRequest) -> AsyncIterator[Any]:
        number = 0
        while request.identity.external_id == "busy":
            yield number
            number += 1
        async for taken in request.frames():
            yield taken.payload

    around = Around(work)

    async def script() -> None:
        busy, _ = around.front.open("busy")
        quiet, _ = around.front.open("quiet")
        around.front.end(quiet, "heard")
        await around.until(lambda: any(taken.payload == "heard" for taken in around.taken))
        around.front.cancel(busy)

    play(around, script)
