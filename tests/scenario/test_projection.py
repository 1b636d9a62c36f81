"""The fleet over time: the policy decides on the board of a trial in virtual time, and each job runs as long as its forecast allows."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import random

import pytest

from phalanx.core.scheduling.estimates.run_time_prediction import RunTimePredictor
from phalanx.core.scheduling.outlook.forecast import Forecast
from phalanx.core.scheduling.outlook.projection import HORIZON_MAX_S, FleetProjection
from phalanx.core.scheduling.outlook.what_if import what_if
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.queue import Queue
from tests.builders import PLAIN, job
from tests.scenario.test_counterfactuals import CALM, TWO, snapshot

HOUR = 3600.0


def projected(seen, *, policy=CALM, has_time=lambda: True):
    return FleetProjection(Forecast(what_if(seen, Scheduler(policy)), RunTimePredictor()), has_time)


def limited(name, gpus, hours, **more):
    return job(name, gpus=gpus, time_limit_s=hours * HOUR, **more)


def test_jobs_start_as_others_end_and_the_line_gets_shorter():
    waits = [limited("x", 4, 1), limited("y", 4, 1)]
    seen = snapshot(TWO, [(limited("a", 4, 1), "n0:0,1,2,3", 0.0), (limited("b", 4, 3), "n1:0,1,2,3", 0.0)], waits)
    found = projected(seen)
    gpus, waiting = found.sample([0.0, 0.5 * HOUR, 1.5 * HOUR, 2.5 * HOUR, 3.5 * HOUR])
    assert (gpus, waiting) == ([8, 8, 8, 8, 0], [2, 2, 1, 0, 0])
    assert (found.last_start_s, found.last_end_s, found.fleet_gpus) == (2 * HOUR, 3 * HOUR, 8)
    assert found.until_s == HORIZON_MAX_S


def test_a_job_without_a_known_end_keeps_its_gpus():
    found = projected(snapshot(TWO, [(job("a", gpus=8), "n0:0,1,2,3 n1:0,1,2,3", 0.0)], [limited("x", 4, 1)]))
    assert found.sample([0.0, HORIZON_MAX_S]) == ([8, 8], [1, 1])
    assert found.last_start_s == 0.0


def test_a_quota_holds_a_job_back_though_gpus_are_free():
    queue = Queue(id="default", quota_gpus=4, borrow_gpus=0)
    seen = snapshot(TWO, [(limited("a", 4, 1), "n0:0,1,2,3", 0.0)], [limited("x", 4, 1)], queues=(queue,))
    assert projected(seen).sample([0.0, 1.5 * HOUR]) == ([4, 4], [1, 0])


def test_without_time_only_the_present_is_known():
    seen = snapshot(TWO, [(limited("a", 4, 1), "n0:0,1,2,3", 0.0)], [limited("x", 8, 1)])
    assert projected(seen, has_time=lambda: False).sample([0.0, 1.0]) == ([4, None], [1, None])


@pytest.mark.parametrize("seed", range(4))
def test_never_more_gpus_than_the_fleet_has_and_all_jobs_end(seed):
    random_ = random.Random(seed)
    waits = [limited(f"j{at}", random_.choice((1, 2, 4, 8)), random_.choice((0.5, 1, 2, 5))) for at in range(30)]
    found = projected(snapshot(TWO, (), waits, queues=(PLAIN,)), policy=PolicySettings())
    times = [at * 600.0 for at in range(1000)]
    gpus, waiting = found.sample(times)
    assert max(gpus) <= 8
    assert (gpus[-1], waiting[-1]) == (0, 0)
    work = sum(one.spec.role.gpus.total * one.spec.time_limit_s for one in waits)
    assert found.last_end_s >= work / 8, "no faster than the fleet allows"
