"""The states of `phalanx report usage` against what real processes say that they did: twenty scenarios on one head, drawn by a fresh seed."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.cluster import BenchmarkCluster, cluster, wait_until
from phalanx.core.accounting.usage_states import PROGRESS_UNKNOWN, STARTING_MAX_S
from tests import usage_programs
from tests.usage_programs import BUSY
from tests.usage_scenarios import Score, Truth, read_truth

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(900)]

FLEET = "7x4,5x1"
RIGHT = 0.95  # of the seconds of each scenario
LIMIT_S = 420.0
SAMPLE_S = 2.0  # of the time around a change: a sample, and its way to the head
JOBS = "n0,n1,n2"  # whose devices no scenario of nodes touches


@dataclass
class Track:
    """What one device was in truth. `key`: the job whose part is compared; None for the whole device."""

    node: str
    device: int
    truths: list[Truth]
    key: str | None = None
    note: str | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)


class Stage:
    """The head with what scenarios need of it; each scenario is a method that returns its tracks."""

    def __init__(self, head: BenchmarkCluster, seed: int) -> None:
        self.head, self.seed = head, seed

    def draw(self, name: str) -> random.Random:
        """The dice of one scenario: the order in which scenarios run changes nothing."""
        return random.Random(f"{self.seed} {name}")

    def path(self, name: str) -> str:
        return os.path.join(self.head.home, f"truth-{name}")

    def submit(self, name: str, program: str, parameters: dict[str, Any], *, node: str = "", **body: Any) -> str:
        """Submit a program on a node."""
        run = [sys.executable, usage_programs.__file__, program, self.path(name), json.dumps(parameters)]
        nodes = {"nodelist": node or JOBS}
        return self.head.submit(**{"run": run, "name": name, "gpus": 1, "retry": 0, **nodes, **body})

    def ended(self, job: str) -> None:
        wait_until(
            lambda: self.head.job(job)["state"] in ("succeeded", "failed"), "it ends", every_s=1.0, limit_s=LIMIT_S
        )
        assert self.head.job(job)["state"] == "succeeded", self.head.history(job)

    def attempt(self, job: str, number: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.head.call("GET", f"/v1/jobs/{job}")["attempts"][number]
        return found

    def told(self, name: str, *, said: int = 1) -> None:
        """Wait until a program has written so many lines."""

        def lines() -> bool:
            with contextlib.suppress(FileNotFoundError), open(self.path(name), encoding="utf-8") as file:
                return len(file.readlines()) >= said
            return False

        wait_until(lines, f"{name} says {said} lines", every_s=0.2)

    def track(self, job: str, name: str, *, place: int = 0, note: str = "") -> Track:
        """The truth of a job's device, from the first word of its program on."""
        (grant,) = self.attempt(job)["grants"]
        device = grant["devices"][place]
        return self.settled(Track(grant["node_id"], device, read_truth(self.path(name)), job, note))

    def settled(self, track: Track) -> Track:
        """The track with what the ledger says of its device now."""
        found = self.head.call("GET", f"/v1/nodes/{track.node}/usage")["spans"]
        track.spans = [one for one in found if one["device"] == track.device and track.key in (None, one["job"])]
        return track

    def one_job(self, name: str, program: str, parameters: dict[str, Any], *, note: str = "") -> list[Track]:
        """A scenario of one job."""
        job = self.submit(name, program, parameters)
        self.ended(job)
        return [self.track(job, name, note=note)]

    # ---- jobs ---------------------------------------------------------------------------------------------------------

    def busy_loop(self) -> list[Track]:
        draw = self.draw("busy_loop")
        plan = [(1.0, draw.uniform(60, 80))]
        return self.one_job("busy_loop", "bare", {"start_s": draw.uniform(6, 15), "plan": plan}, note=PROGRESS_UNKNOWN)

    def sleeping_holder(self) -> list[Track]:
        idle_s = self.draw("sleeping_holder").uniform(40, 60)
        return self.one_job("sleeping_holder", "sleeper", {"starting_s": STARTING_MAX_S, "idle_s": idle_s})

    def active_then_idle(self) -> list[Track]:
        draw = self.draw("active_then_idle")
        plan = [(share, draw.uniform(22, 35)) for share in (BUSY, 0.0, BUSY, 0.0)[: draw.choice((3, 4))]]
        return self.one_job(
            "active_then_idle", "bare", {"start_s": draw.uniform(3, 8), "plan": plan}, note=PROGRESS_UNKNOWN
        )

    def low_activity(self) -> list[Track]:
        draw = self.draw("low_activity")
        plan = [(share, draw.uniform(25, 40)) for share in draw.choice(((0.05, BUSY, 0.05), (BUSY, 0.05)))]
        return self.one_job(
            "low_activity", "bare", {"start_s": draw.uniform(3, 8), "plan": plan}, note=PROGRESS_UNKNOWN
        )

    def orphan(self) -> list[Track]:
        draw, name = self.draw("orphan"), "orphan"
        parameters = {
            "start_s": draw.uniform(4, 8),
            "works_s": [draw.uniform(25, 40) for _ in range(2)],
            "sleeps_s": [draw.uniform(15, 25) for _ in range(2)],
            "path": self.path(name),
        }
        job = self.submit(name, "orphan", parameters, gpus=2)
        self.ended(job)
        return [self.track(job, f"{name}-{place}", place=place, note=PROGRESS_UNKNOWN) for place in range(2)]

    def stopped_rank(self) -> list[Track]:
        draw = self.draw("stopped_rank")
        steps_s = [draw.uniform(20, 30), draw.uniform(20, 30)]
        parameters = {"step_s": draw.uniform(0.3, 0.8), "steps_s": steps_s, "stopped_s": draw.uniform(75, 95)}
        return self.one_job("stopped_rank", "hangs", parameters)

    def starved_loader(self) -> list[Track]:
        return self.waiting("starved_loader", "data_s", "data_bound")

    def slow_collectives(self) -> list[Track]:
        return self.waiting("slow_collectives", "communication_s", "communicating")

    def waiting(self, name: str, wait: str, state: str) -> list[Track]:
        draw = self.draw(name)
        plan = [(share, draw.uniform(22, 35)) for share in draw.choice(((0.8, 0.1, 0.7), (0.2, 0.75), (0.1, 0.9, 0.0)))]
        parameters = {"wait": wait, "state": state, "step_s": draw.uniform(0.3, 0.9), "plan": plan}
        return self.one_job(name, "waits", parameters)

    def checkpoints(self) -> list[Track]:
        draw = self.draw("checkpoints")
        plan = [(draw.uniform(15, 25), draw.uniform(5, 20)) for _ in range(3)]
        return self.one_job("checkpoints", "saves", {"step_s": draw.uniform(0.3, 0.9), "plan": plan})

    def long_start(self) -> list[Track]:
        draw = self.draw("long_start")
        parameters = {
            "compile_s": draw.uniform(15, 25),
            "load_s": draw.uniform(20, 30),
            "steps_s": draw.uniform(30, 40),
        }
        return self.one_job("long_start", "long_start", {"step_s": draw.uniform(0.3, 0.9), **parameters})

    def crash_loop(self) -> list[Track]:
        draw, name = self.draw("crash_loop"), "crash_loop"
        job = self.submit(name, "crashes", {"sleeps_s": [draw.uniform(4, 9) for _ in range(6)]}, retry=10)
        self.ended(job)
        return [self.track(job, name)]

    def shared_device(self) -> list[Track]:
        draw, node = self.draw("shared_device"), "n9"
        first = [(BUSY, draw.uniform(25, 35)), (0.0, draw.uniform(25, 35))]
        both = {"first": first, "second": [(0.0, sum(seconds for _, seconds in first))]}
        jobs = {
            name: self.submit(f"shared-{name}", "bare", {"start_s": 4.0, "plan": plan}, node=node, gpus="1/4")
            for name, plan in both.items()
        }
        for job in jobs.values():
            self.ended(job)
        tracks = [self.track(job, f"shared-{name}", note=PROGRESS_UNKNOWN) for name, job in jobs.items()]
        tracks[1].truths = tracks[0].truths  # the activity of a device is that of all its jobs together
        return tracks

    def preempted(self) -> list[Track]:
        draw, name, node = self.draw("preempted"), "preempted", "n7"
        parameters = {"state": "preempted", "start_s": draw.uniform(4, 8), "saves_s": draw.uniform(20, 30)}
        job = self.submit(name, "stops_slowly", parameters, node=node, grace="60s")
        self.told(name, said=2)
        time.sleep(draw.uniform(30, 40))
        other = self.submit("urgent", "bare", {"start_s": 1.0, "plan": [[BUSY, 5.0]]}, node=node, priority=10)
        self.ended(other)
        self.head.call("POST", f"/v1/jobs/{job}/cancel", {})
        return [self.track(job, name, note=PROGRESS_UNKNOWN)]

    def sleeping_replica(self) -> list[Track]:
        draw, name = self.draw("sleeping_replica"), "sleeping-replica"
        words = [sys.executable, usage_programs.__file__, "sleeping_server", self.path(name)]
        run = [*words, json.dumps({"start_s": draw.uniform(4, 8)})]
        service = {"run": run, "name": name, "gpus": 1, "nodelist": "n8", "type": "service", "workdir": self.head.home}
        hooks = {"ready": "/", "sleep": "/sleep", "wake": "/wake", "grace": "2s"}
        self.head.call("POST", "/v1/services", {**service, **hooks})
        self.told(name, said=2)
        for asleep, lines in ((True, 3), (False, 4)):
            time.sleep(draw.uniform(25, 35))
            self.head.call("PATCH", f"/v1/services/{name}", {"asleep" if asleep else "awake": 1})
            self.told(name, said=lines)
        time.sleep(draw.uniform(15, 25))
        self.head.call("POST", f"/v1/services/{name}/stop", {})
        self.told(name, said=5)
        return [self.settled(Track("n8", 0, read_truth(self.path(name))))]

    # ---- nodes --------------------------------------------------------------------------------------------------------

    def killed_node(self) -> list[Track]:
        draw, name, node = self.draw("killed_node"), "killed_node", "n3"
        job = self.submit(name, "bare", {"start_s": 4.0, "plan": [[BUSY, 300.0]]}, node=node)
        self.told(name, said=2)
        begin_s = time.time()
        time.sleep(draw.uniform(15, 25))
        killed_s = self.head.kill_node(node)
        time.sleep(draw.uniform(40, 50))
        end_s = time.time()
        (grant,) = self.attempt(job)["grants"]
        self.head.call("POST", f"/v1/jobs/{job}/cancel", {})
        return [
            self.settled(Track(node, device, [Truth(begin_s, killed_s, before), Truth(killed_s, end_s, BROKEN)]))
            for device in range(4)
            for before in [frozenset({"computing" if device in grant["devices"] else "free"})]
        ]

    def drained_node(self) -> list[Track]:
        draw, name, node = self.draw("drained_node"), "drained_node", "n4"
        parameters = {"state": "draining", "start_s": draw.uniform(4, 8), "saves_s": draw.uniform(12, 20)}
        job = self.submit(name, "stops_slowly", parameters, node=node, grace="60s")
        self.told(name, said=2)
        begin_s = time.time()
        time.sleep(draw.uniform(20, 30))
        drained_s = time.time()
        self.head.call("POST", f"/v1/nodes/{node}/drain", {"why": "a fan"})
        self.told(name, said=4)
        self.head.call("POST", f"/v1/jobs/{job}/cancel", {})
        time.sleep(draw.uniform(10, 20))
        end_s = time.time()
        self.head.call("POST", f"/v1/nodes/{node}/undrain")
        free = [Truth(begin_s, drained_s, FREE), Truth(drained_s, end_s, frozenset({"draining"}))]
        held = self.track(job, name, note=PROGRESS_UNKNOWN)
        return [held, *(self.settled(Track(node, device, free)) for device in range(4) if device != held.device)]

    def reserved_node(self) -> list[Track]:
        draw, node = self.draw("reserved_node"), "n5"
        begin_s = time.time()
        start_s = begin_s + draw.uniform(15, 25)
        end_s = start_s + 60.0
        body = {"nodes": [node], "start_s": start_s, "time": "1m", "maintenance": True}
        self.head.call("PUT", "/v1/reservations/night", body)
        time.sleep(end_s - begin_s + draw.uniform(10, 20))
        times = (begin_s, start_s, end_s, time.time())
        states = (FREE, frozenset({"reserved"}), FREE)
        truths = [Truth(*one) for one in zip(times, times[1:], states, strict=False)]
        return [self.settled(Track(node, device, truths)) for device in range(4)]

    def fragmented_device(self) -> list[Track]:
        draw, node = self.draw("fragmented_device"), "n10"
        work_s = draw.uniform(40, 50)
        jobs = [
            self.submit(f"fragment-{index}", "bare", {"start_s": 2.0, "plan": [[BUSY, work_s]]}, node=node, gpus=part)
            for index, part in enumerate(("1/2", "2/5"))
        ]
        for index in range(2):
            self.told(f"fragment-{index}", said=2)
        begin_s = time.time()
        time.sleep(work_s - 8.0)
        track = Track(node, 0, [Truth(begin_s, time.time(), frozenset({"fragmented"}))], "")
        for job in jobs:
            self.ended(job)
        return [self.settled(track)]

    def waiting_gang(self) -> list[Track]:
        draw, node = self.draw("waiting_gang"), "n6"
        begin_s = time.time()
        time.sleep(draw.uniform(15, 25))
        asked_s = time.time()
        gang = self.head.submit(run=["true"], name="gang", gpus="7x4", queue="default")
        time.sleep(draw.uniform(50, 60))
        self.head.call("POST", f"/v1/jobs/{gang}/cancel", {})
        cancelled_s = time.time()
        time.sleep(draw.uniform(10, 20))
        times, states = (begin_s, asked_s, cancelled_s, time.time()), (FREE, frozenset({"free_demand"}), FREE)
        truths = [Truth(*one) for one in zip(times, times[1:], states, strict=False)]
        return [self.settled(Track(node, device, truths)) for device in range(4)]

    def slow_boot(self) -> list[Track]:
        """A node of a pool whose machine takes its time: its supervisor is stopped while it starts."""
        draw, name = self.draw("slow_boot"), "slow_boot"
        pool = {"provider": "virtual", "node": "1xh100:2", "max_nodes": 1, "idle": "10m"}
        self.head.call("PUT", "/v1/pools/burst", pool)
        parameters = {"start_s": 3.0, "plan": [[BUSY, 5.0]]}
        job = self.submit(name, "bare", parameters, gpus="h100:1", nodelist="")
        wait_until(lambda: self.head.call("GET", "/v1/pools/burst")["pool"]["nodes"], "it is ordered", every_s=0.2)
        (ordered,) = self.head.call("GET", "/v1/pools/burst")["pool"]["nodes"]
        pid = wait_until(lambda: pool_supervisor(self.head.home), "its supervisor starts", every_s=0.02)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(25, 35))
        os.kill(pid, signal.SIGCONT)
        self.ended(job)
        (grant,) = self.attempt(job)["grants"]
        joined_s = next(one["joined_s"] for one in self.head.nodes() if one["id"] == grant["node_id"])
        truth = Truth(ordered["requested_s"], joined_s, frozenset({"provisioning"}))
        return [self.settled(Track(grant["node_id"], device, [truth])) for device in range(2)]


