"""Training gives way to services under load, after a save, and resumes when the load falls; all that one step wants gets room at once."""

from dataclasses import replace

import pytest

from phalanx.core.ids import ProjectId, QueueId, UserId
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import SubmitJob
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.states import JobState
from tests.builders import spec
from tests.harness import Harness
from tests.scenario.test_load_scaling import reports, scaled
from tests.scenario.test_services import serving, submit
from tests.simulated_node import JobBehaviour

TRAINS = JobBehaviour(run_s=1e6, saves_on_stop=True)


@pytest.fixture
def cluster():
    parameters = PolicyParameters(round_s=6000.0, run_min_by_right_s=2.0)
    return Harness("r: n0=2 n1=2", policy=PolicySettings(parameters=parameters))


def test_training_saves_gives_way_and_resumes(cluster):
    low = cluster.submit(gpus=2, behaviour=TRAINS, preemptible=True, saves_on_stop=True)
    other = cluster.submit(gpus=2, behaviour=TRAINS, preemptible=True, saves_on_stop=True)
    for job in (low, other):
        cluster.runs(job)
    cluster.run(5.0)
    one = scaled(0, 2, ScaleTerms(in_flight=4, idle_s=20.0))
    submit(cluster, replace(one, priority=10))
    reports(cluster, 10, waiting=1)
    assert len(serving(cluster)) == 1, cluster.event_lines()
    stopped = [job for job in (low, other) if cluster.job(job).state is JobState.PENDING]
    assert len(stopped) == 1, "one gives way, the other trains on"
    victim = cluster.job(stopped[0])
    assert (victim.preemptions, victim.charged_restarts) == (1, 0)
    assert victim.checkpoints[-1].step >= 5, "it saved what it had done"
    assert "which has a higher priority" in victim.detail
    reports(cluster, 21)
    assert not serving(cluster)
    cluster.runs(victim.id)
    cluster.run(2.0)
    resumed = cluster.job(victim.id)
    assert f"ranks start, from step {victim.checkpoints[-1].step}" in cluster.event_lines(victim.id)
    assert (resumed.preemptions, cluster.job(low).state, cluster.job(other).state) == (
        1,
        JobState.RUNNING,
        JobState.RUNNING,
    )


def test_all_replicas_that_one_step_wants_take_their_right(cluster):
    for job in [cluster.submit(gpus=1, behaviour=TRAINS, preemptible=True, saves_on_stop=True) for _ in range(4)]:
        cluster.runs(job)
    cluster.run(5.0)
    one = scaled(0, 4, ScaleTerms(in_flight=4, idle_s=600.0))
    submit(cluster, replace(one, priority=10, role=replace(one.role, gpus=parse_gpus("1"))))
    reports(cluster, 20, waiting=16)
    assert len(serving(cluster)) == 4, cluster.event_lines()


def test_an_array_of_a_higher_priority_makes_room_for_all_its_elements_at_once(cluster):
    slow = JobBehaviour(run_s=1e6, ignores_sigterm=True)
    for job in [cluster.submit(gpus=1, behaviour=slow, preemptible=True, grace_s=20.0) for _ in range(4)]:
        cluster.runs(job)
    cluster.run(5.0)
    begun_s, wanted = cluster.clock.boot_s, spec("many", gpus=1, array="0-3", priority=10)
    cluster.behaviours["many"] = JobBehaviour(run_s=1e6)
    ask = SubmitJob(spec=wanted, user=UserId("ada"), project=ProjectId("gpt"), queue=QueueId("default"))
    for job in cluster.request(ask):
        cluster.runs(job.id)
    assert cluster.clock.boot_s - begun_s < 25.0, cluster.event_lines()
