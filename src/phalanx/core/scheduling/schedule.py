"""One cycle as a function from a snapshot to a plan: what the live scheduler does incrementally, done at once on a new board.

Used by dry runs and tests; the controller keeps a `Scheduler`, which decides the same on the same state.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.scheduling.hazard import HazardTable
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.waits import Waits
from phalanx.core.state.plan import Plan
from phalanx.core.state.snapshot import Snapshot

__all__ = ["Policy", "schedule"]


def schedule(snapshot: Snapshot, policy: Policy, *, table: HazardTable | None = None) -> Plan:
    """The plan for this snapshot: placements in the order decided, and a reason for every other pending job.

    Equal snapshots give equal plans. Cost: a new board, linear in nodes and jobs.
    """
    whole = snapshot if snapshot.jobs else replace(snapshot, jobs={job.id: job for job in snapshot.pending})
    scheduler = Scheduler(policy, table=table)
    plan = scheduler.plan(whole, snapshot.now_s)
    return replace(plan, waits=dict(Waits(scheduler, whole.jobs)))
