"""The local engine for `phalanx up`: nodes of this machine. Every head has one: it also watches supervisors from before."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.ports.engine import Engine, EngineContext, EngineType


class LocalEngineType(EngineType):
    """See the module."""

    name = "local"
    title = "local"
    has_virtual_models = True
    nodes_offer_extras = True

    def create(self, options: Mapping[str, str], head: EngineContext) -> Engine:
        """Create the engine with this head's nodes, and those that still run from before: they are watched until they end."""
        from phalanx.engines.local.engine import LocalEngine
        from phalanx.engines.local.records import recorded_nodes

        del options
        names = {node.id for node in head.nodes}
        before = [node for node in recorded_nodes(head.state_folder) if node.id not in names]
        return LocalEngine(
            home=head.state_folder,
            own_nodes=[*head.nodes, *before],
            environment=head.local_environment,
            token_of=head.node_token,
            revive_after_s=head.revive_after_s,
            jobs_as="owner",
            sole_head=head.sole_head,
        )
