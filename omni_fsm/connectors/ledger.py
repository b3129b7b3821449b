"""The sender's book of credit: what each stream may have outstanding at the receiving stage.

An account begins with the first frame of its life that is stored (``open``), with a small credit for a stream that
nobody has claimed yet. A grant replaces its numbers; they are absolute, so a grant that comes twice, or late, does no
harm. Only what was stored is counted, and each seq once: a frame that comes again after it was stored passes uncounted,
as the receiver drops the repetition without taking it.
"""

from dataclasses import dataclass

from omni_fsm.protocol.errors import RemoteProtocolError
from omni_fsm.protocol.frames import Frame, FrameKind
from omni_fsm.protocol.identity import Identity

UNCLAIMED_FRAMES = 2
UNCLAIMED_BYTES = 512 * 1024


@dataclass(slots=True)
class _Account:
    frames: int = UNCLAIMED_FRAMES
    nbytes: int = UNCLAIMED_BYTES
    granted: bool = False
    put_frames: int = 0
    put_bytes: int = 0
    taken_frames: int = 0
    taken_bytes: int = 0
    last_seq: int = -1
    waiting_bytes: int | None = None

    def fits(self, nbytes: int) -> bool:
        outstanding_frames = self.put_frames - self.taken_frames
        if outstanding_frames >= self.frames:
            return False
        outstanding_bytes = self.put_bytes - self.taken_bytes
        return outstanding_bytes + nbytes <= self.nbytes or (self.granted and outstanding_frames == 0)


class CreditLedger:
    """Credit of every live stream of one edge, at its sending end. Its owner holds a lock around each call."""

    def __init__(self) -> None:
        self._accounts: dict[Identity, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def allows(self, frame: Frame, nbytes: int) -> bool:
        """Whether the frame may be put now. A no is remembered: `grant` tells when it may have become a yes.

        Only ``open`` begins an account. Any other frame without one is of a life that an earlier peer knew: it may not
        reach this peer, which would wait for the rest.
        """
        if frame.kind is FrameKind.OPEN:
            return True
        account = self._accounts.get(frame.identity)
        if account is None:
            return False
        if not frame.uses_credit:
            return True
        if frame.seq <= account.last_seq or account.fits(nbytes):
            account.waiting_bytes = None
            return True
        account.waiting_bytes = nbytes
        return False

    def is_unheard_of(self, frame: Frame) -> bool:
        """Whether this is the failed end of a life whose ``open`` the peer never got: it waits for nothing, and never fits."""
        failed_end = frame.kind is FrameKind.END and not frame.uses_credit
        return failed_end and frame.identity not in self._accounts

    def count(self, frame: Frame, nbytes: int) -> None:
        """The frame was stored."""
        if frame.kind is FrameKind.OPEN:
            self._accounts.setdefault(frame.identity, _Account())
        if not frame.uses_credit:
            return
        account = self._accounts[frame.identity]
        if frame.seq > account.last_seq:
            account.last_seq = frame.seq
            account.put_frames += 1
            account.put_bytes += nbytes

    def grant(self, identity: Identity, *, frames: int, nbytes: int, taken_frames: int, taken_bytes: int) -> bool:
        """The receiver's numbers have come. Returns whether a frame that was refused credit may now be put.

        Ignored: a grant for a life that is unknown here (it is over, or its first frame was not put yet) and one that
        takes back what was taken (it was overtaken by a later one).

        Raises:
            RemoteProtocolError: The receiver says it took more than was put. Its book cannot be trusted any more.
        """
        account = self._accounts.get(identity)
        if account is None:
            return False
        if taken_frames > account.put_frames or taken_bytes > account.put_bytes:
            raise RemoteProtocolError(
                f"credit of {identity}: {taken_frames} frames and {taken_bytes} bytes taken,"
                f" but {account.put_frames} and {account.put_bytes} were put"
            )
        if taken_frames < account.taken_frames or taken_bytes < account.taken_bytes:
            return False
        if account.granted:  # a waiver (unlimited credit) must not be undone by a grant that it overtook
            frames, nbytes = max(frames, account.frames), max(nbytes, account.nbytes)
        account.frames, account.nbytes, account.granted = frames, nbytes, True
        account.taken_frames, account.taken_bytes = taken_frames, taken_bytes
        if account.waiting_bytes is None or not account.fits(account.waiting_bytes):
            return False
        account.waiting_bytes = None
        return True

    def drop(self, identity: Identity) -> None:
        """The life is over. Idempotent."""
        self._accounts.pop(identity, None)

    def clear(self) -> None:
        """The peer is lost, and with it every stream."""
        self._accounts.clear()
