"""Phalanx on Slurm as Slurm is run: normal users on a login node, each with a head of their own, and accounting that must tell the truth."""

import contextlib
import json

import pytest

from tests.lab.books import Books, why_no_books
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm
from tests.lab.typed import PHALANX, OnSlurm
from tests.lab.users import add_users

WHY_NOT = why_not() or why_no_slurm() or why_no_books()
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "the lab"),
]
USERS = ("alice", "bob")
TOPOLOGY = "SwitchName=leaf0 Nodes=h0,h1\nSwitchName=leaf1 Nodes=h2\nSwitchName=top Switches=leaf[0-1]\n"
SCRIPT = """#!/bin/bash
#SBATCH -J scripted -N 2 --ntasks-per-node=2 --gpus-per-node=2 -t 5
srun --label sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS as $(id -un)'
"""


class Person(OnSlurm):
    """Somebody on h0 with a head of their own there."""

    def __init__(self, lab, name, port):
        super().__init__(lab, name)
        self.port = port

    def up(self, words=""):
        return super().up(f"--port {self.port} {words}")

    def processes(self, host):
        return self.lab.run(host, ["ps", "-u", self.name, "-o", "args="], check=False).splitlines()


@pytest.fixture(scope="module")
def books():
    with Lab(gpus=4) as lab:
        books = Books(lab=lab, accounts={"physics": USERS, "chemistry": ("alice",)})
        slurm = Slurm(lab=lab, books=books, more="TopologyPlugin=topology/tree\n", also={"topology.conf": TOPOLOGY})
        for host in lab.hosts:
            add_users(lab, host, USERS)
        slurm.start()
        yield slurm


@pytest.fixture
def alice(books):
    with at_home(Person(books.lab, "alice", 7600)) as person:
        yield person


@pytest.fixture
def bob(books):
    with at_home(Person(books.lab, "bob", 7800)) as person:
        yield person


@contextlib.contextmanager
def at_home(person):
    """Their head, jobs and files are gone afterwards, seen on every host."""
    try:
        yield person
    finally:
        said = person("down --cancel-jobs")
        person.sh("rm -rf ~/.phalanx ~/work")
    assert "Phalanx is down" in said or "no head runs here" in said, said
    person.until(lambda: person.sh("squeue --noheader --me") == "", "no Slurm job is left")
    for host in person.lab.hosts:
        person.until(lambda host=host: person.processes(host) == [], f"no process is left on {host}")
        assert person.sh("ls -A /tmp | grep phalanx-$USER", host=host) == "", f"left in /tmp of {host}"
        # An empty folder for a job's outputs may stay on a node that shares no directory with the head.
        assert person.sh("find ~ -type f", host=host) == "", f"left at home on {host}"


def sacct(slurm, job, *fields):
    """The row of a Phalanx job's last attempt in Slurm's books, found by its comment."""
    rows = slurm.books.rows("h0", "Comment", *fields)
    return next((row[1:] for row in reversed(rows) if f":{job}." in row[0]), None)


def test_a_normal_user_runs_reads_and_cancels_and_needs_root_for_nothing(alice):
    alice.up()
    said = alice("run --gpus 2x2 -- sh -c 'echo rank $RANK as $(id -un)'")
    assert [f"rank {rank} as alice" in said for rank in range(4)] == [True] * 4, said
    job = alice.submit("--gpus 1 -- sh -c 'echo begun; sleep 600'")
    alice.runs(job)
    assert "begun" in alice(f"logs {job}")
    assert alice.sh("squeue --noheader --me --Format=UserName:20").split() == ["alice"]
    alice(f"cancel {job}")
    assert alice.ended(job)["state"] == "cancelled"
    alice.sh(f"mkdir -p work; cat > work/it.sh <<'END'\n{SCRIPT}END\n")
    said = alice.sh(f"cd work; {PHALANX} run --copy it.sh")
    assert [f"{rank}: {rank} of 4 as alice" in said for rank in range(4)] == [True] * 4, said


