"""What two engines as stages are compared with: the same two engines, and a plain queue between their processes.

Same processes, same worker, same requests; but no protocol: nothing is cancelled, fails, is bounded, checked or cleaned up.

The queue is what ``multiprocessing.Queue`` is inside: a buffer, a thread that feeds it and a connection that pickles. That one
itself can only be inherited, and vLLM's processes do not keep what they could inherit it by.
"""

import threading
from collections import deque
from multiprocessing.connection import Client, Listener
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from omni_fsm.adapters.vllm.prompt import Prompt, request_with
from omni_fsm.adapters.vllm.stage import entry_of
from omni_fsm.adapters.vllm.states import states_of
from omni_fsm.adapters.vllm.wake import EngineWaker
from omni_fsm.bench.engines import QUEUE


class _SendingEnd:
    """Never blocks; a thread sends."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffer: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._feed, daemon=True).start()

    def put(self, item: Any) -> None:
        """Called on any thread."""
        self._buffer.put(item)

    def _feed(self) -> None:
        first = self._buffer.get()
        with Client(self._path, "AF_UNIX") as connection:  # by then the other engine listens
            connection.send(first)
            while True:
                connection.send(self._buffer.get())


class QueueSender(Scheduler):  # type: ignore[misc] # vLLM is not typed here
    """Puts the states of each request into the queue, when it is finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue = _SendingEnd(self.vllm_config.additional_config[QUEUE])
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add_request(self, request: Any) -> None:
        """See vLLM's scheduler. As the stage's, it reads no cached prefix."""
        request.skip_reading_prefix_cache = True
        super().add_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See vLLM's scheduler."""
        states = states_of(model_runner_output)
        requests = {name: self.requests[name] for name in states}
        for name, rows in states.items():
            self._rows.setdefault(name, []).append(rows)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, request in requests.items():
            entry = entry_of(request.sampling_params)
            if request.is_finished() and entry is not None:
                self._queue.put((entry.external_id, torch.cat(self._rows.pop(name)).numpy()))
        return outputs


class QueueReceiver(Scheduler):  # type: ignore[misc] # vLLM is not typed here
    """Holds each request until its states come out of the queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listener = Listener(self.vllm_config.additional_config[QUEUE], "AF_UNIX")
        self._parked: dict[str, Any] = {}
        self._come: deque[tuple[str, np.ndarray[Any, Any]]] = deque()
        self._wake = EngineWaker()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._listener.accept() as connection:
            while True:
                self._come.append(connection.recv())
                self._wake()

    def add_request(self, request: Any) -> None:
        """See vLLM's scheduler."""
        entry = entry_of(request.sampling_params)
        if entry is None:
            super().add_request(request)
        else:
            self._parked[entry.external_id] = request

    def has_requests(self) -> bool:
        """See vLLM's scheduler."""
        self._admit()
        return bool(super().has_requests())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's scheduler."""
        self._admit()
        return super().schedule(*args, **kwargs)

    def _admit(self) -> None:
        for _ in range(len(self._come)):
            name, rows = self._come.popleft()
            request = self._parked.pop(name, None)
            if request is None:  # its client has not asked yet
                self._come.append((name, rows))
            else:
                super().add_request(request_with(request, Prompt(None, torch.from_numpy(rows))))
