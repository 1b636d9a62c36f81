"""Training on servers that share no directory, on every engine: power cuts and unplugged cables, real daemons, in the lab.

The GPT example has the same losses wherever it runs and however often it dies; a host that went silent makes no step once another
attempt does. Checked by what the ranks wrote themselves, on each host's own disk.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cluster import ROOT, wait_until
from tests.contract.kubernetes_real_rig import TEMPLATE, USER, grant
from tests.kubernetes.real_cluster import RealCluster
from tests.kubernetes.real_cluster import why_not as why_no_kubernetes
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm, why_no_slurm
from tests.lab.typed import join_words

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.prove,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab"),
]
PHALANX = [sys.executable, "-P", "-m", "phalanx.app.cli"]
HANG_S = 180.0
CUT_S = 60.0
"""The cable is out for so long: past every lease, and as long as a person needs to find the plug."""
STEPS = 80
SAVE_EVERY = 10
TRAIN = [
    sys.executable,
    "train.py",
    "--steps",
    str(STEPS),
    "--save-every-steps",
    str(SAVE_EVERY),
    "--print-every",
    "1",
    "--sample-bytes",
    "4",
    "--d-model",
    "64",
    "--seq",
    "64",
    "--batch",
    "8",
]
DRILL = "/home/lab/drill"
SAID = "tail -n 40 /home/lab/.phalanx/head.*; ps -eo pid,stat,etimes,args | cut -c1-150"
until = partial(wait_until, every_s=0.1, limit_s=HANG_S)


class Joined:
    """A head on h0 that is a node itself; h1 and h2 join it."""

    UP: tuple[str, ...] = ("--virtual", "1x2", "--lease", "3")

    def __init__(self, lab):
        self.lab = lab
        address = lab.host("h0").address
        said = self.call("up", "--listen", address, *self.UP)
        for name in ("h1", "h2"):
            self.call(*join_words(said), "--virtual", "2", host=name)
        until(lambda: self.up_nodes() == 3, "three nodes are up")

    def call(self, *words, host="h0", folder=None, check=True):
        """What a person reads who types this; asked again while a busy machine keeps the head from answering."""
        command = self.lab.command(host, [*PHALANX, *words], folder=folder)
        end = time.monotonic() + HANG_S
        while True:
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
            if not check:
                return done.stdout + done.stderr
            if "does not answer" not in done.stderr or time.monotonic() > end:
                assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
                return done.stdout

    def up_nodes(self):
        return sum(node["state"] == "up" for node in json.loads(self.call("nodes", "--json")))

    def submit(self, folder, *words):
        return self.call("submit", "--quiet", "--copy", *words, folder=folder).split()[-1]

    def show(self, job):
        return json.loads(self.call("show", job, "--json"))

    def of(self, job):
        return self.show(job)["job"]

    def hosts(self, job, attempt):
        """Names of the lab's hosts that an attempt ran on."""
        names = [grant["node_id"] for grant in self.show(job)["attempts"][attempt]["grants"]]
        return [{"n0": "h0"}.get(name, name) for name in names]

    def close(self):
        for name in ("h2", "h1", "h0"):
            self.lab.mend(name)
            if not self.lab.host(name).pid:
                self.lab.restart(name)
            self.call("down", "--cancel-jobs", host=name, check=False)
            self.lab.run(name, ["sh", "-c", f"rm -rf /home/lab/.phalanx {DRILL}"])


class OnRay(Joined):
    """The same by Ray's own nodes and actors."""

    UP = ("--engine", "ray", "--virtual", "1x2", "--lease", "3")


class OnSlurm(Joined):
    """A head on the login node, which computes too."""

    def __init__(self, lab):
        self.lab, self.slurm = lab, Slurm(lab=lab)
        self.slurm.start()
        self.call("up", "--engine", "slurm", "--listen", lab.host("h0").address, "--lease", "3")
        until(lambda: self.up_nodes() == 3, "three nodes are up")

    def close(self):
        for name in self.lab.hosts:
            self.lab.mend(name)
        self.call("down", "--cancel-jobs", check=False)


class OnKubernetes(Joined):
    """A real API server on h0, where the head is its user; every host is a node."""

    UP: tuple[str, ...] = ()

    def __init__(self, lab):
        self.lab = lab
        self.cluster = RealCluster(nodes=dict.fromkeys(lab.hosts, 2), shared=(str(ROOT), "/home"), lab=lab)
        self.cluster.__enter__()
        try:
            grant(self.cluster)
            own = lab.host("h0").path("/home/lab/.kube")
            own.mkdir()
            shutil.copy(self.cluster.kubeconfig(USER["name"]), own / "config")
            template = os.path.join(self.cluster.folder, "pod.yaml")
            Path(template).write_text(json.dumps(TEMPLATE), encoding="utf-8")
            words = ("--engine", "kubernetes", "--kubernetes-template", template, "--lease", "3", *self.UP)
            self.call("up", "--listen", lab.host("h0").address, *words)
            until(lambda: self.up_nodes() == 3, "three nodes are up")
        except BaseException:
            self.cluster.__exit__(None, None, None)
            raise

    def close(self):
        for name in self.lab.hosts:
            self.lab.mend(name)
        self.call("down", "--cancel-jobs", check=False)
        self.cluster.__exit__(None, None, None)