def test_slurms_books_say_how_each_attempt_ended(alice, books):
    alice.up("--account '{project}' --partition lab")  # the project is `default`, which is no account
    refused = alice.ended(alice.submit("--gpus 1 -- true"))
    assert refused["state"] == "failed"
    assert (
        "Invalid account or account/partition combination specified (partition lab, account default)"
        in refused["detail"]
    )
    alice("down")
    alice.up("--account chemistry")
    ways = {
        "well": ("--gpus 2x2 -- true", ("succeeded", "COMPLETED", "0:0")),
        "badly": ("--gpus 2x1 -- sh -c 'sleep 1; exit 3'", ("failed", "FAILED", "3:0")),
        "in part": ("--gpus 2x1 -- sh -c '[ $RANK = 0 ] && exit 5; exec sleep 600'", ("failed", "FAILED", "5:0")),
        "again": (
            "--retry 1 --gpus 2x1 -- sh -c '[ $PHALANX_RESTART_COUNT = 1 ] || exit 4'",
            ("succeeded", "COMPLETED", "0:0"),
        ),
        "too late to start": ("--time 1s --gpus 2x1 -- sleep 600", ("timeout", "TIMEOUT", "0:0")),
        "late": ("--time 5s --grace 2s --gpus 2x1 -- sleep 600", ("timeout", "TIMEOUT", "0:0")),
        "deaf": (
            "--time 5s --grace 1s --gpus 1 -- sh -c 'trap : TERM; while :; do sleep 1; done'",
            ("timeout", "TIMEOUT", "0:0"),
        ),
        "given up": ("--gpus 1 -- sleep 600", ("cancelled", "CANCELLED", None)),
    }
    jobs = {way: alice.submit(words) for way, (words, _) in ways.items()}
    alice.runs(jobs["given up"])
    alice(f"cancel {jobs['given up']}")
    for way, job in jobs.items():
        ours, theirs, code = ways[way][1]
        assert (way, alice.ended(job)["state"]) == (way, ours)
        alice.until(lambda job=job: over(books, job), f"{way}: the books are closed")
        state, exit_code, account = sacct(books, job, "State", "ExitCode", "Account")
        assert (way, state.split()[0], account) == (way, theirs, "chemistry")
        assert code is None or (way, exit_code) == (way, code)
    name, nodes, tres = sacct(books, jobs["well"], "JobName", "NNodes", "AllocTRES")
    assert (name, nodes, "gres/gpu=4" in tres) == ("true", "2", True), tres
    raw = alice.job(jobs["well"])["attempts"][0]
    assert sacct(books, jobs["well"], "NodeList") == [
        f"h[{','.join(sorted(g['node_id'][1:] for g in raw['grants']))}]".replace("0,1", "0-1").replace("1,2", "1-2")
    ]


QOS, ACCOUNT = ("qos", "normal"), ("account", "chemistry")
LIMITS = [  # whose, the limit, what goes over it, Slurm's reason with our remedy
    (QOS, "MaxTRESPerJob=gres/gpu=1", "--gpus 2", "QOSMaxGRESPerJob; ask for fewer GPUs"),
    (QOS, "MaxTRESPerJob=node=1", "--gpus 2x1", "QOSMaxNodePerJobLimit; ask for fewer nodes"),
    (QOS, "MaxWall=2", "--gpus 1 --time 10m", "QOSMaxWallDurationPerJobLimit; set a shorter time limit"),
    (ACCOUNT, "MaxTRES=gres/gpu=1", "--gpus 2", "AssocMaxGRESPerJob; ask for fewer GPUs"),
    (ACCOUNT, "MaxTRES=node=1", "--gpus 2x1", "AssocMaxNodePerJobLimit; ask for fewer nodes"),
    (ACCOUNT, "MaxWall=2", "--gpus 1 --time 10m", "AssocMaxWallDurationPerJobLimit; set a shorter time limit"),
]


@contextlib.contextmanager
def limited(slurm, whose, limit):
    """A limit in Slurm's books, lifted afterwards."""
    change = ["sacctmgr", "-i", "modify", *whose, "set"]
    slurm.lab.run("h0", [*change, limit])
    try:
        yield
    finally:
        slurm.lab.run("h0", [*change, limit.rpartition("=")[0] + "=-1"])


