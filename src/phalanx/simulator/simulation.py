"""Run a simulation from a trace, a fleet and a policy name. Called by the command line and the benchmarks.

`simulate` uses the policy's board alone (`replay_board`) where it can: the same decisions without records. `simulate_lifecycle` uses the whole
job lifecycle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.controller.policy_loading import find_policy
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.lifecycle_replay import (
    find_unplaceable,
    never_fits,
    replay_lifecycle,
)
from phalanx.simulator.rented_nodes import RentedPool
from phalanx.simulator.results import ReplayListener, ReplayResult
from phalanx.simulator.run_times import (
    RunTimeKnowledge,
    RunTimeSource,
    check_limits,
    run_times_for,
)
from phalanx.simulator.trace import Trace, TraceJob

POOL_LOOK_S: Final = 60.0  # a live head looks each second, which a replay of a month would do millions of times


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
        lifecycle: use the whole job lifecycle also where the board alone would do.
        pools: of nodes that are rented while jobs wait; every POOL_LOOK_S it is decided whether.
    """

    policy: str = "default"
    run_times: RunTimeKnowledge = RunTimeKnowledge.EXACT
    per_virtual_cluster: bool = False
    restart_cost_s: float = 60.0
    seed: int = 0
    curve_points: int = 0
    skip_unplaceable: bool = False
    queues: tuple[Queue, ...] = ()
    lifecycle: bool = False
    pools: tuple[RentedPool, ...] = ()


def simulate(
    trace: Trace,
    nodes: Sequence[TraceNode],
    setting: SimulationSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_event: ReplayListener | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay on the board alone where it can represent jobs and fleet, else through the lifecycle; return one replay, or one per virtual cluster.

    Args:
        trace: the jobs.
        nodes: the fleet.
        setting: policy and options.
        on_progress: called with (ended, total) over all replays, at intervals.
        on_event: called for each start, stop and end; a move is a stop and a start.

    Raises:
        BadRequest: unknown policy, contradictory settings, or a virtual cluster without nodes.
        NeverFits: a job does not fit its empty pool.
    """
    if setting.lifecycle or not board_suffices(trace, nodes, setting):
        return simulate_lifecycle(trace, nodes, setting, on_progress=on_progress, on_event=on_event)
    make = check_settings(setting, trace)
    uses_run_times = make().uses_run_times
    trace = shuffle_ties(trace, setting.seed)
    total, done = len(trace.jobs), 0
    parts = []
    for jobs, own in split_pools(trace, nodes, per_virtual_cluster=setting.per_virtual_cluster):
        refused = find_unplaceable(jobs, own)
        if refused and not setting.skip_unplaceable:
            raise never_fits(*refused[0])
        left_out = {id(job) for job, _ in refused}
        placeable = [job for job in jobs if id(job) not in left_out] if refused else jobs
        known = run_times_for(jobs, setting.run_times) if uses_run_times else None
        part = replay_board(
            placeable,
            own,
            make,
            restart_cost_s=setting.restart_cost_s,
            run_time_of=None if known is None else _of_trace(known),
            curve_step_s=_curve_step_s(trace, setting),
            on_progress=_shifted(on_progress, done, total),
            on_end=None if known is None else known.record_end,
            on_event=on_event,
        )
        part.unplaceable = [(job, error.message) for job, error in refused]
        parts.append(part)
        done += len(jobs)
    return tuple(parts)


def board_suffices(trace: Trace, nodes: Sequence[TraceNode], setting: SimulationSettings) -> bool:
    """Whether the board of one pool of equal GPUs, without quotas, represents jobs and fleet."""
    mixed = len({node.model for node in nodes}) > 1
    return (
        not mixed and not setting.queues and not setting.pools and not any(job.run_time_by_model for job in trace.jobs)
    )


def simulate_lifecycle(
    trace: Trace,
    nodes: Sequence[TraceNode],
    setting: SimulationSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_event: ReplayListener | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay through the lifecycle; return one replay, or one per virtual cluster. The arguments are those of `simulate`.

    Raises:
        BadRequest: unknown policy, contradictory settings, or a virtual cluster without nodes.
        NeverFits: a job does not fit its empty pool.
    """
    make = check_settings(setting, trace)
    uses_run_times = make().uses_run_times
    trace = shuffle_ties(trace, setting.seed)
    total, done = len(trace.jobs), 0
    parts = []
    for jobs, own in split_pools(trace, nodes, per_virtual_cluster=setting.per_virtual_cluster):
        # One forecast per pool: the pools are replayed one after the other but share the same virtual time.
        by_model = any(node.model for node in own)
        known = run_times_for(jobs, setting.run_times, by_model=by_model) if uses_run_times else None
        policy = PolicySettings(
            name=setting.policy,
            make=make,
            restart_cost_s=setting.restart_cost_s,
            run_time_of=None if known is None else _of_record(known),
            demand_every_s=POOL_LOOK_S,
        )
        parts.append(
            replay_lifecycle(
                jobs,
                own,
                policy,
                restart_cost_s=setting.restart_cost_s,
                skip_unplaceable=setting.skip_unplaceable,
                curve_step_s=_curve_step_s(trace, setting),
                on_progress=_shifted(on_progress, done, total),
                on_end=None if known is None else known.record_end,
                on_event=on_event,
                queues=setting.queues,
                pools=setting.pools,
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


def _of_trace(known: RunTimeSource) -> Callable[[TraceJob], float]:
    return lambda job: known.run_time_s(job.id)


def _of_record(known: RunTimeSource) -> Callable[[Job], float]:
    return lambda job: known.run_time_s(job.spec.name)


def _curve_step_s(trace: Trace, setting: SimulationSettings) -> float:
    span_s = trace.jobs[-1].submit_s - trace.jobs[0].submit_s
    return span_s / setting.curve_points if setting.curve_points else 0.0


def _shifted(
    on_progress: Callable[[int, int], None] | None, before: int, total: int
) -> Callable[[int, int], None] | None:
    """Convert the progress of one replay to progress over all replays."""
    return None if on_progress is None else lambda ended, _: on_progress(before + ended, total)
