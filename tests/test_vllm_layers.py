# ruff: noqa: PLC0415 - what needs vLLM is imported where it is installed
"""Two real vLLM engines, each a stage of one pipeline by its scheduler and worker layers.

The states that the first computes are the prompt of the second, over shared memory, from engine process to engine process.
"""

import asyncio
import copy
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from omni_fsm.adapters import ProducerContext, StageConfig, StageRunnerAdapter, TakenKind, Wiring
from omni_fsm.bench import idle
from omni_fsm.cli import app
from omni_fsm.demo.engine_pair import (
    FIRST,
    NEAR,
    NEW_TOKENS,
    RECORD,
    SECOND,
    VOCABULARY,
    EnginePair,
    Said,
    entry,
    first_difference,
    greedy,
    prompts,
    record_of,
    stage_args,
    tiny_model,
)
from omni_fsm.demo.engine_pair import recorded as states_recorded
from omni_fsm.demo.models import require_vllm
from omni_fsm.protocol.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LAST = "last"
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
HELD = ("lives", "requests", "identities", "staged", "ready", "puts", "backlog_bytes", "paused", "state", "layer")
PATIENCE_S = 120.0
LONG = 1500
"""Tokens that take longer than an abort needs to cross."""


# What runs in the engines' processes


def recorded(context: ProducerContext) -> Any:
    """As the pair's own; of some requests the tokens are the prompt, and of one nothing."""
    from omni_fsm.adapters.vllm.producers import tokens_as_prompt

    if context.identity.external_id.startswith("bad"):
        tap(context.identity.external_id, "raised").write_text(repr(time.monotonic()))
        raise ValueError("no such voice")
    return (tokens_as_prompt if context.identity.external_id.startswith("tokens") else states_recorded)(context)


def tap(external_id: str, side: str) -> Path:
    return record_of(external_id).with_suffix(f".{side}")


def tapped(name: str, scheduler: type) -> type:
    """The layer over a scheduler that writes the prompt embeddings of the pipeline's requests to a file, as vLLM gets them.

    When the engine falls asleep, it writes what is held.
    """
    from omni_fsm.adapters.vllm import scheduler as layers
    from omni_fsm.adapters.vllm.stage import entry_of

    class Tap(scheduler):  # type: ignore[misc]
        def add_request(self, request: Any) -> None:
            ours = entry_of(request.sampling_params)
            if ours is not None and request.prompt_embeds is not None:
                torch.save(request.prompt_embeds, tap(ours.external_id, "got"))
            super().add_request(request)

    class Tapped(layers.StageSchedulerLayer, Tap):  # type: ignore[misc]
        def has_requests(self) -> bool:
            has = super().has_requests()
            if not has:
                held = {"layer": len(self._lives), **self.stage.adapter.residue()}
                tap(self.stage.adapter.runtime.config.stage, "held").write_text(json.dumps(held))
            return bool(has)

    Tapped.__name__ = name
    return Tapped


def __getattr__(name: str) -> Any:
    """vLLM finds the schedulers here by their name; they can be made only where it is installed."""
    if name == "TappedScheduler":
        from vllm.v1.core.sched.scheduler import Scheduler

        return tapped(name, Scheduler)
    if name == "TappedAsyncScheduler":
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return tapped(name, AsyncScheduler)
    raise AttributeError(name)


# What runs here


class Last:
    """The stage behind the second engine, in this process."""

    def __init__(self, plan: "Plan") -> None:
        source = Wiring(plan.edges, plan.extra).open(LAST).source
        self.adapter = StageRunnerAdapter(StageConfig(stage=LAST), source=source)
        self.adapter.start()
        self.ids: dict[str, str] = {}
        self.payloads: dict[str, Any] = {}
        self.failed: dict[str, str] = {}

    def listen(self) -> None:
        told = self.adapter.collect_feedback()
        self.ids |= {identity.external_id: internal_id for internal_id, identity in told.registered.items()}
        names = {internal_id: name for name, internal_id in self.ids.items()}
        for internal_id in told.ready:
            if (taken := self.adapter.take(internal_id)).kind is TakenKind.END:
                self.payloads[names[internal_id]] = taken.payload
        for internal_id, cause in told.failed.items():
            self.failed[names[internal_id]] = str(cause)
            self.adapter.release(internal_id)


