"""submitit and joblib on a real head: `cluster="phalanx"` with checkpoints through preemption, `backend="phalanx"` in the workers of an Executor."""

import os
import time

import joblib
import pytest
import submitit
from submitit.core import job_environment, utils

import phalanx.joblib
from benchmarks.cluster import cluster, wait_until
from phalanx.client import Client
from phalanx.submitit.executor import PhalanxExecutor, job_body
from phalanx.submitit.job import PhalanxInfoWatcher, PhalanxJob, head_client

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def head():
    with cluster("2x1", revive_s=0.5) as made:
        yield made


@pytest.fixture(autouse=True)
def here(head, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", head.home)
    monkeypatch.delenv("PHALANX_URL", raising=False)
    monkeypatch.setattr(PhalanxJob, "watcher", PhalanxInfoWatcher())  # of this head


class Counter(submitit.helpers.Checkpointable):
    """Waits in its first life; its checkpoint counts the lives."""

    def __call__(self, gate, lives=1):
        while lives == 1:
            open(gate, "w").close()
            time.sleep(0.05)
        return lives

    def checkpoint(self, gate, lives=1):
        return utils.DelayedSubmission(self, gate, lives + 1)


def test_a_gang_of_tasks_an_array_and_a_failure(tmp_path):
    def where(add):
        env = job_environment.JobEnvironment()
        print("hello from", env.global_rank)
        if add == 7:
            raise ValueError("seven")
        return env.global_rank + add, env.local_rank, env.node, env.num_nodes, env.num_tasks, len(env.hostnames)

    executor = submitit.AutoExecutor(tmp_path, cluster="phalanx")
    assert PhalanxExecutor.affinity() == 2, "the head is known here"
    executor.update_parameters(nodes=2, gpus_per_node=1, tasks_per_node=1, timeout_min=2, name="pair")
    gang = executor.submit(where, 10)
    executor.update_parameters(nodes=1, gpus_per_node=0, cpus_per_task=1, phalanx_array_parallelism=2)
    several = executor.map_array(where, [0, 7])
    assert gang.results() == [(10, 0, 0, 2, 2, 2), (11, 0, 1, 2, 2, 2)]
    assert "hello from 1" in (gang.task(1).stdout() or "")
    assert several[0].result() == (0, 0, 0, 1, 1, 1)
    assert [one.job_id.partition("_")[2] for one in several] == ["0", "1"]
    with pytest.raises(utils.FailedJobError, match="ValueError: seven"):
        several[1].result()
    calls = PhalanxJob.watcher.num_calls
    wait_until(lambda: several[1].get_info()["State"] == "FAILED", "the head knows")
    wait_until(lambda: gang.get_info()["State"] == "COMPLETED", "the head knows")
    assert PhalanxJob.watcher.num_calls > calls


def test_a_preempted_function_goes_on_from_its_checkpoint(tmp_path):
    executor = submitit.AutoExecutor(tmp_path, cluster="phalanx")
    executor.update_parameters(gpus_per_node=1)
    job = executor.submit(Counter(), str(tmp_path / "gate"))
    wait_until((tmp_path / "gate").exists, "it runs")
    head_client().requeue(job.job_id)
    assert job.result() == 2
    assert "preempted" in (job.stdout() or "")


def test_cancel_and_what_the_head_refuses(head, tmp_path):
    executor = PhalanxExecutor(tmp_path)
    executor.update_parameters(gpus_per_node=64)
    with pytest.raises(utils.FailedSubmissionError, match="never"):
        executor.submit(time.sleep, 1)
    executor.update_parameters(gpus_per_node=1)
    job = executor.submit(time.sleep, 600)
    job.cancel()
    wait_until(lambda: job.done(force_check=True), "it has ended")
    assert job.state == "CANCELLED"
    executor.update_parameters(hold=True)
    waiting = [executor.submit(int) for _ in range(2)]
    assert {one.get_info()["State"] for one in waiting} == {"PENDING"}, "from one list"
    head.call("POST", f"/v1/jobs/{waiting[0].job_id}/cancel", {})
    waiting[1].cancel_at_deletion()
    wait_until(lambda: waiting[0].get_info()["State"] == "CANCELLED", "it is no longer in the list")
    held = waiting.pop().job_id
    wait_until(lambda: head.job(held)["state"] == "cancelled", "it went with its object")
    assert PhalanxJob(tmp_path, "999999").get_info()["State"] == "NOT_FOUND"
    with pytest.raises(ValueError, match="partition"):
        executor.update_parameters(partition="x")
    with pytest.warns(UserWarning, match="Use 'slurm_signal_delay_s' instead"):
        submitit.AutoExecutor(tmp_path, cluster="local").update_parameters(signal_delay_s=3)
    assert head_client() is head_client()
    assert job_body({"gpus": "h100:8", "timeout_min": 0.5}, "true", tmp_path)["time"] == "30s"


def test_parallel_runs_on_the_cluster_and_keeps_its_workers_for_the_next_call(head, tmp_path):
    seen = str(tmp_path)

    def where(value):
        import os
        import time

        with open(f"{seen}/{os.getpid()}", "w"):
            pass
        while len(os.listdir(seen)) < 2:  # one worker could do all of it before the other one has begun
            time.sleep(0.01)
        return value * value, os.getpid(), os.environ["PHALANX_JOB_ID"]

    def fails(value):
        return 1 // value

    backend = phalanx.joblib.PhalanxBackend(gpus=1, client=Client(home=head.home), idle_worker_timeout=0.2)
    with joblib.parallel_config(backend=backend):
        found = joblib.Parallel()(joblib.delayed(where)(value) for value in range(300))
        assert [square for square, _, _ in found] == [value * value for value in range(300)]
        assert (len({pid for _, pid, _ in found}), os.getpid() in {pid for _, pid, _ in found}) == (2, False)
        with pytest.raises(ZeroDivisionError):
            joblib.Parallel()(joblib.delayed(fails)(value) for value in (1, 0, 2))
        again = list(joblib.Parallel(return_as="generator")(joblib.delayed(where)(value) for value in range(3)))
        assert {job for _, _, job in again} == {job for _, _, job in found}, "one job for all calls of a context"
        assert joblib.effective_n_jobs(-1) == 2, "the GPUs of the cluster"
    (job,) = {job for _, _, job in found}
    wait_until(lambda: head.job(job)["state"] == "succeeded", "idle workers end")


def test_it_is_registered_by_its_name_and_takes_arguments_of_an_executor(head):
    with joblib.parallel_config(backend="phalanx", n_jobs=2, gpus=0, name="grid", inner_max_num_threads=3) as context:
        assert set(joblib.Parallel()([joblib.delayed(os.getenv)("OMP_NUM_THREADS")] * 3)) == {"3"}
        assert head.call("GET", "/v1/jobs?limit=1")["jobs"][0]["name"] == "grid"
        with pytest.raises(ValueError, match="no meaning"):
            joblib.effective_n_jobs(0)
    context["backend"].close()
