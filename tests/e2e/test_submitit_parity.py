"""submitit's own tests, as its wheel brings them, with jobs of a real head in place of its local processes."""

import asyncio
import pickle
import time

import pytest
import submitit
from submitit.auto import test_auto as its_auto
from submitit.core import plugins, utils
from submitit.local import local
from submitit.local import test_local as its_local

from benchmarks.cluster import cluster
from phalanx.submitit.executor import PhalanxExecutor
from phalanx.submitit.job import PhalanxInfoWatcher, PhalanxJob

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PLAIN = (
    its_local.test_local_map_array,
    its_local.test_local_submit_array,
    its_local.test_local_error,
    its_local.test_pickle_output_from_main,
    its_local.test_stdout,
    its_local.test_load_submission,
)
WEIRD = ("a_0", "a 0", 'a"=0"', "a'; echo foo", r"a\=0", r"a\=", "a\n0")


@pytest.fixture(scope="module")
def head():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_VIRTUAL_CPUS", "8")
        with cluster("1x4", revive_s=0.5) as made:
            yield made


@pytest.fixture(autouse=True)
def in_place_of_local(head, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", head.home)
    monkeypatch.delenv("PHALANX_URL", raising=False)
    plugins.get_executors()  # which remembers the real ones
    monkeypatch.setattr(local, "LocalExecutor", PhalanxExecutor)
    monkeypatch.setattr(local, "LocalJob", PhalanxJob)
    monkeypatch.setattr(PhalanxJob, "watcher", PhalanxInfoWatcher(delay_s=1))


@pytest.mark.parametrize("its", PLAIN, ids=lambda its: its.__name__)
def test_of_submitit(its, tmp_path):
    its(tmp_path)


def test_output_of_both_streams(tmp_path):
    its_auto.test_redirect_stdout_stderr(PhalanxExecutor(tmp_path))


def test_results_come_as_they_are_ready(tmp_path):
    async def both():
        return await asyncio.gather(*(job.awaitable().result() for job in jobs))

    jobs = PhalanxExecutor(tmp_path).map_array(abs, [-1, -2])
    assert asyncio.run(both()) == [1, 2]
    assert {job.result() for job in submitit.helpers.as_completed(jobs, poll_frequency=0.1)} == {1, 2}


@pytest.mark.parametrize("name", WEIRD)
def test_of_submitit_in_an_odd_folder(name, tmp_path):
    its_local.test_weird_dir(tmp_path / name)


def test_setup_lines_run_before_the_function(tmp_path):
    mark = tmp_path / "setup done"
    executor = submitit.AutoExecutor(tmp_path, cluster="phalanx")
    executor.update_parameters(phalanx_setup=[f"touch '{mark}'", "export FROM_SETUP=yes"])
    assert executor.submit(lambda: __import__("os").environ["FROM_SETUP"]).result() == "yes"
    assert mark.exists()


def test_batches_pickled_jobs_and_tasks(tmp_path):
    """As test_local_job, without what it says of local processes."""
    executor = PhalanxExecutor(tmp_path)
    executor.update_parameters(tasks_per_node=3, nodes=1)
    first = executor.submit(its_rank)
    executor.update_parameters(tasks_per_node=1)
    with executor.batch():
        with pytest.raises(RuntimeError, match=r"with executor\.batch"):
            executor.update_parameters(tasks_per_node=1)
        second = executor.submit(its_rank)
    assert (first.results(), first.task(2).result(), first.exception(), first.done()) == ([0, 1, 2], 2, None, True)
    assert second.task(0) is second
    assert pickle.loads(pickle.dumps(second)).results() == [0]


def its_rank():
    return submitit.JobEnvironment().local_rank


class Slow(submitit.helpers.Checkpointable):
    """Never ends in its first `lives`; the checkpoint counts them. submitit's own tests of time limits hold for an idle machine only."""

    def __init__(self, lives):
        self.lives = lives

    def __call__(self, life=0):
        while life < self.lives:
            time.sleep(0.05)
        return life

    def __submitit_checkpoint__(self, life=0):
        return utils.DelayedSubmission(self, life + 1)


@pytest.mark.parametrize("lives", [1, 2])
def test_a_time_limit_leads_to_another_life_as_often_as_allowed(lives, tmp_path):
    executor = PhalanxExecutor(tmp_path, max_num_timeout=1)
    executor.update_parameters(timeout_min=12 / 60, signal_delay_s=6)
    job = executor.submit(Slow(lives))
    job.wait()
    assert "(0 remaining timeouts)" in (job.stdout() or "")
    if lives == 1:
        assert job.result() == 1
    else:
        assert "timed-out too many times" in (job.stdout() or "")
        with pytest.raises(utils.FailedJobError, match="timed-out too many times"):
            job.result()


def test_of_several_tasks_the_error_is_that_of_one_that_failed(tmp_path):
    """On Slurm the others go on; here the first that fails ends them, and they have no result."""

    def flaky():
        rank = its_rank()
        if rank > 0:
            raise RuntimeError(f"failed on purpose: {rank}")
        while True:
            time.sleep(0.05)

    executor = PhalanxExecutor(tmp_path)
    executor.update_parameters(tasks_per_node=3)
    job = executor.submit(flaky)
    error = job.exception()
    assert isinstance(error, utils.FailedJobError)
    assert "failed on purpose" in str(error)
    with pytest.raises(utils.FailedJobError, match="failed on purpose"):
        job.results()
