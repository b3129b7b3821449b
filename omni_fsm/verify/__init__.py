"""Exploration of the real halves: every interleaving of a small world, with faults, and the shortest path to what breaks."""

from omni_fsm.verify.explore import Action, Found, Step, Violation, World, explore
from omni_fsm.verify.pipeline import PipelineScope, PipelineWorld
from omni_fsm.verify.world import EdgeWorld, Scope

__all__ = [
    "Action",
    "EdgeWorld",
    "Found",
    "PipelineScope",
    "PipelineWorld",
    "Scope",
    "Step",
    "Violation",
    "World",
    "explore",
]
