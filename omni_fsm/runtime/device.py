"""What a runner has on a GPU, on its way to the thread that makes the payload of it.

A runner hands its tensors over while the GPU may still compute them, on a stream of the runner's. The worker that runs the
producer has another stream. So the output takes an event along, for which that stream waits; and torch is told that the stream
uses the tensors, so that their memory goes to no other tensor while work on them is queued. Neither makes a thread wait.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class _Handed(NamedTuple):
    """An output, and the moment on the runner's stream of each device when it was handed over."""

    output: Any
    events: dict[torch.device, torch.cuda.Event]


def handed_in(output: Any) -> Any:
    """Called by: the runner's thread, as it submits. Without a GPU in use this is the output itself.

    Of tensors in dicts, lists and tuples the devices are known; for those in anything else, the thread's current one is taken.
    """
    if output is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return output
    streams = {torch.cuda.current_stream(), *(torch.cuda.current_stream(tensor.device) for tensor in _on_gpu(output))}
    return _Handed(output, {stream.device: stream.record_event() for stream in streams})


def handed_out(item: Any) -> Any:
    """The output. Called by: the worker, before its producer; its streams go on after the events."""
    if not isinstance(item, _Handed):
        return item
    for device, event in item.events.items():
        torch.cuda.current_stream(device).wait_event(event)
    for tensor in _on_gpu(item.output):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return item.output


def _on_gpu(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree that are on a GPU."""
    if isinstance(tree, torch.Tensor):
        if tree.is_cuda:
            yield tree
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _on_gpu(child)
