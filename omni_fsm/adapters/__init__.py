"""What a stage's runner uses: the facade and its typed hooks."""

from omni_fsm.adapters.runner import AcceptAll, Generations, StageRunnerAdapter

__all__ = ["AcceptAll", "Generations", "StageRunnerAdapter"]