FREE, BROKEN = frozenset({"free"}), frozenset({"broken"})
FIRST = (
    Stage.waiting_gang,
    Stage.sleeping_holder,
    Stage.stopped_rank,
    Stage.starved_loader,
    Stage.slow_collectives,
    Stage.checkpoints,
    Stage.long_start,
    Stage.crash_loop,
    Stage.orphan,
)
THEN = (  # these say of devices that nobody wants them, so no gang waits meanwhile
    Stage.busy_loop,
    Stage.active_then_idle,
    Stage.low_activity,
    Stage.shared_device,
    Stage.preempted,
    Stage.sleeping_replica,
    Stage.killed_node,
    Stage.drained_node,
    Stage.reserved_node,
    Stage.fragmented_device,
    Stage.slow_boot,
)


def pool_supervisor(home: str) -> int | None:
    """The pid of the supervisor of a pool's node."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd").startswith(os.path.join(home, "pools")):
                return int(pid)
    return None


def called_idle(track: Track) -> list[str]:
    """When a job that computed was called idle, apart from the samples around a change."""
    found = []
    for truth in track.truths:
        begin_s, end_s = truth.begin_s + SAMPLE_S, truth.end_s - SAMPLE_S
        if truth.states == {"computing"}:
            wrong = [one for one in track.spans if one["state"] in ("idle", "unoccupied")]
            found += [str(one) for one in wrong if min(end_s, one["end_s"]) > max(begin_s, one["begin_s"])]
    return found


def check_sums(head: BenchmarkCluster) -> None:
    """The states are the fleet times the time, and the newest states of a device are whole at each moment."""
    total = head.call("GET", "/v1/usage?since_s=0&by=job")["total"]
    assert sum(total["by_state_us"].values()) == total["fleet_gpu_us"]
    expected_s = sum(len(node["devices"]) * (time.time() - node["joined_s"]) for node in head.nodes())
    assert total["fleet_gpu_us"] / 1e6 == pytest.approx(expected_s, rel=0.05)
    for node in head.nodes():
        by_device: dict[int, list[tuple[int, int, int]]] = {}
        for one in head.call("GET", f"/v1/nodes/{node['id']}/usage")["spans"]:
            times = (round(one["begin_s"] * 1000), round(one["end_s"] * 1000), one["milli"])
            by_device.setdefault(one["device"], []).append(times)
        for spans in by_device.values():
            begin = min(one[0] for one in spans)
            end = max(one[1] for one in spans)
            assert sum((stop - start) * milli for start, stop, milli in spans) == (end - begin) * 1000, node["id"]


def run_scenarios(stage: Stage) -> dict[str, list[Track]]:
    found = {}
    with concurrent.futures.ThreadPoolExecutor(len(THEN)) as threads:
        for batch in (FIRST, THEN):
            running = {threads.submit(scenario, stage): scenario.__name__ for scenario in batch}
            for done in concurrent.futures.as_completed(running):
                found[running[done]] = done.result()
    return found


def test_states_are_what_the_processes_say_that_they_did():
    seed = int(os.environ.get("PHALANX_SEED", "0")) or int.from_bytes(os.urandom(3), "big")
    with cluster(FLEET, head_arguments=("--min-run-by-right", "1s")) as head:
        for pid in (head.head.pid if head.head else 0, *(int(node["pid"]) for node in head.node_records().values())):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
                file.write(
                    "-12"
                )  # a loaded machine shall not delay what is measured: as much weight as the programs have
        tracks = run_scenarios(Stage(head, seed))
        check_sums(head)
    scores = {name: Score() for name in tracks}
    print(f"\nseed {seed}\n{'scenario':20} {'seconds':>7} {'right':>7} {'if all computed':>15}  called wrongly")
    for name, score in scores.items():
        for one in tracks[name]:
            score.add(one.truths, one.spans, one.note)
        wrong = ", ".join(f"{was} as {called}: {count} s" for (was, called), count in score.wrong.items())
        print(f"{name:20} {score.seconds:7} {score.part:7.1%} {score.part_if_all_computed:15.1%}  {wrong}")
    right, seconds = sum(one.right for one in scores.values()), sum(one.seconds for one in scores.values())
    print(f"{'all':20} {seconds:7} {right / seconds:7.1%}")
    assert [line for one in tracks.values() for track in one for line in called_idle(track)] == []
    assert {name: score.part for name, score in scores.items() if score.part < RIGHT} == {}
    assert [name for name, score in scores.items() if score.part_if_all_computed >= RIGHT] == [], "no scenario"
    assert len(scores) >= 14
