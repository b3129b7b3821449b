"""What a stage's runner uses, in one import: the facade, its typed hooks, and the values that it gives and takes."""

from omni_fsm.adapters.runner import AcceptAll, Generations, StageRunnerAdapter
from omni_fsm.connectors import Hello, memory_pair, shm_receiver, shm_sender
from omni_fsm.protocol import Cause, Edge, Identity, LocalProtocolError, Outcome
from omni_fsm.runtime import (
    Admission,
    Failure,
    Feedback,
    Later,
    Observer,
    Offer,
    Producer,
    ProducerContext,
    Refuse,
    Register,
    StageConfig,
    StageHost,
    Taken,
    TakenKind,
    Transition,
    on_sigterm,
)
from omni_fsm.state import Scope, StateView

__all__ = [
    "AcceptAll",
    "Admission",
    "Cause",
    "Edge",
    "Failure",
    "Feedback",
    "Generations",
    "Hello",
    "Identity",
    "Later",
    "LocalProtocolError",
    "Observer",
    "Offer",
    "Outcome",
    "Producer",
    "ProducerContext",
    "Refuse",
    "Register",
    "Scope",
    "StageConfig",
    "StageHost",
    "StageRunnerAdapter",
    "StateView",
    "Taken",
    "TakenKind",
    "Transition",
    "memory_pair",
    "on_sigterm",
    "shm_receiver",
    "shm_sender",
]
