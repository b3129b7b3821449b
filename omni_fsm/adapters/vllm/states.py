"""The states that a step computed, on their way from the model runner to the scheduler, and the layer that takes them.

vLLM runs its worker in the engine-core process or in processes of its own; on a CPU always in one of its own. So the worker
does not talk to the stage: the states travel with vLLM's own ``ModelRunnerOutput``, and the scheduler, which knows what becomes
of each request, hands them on.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from omni_fsm.adapters.vllm.stage import KEY, settings_of
from omni_fsm.protocol.errors import ConfigError

States = dict[str, torch.Tensor]
"""By vLLM's request id: ``[tokens, hidden]`` of the tokens that the step computed, in the model's dtype, on the CPU."""

_ATTRIBUTE = "omni_fsm_states"


def states_of(output: Any) -> States:
    """The states that a runner's output brings. Called by: the scheduler layer; they are the caller's."""
    states: States = getattr(output, _ATTRIBUTE, {})
    return states


class Steps:
    """What some steps of one request gave. Its length is their number."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._rows: list[torch.Tensor] = []

    def add(self, token_ids: Iterable[int], rows: torch.Tensor) -> None:
        """Append a step: what it sampled, and ``[tokens, hidden]`` of what it computed for the first time."""
        self._token_ids += token_ids
        self._rows.append(rows)

    def take(self) -> dict[str, Any] | None:
        """All of it as one output for the producer, and nothing is left; None if there is nothing."""
        if not self._rows:
            return None
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        taken = {"token_ids": self._token_ids, "hidden": rows}
        self._token_ids, self._rows = [], []
        return taken

    def __len__(self) -> int:
        return len(self._rows)


def check_worker(worker_cls: str) -> None:
    """Refuse a worker that brings no states. Called by: the scheduler layer of a stage that sends, at start.

    Raises:
        ConfigError: It is no `StatesLayer`.
    """
    if not issubclass(resolve_obj_by_qualname(worker_cls), StatesLayer):
        raise ConfigError("worker_cls", worker_cls, "omni_fsm.adapters.vllm.worker.StageWorker, in a stage that sends")


class StatesLayer(WorkerBase):  # type: ignore[misc] # vLLM is not typed here
    """A layer over one of vLLM's workers: adds the states of the pipeline's requests to what a step returns.

    They are taken between the forward pass and the sampling, when the model runner holds them. Nothing is taken in an engine
    without an output edge; with tensor parallelism one rank takes them, that whose output vLLM returns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._takes = settings_of(self.vllm_config).sends and self.is_driver_worker
        self._ours: set[str] = set()
        self._lengths: dict[str, int] = {}

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's worker. Notes which requests of the step belong to the pipeline."""
        if self._takes:
            self._ours -= scheduler_output.finished_req_ids
            self._ours |= {new.req_id for new in scheduler_output.scheduled_new_reqs if _is_ours(new.sampling_params)}
            self._lengths = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM's worker. What it returns brings the states as well."""
        gathered = self._gathered()
        output = super().sample_tokens(grammar_output)
        if gathered is None:
            return output
        return _Both(output, gathered) if isinstance(output, AsyncModelRunnerOutput) else _joined(output, gathered)

    def _gathered(self) -> "_Gathered | None":
        """The rows of the pipeline's requests, copied: the next step may overwrite the batch."""
        step = self.model_runner.execute_model_state
        if step is None or not self._ours:
            return None
        keeper = step if hasattr(step, "input_batch") else self.model_runner  # the former with model runner V2
        names = list(keeper.input_batch.req_ids)
        lengths = [self._lengths[name] for name in names]
        parts = zip(names, torch.split(step.hidden_states[: sum(lengths)], lengths), strict=True)
        ours = {name: rows for name, rows in parts if name in self._ours}
        return _Gathered([*ours], [*map(len, ours.values())], torch.cat([*ours.values()])) if ours else None


class _Gathered:
    """Rows of several requests, one behind the other, on their way to the CPU.

    From a GPU they are copied into pinned memory on a stream of their own, beside the sampling and, with async scheduling, the
    next step; `by_request` waits for the copy.

    Args:
        names: vLLM's ids of the requests.
        lengths: How many rows each has.
        rows: ``[sum of lengths, hidden]``, on the model's device. Held until they are copied.
    """

    def __init__(self, names: list[str], lengths: list[int], rows: torch.Tensor) -> None:
        self._names, self._lengths, self._rows = names, lengths, rows
        self._copied: torch.cuda.Event | None = None
        self._on_cpu = rows
        if rows.is_cuda:
            self._on_cpu = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            stream = _copy_stream(rows.device)
            stream.wait_stream(torch.cuda.current_stream(rows.device))
            with torch.cuda.stream(stream):
                self._on_cpu.copy_(rows, non_blocking=True)
                self._copied = stream.record_event()

    def by_request(self) -> States:
        """Each request's rows in memory of their own: they may be kept for as long as the request lives."""
        if self._copied is not None:
            self._copied.synchronize()
        parts = torch.split(self._on_cpu, self._lengths)
        return {name: rows.clone() for name, rows in zip(self._names, parts, strict=True)}


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process for copies from a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch is not typed here


class _Both(AsyncModelRunnerOutput):  # type: ignore[misc] # vLLM is not typed here
    """An output that is still being copied from the device, and states that are, too."""

    def __init__(self, output: Any, gathered: _Gathered) -> None:
        self._output, self._gathered = output, gathered

    def get_output(self) -> Any:
        """See vLLM. Blocks until both are on the CPU."""
        return _joined(self._output.get_output(), self._gathered)

    def get_kv_connector_output(self) -> Any:
        """See vLLM, which asks for it from 0.33 on."""
        return self._output.get_kv_connector_output()


def _is_ours(sampling_params: Any) -> bool:
    return sampling_params is not None and KEY in (sampling_params.extra_args or ())


def _joined(output: Any, gathered: _Gathered) -> Any:
    """The output, with the states of its step."""
    setattr(output, _ATTRIBUTE, gathered.by_request())
    return output
