"""An edge between two processes of one machine: its two ends, and the directory where they meet.

The receiving stage listens, the sending stage connects. The listening socket is the only thing that has a name, and
only while no peer is connected; whatever is shared lives as long as the two processes refer to it, and no longer.
"""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from omni_fsm.connectors.connector import DEFAULT_MAX_FRAME_BYTES, LinkConnector
from omni_fsm.connectors.port import Hello
from omni_fsm.connectors.shm_link import ShmLink
from omni_fsm.connectors.wire import INLINE_BYTES
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Edge

DEFAULT_ARENA_BYTES = 64 << 20
RETRY_S = 0.05
"""How often an unconnected end tries again where no event can tell it to."""

_PATH_BYTES_MAX = 107


def shm_sender(
    hello: Hello,
    directory: str | Path,
    *,
    arena_bytes: int = DEFAULT_ARENA_BYTES,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    retry_s: float = RETRY_S,
) -> LinkConnector:
    """The sending end of an edge to another process of this machine.

    Args:
        hello: What this end says and expects.
        directory: Where the receiving stage listens: a directory of this user with mode 0700; made when missing.
        arena_bytes: Size of the shared region for bodies over 32 KiB. Touched pages count as this process's memory.
        max_frame_bytes: The largest body of one frame, and the most that bodies larger than the arena hold together.
        retry_s: How often to look for the receiving stage while there is none.

    Raises:
        ConfigError: The directory, its length or a number cannot be used.
    """
    if arena_bytes < INLINE_BYTES:
        raise ConfigError("arena_bytes", arena_bytes, f"an int of at least {INLINE_BYTES}")
    link = ShmLink(_socket_path(directory, hello.edge), retry_s, arena_bytes, max_frame_bytes)
    return LinkConnector(link, hello, sends=True, max_frame_bytes=max_frame_bytes)


def shm_receiver(
    hello: Hello,
    directory: str | Path,
    *,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    retry_s: float = RETRY_S,
) -> LinkConnector:
    """The receiving end of an edge from another process of this machine; it listens from now on.

    Args:
        hello: What this end says and expects.
        directory: As for `shm_sender`.
        max_frame_bytes: The largest body that this end accepts.
        retry_s: How often to try again to listen, where that failed.

    Raises:
        ConfigError: The directory cannot be used, or another process listens on this edge.
    """
    path = _socket_path(directory, hello.edge)
    link = ShmLink(path, retry_s, 0, max_frame_bytes)
    try:
        connector = LinkConnector(link, hello, sends=False, max_frame_bytes=max_frame_bytes)
        listens = link.listen(wait=True)
    except BaseException:
        link.release()
        raise
    if not listens:
        connector.close()
        raise ConfigError("directory", str(directory), f"one where nobody else listens for edge {hello.edge}")
    return connector


def _socket_path(directory: str | Path, edge: Edge) -> Path:
    """Where the edge's receiving end listens: a name made of a digest, in a directory that is ours alone."""
    folder = Path(directory).absolute()
    accepted = "a directory of this user with mode 0700"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError("directory", str(directory), f"{accepted} ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError("directory", str(directory), f"{accepted}, no link and no file")
    if status.st_uid != os.geteuid():
        raise ConfigError("directory", str(directory), f"{accepted}; its owner is uid {status.st_uid}")
    if status.st_mode & 0o077:
        raise ConfigError("directory", str(directory), f"{accepted}; its mode is {stat.S_IMODE(status.st_mode):04o}")
    digest = hashlib.sha256()
    for part in (edge.from_stage, edge.to_stage):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    path = folder / f"{digest.hexdigest()[:32]}.sock"
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigError("directory", str(directory), f"a path of at most {_PATH_BYTES_MAX - 38} bytes")
    return path
