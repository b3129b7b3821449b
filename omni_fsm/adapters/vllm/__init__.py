"""vLLM engines as stages. Needs vLLM: the extra ``vllm``, or ``make setup-vllm`` in a checkout.

`EngineStage` is for those who want vLLM's public API alone. The layers inside an engine are installed by their names, and start
with it: ``scheduler.StageScheduler`` and ``worker.StageWorker``.
"""

from omni_fsm.adapters.vllm.engine_stage import EngineRequest, EngineRequestError, EngineStage

__all__ = ["EngineRequest", "EngineRequestError", "EngineStage"]
