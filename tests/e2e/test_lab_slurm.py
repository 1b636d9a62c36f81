"""Slurm in the lab, before anything of ours stands on it: real daemons, three nodes, fake GPUs that Slurm hands out by device."""

import subprocess

import pytest

from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not() or why_no_slurm()), reason=why_not() or why_no_slurm()),
]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "HOME=/tmp"]
SEEN_DOWN_S = 120.0
"""A guard: slurmctld looks at its nodes some times a minute, whatever SlurmdTimeout says."""


@pytest.fixture(scope="module")
def slurm():
    with Lab(gpus=4) as lab:
        built = Slurm(lab=lab)
        built.start()
        yield built


def test_one_task_runs_on_each_host(slurm):
    assert sorted(slurm.lab.run("h0", ["srun", "-N3", "hostname"]).split()) == ["h0", "h1", "h2"]


def test_a_normal_user_runs_under_their_own_name(slurm):
    assert slurm.lab.run("h1", [*NOBODY, "srun", "-N2", "id", "-u"]).split() == ["65534", "65534"]


def test_two_jobs_on_one_node_are_given_different_gpus(slurm):
    first = ["srun", "--nodelist=h1", "--gres=gpu:h100:3", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 600"]
    held = slurm.lab.start("h0", first, stdout=subprocess.PIPE)
    try:
        assert held.stdout.readline().strip() == "0,1,2"
        second = ["srun", "--nodelist=h1", "--gres=gpu:h100:1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        assert slurm.lab.run("h0", second).strip() == "3"
        too_many = ["srun", "--immediate=2", "--nodelist=h1", "--gres=gpu:h100:2", "true"]
        refused = subprocess.run(slurm.lab.command("h0", too_many), capture_output=True, text=True, check=False)
        assert refused.returncode != 0
    finally:
        slurm.lab.run("h0", ["scancel", "--nodelist=h1"])
        held.stdout.close()
        held.wait(timeout=60)


def test_a_host_that_loses_power_is_seen_down_and_takes_work_again_when_it_is_back(slurm):
    slurm.lab.kill("h2")
    slurm.wait(lambda: slurm.states()["h2"].startswith("down"), "h2 is seen down", within_s=SEEN_DOWN_S)
    assert sorted(slurm.lab.run("h0", ["srun", "-N2", "hostname"]).split()) == ["h0", "h1"]
    slurm.lab.restart("h2")
    slurm.boot("h2")
    slurm.wait_idle(3)
    assert slurm.lab.run("h0", ["srun", "--nodelist=h2", "hostname"]) == "h2\n"


def test_stopped_slurm_leaves_no_daemon_and_starts_again(slurm):
    slurm.lab.run("h0", ["sbatch", "--output=/dev/null", "--wrap", "sleep 600"])
    slurm.stop()
    assert [len(slurm.lab.processes(name)) for name in slurm.lab.hosts] == [1, 1, 1]
    slurm.start()
    assert slurm.lab.run("h0", ["squeue", "--noheader"]) == ""
    assert sorted(slurm.lab.run("h2", ["srun", "-N3", "hostname"]).split()) == ["h0", "h1", "h2"]
