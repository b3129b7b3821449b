"""A stage around a vLLM engine, by its public API: frames in, payloads out, cancels and errors both ways."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from omni_fsm.adapters.aio import AsyncStage, StageRequest
from omni_fsm.adapters.runner import StageRunnerAdapter
from omni_fsm.adapters.vllm.prompt import checked_token_ids
from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Observer, Producer, StageConfig, passthrough

_BROKEN_OFF = frozenset({"abort", "error"})


class EngineRequestError(OmniFsmError):
    """The engine broke a request off by itself.

    Attributes:
        finish_reason: vLLM's word for it.
    """

    def __init__(self, identity: Identity, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        super().__init__(f"the engine ended {identity} with finish reason {finish_reason}")


class UpdatesCancelledError(OmniFsmError):
    """The updates of a prompt that grows raised CancelledError of their own, which vLLM would take for its own."""


class _Session:
    """A prompt that grows. Each update is handed on once the one before is answered: only then is its length known.

    Attributes:
        prompt: What vLLM reads, in a task of its own.
    """

    def __init__(self, engine: AsyncLLM, updates: AsyncGenerator[StreamingInput, None]) -> None:
        self.prompt: Any = self._read()
        self._engine, self._updates = engine, updates
        self._length = 0
        self._answered, self._over = asyncio.Event(), asyncio.Event()

    def check(self, asked: SamplingParams | None) -> None:
        """Refuse what vLLM accepts and cannot do, or what hides how much was said."""
        if self._engine.vllm_config.speculative_config is not None:
            wrong = "one prompt: with speculative decoding vLLM counts accepted drafts as a part of the next update"
            raise ConfigError("prompt", self._updates, wrong)
        if asked is not None and asked.output_kind is not RequestOutputKind.DELTA:
            raise ConfigError("output_kind", asked.output_kind, "DELTA, where the prompt grows")

    def hear(self, output: RequestOutput) -> None:
        """Count what is said; the end of an answer lets the next update go."""
        for completion in output.outputs:
            self._length += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._length -= 1  # the last token is discarded
                self._answered.set()

    async def aclose(self) -> None:
        """Close the caller's generator; vLLM's task has ended, was cancelled, or never began to read."""
        if self.prompt.ag_running:
            await self._over.wait()
        await self.prompt.aclose()
        await self._updates.aclose()

    async def _read(self) -> AsyncGenerator[StreamingInput, None]:
        """The updates, checked for what vLLM does not check: its worker dies of too many tokens, and it answers none."""
        try:
            async with contextlib.aclosing(self._updates):
                async for update in self._updates:
                    self._count(update)
                    self._answered.clear()
                    yield update
                    await self._answered.wait()
            if not self._length:
                raise ConfigError("prompt", self._updates, "one update or more")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UpdatesCancelledError("CancelledError: inside the updates") from error
        finally:
            self._over.set()

    def _count(self, update: StreamingInput) -> None:
        self.check(update.sampling_params)
        model_config = self._engine.model_config
        token_ids = _token_ids(update.prompt, model_config) if isinstance(update.prompt, dict) else None
        if not token_ids:
            raise ConfigError("prompt", update.prompt, "updates of one token id or more")
        self._length += len(token_ids)
        if self._length >= model_config.max_model_len:
            wrong = f"fewer tokens than {model_config.max_model_len}, answers included"
            raise ConfigError("prompt", self._length, wrong)


def _token_ids(prompt: Any, model_config: Any) -> list[int]:
    """The token ids of a prompt, checked; none of a prompt that is text or embeddings, which vLLM checks."""
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt if isinstance(prompt, list) else None
    return checked_token_ids(given, model_config) if given is not None else []


class EngineRequest(StageRequest):
    """One life of a request, with the engine of its stage."""

    def __init__(self, engine: AsyncLLM, adapter: StageRunnerAdapter, internal_id: str, identity: Identity) -> None:
        super().__init__(adapter, internal_id, identity)
        self._engine = engine
        self._numbers = itertools.count()

    async def generate(self, prompt: Any, sampling_params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Let the engine answer a prompt; a request may have several, one after the other.

        When the request ends early, or the caller stops listening, vLLM aborts what it computes for it and frees its blocks.

        A prompt may grow: as an async generator of vLLM's ``StreamingInput``, each with token ids. Each update is answered
        before the next is taken. The engine keeps what was said, but for the last token of each answer: the next update
        takes its place. Each answer has its own ``finish_reason``, and no output need say that it is finished. While the
        request waits for an update it keeps its blocks, and one of ``max_num_seqs`` places. Refused are embeddings, more
        tokens than the model's length, speculative decoding, ``n > 1``, strings to stop at, outputs other than ``DELTA``.

        Args:
            prompt: vLLM's ``PromptType``: text, token ids, embeddings; or a generator of updates, which is closed.
            sampling_params: vLLM's. With ``output_kind=RequestOutputKind.DELTA`` each output brings what is new. An update
                may bring its own.

        Yields:
            vLLM's outputs, in order; the last answer to a prompt that does not grow is finished.

        Raises:
            EngineRequestError: The engine broke it off.
            PromptError: Token ids that are none of the model's.
            ConfigError: A prompt that grows cannot be used.
            UpdatesCancelledError: Its updates were cancelled, but nobody cancelled the request.
            Exception: What vLLM raises, such as ``EngineDeadError`` when its process is gone; what the updates raise.
        """
        _token_ids(prompt, self._engine.model_config)
        name = f"{self.internal_id}/{next(self._numbers)}"
        session = _Session(self._engine, prompt) if isinstance(prompt, AsyncGenerator) else None
        outputs = self._engine.generate(prompt if session is None else session.prompt, sampling_params, name)
        try:
            if session is not None:
                session.check(sampling_params)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._check(output)
                    if session is not None:
                        session.hear(output)
                    yield output
        except BaseException:
            try:
                if session is not None:
                    await session.aclose()
            finally:
                await self._engine.abort(name)  # vLLM does not, where it was still submitting the request, or an update
            raise

    def _check(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            if completion.finish_reason in _BROKEN_OFF:
                raise EngineRequestError(self.identity, str(completion.finish_reason))


EngineWork = Callable[[EngineRequest], AsyncIterator[Any]]
"""What a stage around an engine does with a request; see `omni_fsm.adapters.aio.Work`."""


class EngineStage(AsyncStage):
    """A stage whose requests have a vLLM engine at hand.

    Args:
        engine: Borrowed: the caller shuts it down, after the stage.
        config: The stage's settings.
        work: What it does with each request, such as to gather its frames to a prompt and to yield what is generated.
        source: See `AsyncStage`, as the others.
        sink: See there.
        producer: See there.
        observers: See there.
    """

    def __init__(  # noqa: PLR0913 - the ports of a stage
        self,
        engine: AsyncLLM,
        config: StageConfig,
        work: EngineWork,
        *,
        source: Connector,
        sink: Connector | None = None,
        producer: Producer = passthrough,
        observers: Iterable[Observer] = (),
    ) -> None:
        super().__init__(config, work, source=source, sink=sink, producer=producer, observers=observers)
        self.engine = engine

    def _request(self, internal_id: str, identity: Identity) -> EngineRequest:
        return EngineRequest(self.engine, self.adapter, internal_id, identity)
