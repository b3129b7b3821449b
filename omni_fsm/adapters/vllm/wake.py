"""How a scheduler ends the sleep of its engine."""

import sys
import weakref
from types import FrameType

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore


class EngineWaker:
    """Ends the sleep of the engine that makes this scheduler.

    An idle engine-core process blocks in the ``get`` of its input queue, and vLLM itself ends that sleep by putting ``WAKEUP``
    into it, at shutdown. A scheduler is given no way to its engine, and there is no hook to be called with one. So it is looked
    up among the callers of the scheduler's constructor, once: that needs no change of vLLM's code, and depends on nothing but
    that an engine makes its scheduler. The queue is looked up when it is needed, so it does not matter which of the two is made
    first. An engine without one, in its client's own process, is polled by the client and never sleeps.
    """

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - see above
        while frame is not None and not isinstance(frame.f_locals.get("self"), EngineCore):
            frame = frame.f_back
        self._engine = weakref.ref(frame.f_locals["self"]) if frame is not None else None

    def __call__(self) -> None:
        """Make the engine's loop ask its scheduler whether there is work. Called on any thread."""
        engine = self._engine() if self._engine is not None else None
        queue = getattr(engine, "input_queue", None)
        if queue is not None:
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
