"""The protocol, pure: states change by `step` alone, nothing here does I/O or knows the time."""

from omni_fsm.protocol.errors import (
    ConfigError,
    LocalProtocolError,
    OmniFsmError,
    ProtocolError,
    RemoteProtocolError,
    SpecError,
)
from omni_fsm.protocol.frames import Body, Cause, Frame, FrameKind, Outcome
from omni_fsm.protocol.half import Half, Moved
from omni_fsm.protocol.identity import Edge, FrameKey, Identity
from omni_fsm.protocol.kv import KvTransferHalf
from omni_fsm.protocol.receiver import ReceiverHalf
from omni_fsm.protocol.sender import SenderHalf
from omni_fsm.protocol.table import Cell, Table, step

__all__ = [
    "Body",
    "Cause",
    "Cell",
    "ConfigError",
    "Edge",
    "Frame",
    "FrameKey",
    "FrameKind",
    "Half",
    "Identity",
    "KvTransferHalf",
    "LocalProtocolError",
    "Moved",
    "OmniFsmError",
    "Outcome",
    "ProtocolError",
    "ReceiverHalf",
    "RemoteProtocolError",
    "SenderHalf",
    "SpecError",
    "Table",
    "step",
]
