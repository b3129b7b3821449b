"""Freezes a whole stage into bytes and thaws it again: how an explorer goes back to a state of the real runtime.

Pickle does the work. Locks come back open, since no step is under way when a stage is frozen; what never changes (tables,
settings) is shared by all copies. The bytes never leave this process.
"""

import copyreg
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

from omni_fsm.payload import encode
from omni_fsm.payload.decoding import decode
from omni_fsm.payload.encoding import EncodedPayload
from omni_fsm.protocol.table import Table
from omni_fsm.runtime.config import StageConfig
from omni_fsm.verify.ends import Role

_SHARED: list[object] = []


def freeze(thing: Any) -> bytes:
    """The bytes of a stage, or of anything that holds one, between two steps."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _DISPATCH
    pickler.dump(thing)
    return buffer.getvalue()


def thaw(frozen: bytes) -> Any:
    """A copy of its own."""
    return pickle.loads(frozen)  # noqa: S301 - bytes of our own, made in this process by `freeze`


def _shared(number: int) -> object:
    return _SHARED[number]


def _share(thing: object) -> tuple[Callable[..., Any], tuple[int]]:
    for number, known in enumerate(_SHARED):
        if known is thing:
            return _shared, (number,)
    _SHARED.append(thing)
    return _shared, (len(_SHARED) - 1,)


def _payload(tree: Any) -> EncodedPayload:
    return encode(tree).owned()


_DISPATCH: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    threading.Condition: lambda condition: (threading.Condition, (condition._lock,)),
    EncodedPayload: lambda body: (_payload, (decode(b"".join(body.parts)),)),
    Table: _share,
    StageConfig: _share,
    Role: _share,
}
