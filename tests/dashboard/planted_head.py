"""A real head over 64 played GPUs with the troubles of a week: waste, failures, a broken node, a hang, budgets, queues that lend.

Supervisors are played over HTTP as in `tests.contract.api_head`; the ledger of past weeks is written into the store before the head starts.
Time passes as the clock of the head is moved on; it ends at the machine's own time.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, misc, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

from phalanx.core.fleet.device import Device
from phalanx.core.state.events import LabelNodes
from phalanx.core.state.reports import MemberReady, MemberStarted, NodeHealthReported, ReadinessChanged
from phalanx.core.units import GIB
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from phalanx.ports.store import Batch
from phalanx.store.memory import MemoryStore
from phalanx.wire.supervisor import DeviceSample, HelloRequest, SamplesRequest
from tests.contract.api_head import JOB, ApiHead, Supervisor, make_node, until

GPUS = 8
MODEL = "NVIDIA H100 80GB HBM3"
NODES = {
    "gpu-b2": "rack b",
    **{f"gpu-a{n}": "rack a" for n in range(1, 5)},
    **{f"gpu-b{n}": "rack b" for n in (1, 3, 4)},
}
BROKEN, FAILING, CORDONED = "gpu-b3", "gpu-b2", "gpu-a4"
FAULT = "GPU 3: Xid 79, the GPU has fallen off the bus"
PAST_DAYS = 45
HOUR_MS = 3_600_000
PAST_S = 2700.0  # of played time
TURN_S = 30.0
REPORT_S = 6
STEP_S = 6.0  # of a training
STUCK, STUCK_STEP = "reward-model", 40
QUEUES = [
    {"id": "fleet"},
    {"id": "prod", "parent": "fleet", "quota_gpus": 40},
    {"id": "research", "parent": "fleet", "quota_gpus": 16},
    {"id": "dev", "parent": "fleet", "quota_gpus": 8},
]
PRICES = {"currency": "EUR", "prices": [{"gpu": "h100", "per_gpu_hour": "2.50"}]}
# GPUs in each hour of the past, by project and user, and the shares of their states.
PAST_USE = {
    ("nlp", "ada", "research"): (20, {"computing": 0.86, "checkpointing": 0.03, "communicating": 0.06, "lost": 0.05}),
    ("vision", "bob", "dev"): (10, {"computing": 0.42, "idle": 0.45, "unoccupied": 0.05, "data_bound": 0.08}),
    ("speech", "vic", "prod"): (12, {"computing": 0.9, "data_bound": 0.07, "starting": 0.03}),
    ("default", "opal", "prod"): (4, {"computing": 0.7, "low": 0.2, "hung": 0.1}),
}


class PlayedNode(Supervisor):
    """The supervisor of one server; `busy` is the utilization of the devices that each job holds."""

    def __init__(self, call, name):
        super().__init__(call, name, f"s-{name}", GPUS)
        self.epochs, self.busy = [], {}

    def join(self, *broken):
        devices = tuple(
            Device(
                index=at, uuid=f"GPU-{self.node_id}-{at}", model=MODEL, memory_bytes=80 * GIB, healthy=at not in broken
            )
            for at in range(GPUS)
        )
        node = replace(
            make_node(self.node_id),
            engine="joined",
            cpus=128,
            memory_bytes=2048 * GIB,
            virtual=False,
            hostname=self.node_id,
            devices=devices,
        )
        assert (
            self.post("hello", HelloRequest(version=1, supervisor_id=self.id, node=node, members=[])).status_code == 200
        )

    def sample(self, held, at_s, every_s):
        """Send samples. `held`: the job of each device that is held."""
        devices = []
        for at in range(GPUS):
            job = held.get(at)
            busy = self.busy.get(job, 0.0) if job else 0.0
            devices.append(
                DeviceSample(
                    index=at,
                    uuid=f"GPU-{self.node_id}-{at}",
                    counter="gpm_sm",
                    utilization=busy,
                    memory_used_bytes=int((60 if job else 1) * GIB),
                    memory_total_bytes=80 * GIB,
                    power_w=120.0 + 560.0 * busy,
                    temperature_c=34.0 + 38.0 * busy,
                    job_id=job,
                    processes=1 if job else 0,
                )
            )
        request = SamplesRequest(
            supervisor_id=self.id,
            node_id=self.node_id,
            at_s=at_s,
            devices=devices,
            load_1m=3.0 + len(held),
            cpu_utilization=0.05 * len(held),
            memory_available_bytes=1500 * GIB,
            memory_total_bytes=2048 * GIB,
            network_received_bytes_per_s=2e9 if held else 1e5,
            network_sent_bytes_per_s=2e9 if held else 1e5,
            every_s=every_s,
        )
        assert self.post("samples", request).status_code == 204


class PlantedHead:
    """The head, its caller, its nodes by name, and the jobs by name."""

    def __init__(self, head, call):
        self.head, self.call = head, call
        self.nodes = {name: PlayedNode(call, name) for name in NODES}
        self.jobs: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.shipped: dict[str, int] = {}
        self.logged: dict[str, int] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, daemon=True)

    def plant(self):
        """Let the week happen, then keep the nodes alive."""
        call = self.call
        assert call("operator", "PUT", "/v1/queues", {"queues": QUEUES}).status_code == 200
        assert call("operator", "PUT", "/v1/prices", PRICES).status_code == 200
        for project in ("vision", "nlp", "speech"):
            assert (
                call("admin", "PUT", f"/v1/projects/{project}", {"members": ["ada", "bob", "opal"]}).status_code == 200
            )
        self.head.usage.start(self.head.driver.report)
        self._fail_on_one_node()
        self._join_all()
        self._start_jobs()
        while self.head.clock.ahead_s < 0:
            self._pass(min(TURN_S, -self.head.clock.ahead_s))
        self._quarrel()
        self._set_budgets()
        self.thread.start()
        until(lambda: {spell.newest.kind.value for spell in self.head.usage.waste().spells} >= {"idle", "hung"})

    def close(self):
        """End the thread that renews leases."""
        self.ended.set()
        if self.thread.ident is not None:
            self.thread.join(timeout=60)
        self.head.usage.stop()

    def _fail_on_one_node(self):
        node = self.nodes[FAILING]
        node.join()
        for number in range(4):
            job = self.submit(f"eval-{number}", "ada", 2, "prod", "nlp", start=True)
            node.end(job, code=1, at_s=self.head.clock.now_s())
            until(lambda job=job: self.head.store.job(job).state.terminal)

    def _join_all(self):
        for name, node in self.nodes.items():
            if name != FAILING:
                node.join(*((3,) if name == BROKEN else ()))
        self.head.ask(LabelNodes(labels={name: {"rack": rack[-1]} for name, rack in NODES.items()}, by="root"))
        self.nodes[BROKEN].tell(NodeHealthReported(node_id=BROKEN, why=FAULT, checked=True))
        body = {"why": "firmware update", "cordon_only": True}
        assert self.call("operator", "POST", f"/v1/nodes/{CORDONED}/drain", body).status_code == 200
        until(lambda: self._cordoned(BROKEN) and self._cordoned(CORDONED))

    def _cordoned(self, name):
        return next(node for node in self.head.store.nodes() if node.id == name).cordon is not None

    def _start_jobs(self):
        submit = self.submit
        submit("llama-7b-pretrain", "ada", 16, "research", "nlp", start=True, busy=0.93, time="12h")
        submit("vit-sweep", "bob", 8, "research", "vision", start=True, busy=0.81, time="2h")
        submit("notebook", "bob", 7, "dev", "vision", start=True, busy=0.0, time="8h")
        submit(STUCK, "opal", 8, "prod", "default", start=True, busy=0.0, time="10h")
        submit("tts-finetune", "opal", 8, "prod", "speech", start=True, busy=0.7, time="6h")
        submit("llama-70b-pretrain", "ada", 32, "prod", "nlp", time="20h")
        submit("quick-eval", "ada", 8, "research", "nlp", time="30m", priority=-5)
        self._start_service()
        self.steps = {"llama-7b-pretrain": 0, STUCK: 0, "tts-finetune": 0}

    def submit(self, name, user, gpus, queue, project, *, start=False, busy=0.5, **more):
        """Submit a job, and bring it to run."""
        role = {"ada": "user", "bob": "other", "opal": "operator"}[user]
        body = {**JOB, "name": name, "gpus": gpus, "queue": queue, "project": project, "run": ["python", f"{name}.py"]}
        job = self.call.submit(role, **{**body, **more})
        self.jobs[name] = job
        if start:
            until(lambda: self.head.store.attempts(job))
            (attempt,) = self.head.store.attempts(job)
            members = [self.nodes[grant.node_id] for grant in attempt.allocation.grants]
            place = {"job_id": job, "epoch": 1, "generation": 0}
            for member in members:
                member.tell(MemberReady(**place, node_id=member.node_id, port=29500))
            for member in members:
                member.tell(MemberStarted(**place, node_id=member.node_id, at_s=self.head.clock.now_s()))
                member.epochs.append((job, 1))
                member.busy[job] = busy
        return job

    def _start_service(self):
        """A service with one replica, which answers."""
        body = {**JOB, "name": "chat", "type": "service", "replicas": "1..2", "gpus": 1, "port": 8000, "queue": "dev"}
        body |= {"ready": "/health", "run": ["python", "serve.py"], "project": "speech"}
        assert self.call("operator", "POST", "/v1/services", body).status_code == 201
        until(lambda: [job for job, _ in self.head.driver.live_attempts() if job.spec.name.startswith("chat")])
        ((job, attempt),) = [one for one in self.head.driver.live_attempts() if one[0].spec.name.startswith("chat")]
        node = self.nodes[attempt.allocation.grants[0].node_id]
        place = {"job_id": job.id, "epoch": 1, "generation": 0, "node_id": node.node_id}
        node.tell(MemberReady(**place, port=29500, service_port=8000))
        node.tell(MemberStarted(**place, at_s=self.head.clock.now_s()), ReadinessChanged(**place, ready=True))
        node.epochs.append((job.id, 1))
        node.busy[job.id] = 0.4

    def _held(self):
        held = {}
        for _, attempt in self.head.driver.live_attempts():
            for grant in attempt.allocation.grants:
                for index in grant.devices:
                    held.setdefault(grant.node_id, {})[index] = attempt.job_id
        return held

    def _pass(self, seconds):
        """Let time pass on the head's clock."""
        self.head.clock.ahead_s += seconds
        self._report(seconds)

    def _report(self, seconds):
        """Send what the last seconds had: samples of every node, and steps of every training that is not stuck."""
        now_s, held = self.head.clock.now_s(), self._held()
        for node in self.nodes.values():
            node.sample(held.get(node.node_id, {}), now_s, seconds)
        for name in self.steps:
            if name != STUCK or self.steps[name] < STUCK_STEP:
                self._step(name, now_s, seconds)

    def _step(self, name, now_s, seconds):
        lines = []
        if not self.steps[name]:
            lines.append({"k": "planned", "rank": 0, "epoch": 1, "generation": 0, "steps_total": 2000})
        count = max(1, int(seconds / STEP_S))
        for at in range(count):
            self.steps[name] += 1
            step, end_s = self.steps[name], now_s - seconds + (at + 1) * seconds / count
            report = {"k": "step", "rank": 0, "epoch": 1, "generation": 0, "step": step, "at_s": end_s}
            timing = {"begin_ns": int((end_s - seconds / count) * 1e9), "end_ns": int(end_s * 1e9)}
            lines.append(report | timing | {"loss": round(1.7 + 9.0 / (step + 1) ** 0.5, 4), "tokens": 4_194_304})
        log = "".join(f"step {one['step']} loss {one['loss']:.4f}\n" for one in lines if "step" in one).encode()
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        job = self.jobs[name]
        (attempt,) = self.head.store.attempts(job)
        node = self.nodes[attempt.allocation.grants[0].node_id]
        assert node.ship(job, 1, "steps-0", self.shipped.get(name, 0), data).status_code == 200
        self.shipped[name] = self.shipped.get(name, 0) + len(data)
        assert node.ship(job, 1, "rank-0", self.logged.get(name, 0), log).status_code == 200
        self.logged[name] = self.logged.get(name, 0) + len(log)

    def _quarrel(self):
        """What operators and users did to one job: lines for the audit trail."""
        job = self.jobs["llama-70b-pretrain"]
        for role, verb in (("operator", "hold"), ("user", "release"), ("operator", "hold"), ("admin", "release")):
            assert self.call(role, "POST", f"/v1/jobs/{job}/{verb}").status_code == 200
        for number in range(120):  # of others, so that the newest page does not have it
            labels = {"labels": {"gpu-a1": {"round": str(number)}}}
            assert self.call("operator", "PATCH", "/v1/nodes", labels).status_code == 200

    def _set_budgets(self):
        """Budgets as shares of what is spent, since that depends on the day of the month: vision has used 93 %, nlp half."""
        for project, share in (("vision", 0.935), ("nlp", 0.5)):
            spent = self.call("admin", "GET", f"/v1/projects/{project}/spending").json()["spent_cents"]
            budget = f"{max(1.0, spent / share / 100):.2f} EUR/month"
            assert self.call("admin", "PUT", f"/v1/projects/{project}", {"budget": budget}).status_code == 200

    def _renew(self):
        seconds = 0
        while not self.ended.wait(1.0):
            seconds += 1
            for node in self.nodes.values():
                node.lease(node.epochs)
            if seconds % REPORT_S == 0:
                self._report(REPORT_S)


