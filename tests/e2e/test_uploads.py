"""Checkpoints and outputs of gangs whose servers share no directory: they get to the head, and to wherever the gang goes on. In the lab."""

import functools
import json
import subprocess
import sys

import pytest

from benchmarks.cluster import ROOT, wait_until
from tests.lab.lab import Lab
from tests.lab.needs import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
]
PHALANX = [sys.executable, "-P", "-m", "phalanx.app.cli"]
HANG_S = 150.0
STEPS = 60
TRAIN = [sys.executable, f"{ROOT}/tests/e2e/kept_train.py", str(STEPS)]
HOME = "/home/lab/.phalanx"
until = functools.partial(wait_until, every_s=0.1, limit_s=HANG_S)


class Fleet:
    """A head on h0, with one device of its own; the other hosts of the lab have two each, and join."""

    def __init__(self, lab):
        self.lab = lab
        said = self.call("up", "--listen", lab.host("h0").address, "--virtual", "1x1", "--lease", "3")
        line = next(line for line in said.splitlines() if line.startswith("on the next server: "))
        for name in list(lab.hosts)[1:]:
            self.call(*line.removeprefix("on the next server: phalanx ").split(), "--virtual", "2", host=name)

    def call(self, *words, host="h0", check=True, folder="/home/lab"):
        command = self.lab.command(host, [*PHALANX, *words], folder=folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, job):
        return json.loads(self.call("show", job, "--json"))

    def of(self, job):
        return self.show(job)["job"]

    def nodes_of(self, job, attempt):
        return [grant["node_id"] for grant in self.show(job)["attempts"][attempt]["grants"]]

    def train(self):
        return self.call("submit", "--quiet", "--gpus", "2x2", "--name", "train", "--", *TRAIN).split()[-1]

    def runs_again(self, job):
        until(
            lambda: len(self.show(job)["attempts"]) == 2 and self.of(job)["attempt_state"] == "running", "it runs again"
        )

    def ends_well(self, job):
        until(lambda: self.of(job)["state"] not in ("pending", "running"), "it ends")
        assert self.of(job)["state"] == "succeeded", self.call("show", job) + self.call("logs", job)

    def outputs(self, job):
        """What `phalanx get` brings, by name."""
        self.call("get", job, f"/home/lab/got-{job}")
        listed = self.lab.run("h0", ["find", f"/home/lab/got-{job}", "-type", "f"]).split()
        return {path.rpartition("/")[2]: self.lab.run("h0", ["cat", path]) for path in listed}

    def files_of(self, host, *words):
        return self.lab.run(host, ["find", *words], check=False).split()


@pytest.fixture(scope="module")
def fleet():
    with Lab(size=5, gpus=0) as lab:
        made = Fleet(lab)
        yield made
        for name in reversed(lab.hosts):
            made.call("down", "--cancel-jobs", host=name, check=False)


def steps_of(text):
    return [int(line.split()[0]) for line in text.splitlines()]


def test_a_drained_gang_goes_on_elsewhere_at_the_very_next_step_and_its_files_go_on_too(fleet):
    job = fleet.train()
    until(lambda: fleet.of(job)["checkpoints"], "a checkpoint is published")
    first = fleet.nodes_of(job, 0)
    for name in first:
        fleet.call("nodes", "drain", name, "--why", "test")
    fleet.runs_again(job)
    assert not set(first) & set(fleet.nodes_of(job, 1))
    fleet.ends_well(job)
    shown = fleet.show(job)
    assert shown["attempts"][1]["resume_step"] > 10, "the save at the stop has reached the head"
    found = fleet.outputs(job)
    assert sorted(found) == ["losses.txt", "losses.txt.node-1"]
    for text in found.values():
        assert steps_of(text) == list(range(1, STEPS + 1)), "each step once: nothing was lost, and nothing made twice"
    assert found["losses.txt"] == found["losses.txt.node-1"]
    kept = fleet.files_of("h0", f"{HOME}/checkpoints", "-path", f"*/{job}-*", "-name", "step-*")
    assert len(kept) == 2, kept
    assert fleet.files_of("h0", f"{HOME}/checkpoints", "-path", f"*/{job}-*", "-name", "*.tmp-*") == []
    for name in first:
        assert fleet.files_of(name, "/home/lab", "-name", "losses.txt*") == []
        fleet.call("nodes", "undrain", name)


