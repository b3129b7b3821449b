"""The stage of one engine: what ``additional_config["omni_fsm"]`` says, and the object that the scheduler layer holds."""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from omni_fsm.adapters.runner import StageRunnerAdapter
from omni_fsm.adapters.vllm.producers import states_as_prompt
from omni_fsm.connectors import Role, Wiring
from omni_fsm.connectors.port import FULL_PAYLOAD
from omni_fsm.connectors.settings import converted
from omni_fsm.connectors.wiring import replica_name
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import Identity
from omni_fsm.runtime import Later, Offer, Producer, StageConfig

KEY = "omni_fsm"
"""Where vLLM keeps what is meant for us: in ``additional_config`` for an engine, in ``extra_args`` for a request."""


_USUAL = {"backlog_policy": "fail", "workers": 1}
"""Producers compute, in Python: more than one at once would only take turns, with each other and with the engine's own thread."""

_STEPS_TOGETHER = 128
"""Of a full payload nobody sees a part before its end, so its steps need not cross to the producer's thread one by one. After the
first step they do in lots: so the producer's work is spread, and a request that it refuses does not go on for long."""


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``additional_config["omni_fsm"]`` of an engine. Written by whoever starts the engine, never received from a peer.

    Attributes:
        stage: The stage that the engine is.
        edges: All edges of the pipeline, as `Wiring` takes them.
        extra: For every edge; an edge's own wins.
        config: Settings of `StageConfig` but its ``stage``. ``backlog_policy`` is ``fail``: a step cannot be taken back;
            ``workers`` is 1 if nothing is said: more than one serve producers that wait for something.
        producer: ``module:attribute`` of the producer, which gets ``{"token_ids": [...], "hidden": [tokens, hidden]}`` for each
            step, or on an edge in the mode ``full_payload`` for some steps together, the last with the end. Empty:
            `omni_fsm.adapters.vllm.producers.states_as_prompt`.
        replica_id: Which copy of the pipeline this is.
    """

    stage: str
    edges: list[dict[str, Any]]
    extra: dict[str, Any] = {}
    config: dict[str, Any] = {}
    producer: str = ""
    replica_id: int = 0

    def wiring(self) -> Wiring:
        """The edges of the pipeline.

        Raises:
            ConfigError: One of them cannot be used.
        """
        with _within(KEY):
            wiring = Wiring(self.edges, self.extra)
            for at, edge in enumerate(wiring.edges):
                if edge.connector == "memory":
                    raise ConfigError(f"edges[{at}].connector", edge.connector, "one between processes, such as shm")
            return wiring

    @property
    def role(self) -> Role:
        """What the engine needs connectors for.

        Raises:
            ConfigError: No edge names its stage, or an edge cannot be used.
        """
        with _within(KEY):
            return self.wiring().role(self.stage)

    @property
    def sends(self) -> bool:
        """Whether the engine has an output edge."""
        return self.role in (Role.SENDER, Role.BOTH)

    @property
    def receives(self) -> bool:
        """Whether the engine has an input edge."""
        return self.role in (Role.RECEIVER, Role.BOTH)


class RequestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params.extra_args["omni_fsm"]`` of a request that belongs to a pipeline.

    Attributes:
        external_id: The pipeline's name of the request.
        generation: Number of this life, the same at every engine; see `omni_fsm.adapters.Generations`.
        waits: Whether its prompt comes from the stage before: then that of the client only holds the place. False: the client's
            prompt begins the pipeline.
    """

    external_id: str
    generation: int
    waits: bool = False

    @property
    def identity(self) -> Identity:
        """The life.

        Raises:
            ConfigError: Id or generation cannot be used.
        """
        return Identity(self.external_id, self.generation)


def settings_of(vllm_config: Any) -> StageSettings:
    """The settings that an engine was started with.

    Called by: both layers, each in its process, at start.

    Raises:
        ConfigError: There are none, a field is missing, unknown or of the wrong type, or the engine is of a kind that the layers
            cannot serve.
    """
    additional = vllm_config.additional_config
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    settings = converted(f"additional_config.{KEY}", given, StageSettings)
    _check_served(vllm_config)
    return settings


def entry_of(sampling_params: Any) -> RequestEntry | None:
    """What a request says of its pipeline; None for one that belongs to none.

    Raises:
        ConfigError: A field is missing, unknown or of the wrong type.
    """
    extra_args = sampling_params.extra_args if sampling_params is not None else None
    if not extra_args or KEY not in extra_args:
        return None
    return converted(f"extra_args.{KEY}", extra_args[KEY], RequestEntry)