@dataclass
class Plan:
    """What a pair of engines is started with."""

    model: str
    directory: Path
    scheduler: str = "TappedScheduler"
    mode: str = "full_payload"
    has_last: bool = False
    wait_s: float = PATIENCE_S
    reconnect_s: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def edges(self) -> list[dict[str, Any]]:
        stages = [FIRST, SECOND, LAST] if self.has_last else [FIRST, SECOND]
        pairs = itertools.pairwise(stages)
        return [{"from_stage": one, "to_stage": other, "mode": self.mode} for one, other in pairs]

    @property
    def extra(self) -> dict[str, Any]:
        return {"directory": str(self.directory / "edge")}

    def engine_args(self, stage: str) -> Any:
        config = {"input_wait_s": self.wait_s, "reconnect_s": self.reconnect_s, "shutdown_grace_s": 1.0}
        ours = {"edges": self.edges, "extra": self.extra, "config": config}
        if stage == FIRST:
            ours["producer"] = f"{__name__}:recorded"
        arguments = {"max_model_len": 2000, "scheduler_cls": f"{__name__}.{self.scheduler}", **self.arguments}
        return stage_args(self.model, stage, ours, **arguments)


class Pair(EnginePair):
    """Two engines, an edge between them, and the event loop of their clients."""

    def __init__(self, plan: Plan) -> None:
        require_vllm()
        os.environ[RECORD] = str(plan.directory / "taps")
        (plan.directory / "taps").mkdir()
        (plan.directory / "edge").mkdir(mode=0o700)
        self.model = plan.model
        self.last = Last(plan) if plan.has_last else None
        self.loop = asyncio.new_event_loop()
        super().__init__(plan.engine_args(FIRST), plan.engine_args(SECOND))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            if self.last is not None:
                self.last.listen()
            await asyncio.sleep(0.005)

    async def quiet(self) -> None:
        """Wait until neither engine holds anything of any request."""
        await self.until(lambda: all(held == 0 for stage in (FIRST, SECOND) for held in holds(stage).values()))

    async def check_freed(self) -> None:
        """Check that neither engine holds anything, and that by vLLM's own account all slots and blocks are free."""
        await self.quiet()
        for engine in (self.first, self.second):
            await engine.ask("after", {"prompt_token_ids": [1]}, greedy(2))
            assert (engine.stats.running[-1], engine.stats.waiting[-1], engine.stats.kv_usage[-1]) == (0, 0, 0.0)

    def close(self) -> None:
        super().close()
        if self.last is not None:
            self.last.adapter.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def holds(stage: str) -> dict[str, int]:
    """What an engine held of its requests when it fell asleep last."""
    said = tap(stage, "held")
    held = json.loads(said.read_text() or "{}") if said.exists() else {}
    return {name: held.get(name, -1) for name in HELD}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(Plan(model, tmp_path_factory.mktemp("pair"), has_last=True, reconnect_s=PATIENCE_S))
    yield pair
    pair.close()


class Library:
    """The same model as its own library computes it: what an engine must have said."""

    def __init__(self, model: str) -> None:
        from transformers import Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM.from_pretrained(model)

    @torch.no_grad()
    def states(self, prompt: list[int] | torch.Tensor, answer: list[int]) -> torch.Tensor:
        """``[tokens, hidden]`` of prompt and answer, but of the last token, which nobody computes."""
        embed = self.model.model.embed_tokens
        begin = prompt if isinstance(prompt, torch.Tensor) else embed(torch.tensor(prompt))
        embeds = torch.cat([begin, embed(torch.tensor(answer[:-1], dtype=torch.long))])
        return self.model.model(inputs_embeds=embeds[None]).last_hidden_state[0]

    @torch.no_grad()
    def check(self, prompt: list[int] | torch.Tensor, answer: list[int]) -> torch.Tensor:
        """Check that each token of an answer is the most likely one, or near it. Returns the states."""
        states = self.states(prompt, answer)
        logits = self.model.lm_head(states[len(prompt) - 1 :])
        said = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert bool((logits.max(dim=1).values - said < NEAR).all())
        return states