def test_a_power_cut_on_one_of_two_nodes_costs_no_published_checkpoint(fleet):
    job = fleet.train()
    until(lambda: fleet.of(job)["checkpoints"], "a checkpoint is published")
    victim = fleet.nodes_of(job, 0)[0]
    published = fleet.of(job)["checkpoints"][-1]["step"]
    fleet.lab.kill(victim)
    fleet.runs_again(job)
    assert victim not in fleet.nodes_of(job, 1)
    fleet.ends_well(job)
    assert fleet.show(job)["attempts"][1]["resume_step"] >= published
    found = fleet.outputs(job)["losses.txt"].splitlines()
    assert set(steps_of("\n".join(found))) == set(range(1, STEPS + 1))
    assert len(set(found)) == STEPS, "a step made again has the loss it had"
    fleet.lab.restart(victim)


@pytest.mark.prove
def test_a_crashed_rank_starts_its_gang_again_in_place_from_the_copies_that_are_there(fleet):
    job = fleet.train()
    until(lambda: fleet.of(job)["checkpoints"], "a checkpoint is published")
    victim = fleet.nodes_of(job, 0)[1]
    table = fleet.lab.run(victim, ["ps", "-eo", "pid,args"])
    rank = next(line.split()[0] for line in table.splitlines() if "kept_train" in line)
    fleet.lab.run(victim, ["kill", "-9", rank])
    fleet.ends_well(job)
    shown = fleet.show(job)
    assert (len(shown["attempts"]), shown["job"]["restarts"]) == (1, 1)
    found = fleet.outputs(job)["losses.txt"].splitlines()
    assert set(steps_of("\n".join(found))) == set(range(1, STEPS + 1))
    assert found.count(found[0]) == 1, "it did not begin anew"
    assert len(set(found)) == STEPS, "a step made again has the loss it had"


@pytest.mark.prove
def test_a_head_without_room_takes_nothing_says_so_in_the_jobs_log_and_takes_it_when_there_is_room(fleet):
    root = f"{HOME}/checkpoints"
    fleet.lab.run("h0", ["mount", "-t", "tmpfs", "-o", "size=8k", "none", root])
    try:
        job = fleet.call("submit", "--quiet", "--gpus", "2x2", "--", *TRAIN[:-1], "100000").split()[-1]
        until(
            lambda: "the head's disk is full" in fleet.call("logs", job, "--rank", "supervisor"),
            "the job's log says so",
        )
        assert fleet.of(job)["checkpoints"] == []
        fleet.lab.run("h0", ["mount", "-o", "remount,size=64m", root])
        until(lambda: fleet.of(job)["checkpoints"], "a checkpoint is published")
        fleet.call("cancel", job)
        until(lambda: fleet.of(job)["state"] == "cancelled", "it ends")
    finally:
        fleet.lab.run("h0", ["umount", "-l", root])


@pytest.mark.prove
def test_a_named_path_that_nodes_do_not_share_is_told_and_nothing_of_it_is_published(fleet):
    for name in fleet.lab.hosts:
        fleet.lab.run(name, ["mkdir", "-p", "/home/lab/ck"])
    words = ["submit", "--quiet", "--gpus", "2x2", "--checkpoint", "/home/lab/ck", "--"]
    job = fleet.call(*words, *TRAIN[:-1], "25").split()[-1]
    until(lambda: fleet.of(job)["state"] not in ("pending", "running"), "it ends")
    assert fleet.of(job)["checkpoints"] == []
    first, second = fleet.nodes_of(job, 0)
    assert f"{first} does not see the files of {second} in /home/lab/ck" in fleet.call(
        "logs", job, "--rank", "supervisor"
    )
