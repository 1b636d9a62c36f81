"""The nodes that serve chunks of datasets to others, by the user whose datasets they are. In memory: nodes repeat their report."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, SupervisorId, UserId

SERVERS_MAX: Final = 20_000  # of all users; 2,000 nodes with ten users each, some 10 MB


@dataclass(frozen=True, slots=True)
class RegisteredDataServer:
    """A node's server of chunks for one user, as its supervisor reported it."""

    supervisor_id: SupervisorId
    name: NodeId  # of the supervisor: the node's, or that of its seat
    node: NodeId
    address: str
    port: int
    fingerprint: str


class DataServerRegistry:
    """The servers known to this process of the head, by user and node. Use it on the event loop only."""

    def __init__(self) -> None:
        self._servers: OrderedDict[tuple[UserId, NodeId], RegisteredDataServer] = OrderedDict()

    def put(self, user: UserId, server: RegisteredDataServer) -> None:
        """Remember a server as the newest of its user; of too many the oldest goes."""
        self._servers.pop((user, server.node), None)
        self._servers[user, server.node] = server
        while len(self._servers) > SERVERS_MAX:
            self._servers.popitem(last=False)

    def of_user(self, user: UserId) -> list[RegisteredDataServer]:
        """The servers of a user, the newest first."""
        return [server for (owner, _), server in reversed(self._servers.items()) if owner == user]