def check_payloads(names: list[str]) -> None:
    for name in names:
        sent, got = torch.load(tap(name, "sent")), torch.load(tap(name, "got"))
        assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8))


async def compare(pair: Pair, asked: dict[str, list[int]], said: dict[str, tuple[Said, Said]]) -> None:
    """Payloads to the last bit; states and tokens with the model's own library; tokens with the second engine asked directly."""
    check_payloads(list(asked))
    library = Library(pair.model)
    for name, ids in asked.items():
        first, second = said[name]
        sent = torch.load(tap(name, "sent"))
        torch.testing.assert_close(sent, library.check(ids, first.token_ids), atol=2e-4, rtol=2e-4)
        library.check(sent, second.token_ids)
    directly = await asyncio.gather(*(pair.direct(name, len(said[name][1].token_ids)) for name in asked))
    answers = {name: (said[name][1].token_ids, expected) for name, expected in zip(asked, directly, strict=True)}
    assert {name: first_difference(*answer) for name, answer in answers.items()} == dict.fromkeys(asked)
    near = sum(tokens != expected.token_ids for tokens, expected in answers.values())
    print(f"{near} of {len(asked)} answers part where two logits are nearer than {NEAR:g}")  # noqa: T201 - shown with -rP


def test_32_requests_at_once_pass_from_engine_to_engine_to_the_last_bit(pair: Pair) -> None:
    asked = {f"r{number}": ids for number, ids in enumerate(prompts(32))}

    async def script() -> None:
        answers = await asyncio.gather(*(pair.both(name, ids) for name, ids in asked.items()))
        said = dict(zip(asked, answers, strict=True))
        assert all(len(each.token_ids) == NEW_TOKENS for both in answers for each in both)
        assert {each.finish_reason for both in answers for each in both} == {"length"}
        await pair.quiet()
        await compare(pair, asked, said)

    pair.run(script())
    assert max(pair.first.stats.running) > 4  # they were batched
    assert max(pair.second.stats.running) > 4


def test_the_states_of_a_long_answer_arrive_whole(pair: Pair) -> None:
    """Those of its first step go on at once, then in lots, the last with the end."""

    async def script() -> None:
        said = {"long": await pair.both("long", prompts(1)[0], max_tokens=300)}
        assert len(torch.load(tap("long", "got"))) == len(prompts(1)[0]) + 299
        await compare(pair, {"long": prompts(1)[0]}, said)

    pair.run(script())


def test_a_cached_prefix_at_the_first_engine_costs_no_state(pair: Pair) -> None:
    ids = [(5 * at) % VOCABULARY for at in range(140)]

    async def script() -> None:
        await pair.first.ask("cached", {"prompt_token_ids": ids}, greedy())
        said = {"prefix": await pair.both("prefix", ids)}
        await compare(pair, {"prefix": ids}, said)

    pair.run(script())


def test_an_abort_at_the_second_engine_stops_the_first(pair: Pair) -> None:
    async def script() -> Said:
        generation, said = pair.generations.next(), Said()
        first = asyncio.create_task(pair.begins("unwanted", generation, prompts(1)[0], said, max_tokens=LONG))
        second = asyncio.create_task(pair.waits("unwanted", generation))
        await pair.until(lambda: len(said.token_ids) > 3)
        second.cancel()
        await first
        await pair.check_freed()
        return said

    said = pair.run(script())
    assert (said.finish_reason, said.stop_reason) == ("abort", "cancelled(aborted in stage talker)")
    assert 3 < len(said.token_ids) < LONG


def test_an_abort_at_the_first_engine_ends_the_wait_at_the_second(pair: Pair) -> None:
    async def script() -> Said:
        generation, said = pair.generations.next(), Said()
        first = asyncio.create_task(pair.begins("left", generation, prompts(1)[0], said, max_tokens=LONG))
        second = asyncio.create_task(pair.waits("left", generation))
        await pair.until(lambda: len(said.token_ids) > 3)
        first.cancel()
        await second
        await pair.check_freed()
        return second.result()

    said = pair.run(script())
    assert (said.finish_reason, said.stop_reason) == ("error", "cancelled(aborted in stage thinker)")
    assert said.token_ids == []


