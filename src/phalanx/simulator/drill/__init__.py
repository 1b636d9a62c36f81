"""A deterministic test of the real control plane: a seeded cluster in virtual time, injected faults, and checked invariants.

`run_seed(seed)` runs one seed in this process. See docs/drill.md.
"""

from phalanx.simulator.drill.seed_run import EVENTS, SeedResult, run_seed
from phalanx.simulator.drill.violations import INVARIANTS, Violation

__all__ = ["EVENTS", "INVARIANTS", "SeedResult", "Violation", "run_seed"]
