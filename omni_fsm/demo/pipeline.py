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
        at = self.ring.index(stage)
        before, after = self.ring[at - 1 if at else -2], self.ring[at + 1]
        return Ends(
            source=shm_receiver(self._hello(before, stage), directory),
            sink=shm_sender(self._hello(stage, after), directory),
        )

    def _hello(self, sender: str, receiver: str) -> Hello:
        return Hello(Edge(sender, receiver), mode=FULL_PAYLOAD if sender in self.whole else CHUNKS)


MODES = {"chunks": [], "full": ["talker"]}
"""What ``--mode`` means: the stages that send full payloads."""


def load_pipeline(mode: str = "chunks") -> Pipeline:
    """Read pipeline.toml, which is part of the package.

    Args:
        mode: One of `MODES`.
    """
    text = resources.files("omni_fsm.demo").joinpath("pipeline.toml").read_text(encoding="utf-8")
    return msgspec.structs.replace(msgspec.convert(tomllib.loads(text), Pipeline), whole=MODES[mode])
