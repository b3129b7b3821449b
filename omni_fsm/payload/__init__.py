"""Payload trees: their wire codec, what is gathered of many, and what a scheduler needs of one.

A tree is made of dict (str or int keys), list, tuple, None, bool, int, float, str, bytes, torch tensors, numpy arrays
and numpy numbers. `encode` borrows the tensors' memory, `decode` returns views of the received buffer; nothing is
pickled.

>>> payload = encode({"codes": torch.tensor([[1, 2]]), "speaker": "amy", 7: (1.5, None)})
>>> buffer = receive_buffer(payload.nbytes)     # what a connector fills on the receiving side
>>> buffer[:] = b"".join(payload.parts)
>>> decode(buffer)
{'codes': tensor([[1, 2]]), 'speaker': 'amy', 7: (1.5, None)}
"""

import torch  # noqa: F401 - the example above uses it

from omni_fsm.payload.accumulate import (
    FLAG_KEYS,
    AccumulateError,
    AccumulateLimitError,
    ChunkAccumulator,
    FullPayload,
)
from omni_fsm.payload.decoding import decode
from omni_fsm.payload.encoding import EncodedPayload, encode
from omni_fsm.payload.heads import HeadPlan
from omni_fsm.payload.metadata import (
    MetadataError,
    MetadataKeys,
    Placement,
    SchedulingMetadata,
    is_consumable,
    place_chunk,
    scheduling_metadata,
    wakes,
)
from omni_fsm.payload.sizes import tree_nbytes
from omni_fsm.payload.wire import Limits, PayloadDecodeError, PayloadEncodeError, receive_buffer

__all__ = [
    "FLAG_KEYS",
    "AccumulateError",
    "AccumulateLimitError",
    "ChunkAccumulator",
    "EncodedPayload",
    "FullPayload",
    "HeadPlan",
    "Limits",
    "MetadataError",
    "MetadataKeys",
    "PayloadDecodeError",
    "PayloadEncodeError",
    "Placement",
    "SchedulingMetadata",
    "decode",
    "encode",
    "is_consumable",
    "place_chunk",
    "receive_buffer",
    "scheduling_metadata",
    "tree_nbytes",
    "wakes",
]
