"""Two vLLM engines as one pipeline: ``omni-fsm engines``.

Both are the same tiny random Qwen2. The states that the thinker computes are the prompt of the talker; they pass from engine
process to engine process, as the layers of `omni_fsm.adapters.vllm` send them. The talker is then asked directly, with the same
states.
"""

import asyncio
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from omni_fsm.adapters import Generations, ProducerContext
from omni_fsm.demo.models import ENGINE_EXIT_S, require, require_vllm

FIRST, SECOND = "thinker", "talker"
VOCABULARY = 512
NEW_TOKENS = 24
"""Of an answer, where nothing else is said."""

MAX_TOKENS = 200
"""Of prompt and answer together, in either engine."""

SETTLE_S = 3.0
"""Until an idle engine rests: vLLM's workers look for work without a pause for a second after the last step."""

KV_BYTES = 64 << 20
"""Of an engine's KV cache: many times what all its requests fill. vLLM clears it when it starts."""

NEAR = 1e-4
"""Two logits that are closer than this may change places when the batch is another."""

RECORD = "OMNI_FSM_ENGINES_RECORD"
"""Names the directory in which `recorded` keeps what it sends."""


def tiny_model(directory: Path) -> str:
    """Save a random Qwen2 of two layers, with weights so large that few logits are close. Returns its path.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    transformers = require("transformers")

    torch.manual_seed(11)
    config = transformers.Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.1,
        architectures=["Qwen2ForCausalLM"],
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def prompts(count: int) -> list[list[int]]:
    """Prompts of 5 tokens, 6 tokens and so on."""
    return [[(7 * at + 3 * number) % VOCABULARY for at in range(5 + number)] for number in range(count)]


def recorded(context: ProducerContext) -> Any:
    """The producer of this pipeline's thinker: the states as the talker's prompt, of which a copy goes to a file."""
    from omni_fsm.adapters.vllm.producers import states_as_prompt  # noqa: PLC0415 - only where vLLM is

    rows = context.state.get_or_create("omni_fsm.engines.rows", list)
    if context.output is not None:
        rows.append(context.output["hidden"])
    if context.is_finished:
        torch.save(torch.cat(rows), record_of(context.identity.external_id))
    return states_as_prompt(context)


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[None]:
    """Let `recorded` keep what it sends in a directory. Engines that are started within inherit it by their environment."""
    before = os.environ.get(RECORD)
    os.environ[RECORD] = str(directory)
    try:
        yield
    finally:
        del os.environ[RECORD]
        if before is not None:
            os.environ[RECORD] = before


def record_of(external_id: str) -> Path:
    """The file of what was sent for a request: named by a digest, since an id is any text."""
    return Path(os.environ[RECORD]) / f"{sha256(external_id.encode()).hexdigest()}.sent"


class Stats:
    """What vLLM says of an engine after each step. It is the factory of itself, which is what vLLM asks for.

    Attributes:
        running: Requests that had a slot.
        waiting: Requests in any of vLLM's waiting queues.
        kv_usage: Part of the KV blocks that were in use.
        preempted: Preemptions in all.
        accepted_drafts: Tokens in all that speculation had right.
    """

    def __init__(self) -> None:
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.kv_usage: list[float] = []
        self.preempted = self.accepted_drafts = 0

    def __call__(self, *_: Any, **__: Any) -> "Stats":
        """See `Stats`."""
        return self

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """See vLLM's ``StatLoggerBase``."""
        if scheduler_stats is not None:
            self.running.append(scheduler_stats.num_running_reqs)
            self.waiting.append(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)
            self.kv_usage.append(scheduler_stats.kv_cache_usage)
            if scheduler_stats.spec_decoding_stats is not None:
                self.accepted_drafts += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing is logged."""

    log_engine_initialized = record_sleep_state = log


@dataclass(slots=True)
class Said:
    """What a client heard of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


