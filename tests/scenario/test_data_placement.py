"""Jobs are placed on nodes that have a copy of their data, if they fit there."""

import pytest

from phalanx.core.fleet.node import HeldDataset
from phalanx.core.ids import NodeId
from phalanx.core.state.reports import DatasetsHeld
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import dataset_key
from tests.harness import Harness

TRAIN, TOK = "s3://corpus/train", "/nfs/tok"


@pytest.fixture
def cluster():
    made = Harness("n0=4 n1=4 n2=4 n3=4")
    hold(made, "n2", TRAIN)
    hold(made, "n3", TRAIN, TOK)
    return made


def hold(cluster, node, *sources):
    held = tuple(HeldDataset(key=dataset_key(one), size_bytes=1 << 28, bytes_per_s=1e7) for one in sources)
    cluster.turn([DatasetsHeld(node_id=NodeId(node), datasets=held)])


def where(cluster, job_id):
    cluster.runs(job_id)
    return sorted(str(grant.node_id) for grant in cluster.live(job_id).allocation.grants)


def read(cluster, *sources, gpus=4, **more):
    data = tuple((f"d{number}", source) for number, source in enumerate(sources))
    return where(cluster, cluster.submit(gpus=gpus, data=data, **more))


def test_job_goes_to_a_node_that_has_all_of_its_data(cluster):
    assert read(cluster, TRAIN, TOK) == ["n3"]
    assert read(cluster, TRAIN) == ["n2"]
    assert read(cluster, TRAIN) == ["n0"]  # the others are full


def test_gang_goes_where_all_of_its_nodes_have_the_data_else_anywhere(cluster):
    assert read(cluster, TRAIN, gpus=8) == ["n2", "n3"]
    assert read(cluster, TRAIN, gpus=8) == ["n0", "n1"]


def test_other_data_and_other_modes_have_no_preference(cluster):
    assert read(cluster, "s3://corpus/test") == ["n0"]
    assert read(cluster, TRAIN, data_mode=DataMode.STREAM) == ["n1"]


def test_node_that_no_longer_has_it_is_like_any_other(cluster):
    hold(cluster, "n2")
    hold(cluster, "n3")
    assert read(cluster, TRAIN) == ["n0"]


def test_job_that_waited_goes_where_the_data_is_by_then(cluster):
    hold(cluster, "n3")
    first = cluster.submit(gpus=16)
    cluster.runs(first)
    waiting = cluster.submit(gpus=4, data=(("d", TOK),))
    cluster.turn([])
    hold(cluster, "n1", TOK)
    cluster.ends(first)
    assert where(cluster, waiting) == ["n1"]


def test_gang_in_racks_stays_close_together_whatever_has_the_data():
    cluster = Harness("r0: n0=4 n1=4 | r1: n2=4 n3=4")
    hold(cluster, "n0", TRAIN)
    hold(cluster, "n2", TRAIN)
    assert read(cluster, TRAIN, gpus=8) == ["n0", "n1"]
