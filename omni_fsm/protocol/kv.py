"""The half of a KV transfer: marked once, one outcome, and blocks that are held until nobody can touch them."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, ClassVar

from omni_fsm.protocol.frames import Cause, Outcome
from omni_fsm.protocol.half import Half, Moved
from omni_fsm.protocol.identity import Edge, Identity
from omni_fsm.protocol.names import KvTransferBookkeeping, KvTransferEffect, KvTransferEvent, KvTransferState
from omni_fsm.protocol.table import Table

KvTransferMoved = Moved[KvTransferState, KvTransferEvent, KvTransferEffect]
KvTransferTable = Table[KvTransferState, KvTransferEvent, KvTransferBookkeeping, KvTransferEffect]

Piece = int | str
"""A part that ends by itself: the number of a remote rank, or the role of a companion."""


class KvTransferHalf(Half[KvTransferState, KvTransferEvent, KvTransferBookkeeping, KvTransferEffect]):
    """The transfer of one life's blocks, at one rank and one end of an edge.

    Attributes:
        blocks: Ids of the blocks it may touch, in the order of the tokens; empty until they are marked.
        open_pieces: Remote ranks and companions that are not acknowledged. The ranks are added when it begins.
        begun: Whether the engine was given it.
        repeats: Acknowledgements that named no open piece.
        cause: How it ended: ``ok`` once completed, else the first cause.

    Source: specs/kv_transfer.toml.
    """

    def __init__(self, table: KvTransferTable, edge: Edge, identity: Identity, companions: Iterable[str] = ()) -> None:
        super().__init__(table, edge, identity)
        self.blocks: tuple[int, ...] = ()
        self.open_pieces: frozenset[Piece] = frozenset(companions)
        self.begun = False
        self.repeats = 0
        self.cause: Cause | None = None
        self._given: tuple[int, ...] | frozenset[Piece] = ()  # what the bookkeeping of the move under way keeps

    def key(self) -> Hashable:
        """See `Half.key`."""
        return self.edge, self.identity, self.state, self.blocks, self.open_pieces, self.begun, self.repeats, self.cause

    # What the scheduler and the runner say

    def on_marked(self, blocks: Iterable[int]) -> KvTransferMoved:
        """The scheduler asks for these blocks. Ignored from the second time on: the first blocks are kept."""
        return self._move_with(KvTransferEvent.BLOCKS_MARKED, tuple(blocks))

    def on_begun(self, ranks: Collection[int], at_ns: int) -> KvTransferMoved:
        """The runner drains what is pending.

        Args:
            ranks: Remote ranks that the plan has a piece for.
            at_ns: CLOCK_MONOTONIC in nanoseconds; of the outcome, where there is no piece.
        """
        pieces = frozenset[Piece](ranks)
        if pieces or self.open_pieces:
            return self._move_with(KvTransferEvent.BEGUN, pieces)
        return self._end_by(KvTransferEvent.BEGUN_WITHOUT_PIECES, Cause(Outcome.OK, at_ns=at_ns))

    def on_cancelled(self, cause: Cause) -> KvTransferMoved:
        """The owner of the request cancels, or the parent failed or was cancelled."""
        return self._end_by(KvTransferEvent.CANCELLED, cause)

    def on_drained(self) -> KvTransferMoved:
        """The scheduler collects the outcome of a completed transfer."""
        return self._move(KvTransferEvent.OUTCOME_DRAINED)

    # What the engine, a companion and the clock say

    def on_acked(self, pieces: Collection[Piece], at_ns: int) -> KvTransferMoved:
        """These pieces are delivered, and the engine touches the blocks no more for their sake; or a companion is complete.

        Args:
            pieces: Remote ranks or roles. Those that are not open count as repeated.
            at_ns: CLOCK_MONOTONIC in nanoseconds; of the outcome, if this completes it.
        """
        given = self.open_pieces.intersection(pieces)
        if not given:
            return self._move(KvTransferEvent.PIECE_REPEATED)
        if not self.begun or given != self.open_pieces:
            return self._move_with(KvTransferEvent.PIECE_ACKED, given)
        self._given = given
        return self._end_by(KvTransferEvent.LAST_PIECE_ACKED, Cause(Outcome.OK, at_ns=at_ns))

    def on_all_acked(self, at_ns: int) -> KvTransferMoved:
        """Every remote rank's piece is delivered; see `on_acked`. Companions are still waited for."""
        return self.on_acked(self.open_ranks, at_ns)

    def on_failed(self, cause: Cause) -> KvTransferMoved:
        """The engine, the other end or the runner says that it failed. The blocks may still be touched."""
        return self._end_by(KvTransferEvent.TRANSFER_FAILED, cause)

    def on_quiet(self, cause: Cause) -> KvTransferMoved:
        """The engine touches the blocks no more. With ``cause`` it fails, if nothing had ended it before."""
        return self._end_by(KvTransferEvent.WENT_QUIET, cause)

    def on_deadline(self, cause: Cause) -> KvTransferMoved:
        """It took longer than it may."""
        return self._end_by(KvTransferEvent.DEADLINE_PASSED, cause)

    def on_companion_failed(self, cause: Cause) -> KvTransferMoved:
        """A companion failed or was cancelled."""
        return self._end_by(KvTransferEvent.COMPANION_FAILED, cause)

    @property
    def open_ranks(self) -> frozenset[int]:
        """Remote ranks that are not acknowledged."""
        return frozenset(piece for piece in self.open_pieces if isinstance(piece, int))

    @property
    def holds(self) -> bool:
        """Whether its blocks are held."""
        return self.state not in {KvTransferState.IDLE, KvTransferState.RELEASED}

    def _end_by(self, event: KvTransferEvent, cause: Cause) -> KvTransferMoved:
        """Move by an event that may end it; the first cause that does is kept."""
        cell = self.table.cells.get((self.state, event))
        if self.cause is None and cell is not None and cell.next is not self.state:
            self.cause = cause
        return self._move(event)

    def _move_with(self, event: KvTransferEvent, given: tuple[int, ...] | frozenset[Piece]) -> KvTransferMoved:
        self._given = given
        return self._move(event)

    # Bookkeeping

    def _keep_blocks(self) -> None:
        self.blocks = tuple(block for block in self._given if isinstance(block, int))

    def _open_pieces(self) -> None:
        self.open_pieces, self.begun = self.open_pieces.union(self._given), True

    def _close_pieces(self) -> None:
        self.open_pieces = self.open_pieces.difference(self._given)

    def _drop_companions(self) -> None:
        self.open_pieces = frozenset[Piece](self.open_ranks)

    def _count_repeat(self) -> None:
        self.repeats += 1

    _DO: ClassVar[Mapping[Any, Callable[[Any], None]]] = {
        KvTransferBookkeeping.KEEP_BLOCKS: _keep_blocks,
        KvTransferBookkeeping.OPEN_PIECES: _open_pieces,
        KvTransferBookkeeping.CLOSE_PIECES: _close_pieces,
        KvTransferBookkeeping.DROP_COMPANIONS: _drop_companions,
        KvTransferBookkeeping.COUNT_REPEAT: _count_repeat,
    }