class Engine:
    """One engine, and what its clients hear.

    Args:
        arguments: vLLM's, such as `stage_args` gives.
    """

    def __init__(self, arguments: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - takes seconds

        self.stats = Stats()
        self.llm: Any = AsyncLLM.from_engine_args(arguments, stat_loggers=[self.stats])

    async def ask(self, name: str, prompt: Any, params: Any, said: Said | None = None) -> Said:
        """Ask for one answer.

        Args:
            name: vLLM's external id.
            prompt: vLLM's ``PromptType``.
            params: vLLM's ``SamplingParams``, with outputs of the kind ``DELTA``; see `greedy`.
            said: To be filled while the answer comes; None: a new one.
        """
        said = said or Said()
        async for output in self.llm.generate(prompt, params, name):
            completion = output.outputs[0]
            said.token_ids += completion.token_ids
            said.logprobs += completion.logprobs or []
            said.finish_reason, said.stop_reason = completion.finish_reason, completion.stop_reason
        return said

    def close(self) -> None:
        """Shut it down, and let go of it: vLLM's client complains when it is collected at the interpreter's end.

        Called by: whoever made it, while the event loop of its clients is open: vLLM closes its sockets by it.
        """
        self.llm.shutdown(timeout=ENGINE_EXIT_S)
        self.llm = None
        gc.collect()

    @property
    def pid(self) -> int:
        """The process of the engine core."""
        (process,) = self.llm.engine_core.resources.engine_manager.processes
        return int(process.pid)

    @property
    def worker_pids(self) -> list[int]:
        """The processes of its workers: none where they run in the engine's own."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


def greedy(max_tokens: int = NEW_TOKENS, ours: Mapping[str, Any] | None = None, **params: Any) -> Any:
    """Sampling that always takes the likeliest token, and so many of them.

    Args:
        max_tokens: How many.
        ours: The request's `RequestEntry`, as a dict; None: it belongs to no pipeline.
        params: Further ones of vLLM's.
    """
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if ours is None else {"omni_fsm": dict(ours)},
        **{"detokenize": False, **params},
    )


def entry(name: str, generation: int, *, waits: bool = False) -> dict[str, Any]:
    """A request's `RequestEntry`, as a dict."""
    return {"external_id": name, "generation": generation, "waits": waits}


def engine_args(model: str, **arguments: Any) -> Any:
    """Arguments of a small engine.

    Args:
        model: Where the model is.
        arguments: Further ones of vLLM's, or others than here.
    """
    from vllm import AsyncEngineArgs  # noqa: PLC0415 - takes seconds

    usual = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": KV_BYTES,
        "seed": 7,
    }
    return AsyncEngineArgs(model=model, **{**usual, **arguments})


def stage_args(model: str, stage: str, settings: Mapping[str, Any], **arguments: Any) -> Any:
    """Arguments of a small engine that is a stage.

    Args:
        model: Where the model is.
        stage: The stage's name.
        settings: The other fields of `StageSettings`.
        arguments: As for `engine_args`.
    """
    layers = {
        "enable_prompt_embeds": stage == SECOND,
        "scheduler_cls": "omni_fsm.adapters.vllm.scheduler.StageScheduler",
        "worker_cls": "omni_fsm.adapters.vllm.worker.StageWorker",
        "additional_config": {"omni_fsm": {"stage": stage, **settings}},
    }
    return engine_args(model, **{**layers, **arguments})


def pair_args(directory: Path, producer: str = "") -> tuple[Any, Any]:
    """Arguments of a thinker and a talker on the tiny model, with an edge between them.

    Args:
        directory: For the model and the edge, each in a directory that is made here.
        producer: The thinker's; see `StageSettings`.
    """
    model, edges = tiny_model(directory / "model"), directory / "edges"
    edges.mkdir(mode=0o700)
    edge = {"from_stage": FIRST, "to_stage": SECOND, "mode": "full_payload", "extra": {"directory": str(edges)}}
    first = stage_args(model, FIRST, {"edges": [edge], "producer": producer})
    return first, stage_args(model, SECOND, {"edges": [edge]})


