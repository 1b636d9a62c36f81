"""Elastic jobs and fair shares on fleets of several models count the work done, where speeds are known; else devices."""

import pytest

from phalanx.core.ids import Epoch
from phalanx.core.work.pace import MeasuredPace, StepPace
from tests.builders import job as a_job
from tests.builders import make_fleet, queue
from tests.cell import Cell

FLEET = "r: f0=h100:2 f1=h100:2 s0=a100:2 s1=a100:2 s2=a100:2 s3=a100:2"
STEEP, SLIGHT = (("h100", 4.0), ("a100", 1.0)), (("h100", 1.2), ("a100", 1.0))
EITHER = "1..2xh100:2|1..4xa100:2"


def job(name, **fields):
    return a_job(name, **{"saves_on_stop": True, **fields})


def where(cell, name):
    return sorted(grant.node_id for grant in cell.world.attempts[name].allocation.grants)


FAST, SLOW = ["f0", "f1"], ["s0", "s1", "s2", "s3"]
# request, speeds -> nodes on an idle fleet
STARTS = [
    ("two fast nodes are worth eight slow ones", EITHER, STEEP, FAST),
    ("four slow nodes are worth more than two slightly faster ones", EITHER, SLIGHT, SLOW),
    ("the order of the user without speeds", EITHER, (), FAST),
    ("the order of the user without speeds, the other way round", "1..4xa100:2|1..2xh100:2", (), SLOW),
]


@pytest.mark.parametrize(("gpus", "speeds", "nodes"), [row[1:] for row in STARTS], ids=[row[0] for row in STARTS])
def test_an_elastic_job_starts_where_it_does_most(gpus, speeds, nodes):
    cell = Cell(make_fleet(FLEET))
    cell.submit(job("a", gpus=gpus, speeds=speeds))
    cell.go_on(60.0)
    assert where(cell, "a") == nodes


# speeds -> nodes an hour after the fast ones came free
GROWTHS = [
    ("onto fewer nodes that do more", STEEP, FAST),
    ("not onto fewer that do less", SLIGHT, SLOW),
    ("not by guesses", (), SLOW),
]


@pytest.mark.parametrize(("speeds", "nodes"), [row[1:] for row in GROWTHS], ids=[row[0] for row in GROWTHS])
def test_an_elastic_job_grows(speeds, nodes):
    cell = Cell(make_fleet(FLEET))
    cell.submit(job("first", gpus="2xh100:2"))
    cell.go_on(60.0)
    cell.submit(job("a", gpus=EITHER, speeds=speeds))
    cell.go_on(60.0)
    assert where(cell, "a") == SLOW
    cell.end("first")
    cell.go_on(3600.0)
    assert where(cell, "a") == nodes


def paces(*step_s):
    return tuple(
        MeasuredPace(epoch=Epoch(n), model=model, ranks=4, devices=4, pace=StepPace(steps=100, step_s=each))
        for n, (model, each) in enumerate(zip(("h100", "a100"), step_s, strict=True), start=1)
    )


# what is known of the job on the slow devices -> its use of the share as a part of that of the other
USES = [
    ("observed to be four times as slow", {"paces": paces(0.1, 0.4)}, 0.25),
    ("observed, but implausibly slow", {"paces": paces(0.1, 900.0)}, 0.05),
    ("stated only, which its user could do at will", {"speeds": STEEP}, 1.0),
    ("unknown", {}, 1.0),
]


@pytest.mark.parametrize(("fields", "ratio"), [row[1:] for row in USES], ids=[row[0] for row in USES])
def test_a_queue_on_slow_devices_uses_as_much_of_its_share_as_it_works(fields, ratio):
    cell = Cell(make_fleet(FLEET).with_queues(queue("fast"), queue("slow")))
    cell.submit(job("a", gpus="2xh100:2", queue="fast"), job("b", gpus="2xa100:2", queue="slow", **fields))
    cell.go_on(3600.0)
    quotas = cell.scheduler.board.quotas
    assert quotas is not None
    quotas.advance(cell.now_s)
    used = {name: quotas.usage(queue(name).id) for name in ("fast", "slow")}
    assert used["slow"].decayed_gpu_s / used["fast"].decayed_gpu_s == pytest.approx(ratio, rel=1e-6)
    assert used["slow"].gpu_s == pytest.approx(used["fast"].gpu_s)  # budgets count devices
    for name in "ab":
        cell.end(name)
    stored = [cell.world.queue_usage[queue(name).id].decayed_gpu_s for name in ("slow", "fast")]
    assert stored[0] / stored[1] == pytest.approx(ratio, rel=1e-6)
