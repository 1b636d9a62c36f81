"""Slurm's commands and those of Phalanx that do the same."""

from __future__ import annotations

from typing import Final

VERBS: Final = {
    "sbatch": "phalanx submit SCRIPT",
    "srun": "phalanx run -- COMMAND",
    "salloc": "phalanx run -- COMMAND, and phalanx shell JOB",
    "squeue": "phalanx ps",
    "scancel": "phalanx cancel JOB",
    "sinfo": "phalanx nodes",
    "sacct": "phalanx ps -a",
    "scontrol": "phalanx show JOB, phalanx nodes show NODE or phalanx update JOB",
    "sstat": "phalanx show JOB",
    "sprio": "phalanx why JOB",
    "sshare": "phalanx queues",
    "sreport": "phalanx projects",
}
"""Command of Slurm -> what does the same here."""
