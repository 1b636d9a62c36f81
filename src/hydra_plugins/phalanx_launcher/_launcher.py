"""Hydra's launcher by submitit, with `cluster="phalanx"` and its parameters. `__init__` imports it where both are installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher


class PhalanxLauncher(BaseSubmititLauncher):
    """Runs the jobs of a sweep as one array."""

    _EXECUTOR = "phalanx"


@dataclass
class PhalanxQueueConf(BaseQueueConf):
    """What `hydra.launcher.NAME=` sets. Other keys of a job file are set by `+hydra.launcher.NAME=`."""

    _target_: str = "hydra_plugins.phalanx_launcher._launcher.PhalanxLauncher"
    max_num_timeout: int = 0
    signal_delay_s: int = 90
    array_parallelism: int | None = None
    setup: list[str] | None = None
    gpus: str | None = None
    queue: str | None = None
    project: str | None = None
    priority: int | None = None
    image: str | None = None
    env: dict[str, Any] | None = None
    resources: str | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="phalanx", node=PhalanxQueueConf(), provider="phalanx_launcher"
)
