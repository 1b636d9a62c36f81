"""Reports of an operator's programs cordon a node, within the limit of automatic cordons; only a health check ends its own cordon."""

import pytest

from phalanx.core.fleet.fitness import HEALTH_CHECK, OPERATOR_HOOK
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import CordonNode
from phalanx.core.state.reports import NodeHealthReported
from tests.harness import Harness


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4 n2=4")


def report(cluster, node, why, *, checked):
    cluster.turn([NodeHealthReported(node_id=NodeId(node), why=why, checked=checked)])


def cordons(cluster):
    return {str(node.id): (node.cordon.by, node.cordon.why) for node in cluster.store.nodes() if node.cordon}


def test_health_check_takes_a_node_out_of_service_and_returns_it(cluster):
    report(cluster, "n1", "health check nhc ended with code 1: xid 79", checked=True)
    assert cordons(cluster) == {"n1": (HEALTH_CHECK, "health check nhc ended with code 1: xid 79")}
    job = cluster.submit(gpus=8)
    cluster.runs(job)
    assert sorted(str(grant.node_id) for grant in cluster.live(job).allocation.grants) == ["n0", "n2"]
    report(cluster, "n1", "", checked=True)
    assert cordons(cluster) == {}


def test_cordon_of_a_prolog_or_of_a_person_stays_when_a_health_check_passes(cluster):
    report(cluster, "n1", "epilog wipe timed out after 60 s", checked=False)
    cluster.request(CordonNode(node_id=NodeId("n2"), why="new fan", drain=False, by=UserId("op")))
    for node in ("n1", "n2"):
        report(cluster, node, "", checked=True)
    assert {node: by for node, (by, _) in cordons(cluster).items()} == {"n1": OPERATOR_HOOK, "n2": "op"}


def test_program_that_fails_everywhere_does_not_remove_the_fleet(cluster):
    for node in ("n0", "n1", "n2"):
        report(cluster, node, "health check nhc ended with code 127", checked=True)
    assert list(cordons(cluster)) == ["n0"]
    report(cluster, "n9", "unknown", checked=True)
    report(cluster, "n0", "x" * 9000, checked=True)
    assert len(cordons(cluster)["n0"][1]) < 9000
