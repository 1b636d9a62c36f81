"""How simulated tasks behave, and the node they run on: `phalanx.simulator.drill`, under the names that tests know."""

from phalanx.simulator.drill.behaviour import JobBehaviour, SimulatedTask
from phalanx.simulator.drill.node import DrillNode
from phalanx.simulator.drill.processes import newest_valid

__all__ = ["DrillNode", "JobBehaviour", "SimulatedTask", "newest_valid"]
