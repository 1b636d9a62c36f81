"""A real head with a large fleet for the dashboard's benchmark: supervisors that are played over HTTP, running and waiting jobs, and past jobs."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from benchmarks.cluster import BenchmarkCluster
from benchmarks.figures import print_progress
from phalanx.app.state_folder import StateFolder
from phalanx.core.access.node_tokens import node_token
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.state.reports import MemberReady, MemberStarted
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import JobState
from phalanx.ports.store import Batch
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.wire import supervisor as wire

GPUS: Final = 8  # of a node
RACK: Final = 32  # nodes
RUNNING: Final = 500
WAITING: Final = 5_000
LEASE_S: Final = 1200.0  # longer than a measurement: a played supervisor renews nothing
USERS: Final = 60
_ARRAY: Final = 250  # waiting jobs of one request
_THREADS: Final = 16
_LOT: Final = 5_000  # past jobs of one commit
_TIMEOUT_S: Final = 120.0
_MODEL: Final = "NVIDIA H100 80GB HBM3"


class PlayedFleet:
    """A head, and all its nodes but one; `cluster` is the head with the one node of its own."""

    def __init__(self, cluster: BenchmarkCluster, nodes: int) -> None:
        self.cluster = cluster
        self.names = [f"gpu{number:05}" for number in range(nodes - 1)]
        self._job_on: dict[str, JobId] = {}
        self._secret = StateFolder(path=cluster.home).secret()
        self._local = threading.local()

    def join(self) -> None:
        """Register every node, and place them in racks."""
        self.cluster.call("POST", "/v1/nodes/n0/drain", {"why": "benchmark", "cordon_only": True})
        self._each(self._hello, self.names)
        for begin in range(0, len(self.names), 1000):
            lot = list(enumerate(self.names))[begin : begin + 1000]
            self.cluster.call(
                "PATCH", "/v1/nodes", {"labels": {name: {"rack": f"r{at // RACK:03}"} for at, name in lot}}
            )

    def fill(self, running: int, waiting: int) -> None:
        """Start `running` jobs that hold all nodes, and submit `waiting` more."""
        jobs = min(running, len(self.names))
        whole, more = divmod(len(self.names), jobs)
        sizes = [whole + (number < more) for number in range(jobs)]
        # One after the other: a job that waits too long for its supervisors fails.
        self._each(lambda at: self._start(self._submit(at, GPUS * sizes[at])), range(jobs))
        for at in range(0, waiting, _ARRAY):
            self._submit(at // _ARRAY, GPUS, array=f"0-{min(_ARRAY, waiting - at) - 1}")

    def sample(self, names: Iterable[str], utilization: float) -> None:
        """Send a sample of every GPU of these nodes, with about this utilization."""
        self._each(lambda name: self._sample(name, utilization), list(names))

    def cordon(self, names: Iterable[str], *, cordoned: bool) -> None:
        """Cordon these nodes, or allow new work on them again."""
        verb, body = ("drain", b'{"why": "benchmark", "cordon_only": true}') if cordoned else ("undrain", b"")
        self._each(lambda name: self.ask("POST", f"/v1/nodes/{name}/{verb}", body), list(names))

    def ask(self, method: str, path: str, body: bytes | None = None, *, token: str = "", gzip: bool = False) -> bytes:
        """Send one request over this thread's connection; return the body of its answer."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.cluster.port, timeout=_TIMEOUT_S)
            self._local.connection = connection
        headers = {"Authorization": f"Bearer {token or self.cluster.token()}", "Content-Type": "application/json"}
        if gzip:
            headers["Accept-Encoding"] = "gzip"
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):  # the head closes connections that were idle
            connection.close()
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
        data = reply.read()
        if reply.status >= 400:
            raise AssertionError(f"{method} {path}: {reply.status} {data[:300]!r}")
        return data

    def _each(self, do: Callable[[Any], Any], things: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(do, things))

    def _post(self, name: str, route: str, message: Any) -> None:
        self.ask("POST", f"/v1/node/{route}", wire.encode(message), token=node_token(self._secret, NodeId(name)))

    def _hello(self, name: str) -> None:
        devices = tuple(
            Device(index=at, uuid=f"GPU-{name}-{at}", model=_MODEL, memory_bytes=80 * GIB, virtual=True)
            for at in range(GPUS)
        )
        node = Node(
            id=NodeId(name),
            engine="joined",
            cpus=128,
            memory_bytes=2048 * GIB,
            state=NodeState.UP,
            supervisor_id=_supervisor(name),
            virtual=True,
            hostname=name,
            devices=devices,
        )
        self._post(
            name,
            "hello",
            wire.HelloRequest(version=wire.WIRE_VERSION, supervisor_id=_supervisor(name), node=node, members=[]),
        )

    def _submit(self, number: int, gpus: int, **more: str) -> str:
        body = {"run": "sleep inf", "gpus": gpus, "name": f"train-{number:03}", "workdir": self.cluster.home, **more}
        answer = json.loads(self.ask("POST", "/v1/jobs", json.dumps(body).encode()))
        return str(answer["job"]["id"])

    def _start(self, job_id: str) -> None:
        """Play the supervisors of a job: its members are ready, then run."""
        attempts = json.loads(self.ask("GET", f"/v1/jobs/{job_id}"))["attempts"]
        if not attempts:
            raise AssertionError(f"job {job_id} was not placed")
        names = [grant["node_id"] for grant in attempts[0]["grants"]]
        self._job_on |= dict.fromkeys(names, JobId(job_id))
        for number, event in enumerate((MemberReady, MemberStarted), start=1):
            for name in names:
                place = {
                    "job_id": JobId(job_id),
                    "epoch": Epoch(1),
                    "generation": Generation(0),
                    "node_id": NodeId(name),
                }
                more: dict[str, Any] = {"port": 29500} if event is MemberReady else {"at_s": time.time()}
                framed = [wire.encode_envelope(number, event(**place, **more))]
                self._post(name, "events", wire.EventsRequest(supervisor_id=_supervisor(name), events=framed))

    def _sample(self, name: str, utilization: float) -> None:
        devices = [
            wire.DeviceSample(
                index=at,
                uuid=f"GPU-{name}-{at}",
                counter="busy",
                utilization=utilization,
                memory_used_bytes=60 * GIB,
                memory_total_bytes=80 * GIB,
                virtual=True,
                job_id=self._job_on.get(name),
                processes=1,
            )
            for at in range(GPUS)
        ]
        self._post(
            name,
            "samples",
            wire.SamplesRequest(
                supervisor_id=_supervisor(name),
                node_id=NodeId(name),
                at_s=time.time(),
                devices=devices,
                load_1m=1.0,
                memory_available_bytes=GIB,
                disk_free_bytes=GIB,
                every_s=LEASE_S / 2,
            ),
        )


