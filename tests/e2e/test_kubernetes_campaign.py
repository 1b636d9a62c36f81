"""A day of bad weather at the API server, in a minute: seeded faults while gangs run, pods and nodes die, and the head is killed.

Faults are storms of 409 and 429, compactions (410), half-closed and broken watches, doubled events, answers that are lost after their
request was carried out, and a server that is away. Checked by what the ranks wrote, by the objects of the cluster, and by the head's records:
never two copies of a job, all or none of its pods, and nothing left at the end. Ten minutes of silence: tests/unit/test_kubernetes_outage.py.
"""

# mypy: disable-error-code="var-annotated, union-attr, exhaustive-match"

import contextlib
import itertools
import os
import random
import re
import threading
import time
from collections import defaultdict

import pytest

from benchmarks.cluster import wait_until
from tests.contract.kubernetes_rig import NODES, kubernetes
from tests.kubernetes.fake_store import KINDS, Refused

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.prove, pytest.mark.timeout(420)]
PODS = KINDS["", "pods"]
SEEDS = (11, 12, 13)
STORM_S = 60.0
GANGS = ("1x1", "2x1", "3x1", "2x2", "3x2", "1x2")
PARTIAL_S = (
    30.0  # a gang of which some pods are missing or have no node, while the server answers: 15 s, and a busy machine
)
STEP_S = 0.05
SCRIPT = (
    "i=0; while [ $i -lt 60 ]; do echo $(date +%s%N) >> {folder}/$PHALANX_JOB_ID-$PHALANX_EPOCH-$RANK;"
    " sleep {step}; i=$((i+1)); done"
)
CONFLICT = "Operation cannot be fulfilled on resourcequotas: the object has been modified; please apply your changes to the latest version and try again"
WORDS = ("--min-run", "1s", "--kubernetes-nodes", "3x2")


class Weather:
    """Draws one fault after the other, some seconds each, in a thread of its own."""

    def __init__(self, rig, seed):
        self.rig, self.random, self.rate = rig, random.Random(seed), {}
        self.ended, self.seen = threading.Event(), []
        self.lock = threading.Lock()
        rig.fake.faults.append(self.before)
        rig.fake.lost_answers.append(self.after)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def strikes(self, kind):
        with self.lock:
            return self.random.random() < self.rate.get(kind, 0.0)

    def before(self, method, path):
        if self.strikes("409") and method in ("POST", "PATCH"):
            raise Refused(409, "Conflict", CONFLICT)
        if self.strikes("429"):
            raise Refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "1"})
        return self.strikes("dropped")

    def after(self, method, path):
        return method != "GET" and self.strikes("lost answer")

    def run(self):
        fake = self.rig.fake
        kinds = ["409", "429", "dropped", "lost answer", "410", "half closed", "torn", "doubled", "away", "pod", "node"]
        order = []
        while not self.ended.is_set():
            if not order:  # each kind once in each round
                order = self.random.sample(kinds, len(kinds))
            kind = order.pop()
            self.seen.append(kind)
            self.rate = {kind: self.random.uniform(0.3, 0.8)}
            length_s = self.random.uniform(2.0, 4.0)
            match kind:
                case "410":
                    fake.store.compact()
                    fake.cut_watches()
                case "half closed":
                    fake.silent.set()
                case "torn":
                    fake.torn.set()
                case "doubled":
                    fake.double_events = True
                case "away":
                    fake.away.set()
                    fake.cut_watches()
                    length_s += 5.0  # longer than the engine believes what it knows
                case "pod":
                    names = [one["metadata"]["name"] for one in fake.store.select(PODS, "default", "", "")[0]]
                    if names:
                        with contextlib.suppress(Refused):
                            fake.store.delete(PODS, "default", self.random.choice(sorted(names)), {})
                case "node":
                    self.rig.kill_node(self.random.choice(NODES))
            self.ended.wait(length_s)
            self.clear()

    def clear(self):
        fake, self.rate = self.rig.fake, {}
        for flag in (fake.silent, fake.torn, fake.away):
            flag.clear()
        fake.double_events = False


