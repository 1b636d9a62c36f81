"""How simulated tasks behave, and the node they run on: `phalanx.simulator.drill`, under the names that tests know."""

from phalanx.simulator.drill.behaviour import Behaviour, Task
from phalanx.simulator.drill.node import SimNode
from phalanx.simulator.drill.tasks import newest_whole

__all__ = ["Behaviour", "SimNode", "Task", "newest_whole"]
