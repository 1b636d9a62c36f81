"""Kubernetes for `phalanx up`. Without heavy imports: every `phalanx up` loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.engines.kubernetes.options import ENGINE_NAME, OPTIONS
from phalanx.ports.engine import Engine, EngineCheck, EngineContext, EngineType, HeadSetup
from phalanx.ports.provider import EnginePool, EnginePools

if TYPE_CHECKING:
    from phalanx.ports.provider import NodeProvider


class KubernetesEngineType(EngineType, EnginePools):
    """See the module."""

    name = ENGINE_NAME
    title = "Kubernetes"
    options = OPTIONS
    job_account = "the user of their pods"

    def check(self, given: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> dict[str, str]:
        """Check the options, the cluster, and that its pods can reach the head."""
        from phalanx.engines.kubernetes.head_setup import check_options

        options = self.resolve(given, previous)
        check_options(options, previous, setup)
        return options

    def setup_text(self, options: Mapping[str, str], *, head: bool = False) -> str:
        """Return the YAML of a Role with its binding; with `head`, also of a head in the cluster."""
        from phalanx.engines.kubernetes.head_setup import head_yaml, setup_yaml

        return setup_yaml(options) + ("---\n" + head_yaml(options) if head else "")

    def diagnose(self, options: Mapping[str, str]) -> Sequence[EngineCheck]:
        """Ask the API server which of the needed rights we have."""
        from phalanx.engines.kubernetes.head_setup import check_rights

        return check_rights(options)

    def uses_local_nodes(self, options: Mapping[str, str]) -> bool:
        """The nodes are the cluster's."""
        del options
        return False

    def pools(self, options: Mapping[str, str]) -> Sequence[EnginePool]:
        """Return the pool of resident pods, if there is one."""
        from phalanx.engines.kubernetes.resident_options import resident_pools

        return resident_pools(options)

    def create_provider(self, options: Mapping[str, str], head: EngineContext) -> NodeProvider:
        """Create the provider of resident pods, of this cluster and of others."""
        from phalanx.engines.kubernetes.cluster_pools import ClusterPools

        return ClusterPools(head=head, own_options=options or None)

    def create(self, options: Mapping[str, str], head: EngineContext) -> Engine:
        """Create the engine."""
        from phalanx.engines.kubernetes.head_setup import create_engine

        return create_engine(options, head)
