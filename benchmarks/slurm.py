"""Compare resident Slurm jobs with plain Slurm, interleaved in the same minutes, on real daemons on this machine (root, `make slurm-tools`).

    python -m benchmarks.slurm [--only line,jobs] [--runs N] [--json]

Six nodes of two GPUs: resident jobs hold three of them, and plain Slurm has the other three. `jobs`: jobs of one `true` on one GPU each, from the first submit to the last end: 600 in resident Slurm jobs, through
the HTTP API as other benchmarks submit; an array of 600 elements; and 100 by a loop of `sbatch`. `line`: from the exec of a command to the first line of its
job: `phalanx run`, and `sbatch` of a script that calls `srun`. A pause of random length precedes each line, because Slurm's batch scheduler works
at intervals.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.cluster import wait_until
from benchmarks.control import TRUE_JOBS, submit_load, succeeded_jobs
from benchmarks.engine_clusters import PHALANX
from benchmarks.engine_peers import LINE, SLURM_JOBS, seconds_to_line
from benchmarks.engines import BEAT_S, READY
from benchmarks.figures import Figure, argument_parser, at_least, at_most, plain_figure, print_progress, print_report
from tests.contract.slurm_rig import SlurmRig, slurm
from tests.slurm_here import why_not

RESIDENT: Final = ("--slurm-resident", "3-3x2")
JOB_RUNS: Final = 3
LINE_RUNS: Final = 7
SUBMITTERS: Final = 16  # connections of the client
FASTER: Final = 5.0  # jobs in resident Slurm jobs over jobs by sbatch
LATER: Final = 1.2  # first line over that of sbatch and srun
_LIMIT_S: Final = 300.0


def main() -> None:
    """Measure and print."""
    given = argument_parser(__doc__ or "").parse_args()
    only = set(filter(None, given.only.split(","))) or {"line", "jobs"}
    if why_not():
        print_progress(f"no Slurm here: {why_not()}")
        return
    figures: list[Figure] = []
    with slurm(RESIDENT, machines=6) as rig:
        if "line" in only:
            figures += _lines(rig, given.runs or LINE_RUNS)
        if "jobs" in only:
            figures += _jobs(rig, given.runs or JOB_RUNS)
    print_report("Resident Slurm jobs beside plain Slurm", figures, as_json=given.json)


def _interleaved(ways: dict[str, Callable[[], float]], runs: int, pause: Callable[[], None]) -> dict[str, list[float]]:
    """Measure each way once in each run, in a random order; a first run warms the page cache and does not count."""
    order = random.Random(0)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(runs + 1):
        for way in order.sample(list(ways), len(ways)):
            pause()
            value = ways[way]()
            if run:
                found[way].append(value)
                print_progress(f"{way}, run {run}: {value:.2f}")
    return found


def _lines(rig: SlurmRig, runs: int) -> list[Figure]:
    wait = random.Random(1)
    found = _interleaved(
        {"phalanx run": lambda: _first_line(rig), "sbatch and srun": lambda: _sbatch_line(rig)},
        runs,
        lambda: time.sleep(BEAT_S + wait.uniform(0.0, 1.0)),
    )
    ratios = [ours / theirs for ours, theirs in zip(found["phalanx run"], found["sbatch and srun"], strict=True)]
    return [
        *(plain_figure(f"{way}, exec to first line", took, "s") for way, took in found.items()),
        at_most("first line: phalanx run over sbatch and srun", [statistics.median(ratios)], "", LATER),
    ]


def _jobs(rig: SlurmRig, runs: int) -> list[Figure]:
    found = _interleaved(
        {
            "resident": lambda: _rate(rig),
            "array": lambda: _array_rate(rig),
            "sbatch": lambda: _sbatch_rate(rig),
        },
        runs,
        lambda: time.sleep(BEAT_S),
    )
    ratios = {
        way: [ours / theirs for ours, theirs in zip(found[way], found["sbatch"], strict=True)]
        for way in ("resident", "array")
    }
    return [
        *(plain_figure(f"{way}: jobs of one `true`", rates, "/s") for way, rates in found.items()),
        *(
            at_least(f"jobs of one `true`: {way} over sbatch", [statistics.median(ratio)], "", FASTER)
            for way, ratio in ratios.items()
        ),
    ]


def _first_line(rig: SlurmRig) -> float:
    return seconds_to_line([*PHALANX, "run", "--gpus", "1", "--", *READY], environment=rig.environment, folder=rig.home)


def _sbatch_line(rig: SlurmRig) -> float:
    path = Path(rig.home, "line")
    began = time.monotonic()
    rig.slurm.run("sbatch", "--gres=gpu:1", "--chdir=/", f"--output={path}", f"--wrap=srun echo {LINE}")
    wait_until(lambda: path.exists() and LINE in path.read_text(encoding="utf-8"), "the line is there", every_s=0.005)
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def _rate(rig: SlurmRig) -> float:
    target, began = succeeded_jobs(rig) + TRUE_JOBS, time.monotonic()
    submit_load(rig, TRUE_JOBS, SUBMITTERS, run_line="true", gpus=1)
    wait_until(lambda: succeeded_jobs(rig) >= target, "all jobs have ended", limit_s=_LIMIT_S, every_s=0.02)
    return TRUE_JOBS / (time.monotonic() - began)


def _array_rate(rig: SlurmRig) -> float:
    target, began = succeeded_jobs(rig) + TRUE_JOBS, time.monotonic()
    rig.submit(run=["true"], gpus=1, array=f"0-{TRUE_JOBS - 1}", name="array", workdir=rig.home)
    wait_until(lambda: succeeded_jobs(rig) >= target, "all elements have ended", limit_s=_LIMIT_S, every_s=0.02)
    return TRUE_JOBS / (time.monotonic() - began)


def _sbatch_rate(rig: SlurmRig) -> float:
    submit = "sbatch --quiet --gres=gpu:1 --chdir=/ --output=/dev/null --wrap=true"
    began = time.monotonic()
    rig.slurm.run("sh", "-c", f"for i in $(seq {SLURM_JOBS}); do {submit}; done")
    waiting = ("squeue", "--noheader", "--name=wrap")
    wait_until(lambda: not rig.slurm.run(*waiting).strip(), "all have ended", every_s=0.1, limit_s=_LIMIT_S)
    return SLURM_JOBS / (time.monotonic() - began)


if __name__ == "__main__":
    main()
