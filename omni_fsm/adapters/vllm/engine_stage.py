"""A stage around a vLLM engine, by its public API: frames in, payloads out, cancels and errors both ways."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from omni_fsm.adapters.aio import AsyncStage, StageRequest
from omni_fsm.adapters.runner import StageRunnerAdapter
from omni_fsm.connectors.port import Connector
from omni_fsm.protocol.errors import OmniFsmError
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


class EngineRequest(StageRequest):
    """One life of a request, with the engine of its stage."""

    def __init__(self, engine: AsyncLLM, adapter: StageRunnerAdapter, internal_id: str, identity: Identity) -> None:
        super().__init__(adapter, internal_id, identity)
        self._engine = engine
        self._numbers = itertools.count()

    async def generate(self, prompt: Any, sampling_params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Let the engine answer a prompt; a request may have several, one after the other.

        When the request ends early, or the caller stops listening, vLLM aborts what it computes for it and frees its blocks.

        Args:
            prompt: vLLM's ``PromptType``: text, token ids, embeddings.
            sampling_params: vLLM's. With ``output_kind=RequestOutputKind.DELTA`` each output brings what is new.

        Yields:
            vLLM's outputs, in order; the last is finished.

        Raises:
            EngineRequestError: The engine broke it off.
            Exception: What vLLM raises, such as ``EngineDeadError`` when its process is gone.
        """
        outputs = self._engine.generate(prompt, sampling_params, f"{self.internal_id}/{next(self._numbers)}")
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    if completion.finish_reason in _BROKEN_OFF:
                        raise EngineRequestError(self.identity, str(completion.finish_reason))
                yield output


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