def test_a_failure_at_the_first_engine_is_the_second_s_and_no_other_request_s(pair: Pair) -> None:
    asked = dict(zip(("good", "bad", "fine"), prompts(3), strict=True))

    async def script() -> dict[str, tuple[Said, Said]]:
        answers = await asyncio.gather(*(pair.both(name, ids) for name, ids in asked.items()))
        return dict(zip(asked, answers, strict=True))

    said = pair.run(script())
    assert [each.finish_reason for each in said["bad"]] == ["error", "error"]
    assert [each.stop_reason for each in said["bad"]] == ["error(ValueError: no such voice)"] * 2
    for name in ("good", "fine"):
        assert [each.finish_reason for each in said[name]] == ["length", "length"]
    check_payloads(["good", "fine"])


def test_a_failure_at_the_first_engine_is_heard_at_the_second_at_once(pair: Pair) -> None:
    """From the producer's raise to the words of the second engine's client; the median of some, since machines have pauses."""

    async def script() -> list[float]:
        spent_s = []
        for name in [f"bad{number}" for number in range(5)]:
            generation = pair.generations.next()
            first = asyncio.create_task(pair.begins(name, generation, prompts(1)[0]))
            assert (await pair.waits(name, generation)).finish_reason == "error"
            spent_s.append(time.monotonic() - float(tap(name, "raised").read_text()))
            await first
        return sorted(spent_s)

    spent_s = pair.run(script())
    print(f"heard after {[f'{each * 1e3:.1f} ms' for each in spent_s]}")  # noqa: T201 - shown with -rP
    assert spent_s[2] < 0.1


def test_the_engine_in_the_middle_hands_its_own_states_on(pair: Pair) -> None:
    ids = prompts(1)[0]

    async def script() -> Said:
        _, said = await pair.both("through", ids)
        await pair.until(lambda: "through" in pair.last.payloads)
        return said

    said = pair.run(script())
    expected = Library(pair.model).check(torch.load(tap("through", "got")), said.token_ids)
    torch.testing.assert_close(pair.last.payloads["through"]["prompt_embeds"], expected, atol=2e-4, rtol=2e-4)


def test_a_stop_from_the_last_stage_ends_the_request_in_the_engine(pair: Pair) -> None:
    async def script() -> Said:
        generation, said = pair.generations.next(), Said()
        second = asyncio.create_task(pair.waits("stopped", generation, said, max_tokens=LONG))
        await pair.begins("stopped", generation, prompts(1)[0])
        await pair.until(lambda: len(said.token_ids) > 3 and "stopped" in pair.last.ids)
        pair.last.adapter.cancel(pair.last.ids["stopped"], "heard enough")
        await second
        await pair.quiet()
        return said

    said = pair.run(script())
    assert (said.finish_reason, said.stop_reason) == ("abort", "cancelled(heard enough)")
    assert 3 < len(said.token_ids) < LONG


def test_a_stop_from_the_last_stage_goes_through_a_parked_request_to_the_first_engine(pair: Pair) -> None:
    async def script() -> tuple[Said, Said]:
        generation, said = pair.generations.next(), Said()
        second = asyncio.create_task(pair.waits("vain", generation))
        first = asyncio.create_task(pair.begins("vain", generation, prompts(1)[0], said, max_tokens=LONG))
        await pair.until(lambda: len(said.token_ids) > 3 and "vain" in pair.last.ids)
        pair.last.adapter.cancel(pair.last.ids["vain"], "heard enough")
        return await first, await second

    first, second = pair.run(script())
    assert (first.finish_reason, first.stop_reason) == ("abort", "cancelled(heard enough)")
    assert (second.finish_reason, second.stop_reason) == ("error", "cancelled(heard enough)")
    assert 3 < len(first.token_ids) < LONG


def test_tokens_are_a_prompt_as_well(pair: Pair) -> None:
    async def script() -> None:
        first, second = await pair.both("tokens", prompts(1)[0])
        directly = await pair.second.ask("direct", {"prompt_token_ids": first.token_ids}, greedy(logprobs=2))
        assert first_difference(second.token_ids, directly) is None

    pair.run(script())


