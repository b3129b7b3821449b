"""The thinker as a vLLM engine, in a process of its own: ``omni-fsm demo --engine vllm``.

The same weights, in fp32 and greedily, so it says what the thinker on torch says. The questions are batched by the engine.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from omni_fsm.adapters.aio import SegmentEnd
from omni_fsm.connectors import Ends
from omni_fsm.demo.faults import CANCEL_AFTER_CHUNKS, RAISE_AT_CHUNK, At, Faults
from omni_fsm.demo.models import ENGINE_EXIT_S, require_vllm
from omni_fsm.demo.models_convert import thinker_dir
from omni_fsm.demo.record import Record
from omni_fsm.demo.text import TextPieces
from omni_fsm.demo.thinker_model import END_ID, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, Chat
from omni_fsm.runtime import StageConfig

_STAGE = "thinker"


class EngineThinker:
    """Question in, text out, a token a payload.

    Args:
        config: Settings of the stage's runtime.
        ends: The stage's ends of its two edges.
        faults: What to break.

    Raises:
        MissingPackageError: vLLM is not installed.
    """

    def __init__(self, config: StageConfig, ends: Ends, faults: Faults) -> None:
        require_vllm()
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - takes seconds, and reads the environment
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        from omni_fsm.adapters.vllm import EngineStage  # noqa: PLC0415

        path = thinker_dir()
        self.faults = faults
        self.record = Record()
        self.foreign_frames = 0
        self.stopping = threading.Event()
        self.chat = Chat(path)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(path),
                dtype="float32",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS,
                max_num_seqs=8,
                disable_log_stats=True,
            )
        )
        if ends.source is None:
            raise AssertionError(ends)
        self.stage = EngineStage(
            self.engine, config, self.think, source=ends.source, sink=ends.sink, observers=[self.record]
        )
        self.adapter = self.stage.adapter

    def run(self) -> None:
        """Serve until `stopping` is set. Called by: the main thread of the stage's process."""
        try:
            asyncio.run(self._serve())
        finally:
            self.engine.shutdown(timeout=ENGINE_EXIT_S)

    async def _serve(self) -> None:
        serving = asyncio.create_task(self.stage.serve())
        await asyncio.to_thread(self.stopping.wait)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def think(self, request: Any) -> AsyncIterator[Any]:
        """What a request does: each question of it is answered, before the next is looked at."""
        submitted = 0
        async for taken in request.frames():
            if taken.payload is None:
                if taken.segment_end:
                    yield SegmentEnd()
                continue
            prompt = taken.payload
            self.foreign_frames += prompt["generation"] != request.identity.generation
            told = {key: prompt[key] for key in ("index", "seed", "generation")}
            async for step in self._answer(request, prompt["question"], prompt["max_new_tokens"]):
                submitted += 1
                self._break(request, prompt["index"], submitted)
                token = {"piece": step.piece, "token_id": step.token_id, **told}
                yield SegmentEnd(token) if step.finished and taken.segment_end else token

    async def _answer(self, request: Any, question: str, max_new_tokens: int) -> AsyncIterator[Any]:
        """The steps of one answer."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        pieces = TextPieces()
        prompt = {"prompt_token_ids": self.chat.prompt(question, max_new_tokens)}
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            ignore_eos=True,  # the model's own end is END_ID
            stop_token_ids=[END_ID],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.record.forward_begun(request.identity)
        async for output in request.generate(prompt, greedy):
            ids = output.outputs[0].token_ids
            for at, token_id in enumerate(ids):
                yield self.chat.step(pieces, token_id, finished=output.finished and at == len(ids) - 1)

    def _break(self, request: Any, index: int, submitted: int) -> None:
        """The faults that are the thinker's to make."""
        if self.faults.raise_at == At(_STAGE, index) and submitted == RAISE_AT_CHUNK:
            raise RuntimeError(f"the {_STAGE} cannot go on with request {index}")
        if self.faults.cancel_at == At(_STAGE, index) and submitted > CANCEL_AFTER_CHUNKS[_STAGE]:
            self.adapter.cancel(request.internal_id, f"{_STAGE} cancels request {index}")

    def residue(self) -> dict[str, int]:
        """What the stage holds, by table."""
        return {**self.adapter.residue(), "engine.requests": self.stage.num_requests}

    def report(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}
