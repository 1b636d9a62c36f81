"""Phalanx on Slurm with three hosts that share no directory: the lab, real daemons, one cable each. What needs no cable is in the contract suite."""

import os

import pytest

from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm
from tests.lab.typed import PHALANX, OnSlurm

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_not() or why_no_slurm()), reason=why_not() or why_no_slurm()),
]
SCRIPT = """#!/bin/bash
#SBATCH -J inner -N 2 --ntasks-per-node=2 --gpus-per-node=2 -t 5
srun --label sh -c 'echo $SLURM_PROCID on $(hostname)'
"""


def squeue(head, fields="JobID:|,Name:|,State:|,NodeList:|,Comment:|"):
    return head.sh(f"squeue --noheader --all --states=all --Format='{fields}'").splitlines()


@pytest.fixture(scope="module")
def slurm():
    with Lab(gpus=4) as lab:
        built = Slurm(lab=lab)
        built.start()
        yield built


@pytest.fixture
def phalanx(slurm):
    head = OnSlurm(slurm.lab)
    head.up()
    yield head
    for name in slurm.lab.hosts:
        slurm.lab.mend(name)
    head("down --cancel-jobs")
    head.sh("scancel -u root; rm -rf ~/.phalanx")
    slurm.wait_idle(3)


def test_a_gang_runs_as_one_slurm_job_of_its_name_and_ends_with_its_code(phalanx):
    job = phalanx.submit(
        "--name gang --gpus 2x2 -- sh -c 'echo rank $RANK of $WORLD_SIZE on $(hostname); sleep 1; exit 3'"
    )
    assert (phalanx.ended(job)["state"], phalanx.job(job)["job"]["exit_code"]) == ("failed", 3)
    assert "rank 3 of 4 on h1" in phalanx(f"logs {job}")
    phalanx.until(lambda: "FAILED" in squeue(phalanx)[-1], "Slurm's books say so too")
    assert squeue(phalanx)[-1].split("|")[1] == "gang"
    assert f":{job}.1|" in squeue(phalanx)[-1]
    assert phalanx.sh("ls -d /tmp/phalanx-* 2>/dev/null | grep -v cache", host="h1") == "", (
        "nothing but the cache is left on the nodes"
    )


def test_an_unchanged_script_runs_its_tasks_on_the_hosts_with_a_copy_of_its_folder(phalanx):
    phalanx.sh(f"mkdir -p inner; cat > inner/inner.sh <<'END'\n{SCRIPT}END\n", check=True)
    said = phalanx.sh(f"cd inner; {PHALANX} run --copy inner.sh")
    assert [f"{rank}: {rank} on h{rank // 2}" in said for rank in range(4)] == [True] * 4, said


@pytest.mark.prove
def test_a_secret_is_in_the_environment_of_ranks_and_unknown_to_slurm(phalanx):
    value = f"px{os.urandom(16).hex()}"
    phalanx.sh(f"echo {value} > token; {PHALANX} secrets set HF_TOKEN --from-file token; rm token", check=True)
    job = phalanx.submit(
        """--gpus 2x2 --secret HF_TOKEN -- sh -c 'echo "${#HF_TOKEN}: $HF_TOKEN"; echo begun; sleep 600'"""
    )
    phalanx.until(lambda: phalanx(f"logs {job}").count(f"{len(value)}: ***") == 4, "all ranks have it")
    hidden = f"{value[:-1]}[{value[-1]}]"  # the search does not find itself
    search = "cat /proc/[0-9]*/{0} 2>/dev/null | tr '\\0' '\\n' | grep -c {1}"
    for host in ("h0", "h1"):
        assert (
            int(phalanx.sh(search.format("environ", hidden), host=host)) > 0
        )  # of the supervisor's programs and the ranks
        assert phalanx.sh(search.format("cmdline", hidden), host=host).strip() == "0"
        daemons = "for p in $(pgrep 'slurm|munge'); do cat /proc/$p/environ; done | tr '\\0' '\\n'"
        assert phalanx.sh(f"{daemons} | grep -c {hidden}", host=host).strip() == "0"
        kept = phalanx.sh(
            f"grep -rl {hidden} /var/spool /var/log /etc ~/.phalanx /tmp/phalanx-* 2>/dev/null", host=host
        )
        assert kept.split() == []
    assert value not in phalanx.sh("scontrol show job; scontrol show config; sacct -P --format=ALL 2>/dev/null")
    phalanx(f"cancel {job}")


