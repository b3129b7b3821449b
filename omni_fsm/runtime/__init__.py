"""A stage's runtime: one lock, the tables of its requests, outbox and inbox, deadlines, cleanup, threads."""

from omni_fsm.runtime.config import StageConfig
from omni_fsm.runtime.feedback import Admission, Feedback, Standing, Taken, TakenKind
from omni_fsm.runtime.kv import BlockHolds, KvDirection, KvJob, KvManager, KvReport, KvTransfers
from omni_fsm.runtime.kv_blocks import KvBlockReceiver, KvBlockSender, PagedKvCache
from omni_fsm.runtime.lifecycle import Lifecycle
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
from omni_fsm.runtime.ranks import CycleInput, RankEvent, RankEventKind, RankListError, RankLostError
from omni_fsm.runtime.stage import StageRuntime
from omni_fsm.runtime.steps import StageSteps
from omni_fsm.runtime.threads import StageThreads, on_sigterm

__all__ = [
    "Admission",
    "BlockHolds",
    "Clock",
    "CycleInput",
    "Failure",
    "Feedback",
    "KvBlockReceiver",
    "KvBlockSender",
    "KvDirection",
    "KvJob",
    "KvManager",
    "KvReport",
    "KvTransfers",
    "Later",
    "Lifecycle",
    "Observer",
    "Offer",
    "PagedKvCache",
    "Producer",
    "ProducerContext",
    "RankEvent",
    "RankEventKind",
    "RankListError",
    "RankLostError",
    "Refuse",
    "Register",
    "StageConfig",
    "StageHost",
    "StageRuntime",
    "StageSteps",
    "StageThreads",
    "Standing",
    "Taken",
    "TakenKind",
    "Transition",
    "Wakeups",
    "on_sigterm",
    "passthrough",
]
