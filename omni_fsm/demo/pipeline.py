"""The demo's pipeline as pipeline.toml tells it: stages, edges, and their connectors."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omni_fsm.connectors import CHUNKS, FULL_PAYLOAD, Connector, Hello, shm_receiver, shm_sender
from omni_fsm.protocol.identity import Edge
from omni_fsm.runtime import StageConfig


class Ends(NamedTuple):
    """Receiving end of a stage's input edge, sending end of its output edge."""

    source: Connector
    sink: Connector


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages in order, the front apart, and the settings of their runtimes.

    ``whole`` names the stages whose output edge is in the mode ``full_payload``.
    """

    front: str
    stages: list[str]
    settings: dict[str, Any]
    whole: list[str] = []

    @property
    def ring(self) -> list[str]:
        """The front, every stage, and the front again: each neighbouring pair is an edge."""
        return [self.front, *self.stages, self.front]

    def config(self, stage: str) -> StageConfig:
        """The settings of one stage, or of the front."""
        return StageConfig(stage=stage, front=stage == self.front, **self.settings)

    def connectors(self, stage: str, directory: Path) -> Ends:
        """The ends that a stage holds.

        Args:
            stage: The stage, or the front.
            directory: Where the edges' sockets are; mode 0700.
        """
        output_edge = Edge(stage, self.ring[self.ring.index(stage) + 1])
        return Ends(
            source=shm_receiver(self._hello(self.input_edge(stage)), directory),
            sink=shm_sender(self._hello(output_edge), directory),
        )

    def input_edge(self, stage: str) -> Edge:
        """The edge by which a stage, or the front, gets its input."""
        at = self.ring.index(stage)
        return Edge(self.ring[at - 1 if at else -2], stage)

    def _hello(self, edge: Edge) -> Hello:
        return Hello(edge, mode=FULL_PAYLOAD if edge.from_stage in self.whole else CHUNKS)


MODES = {"chunks": [], "full": ["talker"]}
"""What ``--mode`` means: the stages that send full payloads."""


def load_pipeline(mode: str = "chunks") -> Pipeline:
    """Read pipeline.toml, which is part of the package.

    Args:
        mode: One of `MODES`.
    """
    text = resources.files("omni_fsm.demo").joinpath("pipeline.toml").read_text(encoding="utf-8")
    return msgspec.structs.replace(msgspec.convert(tomllib.loads(text), Pipeline), whole=MODES[mode])
