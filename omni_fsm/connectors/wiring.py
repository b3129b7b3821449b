"""Which connectors a stage needs, and how they are made: from the edges of a pipeline, each told once for both of its ends."""

import threading
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from omni_fsm.connectors.connector import DEFAULT_MAX_FRAME_BYTES
from omni_fsm.connectors.memory import MemoryEdge
from omni_fsm.connectors.port import CHUNKS, FULL_PAYLOAD, Connector, Hello
from omni_fsm.connectors.settings import converted, texted
from omni_fsm.connectors.shm import DEFAULT_ARENA_BYTES, RETRY_S, shm_receiver, shm_sender
from omni_fsm.protocol.errors import ConfigError
from omni_fsm.protocol.identity import MAX_STAGE_NAME_BYTES, Edge, checked_text

Factory = Callable[[Hello, bool, Mapping[str, Any]], Connector]
"""Makes one end of an edge: from what it says, whether it is the sending one, and the edge's ``extra``."""


class Role(StrEnum):
    """What a stage needs connectors for."""

    NONE = "none"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOTH = "both"


class Ends(NamedTuple):
    """The ends that one stage holds: receiving end of its input edge, sending end of its output edge."""

    source: Connector | None
    sink: Connector | None


class EdgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One edge of a pipeline. Both ends are made from it, so they agree.

    Attributes:
        from_stage: The stage that sends.
        to_stage: The stage that receives.
        connector: ``shm``, ``memory``, or a name given to `register_connector`.
        mode: ``chunks`` or ``full_payload``.
        extra: Settings of the connector. Of ``shm``: ``directory``, and if need be ``arena_bytes``, ``max_frame_bytes`` and
            ``retry_s``, see `shm_sender`. Of ``memory``: none.
    """

    from_stage: str
    to_stage: str
    connector: str = "shm"
    mode: str = CHUNKS
    extra: dict[str, Any] = {}


class ShmExtra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``extra`` of an edge over shared memory; see `shm_sender`."""

    directory: str
    arena_bytes: int = DEFAULT_ARENA_BYTES
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    retry_s: float = RETRY_S


