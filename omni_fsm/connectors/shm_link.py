"""The link between two processes of one machine: a unix SEQPACKET socket for packets and wake-ups, memfds for bodies."""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from omni_fsm.connectors.arena import Arena, OwnedFd, fds_in, mapped
from omni_fsm.connectors.link import Block, Body, Gone, Packet, Ready, Sent
from omni_fsm.connectors.shm_bodies import ArenaBlock, OwnBlock, ShmPacket
from omni_fsm.connectors.wire import INLINE_BYTES, MAX_PACKET_BYTES, HelloPacket
from omni_fsm.protocol.errors import ConfigError, RemoteProtocolError

_SOCKET_BYTES = 1 << 20
_FDS_SPACE = socket.CMSG_SPACE(4 * struct.calcsize("i"))
_PEER = struct.Struct("iII")  # struct ucred
_IOV_MAX = 64
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
# As plain numbers: each | of two socket constants costs a microsecond.
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_CUT_FLAGS = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class ShmLink:
    """One end of a unix socket with a shared arena; see `omni_fsm.connectors.link.Link`."""

    inline_bytes = INLINE_BYTES
    unread = 0  # in the socket, where they cannot be counted

    def __init__(self, path: Path, retry_s: float, arena_bytes: int, own_budget_bytes: int) -> None:
        if retry_s <= 0:
            raise ConfigError("retry_s", retry_s, "seconds above 0")
        self._path, self._retry_s = path, retry_s
        self.arena_bytes = arena_bytes
        self._sends = arena_bytes > 0
        self._own_budget_bytes = own_budget_bytes
        self._own_bytes = [0]
        self._socket: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._listener_file = (0, 0)  # device and inode of the path that is ours
        self._pidfd: OwnedFd | None = None
        self.peer_pid = 0
        self._peer_dead = False
        self._next_try_s = 0.0
        self._arena: Arena | None = None  # ours
        self._peer_arena: memoryview | None = None  # the peer's, mapped
        self._received = bytearray(MAX_PACKET_BYTES)
        self._epoll = select.epoll()
        self._eventfd = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._epoll.register(self._eventfd.number, select.EPOLLIN)
        self._events: list[tuple[int, int]] = []

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self) -> bool:
        """Connect to the listening stage, or accept the connecting one."""
        if self._socket is not None:
            return True
        try:
            found = self._dial() if self._sends else self._accept()
            return found is not None and self._adopt(found)
        except OSError:  # no descriptor or no memory just now
            self.part()
            self._stop_listening()
            self._next_try_s = time.monotonic() + self._retry_s
            return False

    def retry_s(self) -> float | None:
        """A timer runs only for an end that nobody can wake: a connecting one, or one that could not listen."""
        if self._socket is not None or self._listener is not None:
            return None
        return max(0.0, self._next_try_s - time.monotonic())

    def _dial(self) -> socket.socket | None:
        if time.monotonic() < self._next_try_s:
            return None
        self._next_try_s = time.monotonic() + self._retry_s
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found.settimeout(0)
        if found.connect_ex(os.fspath(self._path)):
            found.close()
            return None
        return found

    def _accept(self) -> socket.socket | None:
        if self._listener is None and (time.monotonic() < self._next_try_s or not self.listen()):
            return None
        while self._listener is not None:
            try:
                found, _ = self._listener.accept()
            except BlockingIOError:
                return None
            except ConnectionAbortedError:
                continue
            if _credentials(found)[1] == os.geteuid():
                self._stop_listening()  # nothing named is left while a peer is there
                return found
            found.close()
        return None

    def _adopt(self, found: socket.socket) -> bool:
        pid, uid = _credentials(found)
        if uid != os.geteuid():
            found.close()
            return False
        self._socket, self.peer_pid, self._peer_dead = found, pid, False
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._epoll.register(found.fileno(), select.EPOLLIN)
        try:
            self._pidfd = OwnedFd(os.pidfd_open(pid))
            self._epoll.register(self._pidfd.number, select.EPOLLIN)
        except ProcessLookupError:
            self._peer_dead = True
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            # Of a pid namespace that cannot be seen from here: the end of its socket tells.
        if self._sends:
            self._arena = Arena(self.arena_bytes)
            self._own_bytes = [0]
        return True

    def listen(self, *, wait: bool = False) -> bool:
        """Bind the path, in place of a socket file that nobody answers.

        Args:
            wait: Whether to wait for another listener that is at the same few system calls, or to try again later.

        Returns:
            Whether it listens; not when somebody else does, or (without ``wait``) is about to.
        """
        self._next_try_s = time.monotonic() + self._retry_s
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.settimeout(0)
        folder = OwnedFd(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fcntl.flock(folder.number, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _answers(self._path):
                listener.close()
                return False
            self._path.unlink(missing_ok=True)
            listener.bind(os.fspath(self._path))
            listener.listen(8)
            status = self._path.lstat()
            self._listener_file = (status.st_dev, status.st_ino)
        except BlockingIOError:
            listener.close()
            return False
        except BaseException:
            listener.close()
            raise
        finally:
            folder.close()
        self._listener = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        return True

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(FileNotFoundError):
            status = self._path.lstat()
            if (status.st_dev, status.st_ino) == self._listener_file:
                self._path.unlink()  # before the socket is closed: a path that nobody answers is taken for stale
        self._epoll.unregister(listener.fileno())
        listener.close()

    def part(self) -> None:
        """Close the socket, and forget both arenas."""
        found, self._socket = self._socket, None
        if found is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(found.fileno())  # a forked child may keep it open
            found.close()
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._pidfd.number)
            self._pidfd.close()
        self._pidfd = self._arena = self._peer_arena = None
        self.peer_pid = 0

    # -- packets ---------------------------------------------------------------------------------------------------

    def greet(self, packet: bytes) -> Sent:
        """Say hello; the arena's fd goes along, once."""
        if self._arena is None:
            return self._send([packet], ())
        try:
            return self._send([packet], (self._arena.fd,))
        finally:
            self._arena.fd.close()  # the mapping has its own

    def greeted(self, packet: Packet, header: HelloPacket) -> None:
        """Map the sending end's arena."""
        arena_bytes = header.arena_bytes
        fds = packet.fds if isinstance(packet, ShmPacket) else []
        expected = int(not self._sends)
        if len(fds) != expected or (arena_bytes > 0) != bool(expected):
            raise RemoteProtocolError(
                f"a hello with {len(fds)} descriptors and an arena of {arena_bytes} bytes, expected {expected} arenas"
            )
        if expected:
            self._peer_arena = mapped(fds[0], arena_bytes)

    def send(self, packet: bytes, body: Body = ()) -> Sent:
        """Send one packet."""
        if isinstance(body, OwnBlock) and body.fd is not None:
            sent = self._send([packet], (body.fd,))
            if sent is Sent.DONE:
                body.sent()
            return sent
        if isinstance(body, tuple):
            return self._send([packet, *body] if len(body) < _IOV_MAX else [packet, b"".join(body)], ())
        return self._send([packet], ())

    def _send(self, buffers: Sequence[bytes | memoryview], fds: Sequence[OwnedFd]) -> Sent:
        if self._socket is None:
            return Sent.GONE
        rights = struct.pack(f"{len(fds)}i", *(fd.number for fd in fds))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        try:
            self._socket.sendmsg(buffers, ancillary, _SEND_FLAGS)
        except BlockingIOError:
            return Sent.FULL
        except OSError as error:
            if error.errno in _GONE:
                return Sent.GONE
            raise
        return Sent.DONE

    def receive(self) -> ShmPacket | Gone | None:
        """The next packet. A reset may come before packets that are still queued: read on until there is an end."""
        while self._socket is not None:
            try:
                count, ancillary, flags, _ = self._socket.recvmsg_into([self._received], _FDS_SPACE, _RECEIVE_FLAGS)
            except BlockingIOError:
                return Gone.GONE if self._peer_dead else None
            except ConnectionResetError:
                continue
            fds = fds_in(ancillary) if ancillary else []
            if flags & _CUT_FLAGS or count == 0:
                for fd in fds:
                    fd.close()
                if count == 0 and not fds:
                    return Gone.GONE
                raise RemoteProtocolError(
                    f"a packet of {count} bytes or more with {len(fds)} descriptors or more,"
                    f" the limits are {MAX_PACKET_BYTES} and 1"
                )
            return ShmPacket(memoryview(self._received)[:count], fds, self._peer_arena)
        return None

    # -- bodies ----------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Block | None:
        """Room in the arena; for what the arena could never hold, leave to make a region of its own."""
        if self._arena is None or not self.fits(nbytes):
            return None
        if nbytes > self.arena_bytes:
            return OwnBlock(self._own_bytes, nbytes)
        return ArenaBlock(self._arena, nbytes)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room now."""
        if nbytes > self.arena_bytes:
            return self._own_bytes[0] + nbytes <= self._own_budget_bytes
        return self._arena is not None and self._arena.ring.fits(nbytes)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def watch_room(self, *, on: bool) -> None:
        """Whether ``poll`` shall also return when the socket takes packets."""
        if self._socket is not None:
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if on else 0))

    def poll(self, timeout_s: float | None) -> None:
        """Sleep in the kernel until something happens."""
        self._events = []
        self._events = self._epoll.poll(timeout_s)

    def settle(self) -> Ready:
        """What happened."""
        woken = readable = writable = False
        for fd, mask in self._events:
            if fd == self._eventfd.number:
                woken = True
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif self._pidfd is not None and fd == self._pidfd.number:
                self._peer_dead = readable = True
            elif self._socket is not None and fd == self._socket.fileno():
                writable = writable or bool(mask & select.EPOLLOUT)
                readable = readable or bool(mask & ~select.EPOLLOUT)
        self._events = []
        return Ready(woken, readable, writable)

    def wake(self) -> None:
        """Make ``poll`` return."""
        if self._eventfd.number >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._eventfd.number, 1)

    def close(self) -> None:
        """Close all but the wake-up."""
        self.part()
        self._stop_listening()

    def release(self) -> None:
        """Close the wake-up."""
        self._eventfd.close()
        self._epoll.close()


def _credentials(found: socket.socket) -> tuple[int, int]:
    """Process and user id of the peer."""
    pid, uid, _ = _PEER.unpack(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def _answers(path: Path) -> bool:
    """Whether a living process listens at a path. One that died may have left the socket to a forked child."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    probe.settimeout(0)
    try:
        failure = probe.connect_ex(os.fspath(path))
        if failure:
            return failure == errno.EAGAIN  # its backlog is full
        try:
            os.close(os.pidfd_open(_credentials(probe)[0]))
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return True
    finally:
        probe.close()
