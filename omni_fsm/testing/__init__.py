"""The conformance kit: what every connector and every producer must do, as base classes of pytest classes.

Needs the extra ``omni-fsm[testing]`` (pytest and hypothesis). docs/conformance.md shows both in use and lists the rules.
"""

from omni_fsm.testing.connector import ConnectorConformance
from omni_fsm.testing.producer import ProducerConformance

__all__ = ["ConnectorConformance", "ProducerConformance"]
