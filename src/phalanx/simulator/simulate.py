"""One simulation: a trace, a fleet and a policy's name in, replays out. Called by the command line and the benchmarks.

`simulate_live` goes through the whole lifecycle (`live`); `simulate` replays on the policy's board alone (`replay`): the same decisions
without the records, for tuning and for the calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Listener
from phalanx.core.scheduling.policies import policy_named
from phalanx.core.scheduling.settings import Policy
from phalanx.core.work.queue import Queue
from phalanx.simulator.fleet import SimNode
from phalanx.simulator.known import LOOKING, Durations, check_limits, known_of
from phalanx.simulator.live import replay_live
from phalanx.simulator.outcome import Replayed
from phalanx.simulator.replay import replay
from phalanx.simulator.trace import Trace, TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How to replay.

    Attributes:
        per_label: each virtual cluster's jobs on its own nodes, instead of all on one pool.
        restart_cost_s: work done twice for each preemption and move.
        seed: orders jobs of one submit time; 0 keeps the trace's order.
        curve_points: points of the fleet's curve to keep, about; 0 keeps none.
        skip_never: leave out jobs that the empty fleet could not hold.
        queues: with their quotas; a job waits in the one that its virtual cluster names, else in the default one.
    """

    policy: str = "default"
    durations: Durations = Durations.EXACT
    per_label: bool = False
    restart_cost_s: float = 60.0
    seed: int = 0
    curve_points: int = 0
    skip_never: bool = False
    queues: tuple[Queue, ...] = ()


def simulate_live(
    trace: Trace, nodes: Sequence[SimNode], setting: Setting, *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Replayed, ...]:
    """Replay through the lifecycle; one replay, or one per virtual cluster.

    Args:
        trace: the jobs.
        nodes: the fleet.
        setting: how.
        on_progress: told (ended, all) now and then, over all replays.

    Raises:
        BadRequest: no such policy, one that cannot know what `setting` says, or a virtual cluster without a node.
        NeverFits: a job fits no empty pool of its own.
    """
    check(setting, trace)
    trace = shuffled(trace, setting.seed)
    total, done = len(trace.jobs), 0
    span_s = trace.jobs[-1].submit_s - trace.jobs[0].submit_s
    parts = []
    for jobs, own in pools(trace, nodes, per_label=setting.per_label):
        # Anew for each pool: the replays of virtual clusters follow each other here and happen at one time there.
        known = known_of(jobs, setting.durations) if setting.policy in LOOKING else None
        policy = Policy(
            name=setting.policy, restart_cost_s=setting.restart_cost_s, size_of=None if known is None else known.size_s,
        )  # fmt: skip
        parts.append(replay_live(
            jobs, own, policy, restart_cost_s=setting.restart_cost_s, skip_never=setting.skip_never,
            curve_step_s=span_s / setting.curve_points if setting.curve_points else 0.0,
            on_progress=_shifted(on_progress, done, total), on_end=None if known is None else known.ended, queues=setting.queues,
        ))  # fmt: skip
        done += len(jobs)
    return tuple(parts)


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
    """Replay on the policy's board alone: on one pool, or with `per_label` each virtual cluster's jobs on its own nodes.

    Raises:
        BadRequest: no such policy, or a virtual cluster of the trace has no node.
        NeverFits: a job fits no empty pool of its own.
    """
    make = policy_named(policy) if isinstance(policy, str) else policy
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
        for jobs, own in pools(trace, nodes, per_label=per_label)
    )


def pools(
    trace: Trace, nodes: Sequence[SimNode], *, per_label: bool
) -> list[tuple[Sequence[TraceJob], Sequence[SimNode]]]:
    """The jobs and nodes that meet each other: all, or those of each virtual cluster.

    Raises:
        BadRequest: a virtual cluster of the trace has no node.
    """
    if not per_label:
        return [(trace.jobs, nodes)]
    found: list[tuple[Sequence[TraceJob], Sequence[SimNode]]] = []
    for label in sorted({job.label for job in trace.jobs}):
        own = [node for node in nodes if node.label == label]
        if not own:
            raise BadRequest(
                f"virtual cluster {label!r} of the trace has no node",
                hint="the node file's column vc names it; without --per-vc all share one pool",
            )
        found.append(([job for job in trace.jobs if job.label == label], own))
    return found


def shuffled(trace: Trace, seed: int) -> Trace:
    """The trace with jobs of one submit time in another order; 0 leaves it as it is. Equal seeds give equal orders."""
    if not seed:
        return trace
    chance = random.Random(seed)  # a seed, no secret
    keyed = sorted(((job.submit_s, chance.random(), job.line, job) for job in trace.jobs), key=lambda each: each[:3])
    return replace(trace, jobs=tuple(job for *_, job in keyed))


def check(setting: Setting, trace: Trace) -> None:
    """Refuse what contradicts itself, before anything is replayed.

    Raises:
        BadRequest: no such policy, or one that cannot know what `setting` says.
    """
    policy_named(setting.policy)
    if setting.policy == "srtf" and setting.durations is not Durations.EXACT:
        raise BadRequest(
            f"srtf is a yardstick and knows every duration: it cannot be replayed with --durations {setting.durations.value}",
            hint="what is left of a job that outlived its forecast, only exact durations tell; default and las need none",
        )
    if setting.policy in LOOKING and setting.durations is Durations.LIMIT:
        check_limits(trace.jobs)


def _shifted(told: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int, int], None] | None:
    """Progress of one replay as progress of all."""
    return None if told is None else lambda ended, _: told(before + ended, total)
