"""The facade of a stage: what a model runner and its scheduler call, in their own words."""

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from omni_fsm.connectors.port import Connector, Health
from omni_fsm.observe import LogObserver
from omni_fsm.protocol.errors import ConfigError, OmniFsmError
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import (
    Admission,
    Feedback,
    Lifecycle,
    Observer,
    Offer,
    Producer,
    Register,
    StageConfig,
    StageHost,
    StageRuntime,
    StageSteps,
    StageThreads,
    Taken,
    passthrough,
)
from omni_fsm.state import StateView


class AcceptAll:
    """A host that registers every request the stage before offers, under an internal id of its own making."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._numbers = itertools.count()

    def stream_offered(self, identity: Identity) -> Offer:  # noqa: ARG002 - the port's signature
        """See `StageHost`."""
        return Register(f"{self._stage}-{next(self._numbers)}")

    def feedback_ready(self) -> None:
        """See `StageHost`: this host waits in ``collect_feedback``."""


class Generations:
    """Numbers lives: microseconds since 1970 in the upper 52 bits, a counter below, strictly rising in one process.

    Called by: whoever submits requests to a pipeline, once per life. One object per front.
    """

    _COUNTER_BITS = 12

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        """A number that was not given before."""
        with self._lock:
            self._last = max(self._last + 1, time.time_ns() // 1_000 << self._COUNTER_BITS)
            return self._last


class StageRunnerAdapter:
    """One stage of a pipeline, ready to run: runtime, threads and logs behind one object.

    The runner's loop is: ``collect_feedback``, ``take`` what is ready, compute, ``submit_chunk``, ``end``; and ``release``
    for each request that failed or that it wants no more. All methods are thread-safe and, but for the waits that they
    take a time-out for, return at once.

    Args:
        config: The stage's settings.
        source: Receiving end of the input edge, or None. Owned from here on.
        sink: Sending end of the output edge, or None. Owned from here on.
        producer: Turns what the runner submits into payloads.
        host: The runner's hooks; None accepts every offered request.
        observers: In addition to the logs.
        synchronous: Whether the ends are borrowed and no thread is started: all work is done in ``collect_feedback``; see
            `omni_fsm.runtime.StageSteps`.
    """

    def __init__(  # noqa: PLR0913 - the ports of a stage
        self,
        config: StageConfig,
        *,
        source: Connector | None = None,
        sink: Connector | None = None,
        producer: Producer = passthrough,
        host: StageHost | None = None,
        observers: Iterable[Observer] = (),
        synchronous: bool = False,
    ) -> None:
        self.runtime = StageRuntime(
            config,
            source=source,
            sink=sink,
            producer=producer,
            host=host or AcceptAll(config.stage),
            observers=(LogObserver(config.stage), *observers),
        )
        self.lifecycle: Lifecycle = (StageSteps if synchronous else StageThreads)(self.runtime)
        self._generations = Generations()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()  # what was accepted and is not out within the grace is reported as marker_lost

    # Lifecycle

    def start(self) -> None:
        """Start the stage's threads, if it has any; see `Lifecycle.start`."""
        self.lifecycle.start()

    def shutdown(self, grace_s: float | None = None) -> bool:
        """End every request with ``cancelled``, reason ``shutdown``; see `Lifecycle.shutdown`."""
        return self.lifecycle.shutdown(grace_s)

    def health(self) -> dict[str, Health]:
        """How the edges are: ``source`` and ``sink``, whichever the stage has; see `omni_fsm.connectors.Health`."""
        return self.runtime.health()

    def residue(self) -> dict[str, int]:
        """What the stage holds, by table; see `StageRuntime.residue`."""
        return self.runtime.residue()

    # Requests

    def open(self, external_id: str) -> tuple[str, Identity]:
        """Begin a new life of a request at the front of the pipeline.

        Returns:
            Its internal id in this stage, and its identity, which every stage gets.

        Raises:
            ConfigError: The external id is empty, too long or no text; or the stage has an input and is no front: requests
                come to it by its input.
            OmniFsmError: The stage shuts down.
        """
        if self.runtime.source is not None and not self.runtime.config.front:
            raise ConfigError(
                "front", value=False, accepted="True in the config of a stage with an input that opens requests"
            )
        identity = Identity(external_id, self._generations.next())
        internal_id = f"front-{identity.generation}"
        admission = self.runtime.register(internal_id, identity)
        if not admission.accepted:
            raise OmniFsmError(f"request {identity} was not opened: {admission.reason}")
        return internal_id, identity

    def register(self, internal_id: str, identity: Identity) -> Admission:
        """Begin a life that was numbered elsewhere; see `StageRuntime.register`."""
        return self.runtime.register(internal_id, identity)

    def submit_chunk(self, internal_id: str, output: Any, *, segment_end: bool = False) -> Admission:
        """Offer one step's output to the next stage; see `StageRuntime.submit_chunk`."""
        return self.runtime.submit_chunk(internal_id, output, segment_end=segment_end)

    def end(self, internal_id: str, output: Any = None) -> Admission:
        """The output is complete; see `StageRuntime.end`."""
        return self.runtime.end(internal_id, output)

    def fail(self, internal_id: str, reason: str) -> None:
        """The request failed in this stage; see `StageRuntime.fail`."""
        self.runtime.fail(internal_id, reason)

    def cancel(self, internal_id: str, reason: str = "cancelled") -> None:
        """Nobody wants the request any more; see `StageRuntime.cancel`."""
        self.runtime.cancel(internal_id, reason)

    def release(self, internal_id: str) -> None:
        """This stage is through with the request; see `StageRuntime.release`."""
        self.runtime.release(internal_id)

    def state(self, internal_id: str) -> StateView | None:
        """The request's producer state; see `StageRuntime.state`."""
        return self.runtime.state(internal_id)

    def collect_feedback(self, timeout_s: float = 0.0) -> Feedback:
        """What happened since the last call; see `StageRuntime.collect_feedback`."""
        return self.lifecycle.collect_feedback(timeout_s)

    def take(self, internal_id: str) -> Taken:
        """The next frame of the request's input; see `StageRuntime.take`."""
        return self.runtime.take(internal_id)
