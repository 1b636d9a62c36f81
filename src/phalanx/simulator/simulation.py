"""Run a simulation from a trace, a fleet and a policy name. Called by the command line and the benchmarks.

`simulate_lifecycle` uses the whole job lifecycle (`live`). `simulate` uses the policy's board alone (`replay_board`): the same decisions without
records, for tuning and calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.controller.policy_loading import find_policy
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.queue import Queue
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.lifecycle_replay import replay_lifecycle
from phalanx.simulator.results import ReplayResult
from phalanx.simulator.run_times import (
    RunTimeKnowledge,
    check_limits,
    run_times_for,
)
from phalanx.simulator.trace import Trace, TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings of a replay.

    Attributes:
        per_virtual_cluster: run each virtual cluster's jobs on its own nodes instead of one pool.
        restart_cost_s: lost work for each preemption and move.
        seed: shuffles jobs of equal submit time; 0 keeps the trace's order.
        curve_points: approximate number of curve points to record; 0 records none.
        skip_unplaceable: skip jobs that can never start.
        queues: queues with quotas; a job's virtual cluster names its queue, else it uses the default queue.
    """

    policy: str = "default"
    run_times: RunTimeKnowledge = RunTimeKnowledge.EXACT
    per_virtual_cluster: bool = False
    restart_cost_s: float = 60.0
    seed: int = 0
    curve_points: int = 0
    skip_unplaceable: bool = False
    queues: tuple[Queue, ...] = ()


def simulate_lifecycle(
    trace: Trace,
    nodes: Sequence[TraceNode],
    setting: SimulationSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay through the lifecycle; return one replay, or one per virtual cluster.

    Args:
        trace: the jobs.
        nodes: the fleet.
        setting: policy and options.
        on_progress: called with (ended, total) over all replays, at intervals.

    Raises:
        BadRequest: unknown policy, contradictory settings, or a virtual cluster without nodes.
        NeverFits: a job does not fit its empty pool.
    """
    make = check_settings(setting, trace)
    uses_run_times = make().uses_run_times
    trace = shuffle_ties(trace, setting.seed)
    total, done = len(trace.jobs), 0
    span_s = trace.jobs[-1].submit_s - trace.jobs[0].submit_s
    parts = []
    for jobs, own in split_pools(trace, nodes, per_virtual_cluster=setting.per_virtual_cluster):
        # One forecast per pool: the pools are replayed one after the other but share the same virtual time.
        by_model = any(node.model for node in own)
        known = run_times_for(jobs, setting.run_times, by_model=by_model) if uses_run_times else None
        policy = PolicySettings(
            name=setting.policy,
            make=make,
            restart_cost_s=setting.restart_cost_s,
            run_time_of=None if known is None else known.run_time_s,
        )
        parts.append(
            replay_lifecycle(
                jobs,
                own,
                policy,
                restart_cost_s=setting.restart_cost_s,
                skip_unplaceable=setting.skip_unplaceable,
                curve_step_s=span_s / setting.curve_points if setting.curve_points else 0.0,
                on_progress=_shifted(on_progress, done, total),
                on_end=None if known is None else known.record_end,
                queues=setting.queues,
            )
        )
        done += len(jobs)
    return tuple(parts)


def simulate_board(
    trace: Trace,
    nodes: Sequence[TraceNode],
    policy: str | Callable[[], Policy],
    *,
    per_virtual_cluster: bool = False,
    restart_cost_s: Callable[[int], float] | float = 60.0,
    run_time_of: Callable[[TraceJob], float] | None = None,
    curve_step_s: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay on the policy's board alone; with `per_virtual_cluster` each virtual cluster's jobs on its own nodes.

    Raises:
        BadRequest: unknown policy, or a virtual cluster without nodes.
        NeverFits: a job does not fit its empty pool.
    """
    make = find_policy(policy) if isinstance(policy, str) else policy
    return tuple(
        replay_board(
            jobs,
            own,
            make,
            restart_cost_s=restart_cost_s,
            run_time_of=run_time_of,
            curve_step_s=curve_step_s,
            on_progress=on_progress,
        )
        for jobs, own in split_pools(trace, nodes, per_virtual_cluster=per_virtual_cluster)
    )


def split_pools(
    trace: Trace, nodes: Sequence[TraceNode], *, per_virtual_cluster: bool
) -> list[tuple[Sequence[TraceJob], Sequence[TraceNode]]]:
    """Split jobs and nodes into pools: one, or one per virtual cluster.

    Raises:
        BadRequest: a virtual cluster of the trace has no node.
    """
    if not per_virtual_cluster:
        return [(trace.jobs, nodes)]
    found: list[tuple[Sequence[TraceJob], Sequence[TraceNode]]] = []
    for label in sorted({job.virtual_cluster for job in trace.jobs}):
        own = [node for node in nodes if node.virtual_cluster == label]
        if not own:
            raise BadRequest(
                f"virtual cluster {label!r} of the trace has no nodes",
                hint="set column vc of the node file, or omit --per-vc to share one pool",
            )
        found.append(([job for job in trace.jobs if job.virtual_cluster == label], own))
    return found


def shuffle_ties(trace: Trace, seed: int) -> Trace:
    """Shuffle jobs of equal submit time; 0 keeps the order. Equal seeds give equal orders."""
    if not seed:
        return trace
    chance = random.Random(seed)  # not used for security
    keyed = sorted(((job.submit_s, chance.random(), job.line, job) for job in trace.jobs), key=lambda each: each[:3])
    return replace(trace, jobs=tuple(job for *_, job in keyed))


def check_settings(setting: SimulationSettings, trace: Trace) -> Callable[[], Policy]:
    """Check the settings before the replay, and return the constructor of the policy.

    Raises:
        BadRequest: unknown policy, or a policy that does not support the source of run times.
    """
    make = find_policy(setting.policy)
    if setting.policy == "srtf" and setting.run_times is not RunTimeKnowledge.EXACT:
        raise BadRequest(
            f"srtf needs exact durations and does not support --durations {setting.run_times.value}",
            hint="use --durations exact, or a policy without durations, such as default or las",
        )
    if make().uses_run_times and setting.run_times is RunTimeKnowledge.LIMIT:
        check_limits(trace.jobs)
    return make


def _shifted(
    on_progress: Callable[[int, int], None] | None, before: int, total: int
) -> Callable[[int, int], None] | None:
    """Convert the progress of one replay to progress over all replays."""
    return None if on_progress is None else lambda ended, _: on_progress(before + ended, total)
