"""A deterministic test of the real control plane: a seeded cluster in virtual time, injected faults, and checked invariants.

`run_seed(seed)` runs one seed in this process. See docs/drill.md.
"""

from phalanx.simulator.drill.seed import EVENTS, Result, run_seed
from phalanx.simulator.drill.violation import INVARIANTS, Violation

__all__ = ["EVENTS", "INVARIANTS", "Result", "Violation", "run_seed"]
