"""Slurm for `phalanx up`. Without heavy imports: every `phalanx up` loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.engines.slurm.options import ENGINE_NAME, OPTIONS
from phalanx.ports.engine import Engine, EngineContext, EngineType, HeadSetup
from phalanx.ports.provider import EnginePool, EnginePools

if TYPE_CHECKING:
    from phalanx.ports.provider import NodeProvider


class SlurmEngineType(EngineType, EnginePools):
    """See the module."""

    name = ENGINE_NAME
    title = "Slurm"
    options = OPTIONS
    job_account = "the user of their Slurm jobs, who started the head"

    def check(self, given: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> dict[str, str]:
        """Check Slurm and the options, and that Slurm's nodes can reach the head."""
        from phalanx.engines.slurm.head_setup import check_options

        options = self.resolve(given, previous)
        check_options(options, previous, setup)
        return options

    def uses_local_nodes(self, options: Mapping[str, str]) -> bool:
        """The nodes are Slurm's."""
        del options
        return False

    def pools(self, options: Mapping[str, str]) -> Sequence[EnginePool]:
        """Return the pool of resident Slurm jobs, if there is one."""
        from phalanx.engines.slurm.resident_options import resident_pools

        return resident_pools(options)

    def create_provider(self, options: Mapping[str, str], head: EngineContext) -> NodeProvider:
        """Create the provider of resident Slurm jobs."""
        from phalanx.engines.slurm.head_setup import create_resident_jobs

        return create_resident_jobs(options, head)

    def create(self, options: Mapping[str, str], head: EngineContext) -> Engine:
        """Create the engine."""
        from phalanx.engines.slurm.head_setup import create_engine

        return create_engine(options, head)
