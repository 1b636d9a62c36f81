"""Which grants of which attempts the API keeps at hand."""

# mypy: disable-error-code="arg-type"

from types import SimpleNamespace

from phalanx.api.nodes.supervisors import CACHED_GRANTS_MAX, SupervisorRegistry
from phalanx.core.ids import Epoch, JobId, NodeId


class Gangs:
    """A store in which every job has one attempt on a thousand nodes."""

    def __init__(self):
        self.asked = 0
        self._grants = [SimpleNamespace(node_id=NodeId(f"n{number}")) for number in range(1000)]

    def attempts(self, job_id):
        self.asked += 1
        return [
            SimpleNamespace(
                epoch=Epoch(1), folder=f"{job_id}-k/epoch-1-k", allocation=SimpleNamespace(grants=self._grants)
            )
        ]


def test_a_gang_counts_with_each_of_its_nodes():
    store = Gangs()
    supervisors = SupervisorRegistry(store)
    for number in range(200):
        grant, folder = supervisors.require_grant(NodeId("n999"), JobId(str(number)), Epoch(1))
        assert (grant.node_id, folder) == ("n999", f"{number}-k/epoch-1-k")
    assert sum(map(len, supervisors._grants.values())) == supervisors._grant_count == CACHED_GRANTS_MAX
    asked = store.asked
    supervisors.require_grant(NodeId("n0"), JobId("199"), Epoch(1))
    assert store.asked == asked  # the newest are at hand
    supervisors.require_grant(NodeId("n0"), JobId("0"), Epoch(1))
    assert store.asked == asked + 1  # the oldest is read again
