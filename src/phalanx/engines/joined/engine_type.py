"""The engine of servers that joined and start their own supervisor: a local engine on a machine without a head."""

from __future__ import annotations

import threading

from phalanx.ports.engine import EngineType, Membership


class JoinedEngineType(EngineType):
    """See the module."""

    name = "joined"
    title = "joined"
    selectable = False
    nodes_offer_extras = True
    members_follow = True

    def keep_member(self, folder: str, membership: Membership, ended: threading.Event) -> None:
        """Keep the supervisor running."""
        from phalanx.engines.joined.keeper import keep_supervisor

        keep_supervisor(folder, membership, ended)
