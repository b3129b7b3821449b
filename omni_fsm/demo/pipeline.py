"""The demo's pipeline as pipeline.toml tells it: stages, edges, and their connectors."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from omni_fsm.connectors import FULL_PAYLOAD, Wiring
from omni_fsm.runtime import StageConfig


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages in order, the front apart, the settings of their runtimes, and the edges; see `omni_fsm.connectors.EdgeConfig`."""

    front: str
    stages: list[str]
    settings: dict[str, Any]
    edges: list[dict[str, Any]]

    def config(self, stage: str) -> StageConfig:
        """The settings of one stage, or of the front."""
        return StageConfig(stage=stage, front=stage == self.front, **self.settings)

    def wiring(self, directory: Path) -> Wiring:
        """How the stages are joined.

        Args:
            directory: Where the edges' sockets are; mode 0700.
        """
        return Wiring(self.edges, {"directory": str(directory)})


MODES = {"chunks": [], "full": ["talker"]}
"""What ``--mode`` means: the stages that send full payloads."""


def load_pipeline(mode: str = "chunks") -> Pipeline:
    """Read pipeline.toml, which is part of the package.

    Args:
        mode: One of `MODES`.
    """
    text = resources.files("omni_fsm.demo").joinpath("pipeline.toml").read_text(encoding="utf-8")
    pipeline = msgspec.convert(tomllib.loads(text), Pipeline)
    for edge in pipeline.edges:
        if edge["from_stage"] in MODES[mode]:
            edge["mode"] = FULL_PAYLOAD
    return pipeline
