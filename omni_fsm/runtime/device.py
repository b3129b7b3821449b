"""What a runner has on a GPU, on its way to the thread that makes the payload of it.

A runner hands its tensors over while the GPU may still compute them, on a stream of the runner's. The worker that runs the
producer has another stream, and must not read before that: so the output takes an event along. Nothing here waits on the CPU.
"""

from typing import Any, NamedTuple

import torch


class _Handed(NamedTuple):
    """An output, and the moment on a device's stream when it was handed over."""

    output: Any
    event: torch.cuda.Event
    device: torch.device


def handed_in(output: Any) -> Any:
    """Called by: the runner's thread, as it submits. Without a GPU in use this is the output itself."""
    if output is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return output
    stream = torch.cuda.current_stream()
    return _Handed(output, stream.record_event(), stream.device)


def handed_out(item: Any) -> Any:
    """The output. Called by: the worker, before its producer; its stream goes on after the event."""
    if not isinstance(item, _Handed):
        return item
    torch.cuda.current_stream(item.device).wait_event(item.event)
    return item.output
