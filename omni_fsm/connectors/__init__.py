"""The connector port and its implementations: memory and shared memory.

Start with `omni_fsm.connectors.port`: it is what the runtime needs of a data plane.
"""

from omni_fsm.connectors.connector import LinkConnector
from omni_fsm.connectors.memory import MemoryEdge, memory_pair
from omni_fsm.connectors.port import CHUNKS, FULL_PAYLOAD, Connector, Health, Hello, HelloMismatchError
from omni_fsm.connectors.shm import shm_receiver, shm_sender
from omni_fsm.connectors.wiring import EdgeConfig, Ends, Role, Wiring, register_connector

__all__ = [
    "CHUNKS",
    "FULL_PAYLOAD",
    "Connector",
    "EdgeConfig",
    "Ends",
    "Health",
    "Hello",
    "HelloMismatchError",
    "LinkConnector",
    "MemoryEdge",
    "Role",
    "Wiring",
    "memory_pair",
    "register_connector",
    "shm_receiver",
    "shm_sender",
]