def test_a_job_over_a_limit_of_qos_or_association_ends_at_once_with_slurms_reason(alice, books):
    alice.up("--account chemistry")
    for whose, limit, words, why in LIMITS:
        with limited(books, whose, limit):
            ended = alice.ended(alice.submit(f"{words} -- true"))
            assert (limit, ended["state"], ended["attempts"]) == (limit, "failed", 1), ended
            assert why in ended["detail"]
    assert alice.ended(alice.submit("--gpus 2x1 --time 10m -- true"))["state"] == "succeeded"


def test_a_limit_that_other_jobs_use_up_lets_a_job_wait_with_slurms_reason(alice, books):
    alice.up("--account chemistry")
    with limited(books, QOS, "MaxTRESPerUser=gres/gpu=1"):
        first = alice.submit("--gpus 1 -- sleep 600")
        alice.runs(first)
        second = alice.submit("--gpus 1 -- true")
        alice.until(lambda: "QOSMaxGRESPerUser" in alice(f"why {second}"), "why says Slurm's reason")
        alice(f"cancel {first}")
        assert alice.ended(second)["state"] == "succeeded"


def over(slurm, job):
    row = sacct(slurm, job, "End")
    return row is not None and row != ["Unknown"]


def test_an_account_that_slurm_does_not_know_is_refused_before_anything_starts(bob):
    said = bob(f"up --engine slurm --listen {bob.lab.host('h0').address} --port 7800 --account chemistry")
    assert said.count("\n") == 1, said
    assert "Slurm accepts no jobs of bob with --account=chemistry: Invalid account" in said
    assert bob.sh("ls -A ~") == ""


def test_two_users_count_each_others_jobs_as_taken_and_why_names_who(alice, bob):
    alice.up()
    bob.up()
    held = alice.submit("--gpus 3x4 -- sleep 600")
    alice.runs(held)
    bob.until(lambda: "xxxx" in bob("nodes"), "bob sees that the nodes are taken")
    waiting = bob.submit("--gpus 2 -- sh -c 'echo mine'")
    bob.until(lambda: "of alice" in bob(f"why {waiting}"), "why names alice")
    alice(f"cancel {held}")
    assert bob.ended(waiting)["state"] == "succeeded"
    assert len(bob.job(waiting)["attempts"]) == 1
    assert alice.sh("scancel --user=bob; squeue --noheader --user=bob") == ""


def test_switches_of_topology_conf_are_levels_and_features_are_labels(alice, books):
    books.lab.run("h0", ["scontrol", "update", "NodeName=h2", "AvailableFeatures=ib,nvlink"])
    try:
        alice.up()
        nodes = {node["id"]: node["labels"] for node in json.loads(alice("nodes --json"))}
        assert {name: (labels.get("leaf"), labels.get("spine")) for name, labels in nodes.items()} == {
            "h0": ("leaf0", "top"),
            "h1": ("leaf0", "top"),
            "h2": ("leaf1", "top"),
        }
        assert nodes["h2"]["slurm.features"] == "ib,nvlink"
        job = alice.submit("--gpus 2x4 -- true")
        alice.ended(job)
        placed = sorted(grant["node_id"] for grant in alice.job(job)["attempts"][0]["grants"])
        assert placed == ["h0", "h1"], "under one leaf"
    finally:
        books.lab.run("h0", ["scontrol", "update", "NodeName=h2", "ActiveFeatures=", "AvailableFeatures="])


def test_a_controller_that_is_away_costs_no_job_and_is_named(alice, books):
    alice.up()
    running = alice.submit("--gpus 1 -- sh -c 'sleep 15; echo through'")
    alice.runs(running)
    books.lab.run("h0", ["sh", "-c", "kill $(cat /run/slurmctld.pid)"])
    try:
        alice.until(lambda: "does not answer" in alice("nodes show h1"), "the nodes say so")
        waiting = alice.submit("--gpus 1 -- echo later")
        alice.until(lambda: "Slurm's controller does not answer" in alice(f"why {waiting}"), "why says so")
        assert alice.ended(running)["state"] == "succeeded", "what runs needs no controller"
    finally:
        books.lab.run("h0", ["slurmctld"])
    view = alice.ended(waiting)
    assert (view["state"], [one["cause"] for one in alice.job(waiting)["attempts"]]) == ("succeeded", ["succeeded"])
    alice.until(lambda: over(books, running), "Slurm hears of the end")
    assert sacct(books, running, "State", "ExitCode") == ["COMPLETED", "0:0"]
