"""A stage on several ranks: one of them talks to the connector, all of them take the same steps in the same cycle.

Everything goes one way, from the leading rank to the others, once a cycle. So a rank never waits for a report of another.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from omni_fsm.payload import EncodedPayload, decode, encode
from omni_fsm.payload.wire import DEFAULT_LIMITS, TORCH_DTYPES
from omni_fsm.protocol.errors import ConfigError, LocalProtocolError, OmniFsmError
from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.identity import MAX_EXTERNAL_ID_BYTES, Edge, Identity, checked_text
from omni_fsm.runtime.feedback import ACCEPTED, Admission, Feedback, Standing, Taken, TakenKind
from omni_fsm.runtime.ranks import (
    CycleInput,
    Listing,
    RankEvent,
    RankEventKind,
    RankList,
    RankListError,
    RankLostError,
    RankReceivers,
    decode_list,
    encode_list,
    list_cycle,
    said,
)
from omni_fsm.runtime.stage import StageRuntime

_HEAD_NBYTES = 1_024
"""What the first broadcast of an object brings: its size, and all of it if it fits, as the list of a usual cycle does."""
_SIZE_NBYTES = 8
_SHOWN_ERROR_CHARS = 300

Wants = Callable[[str], int]
"""How many frames to take of a request in this cycle, at most, by its internal id; called on the leading rank alone."""


class Group(Protocol):
    """Ranks that broadcast to each other, as vLLM's group coordinator offers it. Blocking calls, each made by all members.

    A call must end: what raises or times out is a lost rank. The group is used by one `RankedStage` and nobody else.
    """

    @property
    def rank_in_group(self) -> int:
        """This rank's place, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Give ``obj``, plain data, of rank ``src`` to all."""

    def broadcast_tensor_dict(
        self, tensor_dict: dict[str, torch.Tensor] | None = None, src: int = 0
    ) -> dict[str, torch.Tensor] | None:
        """Give the tensors of rank ``src`` to all."""


@runtime_checkable
class ClosableGroup(Group, Protocol):
    """A group that can be left for good, so that ranks that wait in it notice at once and not only at their time-out."""

    def close(self) -> None:
        """Leave it. Idempotent, does not block."""


class GroupLostError(OmniFsmError):
    """A broadcast failed or timed out; this rank has left the group."""


