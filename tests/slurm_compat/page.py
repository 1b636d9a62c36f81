"""Writes docs/slurm-compatibility.md from the tables of the code: `python -m tests.slurm_compat.page`. A unit test compares the two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from phalanx.core.work.sbatch_scripts.het_components import REFUSED_COMPONENT_OPTIONS
from phalanx.core.work.sbatch_scripts.sbatch import HET_WORDS, REFUSED_SBATCH_OPTIONS, SBATCH_OPTIONS
from phalanx.node.logic.het_steps import het_variables
from phalanx.node.logic.srun_options import HONOURED_SRUN_OPTIONS, IGNORED_SRUN_OPTIONS, REFUSED_SRUN_OPTIONS
from phalanx.node.logic.variables.slurm_variables import (
    OPTION_VARIABLES,
    SlurmBatchJob,
    SlurmBatchNode,
    SlurmStep,
    batch_variables,
    step_variables,
)
from tests.slurm_compat.differences import ALLOWED, Kind

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "slurm-compatibility.md"

HEAD: Final = """# Slurm compatibility

What each option of an `#SBATCH` script, each option of `srun` and each variable does here. This page is written from the tables of the code
(`python -m tests.slurm_compat.page`). [Slurm](slurm.md#sbatch-scripts) explains how scripts run.

**ok**: as in Slurm. **ignored**: the script runs, and the submit names the option with its line and the reason. **refused**: the submit, or the `srun`, fails with the reason.
An option that sbatch or srun itself does not know is refused with the nearest name.

The table is checked against real Slurm 22.05: a shard of `make prove` submits 64 scripts to Slurm's daemons and to virtual nodes of the same shape. It compares exit codes,
the calls of all programs with their variables, and all files. 60 of them are written in the shape of public ones, drawn by a seed from 191 (`tests/slurm_compat/sources.tsv`); four are
heterogeneous jobs, of which none was drawn.
"""

UNSET: Final = {
    "SLURM_JOB_QOS": "there are queues and priorities instead",
    "SLURM_PROFILE": "steps and devices are always sampled",
    "SLURM_OVERCOMMIT": "CPUs are never overcommitted",
    "SLURM_GPU_BIND, SLURM_GPU_FREQ": "devices are bound by --gpus-per-task only",
    "SLURM_NTASKS_PER_CORE, SLURM_NTASKS_PER_SOCKET, SLURM_GPUS_PER_SOCKET": "tasks are not bound to cores or sockets",
    "SLURM_DIST_PLANESIZE": "planes are not supported",
    "SLURM_SHARDS_ON_NODE": "see PHALANX_GPU_SHARE",
}
"""Variables of sbatch(1) and srun(1) that nothing sets here, with the reason."""


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD, "## Options of sbatch", "", "| option | here | |", "|---|---|---|", *_sbatch()]
    lines += ["", "## Options of srun", "", "| option | here | |", "|---|---|---|", *_srun()]
    lines += ["", "## Variables", "", "| variable | here | |", "|---|---|---|", *_variables()]
    return "\n".join(lines) + "\n"


def _sbatch() -> Iterator[str]:
    for name, option in sorted(SBATCH_OPTIONS.items()):
        word = f"`--{name}`" + (f", `-{option.short}`" if option.short else "")
        reason = option.unsupported_reason
        yield f"| {word} | {'ignored' if reason else 'ok'} | {reason or option.meaning} |"
    for name, why in sorted(REFUSED_SBATCH_OPTIONS.items()):
        yield f"| `--{name}` | refused | {why} |"
    words = ", ".join(f"`{word}`" for word in HET_WORDS)
    yield f"| {words} | ok | between the options of two components of a heterogeneous job; each is a role of one gang, with nodes of its own |"
    for name, hint in sorted(REFUSED_COMPONENT_OPTIONS.items()):
        yield f"| `--{name}` with `{HET_WORDS[0]}` | refused | {hint} |"


def _srun() -> Iterator[str]:
    for name, (short, does) in sorted(HONOURED_SRUN_OPTIONS.items()):
        yield f"| `--{name}`{f', `-{short}`' if short else ''} | ok | {does} |"
    for name, why in sorted(IGNORED_SRUN_OPTIONS.items()):
        yield f"| `--{name}` | ignored | {why} |"
    for name, why in sorted(REFUSED_SRUN_OPTIONS.items()):
        yield f"| `--{name}` | refused | {why} |"


def _variables() -> Iterator[str]:
    script, task = _examples()
    differ = {name: one.reason for one in ALLOWED if one.kind is Kind.VALUE for name in [one.names]}
    for name in sorted(script | task):
        where = "script and tasks" if name in script and name in task else "script" if name in script else "tasks"
        why = f"; {differ[name]}" if name in differ else ""
        yield f"| `{name}` | {'other value' if why else 'ok'} | {where}{why} |"
    for name in sorted({re.sub(r"_[0-9]+$", "_n", name) for name in _of_components() if "PACK" not in name}):
        older = name.replace("HET", "PACK")
        yield f"| `{name}`, `{older}` | ok | script and tasks of a heterogeneous job; the second is the older name |"
    for one in ALLOWED:
        if one.kind is Kind.ABSENT and not one.values:
            names = ", ".join(f"`{name}`" for name in one.names.split("|") if "(" not in name and ")" not in name)
            yield f"| {names or f'`{one.names}`'.replace('|', ' ')} | not set | {one.reason} |"
    for name, why in UNSET.items():
        yield f"| {', '.join(f'`{one}`' for one in name.split(', '))} | not set | {why} |"


def _of_components() -> set[str]:
    """The variables that a heterogeneous job of components that use every option adds."""
    return set(het_variables(replace(job := _example_job(), components=(job, job))))


def _examples() -> tuple[set[str], set[str]]:
    """The variables of a script and of a task that use every option."""
    job = _example_job()
    task = step_variables(job, SlurmStep(number=0, nodes=(0,), counts=(2,), mpi="pmix"), 0, host="10.0.0.1", label=True)
    own = {"CUDA_VISIBLE_DEVICES", "SLURM_TASK_PID"}
    servers = {
        "PMI_FD",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_JOBID",
        "PMIX_NAMESPACE",
        "PMIX_RANK",
    }  # of the process that starts a task
    return {*batch_variables(job), *own}, {*task, *own, *servers}


def _example_job() -> SlurmBatchJob:
    options = dict.fromkeys(OPTION_VARIABLES.values(), "1") | {"export": "NONE", "gpus_wanted": "1", "ntasks": "2"}
    node = SlurmBatchNode(name="n0", address="10.0.0.1", devices=1, cpus=2)
    array = dict.fromkeys(
        (f"SLURM_ARRAY_{word}" for word in ("JOB_ID", "TASK_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX", "TASK_STEP")),
        "1",
    )
    return SlurmBatchJob(
        job_number="1", name="a", nodes=(node,), options=options, user="me", uid=1, array=array, restarts=1, end_s=1.0
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
