"""The name of the engine, and its options."""

from __future__ import annotations

from typing import Final

from phalanx.ports.engine import EngineOption

ENGINE_NAME: Final = "slurm"
RESIDENT: Final = "slurm-resident"
IDLE: Final = "slurm-resident-idle"
TIME: Final = "slurm-resident-time"
OPTIONS: Final = (
    EngineOption(name="partition", metavar="NAME", help="Slurm partition. Default: that of Slurm."),
    EngineOption(name="account", metavar="NAME", help="Slurm account to charge."),
    EngineOption(name="qos", metavar="NAME", help="Slurm's quality of service."),
    EngineOption(
        name=RESIDENT,
        metavar="[MIN-]NxG",
        help="Run all jobs in at most N Slurm jobs of G GPUs that stay between jobs; none: a Slurm job for each attempt.",
        reset="none",
    ),
    EngineOption(
        name=IDLE,
        metavar="TIME",
        help="Cancel resident Slurm jobs above MIN that had no job for so long.  [10m]",
    ),
    EngineOption(
        name=TIME,
        metavar="TIME",
        help="Slurm's time limit of each resident Slurm job; none: that of the partition.",
        reset="none",
    ),
)
