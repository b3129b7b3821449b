"""Who sends which attention heads to whom, when two stages have different tensor-parallel sizes. Pure.

A rank holds consecutive KV heads: ``num_kv_heads / tp`` of them, or, where there are fewer heads than ranks, one that
it shares with its neighbours. One of two sizes divides the other, so what crosses an edge is a plan of pairs of ranks, the
same at both ends: the larger sending side is merged by the receiver, the smaller one is sliced for it.

>>> plan = HeadPlan(from_tp=2, to_tp=4, num_kv_heads=4)
>>> plan.target_ranks(1), plan.source_ranks(3)
((2, 3), (1,))
>>> plan.slice(torch.arange(2), from_rank=1, to_rank=3, dim=0)      # rank 1 holds heads 2 and 3, rank 3 wants the second
tensor([1])
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

import torch

from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge, FrameKey, Identity

HEAD_DIM = -2
"""Where the heads stand in ``[..., num_kv_heads, head_dim]``."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The plan of one edge. Both ends make it from the same numbers.

    Attributes:
        from_tp: Tensor-parallel size of the sending stage.
        to_tp: Tensor-parallel size of the receiving stage.
        num_kv_heads: KV heads of the whole model; 1 for a cache that every rank holds whole.
    """

    from_tp: int
    to_tp: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        """Refuse sizes that no plan fits.

        Raises:
            ConfigError: A number is no int above 0, or of two numbers neither divides the other; names both.
        """
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in numbers.items():
            if type(value) is not int or value < 1:
                raise ConfigError(name, value, "an int of 1 or more")
        for one, other in (("from_tp", "to_tp"), ("num_kv_heads", "from_tp"), ("num_kv_heads", "to_tp")):
            pair = (numbers[one], numbers[other])
            if max(pair) % min(pair):
                raise ConfigError(f"{one}, {other}", pair, "two sizes of which one divides the other")

    def heads(self, rank: int, *, of_sender: bool) -> range:
        """The heads that a rank holds, by their numbers in the whole model.

        Raises:
            ConfigError: There is no such rank.
        """
        tp = self.from_tp if of_sender else self.to_tp
        name = "from_rank" if of_sender else "to_rank"
        if type(rank) is not int or not 0 <= rank < tp:
            raise ConfigError(name, rank, f"an int from 0 to {tp - 1}")
        first = rank * self.num_kv_heads // tp
        return range(first, first + max(1, self.num_kv_heads // tp))

    def target_ranks(self, from_rank: int) -> tuple[int, ...]:
        """The ranks that ``from_rank`` sends to, ascending; none where another rank sends the same heads."""
        self.heads(from_rank, of_sender=True)
        return tuple(to_rank for to_rank in range(self.to_tp) if from_rank in self.source_ranks(to_rank))

    def source_ranks(self, to_rank: int) -> tuple[int, ...]:
        """The remote ranks that ``to_rank`` receives from, in the order of their heads: exactly so many pieces come.

        Of senders that hold the same heads it is the first within the receiver's own group.
        """
        self.heads(to_rank, of_sender=False)
        if self.from_tp <= self.to_tp:
            return (to_rank * self.from_tp // self.to_tp,)
        group = self.from_tp // self.to_tp
        first_of: dict[range, int] = {}
        for rank in range(to_rank * group, (to_rank + 1) * group):
            first_of.setdefault(self.heads(rank, of_sender=True), rank)
        return tuple(first_of.values())

    def edge(self, edge: Edge, from_rank: int, to_rank: int) -> Edge:
        """The edge between two ranks; a connector of its own serves it.

        Raises:
            ConfigError: The plan has no piece from ``from_rank`` to ``to_rank``.
        """
        self._check_pair(from_rank, to_rank)
        return Edge(f"{edge.from_stage}:kv{from_rank}", f"{edge.to_stage}:kv{to_rank}")

    def key(self, edge: Edge, identity: Identity, from_rank: int, to_rank: int) -> FrameKey:
        """The key of the one frame that carries a request's piece from one rank to another, for a keyed store."""
        return FrameKey(self.edge(edge, from_rank, to_rank), identity, 0)

    def slice(self, shard: torch.Tensor, *, from_rank: int, to_rank: int, dim: int = HEAD_DIM) -> torch.Tensor:
        """What ``to_rank`` wants of a shard: for a sender before it sends, or for a receiver of a duplicated shard.

        Args:
            shard: All heads of ``from_rank`` along ``dim``; any other dimensions, dtype and device.
            from_rank: The rank that holds it.
            to_rank: The rank that wants of it.
            dim: The dimension of the heads.

        Returns:
            A view of ``shard``.

        Raises:
            ConfigError: The plan has no such piece, or ``shard`` has another number of heads.
        """
        self._check_pair(from_rank, to_rank)
        held, wanted = self.heads(from_rank, of_sender=True), self.heads(to_rank, of_sender=False)
        _check_heads(shard, len(held), dim, f"shard of rank {from_rank}")
        first = max(held.start, wanted.start)
        return shard.narrow(dim, first - held.start, min(held.stop, wanted.stop) - first)

    def merge(self, pieces: Mapping[int, torch.Tensor], *, to_rank: int, dim: int = HEAD_DIM) -> torch.Tensor:
        """The shard of ``to_rank``: its pieces concatenated along the heads.

        Args:
            pieces: What came, by the rank it came from, as ``slice`` made it. Equal but for ``dim``.
            to_rank: The rank that they came to.
            dim: The dimension of the heads.

        Returns:
            A new tensor, or the piece itself where there is one.

        Raises:
            ConfigError: Other ranks' pieces than the plan has, or pieces that do not fit together.
        """
        sources = self.source_ranks(to_rank)
        if set(pieces) != set(sources):
            raise ConfigError("pieces", sorted(pieces), f"those of ranks {list(sources)}")
        ordered = [pieces[rank] for rank in sources]
        each = len(self.heads(to_rank, of_sender=False)) // len(sources)
        for rank, piece in zip(sources, ordered, strict=True):
            _check_heads(piece, each, dim, f"piece of rank {rank}")
        for one, other in pairwise(ordered):
            if one.shape != other.shape or one.dtype != other.dtype:
                told = f"{list(one.shape)} {one.dtype}"
                raise ConfigError("pieces", f"{list(other.shape)} {other.dtype}", f"all of them {told}")
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)

    def _check_pair(self, from_rank: int, to_rank: int) -> None:
        self.heads(from_rank, of_sender=True)
        sources = self.source_ranks(to_rank)
        if from_rank not in sources:
            accepted = f"one of {list(sources)}: rank {to_rank} receives from these"
            raise ConfigError("from_rank", from_rank, accepted)


def _check_heads(tensor: torch.Tensor, heads: int, dim: int, what: str) -> None:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError("dim", dim, f"a dimension of a tensor of {tensor.dim()}")
    if tensor.shape[dim] != heads:
        raise ConfigError(what, list(tensor.shape), f"{heads} heads in dimension {dim}")