def test_a_parked_request_is_in_no_queue_and_has_no_slot(pair: Pair) -> None:
    names = [f"parked{number}" for number in range(8)]
    ids = prompts(8)

    async def script() -> list[Said]:
        generations = [pair.generations.next() for _ in names]
        waiting = [asyncio.create_task(pair.waits(*each)) for each in zip(names, generations, strict=True)]
        await asyncio.sleep(0.5)  # they are on their way to the engine's process
        del pair.second.stats.running[:], pair.second.stats.waiting[:]
        await pair.second.ask("alone", {"prompt_token_ids": ids[0]}, greedy())
        assert max(pair.second.stats.running) == 1
        assert max(pair.second.stats.waiting) == 0
        assert not any(task.done() for task in waiting)
        await asyncio.gather(*(pair.begins(*each) for each in zip(names, generations, ids, strict=True)))
        return await asyncio.gather(*waiting)

    said = pair.run(script())
    assert [each.finish_reason for each in said] == ["length"] * 8
    check_payloads(names)


def test_engines_sleep_while_all_requests_are_parked(pair: Pair) -> None:
    found = pair.run(idle.parked(pair, requests=32, seconds=1.0, settle_s=0.5))
    print(idle.in_words(found))  # noqa: T201 - shown with -rP
    assert max(found["parked"][FIRST], found["parked"][SECOND]) < 0.02


def test_a_request_that_cannot_be_served_ends_by_itself(pair: Pair) -> None:
    async def script() -> list[Said]:
        generation = pair.generations.next()
        wrong = [
            {"external_id": "x", "generation": "one", "waits": True},
            {"external_id": "x", "generation": 1, "waits": True, "wait": 1},
            entry("x", generation),
            entry("", generation, waits=True),
        ]
        prompt = {"prompt_token_ids": [0]}
        stops = greedy(ours=entry("stops", generation), stop=["."], detokenize=True)
        assert (await pair.first.ask("stops", prompt, stops)).stop_reason.startswith("stop: ['.'] cannot be used; ")
        said = await asyncio.gather(
            *(pair.second.ask(f"wrong{at}", prompt, greedy(ours=ours)) for at, ours in enumerate(wrong))
        )
        twice = [asyncio.create_task(pair.waits("twice", generation))]
        await asyncio.sleep(0.5)
        said.append(await pair.waits("twice", generation))
        await pair.begins("twice", generation, prompts(1)[0])
        said.append(await twice[0])
        return said

    said = pair.run(script())
    assert [each.finish_reason for each in said] == ["error"] * 5 + ["length"]
    assert said[0].stop_reason.startswith("extra_args.omni_fsm.generation: 'one' cannot be used; accepted: ")
    assert said[1].stop_reason.startswith("extra_args.omni_fsm.wait: 1 cannot be used; accepted: ")
    assert said[2].stop_reason == "extra_args.omni_fsm.waits: False cannot be used; accepted: True in stage talker"
    assert said[3].stop_reason.startswith("external_id: '' cannot be used; accepted: ")
    assert "a life that is not registered" in said[4].stop_reason


def test_an_engine_that_aborts_all_its_requests_tells_every_stage(pair: Pair) -> None:
    names = ["open", "parked"]

    async def script() -> tuple[list[Said], list[Said]]:
        lives = {name: pair.generations.next() for name in names}
        firsts, seconds = [Said(), Said()], [Said(), Said()]
        tasks = [
            asyncio.create_task(pair.waits(*life, said, max_tokens=LONG))
            for life, said in zip(lives.items(), seconds, strict=True)
        ]
        await pair.begins("open", lives["open"], prompts(1)[0])
        await pair.until(lambda: len(seconds[0].token_ids) > 3)
        tasks.append(
            asyncio.create_task(pair.begins("parked", lives["parked"], prompts(1)[0], firsts[1], max_tokens=LONG))
        )
        await pair.until(lambda: len(firsts[1].token_ids) > 3)
        await pair.second.llm.pause_generation(mode="abort")
        await asyncio.gather(*tasks)
        await pair.second.llm.resume_generation()
        await pair.quiet()
        return firsts, seconds

    firsts, seconds = pair.run(script())
    assert [each.finish_reason for each in seconds] == ["abort", "abort"]
    assert (firsts[1].finish_reason, firsts[1].stop_reason) == ("abort", "cancelled(aborted in stage talker)")


