"""Request-scoped producer state: namespaced, fenced by ownership of the generation, released as a whole."""

from omni_fsm.state.store import (
    MixedStateError,
    Owner,
    RawPayloads,
    Scope,
    StateError,
    StateRetiredError,
    StateStore,
    StateView,
)

__all__ = [
    "MixedStateError",
    "Owner",
    "RawPayloads",
    "Scope",
    "StateError",
    "StateRetiredError",
    "StateStore",
    "StateView",
]
