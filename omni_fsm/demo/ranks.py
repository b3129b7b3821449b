"""Code2wav on several ranks: all of them take the same frames in the same cycle and compute the same sound; one sends it.

The loop is that of any stage that is split along an axis such as TP: ``begin_cycle``, compute what was taken, submit, end. What
the model keeps of a request is each rank's own, and what it raises it raises on every rank.
"""

import logging
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.adapters.ranks import RankedStage, TorchGroup
from omni_fsm.demo.faults import CANCEL_AFTER_CHUNKS, RAISE_AT_CHUNK, At, Faults
from omni_fsm.demo.record import Record
from omni_fsm.demo.talker_model import no_frames
from omni_fsm.demo.vocoder import Vocoder
from omni_fsm.demo.wav import Pcm
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime import Taken, TakenKind
from omni_fsm.runtime.ranks import CycleInput, RankLostError

IDLE_S = 0.2
GROUP_TIMEOUT_S = 60.0
"""The longest that a rank waits for another; one that is killed is noticed at once."""

_STAGE = "code2wav"
_log = logging.getLogger("omni_fsm.demo")


def join_ranks(meeting: str, rank: int, ranks: int) -> TorchGroup:
    """Meet the other ranks; returns when all are there.

    Args:
        meeting: A file that all of them can write, and that none has written before.
        rank: This process's, from 0, which leads.
        ranks: How many there are.
    """
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timeout)
    return TorchGroup.split([list(range(ranks))], GROUP_TIMEOUT_S)


@dataclass(slots=True)
class Spoken:
    """What one rank keeps of a request.

    Attributes:
        identity: External id and generation.
        index: Its place among the requests, from 0; -1 before its first chunk.
        seed: Of its question's noise.
        turn: Number of the turn, from 1; 0 before the first.
        vocoder: Of the turn that goes on; None between turns.
        computed: How often the model ran for it.
        submitted: How many chunks were submitted.
    """

    identity: Identity
    index: int = -1
    seed: int = 0
    turn: int = 0
    vocoder: Vocoder | None = None
    computed: int = 0
    submitted: int = 0


@dataclass(slots=True)
class Consumed:
    """What one rank has consumed and computed, over all requests, for the report at the end."""

    frames: int = 0
    samples: int = 0
    digest: Any = field(default_factory=sha256)

    def add(self, identity: Identity, frames: Any, pcm: Pcm) -> None:
        """One run of the model."""
        self.frames += len(frames)
        self.samples += len(pcm)
        self.digest.update(f"{identity} {len(frames)} {len(pcm)}".encode() + frames.tobytes() + pcm.tobytes())

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {"frames": self.frames, "samples": self.samples, "sha256": self.digest.hexdigest()}


