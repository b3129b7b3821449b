"""The conformance kit: what every connector, producer and runner must do, as base classes of pytest classes.

Needs the extra ``omni-fsm[testing]`` (pytest and hypothesis). docs/conformance.md shows all three in use and lists the rules.
"""

from omni_fsm.testing.connector import ConnectorConformance
from omni_fsm.testing.producer import ProducerConformance
from omni_fsm.testing.runner import RunnerConformance
from omni_fsm.testing.stage import Made, OneCycle

__all__ = ["ConnectorConformance", "Made", "OneCycle", "ProducerConformance", "RunnerConformance"]
