"""The built-in manager of KV transfers: paged blocks of torch caches over connectors, one connector for each remote rank.

A piece is one frame, ``end(ok)``: all layers of a request's blocks, cut to the heads that the remote rank wants. A sender
copies them as it is given the transfer, so an abort finds its blocks quiet. A receiver writes its blocks once, when every
piece has come and fits, and answers each sender with a stop: ``done``, which acknowledges, or the cause of its failure.
"""

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from omni_fsm.connectors.port import (
    Arrival,
    Connector,
    ConnectorClosedError,
    EdgeRefused,
    PeerLost,
    PutOutcome,
    PutStatus,
    Signal,
    Stopped,
)
from omni_fsm.payload import decode, encode
from omni_fsm.payload.heads import HEAD_DIM, HeadPlan
from omni_fsm.protocol.errors import ConfigError, OmniFsmError, RemoteProtocolError
from omni_fsm.protocol.frames import Body, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.runtime.kv import KvDirection, KvJob, KvManager, KvTransfers
from omni_fsm.runtime.ports import Clock, MonotonicClock

DEFAULT_EARLY_MAX = 256
DEFAULT_OVER_MAX = 65_536
DEFAULT_RETRIES = 3
UNTOLD_MAX = 4_096
"""How many transfers that ended before the other end was met are kept to be told; it fails the others by its deadline."""

_LAYER_DIMS = 5
_BLOCK_DIM = 1
_WHOLE_PIECE = 1 << 62  # credit in bytes: one frame is all that comes


class PagedKvCache:
    """The blocks of one rank's KV cache.

    Args:
        layers: One tensor a layer, ``[2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]``: this rank's heads;
            any dtype and device, equal in all layers. Of a stacked cache ``[num_layers, 2, ...]`` it is ``cache.unbind(0)``.
            Borrowed: read and written in place, and only the blocks that a call names.
        heads: How many heads this rank holds.

    Raises:
        ConfigError: There is no layer, or one has another shape or dtype.
    """

    def __init__(self, layers: Sequence[torch.Tensor], heads: int) -> None:
        self.layers = tuple(layers)
        if not self.layers:
            raise ConfigError("layers", layers, "one tensor a layer")
        first = self.layers[0]
        accepted = f"[2, num_blocks, block_size, {heads} heads, head_dim], equal in shape and dtype in all layers"
        for layer in self.layers:
            fits = layer.dim() == _LAYER_DIMS and layer.shape[0] == 2 and layer.shape[HEAD_DIM] == heads  # noqa: PLR2004 - keys, values
            if not fits or layer.shape != first.shape or layer.dtype != first.dtype:
                raise ConfigError("layers", f"{list(layer.shape)} {layer.dtype}", accepted)
        self.heads = heads
        self.num_blocks = first.shape[_BLOCK_DIM]

    def index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids as an index on the cache's device.

        Raises:
            ConfigError: The cache has no such block.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ConfigError("block", block, f"an id from 0 to {self.num_blocks - 1}")
        return torch.tensor(blocks, dtype=torch.int64, device=self.layers[0].device)

    def piece_fault(self, piece: object, blocks: int, heads: int) -> str:
        """Why what a peer sent is no piece of so many blocks and heads; empty if it is one."""
        first = self.layers[0]
        shape = [2, blocks, first.shape[2], heads, first.shape[-1]]
        if not isinstance(piece, list) or len(piece) != len(self.layers):
            return f"{len(self.layers)} layers were expected"
        for layer in piece:
            if not isinstance(layer, torch.Tensor) or list(layer.shape) != shape or layer.dtype != first.dtype:
                found = (
                    f"{list(layer.shape)} {layer.dtype}" if isinstance(layer, torch.Tensor) else type(layer).__name__
                )
                return f"{shape} {first.dtype} was expected, {found} came"
        return ""

    def write(self, index: torch.Tensor, merged: Sequence[torch.Tensor]) -> None:
        """Write blocks; when it returns they are written, on a GPU too."""
        for layer, blocks in zip(self.layers, merged, strict=True):
            layer.index_copy_(_BLOCK_DIM, index, blocks.to(layer.device))
        if index.is_cuda:
            torch.cuda.current_stream(index.device).synchronize()


