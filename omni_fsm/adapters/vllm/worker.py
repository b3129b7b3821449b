"""The worker of an engine that is a stage: ``worker_cls="omni_fsm.adapters.vllm.worker.StageWorker"``."""

from typing import Any

from vllm.platforms import current_platform

from omni_fsm.adapters.vllm.states import StatesLayer


def _platform_worker() -> Any:
    """The worker that vLLM has for this machine, which is what it takes for ``worker_cls="auto"``."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415 - it changes torch for machines without a GPU

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - see above

    return Worker


class StageWorker(StatesLayer, _platform_worker()):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's CPU or GPU worker; its steps bring the states of the pipeline's requests. See `StatesLayer`."""
