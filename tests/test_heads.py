"""Rank routing of KV heads: for every pair of sizes, each rank gets exactly its heads, whoever holds them."""

import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_fsm.payload.heads import HeadPlan
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge, Identity

SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8, 16)
PAIRS = [HeadPlan(a, b, heads) for a, b, heads in product(SIZES, SIZES, HEADS)]
EDGE = Edge("thinker", "talker")
R7 = Identity("r7", 2)


def shard(whole: torch.Tensor, heads: range, dim: int = -2) -> torch.Tensor:
    return whole.narrow(dim, heads.start, len(heads))


@pytest.mark.parametrize("plan", PAIRS, ids=str)
def test_every_rank_gets_exactly_its_heads(plan: HeadPlan) -> None:
    whole = torch.arange(3 * plan.num_kv_heads * 2).view(3, plan.num_kv_heads, 2)
    for to_rank in range(plan.to_tp):
        pieces = {
            rank: plan.slice(shard(whole, plan.heads(rank, of_sender=True)), from_rank=rank, to_rank=to_rank)
            for rank in plan.source_ranks(to_rank)
        }
        wanted = shard(whole, plan.heads(to_rank, of_sender=False))
        assert torch.equal(plan.merge(pieces, to_rank=to_rank), wanted)


@pytest.mark.parametrize("plan", PAIRS, ids=str)
def test_both_ends_make_the_same_plan_and_no_two_pairs_share_a_key(plan: HeadPlan) -> None:
    sent = {(rank, to) for rank in range(plan.from_tp) for to in plan.target_ranks(rank)}
    received = {(rank, to) for to in range(plan.to_tp) for rank in plan.source_ranks(to)}
    assert sent == received
    assert len({plan.key(EDGE, R7, rank, to).text for rank, to in sent}) == len(sent)
    assert len({plan.edge(EDGE, rank, to) for rank, to in sent}) == len(sent)


@pytest.mark.parametrize(
    ("sizes", "targets", "sources"),
    [
        ((4, 4, 8), [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)]),
        ((4, 2, 8), [(0,), (0,), (1,), (1,)], [(0, 1), (2, 3)]),
        ((2, 4, 8), [(0, 1), (2, 3)], [(0,), (0,), (1,), (1,)]),
        ((1, 4, 2), [(0, 1, 2, 3)], [(0,), (0,), (0,), (0,)]),
        ((4, 1, 2), [(0,), (), (0,), ()], [(0, 2)]),  # ranks 1 and 3 hold what 0 and 2 send
        ((4, 4, 2), [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)]),  # replicas stay with their own rank
        ((4, 2, 1), [(0,), (), (1,), ()], [(0,), (2,)]),
    ],
)
def test_the_plan_by_hand(
    sizes: tuple[int, int, int], targets: list[tuple[int, ...]], sources: list[tuple[int, ...]]
) -> None:
    plan = HeadPlan(*sizes)
    assert [plan.target_ranks(rank) for rank in range(plan.from_tp)] == targets
    assert [plan.source_ranks(rank) for rank in range(plan.to_tp)] == sources


def test_case_69_whoever_adds_up_pieces_expects_as_many_as_the_plan_has() -> None:
    """Four ranks send, yet with two heads the one receiver hears of two of them: the others hold replicas."""
    plan = HeadPlan(4, 1, 2)
    reporters = [rank for rank in range(4) if plan.target_ranks(rank)]
    assert len(plan.source_ranks(0)) == len(reporters) == 2


@given(
    plan=st.sampled_from(PAIRS),
    others=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    at=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    from_the_end=st.booleans(),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_the_heads_may_stand_in_any_dimension(
    plan: HeadPlan, others: list[int], at: int, dtype: torch.dtype, *, from_the_end: bool
) -> None:
    at = min(at, len(others))
    shape = [*others[:at], plan.num_kv_heads, *others[at:]]
    dim = at - len(shape) if from_the_end else at
    whole = torch.arange(torch.Size(shape).numel()).remainder(100).view(shape).to(dtype)
    for to_rank in range(plan.to_tp):
        pieces = {
            rank: plan.slice(
                shard(whole, plan.heads(rank, of_sender=True), dim), from_rank=rank, to_rank=to_rank, dim=dim
            )
            for rank in plan.source_ranks(to_rank)
        }
        wanted = shard(whole, plan.heads(to_rank, of_sender=False), dim)
        assert torch.equal(plan.merge(pieces, to_rank=to_rank, dim=dim), wanted)


def test_a_slice_is_a_view_of_the_shard() -> None:
    held = torch.zeros(5, 4, 2)
    HeadPlan(1, 2, 4).slice(held, from_rank=0, to_rank=1).fill_(1)
    assert held.sum(dim=(0, 2)).tolist() == [0, 0, 10, 10]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((3, 2, 6), "from_tp, to_tp: (3, 2)"),
        ((4, 6, 12), "from_tp, to_tp: (4, 6)"),
        ((4, 2, 6), "num_kv_heads, from_tp: (6, 4)"),
        ((2, 4, 6), "num_kv_heads, to_tp: (6, 4)"),
        ((0, 2, 4), "from_tp: 0"),
        ((2, -1, 4), "to_tp: -1"),
        ((2, 2, 1.0), "num_kv_heads: 1.0"),
        ((True, 2, 4), "from_tp: True"),
    ],
)
def test_sizes_of_which_none_divides_the_other_are_refused_by_both_names(
    sizes: tuple[int, int, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(named)} cannot be used; accepted: "):
        HeadPlan(*sizes)


def test_ranks_and_shards_that_the_plan_does_not_have_are_refused() -> None:
    plan = HeadPlan(2, 4, 8)
    piece = torch.zeros(3, 2, 1)
    with pytest.raises(ConfigError, match=r"^from_rank: 2 cannot be used; accepted: an int from 0 to 1$"):
        plan.target_ranks(2)
    with pytest.raises(ConfigError, match=r"^to_rank: 4 cannot"):
        plan.source_ranks(4)
    with pytest.raises(ConfigError, match=r"^from_rank: 0 cannot be used; accepted: one of \[1\]"):
        plan.edge(EDGE, 0, 3)
    with pytest.raises(ConfigError, match=r"^shard of rank 1: \[3, 2, 1\] cannot be used; accepted: 4 heads"):
        plan.slice(piece, from_rank=1, to_rank=3)
    with pytest.raises(ConfigError, match=r"^dim: 7 cannot"):
        plan.slice(piece, from_rank=1, to_rank=3, dim=7)
    with pytest.raises(ConfigError, match=r"^pieces: \[0\] cannot be used; accepted: those of ranks \[1\]$"):
        plan.merge({0: piece}, to_rank=3)
    with pytest.raises(ConfigError, match=r"^pieces: .* accepted: all of them \[3, 2, 1\] torch.float32$"):
        HeadPlan(2, 1, 4).merge({0: piece, 1: torch.zeros(2, 2, 1)}, to_rank=0)
    with pytest.raises(ConfigError, match=r"^piece of rank 1: \[3, 1, 1\]"):
        HeadPlan(2, 1, 4).merge({0: piece, 1: torch.zeros(3, 1, 1)}, to_rank=0)
