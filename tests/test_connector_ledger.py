"""Credit and the arena's ring, by hand-written numbers."""

import random

import pytest
from connector_peer import EDGE, R1, data, failed_end, opening

from omni_fsm.connectors.arena import Ring
from omni_fsm.connectors.ledger import UNCLAIMED_BYTES, UNCLAIMED_FRAMES, CreditLedger
from omni_fsm.protocol.errors import RemoteProtocolError
from omni_fsm.protocol.frames import Cause, Frame, FrameKind, Outcome


def put(ledger: CreditLedger, seq: int, nbytes: int) -> bool:
    allowed = ledger.allows(data(seq), nbytes)
    if allowed:
        ledger.count(data(seq), nbytes)
    return allowed


def grant(ledger: CreditLedger, frames: int, nbytes: int, taken_frames: int = 0, taken_bytes: int = 0) -> bool:
    return ledger.grant(R1, frames=frames, nbytes=nbytes, taken_frames=taken_frames, taken_bytes=taken_bytes)


def test_only_a_failed_end_without_an_account_is_of_a_life_the_peer_never_heard_of() -> None:
    """It waits behind nothing, so no credit will ever come for it."""
    ledger = CreditLedger()
    assert ledger.is_unheard_of(failed_end())
    assert not ledger.is_unheard_of(opening())
    assert not ledger.is_unheard_of(data(0))
    ledger.count(opening(), 0)
    assert not ledger.is_unheard_of(failed_end())


@pytest.fixture
def ledger() -> CreditLedger:
    ledger = CreditLedger()
    assert ledger.allows(opening(), 0)
    ledger.count(opening(), 0)
    assert len(ledger) == 1
    return ledger


def test_the_unclaimed_credit_is_small_and_has_no_exception(ledger: CreditLedger) -> None:
    assert not put(ledger, 0, UNCLAIMED_BYTES + 1)
    for seq in range(UNCLAIMED_FRAMES):
        assert put(ledger, seq, 1)
    assert not put(ledger, UNCLAIMED_FRAMES, 1)


def test_a_grant_is_absolute_and_comes_twice_without_harm(ledger: CreditLedger) -> None:
    for _ in range(2):
        grant(ledger, 3, 100)
    assert [put(ledger, seq, 10) for seq in range(4)] == [True, True, True, False]
    for _ in range(2):
        grant(ledger, 3, 100, 1, 10)
    assert [put(ledger, seq, 10) for seq in (3, 4)] == [True, False]


def test_only_a_grant_that_helps_the_waiting_frame_says_so(ledger: CreditLedger) -> None:
    assert not grant(ledger, 2, 100)
    assert put(ledger, 0, 60)
    assert not put(ledger, 1, 60)
    assert not grant(ledger, 2, 110)
    assert grant(ledger, 2, 120)
    assert not grant(ledger, 2, 130)  # told once
    assert put(ledger, 1, 60)


def test_a_grant_that_goes_backward_is_ignored(ledger: CreditLedger) -> None:
    grant(ledger, 4, 100)
    for seq in range(4):
        assert put(ledger, seq, 1)
    grant(ledger, 4, 100, 3, 3)
    grant(ledger, 0, 0, 2, 2)
    assert put(ledger, 4, 1)


def test_a_grant_that_was_overtaken_by_a_waiver_does_not_undo_it(ledger: CreditLedger) -> None:
    grant(ledger, 1_000, 1_000)
    grant(ledger, 1, 1)
    for seq in range(1_000):
        assert put(ledger, seq, 1)
    assert not put(ledger, 1_000, 1)


@pytest.mark.parametrize(("frames", "nbytes"), [(2, 1), (1, 6)])
def test_more_taken_than_put_is_the_peers_fault(ledger: CreditLedger, frames: int, nbytes: int) -> None:
    assert put(ledger, 0, 5)
    with pytest.raises(RemoteProtocolError, match=f"{frames} frames and {nbytes} bytes taken, but 1 and 5 were put"):
        grant(ledger, 9, 9, frames, nbytes)


def test_a_grant_for_an_unknown_life_makes_no_account() -> None:
    ledger = CreditLedger()
    assert not grant(ledger, 9, 9, 3, 3)
    assert len(ledger) == 0


def test_a_frame_that_comes_again_after_it_was_stored_is_counted_once(ledger: CreditLedger) -> None:
    assert put(ledger, 0, 5)
    assert put(ledger, 0, 5)
    assert put(ledger, 1, 5)
    assert put(ledger, 1, 5)  # paid, though nothing is left
    assert not put(ledger, 2, 5)
    with pytest.raises(RemoteProtocolError):
        grant(ledger, 9, 100, 3, 10)


def test_a_failed_end_needs_no_credit(ledger: CreditLedger) -> None:
    grant(ledger, 0, 0)
    assert ledger.allows(failed_end(), 0)


def test_nothing_but_an_opening_reaches_a_peer_that_does_not_know_the_life(ledger: CreditLedger) -> None:
    ledger.clear()  # another process is there now
    assert not ledger.allows(failed_end(), 0)
    assert not put(ledger, 3, 1)
    assert len(ledger) == 0


def test_a_life_that_is_opened_again_at_a_new_peer_is_known_there_from_its_opening_on(ledger: CreditLedger) -> None:
    """An opening whose put crossed a restart is put again; what comes after it may follow."""
    ledger.clear()
    assert ledger.allows(opening(), 0)
    assert not put(ledger, 0, 1)  # allowed is not yet stored
    ledger.count(opening(), 0)
    assert put(ledger, 0, 1)
    assert ledger.allows(failed_end(), 0)


def test_an_ok_end_uses_credit_like_data(ledger: CreditLedger) -> None:
    end = Frame(EDGE, R1, FrameKind.END, seq=0, cause=Cause(Outcome.OK))
    grant(ledger, 0, 0)
    assert not ledger.allows(end, 1)


def test_a_dropped_life_is_gone(ledger: CreditLedger) -> None:
    ledger.drop(R1)
    ledger.drop(R1)
    assert len(ledger) == 0


def test_ring_blocks_are_aligned_disjoint_and_all_come_back() -> None:
    chance = random.Random(3)  # noqa: S311 - the same walk in every run
    ring = Ring(10_000)
    held: list[tuple[int, int, object]] = []
    refused = 0
    for _ in range(20_000):
        nbytes = chance.randrange(4_000)
        span = ring.allocate(nbytes)
        if span is None:
            refused += 1
        else:
            assert span.offset % 64 == 0
            assert span.end - span.offset >= max(nbytes, 1)
            assert span.end <= 10_000
            assert all(span.end <= start or stop <= span.offset for start, stop, _ in held)
            held.append((span.offset, span.end, span))
        while held and chance.random() < 0.5:
            _, _, freed = held.pop(chance.randrange(2) if len(held) > 1 else 0)
            ring.free(freed)
            ring.free(freed)
    assert refused > 100
    while held:
        ring.free(held.pop()[2])
    assert len(ring) == 0
    assert ring.fits(9_984)


def test_a_ring_that_is_full_to_the_byte_gives_nothing() -> None:
    ring = Ring(256)
    spans = [ring.allocate(64) for _ in range(4)]
    assert None not in spans
    assert not ring.fits(1)
    assert ring.allocate(0) is None
    ring.free(spans[1])
    assert not ring.fits(1)  # the oldest is still held
    ring.free(spans[0])
    assert ring.fits(128)
    assert not ring.fits(129)
