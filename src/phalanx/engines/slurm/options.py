"""The name of the engine, and its options."""

from __future__ import annotations

from typing import Final

from phalanx.ports.engine import EngineOption

ENGINE_NAME: Final = "slurm"
OPTIONS: Final = (
    EngineOption(name="partition", metavar="NAME", help="Slurm partition. Default: that of Slurm."),
    EngineOption(name="account", metavar="NAME", help="Slurm account to charge."),
    EngineOption(name="qos", metavar="NAME", help="Slurm's quality of service."),
)
