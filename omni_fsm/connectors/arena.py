"""Shared regions of the shm link: sealed memfds, a ring of blocks in one of them, and fds that are closed once."""

import array
import fcntl
import mmap
import os
import socket
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omni_fsm.protocol.errors import RemoteProtocolError

ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GIL_BYTES = 65_536
_IO_BYTES = 1 << 30  # one read or write moves at most 2 GiB


class OwnedFd:
    """A file descriptor with one owner: closed once, at the latest when its owner is forgotten."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def number(self) -> int:
        """The descriptor, -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Close it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def fds_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[OwnedFd]:
    """Every descriptor that came with a packet, owned at once so that none can leak."""
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return [OwnedFd(number) for number in numbers]


def copy_parts(target: memoryview, parts: Sequence[memoryview]) -> None:
    """Fill ``target`` with ``parts``, end to end. Large parts are copied without the GIL."""
    at = 0
    for part in parts:
        end = at + part.nbytes
        if part.nbytes >= _GIL_BYTES:
            np.copyto(np.frombuffer(target[at:end], np.uint8), np.frombuffer(part, np.uint8))
        elif part.nbytes:
            target[at:end] = part.cast("B")
        at = end


@dataclass(slots=True, eq=False)
class _Span:
    offset: int
    end: int
    freed: bool = False


class Ring:
    """Allocates blocks of one region first in, first out. Blocks may be freed in any order; room returns in order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._spans: deque[_Span] = deque()

    def __len__(self) -> int:
        return len(self._spans)

    def fits(self, nbytes: int) -> bool:
        """Whether `allocate` would succeed now."""
        return self._place(nbytes) is not None

    def allocate(self, nbytes: int) -> _Span | None:
        """A block of at least one aligned unit, or None: no room now."""
        offset = self._place(nbytes)
        if offset is None:
            return None
        span = _Span(offset, offset + _aligned(nbytes))
        self._spans.append(span)
        return span

    def free(self, span: _Span) -> None:
        """Give a block back. Idempotent."""
        span.freed = True
        while self._spans and self._spans[0].freed:
            self._spans.popleft()

    def _place(self, nbytes: int) -> int | None:
        size = _aligned(nbytes)
        if not self._spans:
            return 0 if size <= self.nbytes else None  # an empty ring starts over: its first pages are warm
        oldest, newest = self._spans[0].offset, self._spans[-1].end
        if newest <= oldest:
            return newest if oldest - newest >= size else None
        if self.nbytes - newest >= size:
            return newest
        return 0 if oldest >= size else None


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Arena:
    """The sending end's shared region: a sealed memfd, mapped for as long as anything refers to it."""

    def __init__(self, nbytes: int) -> None:
        self.fd = OwnedFd(os.memfd_create("omni_fsm arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd.number, nbytes)
        fcntl.fcntl(self.fd.number, fcntl.F_ADD_SEALS, SEALS)
        self.view = memoryview(mmap.mmap(self.fd.number, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
        self.ring = Ring(nbytes)


def own_region(parts: Sequence[memoryview]) -> OwnedFd:
    """A sealed memfd with the bytes of ``parts``, for a body that no arena can hold."""
    fd = OwnedFd(os.memfd_create("omni_fsm frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    for part in parts:
        rest = part.cast("B")
        while rest:
            rest = rest[os.write(fd.number, rest[:_IO_BYTES]) :]
    fcntl.fcntl(fd.number, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    return fd


def checked_region(fd: OwnedFd, nbytes: int) -> None:
    """Make sure that a peer's region is a sealed memfd of exactly this size: then no read of it can fault.

    Raises:
        RemoteProtocolError: It is not; says what it is.
    """
    status = os.fstat(fd.number)
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        raise RemoteProtocolError(
            f"the peer's shared region has {status.st_size} bytes and file mode {status.st_mode:o},"
            f" announced were {nbytes} bytes"
        )
    try:
        seals = fcntl.fcntl(fd.number, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError(f"the peer's shared region is no memfd: {error}") from error
    if seals & SEALS != SEALS:
        raise RemoteProtocolError(f"the peer's shared region has seals {seals:#x}, needed are {SEALS:#x}")


def mapped(fd: OwnedFd, nbytes: int) -> memoryview:
    """A read-only view of a peer's arena, mapped for as long as anything refers to it.

    Raises:
        RemoteProtocolError: It is not sealed, has another size, or cannot be mapped.
    """
    checked_region(fd, nbytes)
    try:
        return memoryview(mmap.mmap(fd.number, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"the peer's arena of {nbytes} bytes cannot be mapped: {error}") from error


def read_region(fd: OwnedFd, target: memoryview) -> None:
    """Copy a checked region of its own into private memory, without mapping it."""
    at = 0
    while at < target.nbytes:
        count = os.preadv(fd.number, [target[at : at + _IO_BYTES]], at)
        if count == 0:
            raise RemoteProtocolError(f"the peer's region ended at {at} of {target.nbytes} bytes")
        at += count