def write_past_jobs(home: str, count: int, seed: int = 1) -> None:
    """Write ended jobs into the database of a head that does not run, in commits of many jobs."""
    random_ = random.Random(seed)
    store = SqliteStore(os.path.join(home, "phalanx.db"))
    template = Job(
        id=JobId("1"),
        folder="1-k",
        seq=1,
        spec=JobSpec(
            name="",
            role=Role(argv=("python", "train.py", "--config", "configs/7b.yaml"), gpus=GpuRequest(total=8)),
            workdir="/home/user/project",
        ),
        user=UserId(""),
        project=ProjectId("default"),
        queue=QueueId("default"),
        submit_s=0.0,
    )
    began = time.monotonic()
    for begin in range(1, count + 1, _LOT):
        batch = [_past_job(seq, template, random_) for seq in range(begin, min(begin + _LOT, count + 1))]
        store.commit(Batch(records=batch))
        if begin % (20 * _LOT) == 1:
            print_progress(f"{begin - 1 + len(batch)} past jobs written, {time.monotonic() - began:.0f} s")
    store.close()


def _past_job(seq: int, template: Job, random_: random.Random) -> Job:
    user = min(int(random_.paretovariate(0.6)) - 1, USERS - 1)  # few users submit most jobs
    state = random_.choices((JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT), (80, 12, 6, 2))
    role = replace(template.spec.role, gpus=GpuRequest(total=random_.choice((1, 1, 2, 4, 8, 8, 16, 64))))
    at_s = 1_700_000_000.0 + 30.0 * seq
    return replace(
        template,
        id=JobId(str(seq)),
        folder=f"{seq}-k",
        seq=seq,
        spec=replace(template.spec, name=f"run-{random_.randrange(20_000):05}", role=role),
        user=UserId(f"user{user:02}"),
        queue=QueueId(random_.choice(("default", "batch", "prod", "dev"))),
        submit_s=at_s,
        started_s=at_s + 60.0,
        ended_s=at_s + 3600.0,
        state=state[0],
        exit_code=0 if state[0] is JobState.SUCCEEDED else 1,
    )


def list_requests(names: Sequence[str]) -> list[str]:
    """Return paths of lists as people ask for them: every order and filter, alone and together, first and second pages by the caller."""
    sorts = ("number", "name", "state", "user", "queue", "gpus")
    filters = [
        "",
        "state=failed",
        "state=pending",
        "user=user00",
        "user=user40",
        "queue=prod",
        *(f"name={name}" for name in names),
    ]
    paths = [f"?sort={sort}&ascending={way}&{one}" for sort in sorts for way in ("true", "false") for one in filters]
    paths += ["?user=user00&queue=dev", "?user=user03&state=timeout&sort=name", "?user=user20&queue=prod&sort=gpus"]
    return [f"/v1/jobs{path}" for path in paths] + [f"/jobs{path}" for path in paths[::4]]


def _supervisor(name: str) -> SupervisorId:
    return SupervisorId(f"{name}-played")