class Wiring:
    """The edges of a pipeline, as every process of it is told them.

    Args:
        edges: `EdgeConfig`, or mappings of its fields, as a config file has them.
        extra: For every edge; an edge's own wins.

    Raises:
        ConfigError: A field is unknown or of the wrong type, a connector is unknown, or two edges leave or reach one stage.
    """

    def __init__(self, edges: Iterable[EdgeConfig | Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> None:
        if isinstance(edges, str | Mapping) or not isinstance(edges, Iterable):
            raise ConfigError("edges", edges, "a list of edges")
        self.edges = tuple(converted(f"edges[{at}]", edge, EdgeConfig) for at, edge in enumerate(edges))
        self._extra = texted("extra", {} if extra is None else extra)
        self._memory: dict[Edge, MemoryEdge] = {}
        self._meeting = threading.Lock()
        self._check()

    def _check(self) -> None:
        for at, edge in enumerate(self.edges):
            self._check_names(at, edge)
        for side in ("from_stage", "to_stage"):
            stages = [getattr(edge, side) for edge in self.edges]
            for at, stage in enumerate(stages):
                if stage in stages[:at]:
                    raise ConfigError(f"edges[{at}].{side}", stage, "a stage of no other edge: one in, one out")
        for at, edge in enumerate(self.edges):
            if edge.mode not in (CHUNKS, FULL_PAYLOAD):
                raise ConfigError(f"edges[{at}].mode", edge.mode, f"{CHUNKS} or {FULL_PAYLOAD}")
            if edge.connector not in (*_FACTORIES, _MEMORY):
                raise ConfigError(f"edges[{at}].connector", edge.connector, " or ".join((*_FACTORIES, _MEMORY)))

    def _check_names(self, at: int, edge: EdgeConfig) -> None:
        for side in ("from_stage", "to_stage"):
            name = getattr(edge, side)
            checked_text(f"edges[{at}].{side}", name, MAX_STAGE_NAME_BYTES)
            if _REPLICA in name:
                raise ConfigError(
                    f"edges[{at}].{side}", name, f"a name without {_REPLICA}, which marks the copies of a stage"
                )
        if edge.from_stage == edge.to_stage:
            raise ConfigError(f"edges[{at}].to_stage", edge.to_stage, "another stage than the one that sends")
        if edge.connector == _MEMORY and edge.extra:
            raise ConfigError(f"edges[{at}].extra", edge.extra, "nothing: a connector in memory has no settings")

    @property
    def stages(self) -> tuple[str, ...]:
        """All stages, in the order in which the edges name them."""
        return tuple(dict.fromkeys(name for edge in self.edges for name in (edge.from_stage, edge.to_stage)))

    def role(self, stage: str, local_rank: int = 0) -> Role:
        """What one rank of a stage needs connectors for. Only rank 0 does; the others follow it.

        Raises:
            ConfigError: No edge names the stage, or the rank is no rank.
        """
        if stage not in self.stages:
            raise ConfigError("stage", stage, f"a stage of the pipeline: {', '.join(self.stages)}")
        if type(local_rank) is not int or local_rank < 0:
            raise ConfigError("local_rank", local_rank, "an int from 0 up")
        if local_rank:
            return Role.NONE
        if self._input_of(stage) is None:
            return Role.SENDER
        return Role.BOTH if self._output_of(stage) is not None else Role.RECEIVER

    def input_edge(self, stage: str, replica_id: int = 0) -> Edge:
        """The edge by which a stage gets its input; see `open`.

        Raises:
            ConfigError: There is none.
        """
        edge = self._input_of(stage)
        if edge is None:
            raise ConfigError("stage", stage, "a stage that an edge reaches")
        return _edge(edge, replica_id)

    def _input_of(self, stage: str) -> EdgeConfig | None:
        return next((edge for edge in self.edges if edge.to_stage == stage), None)

    def _output_of(self, stage: str) -> EdgeConfig | None:
        return next((edge for edge in self.edges if edge.from_stage == stage), None)

    def open(self, stage: str, *, local_rank: int = 0, replica_id: int = 0) -> Ends:
        """Make the ends that one rank of a stage needs. The caller owns them.

        Called by: whoever sets up a stage's process, once.

        Args:
            stage: The stage.
            local_rank: Rank of this process in its stage.
            replica_id: Which copy of the whole pipeline this is, from 0. Copies never meet: the names of their stages differ,
                see `replica_name`.

        Raises:
            ConfigError: The stage or a number is unknown, or a connector cannot use its ``extra``; it names the edge and field.
        """
        role = self.role(stage, local_rank)
        source = self._input_of(stage) if role in (Role.RECEIVER, Role.BOTH) else None
        sink = self._output_of(stage) if role in (Role.SENDER, Role.BOTH) else None
        opened = self._open(source, replica_id, sends=False) if source is not None else None
        try:
            return Ends(opened, self._open(sink, replica_id, sends=True) if sink is not None else None)
        except BaseException:
            if opened is not None:
                opened.close()
            raise

    def _open(self, edge: EdgeConfig, replica_id: int, *, sends: bool) -> Connector:
        hello = Hello(_edge(edge, replica_id), mode=edge.mode)
        if edge.connector == _MEMORY:
            return self._memory_end(hello, sends=sends)
        try:
            return _FACTORIES[edge.connector](hello, sends, {**self._extra, **edge.extra})
        except ConfigError as error:
            field = error.field.removeprefix("extra").removeprefix(".")
            inherited = field in self._extra and field not in edge.extra
            place = "extra" if inherited else f"edges[{self.edges.index(edge)}].extra"
            raise ConfigError(f"{place}.{field}" if field else place, error.value, error.accepted) from error
        except (ValueError, OverflowError) as error:
            settings = {**self._extra, **edge.extra}
            raise ConfigError(
                f"edges[{self.edges.index(edge)}].extra", settings, f"what can be used: {error}"
            ) from error

    def _memory_end(self, hello: Hello, *, sends: bool) -> Connector:
        """An end inside this process; the neighbour, or its successor, meets it there."""
        with self._meeting:
            edge = self._memory.setdefault(hello.edge, MemoryEdge())
        return edge.sender(hello) if sends else edge.receiver(hello)


def replica_name(stage: str, replica_id: int) -> str:
    """The name of a stage in one copy of the pipeline: its own in the first, ``talker@1`` in the next.

    Raises:
        ConfigError: The number is none.
    """
    if type(replica_id) is not int or replica_id < 0:
        raise ConfigError("replica_id", replica_id, "an int from 0 up")
    return f"{stage}{_REPLICA}{replica_id}" if replica_id else stage


def _edge(edge: EdgeConfig, replica_id: int) -> Edge:
    return Edge(replica_name(edge.from_stage, replica_id), replica_name(edge.to_stage, replica_id))


def register_connector(name: str, factory: Factory) -> None:
    """Let `EdgeConfig.connector` name a connector of one's own.

    Args:
        name: Its name.
        factory: Makes one end; raises ``ConfigError`` with the field of ``extra`` that it cannot use.

    Raises:
        ConfigError: The name is taken, or no text.
    """
    if not isinstance(name, str) or not name or name in (*_FACTORIES, _MEMORY):
        raise ConfigError("name", name, "a text that names no connector yet")
    _FACTORIES[name] = factory


def _shm(hello: Hello, sends: bool, extra: Mapping[str, Any]) -> Connector:  # noqa: FBT001 - see Factory
    settings = converted("extra", extra, ShmExtra)
    folder, max_frame_bytes, retry_s = settings.directory, settings.max_frame_bytes, settings.retry_s
    if not sends:
        return shm_receiver(hello, folder, max_frame_bytes=max_frame_bytes, retry_s=retry_s)
    return shm_sender(hello, folder, arena_bytes=settings.arena_bytes, max_frame_bytes=max_frame_bytes, retry_s=retry_s)


_MEMORY, _REPLICA = "memory", "@"
_FACTORIES: dict[str, Factory] = {"shm": _shm}
