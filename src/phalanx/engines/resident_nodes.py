"""What the providers of resident nodes have in common, whatever the engine keeps them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ListedMachine
from phalanx.ports.provider import CloudRights, DelayedNode, LeavingNode, LostNode


@dataclass(slots=True, kw_only=True)
class ReportedNode:
    """What was reported of a node: `leaves`: that it ends, `lost`: its loss, after which nothing is reported; `delay`: why it is not up yet, None if unknown."""

    leaves: bool = False
    lost: bool = False
    delay: str | None = ""

    def is_news(self, event: LostNode | LeavingNode | DelayedNode) -> bool:
        """Whether an event is to be reported: a loss once, that the node leaves once before, and each new delay before both.

        It counts as reported then.
        """
        if isinstance(event, DelayedNode):
            news = not self.leaves and event.why != self.delay
            self.delay = event.why if news else self.delay
            return news
        lost = isinstance(event, LostNode)
        if self.lost or (self.leaves and not lost):
            return False
        self.leaves, self.lost = True, lost
        return True


class EngineProvider:
    """A provider whose nodes the engine itself finds and checks. Extend it."""

    __slots__ = ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return nothing: what runs without an order is ended as soon as it is seen."""
        del settings
        return ()

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Refuse: the engine checks its rights when the head starts.

        Raises:
            BadRequest: always.
        """
        del settings
        raise BadRequest("the rights of this provider are those of the engine, which checks them when the head starts")
