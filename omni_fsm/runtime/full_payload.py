"""A full payload is a stream of one frame: what the producer gives is gathered, and goes out with the end."""

from typing import Any

from omni_fsm.payload import FullPayload
from omni_fsm.runtime.ports import Producer, ProducerContext

NAMESPACE = "omni_fsm.full_payload"


class FullPayloadProducer:
    """A producer around a stage's own one, for an edge in the mode ``full_payload``.

    What is gathered is state of the request: it is gone with it. A request that ends early sends none of it.

    Args:
        producer: The stage's own.
        replace_keys: Keys of which each payload gives all there is; see `omni_fsm.payload.FullPayload`.

    Raises:
        AccumulateError: When called: payloads of one request do not go together; the request ends with these words.
        AccumulateLimitError: When called: they are too large together.
    """

    def __init__(self, producer: Producer, replace_keys: tuple[str, ...] = ()) -> None:
        self._producer, self._replace_keys = producer, replace_keys

    def __call__(self, context: ProducerContext) -> Any:
        """Gather; give all with the last call. See `omni_fsm.runtime.Producer`."""
        gathered = context.state.get_or_create(NAMESPACE, self._fresh)
        gathered.add(self._producer(context))
        return gathered.take() if context.is_finished else None

    def _fresh(self) -> FullPayload:
        return FullPayload(self._replace_keys)