def test_an_engine_whose_worker_dies_fails_what_waits_for_it(pair: Pair) -> None:
    """After this test the pair has no first engine."""

    async def script() -> Said:
        generation, said = pair.generations.next(), Said()
        second = asyncio.create_task(pair.waits("lost", generation))
        first = asyncio.create_task(pair.begins("lost", generation, prompts(1)[0], said, max_tokens=LONG))
        await pair.until(lambda: len(said.token_ids) > 3)
        os.kill(pair.first.worker_pids[0], signal.SIGKILL)
        await asyncio.gather(first, return_exceptions=True)
        return await second

    said = pair.run(script())
    assert (said.finish_reason, said.stop_reason) == ("error", "error(the engine ended before the request)")


def test_an_engine_that_is_shut_down_cancels_what_it_has(pair: Pair) -> None:
    """After this test the pair has no engine."""

    async def script() -> Said:
        second = asyncio.create_task(pair.waits("late", pair.generations.next()))
        await pair.until(lambda: "late" in pair.last.ids)
        os.kill(pair.second.pid, signal.SIGTERM)
        said = await second
        await pair.until(lambda: "late" in pair.last.failed)
        return said

    assert pair.run(script()).finish_reason == "abort"
    assert pair.last.failed["late"] == "cancelled(aborted in stage talker)"


def test_a_preemption_changes_nothing(model: str, tmp_path: Path) -> None:
    """Both engines run out of blocks; what is computed again is not sent again. And a deadline wakes the second.

    The second is paused until the first is through: its requests are parked, then wait in its queue, and then come all at once.
    The workers run in the engines' own processes.
    """
    arguments = {
        "max_model_len": 200,
        "num_gpu_blocks_override": 12,
        "block_size": 32,
        "max_num_batched_tokens": 64,
        "distributed_executor_backend": IN_PROCESS,
    }
    pair = Pair(Plan(model, tmp_path, "TappedAsyncScheduler", wait_s=15.0, arguments=arguments))
    asked = {f"r{at}": [(7 * each + 3 * at) % VOCABULARY for each in range(30 + 5 * at)] for at in range(12)}
    generations = {name: pair.generations.next() for name in asked}

    async def script() -> None:
        waiting = [asyncio.create_task(pair.waits(*life, max_tokens=50)) for life in generations.items()]
        await pair.second.llm.pause_generation(mode="keep", clear_cache=False)
        first = await asyncio.gather(
            *(pair.begins(name, generations[name], ids, max_tokens=60) for name, ids in asked.items())
        )
        await pair.second.llm.resume_generation()
        answers = zip(first, await asyncio.gather(*waiting), strict=True)
        preempted = [pair.first.stats.preempted, pair.second.stats.preempted]
        print(f"preempted: {preempted}")  # noqa: T201 - shown with -rP
        assert min(preempted) > 0
        await compare(pair, asked, dict(zip(asked, answers, strict=True)))
        said = await pair.waits("never", pair.generations.next())
        assert said.finish_reason == "error"
        assert said.stop_reason == "error(deadline_passed: no frame for 15 s)"
        await pair.quiet()

    try:
        pair.run(script())
    finally:
        pair.close()


