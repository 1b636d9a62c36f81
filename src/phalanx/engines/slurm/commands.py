"""Run Slurm's commands. Only this module of the engine starts processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import Conflict, TryLater
from phalanx.engines.slurm import render
from phalanx.engines.slurm.parse import parse_version

ANSWER_S: Final = 30.0  # for slurmctld to answer; Slurm's own MessageTimeout is 10 s, and its commands retry
VERSION_MIN: Final = (20, 11)  # the first whose squeue --Format takes a suffix, and whose steps share the job's memory
_PROGRAMS: Final = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")
_OURS: Final = ("PHALANX_", "SLURM_", "SBATCH_", "SQUEUE_", "SCONTROL_", "SINFO_", "SALLOC_", "SRUN_")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def why(self) -> str:
        """The last line of its error output."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        last = lines[-1].partition("error: ")[2] or lines[-1] if lines else f"exit code {self.code}"
        return last.removeprefix("allocation failure: ")


def run(
    argv: Sequence[str], *, given: str = "", more: Mapping[str, str] | None = None, within_s: float = ANSWER_S
) -> CommandResult:
    """Run a command to its end, in our environment without variables that change Slurm commands, plus `more`.

    Raises:
        TryLater: Slurm does not answer in time.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    for name in ("SLURM_CONF", "SLURM_CLUSTERS"):  # they select the Slurm cluster
        if name in os.environ:
            environment[name] = os.environ[name]
    try:
        done = subprocess.run(
            list(argv),
            input=given,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            cwd="/",
            errors="replace",
            env={**environment, **(more or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise TryLater(
            f"{argv[0]}: no answer from Slurm in {within_s:.0f} s",
            hint="run scontrol ping to check that its controller is up",
        ) from error
    return CommandResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def output_of(argv: Sequence[str], *, within_s: float = ANSWER_S) -> str:
    """Return the output of a command.

    Raises:
        TryLater: it fails, or does not answer.
    """
    done = run(argv, within_s=within_s)
    if done.code != 0:
        raise TryLater(
            f"{' '.join(argv[:2])}: {done.why}", hint="run scontrol ping to check that Slurm's controller is up"
        )
    return done.stdout


def check_installed() -> None:
    """Check that Slurm's commands are on this machine, without running them.

    Raises:
        Conflict: some are missing.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise Conflict(
            f"engine slurm: {', '.join(missing)} not found on this machine",
            hint="start the head where sbatch works, on a login node of the cluster",
        )


def check_supported() -> None:
    """Check that a supported Slurm is here and answers.

    Raises:
        Conflict: its commands are too old.
        TryLater: slurmctld does not answer.
    """
    year, month = parse_version(output_of(render.SHOW_VERSION))
    if (year, month) < VERSION_MIN:
        raise Conflict(
            f"engine slurm: needs Slurm {VERSION_MIN[0]}.{VERSION_MIN[1]} or newer, found {year}.{month:02d}",
            hint="choose another engine: #SBATCH scripts run on all of them",
        )
    output_of(("sinfo", "--noheader", "--format=%P"))
