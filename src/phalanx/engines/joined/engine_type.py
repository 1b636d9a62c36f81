"""The engine of servers that joined and start their own supervisor: a local engine on a machine without a head."""

from __future__ import annotations

from phalanx.ports.engine import EngineType, KeeperStop, Membership


class JoinedEngineType(EngineType):
    """See the module."""

    name = "joined"
    title = "joined"
    selectable = False
    nodes_offer_extras = True
    members_follow = True

    def keep_member(self, folder: str, membership: Membership, ended: KeeperStop) -> None:
        """Keep the supervisor running."""
        from phalanx.engines.joined.keeper import keep_supervisor

        keep_supervisor(folder, membership, ended)
