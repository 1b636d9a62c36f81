"""Simulated users whose jobs ask for CPUs, extras and licences too, in queues that limit these; operators change seats and quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from phalanx.core.fleet.node import Node
from phalanx.core.ids import QueueId, UserId
from phalanx.core.state.events import PutLicence, PutQueues
from phalanx.core.units import GIB
from phalanx.core.work.extras import Licence, parse_extras
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import JobSpec
from phalanx.simulator.drill.workload import QUEUE_TREE, UserSimulator

OFFERS: Final = parse_extras("nic=3,scratch=1T")  # of each node
SEATS: Final = 3
SEAT_CHOICES: Final = (0, 1, 2, 3, 4)
CPU_QUOTAS: Final = (None, 8, 24, 48)
CHANGE_SHARE: Final = 0.08  # of all requests
_OP: Final = UserId("op")
_CPUS: Final = (0, 0, 4, 8, 16)  # of 32
_ASKED: Final = ("", "", "nic:1", "nic:2,scratch:400G", "matlab:1", "matlab:2", "matlab:1,nic:1")
_TERMS: Final[dict[str, dict[str, Any]]] = {
    "research": {"other_quotas": (("cpus", 48),), "other_per_user": (("memory", 512 * GIB),)},
    "nlp": {"other_quotas": (("cpus", 24), ("matlab", 1)), "other_lend": (("cpus", 8), ("matlab", 0))},
    "prod": {"other_borrow": (("cpus", 16), ("matlab", 1)), "other_quotas": (("cpus", 16), ("matlab", 1))},
    "default": {"other_per_user": (("nic", 5),)},
}
RESOURCE_TREE: Final[tuple[Queue, ...]] = tuple(replace(queue, **_TERMS[queue.id]) for queue in QUEUE_TREE)
"""The drill's queues, with quotas, limits and reserved parts of CPUs, memory, ports and seats."""


def with_offers(nodes: list[Node]) -> list[Node]:
    """Return the nodes with what they offer."""
    return [replace(node, extras=OFFERS) for node in nodes]


class ResourceUserSimulator(UserSimulator):
    """See the module."""

    tree = RESOURCE_TREE

    def start(self) -> None:
        """Create the licence, then as all users."""
        self._cluster.request(PutLicence(licence=Licence(id="matlab", total=SEATS), by=_OP))
        super().start()

    def send_random_request(self) -> None:
        """Send one random request, sometimes of an operator of seats and quotas."""
        if self._dice.random() >= CHANGE_SHARE:
            super().send_random_request()
        elif self._dice.random() < 0.5:
            self._ask(PutLicence(licence=Licence(id="matlab", total=self._dice.choice(SEAT_CHOICES)), by=_OP))
        else:
            self._change_cpu_quota()

    def remove_restrictions(self) -> None:
        """Restore the seats too."""
        self._cluster.request(PutLicence(licence=Licence(id="matlab", total=SEATS), by=_OP))
        super().remove_restrictions()

    def _change_cpu_quota(self) -> None:
        """Change what nlp has a right to: running jobs continue above a lowered quota, new ones do not start (6)."""
        cpus = self._dice.choice(CPU_QUOTAS)
        nlp = next(queue for queue in self.tree if queue.id == QueueId("nlp"))
        others = {**dict(nlp.other_quotas), "cpus": cpus}
        kept = tuple(sorted((name, amount) for name, amount in others.items() if amount is not None))
        self._ask(PutQueues(queues=(replace(nlp, other_quotas=kept),)))

    def _spec(self, **fields: Any) -> JobSpec:
        spec = super()._spec(**fields)
        role = replace(
            spec.role,
            cpus=self._dice.choice(_CPUS),
            memory_bytes=self._dice.choice((0, 0, 64 * GIB)),
            extras=parse_extras(self._dice.choice(_ASKED)),
        )
        return replace(spec, role=role)
