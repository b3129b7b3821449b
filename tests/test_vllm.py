# ruff: noqa: PLC0415 - what needs vLLM is imported where it is installed
"""Real vLLM engines as stages: the same tokens, and whatever ends a request early ends it in the engine and in the pipeline."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_demo import OK, run_demo, the_others
from tiny_model import VOCABULARY, tiny_model

from omni_fsm.adapters import Feedback, Hello, StageConfig, StageRunnerAdapter, TakenKind, memory_pair
from omni_fsm.protocol.identity import Edge

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

IN, OUT = Edge("front", "thinker"), Edge("thinker", "last")
PATIENCE_S = 60.0
NEW_TOKENS = 24


class Stats:
    """What vLLM's scheduler says of itself after each step."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.kv_usage: list[float] = []

    def __call__(self, *_: Any, **__: Any) -> "Stats":
        return self

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.running.append(scheduler_stats.num_running_reqs)
            self.waiting.append(scheduler_stats.num_waiting_reqs)
            self.kv_usage.append(scheduler_stats.kv_cache_usage)

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing is logged."""

    log_engine_initialized = record_sleep_state = log


class Engine:
    """One engine, and the event loop that all its tests share."""

    def __init__(self, model: str) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING"}
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.stats = Stats()
        self.loop = asyncio.new_event_loop()
        arguments = AsyncEngineArgs(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=200,
            max_num_seqs=32,
            seed=7,
        )

        async def make() -> Any:
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[self.stats])

        self.llm = self.loop.run_until_complete(make())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    @property
    def pid(self) -> int:
        (process,) = self.llm.engine_core.resources.engine_manager.processes
        assert process.pid is not None
        return int(process.pid)

    def close(self) -> None:
        self.llm.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield engine
    engine.close()


def greedy(max_tokens: int = NEW_TOKENS) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


async def think(request: Any) -> AsyncIterator[Any]:
    """A prompt of token ids, chunk by chunk; then its answer, token by token."""
    ids: list[int] = []
    async for taken in request.frames():
        ids += taken.payload or []
    async for output in request.generate({"prompt_token_ids": ids}, greedy()):
        yield list(output.outputs[0].token_ids)


async def at_length(request: Any) -> AsyncIterator[Any]:
    """A long answer to each chunk."""
    async for taken in request.frames():
        if taken.payload:
            async for output in request.generate({"prompt_token_ids": taken.payload}, greedy(150)):
                yield list(output.outputs[0].token_ids)


class Around:
    """The stages before and after the engine's."""

    def __init__(self, engine: Engine, work: Callable[[Any], Any] = think) -> None:
        from omni_fsm.adapters.vllm import EngineStage

        first, second = memory_pair(Hello(IN)), memory_pair(Hello(OUT))
        self.front = StageRunnerAdapter(StageConfig(stage="front"), sink=first[0])
        self.stage = EngineStage(engine.llm, StageConfig(stage="thinker"), work, source=first[1], sink=second[0])
        self.last = StageRunnerAdapter(StageConfig(stage="last"), source=second[1])
        self.front_told, self.last_told = Feedback(), Feedback()
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.failed: dict[str, str] = {}
        self.foreign = 0

    def ask(self, name: str, ids: list[int], chunks: int = 2) -> str:
        request, _ = self.front.open(name)
        size = -(-len(ids) // chunks)
        for at in range(0, len(ids), size):
            self.front.submit_chunk(request, ids[at : at + size])
        self.front.end(request)
        return request

    def listen(self) -> None:
        self.front_told.add(self.front.collect_feedback())
        told = self.last.collect_feedback()
        self.last_told.add(told)
        names = {request: identity.external_id for request, identity in self.last_told.registered.items()}
        for request in told.ready:
            while (taken := self.last.take(request)).kind in (TakenKind.CHUNK, TakenKind.END):
                said = taken.payload or []
                self.tokens.setdefault(names[request], []).extend(said)
                generation = self.last_told.registered[request].generation
                self.foreign += any(isinstance(each, tuple) and each[0] != generation for each in said)
                if taken.kind is TakenKind.END:
                    self.ended.add(names[request])
        for request, cause in told.failed.items():
            self.failed[names[request]] = str(cause)
            self.last.release(request)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.listen()
            await asyncio.sleep(0.005)

    async def play(self, script: Callable[[], Any]) -> None:
        with self.front, self.last:
            serving = asyncio.create_task(self.stage.serve())
            try:
                await script()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            assert self.stage.num_requests == 0


def prompts(count: int) -> list[list[int]]:
    return [[(7 * at + 3 * number) % VOCABULARY for at in range(5 + number)] for number in range(count)]


async def direct(engine: Engine, ids: list[int], name: str) -> list[int]:
    tokens: list[int] = []
    async for output in engine.llm.generate({"prompt_token_ids": ids}, greedy(), name):
        tokens += output.outputs[0].token_ids
    return tokens


def test_32_requests_at_once_say_what_the_engine_says_directly(engine: Engine) -> None:
    around = Around(engine)
    asked = prompts(32)

    async def script() -> None:
        for number, ids in enumerate(asked):
            around.ask(f"r{number}", ids)
        await around.until(lambda: len(around.ended) == len(asked))

    async def both() -> list[list[int]]:
        await around.play(script)
        return await asyncio.gather(*(direct(engine, ids, f"direct-{at}") for at, ids in enumerate(asked)))

    expected = engine.run(both())
    assert [around.tokens[f"r{number}"] for number in range(32)] == expected
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert around.failed == {}
    assert max(engine.stats.running) > 4  # they were batched


def test_a_cancel_in_mid_stream_frees_the_engine_of_the_request(engine: Engine) -> None:
    around = Around(engine, at_length)

    async def script() -> None:
        first, _ = around.front.open("cancelled")
        around.front.submit_chunk(first, prompts(1)[0])
        await around.until(lambda: len(around.tokens.get("cancelled", ())) > 3)
        around.front.cancel(first, "heard enough")
        await around.until(lambda: around.failed)
        said = len(around.tokens["cancelled"])
        del engine.stats.running[:], engine.stats.kv_usage[:]
        around.ask("next", prompts(2)[1], chunks=1)
        await around.until(lambda: "next" in around.ended)
        assert len(around.tokens["cancelled"]) == said < 150

    engine.run(around.play(script))
    assert around.failed == {"cancelled": "cancelled(heard enough)"}
    assert max(engine.stats.running[2:]) == 1  # one slot, and the blocks of one request
    assert len(around.tokens["next"]) == 150


def test_what_the_engine_refuses_ends_its_request_in_its_own_words(engine: Engine) -> None:
    around = Around(engine)

    async def script() -> None:
        around.ask("long", list(range(400)))
        around.ask("short", prompts(1)[0])
        await around.until(lambda: around.failed and around.ended)

    engine.run(around.play(script))
    assert around.ended == {"short"}
    assert "200" in around.failed["long"]  # the model's length
    assert around.failed["long"].startswith("error(VLLMValidationError: ")


def test_a_reused_id_never_meets_its_predecessor_in_the_engine(engine: Engine) -> None:
    async def named(request: Any) -> AsyncIterator[Any]:
        async for token_ids in think(request):
            yield [(request.identity.generation, token_id) for token_id in token_ids]

    around = Around(engine, named)
    ids = prompts(3)
    generations: list[int] = []

    async def script() -> None:
        for number in range(10):
            request = around.ask("same", ids[0])
            await asyncio.sleep(0.01 * number)
            around.front.cancel(request, "again")
        last = around.ask("same", ids[2])
        generations.append(int(last.rpartition("-")[2]))
        await around.until(
            lambda: len([said for said in around.tokens["same"] if said[0] == generations[0]]) == NEW_TOKENS
        )

    async def both() -> list[int]:
        await around.play(script)
        return await direct(engine, ids[2], "direct-same")

    around.tokens["same"] = []
    expected = engine.run(both())
    assert [token_id for generation, token_id in around.tokens["same"] if generation == generations[0]] == expected
    assert around.foreign == 0


def test_an_engine_that_dies_ends_every_open_request_at_once(tmp_path: Path) -> None:
    engine = Engine(tiny_model(tmp_path / "tiny"))

    around = Around(engine, at_length)

    async def script() -> None:
        for number, ids in enumerate(prompts(3)):
            around.ask(f"r{number}", ids, chunks=1)
        await around.until(lambda: len(around.tokens) == 3)
        os.kill(engine.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        await around.until(lambda: len(around.failed) + len(around.ended) == 3)
        assert time.monotonic() - killed_s < 5.0

    try:
        engine.run(around.play(script))
    finally:
        engine.close()
    assert around.failed
    assert all(said.startswith("error(EngineDeadError: ") for said in around.failed.values())


@pytest.mark.speech
def test_the_thinker_as_an_engine_says_what_the_thinker_on_torch_says(tmp_path: Path) -> None:
    report = run_demo("--engine", "vllm", out=tmp_path)
    assert the_others(report) == [OK, OK, OK]


@pytest.mark.speech
def test_a_killed_engine_s_process_ends_what_is_open_as_any_stage_s_does(tmp_path: Path) -> None:
    report = run_demo("--engine", "vllm", "--kill", "thinker", out=tmp_path)
    open_at_kill = [request for request in report["requests"] if request["thinker_open_at_kill"]]
    assert report["requests"][2] in open_at_kill
    for request in report["requests"]:
        if request in open_at_kill:
            assert (request["outcome"], request["reason"]) == ("error", "peer_lost")
        else:
            assert (request["outcome"], request["pcm_identical"]) == OK
