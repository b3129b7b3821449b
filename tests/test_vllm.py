# ruff: noqa: PLC0415 - what needs vLLM is imported where it is installed
"""Real vLLM engines as stages: the same tokens, and whatever ends a request early ends it in the engine and in the pipeline."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_demo import OK, run_demo, the_others

from omni_fsm.adapters import Feedback, Hello, StageConfig, StageRunnerAdapter, TakenKind, memory_pair
from omni_fsm.demo import engine_pair
from omni_fsm.demo.engine_pair import NEW_TOKENS, VOCABULARY, engine_args, greedy, prompts, tiny_model
from omni_fsm.demo.models import require_vllm
from omni_fsm.protocol.identity import Edge

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

IN, OUT = Edge("front", "thinker"), Edge("thinker", "last")
PATIENCE_S = 60.0


class Engine(engine_pair.Engine):
    """One engine, and the event loop that all its tests share."""

    def __init__(self, model: str, **settings: Any) -> None:
        require_vllm()
        self.loop = asyncio.new_event_loop()
        super().__init__(engine_args(model, **settings))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    async def is_empty(self) -> bool:
        """Whether it holds nothing; a small request makes it say so."""
        await direct(self, prompts(1)[0], "small")
        held = self.llm.output_processor
        left = (held.request_states, dict(held.external_req_ids), self.stats.running[-1], self.stats.waiting[-1])
        return left == ({}, {}, 0, 0) and self.stats.kv_usage[-1] == 0.0

    def close(self) -> None:
        super().close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield engine
    engine.close()


async def think(request: Any) -> AsyncIterator[Any]:
    """A prompt of token ids, chunk by chunk; then its answer, token by token."""
    ids: list[int] = []
    async for taken in request.frames():
        ids += taken.payload or []
    prompt = ids if request.identity.external_id == "list" else {"prompt_token_ids": ids}
    async for output in request.generate(prompt, greedy()):
        yield list(output.outputs[0].token_ids)


async def at_length(request: Any) -> AsyncIterator[Any]:
    """A long answer to each chunk."""
    async for taken in request.frames():
        if taken.payload:
            async for output in request.generate({"prompt_token_ids": taken.payload}, greedy(150)):
                yield list(output.outputs[0].token_ids)


def update(ids: list[int]) -> Any:
    """More of a prompt that grows."""
    from vllm.engine.protocol import StreamingInput
    from vllm.inputs import tokens_input

    return StreamingInput(tokens_input(list(ids)))


def grow(max_tokens: int = 6, closed: list[str] | None = None) -> Callable[[Any], AsyncIterator[Any]]:
    """One prompt that each frame of token ids extends; an answer to each."""

    async def work(request: Any) -> AsyncIterator[Any]:
        async def updates() -> AsyncIterator[Any]:
            try:
                async for taken in request.frames():
                    if taken.payload:
                        yield update(taken.payload)
            finally:
                if closed is not None:
                    await asyncio.sleep(0.02)  # its end takes a while
                    closed.append(request.identity.external_id)

        async with contextlib.aclosing(request.generate(updates(), greedy(max_tokens))) as outputs:
            async for output in outputs:
                yield list(output.outputs[0].token_ids)

    return work


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
        size = -(-len(ids) // chunks)
        return self.send(name, [ids[at : at + size] for at in range(0, len(ids), size)])

    def send(self, name: str, chunks: list[Any], *, end: bool = True) -> str:
        request, _ = self.front.open(name)
        for chunk in chunks:
            self.front.submit_chunk(request, chunk)
        if end:
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


async def direct(engine: Engine, ids: list[int], name: str, max_tokens: int = NEW_TOKENS) -> list[int]:
    return await heard(engine, {"prompt_token_ids": list(ids)}, name, max_tokens)


async def heard(engine: Engine, prompt: Any, name: str, max_tokens: int) -> list[int]:
    tokens: list[int] = []
    async for output in engine.llm.generate(prompt, greedy(max_tokens), name):
        tokens += output.outputs[0].token_ids
    return tokens


async def updates_at_once(chunks: list[list[int]]) -> AsyncGenerator[Any, None]:
    for chunk in chunks:
        yield update(chunk)


async def directly_in_updates(engine: Engine, chunks: list[list[int]], name: str, max_tokens: int = 6) -> list[int]:
    """What the engine answers to one prompt that grows, all of whose updates come at once."""
    return await heard(engine, updates_at_once(chunks), name, max_tokens)


async def in_prompts(engine: Engine, chunks: list[list[int]], name: str, max_tokens: int = 6) -> list[int]:
    """What the engine answers to prompts of their own, each with all that was said before but the last token of each answer."""
    so_far: list[int] = []
    said: list[int] = []
    for number, chunk in enumerate(chunks):
        so_far += chunk
        answer = await direct(engine, so_far, f"{name}/{number}", max_tokens)
        so_far += answer[:-1]
        said += answer
    return said


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
        around.ask("foreign", [1, VOCABULARY])
        around.ask("list", [1, VOCABULARY])
        await around.until(lambda: len(around.failed) == 3)
        around.ask("short", prompts(1)[0])
        await around.until(lambda: around.ended)

    engine.run(around.play(script))
    assert around.ended == {"short"}
    for name in ("foreign", "list"):  # by itself vLLM would die of them
        assert around.failed[name].startswith("error(PromptError: prompt_token_ids: ")
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


def sessions(count: int) -> list[list[list[int]]]:
    """Chunks of prompts that grow; they repeat themselves, as speculation by n-grams likes it."""
    return [[prompt * 2, prompt[:4], [number, *prompt]] for number, prompt in enumerate(prompts(count))]


def test_a_prompt_that_grows_is_answered_as_the_engine_answers_it_directly(engine: Engine) -> None:
    """Its updates go on from what was said; vLLM discards the last token of each answer."""
    around = Around(engine, grow())
    asked = sessions(4)

    async def script() -> None:
        for number, chunks in enumerate(asked):
            around.send(f"s{number}", chunks)
        await around.until(lambda: len(around.ended) == len(asked))

    async def all_ways() -> list[list[list[int]]]:
        await around.play(script)
        ways = (directly_in_updates, in_prompts)
        return [[await way(engine, chunks, f"{way.__name__}-{at}") for at, chunks in enumerate(asked)] for way in ways]

    in_updates, one_by_one = engine.run(all_ways())
    assert [around.tokens[f"s{number}"] for number in range(4)] == in_updates == one_by_one
    assert all(len(tokens) == 3 * 6 for tokens in in_updates)
    assert engine.run(engine.is_empty())


@pytest.mark.parametrize("max_tokens", [6, 150], ids=["between two updates", "within an answer"])
@pytest.mark.parametrize("how", ["cancelled(heard enough)", "error(no voice)"])
def test_a_prompt_that_grows_ends_in_the_engine_when_its_request_does(
    engine: Engine, how: str, max_tokens: int
) -> None:
    """Whether the client cancels it, or the stage before fails: its generator is closed, its blocks are free."""
    closed: list[str] = []
    around = Around(engine, grow(max_tokens, closed))

    async def script() -> None:
        first = around.send("first", sessions(1)[0][:1], end=False)
        await around.until(lambda: len(around.tokens.get("first", ())) >= 6)
        if max_tokens == 6:
            assert not await engine.is_empty()
        leave, _, reason = how.rstrip(")").partition("(")
        (around.front.cancel if leave == "cancelled" else around.front.fail)(first, reason)
        await around.until(lambda: around.failed and around.stage.num_requests == 0)
        assert closed == ["first"]
        assert await engine.is_empty()
        assert len(around.tokens["first"]) < 150

    engine.run(around.play(script))
    assert around.failed == {"first": how}


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([list(range(90))] * 3, "error(ConfigError: prompt: 280 cannot be used; accepted: fewer tokens than 200"),
        ([], "error(ConfigError: prompt: <async_generator"),
        ([[1, 2], []], "error(ConfigError: prompt: {'type': 'token', 'prompt_token_ids': []} cannot be used"),
        ([[1, 2], [VOCABULARY]], "error(PromptError: prompt_token_ids: "),
        ([[1, 2], "text"], "error(ConfigError: prompt: 'text' cannot be used"),
        ([[1, 2], 1.5], "error(TypeError: 'float' object is not iterable"),
        ([[1, 2], "cumulative"], "error(ConfigError: output_kind: "),
        ([[1, 2], "cancelled"], "error(UpdatesCancelledError: CancelledError: inside the updates)"),
    ],
    ids=["too long", "no update", "no token", "foreign tokens", "no token ids", "raises", "no deltas", "cancelled"],
)
def test_a_prompt_that_cannot_grow_further_ends_its_request_alone(
    engine: Engine, chunks: list[Any], words: str
) -> None:
    """By itself vLLM's worker dies of more tokens than the model's length, and a stream without updates is answered."""

    async def work(request: Any) -> AsyncIterator[Any]:
        async def updates() -> AsyncIterator[Any]:
            from vllm.engine.protocol import StreamingInput
            from vllm.inputs import tokens_input
            from vllm.sampling_params import RequestOutputKind

            async for taken in request.frames():
                if taken.payload == "cancelled":
                    raise asyncio.CancelledError
                if taken.payload == "cumulative":
                    params = greedy(6)
                    params.output_kind = RequestOutputKind.CUMULATIVE
                    yield StreamingInput(tokens_input([1]), params)
                elif isinstance(taken.payload, str):
                    yield StreamingInput(taken.payload)  # type: ignore[arg-type]
                elif taken.payload is not None:
                    yield update(taken.payload)

        async for output in request.generate(updates(), greedy(6)):
            yield list(output.outputs[0].token_ids)

    around = Around(engine, work)

    async def script() -> None:
        around.send("other", [[1, 2, 3]], end=False)
        around.send("bad", chunks)
        await around.until(lambda: around.failed)
        around.send("next", [[1, 2, 3]])
        await around.until(lambda: "next" in around.ended)
        assert around.stage.num_requests == 1

    engine.run(around.play(script))
    assert list(around.failed) == ["bad"]
    assert around.failed["bad"].startswith(words)
    assert around.tokens["other"] == around.tokens["next"]
    assert engine.run(engine.is_empty())


def test_a_prompt_that_grows_is_refused_where_outputs_are_no_deltas(engine: Engine) -> None:
    """Then its length cannot be counted."""
    from vllm import SamplingParams

    async def work(request: Any) -> AsyncIterator[Any]:
        async for output in request.generate(updates_at_once([[1, 2]]), SamplingParams(max_tokens=1)):
            yield list(output.outputs[0].token_ids)

    around = Around(engine, work)

    async def script() -> None:
        around.send("cumulative", [])
        await around.until(lambda: around.failed)

    engine.run(around.play(script))
    assert around.failed["cumulative"].startswith("error(ConfigError: output_kind: ")
    assert "DELTA" in around.failed["cumulative"]


@pytest.mark.parametrize("work", [at_length, grow(150)], ids=["a prompt", "a prompt that grows"])
def test_case_33_a_cancel_while_the_engine_is_asked_takes_back_the_registration_and_the_submission(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], Any]
) -> None:
    """vLLM has registered the request, and waits for its engine's process to take it; then the client cancels."""
    around = Around(engine, work)
    submit, pending, held = engine.llm.engine_core.add_request_async, asyncio.Event(), asyncio.Event()
    ids = prompts(1)[0]

    async def hold(request: Any) -> None:
        pending.set()
        await held.wait()
        await submit(request)

    async def script() -> None:
        monkeypatch.setattr(engine.llm.engine_core, "add_request_async", hold)
        first = around.send("same", [ids], end=False)
        await around.until(pending.is_set)
        assert len(engine.llm.output_processor.request_states) == 1
        around.front.cancel(first, "left")
        await around.until(lambda: around.failed and around.stage.num_requests == 0)
        held.set()
        assert await engine.is_empty()
        around.send("same", [ids])
        await around.until(lambda: "same" in around.ended)

    engine.run(around.play(script))
    assert around.failed == {"same": "cancelled(left)"}
    assert around.tokens["same"] == engine.run(direct(engine, ids, "direct", 150))
    assert engine.run(engine.is_empty())