class Code2WavRank:
    """One rank of code2wav.

    Args:
        group: The ranks.
        edge: The stage's input edge.
        faults: What to break.
        record: Of the leading rank's stage.
        adapter: The stage, on the leading rank; None on the others.
    """

    def __init__(
        self, group: TorchGroup, edge: Edge, faults: Faults, record: Record, adapter: StageRunnerAdapter | None
    ) -> None:
        self.stage = RankedStage([group], edge, adapter.runtime if adapter is not None else None)
        self.group = group
        self.faults = faults
        self.record = record
        self.adapter = adapter
        self.foreign_frames = 0
        self.consumed = Consumed()
        self.requests: dict[str, Spoken] = {}
        self.stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stopping` is set. Called by: the main thread of each rank's process."""
        while not self.stopping.is_set():
            try:
                self.cycle(self.stage.begin_cycle(wait_s=IDLE_S))
            except RankLostError as error:  # every request has failed, and nobody starts these ranks anew
                _log.debug("%s: %s", _STAGE, error)
                self.stopping.wait(IDLE_S)
        self.group.close()

    def cycle(self, cycle: CycleInput) -> None:
        """Do the work of one cycle."""
        told = cycle.feedback
        for internal_id, identity in told.registered.items():
            self.requests[internal_id] = Spoken(identity)
        for internal_id, reasons in cycle.refused.items():
            self.stage.fail(internal_id, reasons[0])  # what was offered is not out, and the answer would not be whole
        for internal_id in (*told.failed, *cycle.refused):
            self.drop(internal_id)
        for internal_id, frames in cycle.taken.items():
            for taken in frames:
                if internal_id in self.requests:
                    self.contained(internal_id, taken)

    def contained(self, internal_id: str, taken: Taken) -> None:
        """Work on one frame; what the model raises ends its request and no other."""
        try:
            self.work(internal_id, self.requests[internal_id], taken)
        except Exception as error:  # noqa: BLE001 - becomes an event: the request fails, all others are served on
            _log.debug("%s: the model raised for %s", _STAGE, internal_id, exc_info=error)
            self.stage.fail(internal_id, f"{type(error).__name__}: {error}")
            self.drop(internal_id)

    def work(self, internal_id: str, spoken: Spoken, taken: Taken) -> None:
        """Compute the sound of one frame and pass it on."""
        payload: dict[str, Any] = taken.payload or {}
        if payload:
            self.foreign_frames += payload["generation"] != spoken.identity.generation
            spoken.index, spoken.seed = payload["index"], payload["seed"]
        is_end = taken.kind is TakenKind.END
        if is_end and not payload and spoken.turn and spoken.vocoder is None:
            output = None  # the end after a segment's end: no turn of its own
        else:
            output = self.compute(spoken, payload, last=is_end or taken.segment_end)
        if is_end:
            self.stage.end(internal_id, output)
            del self.requests[internal_id]
        else:
            self.stage.submit_chunk(internal_id, output, segment_end=taken.segment_end)
            spoken.submitted += 1
            self._cancel_as_asked(internal_id, spoken)

    def compute(self, spoken: Spoken, payload: dict[str, Any], *, last: bool) -> dict[str, Any]:
        """The model: acoustic frames of one turn to sound, PCM int16 ``[samples]``, 24 kHz.

        Args:
            spoken: The request.
            payload: The talker's: ``frames`` float32 ``[n, 3006]`` or None, ``text``.
            last: Whether the turn ends with it.
        """
        self.record.forward_begun(spoken.identity)
        spoken.computed += 1
        if self.faults.raise_at == At(_STAGE, spoken.index) and spoken.computed == RAISE_AT_CHUNK:
            raise RuntimeError(f"the {_STAGE} cannot go on with request {spoken.index}")
        if spoken.vocoder is None:
            spoken.turn += 1
            spoken.vocoder = Vocoder(spoken.seed)
        came = payload.get("frames")
        frames = no_frames() if came is None else came
        pcm = spoken.vocoder.push(frames, last=last)
        self.consumed.add(spoken.identity, frames, pcm)
        if last:
            spoken.vocoder = None
        return {
            "text": payload.get("text", ""),
            "pcm": pcm,
            "turn": spoken.turn,
            "index": spoken.index,
            "seed": spoken.seed,
            "generation": spoken.identity.generation,
        }

    def _cancel_as_asked(self, internal_id: str, spoken: Spoken) -> None:
        if self.faults.cancel_at == At(_STAGE, spoken.index) and spoken.submitted == CANCEL_AFTER_CHUNKS[_STAGE]:
            self.stage.cancel(internal_id, f"{_STAGE} cancels request {spoken.index}")
            self.drop(internal_id)

    def drop(self, internal_id: str) -> None:
        """Forget a request that ends early."""
        self.requests.pop(internal_id, None)
        self.stage.release(internal_id)

    def residue(self) -> dict[str, int]:
        """What this rank holds, by table."""
        return {**self.stage.residue(), "rank.requests": len(self.requests)}

    def report(self) -> dict[str, Any]:
        """What this rank alone has to tell."""
        return {"consumed": self.consumed.report()}