def past_hours(now_s, seed=1):
    """Hours of the ledger before the hour of `now_s`; the fleet has 64 GPUs."""
    random_ = random.Random(seed)
    last = int(now_s) // 3600 * 3600
    for at_s in range(last - PAST_DAYS * 86400, last, 3600):
        busy = 0.75 + 0.25 * random_.random() if time.gmtime(at_s).tm_wday < 5 else 0.35 + 0.2 * random_.random()
        rows, left = [], 64 * 1000 * HOUR_MS
        for number, ((project, user, queue), (gpus, shares)) in enumerate(PAST_USE.items()):
            whole = int(gpus * busy) * 1000 * HOUR_MS
            parts = [(state, "", int(whole * share)) for state, share in shares.items()]
            parts[0] = ("computing", "", whole - sum(amount for _, _, amount in parts[1:]))
            left -= whole
            place = {"model": MODEL, "pool": "", "project": project, "user": user, "queue": queue}
            rows.append(UsageRow(**place, job=str(900 + number), amounts=tuple(one for one in parts if one[2])))
        broken = 8 * 1000 * HOUR_MS if at_s > last - 3 * 86400 else 0
        amounts = [("broken", "", broken), ("free", "", left - broken)]
        none = {"project": "", "user": "", "queue": "", "job": ""}
        rows.append(UsageRow(model=MODEL, pool="", **none, amounts=tuple(one for one in amounts if one[2])))
        yield UsageHour(id=str(at_s), fleet=64 * 1000 * HOUR_MS, rows=tuple(rows))


@contextmanager
def planted_head(home):
    """A planted head that serves."""
    store = MemoryStore()
    store.commit(Batch(records=list(past_hours(time.time() - PAST_S))))
    head = ApiHead(home, store=store, ahead_s=-PAST_S, shows_states=True)
    try:
        with head.calling() as call:
            planted = PlantedHead(head, call)
            try:
                planted.plant()
                yield planted
            finally:
                planted.close()
    finally:
        head.close()