class EnginePair:
    """A thinker and a talker. One event loop asks both; `close` them in the end.

    Args:
        first: The thinker's arguments.
        second: The talker's.

    Attributes:
        generations: The numbers of lives of the pair's requests.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self.generations = Generations()
        with ThreadPoolExecutor() as pool:  # an engine takes many seconds to start, and some to end
            self.first, self.second = pool.map(Engine, (first, second))

    def begins(self, name: str, generation: int, ids: list[int], said: Said | None = None, **params: Any) -> Any:
        """A request at the first engine, to be awaited. For ``params`` see `greedy`."""
        ours = entry(name, generation)
        return self.first.ask(name, {"prompt_token_ids": ids}, greedy(ours=ours, **params), said)

    def waits(self, name: str, generation: int, said: Said | None = None, **params: Any) -> Any:
        """A request at the second engine, to be awaited. Its prompt there only holds the place."""
        ours = entry(name, generation, waits=True)
        return self.second.ask(name, {"prompt_token_ids": [0]}, greedy(ours=ours, **params), said)

    async def both(self, name: str, ids: list[int], **params: Any) -> tuple[Said, Said]:
        """A request at both engines, from a prompt to the second's answer."""
        generation = self.generations.next()
        said = await asyncio.gather(
            self.begins(name, generation, ids, **params), self.waits(name, generation, **params)
        )
        return said[0], said[1]

    async def direct(self, name: str, max_tokens: int = NEW_TOKENS) -> Said:
        """What the second says when it is asked with the states that `recorded` has sent for a request."""
        prompt = {"prompt_embeds": torch.load(record_of(name))}
        return await self.second.ask(f"direct-{name}", prompt, greedy(max_tokens, logprobs=2))

    def close(self) -> None:
        """Shut both engines down."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.close, (self.first, self.second)))


def first_difference(said: list[int], expected: Said) -> int | None:
    """Where two answers part although the two likeliest tokens were not near each other; None if nowhere.

    Args:
        said: One answer.
        expected: The other, with the two likeliest logprobs of each token.
    """
    for at, (one, other) in enumerate(zip(said, expected.token_ids, strict=False)):
        if one != other:
            likely = sorted((each.logprob for each in expected.logprobs[at].values()), reverse=True)
            return None if likely[0] - likely[1] < NEAR else at
    lengths = sorted((len(said), len(expected.token_ids)))
    return None if lengths[0] == lengths[1] else lengths[0]


def is_well(found: Mapping[str, Any]) -> bool:
    """Whether every request ended as it should, with the right tokens, and nothing is left."""
    return bool(found["finish_reasons"] == ["length"] and found["different"] == 0 and found["left"] == 0)


def in_words(found: Mapping[str, Any]) -> list[str]:
    """What `run` found, a sentence a line."""
    first, second = found["tokens"]
    return [
        f"{found['requests']} requests at once: {first} tokens of the {FIRST}, {second} of the {SECOND}",
        f"{found['states']} rows of states sent, in {found['seconds']:.2f} s",
        f"as the {SECOND} says when asked directly: {found['equal']}",
        f"near ties: {found['near_ties']}; different: {found['different']}; left: {found['left']}",
        f"finish reasons: {', '.join(found['finish_reasons'])}",
    ]


def run(requests: int = 32, max_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Send requests through both engines at once, and ask the second directly with what the first has sent.

    Args:
        requests: How many.
        max_tokens: Of each answer, at either engine.

    Returns:
        ``equal``, ``near_ties`` and ``different`` count the second's answers, compared token by token, of requests that ended as
        they should; ``states`` the rows that were sent for them; ``left`` what is still in the edge's directory after both
        engines ended.

    Raises:
        MissingPackageError: vLLM is not installed.
    """
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="omni_fsm_") as path, recording(Path(path)):
        return asyncio.run(_run(requests, max_tokens, Path(path)))


def _is_whole(said: tuple[Said, Said]) -> bool:
    return all(each.finish_reason == "length" for each in said)


async def _run(requests: int, max_tokens: int, directory: Path) -> dict[str, Any]:
    pair = EnginePair(*pair_args(directory, producer=f"{__name__}:recorded"))
    asked = {f"request-{number}": ids for number, ids in enumerate(prompts(requests))}
    try:
        begun_s = time.perf_counter()
        said = await asyncio.gather(*(pair.both(name, ids, max_tokens=max_tokens) for name, ids in asked.items()))
        spent_s = time.perf_counter() - begun_s
        whole = {name: both[1] for name, both in zip(asked, said, strict=True) if _is_whole(both)}
        directly = await asyncio.gather(*(pair.direct(name, max_tokens) for name in whole))
    finally:
        pair.close()
    answers = [(second.token_ids, expected) for second, expected in zip(whole.values(), directly, strict=True)]
    equal = sum(tokens == expected.token_ids for tokens, expected in answers)
    different = sum(first_difference(tokens, expected) is not None for tokens, expected in answers)
    return {
        "requests": requests,
        "finish_reasons": sorted({str(each.finish_reason) for both in said for each in both}),
        "states": sum(len(torch.load(record_of(name))) for name in whole),
        "tokens": [sum(len(both[at].token_ids) for both in said) for at in range(2)],
        "equal": equal,
        "near_ties": len(answers) - equal - different,
        "different": different,
        "most_running": [max(engine.stats.running) for engine in (pair.first, pair.second)],
        "seconds": spent_s,
        "left": len(list((directory / "edges").iterdir())),
    }