class KvBlockMover(KvManager):
    """What `KvBlockSender` and `KvBlockReceiver` share; see `omni_fsm.runtime.kv.KvManager` for when they are called.

    ``step`` does the I/O of one connector: a thread for each connector repeats it, or a runner calls it once a cycle. All else
    may be called from any thread.

    Args:
        cache: The blocks of this rank.
        plan: The plan of the edge.
        rank: This rank.
        edge: The edge between the two stages.
        connectors: One for each remote rank of the plan, of the edge ``plan.edge(edge, from_rank, to_rank)``. Owned from here
            on: ``close`` closes them.
        clock: Time.
        retries: How often a put or a load that failed for now is tried again.

    Raises:
        ConfigError: The connectors are not those of the plan, or the cache does not hold the heads of this rank.
    """

    direction: ClassVar[KvDirection]

    def __init__(  # noqa: PLR0913 - the ports of a rank
        self,
        cache: PagedKvCache,
        plan: HeadPlan,
        rank: int,
        *,
        edge: Edge,
        connectors: Mapping[int, Connector],
        clock: Clock | None = None,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        sends = self.direction is KvDirection.SEND
        self.ranks = plan.target_ranks(rank) if sends else plan.source_ranks(rank)
        if set(connectors) != set(self.ranks):
            raise ConfigError("connectors", sorted(connectors), f"one for each of the ranks {list(self.ranks)}")
        for remote, connector in connectors.items():
            wanted = plan.edge(edge, rank, remote) if sends else plan.edge(edge, remote, rank)
            if connector.edge != wanted or connector.sends != sends:
                end = "sending" if sends else "receiving"
                raise ConfigError(f"connectors[{remote}]", str(connector.edge), f"the {end} end of {wanted}")
        if cache.heads != len(plan.heads(rank, of_sender=sends)):
            raise ConfigError(
                "cache", f"{cache.heads} heads", f"the {len(plan.heads(rank, of_sender=sends))} of rank {rank}"
            )
        self._cache, self._plan, self._rank, self._retries = cache, plan, rank, retries
        self._connectors = dict(connectors)
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, job: KvJob, transfers: KvTransfers) -> None:  # noqa: ARG002 - the other direction has it
        """See `KvManager`. Raises ConfigError in a receiver."""
        raise ConfigError("direction", str(KvDirection.SEND), f"{self.direction}: this manager serves one direction")

    def recv(self, job: KvJob, transfers: KvTransfers) -> None:  # noqa: ARG002 - the other direction has it
        """See `KvManager`. Raises ConfigError in a sender."""
        raise ConfigError("direction", str(KvDirection.RECV), f"{self.direction}: this manager serves one direction")

    def step(self, rank: int, timeout_s: float | None = 0.0) -> bool:
        """Do what the connector to a remote rank has to do, and wait for it at most so long. From one thread a connector.

        Returns:
            Whether anything was done.
        """
        connector = self._connectors[rank]
        connector.wait(timeout_s)
        return self._step(rank, connector)

    @abstractmethod
    def _step(self, rank: int, connector: Connector) -> bool: ...

    @abstractmethod
    def residue(self) -> dict[str, int]:
        """What it holds, by table."""

    def close(self) -> None:
        """Close the connectors, and fail what is under way here. Idempotent. The peers get what was put, then lose this one."""
        self._closed = True
        for connector in self._connectors.values():
            connector.close()
        for identity, transfers in self._under_way():
            transfers.fail(identity, Cause(Outcome.CANCELLED, "shutdown", self._clock.now_ns()))

    @abstractmethod
    def _under_way(self) -> list[tuple[Identity, KvTransfers]]: ...

    def _error(self, reason: str) -> Cause:
        return Cause(Outcome.ERROR, reason, self._clock.now_ns())

    def _check_ranks(self, job: KvJob) -> None:
        if set(job.ranks) != set(self.ranks):
            raise ConfigError("ranks", list(job.ranks), f"those of the plan: {list(self.ranks)}")