class PartialGangs:
    """Notes for how long a gang was partial, of pods that are not being deleted, while the server answers."""

    def __init__(self, rig):
        self.rig, self.worst, self.since, self.size = rig, {}, {}, {}

    def look(self):
        now_s, found = time.monotonic(), defaultdict(list)
        if self.rig.fake.away.is_set():
            self.since.clear()
        for pod in self.rig.fake.store.select(PODS, "default", "", "")[0]:
            about = pod["metadata"]
            if "phalanx/job" in about["labels"]:
                found[about["labels"]["phalanx/job"], about["labels"]["phalanx/epoch"]].append(pod)
        for key, pods in found.items():
            living = [one for one in pods if not one["metadata"].get("deletionTimestamp")]
            ended = [one for one in living if (one.get("status") or {}).get("phase") in ("Succeeded", "Failed")]
            placed = [one for one in living if one["spec"].get("nodeName")]
            if living and not ended and len(placed) < self.size.get(key[0], 0):
                self.since.setdefault(key, now_s)
                self.worst[key] = max(self.worst.get(key, 0.0), now_s - self.since[key])
            else:
                self.since.pop(key, None)


def stamps(folder):
    """When each epoch of each job made steps: job -> epoch -> rank -> nanoseconds."""
    found = defaultdict(lambda: defaultdict(dict))
    for name in os.listdir(folder):
        job, epoch, rank = re.fullmatch(r"(.+)-(\d+)-(\d+)", name).groups()
        with open(os.path.join(folder, name), encoding="ascii") as file:
            found[job][int(epoch)][int(rank)] = [int(line) for line in file.read().split("\n") if line]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_in_bad_weather_no_job_runs_twice_no_gang_stays_partial_and_nothing_is_left(seed):
    with kubernetes(WORDS) as rig:
        folder = os.path.join(rig.home, "steps")
        os.mkdir(folder)
        weather, gangs, draw, jobs = Weather(rig, seed), PartialGangs(rig), random.Random(-seed), {}
        weather.thread.start()
        end_s, next_s = time.monotonic() + STORM_S, 0.0
        killed = False
        while time.monotonic() < end_s:
            gangs.look()
            if time.monotonic() >= next_s and len(jobs) < 14:
                gang = draw.choice(GANGS)
                script = SCRIPT.format(folder=folder, step=STEP_S)
                job = rig.submit(run=script, gpus=gang, tasks_per_node=1, name="weather", grace="1s")
                jobs[job] = gangs.size[job] = int(gang.partition("x")[0])
                next_s = time.monotonic() + draw.uniform(1.0, 5.0)
            if not killed and time.monotonic() > end_s - STORM_S / 2:
                killed = True
                rig.kill_head()
                rig.start(wait_nodes=False)
            time.sleep(0.2)
        weather.ended.set()
        weather.thread.join()
        weather.clear()
        rig.fake.faults.clear()
        rig.fake.lost_answers.clear()

        def settled():
            gangs.look()
            return all(rig.job(job)["state"] not in ("pending", "running") for job in jobs)

        wait_until(settled, "all jobs end", every_s=0.2, limit_s=180.0)
        views = {job: rig.job(job) for job in jobs}
        done = stamps(folder)
        print(seed, weather.seen, {job: view["attempts"] for job, view in views.items()}, gangs.worst)
        bad = {job: rig.history(job) for job, view in views.items() if view["state"] != "succeeded"}
        assert not bad, bad
        for job, ranks in jobs.items():
            epochs = sorted(done[job])
            for earlier, later in itertools.pairwise(epochs):
                last = max(max(times) for times in done[job][earlier].values())
                first = min(min(times) for times in done[job][later].values())
                assert last < first, f"job {job}: epoch {earlier} made steps after the first of epoch {later}"
            assert {rank: len(times) for rank, times in done[job][epochs[-1]].items()} == dict.fromkeys(
                range(ranks), 60
            )
        assert max(gangs.worst.values(), default=0.0) < PARTIAL_S, gangs.worst
        wait_until(lambda: not rig.fake.store.select(PODS, "default", "", "")[0], "no pod is left", limit_s=60.0)
        rig.stop()
        assert rig.objects() == []