def test_case_47_a_prompt_that_grows_goes_on_in_step_or_is_refused_where_the_engine_speculates(
    engine: Engine, tmp_path: Path
) -> None:
    """Six at once; each has two updates waiting while the first is answered.

    With speculation vLLM counts drafts that were accepted beyond the end of an answer as tokens of the next update.
    """
    asked = sessions(6)

    async def answers(asked_of: Engine) -> Around:
        async def work(request: Any) -> AsyncIterator[Any]:
            does = grow() if request.identity.external_id.startswith("s") else think
            async for token_ids in does(request):
                yield token_ids

        around = Around(asked_of, work)

        async def script() -> None:
            for number, chunks in enumerate(asked):
                around.send(f"s{number}", chunks)
                around.send(f"r{number}", chunks)
            await around.until(lambda: len(around.ended | around.failed.keys()) == 2 * len(asked))

        await around.play(script)
        return around

    async def one_by_one() -> list[list[int]]:
        return [await in_prompts(engine, chunks, f"one-{at}") for at, chunks in enumerate(asked)]

    plain = engine.run(answers(engine))
    assert plain.failed == {}
    assert [plain.tokens[f"s{number}"] for number in range(6)] == engine.run(one_by_one())

    speculating = Engine(
        tiny_model(tmp_path / "tiny"),
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    try:
        around = speculating.run(answers(speculating))
        assert speculating.run(speculating.is_empty())
    finally:
        speculating.close()
    assert around.failed.keys() == {f"s{number}" for number in range(6)}
    assert all("with speculative decoding" in words for words in around.failed.values())
    assert around.tokens == {f"r{number}": plain.tokens[f"r{number}"] for number in range(6)}
    assert speculating.stats.accepted_drafts > 0


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
