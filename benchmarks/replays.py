"""Replay a month of jobs, for `benchmarks.scheduler`.

Uses the public Philly trace if it exists next to the checkout or in `PHALANX_SHARED`; it is not part of the project. Otherwise a random trace
of the same size and shape is generated. The output names the trace.
"""

from __future__ import annotations

import gc
import os
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Final

from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.simulation import SimulationSettings, simulate
from phalanx.simulator.trace import Trace, TraceJob, read_trace

NODES, GPUS_PER_NODE = 80, 8  # a loaded pool of 640 GPUs
TRACE_NAME: Final = "philly_2017_oct.csv"
JOBS: Final = 47_192  # as in that trace
# Shape of the generated trace, computed from philly_2017_oct.csv: GPUs and their shares, run times (median 1,278 s, deviation of the logarithm
# 1.92, none past 2,750,674 s), 11 virtual clusters, and a load of 0.92 of the pool, which determines the submit times.
SHARES: Final = (
    (1, 0.953),
    (2, 0.0166),
    (4, 0.0168),
    (8, 0.0121),
    (12, 0.0001),
    (16, 0.0009),
    (24, 0.0001),
    (32, 0.0004),
)
MEDIAN_S, LOG_DEVIATION, LONGEST_S = 1278.0, 1.92, 2_750_674.0
LABELS, LOAD = 11, 0.92


def replay_s(policy: str, *, lifecycle: bool) -> tuple[float, dict[str, object]]:
    """Return the seconds of one replay, without reading the trace, and the name and size of the trace."""
    name, trace = trace_to_replay()
    nodes = equal_nodes(NODES, GPUS_PER_NODE)
    gc.collect()
    gc.freeze()  # as `phalanx simulate` does
    begun = time.perf_counter()
    parts = simulate(trace, nodes, SimulationSettings(policy=policy, lifecycle=lifecycle))
    seconds = time.perf_counter() - begun
    ended = sum(outcome.end_s >= 0.0 for part in parts for outcome in part.jobs)
    assert ended == len(trace.jobs), (ended, len(trace.jobs))
    return seconds, {"replay_trace": name, "replay_jobs": ended}


def trace_to_replay() -> tuple[str, Trace]:
    """Return the trace and its name: the public one if it exists, else a generated one."""
    path = public_trace()
    if path is None:
        return f"synthetic ({TRACE_NAME} is not here)", synthetic_trace()
    return TRACE_NAME, read_trace(path.read_text(encoding="utf-8").splitlines(), name=path.name)


def public_trace() -> Path | None:
    """Return the path of the public trace, as in the tests; None if it does not exist."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("PHALANX_SHARED", beside)) / "data" / "traces" / TRACE_NAME
    return path if path.is_file() else None


def synthetic_trace(jobs: int = JOBS, seed: int = 1) -> Trace:
    """Generate a trace like the public one: heavy-tailed run times, mostly single GPUs, random bursts. Deterministic for a seed."""
    chance = random.Random(seed)
    sizes, weights = [gpus for gpus, _ in SHARES], [share for _, share in SHARES]
    asked = chance.choices(sizes, weights, k=jobs)
    ran = [float(round(min(MEDIAN_S * chance.lognormvariate(0.0, LOG_DEVIATION), LONGEST_S))) for _ in range(jobs)]
    work_gpu_s = sum(gpus * run_s for gpus, run_s in zip(asked, ran, strict=True))
    gaps = list(accumulate(chance.expovariate(1.0) for _ in range(jobs)))
    stretch = work_gpu_s / (LOAD * NODES * GPUS_PER_NODE) / gaps[-1]
    return Trace(
        jobs=tuple(
            TraceJob(
                id=f"drawn-{at}",
                submit_s=float(round(gaps[at] * stretch)),
                duration_s=ran[at],
                gpus=asked[at],
                virtual_cluster=f"vc{chance.randrange(LABELS)}",
                line=at + 2,
            )
            for at in range(jobs)
        )
    )
