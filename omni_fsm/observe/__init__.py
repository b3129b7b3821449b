"""Observers of what happens in a stage: they read events and change nothing."""

from omni_fsm.observe.logs import LogObserver

__all__ = ["LogObserver"]
