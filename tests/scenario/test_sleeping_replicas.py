"""Sleeping replicas in virtual time: what their devices are used for meanwhile, and what wakes, kills or replaces them."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.ids import ProjectId, QueueId, ServiceId, UserId
from phalanx.core.state.events import (
    CordonNode,
    PutQueue,
    ScaleService,
    SleepReplicas,
    StopService,
    SubmitService,
    UpdateService,
)
from phalanx.core.state.records import QUEUE_USAGE, SERVICES
from phalanx.core.work.attempt import SleepPhase
from phalanx.core.work.queue import Queue
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.core.work.spec import LaunchMode
from phalanx.core.work.states import JobState, WaitReasonCode
from tests.builders import spec
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

ADA, WEB = UserId("ada"), ServiceId("web")
SERVES = JobBehaviour(run_s=1e6, ready_s=1.0)


def web(low=1, high=4, *, gpus=1, hooks=True, **fields):
    terms = ServiceTerms(
        replicas_min=low,
        replicas_max=high,
        ready_within_s=30.0,
        sleep="/sleep?level=1" if hooks else "",
        wake="/wake_up" if hooks else "",
    )
    return spec("web", gpus=gpus, launch=LaunchMode.FIXED, tasks_per_node=1, service=terms, preemptible=False, **fields)


def ready(fleet="r: n0=1", one=None, behaviour=SERVES):
    cluster = Harness(fleet)
    cluster.behaviours["web"] = behaviour
    cluster.request(SubmitService(spec=one or web(), user=ADA, project=ProjectId("gpt"), queue=QueueId("default")))
    cluster.until(lambda: service(cluster).state is ServiceState.READY)
    return cluster


def service(cluster):
    return cluster.world.table(SERVICES)[WEB]


def replicas(cluster):
    found = (cluster.world.jobs[one] for one in cluster.world.relations.replicas.get(WEB, ()))
    return sorted((job for job in found if not job.cancelled_by), key=lambda job: job.seq)


def attempts(cluster):
    return [cluster.world.attempts[job.id] for job in replicas(cluster) if job.id in cluster.world.attempts]


def asleep(cluster):
    return [one.job_id for one in attempts(cluster) if one.gave_devices_back]


def serving(cluster):
    return [one.job_id for one in attempts(cluster) if one.serving]


def let_sleep(cluster, number=1000):
    cluster.request(SleepReplicas(service_id=WEB, by=ADA, asleep=number))
    cluster.until(lambda: len(asleep(cluster)) == min(number, service(cluster).desired))


def wake(cluster, number=1000):
    cluster.request(SleepReplicas(service_id=WEB, by=ADA, awake=number))


def lines(cluster, kind):
    return [line.text for line in cluster.store.history(limit=10_000) if line.kind == kind]


def test_job_runs_on_the_device_of_a_sleeping_replica_which_wakes_after_it():
    cluster = ready()
    (first,) = attempts(cluster)
    let_sleep(cluster)
    assert service(cluster).state is ServiceState.SLEEPING
    job = cluster.submit(gpus=1, behaviour=JobBehaviour(run_s=10.0))
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)
    wake(cluster)
    cluster.run(1.0)
    (waiting,) = attempts(cluster)
    assert waiting.sleep.phase is SleepPhase.WAITING
    assert waiting.sleep.why == f"device 0 of n0 is in use by job {job}"
    assert service(cluster).detail == f"replica {waiting.job_id} waits to wake: {waiting.sleep.why}"
    cluster.until(lambda: service(cluster).state is ServiceState.READY)
    assert cluster.job(job).state is JobState.SUCCEEDED
    (last,) = attempts(cluster)
    assert (last.epoch, last.generation, last.running_s) == (first.epoch, first.generation, first.running_s)


def test_wake_goes_before_jobs_that_wait():
    cluster = ready()
    let_sleep(cluster)
    for _ in range(3):
        cluster.submit(gpus=1, behaviour=JobBehaviour(run_s=5.0))
    cluster.run(1.0)
    wake(cluster)
    cluster.until(lambda: serving(cluster))
    states = sorted(job.state.value for job in cluster.world.jobs.values() if job.replica is None)
    assert states == ["pending", "pending", "succeeded"]


def test_sleeping_replica_keeps_its_cpus():
    cluster = ready(one=web(cpus=30))
    let_sleep(cluster)
    job = cluster.submit(gpus=1, cpus=8, allow_never=True)
    other = cluster.submit(gpus=1, cpus=2, behaviour=JobBehaviour(run_s=5.0))
    cluster.until(lambda: cluster.job(other).state is JobState.SUCCEEDED)
    assert cluster.job(job).state is JobState.PENDING
    cluster.request(StopService(service_id=WEB, by=ADA))
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)


def test_quotas_count_no_gpu_of_a_sleeping_replica_and_refuse_its_wake():
    cluster = ready("r: n0=1 n1=1")
    home = attempts(cluster)[0].allocation.grants[0].node_id
    cluster.request(PutQueue(queue=Queue(id=QueueId("default"), gpus_per_user=1)))
    job = cluster.submit(gpus=1, exclude=(home,), preemptible=False, behaviour=JobBehaviour(run_s=8.0))
    cluster.run(1.0)
    assert cluster.job(job).state is JobState.PENDING
    let_sleep(cluster)
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)
    wake(cluster)
    cluster.run(1.0)
    assert attempts(cluster)[0].sleep.why == "user ada uses 1 of at most 1 GPU per user in queue default"
    cluster.until(lambda: serving(cluster))
    assert cluster.job(job).state is JobState.SUCCEEDED


def test_time_asleep_is_not_billed_for_gpus_but_for_cpus():
    cluster = ready(one=web(cpus=2))
    begun_s = attempts(cluster)[0].placed_s
    let_sleep(cluster)
    slept_s = attempts(cluster)[0].sleep.since_s
    cluster.run(500.0)
    wake(cluster)
    cluster.until(lambda: serving(cluster))
    cluster.run(100.0)
    let_sleep(cluster)
    cluster.run(300.0)
    cluster.request(StopService(service_id=WEB, by=ADA))
    cluster.until(lambda: not cluster.world.relations.replicas.get(WEB))
    used = cluster.world.table(QUEUE_USAGE)[QueueId("default")]
    awake_s = (slept_s - begun_s) + 100.0
    assert awake_s < used.gpu_s < awake_s + 5.0, "and while its hooks ran"
    assert dict(used.other_s)["cpus"] == pytest.approx(2 * (900.0 + awake_s - 100.0), rel=0.05)


def test_wake_that_finds_no_devices_is_replaced_by_a_fresh_replica_elsewhere():
    cluster = ready("r: n0=1 n1=1")
    (old,) = attempts(cluster)
    home = old.allocation.grants[0].node_id
    let_sleep(cluster)
    behaviour = JobBehaviour(run_s=1e6)
    job = cluster.submit(gpus=1, nodelist=(home,), behaviour=behaviour, preemptible=False)
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)
    wake(cluster)
    took_s = cluster.until(lambda: serving(cluster))
    assert 15.0 <= took_s < 20.0
    cluster.until(lambda: len(replicas(cluster)) == 1)
    (fresh,) = attempts(cluster)
    assert fresh.job_id != old.job_id
    assert fresh.allocation.grants[0].node_id != home


def test_fresh_replica_is_not_needed_if_the_sleeper_wakes_first():
    cluster = ready()
    (old,) = attempts(cluster)
    let_sleep(cluster)
    cluster.submit(gpus=1, behaviour=JobBehaviour(run_s=30.0))
    cluster.run(1.0)
    wake(cluster)
    cluster.run(20.0)
    assert len(replicas(cluster)) == 2
    cluster.until(lambda: service(cluster).state is ServiceState.READY)
    cluster.run(1.0)
    assert [job.id for job in replicas(cluster)] == [old.job_id]


def test_hook_that_fails_leaves_the_replica_awake_with_its_devices_and_is_tried_again():
    behaviour = JobBehaviour(run_s=1e6, ready_s=1.0, failing_hooks=frozenset({1}))
    cluster = ready(behaviour=behaviour)
    cluster.request(SleepReplicas(service_id=WEB, by=ADA, asleep=1))
    job = cluster.submit(gpus=1, behaviour=JobBehaviour(run_s=5.0))
    cluster.run(10.0)
    assert serving(cluster)
    assert service(cluster).state is ServiceState.READY, "it says what is, not what is wanted"
    assert service(cluster).detail.endswith("did not fall asleep: POST /hook answered 500")
    assert cluster.job(job).state is JobState.PENDING
    cluster.until(lambda: asleep(cluster))
    cluster.until(lambda: cluster.job(job).state is JobState.SUCCEEDED)


def test_program_that_does_not_wake_is_restarted():
    behaviour = JobBehaviour(run_s=1e6, ready_s=1.0, failing_hooks=frozenset({2}))
    cluster = ready(behaviour=behaviour)
    let_sleep(cluster)
    wake(cluster)
    cluster.until(lambda: serving(cluster))
    (again,) = attempts(cluster)
    assert (again.epoch, again.generation) == (1, 1), "in place: it held its devices again"
    assert lines(cluster, "wake_failed") == ["n0: it did not wake: POST /hook answered 500"]


def test_node_that_dies_with_a_sleeping_replica_costs_a_start_elsewhere_before_it_sleeps_again():
    cluster = ready("r: n0=1 n1=1")
    (old,) = attempts(cluster)
    let_sleep(cluster)
    cluster.kill_node(old.allocation.grants[0].node_id)
    cluster.until(lambda: not asleep(cluster))
    cluster.until(lambda: asleep(cluster))
    (new,) = attempts(cluster)
    assert new.epoch == 2
    assert new.allocation.grants[0].node_id != old.allocation.grants[0].node_id


def test_sleeping_replica_whose_program_ends_starts_again_where_there_is_room():
    ends = JobBehaviour(run_s=1e6, ready_s=1.0, ends=lambda key, _rank: (30.0, 3, None) if key.epoch == 1 else None)
    cluster = ready("r: n0=1 n1=1", behaviour=ends)
    (old,) = attempts(cluster)
    let_sleep(cluster)
    home = old.allocation.grants[0].node_id
    job = cluster.submit(gpus=1, nodelist=(home,), preemptible=False, behaviour=JobBehaviour(run_s=1e6))
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)
    cluster.until(lambda: attempts(cluster) and attempts(cluster)[0].epoch == 2)
    assert attempts(cluster)[0].allocation.grants[0].node_id != home, "no restart in place on devices of others"
    cluster.until(lambda: asleep(cluster))


@pytest.mark.parametrize("phase", [SleepPhase.FALLING_ASLEEP, SleepPhase.ASLEEP, SleepPhase.WAKING])
def test_new_head_continues_in_each_phase(phase):
    cluster = ready()
    cluster.request(SleepReplicas(service_id=WEB, by=ADA, asleep=1))
    if phase is not SleepPhase.FALLING_ASLEEP:
        cluster.until(lambda: asleep(cluster))
    if phase is SleepPhase.WAKING:
        wake(cluster)
    cluster.until(lambda: attempts(cluster)[0].sleep.phase is phase)
    cluster.kill_head()
    cluster.start_head()
    if phase is SleepPhase.WAKING:
        cluster.until(lambda: serving(cluster))
    else:
        cluster.until(lambda: asleep(cluster))
        job = cluster.submit(gpus=1, behaviour=JobBehaviour(run_s=2.0))
        cluster.until(lambda: cluster.job(job).state is JobState.SUCCEEDED)
        wake(cluster)
        cluster.until(lambda: serving(cluster))
    assert attempts(cluster)[0].epoch == 1


def test_lost_command_is_sent_again():
    cluster = ready()
    node = cluster.nodes[attempts(cluster)[0].allocation.grants[0].node_id]
    node.cut = True
    cluster.request(SleepReplicas(service_id=WEB, by=ADA, asleep=1))
    cluster.run(2.0)
    node.cut = False
    cluster.until(lambda: asleep(cluster), 30.0)


def test_rollout_while_all_sleep_needs_one_device_and_ends_asleep():
    cluster = ready("r: n0=1 n1=1", web(2, 2))
    let_sleep(cluster)
    cluster.submit(gpus=1, preemptible=False, behaviour=JobBehaviour(run_s=1e6))
    cluster.run(1.0)
    cluster.request(UpdateService(service_id=WEB, by=ADA, spec=web(2, 2, env=(("A", "1"),))))
    cluster.until(lambda: service(cluster).served_revision == 2 and len(asleep(cluster)) == 2)
    assert {job.replica.revision for job in replicas(cluster)} == {2}
    cluster.run(2.0)
    assert service(cluster).state is ServiceState.SLEEPING


def test_rollout_keeps_awake_replicas_serving_beside_sleeping_ones():
    cluster = ready("r: n0=2 n1=2", web(3, 3))
    let_sleep(cluster, 2)
    cluster.request(UpdateService(service_id=WEB, by=ADA, spec=web(3, 3, env=(("A", "1"),))))
    for _ in cluster.events(lambda: service(cluster).served_revision != 2):
        assert serving(cluster)
    cluster.until(lambda: len(asleep(cluster)) == 2 and service(cluster).state is ServiceState.READY)


def test_rollout_to_a_revision_without_hooks_ends_with_all_awake():
    cluster = ready("r: n0=2", web(2, 2))
    let_sleep(cluster, 1)
    cluster.request(UpdateService(service_id=WEB, by=ADA, spec=web(2, 2, hooks=False)))
    cluster.until(lambda: service(cluster).state is ServiceState.READY and len(serving(cluster)) == 2)
    with pytest.raises(BadRequest, match="has no sleep hook"):
        cluster.request(SleepReplicas(service_id=WEB, by=ADA, asleep=2))


def test_scale_down_ends_sleeping_replicas_first():
    cluster = ready("r: n0=4", web(1, 4))
    cluster.request(ScaleService(service_id=WEB, replicas=3, by=ADA))
    cluster.until(lambda: len(serving(cluster)) == 3)
    let_sleep(cluster, 1)
    awake = serving(cluster)
    cluster.request(ScaleService(service_id=WEB, replicas=2, by=ADA))
    cluster.run(5.0)
    assert (serving(cluster), asleep(cluster), service(cluster).state) == (awake, [], ServiceState.READY)


def test_sleeping_replica_of_a_cordoned_node_wakes_on_another_as_a_fresh_one():
    cluster = ready("r: n0=1 n1=1")
    home = attempts(cluster)[0].allocation.grants[0].node_id
    let_sleep(cluster)
    cluster.request(CordonNode(node_id=home, by=ADA, why="fans", drain=False))
    wake(cluster)
    cluster.run(1.0)
    assert attempts(cluster)[0].sleep.why == f"{home} accepts no new jobs"
    cluster.until(lambda: serving(cluster))
    cluster.until(lambda: len(attempts(cluster)) == 1)
    assert attempts(cluster)[0].allocation.grants[0].node_id != home


def test_replica_that_waits_to_wake_sleeps_on_when_asked():
    cluster = ready()
    let_sleep(cluster)
    job = cluster.submit(gpus=1, preemptible=False, behaviour=JobBehaviour(run_s=1e6))
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING)
    wake(cluster)
    cluster.run(1.0)
    let_sleep(cluster)
    cluster.run(1.0)
    (one,) = attempts(cluster)
    assert one.sleep.phase is SleepPhase.ASLEEP
    assert one.sleep_turn == 1, "no hook ran"
    waiting = cluster.submit(gpus=1)
    cluster.run(1.0)
    assert cluster.world.jobs[waiting].reason is not WaitReasonCode.NEVER