class EngineCoreStage:
    """The one stage of an engine-core process, as host of its adapter.

    Nobody is registered on offer: a request comes from the engine's client, before or after its frames, and ``unclaimed_s`` and
    ``input_wait_s`` bound the wait for the other.

    Args:
        settings: The engine's.
        wake: Makes the engine's loop look at its scheduler. Called on any thread, when there is news and there was none.

    Attributes:
        adapter: The stage. Started by `start`, and closed by ``adapter.shutdown``.
        news: Set while there is feedback that was not collected; whoever collects clears it first.
        sends: Whether there is an output edge.
        receives: Whether there is an input edge.
        steps_together: How many steps of a request are submitted at once.

    Raises:
        ConfigError: A connector, a setting of the stage or the producer cannot be used.
    """

    def __init__(self, settings: StageSettings, wake: Callable[[], None]) -> None:
        config, producer = _stage_config(settings), _producer(settings.producer)
        self.sends, self.receives = settings.sends, settings.receives
        self.news = threading.Event()
        self._wake = wake
        with _within(KEY):
            source, sink = settings.wiring().open(settings.stage, replica_id=settings.replica_id)
        is_whole = sink is not None and sink.hello().mode == FULL_PAYLOAD
        self.steps_together = _STEPS_TOGETHER if is_whole else 1
        self.adapter = StageRunnerAdapter(config, source=source, sink=sink, producer=producer, host=self)

    def stream_offered(self, identity: Identity) -> Offer:  # noqa: ARG002 - the port's signature
        """See `StageHost`: the engine's client will ask for it, or nobody does."""
        return Later()

    def feedback_ready(self) -> None:
        """See `StageHost`: wakes the engine once for all that comes until it looks."""
        if not self.news.is_set():
            self.news.set()
            self._wake()


def _check_served(vllm_config: Any) -> None:
    """Refuse kinds of engines whose steps do not give each request's states in one piece."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for field, value, accepted in (
        ("parallel_config.pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("parallel_config.prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
        ("parallel_config.data_parallel_size", parallel.data_parallel_size, 1),
        ("parallel_config.data_parallel_index", parallel.data_parallel_index, 0),
        ("speculative_config.method", speculative.method if speculative is not None else None, None),
        ("model_config.runner_type", vllm_config.model_config.runner_type, "generate"),
        ("cache_config.kv_sharing_fast_prefill", vllm_config.cache_config.kv_sharing_fast_prefill, False),
    ):
        if value != accepted:
            raise ConfigError(field, value, f"{accepted!r} in an engine that is a stage")


def _stage_config(settings: StageSettings) -> StageConfig:
    given = {**_USUAL, **settings.config}
    names = {setting.name for setting in fields(StageConfig)} - {"stage"}
    for key, value in given.items():
        if key not in names:
            raise ConfigError(f"{KEY}.config.{key}", value, f"one of {', '.join(sorted(names))}")
    if isinstance(given.get("replace_keys"), list):
        given["replace_keys"] = tuple(given["replace_keys"])
    if given.get("front"):
        raise ConfigError(f"{KEY}.config.front", given["front"], "False: an engine's results go to its own client")
    if given["backlog_policy"] != "fail":
        raise ConfigError(f"{KEY}.config.backlog_policy", given["backlog_policy"], "fail: a step cannot be taken back")
    with _within(f"{KEY}.config"):
        return StageConfig(stage=replica_name(settings.stage, settings.replica_id), **given)


def _producer(path: str) -> Producer:
    """The producer that the engine's own configuration names."""
    if not path:
        return states_as_prompt
    module, _, name = path.partition(":")
    try:
        producer = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{KEY}.producer", path, f"module:attribute that can be imported ({error})") from error
    if not callable(producer):
        raise ConfigError(f"{KEY}.producer", path, "the name of a producer; this one cannot be called")
    made: Producer = producer
    return made


@contextlib.contextmanager
def _within(place: str) -> Iterator[None]:
    """Say of a field that cannot be used where in the engine's configuration it is."""
    try:
        yield
    except ConfigError as error:
        if error.field.startswith(place):
            raise
        raise ConfigError(f"{place}.{error.field}", error.value, error.accepted) from error