def test_a_killed_engine_fails_what_waits_for_it_and_the_other_serves_on(model: str, tmp_path: Path) -> None:
    """Here the workers run in the engines' own processes, and the states are sent step by step."""
    arguments = {"distributed_executor_backend": IN_PROCESS}
    pair = Pair(Plan(model, tmp_path, mode="chunks", arguments=arguments))
    asked = {f"before{at}": ids for at, ids in enumerate(prompts(4))}

    async def script() -> None:
        answers = await asyncio.gather(*(pair.both(name, ids) for name, ids in asked.items()))
        await compare(pair, asked, dict(zip(asked, answers, strict=True)))
        generations = [pair.generations.next() for _ in range(4)]
        said = Said()
        first = asyncio.create_task(pair.begins("r0", generations[0], prompts(1)[0], said, max_tokens=LONG))
        waiting = [asyncio.create_task(pair.waits(f"r{at}", each)) for at, each in enumerate(generations)]
        await pair.until(lambda: len(said.token_ids) > 3)
        os.kill(pair.first.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        ended = await asyncio.gather(*waiting)
        assert time.monotonic() - killed_s < 2.0
        assert [(each.finish_reason, each.stop_reason) for each in ended] == [("error", "error(peer_lost)")] * 4
        await asyncio.gather(first, return_exceptions=True)
        alone = await pair.second.ask("alone", {"prompt_token_ids": prompts(1)[0]}, greedy())
        assert (alone.finish_reason, len(alone.token_ids)) == ("length", NEW_TOKENS)

    try:
        pair.run(script())
    finally:
        pair.close()


def test_the_command_lets_two_engines_talk_and_compares_what_they_say() -> None:
    done = CliRunner().invoke(app, ["engines", "--requests", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["requests"], found["equal"] + found["near_ties"], found["left"]) == (3, 3, 0)
    assert found["tokens"] == [3 * NEW_TOKENS] * 2
    assert found["states"] == sum(len(ids) + NEW_TOKENS - 1 for ids in prompts(3))


@pytest.fixture(scope="module")
def vllm_config(model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Plan(model, tmp_path_factory.mktemp("config")).engine_args(FIRST).create_engine_config()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stage": 1}, "additional_config.omni_fsm.stage"),
        ({"stage": "nobody"}, "omni_fsm.stage"),
        ({"speed": 1}, "additional_config.omni_fsm.speed"),
        ({"edges": [{"from_stage": FIRST}]}, "omni_fsm.edges[0]"),
        ({"edges": [{"from_stage": FIRST, "to_stage": SECOND, "mode": "whole"}]}, "omni_fsm.edges[0].mode"),
        ({"extra": {}}, "omni_fsm.edges[0].extra"),
        ({"edges": [{"from_stage": FIRST, "to_stage": SECOND, "connector": "memory"}]}, "omni_fsm.edges[0].connector"),
        ({"config": {"window": 1}}, "omni_fsm.config.window"),
        ({"config": {"window_frames": 0}}, "omni_fsm.config.window_frames"),
        ({"config": {"front": True}}, "omni_fsm.config.front"),
        ({"config": {"backlog_policy": "refuse"}}, "omni_fsm.config.backlog_policy"),
        ({"producer": "os:no_such"}, "omni_fsm.producer"),
        ({"producer": "nowhere.at_all:made"}, "omni_fsm.producer"),
        ({"producer": "os:sep"}, "omni_fsm.producer"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_their_name(vllm_config: Any, change: Any, named: str) -> None:
    from omni_fsm.adapters.vllm.stage import EngineCoreStage, settings_of

    additional = vllm_config.additional_config
    vllm_config.additional_config = {"omni_fsm": additional["omni_fsm"] | change}
    try:
        with pytest.raises(ConfigError) as refused:
            EngineCoreStage(settings_of(vllm_config), lambda: None)
    finally:
        vllm_config.additional_config = additional
    assert refused.value.field == named


def test_a_worker_that_brings_no_states_is_refused_at_start() -> None:
    from omni_fsm.adapters.vllm.states import check_worker

    with pytest.raises(ConfigError) as refused:
        check_worker("vllm.v1.worker.gpu_worker.Worker")
    assert refused.value.field == "worker_cls"


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (None, "payload: NoneType with [] cannot be a prompt here; accepted: prompt_embeds or prompt_token_ids"),
        ({"text": "hello"}, "payload: dict with ['text'] cannot be"),
        ({"prompt_embeds": torch.zeros(3, 64)}, "prompt_embeds: a tensor [3, 64] of float32 cannot be"),
        ({"prompt_embeds": torch.zeros(3, 128, dtype=torch.int32)}, "prompt_embeds: a tensor [3, 128] of int32"),
        ({"prompt_embeds": torch.zeros(128)}, "prompt_embeds: a tensor [128] of float32"),
        ({"prompt_embeds": torch.zeros(0, 128)}, "prompt_embeds: a prompt of 0 tokens"),
        ({"prompt_embeds": torch.zeros(2000, 128)}, "prompt_embeds: a prompt of 2000 tokens"),
        ({"prompt_token_ids": [1, VOCABULARY]}, "prompt_token_ids: a value of type list"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids: a value of type list"),
        ({"prompt_token_ids": torch.tensor([-1])}, "prompt_token_ids: a tensor [1] of int64"),
        ({"prompt_token_ids": []}, "prompt_token_ids: a prompt of 0 tokens"),
    ],
)
def test_a_payload_that_would_break_the_engine_is_no_prompt(vllm_config: Any, payload: Any, said: str) -> None:
    from omni_fsm.adapters.vllm.prompt import PromptError, prompt_of

    model_config = copy.copy(vllm_config.model_config)
    model_config.enable_prompt_embeds = True
    with pytest.raises(PromptError) as refused:
        prompt_of(payload, model_config)
    assert str(refused.value).startswith(said)


def test_embeddings_are_no_prompt_where_the_engine_takes_none(vllm_config: Any) -> None:
    from omni_fsm.adapters.vllm.prompt import PromptError, prompt_of

    with pytest.raises(PromptError, match="without enable_prompt_embeds"):
        prompt_of({"prompt_embeds": torch.zeros(3, 128)}, vllm_config.model_config)


@pytest.mark.parametrize("kind", ["pipeline_parallel_size", "data_parallel_size"])
def test_kinds_of_engines_that_are_not_served_are_refused_at_start(vllm_config: Any, kind: str) -> None:
    from omni_fsm.adapters.vllm.stage import settings_of

    before = getattr(vllm_config.parallel_config, kind)
    setattr(vllm_config.parallel_config, kind, 2)
    try:
        with pytest.raises(ConfigError) as refused:
            settings_of(vllm_config)
    finally:
        setattr(vllm_config.parallel_config, kind, before)
    assert refused.value.field == f"parallel_config.{kind}"


class Runner:
    """What a layer sees of a model runner between a step's forward pass and its sampling."""

    def __init__(self, hidden_states: torch.Tensor, names: list[str], *, by_step: bool) -> None:
        batch = SimpleNamespace(req_ids=names)
        step = {"hidden_states": hidden_states} | ({"input_batch": batch} if by_step else {})
        self.execute_model_state = SimpleNamespace(**step)
        if not by_step:
            self.input_batch = batch


@pytest.mark.parametrize("by_step", [False, True], ids=["model runner V1", "model runner V2"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_states_are_those_of_their_requests_whatever_the_next_step_does(device: str, by_step: bool) -> None:  # noqa: FBT001
    """Also where vLLM returns before the tokens are on the CPU."""
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import WorkerBase

    from omni_fsm.adapters.vllm.states import StatesLayer, states_of

    class Pending(AsyncModelRunnerOutput):  # type: ignore[misc] # vLLM is not typed here
        def get_output(self) -> Any:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})

        def get_kv_connector_output(self) -> Any:
            return "of the connector"

    class Worker(WorkerBase):  # type: ignore[misc] # vLLM is not typed here
        def sample_tokens(self, _: Any) -> Any:
            batch.fill_(-1.0)  # the next step has begun
            return Pending()

    class Layer(StatesLayer, Worker):  # type: ignore[misc] # vLLM is not typed here
        def __init__(self) -> None:
            """A layer in mid-step: no engine has made it."""

    batch = torch.arange(20.0, device=device).reshape(10, 2)  # two rows more than are scheduled: padding
    expected = batch.cpu().clone()
    layer = Layer()
    layer.model_runner = Runner(batch, ["a", "other", "b"], by_step=by_step)
    layer._ours, layer._lengths = {"a", "b"}, {"a": 3, "other": 4, "b": 1}
    output = layer.sample_tokens(None)
    assert output.get_kv_connector_output() == "of the connector"
    states = states_of(output.get_output())
    assert states.keys() == {"a", "b"}
    assert torch.equal(states["a"], expected[:3])
    assert torch.equal(states["b"], expected[7:8])
    assert states["a"].untyped_storage().nbytes() == 3 * 2 * 4