class TorchGroup:
    """A group over a process group of torch.distributed on the CPU. Nothing that it receives is unpickled.

    Args:
        process_group: Of its own, with a time-out, which bounds every wait; owned from here on.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group: dist.ProcessGroup | None = process_group
        self._rank, self._world_size = process_group.rank(), process_group.size()

    @classmethod
    def split(cls, layout: Sequence[Sequence[int]], timeout_s: float) -> "TorchGroup":
        """Make the groups along one axis, such as ``[[0, 1], [2, 3]]``, and give this rank's.

        Called by: every rank of the world, with the same layouts in the same order.

        Args:
            layout: Ranks of the world, by group; the first of each leads it.
            timeout_s: The longest that a broadcast waits for the others, in seconds: longer than any cycle.

        Raises:
            ConfigError: This rank is in none of them.
        """
        mine: dist.ProcessGroup | None = None
        timeout = timedelta(seconds=timeout_s)
        for ranks in layout:
            made = dist.new_group(list(ranks), timeout=timeout, backend="gloo", sort_ranks=False)
            mine = made if dist.get_rank() in ranks else mine
        if mine is None:
            raise ConfigError("layout", layout, f"groups of which one has rank {dist.get_rank()}")
        return cls(mine)

    @property
    def rank_in_group(self) -> int:
        """See `Group`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See `Group`."""
        return self._world_size

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Give a payload tree to all; see `Group`.

        Raises:
            GroupLostError: See there.
            PayloadDecodeError: What came is no payload tree.
        """
        if self._rank == src:
            self._broadcast_bytes(_gathered(encode(obj)), src)
            return obj
        return decode(self._broadcast_bytes(None, src).numpy().data)

    def broadcast_tensor_dict(
        self, tensor_dict: dict[str, torch.Tensor] | None = None, src: int = 0
    ) -> dict[str, torch.Tensor] | None:
        """Give CPU tensors of any dtype and shape to all; see `Group`.

        Raises:
            GroupLostError: See there.
        """
        shapes = {key: [str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in (tensor_dict or {}).items()}
        shapes = self.broadcast_object(shapes, src)
        if self._rank == src:
            tensors = {key: tensor.contiguous() for key, tensor in (tensor_dict or {}).items()}
        else:
            tensors = {key: torch.empty(shape, dtype=TORCH_DTYPES[name]) for key, (name, shape) in shapes.items()}
        self._broadcast([tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel()], src)
        return tensor_dict if self._rank == src else tensors

    def _broadcast_bytes(self, octets: torch.Tensor | None, src: int) -> torch.Tensor:
        """One or two broadcasts: a head of a fixed size, then what did not fit."""
        room = _HEAD_NBYTES - _SIZE_NBYTES
        head = torch.zeros(_HEAD_NBYTES, dtype=torch.uint8)
        size = head[:_SIZE_NBYTES].view(torch.int64)
        if octets is not None:
            size[0] = octets.numel()
            head[_SIZE_NBYTES : _SIZE_NBYTES + octets.numel()] = octets[:room]
        self._broadcast([head], src)
        nbytes = int(size[0])
        if not 0 <= nbytes <= DEFAULT_LIMITS.max_frame_bytes:
            raise self._lost(f"an object of {nbytes} bytes was announced")
        if octets is None:
            octets = torch.empty(nbytes, dtype=torch.uint8)
            octets[:room] = head[_SIZE_NBYTES : _SIZE_NBYTES + nbytes]
        if nbytes > room:
            self._broadcast([octets[room:]], src)
        return octets

    def _broadcast(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        group = self._process_group
        if group is None:
            raise GroupLostError("this rank has left the group")
        works: list[Any] = []
        try:
            for tensor in tensors:
                works.append(dist.broadcast(tensor, group=group, group_src=src, async_op=True))  # noqa: PERF401 - see below
            for work in works:
                work.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the group cannot be used any more
            reason = f"{type(error).__name__}: {str(error)[:_SHOWN_ERROR_CHARS]}"
        else:
            return
        del group, works  # the sockets close with the last reference: the other ranks then wait no longer
        raise self._lost(reason)

    def _lost(self, reason: str) -> GroupLostError:
        self.close()
        return GroupLostError(f"broadcast on rank {self._rank} of {self._world_size}: {reason}")

    def close(self) -> None:
        """See `ClosableGroup`."""
        group, self._process_group = self._process_group, None
        if group is not None:
            with contextlib.suppress(ValueError):  # destroyed together with the default group
                dist.destroy_process_group(group)


def _gathered(encoded: EncodedPayload) -> torch.Tensor:
    """The bytes of a payload in one tensor: ``[nbytes]``, uint8, CPU, private."""
    gathered = torch.empty(encoded.nbytes, dtype=torch.uint8)
    view, at = gathered.numpy().data, 0
    for part in encoded.parts:
        view[at : at + part.nbytes] = part
        at += part.nbytes
    return gathered


class _Fanout:
    """The way from the leading rank to all others: along one axis after the other, so that each gets all exactly once."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.leads = all(group.rank_in_group == 0 for group in groups)
        self._steps = [
            group
            for n, group in enumerate(groups)
            if group.world_size > 1 and all(later.rank_in_group == 0 for later in groups[n + 1 :])
        ]

    def publish(self, listing: Listing) -> None:
        """Give a list and its payloads to the ranks next on the way."""
        published = listing.list
        packed, tensors = encode_list(published), None
        if self._steps and published.payload_sizes:
            tensors = {number: _gathered(encoded) for number, encoded in listing.encoded.items()}
        for group in self._steps:
            group.broadcast_object(packed)
            if tensors is not None:
                group.broadcast_tensor_dict(tensors)

    def receive(self, cycle: int) -> tuple[RankList, dict[int, Any]]:
        """Take a list and its payloads, and hand them on.

        Raises:
            RankListError: What came is no list, or its payloads are not what it announces.
            PayloadDecodeError: A payload cannot be decoded.
        """
        first, *others = self._steps
        packed = first.broadcast_object()
        published = decode_list(cycle, packed)
        sizes = published.payload_sizes
        tensors = first.broadcast_tensor_dict() if sizes else None
        for group in others:
            group.broadcast_object(packed)
            if tensors is not None:
                group.broadcast_tensor_dict(tensors)
        if sizes and (tensors is None or {key: tensor.nbytes for key, tensor in tensors.items()} != sizes):
            raise RankListError(cycle, None, "its payloads are not what it announces")
        payloads = {int(key): decode(tensor.numpy().data) for key, tensor in (tensors or {}).items()}
        return published, payloads


class RankedStage:
    """The input of a stage on one of its ranks; the same surface, and the same answers, on every rank.

    The runner's loop is the same everywhere: ``begin_cycle``, compute what was taken, ``submit_chunk``, ``end``, and
    ``release`` for what failed. On the leading rank these act on the real stage; on the others they do nothing but give the
    same answer. An answer rests on the published lists alone, so it may say ``accepted`` where the stage then refuses: that is
    in the next cycle's ``refused``, on every rank, and whatever was offered for that request after it in the same cycle
    is refused as well.

    ``begin_cycle``, ``register``, ``submit_chunk`` and ``end`` are called on the model thread, in the same cycle and order on
    every rank. ``cancel``, ``fail`` and ``release`` count where they are said on the leading rank, on any thread; the others
    learn it from the next list.

    Args:
        groups: One for each axis along which the stage is split, outermost first, such as TP and SP; none for one rank. The
            rank that leads all of them is the one with the connector.
        edge: The stage's input edge.
        runtime: The real stage, driven by its threads; on the leading rank, and nowhere else.

    Raises:
        ConfigError: ``runtime`` is missing or too much, or ``edge`` is not its input.
    """

    def __init__(self, groups: Sequence[Group], edge: Edge, runtime: StageRuntime | None = None) -> None:
        self._fanout = _Fanout(groups)
        if self._fanout.leads != (runtime is not None):
            raise ConfigError("runtime", runtime, "the stage on the rank that leads every group, None on the others")
        if runtime is not None and (runtime.source is None or runtime.source.edge != edge):
            raise ConfigError("edge", str(edge), "the input edge of the stage")
        self._groups = tuple(groups)
        self._runtime = runtime
        self._receivers = RankReceivers(edge)
        self._registering: dict[str, Identity] = {}  # by the host, until the next list
        self._ended: set[str] = set()  # by the host: it submits nothing more
        self._behind: set[str] = set()  # of whom a call of this cycle was refused: the later ones must not overtake it
        self._ready: dict[str, None] = {}  # of whom the last cycles took nothing yet
        self._said: deque[RankEvent] = deque()
        self._lost: RankLostError | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the connector."""
        return self._fanout.leads

    @property
    def lost(self) -> Cause | None:
        """Why no cycle can begin any more; None while it can."""
        return self._lost.cause if self._lost is not None else None

    # The cycle

    def begin_cycle(self, wants: Wants | None = None, wait_s: float = 0.0) -> CycleInput:
        """Take all that happened since the last cycle, the same on every rank. Waits for the other ranks.

        Called by: the model thread of every rank, once a cycle, also when there is nothing to do.

        Args:
            wants: Decides on the leading rank how many frames to take of a request; None: all. A request that got 0 is asked
                again in the next cycle.
            wait_s: How long the leading rank waits for something to happen, in seconds; shorter than the groups' time-out.

        Returns:
            The input. When a rank is lost: a failure of every open request, reason ``rank_lost: ...``.

        Raises:
            RankLostError: A rank is lost, and the failures were returned by an earlier call.
        """
        if self._lost is not None:
            if self._runtime is not None:
                self._runtime.collect_feedback()  # how the requests went out; nobody wants it any more
            raise RankLostError(self._lost.cause)
        try:
            return self._cycle(wants, wait_s)
        except Exception as error:  # noqa: BLE001 - a rank that did not get through a cycle is out of step for ever
            reason = f"rank_lost: {type(error).__name__}: {error}"
        return self._lose(Cause(Outcome.ERROR, reason, time.monotonic_ns()))

    def _cycle(self, wants: Wants | None, wait_s: float) -> CycleInput:
        runtime = self._runtime
        if runtime is not None:
            listing = self._list(runtime, wants, wait_s)
            self._fanout.publish(listing)
            published, payloads = listing.list, listing.payloads
        else:
            published, payloads = self._fanout.receive(self._receivers.cycle)
        self._receivers.apply(published)
        self._registering.clear()
        for event in published.events:
            if event.kind in (RankEventKind.OVER, RankEventKind.REFUSED):
                self._ended.discard(event.internal_id)
        return CycleInput(published.cycle, published.events, payloads)

    def _list(self, runtime: StageRuntime, wants: Wants | None, wait_s: float) -> Listing:
        """Collect on the leading rank. The order matters: what is over by now has all its feedback in this collection."""
        words = [self._said.popleft() for _ in range(len(self._said))]
        self._behind.clear()
        standings = runtime.standings(self._receivers.internal_ids)
        over = [internal_id for internal_id, standing in standings.items() if standing is Standing.UNKNOWN]
        told = runtime.collect_feedback(0.0 if words or over or self._ready else wait_s)
        taken = self._take(runtime, told, wants)
        over = [internal_id for internal_id in over if internal_id not in told.registered]
        if runtime.sink is None:
            over += [internal_id for internal_id, frame in taken if frame.kind is TakenKind.END]
        return list_cycle(self._receivers, words, told, taken, over)

    def _take(self, runtime: StageRuntime, told: Feedback, wants: Wants | None) -> list[tuple[str, Taken]]:
        candidates, self._ready = {**self._ready, **told.ready}, {}
        frames: list[tuple[str, Taken]] = []
        for internal_id in candidates:
            request = self._receivers.get(internal_id) if internal_id not in told.registered else None
            if internal_id in told.failed or (request is not None and request.failed is not None):
                continue
            left = wants(internal_id) if wants is not None else -1
            if left == 0:
                self._ready[internal_id] = None
            while left != 0:
                taken = runtime.take(internal_id)
                if taken.kind not in (TakenKind.CHUNK, TakenKind.END):
                    break  # a failure that came just now is told by the next feedback
                frames.append((internal_id, taken))
                left -= 1
        return frames

    def _lose(self, cause: Cause) -> CycleInput:
        """Fail all that is open here and, on the leading rank, towards both neighbours; let the other ranks notice."""
        self._lost = RankLostError(cause)
        for group in self._groups:
            if isinstance(group, ClosableGroup):
                group.close()
        cycle, known = self._receivers.cycle, (*self._receivers.internal_ids, *self._registering)
        failed = self._receivers.lose(cause, self._registering)
        if self._runtime is not None:
            for internal_id in (*known, *self._runtime.collect_feedback().registered):
                self._runtime.fail(internal_id, cause.reason)
            self._runtime.begin_shutdown(cause)  # nobody would drive what comes now
            self._runtime.collect_feedback()
        for table in (self._registering, self._ended, self._behind, self._ready, self._said):
            table.clear()
        return CycleInput(cycle, failed)

    # What the host says

    def register(self, internal_id: str, identity: Identity) -> Admission:
        """Begin a life that was numbered elsewhere; it is known on every rank from the next cycle on.

        Returns:
            Accepted; should the stage refuse it, the next cycle says so in ``refused``. Refused when a rank is lost.

        Raises:
            ConfigError: The internal id is no text or in use.
        """
        checked_text("internal_id", internal_id, MAX_EXTERNAL_ID_BYTES)
        if internal_id in self._receivers or internal_id in self._registering:
            raise ConfigError("internal_id", internal_id, "an id that is not in use in this stage")
        if self._lost is not None:
            return self._refused(self._lost.cause.reason)
        self._registering[internal_id] = identity
        if self._runtime is not None:
            try:
                admission = self._runtime.register(internal_id, identity)
            except ConfigError as error:  # taken by an offer of which no list has told yet
                admission = self._refused(str(error))
            if admission.accepted:
                self._said.append(said(RankEventKind.REGISTERED, internal_id, identity))
            else:
                self._say_refused(internal_id, admission.reason)
        return ACCEPTED

    def submit_chunk(self, internal_id: str, output: Any, *, segment_end: bool = False) -> Admission:
        """Offer one step's output to the next stage; ``output`` is used on the leading rank alone.

        Returns:
            Accepted, or refused with a reason; see the class for what ``accepted`` means.

        Raises:
            LocalProtocolError: The runner has ended this request itself.
        """
        if internal_id in self._ended:
            request = self._receivers.get(internal_id)
            stream = f"{request.identity if request is not None else internal_id} of {self._receivers.edge}"
            raise LocalProtocolError(
                machine="sender",
                stream=stream,
                event="chunk_submitted",
                state="ended",
                detail="after the runner's own end",
            )
        refusal = self._refusal(internal_id)
        if refusal is not None:
            return refusal
        if self._runtime is not None:
            runtime = self._runtime
            self._offer(internal_id, lambda: runtime.submit_chunk(internal_id, output, segment_end=segment_end))
        return ACCEPTED

    def end(self, internal_id: str, output: Any = None) -> Admission:
        """Say that the request's output is complete; see `StageRuntime.end`. A repeated end changes nothing."""
        refusal = self._refused("the runner has ended it") if internal_id in self._ended else self._refusal(internal_id)
        if refusal is not None:
            return refusal
        self._ended.add(internal_id)
        if self._runtime is not None:
            runtime = self._runtime
            ended = self._offer(internal_id, lambda: runtime.end(internal_id, output))
            if ended and not runtime.config.front:
                self._say_left(internal_id, Outcome.DONE, "done")
        return ACCEPTED

    def fail(self, internal_id: str, reason: str) -> None:
        """End a request with an error; see `StageRuntime.fail`. Acts on the leading rank."""
        if self._runtime is not None:
            self._runtime.fail(internal_id, reason)
            self._say_left(internal_id, Outcome.ERROR, reason or "failed")

    def cancel(self, internal_id: str, reason: str = "cancelled") -> None:
        """Cancel a request; see `StageRuntime.cancel`. Acts on the leading rank."""
        if self._runtime is not None:
            self._runtime.cancel(internal_id, reason)
            self._say_left(internal_id, Outcome.CANCELLED, reason or "cancelled")

    def release(self, internal_id: str) -> None:
        """Let go of a request; see `StageRuntime.release`. Acts on the leading rank."""
        if self._runtime is not None:
            self._runtime.release(internal_id)
            self._say_left(internal_id, Outcome.DONE, "done")

    def _refusal(self, internal_id: str) -> Admission | None:
        """Why nothing can be offered for a request, as the lists have told it; None when it can."""
        if self._lost is not None:
            return self._refused(self._lost.cause.reason)
        request = self._receivers.get(internal_id)
        if request is None:
            return self._refused("not registered here, or its life is over")
        return self._refused(str(request.ended_early)) if request.ended_early is not None else None

    @staticmethod
    def _refused(reason: str) -> Admission:
        return Admission(accepted=False, reason=reason)

    def _offer(self, internal_id: str, call: Callable[[], Admission]) -> bool:
        """Offer something to the real stage. Returns whether it was accepted."""
        behind = internal_id in self._behind
        admission = self._refused("it was offered behind one that was refused") if behind else call()
        if not admission.accepted:
            self._behind.add(internal_id)
            self._say_refused(internal_id, admission.reason)
        return admission.accepted

    def _say_refused(self, internal_id: str, reason: str) -> None:
        cause = Cause(Outcome.ERROR, reason, time.monotonic_ns())
        self._said.append(said(RankEventKind.REFUSED, internal_id, None, cause))

    def _say_left(self, internal_id: str, outcome: Outcome, reason: str) -> None:
        """Let the next list say that the host has let go of a life that it knows."""
        request = self._receivers.get(internal_id)
        identity = request.identity if request is not None else self._registering.get(internal_id)
        if identity is not None:
            cause = Cause(outcome, reason, time.monotonic_ns())
            self._said.append(said(RankEventKind.LEFT, internal_id, identity, cause))

    # Cleanup

    def residue(self) -> dict[str, int]:
        """What this rank holds now, by table; on the leading rank the stage's tables, too. See `StageRuntime.residue`."""
        held: Mapping[str, int] = self._runtime.residue() if self._runtime is not None else {}
        return {
            **held,
            "ranks.requests": len(self._receivers),
            "ranks.registering": len(self._registering),
            "ranks.ended": len(self._ended),
            "ranks.behind": len(self._behind),
            "ranks.ready": len(self._ready),
            "ranks.said": len(self._said),
        }
