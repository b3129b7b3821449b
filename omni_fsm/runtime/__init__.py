"""A stage's runtime: one lock, the tables of its requests, outbox and inbox, deadlines, cleanup, threads."""

from omni_fsm.runtime.config import StageConfig
from omni_fsm.runtime.feedback import Admission, Feedback, Taken, TakenKind
from omni_fsm.runtime.ports import (
    Clock,
    Failure,
    Later,
    Observer,
    Offer,
    Producer,
    ProducerContext,
    Refuse,
    Register,
    StageHost,
    Transition,
    Wakeups,
    passthrough,
)
from omni_fsm.runtime.stage import StageRuntime
from omni_fsm.runtime.threads import StageThreads, on_sigterm

__all__ = [
    "Admission",
    "Clock",
    "Failure",
    "Feedback",
    "Later",
    "Observer",
    "Offer",
    "Producer",
    "ProducerContext",
    "Refuse",
    "Register",
    "StageConfig",
    "StageHost",
    "StageRuntime",
    "StageThreads",
    "Taken",
    "TakenKind",
    "Transition",
    "Wakeups",
    "on_sigterm",
    "passthrough",
]