def test_others_jobs_are_counted_and_named(phalanx):
    phalanx.sh("sbatch -N3 --gres=gpu:4 -o /dev/null --wrap 'sleep 600'", check=True)
    phalanx.until(lambda: "xxxx" in phalanx("nodes"), "the nodes show others")
    job = phalanx.submit("--gpus 2 -- hostname")
    phalanx.until(lambda: "12 in use outside Phalanx by Slurm job" in phalanx(f"why {job}"), "why names them")
    phalanx.sh("scancel --name=wrap")
    assert phalanx.ended(job)["state"] == "succeeded"


def _placed_after_others_took_all(phalanx):
    """A job of ours that came before the next poll saw the others; where the poll came first, once more."""
    for _ in range(20):
        placed = phalanx.sh(
            "sbatch -N3 --gres=gpu:4 -o /dev/null --job-name=others --wrap 'sleep 600' >&2 && "
            f"{PHALANX} submit --quiet --gpus h100:2 -- hostname",
            check=True,
        )
        job = placed.split()[-1]
        phalanx.until(
            lambda job=job: phalanx.job(job)["attempts"] or "in use outside Phalanx" in phalanx(f"why {job}"),
            "it is placed or waits",
        )
        if phalanx.job(job)["attempts"]:
            return job
        phalanx(f"cancel {job}")
        phalanx.sh("scancel --name=others")
        phalanx.until(lambda: "others" not in phalanx.sh("squeue --noheader"), "the others are gone")
    raise AssertionError("it was never placed")


@pytest.mark.prove
def test_a_place_that_went_to_others_is_given_up_after_15_s_and_the_history_names_them(phalanx):
    job = _placed_after_others_took_all(phalanx)
    reasons = [""]

    def taken_back():
        reasons.extend(phalanx.sh("squeue --noheader --name=hostname --format=%r").split())
        return phalanx.job(job)["attempts"][0]["cause"]

    phalanx.until(taken_back, "it is taken back")
    first = phalanx.job(job)["attempts"][0]
    assert first["cause"] == "contended"
    assert 14.0 < first["ended_s"] - first["placed_s"] < 20.0
    # Slurm has none as long as its scheduler has not looked at the job; a unit test has the text with a reason.
    if not {"", "None"} & {*reasons[-5:]}:
        assert "Slurm's reason: " in first["why"], reasons
    assert "Slurm job" in first["why"].partition(" took ")[0]
    phalanx.sh("scancel --name=others", check=True)
    assert phalanx.ended(job)["state"] == "succeeded"


def test_an_scancel_cancels_the_job_and_a_cancel_ends_the_slurm_job(phalanx):
    job = phalanx.submit("--name byhand --gpus 2x1 -- sleep 600")
    phalanx.runs(job)
    phalanx.sh("scancel --name=byhand")
    assert "was cancelled in Slurm" in phalanx.ended(job)["detail"]
    job = phalanx.submit("--name byus --gpus 1 -- sleep 600")
    phalanx.runs(job)
    phalanx(f"cancel {job}")
    assert phalanx.ended(job)["state"] == "cancelled"
    phalanx.until(lambda: phalanx.sh("squeue --noheader") == "", "nothing is left in Slurm's queue")


@pytest.mark.prove
def test_a_host_whose_cable_is_cut_is_replaced_and_its_ranks_are_gone_when_it_is_back(phalanx):
    job = phalanx.submit("--gpus 2x1 --nodes 2 -- sh -c 'while :; do sleep 1; done'")
    phalanx.runs(job)
    lost = next(
        name for name in (grant["node_id"] for grant in phalanx.job(job)["attempts"][0]["grants"]) if name != "h0"
    )
    phalanx.lab.cut(lost)
    phalanx.until(lambda: len(phalanx.job(job)["attempts"]) == 2, "it is placed again")
    phalanx.runs(job)
    assert lost not in [grant["node_id"] for grant in phalanx.job(job)["attempts"][1]["grants"]]
    phalanx.lab.mend(lost)
    phalanx.until(
        lambda: "while :" not in phalanx.sh("ps axww | grep -v grep | grep 'while :'", host=lost),
        "the old ranks are gone",
    )
    phalanx(f"cancel {job}")


def test_what_cannot_be_is_said_in_one_line_and_leaves_nothing(slurm):
    head = OnSlurm(slurm.lab)
    said = head(f"up --engine slurm --listen {slurm.lab.host('h0').address} --partition nope")
    assert said == "phalanx: error: --partition nope: Slurm has no such partition (its partitions are: lab)\n"
    assert "must reach this head, but it listens only on loopback" in head("up --engine slurm")
    assert "sbatch, scancel, scontrol, sinfo, squeue not found" in head.sh(f"PATH=/nowhere {PHALANX} up --engine slurm")
    assert "--partition needs the engine Slurm" in head("up --partition lab")
    assert "no head runs here" in head("down")