@dataclass(slots=True, eq=False)
class _Outgoing:
    """One transfer's piece for one remote rank: an opening, then its one frame."""

    identity: Identity
    transfers: KvTransfers
    body: Body | None
    opened: bool = False
    stored: bool = False
    attempts: int = 0
    aborted: Cause | None = None

    def next_frame(self, edge: Edge, at_ns: int) -> Frame | None:
        """What is to be put; None while it waits for the other end, or when it is over."""
        if self.stored:
            return None
        if not self.opened:
            return Frame(edge, self.identity, FrameKind.OPEN)
        if self.aborted is not None:
            return Frame(edge, self.identity, FrameKind.END, cause=self.aborted)
        return Frame(edge, self.identity, FrameKind.END, seq=0, cause=Cause(Outcome.OK, at_ns=at_ns), body=self.body)

    def abort(self, cause: Cause) -> None:
        """It is not wanted; the first cause goes out, with attempts of its own."""
        if self.aborted is None:
            self.aborted, self.body, self.attempts = cause, None, 0

    def was_put(self, frame: Frame) -> None:
        """The connector stored it."""
        self.opened, self.attempts = True, 0
        if frame.kind is FrameKind.END:
            self.stored, self.body = True, None


class KvBlockSender(KvBlockMover):
    """Sends the blocks of one rank. A copy of what it sends is kept until it is put."""

    direction = KvDirection.SEND

    def __init__(  # noqa: PLR0913 - the ports of a rank
        self,
        cache: PagedKvCache,
        plan: HeadPlan,
        rank: int,
        *,
        edge: Edge,
        connectors: Mapping[int, Connector],
        clock: Clock | None = None,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        super().__init__(cache, plan, rank, edge=edge, connectors=connectors, clock=clock, retries=retries)
        self._pieces: dict[int, dict[Identity, _Outgoing]] = {rank: {} for rank in self.ranks}
        self._given: set[Identity] = set()  # sent, and neither aborted nor acknowledged by all

    def send(self, job: KvJob, transfers: KvTransfers) -> None:
        """Copy the blocks and queue a piece for each remote rank.

        Raises:
            ConfigError: The cache has no such block, or the ranks are not those of the plan.
            PayloadEncodeError: A piece is larger than a frame may be.
        """
        self._check_ranks(job)
        index = self._cache.index(job.blocks)
        bodies = {rank: encode(self._piece(rank, index)) for rank in job.ranks}
        with self._lock:
            self._given.add(job.identity)
            for rank, body in bodies.items():
                self._pieces[rank][job.identity] = _Outgoing(job.identity, transfers, body)
        for rank in job.ranks:
            self._connectors[rank].wake()

    def abort(self, job: KvJob, transfers: KvTransfers, cause: Cause) -> None:
        """Send the cause instead of what is not put yet. The blocks are quiet: ``send`` had copied them."""
        with self._lock:
            given = job.identity in self._given
            self._given.discard(job.identity)
            for pieces in self._pieces.values():
                if not given and not self._closed:  # who waits for it hears of nothing else
                    pieces[job.identity] = _Outgoing(job.identity, transfers, None)
                if (piece := pieces.get(job.identity)) is not None:
                    piece.abort(cause)
        for connector in self._connectors.values():
            connector.wake()
        transfers.quiet(job.identity)

    def residue(self) -> dict[str, int]:
        """Pieces that are not acknowledged, and the transfers that have one."""
        with self._lock:
            return {"pieces": sum(len(pieces) for pieces in self._pieces.values()), "given": len(self._given)}

    def _under_way(self) -> list[tuple[Identity, KvTransfers]]:
        with self._lock:
            found = {one.identity: one.transfers for pieces in self._pieces.values() for one in pieces.values()}
            for pieces in self._pieces.values():
                pieces.clear()
        return list(found.items())

    def _piece(self, rank: int, index: torch.Tensor) -> list[torch.Tensor]:
        cut = partial(self._plan.slice, from_rank=self._rank, to_rank=rank)
        return [cut(layer).index_select(_BLOCK_DIM, index) for layer in self._cache.layers]

    def _step(self, rank: int, connector: Connector) -> bool:
        signals = connector.signals()
        for signal in signals:
            self._heard(rank, connector, signal)
        with self._lock:
            pieces = list(self._pieces[rank].values())
        untold = [piece for piece in pieces if piece.aborted is not None and not piece.opened]
        for piece in untold[:-UNTOLD_MAX]:
            self._forget(rank, connector, piece.identity)
        put = [self._put_piece(rank, connector, piece) for piece in pieces]
        return any(put) or bool(signals)

    def _put_piece(self, rank: int, connector: Connector, piece: _Outgoing) -> bool:
        """Put what can be put of a piece; whether anything was."""
        done = False
        while (frame := self._next_frame(rank, connector, piece)) is not None:
            outcome = _put(connector, frame)
            if outcome.status is PutStatus.BUSY:
                break
            done = True
            if outcome.status is PutStatus.STORED:
                with self._lock:
                    piece.was_put(frame)
                continue
            piece.attempts += 1
            if outcome.status is PutStatus.RETRY and piece.attempts <= self._retries:
                break
            self._give_up(piece, f"put to rank {rank} given up: {outcome.reason}")
        return done

    def _next_frame(self, rank: int, connector: Connector, piece: _Outgoing) -> Frame | None:
        with self._lock:
            frame = piece.next_frame(connector.edge, self._clock.now_ns())
        if frame is None and piece.aborted is not None:
            self._forget(rank, connector, piece.identity)
        return frame

    def _give_up(self, piece: _Outgoing, reason: str) -> None:
        """A frame of this piece does not get through: the transfer fails, and what is left is to tell the other end."""
        cause = self._error(reason)
        with self._lock:
            untold = piece.aborted is None
            if untold:
                piece.abort(cause)
            else:
                piece.stored = True  # nor does the failure: the other end learns of it by its deadline
        if untold:
            piece.transfers.fail(piece.identity, cause)

    def _heard(self, rank: int, connector: Connector, signal: Signal) -> None:
        match signal:
            case Stopped():
                piece = self._forget(rank, connector, signal.identity)
                if piece is not None and signal.cause.outcome is Outcome.DONE and piece.stored:
                    self._acked(piece, rank)
                elif piece is not None and signal.cause.outcome is Outcome.DONE:
                    reason = f"rank {rank} says that it has what was not sent yet"
                    piece.transfers.fail(piece.identity, self._error(reason))
                elif piece is not None:
                    piece.transfers.fail(piece.identity, signal.cause)
            case PeerLost() | EdgeRefused():
                reason = signal.reason if isinstance(signal, PeerLost) else str(signal.error)
                with self._lock:
                    lost, self._pieces[rank] = self._pieces[rank], {}
                for piece in lost.values():
                    piece.transfers.fail(piece.identity, self._error(reason))
            case _:
                pass  # room, credit or a peer: the puts that wait for it come next

    def _acked(self, piece: _Outgoing, rank: int) -> None:
        with self._lock:
            if not any(piece.identity in pieces for pieces in self._pieces.values()):
                self._given.discard(piece.identity)
        piece.transfers.ack(piece.identity, rank)

    def _forget(self, rank: int, connector: Connector, identity: Identity) -> _Outgoing | None:
        with self._lock:
            piece = self._pieces[rank].pop(identity, None)
        if piece is not None:
            connector.reclaim(identity, unread=False)
        return piece


_Came = memoryview | Cause | None
"""What has come of a piece: its body; why it never will; or that it was announced."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """One transfer that is wanted, and the pieces of it that have come, by remote rank, one tensor a layer."""

    job: KvJob
    transfers: KvTransfers
    index: torch.Tensor
    pieces: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    storing: bool = False


class KvBlockReceiver(KvBlockMover):
    """Receives the blocks of one rank; see `KvBlockMover`.

    Args:
        cache: See `KvBlockMover`, as for all that is not named here.
        early_max: How many transfers may come before this rank asks for them; the oldest are turned away. So early a body comes
            only within the small credit of an unclaimed stream.
        over_max: How many that are over are remembered, to turn away what comes late.
    """

    direction = KvDirection.RECV

    def __init__(  # noqa: PLR0913 - the ports and bounds of a rank
        self,
        cache: PagedKvCache,
        plan: HeadPlan,
        rank: int,
        *,
        edge: Edge,
        connectors: Mapping[int, Connector],
        clock: Clock | None = None,
        retries: int = DEFAULT_RETRIES,
        early_max: int = DEFAULT_EARLY_MAX,
        over_max: int = DEFAULT_OVER_MAX,
    ) -> None:
        for name, value in (("early_max", early_max), ("over_max", over_max)):
            if type(value) is not int or value < 1:
                raise ConfigError(name, value, "an int of 1 or more")
        super().__init__(cache, plan, rank, edge=edge, connectors=connectors, clock=clock, retries=retries)
        self._early_max, self._over_max = early_max, over_max
        self._wanted: dict[Identity, _Incoming] = {}
        self._early: dict[Identity, dict[int, memoryview | None]] = {}
        self._over: dict[Identity, Cause] = {}

    def recv(self, job: KvJob, transfers: KvTransfers) -> None:
        """Want a transfer: what has come of it is taken, and its senders get credit.

        Raises:
            ConfigError: The cache has no such block, or the ranks are not those of the plan.
        """
        self._check_ranks(job)
        incoming = _Incoming(job, transfers, self._cache.index(job.blocks))
        with self._lock:
            over = self._over.get(job.identity)
            if over is None:
                self._wanted[job.identity] = incoming
            came = self._early.pop(job.identity, {})
        if over is not None:
            transfers.fail(job.identity, over)
        for rank, what in came.items():
            self._take(rank, incoming, what)

    def abort(self, job: KvJob, transfers: KvTransfers, cause: Cause) -> None:
        """Want it no more; its senders are told why. Quiet at once, or when the blocks that are being written are written."""
        with self._lock:
            incoming = self._wanted.get(job.identity)
            if incoming is not None and incoming.storing:
                return  # `_store` says that it is done with the blocks
            self._wanted.pop(job.identity, None)
            self._end_early(job.identity, cause)
        self._stop(job.identity, cause)
        transfers.quiet(job.identity)

    def residue(self) -> dict[str, int]:
        """Transfers that are wanted, that came early, and that are over."""
        with self._lock:
            return {"wanted": len(self._wanted), "early": len(self._early), "remembered": len(self._over)}

    def _under_way(self) -> list[tuple[Identity, KvTransfers]]:
        with self._lock:
            return [(identity, incoming.transfers) for identity, incoming in self._wanted.items()]

    def _step(self, rank: int, connector: Connector) -> bool:
        done = False
        while (arrival := _next_arrival(connector)) is not None:
            self._arrived(rank, connector, arrival)
            done = True
        for signal in connector.signals():
            done = True
            if isinstance(signal, PeerLost):
                self._lost(rank, signal.reason)
            elif isinstance(signal, EdgeRefused):
                self._lost(rank, str(signal.error))
        return done

    def _arrived(self, rank: int, connector: Connector, arrival: Arrival) -> None:
        identity = arrival.frame.identity
        with self._lock:
            over = self._over.get(identity)
        if over is not None:
            arrival.discard()
            connector.stop(identity, over)
            return
        what = self._content(arrival)
        with self._lock:
            incoming, over = self._wanted.get(identity), self._over.get(identity)  # it may have ended meanwhile
            ended = None if over is None else (identity, over)
            if incoming is None and ended is None:
                ended = self._keep_early(rank, identity, what)
        if incoming is not None:
            self._take(rank, incoming, what)
        elif ended is not None:
            self._stop(*ended)

    def _keep_early(self, rank: int, identity: Identity, what: _Came) -> tuple[Identity, Cause] | None:
        """Keep what nobody has asked for yet; returns the transfer that is over by it, if one is, and why."""
        if isinstance(what, Cause):
            return self._end_early(identity, what)
        self._early.setdefault(identity, {})[rank] = what
        if len(self._early) <= self._early_max:
            return None
        cause = self._error("unclaimed: too many transfers came before they were asked for")
        return self._end_early(next(iter(self._early)), cause)

    def _end_early(self, identity: Identity, cause: Cause) -> tuple[Identity, Cause]:
        self._early.pop(identity, None)
        self._remember(identity, cause)
        return identity, cause

    def _content(self, arrival: Arrival) -> _Came:
        frame = arrival.frame
        if frame.kind is FrameKind.END and frame.cause is not None and frame.cause.outcome is Outcome.OK:
            return self._load(arrival)
        arrival.discard()
        if frame.kind is FrameKind.DATA:
            return self._error("frame_invalid: a chunk came where one frame carries all")
        return frame.cause

    def _load(self, arrival: Arrival) -> _Came:
        for left in reversed(range(self._retries + 1)):
            try:
                return arrival.load() or self._error("frame_invalid: an end without a body")
            except RemoteProtocolError as error:
                return self._error(str(error))
            except (OSError, RuntimeError, MemoryError) as error:  # for now: no memory, no descriptor
                if not left:
                    arrival.discard()
                    return self._error(f"body given up: {error}")
        raise AssertionError(self._retries)

    def _take(self, rank: int, incoming: _Incoming, what: _Came) -> None:
        """Something has come of a transfer that is wanted."""
        identity = incoming.job.identity
        if what is None:
            connector = self._connectors[rank]
            connector.grant(identity, frames=1, nbytes=_WHOLE_PIECE, taken_frames=0, taken_bytes=0)
            return
        piece = what if isinstance(what, Cause) else self._checked(rank, incoming, what)
        if isinstance(piece, Cause):
            incoming.transfers.fail(identity, piece)
            return
        with self._lock:
            if self._wanted.get(identity) is not incoming or incoming.storing:
                return
            incoming.pieces[rank] = piece
            incoming.storing = len(incoming.pieces) == len(self.ranks)
        if incoming.storing:
            self._store(incoming)

    def _checked(self, rank: int, incoming: _Incoming, body: memoryview) -> list[torch.Tensor] | Cause:
        heads = self._cache.heads // len(self.ranks)
        try:
            piece = decode(body)
        except RemoteProtocolError as error:
            return self._error(f"piece of rank {rank}: {error}")
        fault = self._cache.piece_fault(piece, len(incoming.job.blocks), heads)
        return self._error(f"piece of rank {rank}: {fault}") if fault else piece

    def _store(self, incoming: _Incoming) -> None:
        """Every piece has come: merge them, write the blocks, and say so at both ends."""
        identity, fault = incoming.job.identity, None
        try:
            layers = range(len(self._cache.layers))
            pieces = [{rank: piece[layer] for rank, piece in incoming.pieces.items()} for layer in layers]
            self._cache.write(incoming.index, [self._plan.merge(one, to_rank=self._rank) for one in pieces])
        except (OmniFsmError, RuntimeError) as error:  # torch: no memory, a lost device
            fault = self._error(f"writing the blocks raised {type(error).__name__}: {error}")
        cause = fault or Cause(Outcome.DONE, "done", self._clock.now_ns())
        with self._lock:
            del self._wanted[identity]
            self._remember(identity, cause)
        if fault is not None:
            incoming.transfers.fail(identity, fault)
            incoming.transfers.quiet(identity)
        else:
            incoming.transfers.complete(identity)
        self._stop(identity, cause)

    def _lost(self, rank: int, reason: str) -> None:
        """A sender is gone, and all that it had sent was taken."""
        lost = self._error(reason)
        with self._lock:
            waiting = [one for one in self._wanted.values() if rank not in one.pieces]
            announced = [one for one, came in self._early.items() if rank in came and came[rank] is None]
            over = [self._end_early(identity, lost) for identity in announced]
        for incoming in waiting:
            incoming.transfers.fail(incoming.job.identity, lost)
        for identity, cause in over:
            self._stop(identity, cause)

    def _stop(self, identity: Identity, cause: Cause) -> None:
        for connector in self._connectors.values():
            connector.stop(identity, cause)
            connector.reclaim(identity, unread=True)

    def _remember(self, identity: Identity, cause: Cause) -> None:
        self._over.setdefault(identity, cause)
        if len(self._over) > self._over_max:
            del self._over[next(iter(self._over))]


def _put(connector: Connector, frame: Frame) -> PutOutcome:
    try:
        return connector.put(frame)
    except ConnectorClosedError as error:
        return PutOutcome(PutStatus.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - the port says that whatever else it raises counts as for now
        return PutOutcome(PutStatus.RETRY, f"{type(error).__name__}: {error}")


def _next_arrival(connector: Connector) -> Arrival | None:
    try:
        return connector.get()
    except RemoteProtocolError:
        return None  # the edge is closed: the signal that follows says why