class OnResidentPods(OnKubernetes):
    """The same in resident pods, one on each host."""

    UP = ("--kubernetes-resident", "3-3x2")

    def __init__(self, lab):
        self.seen = {}
        super().__init__(lab)

    def hosts(self, job, attempt):
        """Asked first while the attempt runs: later pods may get the names of its nodes."""
        if (job, attempt) not in self.seen:
            pods = json.loads(self.cluster.kubectl("get", "pods", "-o", "json"))["items"]
            named = {pod["metadata"]["annotations"]["phalanx/node"]: pod["spec"]["nodeName"] for pod in pods}
            grants = self.show(job)["attempts"][attempt]["grants"]
            self.seen[job, attempt] = [named[grant["node_id"]] for grant in grants]
        return self.seen[job, attempt]


NOT_HERE = {
    "kubernetes": "" if why_not() else why_no_kubernetes(),
    "resident": "" if why_not() else why_no_kubernetes(),
    "joined": "",
    "ray": "" if importlib.util.find_spec("ray") else "Ray is not installed: make test-engines",
    "slurm": "" if why_not() else why_no_slurm(),
}
RIGS = {
    "joined": (Joined, 0),
    "kubernetes": (OnKubernetes, 0),
    "resident": (OnResidentPods, 0),
    "ray": (OnRay, 0),
    "slurm": (OnSlurm, 2),
}
on_each = pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why or name)) for name, why in NOT_HERE.items()],
)


@contextlib.contextmanager
def fleet(engine):
    rig, gpus = RIGS[engine]
    with Lab(size=3, gpus=gpus) as lab:
        for name in lab.hosts:
            lab.run(name, ["mkdir", "-p", DRILL])
        head = rig(lab)
        try:
            yield head
        except BaseException:
            print(lab.run("h0", ["sh", "-c", SAID], check=False))  # else it goes with the lab
            raise
        finally:
            head.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses by step, of one process on one machine without Phalanx."""
    environment = {**os.environ, "PHALANX_OUTPUT_DIR": str(tmp_path_factory.mktemp("alone"))}
    done = subprocess.run(
        TRAIN,
        cwd=f"{ROOT}/examples/train_gpt",
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    return dict(losses(done.stdout))


def losses(text):
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", text)]


@on_each
def test_a_gpt_on_two_hosts_outlives_a_power_cut_on_the_third_with_the_losses_of_one_process(engine, undisturbed):
    with fleet(engine) as head:
        job = head.submit(f"{ROOT}/examples/train_gpt", "--gpus", "2x2", "--name", "gpt", "--", *TRAIN)
        until(lambda: head.of(job)["checkpoints"], "a checkpoint is published")
        before = head.hosts(job, 0)
        victim = next(name for name in reversed(before) if name != "h0")
        head.lab.kill(victim)
        killed_s = time.monotonic()
        until(
            lambda: len(head.show(job)["attempts"]) == 2 and head.of(job)["attempt_state"] == "running", "it runs again"
        )
        print(f"{engine}: power cut to running elsewhere {time.monotonic() - killed_s:.1f} s")
        until(lambda: head.of(job)["state"] not in ("pending", "running"), "it ends")
        shown = head.show(job)
        logs = head.call("logs", job)
        assert shown["job"]["state"] == "succeeded", logs[-3000:] + head.call("show", job)
        first, second = shown["attempts"]
        assert second["resume_step"] >= SAVE_EVERY, shown
        assert victim not in head.hosts(job, 1)
        told = losses(logs)
        assert {step for step, _ in told} == set(range(1, STEPS + 1))
        off = [(step, loss, undisturbed[step]) for step, loss in told if abs(loss - undisturbed[step]) > 2e-4]
        assert off == [], off[:5]
        assert first["cause"] in ("node_fail", "node_failed"), first


@on_each
def test_a_host_that_was_unplugged_for_a_minute_makes_no_step_after_its_replacement_has(engine):
    with fleet(engine) as head:
        rank = f"{ROOT}/benchmarks/fence_rank.py"
        job = head.submit(DRILL, "--gpus", "2x1", "--nodes", "2", "--", sys.executable, rank, DRILL)
        until(lambda: head.of(job)["attempt_state"] == "running", "it runs")
        victim = next(name for name in head.hosts(job, 0) if name != "h0")
        until(lambda: steps(head.lab, victim, 1), "the host makes steps")
        head.lab.cut(victim)
        cut_s = time.monotonic()
        until(
            lambda: len(head.show(job)["attempts"]) >= 2 and head.of(job)["attempt_state"] == "running",
            "it runs elsewhere",
        )
        print(f"{engine}: cable cut to running elsewhere {time.monotonic() - cut_s:.1f} s")
        assert victim not in head.hosts(job, 1)
        until(lambda: any(steps(head.lab, name, 2) for name in head.hosts(job, 1)), "the replacement makes steps")
        time.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
        head.lab.mend(victim)
        until(lambda: rank not in head.lab.run(victim, ["ps", "-eo", "args"]), "the old ranks are gone")
        first_ns = min(step for name in head.hosts(job, 1) for step in steps(head.lab, name, 2))
        old = [step for name in head.hosts(job, 0) for step in steps(head.lab, name, 1)]
        assert len(old) > 10
        assert [step for step in old if step > first_ns] == [], "steps of the old attempt after the new one's first"
        assert len(head.show(job)["attempts"]) == 2, head.call("show", job)
        head.call("cancel", job)


def steps(lab, name, epoch):
    """When the steps of an epoch were begun on a host, CLOCK_BOOTTIME ns: one clock for all hosts of the lab."""
    said = lab.run(name, ["sh", "-c", f"cat {DRILL}/steps-{epoch}-* 2>/dev/null"], check=False)
    return [int(line.split()[1]) for line in said.splitlines() if len(line.split()) == 3]
