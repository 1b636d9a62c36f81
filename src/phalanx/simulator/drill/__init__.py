"""A deterministic drill of the real control plane: a seeded cluster in virtual time, faults of every kind, and every invariant checked.

`run_seed(seed)` drills one seed in this process. See docs/drill.md.
"""

from phalanx.simulator.drill.seed import EVENTS, Result, run_seed
from phalanx.simulator.drill.violation import INVARIANTS, Violation

__all__ = ["EVENTS", "INVARIANTS", "Result", "Violation", "run_seed"]
