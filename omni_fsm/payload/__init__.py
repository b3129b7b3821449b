"""Payload trees and their wire codec: what a chunk carries from one stage to the next.

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

from omni_fsm.payload.decoding import decode
from omni_fsm.payload.encoding import EncodedPayload, encode
from omni_fsm.payload.sizes import tree_nbytes
from omni_fsm.payload.wire import Limits, PayloadDecodeError, PayloadEncodeError, receive_buffer

__all__ = [
    "EncodedPayload",
    "Limits",
    "PayloadDecodeError",
    "PayloadEncodeError",
    "decode",
    "encode",
    "receive_buffer",
    "tree_nbytes",
]
