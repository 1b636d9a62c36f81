"""Goodput of a long training with failures at published rates: the real interval policy compared with the best fixed interval in hindsight.

    python -m benchmarks.goodput                # medians and the worst over seeds
    python -m benchmarks.goodput --json

A gang trains for weeks in virtual time. Failures are a Poisson process at a published rate; each costs the unsaved work, and the time until the
gang computes again. The policy is the real code: `phalanx.torch.checkpoint_timer.CheckpointTimer` decides when a save is due, with noisy stalls;
`core.recovery.failure_rate` estimates the rate from the failures of the fleet at each start of an attempt, as in the head. The comparison
knows everything: it is the best of forty fixed intervals for the same failures.

Real disks and networks are not modelled. A stall is a number here, and every restart takes the same time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s
from phalanx.torch.checkpoint_timer import CheckpointTimer

DAY_S: Final = 86_400.0
STEP_S: Final = 5.0  # a step of the largest trainings; a save waits for its end
WRITE_S: Final = 5.0
"""From the end of the stall until a checkpoint is durable. 405 B parameters at 14 bytes are 5.7 TB, and 2 TB/s of storage takes 3 s for it.
Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.1 (Tectonic, 2 TB/s sustained)."""
STALL_SPREAD: Final = 0.2  # of the stall of a save around its mean: sigma of a lognormal distribution
INTERVALS: Final = 40  # number of fixed intervals, from STEP_S to half a day in equal ratios
WITHIN_POINTS: Final = 0.5  # of the best fixed interval


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCase:
    """One setting. `least`: required goodput; None if even perfect knowledge might not reach a limit."""

    name: str
    nodes: int
    mtbf_s: float  # of the gang
    stall_s: float
    restart_s: float
    least: float | None
    days: float = 54.0


LLAMA_MTBF_S: Final = 3.09 * 3600.0
"""One failure per 3.09 h on 16,384 GPUs. Source: the same, section 3.3.4: 419 unexpected interruptions in 54 days."""
RSC_NODE_S: Final = DAY_S / 6.5e-3
"""Mean time between failures of one node. Source: A. Kokolis et al., HPCA 2025: 6.5 failures per 1,000 node-days."""
RESTART_S: Final = 60.0  # detection and restart, as the target is worded
MEASURED_S: Final = {"lease": 6.9, "slurm": 12.4}
"""Power cut to running elsewhere, medians of docs/benchmarks.md ("On each engine"): a joined node, whose lease decides, and Slurm."""


def cases() -> list[GoodputCase]:
    """Return all settings."""
    found = []
    for stall_s, least in ((10.0, 0.95), (1.0, 0.98)):
        for word, restart_s in (("60s", RESTART_S), *MEASURED_S.items()):
            found.append(
                GoodputCase(
                    name=f"llama_16384_stall{stall_s:g}_{word}",
                    nodes=2048,
                    mtbf_s=LLAMA_MTBF_S,
                    stall_s=stall_s,
                    restart_s=restart_s,
                    least=least,
                )
            )
        for nodes in (8, 128, 1024, 2048):
            mtbf_s = RSC_NODE_S / nodes
            reachable = least <= 1.0 - math.sqrt(2.0 * stall_s / mtbf_s) - (RESTART_S + WRITE_S) / mtbf_s
            found.append(
                GoodputCase(
                    name=f"rsc_{8 * nodes}_stall{stall_s:g}_60s",
                    nodes=nodes,
                    mtbf_s=mtbf_s,
                    stall_s=stall_s,
                    restart_s=RESTART_S,
                    least=least if reachable else None,
                )
            )
    return found


def failures_of(case: GoodputCase, seed: int) -> list[float]:
    """Return the times of failures of the gang, in seconds from the start."""
    rng, at_s = random.Random(f"{case.nodes}/{case.mtbf_s}/{seed}"), 0.0
    found: list[float] = []
    while True:
        at_s += rng.expovariate(1.0 / case.mtbf_s)
        if at_s >= case.days * DAY_S:
            return found
        found.append(at_s)


def spans_of(case: GoodputCase, failures: Sequence[float]) -> list[tuple[float, float, bool]]:
    """Return when the gang computes: (from, to, whether a failure ends it). A failure during a restart starts it again."""
    end_s, begin_s = case.days * DAY_S, 0.0
    spans: list[tuple[float, float, bool]] = []
    for at_s in failures:
        if at_s > begin_s:
            spans.append((begin_s, at_s, True))
        begin_s = at_s + case.restart_s
    return [*spans, (begin_s, end_s, False)] if begin_s < end_s else spans


def policy_goodput(case: GoodputCase, seed: int) -> float:
    """Return the goodput of the real policy: the cadence of each attempt, with the failure rate that the head has estimated by then."""
    rng = random.Random(f"stalls/{seed}")
    failures = failures_of(case, seed)
    kept_s, stall_s, write_s = 0.0, None, None
    for begin_s, end_s, failed in spans_of(case, failures):
        losses = sum(at_s <= begin_s for at_s in failures)
        node_s = node_mtbf_s(losses, case.nodes * begin_s)
        mtbf_s = gang_mtbf_s(node_s, nodes=case.nodes, losses=losses, exposure_s=begin_s)
        cadence = CheckpointTimer(mtbf_s=mtbf_s, last_save_s=begin_s, stall_s=stall_s, write_s=write_s)
        done_s, saved = _attempt(cadence, case, begin_s, end_s, rng)
        kept_s += saved if failed else done_s
        if cadence.write_s is not None:  # they travel in the checkpoint
            stall_s, write_s = cadence.stall_s, cadence.write_s
    return kept_s / (case.days * DAY_S)


def _attempt(
    cadence: CheckpointTimer, case: GoodputCase, begin_s: float, end_s: float, rng: random.Random
) -> tuple[float, float]:
    """Return (work done, work in a durable checkpoint) of one attempt that computes from `begin_s` to `end_s`."""
    now_s, done_s, saved_s = begin_s, 0.0, 0.0
    while True:
        steps = max(1, math.ceil((cadence.last_save_s + cadence.interval_s - now_s) / STEP_S))
        ready_s = now_s + steps * STEP_S
        if ready_s > end_s:
            return done_s + max(0, int((end_s - now_s) / STEP_S)) * STEP_S, saved_s
        now_s, done_s = ready_s, done_s + steps * STEP_S
        assert cadence.is_due(now_s + 1e-6)  # the sum above may differ by rounding
        stall_s = case.stall_s * rng.lognormvariate(-(STALL_SPREAD**2) / 2, STALL_SPREAD)
        if now_s + stall_s + WRITE_S > end_s:
            return done_s, saved_s
        now_s += stall_s
        cadence.record_stall(now_s, stall_s=stall_s)
        cadence.record_write(write_s=WRITE_S)
        saved_s = done_s


def fixed_goodput(case: GoodputCase, failures: Sequence[float], interval_s: float) -> float:
    """Return the goodput with a save every `interval_s` of work."""
    work_s = math.ceil(interval_s / STEP_S) * STEP_S
    cycle_s, kept_s = work_s + case.stall_s, 0.0
    for begin_s, end_s, failed in spans_of(case, failures):
        length_s = end_s - begin_s
        whole = int(max(0.0, length_s - (WRITE_S if failed else 0.0)) / cycle_s)
        rest_s = 0.0 if failed else min(work_s, max(0.0, length_s - whole * cycle_s))
        kept_s += whole * work_s + int(rest_s / STEP_S) * STEP_S
    return kept_s / (case.days * DAY_S)


def best_fixed_goodput(case: GoodputCase, seed: int) -> tuple[float, float]:
    """Return (goodput, interval) of the best fixed interval for these failures."""
    failures = failures_of(case, seed)
    ratio = (43_200.0 / STEP_S) ** (1.0 / (INTERVALS - 1))
    intervals_s = [STEP_S * ratio**number for number in range(INTERVALS)]
    return max((fixed_goodput(case, failures, interval_s), interval_s) for interval_s in intervals_s)


def measure_case(case: GoodputCase, seeds: int) -> dict[str, Any]:
    """Return the figures of one case over seeds."""
    ours = [policy_goodput(case, seed) for seed in range(seeds)]
    best = [best_fixed_goodput(case, seed) for seed in range(seeds)]
    behind = [100.0 * (other - own) for own, (other, _) in zip(ours, best, strict=True)]
    median = statistics.median(ours)
    return {
        "goodput": round(median, 5),
        "goodput_worst": round(min(ours), 5),
        "best_fixed": round(statistics.median(one for one, _ in best), 5),
        "best_fixed_interval_s": round(statistics.median(interval_s for _, interval_s in best)),
        "points_behind": round(statistics.median(behind), 3),
        "points_behind_worst": round(max(behind), 3),
        "least": case.least,
        "met": (case.least is None or median >= case.least) and statistics.median(behind) <= WITHIN_POINTS,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 if one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=40, help="failure histories for each setting (40)")
    parser.add_argument("--json", action="store_true", help="one object")
    options = parser.parse_args(arguments)
    found = {case.name: measure_case(case, max(1, options.seeds)) for case in cases()}
    missed = [name for name, one in found.items() if not one["met"]]
    if options.json:
        print(json.dumps({"seeds": options.seeds, "cases": found, "missed": missed}, indent=2))
        return bool(missed)
    print(f"{'setting':32} {'goodput':>8} {'worst':>8} {'bar':>6} {'fixed':>8} {'every':>8} {'behind':>7} {'worst':>7}")
    for name, one in found.items():
        bar = "" if one["least"] is None else f"{one['least']:.0%}"
        print(
            f"{name:32} {one['goodput']:8.2%} {one['goodput_worst']:8.2%} {bar:>6} {one['best_fixed']:8.2%} {one['best_fixed_interval_s']:6.0f} s "
            f"{one['points_behind']:7.2f} {one['points_behind_worst']:7.2f}{'' if one['met'] else '  missed'}"
        )
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
