"""One simulation: a trace, a fleet and a policy's name in, a report out. Called by the command line and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.board import Board, Listener
from phalanx.core.scheduling.policies import policy_named
from phalanx.simulator.fleet import SimNode
from phalanx.simulator.replay import Replayed, replay
from phalanx.simulator.trace import Trace, TraceJob


def simulate(
    trace: Trace,
    nodes: Sequence[SimNode],
    policy: str | Callable[[Board], Listener],
    *,
    per_label: bool = False,
    restart_cost_s: Callable[[int], float] | float = 60.0,
    size_of: Callable[[TraceJob], float] | None = None,
    curve_step_s: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Replayed, ...]:
    """Replay on one pool, or with `per_label` each virtual cluster's jobs on its own nodes.

    Raises:
        BadRequest: no such policy, or a virtual cluster of the trace has no node.
        NeverFits: a job fits no empty pool of its own.
    """
    make = policy_named(policy) if isinstance(policy, str) else policy
    parts: list[tuple[Sequence[TraceJob], Sequence[SimNode]]] = [(trace.jobs, nodes)]
    if per_label:
        parts = []
        for label in sorted({job.label for job in trace.jobs}):
            own = [node for node in nodes if node.label == label]
            if not own:
                raise BadRequest(
                    f"virtual cluster {label!r} of the trace has no node", hint="the node file's column vc names it"
                )
            parts.append(([job for job in trace.jobs if job.label == label], own))
    return tuple(
        replay(
            jobs,
            own,
            make,
            restart_cost_s=restart_cost_s,
            size_of=size_of,
            curve_step_s=curve_step_s,
            on_progress=on_progress,
        )
        for jobs, own in parts
    )
