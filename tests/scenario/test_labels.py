"""Operators say where nodes are, and jobs are kept to it, under the real controller."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.errors import BadRequest, NeverFits, NotFound
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import LabelNodes
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.spec import LaunchMode, TopologyConstraint
from tests.builders import spec
from tests.harness import Harness


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4 n2=4")


def label(cluster: Harness, **labels: dict[str, str]) -> Any:
    return cluster.request(LabelNodes(labels={NodeId(name): one for name, one in labels.items()}, by=UserId("op")))


def labels(cluster: Harness, name: str) -> dict[str, str]:
    return next(node.labels for node in cluster.store.nodes() if node.id == name)


def history(cluster):
    return [line.text for line in cluster.store.history(limit=10_000) if line.kind == "labelled"]


def test_labels_are_kept_and_an_empty_text_takes_one_away(cluster):
    label(cluster, n0={"rack": "r0", "gen": "7"}, n1={"rack": "r0"})
    label(cluster, n0={"rack": "r1", "gen": ""})
    assert (labels(cluster, "n0"), labels(cluster, "n1"), labels(cluster, "n2")) == ({"rack": "r1"}, {"rack": "r0"}, {})
    assert history(cluster) == ["n[0-1]: labels changed by op", "n0: labels changed by op"]


def test_same_labels_again_change_nothing(cluster):
    label(cluster, n0={"rack": "r0"})
    before = cluster.store.nodes()
    label(cluster, n0={"rack": "r0"}, n1={"rack": ""})
    assert cluster.store.nodes() == before
    assert len(history(cluster)) == 1


def test_one_wrong_label_refuses_them_all(cluster):
    for wrong in (
        {"n9": {"rack": "r0"}},
        {"n1": {"no name": "r0"}},
        {"n1": {"rack": "r" * 200}},
        {"n1": {"rack": "r\n0"}},
        {"n1": {"rack": " r0"}},
        {"n1": {f"k{at}": "v" for at in range(65)}},
    ):
        with pytest.raises((NotFound, BadRequest)):
            label(cluster, n0={"rack": "r0"}, **wrong)
    assert labels(cluster, "n0") == {}


def test_labels_outlive_the_node_s_supervisor_and_the_head(cluster):
    label(cluster, n0={"rack": "r0"})
    cluster.kill_node("n0")
    cluster.run(5.0)
    cluster.revive_node("n0")
    cluster.run(5.0)
    assert labels(cluster, "n0") == {"rack": "r0"}
    cluster.kill_head()
    cluster.start_head()
    assert cluster.world.nodes[NodeId("n0")].labels == {"rack": "r0"}


def test_job_within_a_rack_goes_there(cluster):
    label(cluster, n0={"rack": "r0"}, n1={"rack": "r1"}, n2={"rack": "r1"})
    job = cluster.submit(gpus="2x4", topology=TopologyConstraint(within="rack", required=True))
    cluster.runs(job)
    assert {grant.node_id for grant in cluster.live(job).allocation.grants} == {"n1", "n2"}


def test_job_that_no_rack_holds_is_refused_at_submit_until_the_labels_say_otherwise(cluster):
    label(cluster, n0={"rack": "r0"}, n1={"rack": "r1"}, n2={"rack": "r2"})
    within = TopologyConstraint(within="rack", required=True)
    with pytest.raises(NeverFits, match="no rack has 2 such nodes"):
        cluster.submit(gpus="2x4", topology=within)
    with pytest.raises(NeverFits, match="no node is labelled with its leaf"):
        cluster.submit(gpus="1x4", topology=TopologyConstraint(within="leaf", required=True))
    label(cluster, n1={"rack": "r0"})
    cluster.runs(cluster.submit(gpus="2x4", topology=within))


@pytest.mark.parametrize(
    "argv", [("horovodrun", "./train"), ("deepspeed", "train.py"), ("bash", "-c", "make && deepspeed train.py")]
)
def test_launcher_that_makes_a_world_at_each_call_is_kept_on_one_node(cluster, argv):
    """Else the shape could become 2 nodes once the only large ones are away."""
    wanted = spec(gpus=4)
    role = replace(wanted.role, argv=argv, launch=LaunchMode.PER_NODE)
    job = cluster.submit(replace(wanted, role=role))
    assert str(cluster.job(job).spec.role.gpus) == "1x4"
    with pytest.raises(BadRequest, match=r"starts once on each of the 2 nodes and would create 2 separate worlds"):
        cluster.submit(replace(wanted, role=replace(role, gpus=parse_gpus("2x2"))))


@pytest.mark.parametrize(
    ("argv", "launch"),
    [
        (("bash", "-c", "deepspeed --hostfile $PHALANX_HOSTFILE --no_ssh train.py"), LaunchMode.PER_NODE),
        (("bash", "-c", "test $PHALANX_NODE_RANK != 0 || deepspeed train.py"), LaunchMode.FIXED),
    ],
)
def test_deepspeed_starts_on_several_nodes_if_each_call_joins_the_others_or_the_script_says_how_often(
    cluster, argv, launch
):
    wanted = spec(gpus="2x2")
    tasks = 1 if launch is LaunchMode.FIXED else None
    role = replace(wanted.role, argv=argv, launch=launch, tasks_per_node=tasks)
    cluster.runs(cluster.submit(replace(wanted, role=role)))


def test_mpi_launcher_is_kept_on_one_node_in_an_image_only(cluster):
    """The image does not hold our launch agent."""
    wanted = spec(gpus=4)
    role = replace(wanted.role, argv=("mpirun", "./train"), launch=LaunchMode.ONCE)
    alone, free = (cluster.submit(replace(wanted, role=role, image=image)) for image in ("python:3.11", ""))
    assert [str(cluster.job(job).spec.role.gpus) for job in (alone, free)] == ["1x4", "4"]
    with pytest.raises(BadRequest, match="mpirun in an image cannot start tasks on other nodes"):
        cluster.submit(replace(wanted, role=replace(role, gpus=parse_gpus("2x2")), image="python:3.11"))


def test_mpi_launcher_over_several_nodes_is_refused_in_a_copy_whose_path_differs_between_them(cluster):
    wanted = spec(gpus="2x4")
    role = replace(wanted.role, argv=("mpirun", "./train"), launch=LaunchMode.ONCE)
    with pytest.raises(BadRequest, match="mpirun cannot start tasks on other nodes in a copy of the working directory"):
        cluster.submit(replace(wanted, role=role, upload="0" * 64))
    alone = replace(role, gpus=spec(gpus=4).role.gpus)
    job = cluster.submit(replace(wanted, role=alone, upload="0" * 64))
    assert str(cluster.job(job).spec.role.gpus) == "1x4"
