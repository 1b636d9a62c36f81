"""The data of a job is copied to its nodes before it holds GPUs, by a job without GPUs on which it depends."""

import pytest

from phalanx.core.fleet.node import HeldDataset
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.state.events import CordonNode
from phalanx.core.state.reports import DatasetsHeld
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import dataset_key
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.simulator.drill.behaviour import JobBehaviour
from tests.harness import Harness

TRAIN, TEST = (("train", "s3://corpus/train"),), (("test", "s3://corpus/test"),)


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4")


def holds(cluster, node, data, size=1 << 40):
    held = tuple(HeldDataset(key=dataset_key(source), size_bytes=size, bytes_per_s=1e8) for _, source in data)
    cluster.turn([DatasetsHeld(node_id=NodeId(node), datasets=held)])


def copy_of(cluster, job_id):
    (condition,) = cluster.job(job_id).unmet_dependencies
    return JobId(condition.job_id)


def nodes_of(cluster, job_id):
    return sorted(str(grant.node_id) for grant in cluster.live(job_id).allocation.grants)


def submit(cluster, *, gpus=4, data=TRAIN, **more):
    job_id = cluster.submit(gpus=gpus, data=data, **more)
    cluster.turn([])
    return job_id


def test_job_waits_without_gpus_while_a_job_without_gpus_copies(cluster):
    job_id = submit(cluster)
    job, copy = cluster.job(job_id), cluster.job(copy_of(cluster, job_id))
    assert (job.state, job.reason) == (JobState.PENDING, WaitReasonCode.STAGING)
    assert cluster.head.controller.waits[job_id].reason is WaitReasonCode.STAGING
    assert "to copy its data" in cluster.head.controller.waits[job_id].detail
    assert [str(one) for one in job.unmet_dependencies] == [f"afterany:{copy.id}"], "as a user can write it"
    assert (copy.spec.data, copy.spec.role.milli) == (TRAIN, 0)
    assert copy.staged_on == job.staged_on == (NodeId("n0"),)
    other = cluster.submit(gpus=8)  # the GPUs are free meanwhile
    cluster.runs(other)
    cluster.ends(copy.id)
    holds(cluster, "n0", TRAIN)
    cluster.ends(other)
    cluster.runs(job_id)
    assert nodes_of(cluster, job_id) == ["n0"]
    assert "staging" in cluster.kinds(job_id)


def test_data_that_is_on_a_suitable_node_is_not_copied_ahead(cluster):
    holds(cluster, "n1", TRAIN)
    job_id = submit(cluster)
    cluster.runs(job_id)
    assert nodes_of(cluster, job_id) == ["n1"]


def test_nodes_that_all_have_the_data_are_not_ranked(cluster, monkeypatch):
    for node in ("n0", "n1"):
        holds(cluster, node, TRAIN)
    cluster.runs(cluster.submit(gpus=8))
    monkeypatch.setattr("phalanx.core.scheduling.staging_targets._free_at", None)  # of each node, in each cycle
    assert cluster.job(submit(cluster)).reason is not WaitReasonCode.STAGING


def test_short_copies_streams_and_jobs_without_gpus_do_not_wait(cluster):
    holds(cluster, "n1", TRAIN, size=1 << 30)
    cluster.runs(submit(cluster, gpus=8))
    cluster.runs(submit(cluster, gpus=0, data=TEST))
    waits = submit(cluster, gpus=8, data=TEST, data_mode=DataMode.STREAM)
    assert cluster.job(waits).reason is not WaitReasonCode.STAGING


def test_copy_that_fails_lets_the_job_start_and_a_second_place_is_not_staged(cluster):
    job_id = submit(cluster)
    cluster.cancel(copy_of(cluster, job_id))
    cluster.runs(job_id)
    assert not cluster.job(job_id).unmet_dependencies


def test_copy_ends_with_the_job_that_waits_for_it(cluster):
    job_id = submit(cluster)
    copy = copy_of(cluster, job_id)
    cluster.cancel(job_id)
    assert cluster.ends(copy).state is JobState.CANCELLED


def test_lost_node_lets_the_job_start_elsewhere(cluster):
    job_id = submit(cluster, gpus=4)
    copy = copy_of(cluster, job_id)
    cluster.runs(copy)
    cluster.request(CordonNode(node_id=NodeId("n0"), by=UserId("ada"), why="disk", drain=True))
    cluster.runs(job_id)
    assert nodes_of(cluster, job_id) == ["n1"]
    assert cluster.job(copy).state is JobState.CANCELLED


def test_waiting_job_is_staged_where_devices_are_free_first(cluster):
    long = cluster.submit(gpus=4, time_limit_s=9000.0, behaviour=JobBehaviour(run_s=5000.0))
    short = cluster.submit(gpus=4, time_limit_s=300.0, behaviour=JobBehaviour(run_s=100.0))
    cluster.runs(long)
    cluster.runs(short)
    job_id = submit(cluster)
    assert [str(node) for node in cluster.job(job_id).staged_on] == nodes_of(cluster, short)


def test_jobs_of_the_same_user_and_data_share_a_copy_and_others_take_the_other_node(cluster):
    first, second = submit(cluster, gpus=2), submit(cluster, gpus=2)
    assert copy_of(cluster, first) == copy_of(cluster, second)
    other = submit(cluster, gpus=4, data=TEST)
    assert [str(node) for node in cluster.job(other).staged_on] == ["n1"]
    crowd = submit(cluster, gpus=4)  # every node is promised: it joins the copy under way
    assert copy_of(cluster, crowd) == copy_of(cluster, first)
    late = submit(cluster, gpus=4, data=(("more", "s3://corpus/more"),))  # nothing to join: it may start at once
    cluster.runs(late)


def test_new_head_goes_on_and_stops_copies_that_no_job_waits_for(cluster):
    job_id = submit(cluster)
    copy = copy_of(cluster, job_id)
    cluster.runs(copy)
    cluster.kill_head()
    cluster.start_head()
    cluster.run(1.0)
    assert cluster.job(job_id).reason is WaitReasonCode.STAGING
    cluster.cancel(job_id)
    assert cluster.ends(copy).state is JobState.CANCELLED
