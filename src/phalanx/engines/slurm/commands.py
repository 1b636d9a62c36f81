"""Runs Slurm's commands. The one place of this engine that starts processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import Conflict, TryLater
from phalanx.engines.slurm import render
from phalanx.engines.slurm.parse import version_of

ANSWER_S: Final = 30.0  # of slurmctld; Slurm's own MessageTimeout is 10 s, and its commands try again
VERSION_MIN: Final = (20, 11)  # the first whose squeue --Format takes a suffix, and whose steps share the job's memory
_PROGRAMS: Final = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")
_OURS: Final = ("PHALANX_", "SLURM_", "SBATCH_", "SQUEUE_", "SCONTROL_", "SINFO_", "SALLOC_", "SRUN_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def why(self) -> str:
        """The last line of its complaint."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        last = lines[-1].partition("error: ")[2] or lines[-1] if lines else f"exit code {self.code}"
        return last.removeprefix("allocation failure: ")


def run(
    argv: Sequence[str], *, given: str = "", more: Mapping[str, str] | None = None, within_s: float = ANSWER_S
) -> Said:
    """Run to the end. The environment is ours without what would change a Slurm command's meaning, and `more`.

    Raises:
        TryLater: Slurm does not answer in time.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    for name in ("SLURM_CONF", "SLURM_CLUSTERS"):  # which Slurm is meant
        if name in os.environ:
            environment[name] = os.environ[name]
    try:
        done = subprocess.run(
            list(argv), input=given, capture_output=True, text=True, timeout=within_s, check=False, cwd="/",
            errors="replace", env={**environment, **(more or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TryLater(
            f"{argv[0]}: no answer from Slurm in {within_s:.0f} s",
            hint="scontrol ping says whether its controller is up",
        ) from error
    return Said(code=done.returncode, out=done.stdout, err=done.stderr)


def ask(argv: Sequence[str], *, within_s: float = ANSWER_S) -> str:
    """What a command prints.

    Raises:
        TryLater: it fails, or does not answer.
    """
    said = run(argv, within_s=within_s)
    if said.code != 0:
        raise TryLater(f"{' '.join(argv[:2])}: {said.why}", hint="scontrol ping says whether Slurm's controller is up")
    return said.out


def check_here() -> None:
    """Nothing, if Slurm's commands are on this machine; none of them is run.

    Raises:
        Conflict: they are not.
    """
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if lacking:
        raise Conflict(
            f"--engine slurm: {', '.join(lacking)} not found on this machine",
            hint="run phalanx up where sbatch works, on a login node of the cluster",
        )


def check() -> None:
    """Nothing, if there is a Slurm here that this engine can work with.

    Raises:
        Conflict: its commands are too old.
        TryLater: slurmctld does not answer.
    """
    year, month = version_of(ask(render.VERSION))
    if (year, month) < VERSION_MIN:
        raise Conflict(
            f"--engine slurm: Slurm {year}.{month:02d} is here, and {VERSION_MIN[0]}.{VERSION_MIN[1]} or newer is needed",
            hint="#SBATCH scripts run on the other engines too: phalanx up, without --engine slurm",
        )
    ask(("sinfo", "--noheader", "--format=%P"))
