"""For every route a call that does something: a path, a body, and whatever must be there first. A route missing here fails the matrix."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import itertools
import zlib
from dataclasses import dataclass, field

import msgspec

from phalanx.core.access.rules import CallerRelation
from phalanx.core.fleet.node_console import NodeConsole
from phalanx.core.fleet.power_limits import PowerLimits
from phalanx.core.state.events import PutChannel, PutSecret, PutSignIn, SubmitService
from phalanx.core.state.reports import MemberReady, NodeDied, PowerLimited
from phalanx.core.work.channel import Channel
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.secret import Secret, SecretScope, secret_id
from phalanx.core.work.sign_in import SignInSettings
from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.ports.store import Batch
from phalanx.wire.data_peers import DataPeersRequest
from phalanx.wire.supervisor import (
    EventsRequest,
    ExecOutput,
    HelloRequest,
    LeaseRequest,
    SamplesRequest,
    StreamChunk,
    StreamsRequest,
    encode_envelope,
)
from tests.contract.access_bench import NOW_S, OTHER_SUPERVISOR, Bench, Who
from tests.contract.api_head import JOB, Supervisor, make_node
from tests.contract.test_api_rules import SPOT

SHA = hashlib.sha256(b"bytes").hexdigest()


@dataclass
class Ask:
    """One call. `ok`: what it is answered where it is allowed."""

    path: str
    json: object = None
    content: bytes | None = None
    ok: tuple = (200, 201, 204)
    headers: dict = field(default_factory=dict)


@dataclass
class Case:
    """Who asks, tied how, on which bench. `fresh`: the call is allowed and uses its thing up, so that it needs one of its own."""

    bench: Bench
    who: Who
    tie: CallerRelation
    fresh: bool

    @property
    def owner(self):
        return self.bench.owner(self.who, self.tie)

    def job(self, kind):
        known = self.bench.jobs[self.owner, kind]
        if not self.fresh or self.owner == "viewer":
            return known
        self.bench.jobs[self.owner, kind] = self.bench.job(self.owner, kind)
        return known

    def service(self):
        """The name of a service of the owner; each call has its own."""
        name, project = f"s-{self.number}-{self.owner}", "cv" if self.owner == "otto" else "nlp"
        spec = spec_from_mapping(template(name), workdir="/")
        self.bench.head.ask(SubmitService(spec=spec, user=self.owner, project=project, queue="default"))
        return name

    @property
    def project(self):
        return "cv" if self.tie is CallerRelation.OTHER_PROJECT else "nlp"

    @property
    def number(self):
        self.bench.fresh += 1
        return self.bench.fresh

    @property
    def attempt(self):
        """Of the job on n0 whose supervisor speaks, or is spoken for."""
        return {"job_id": self.bench.jobs["sam", "running"], "epoch": 1}

    @property
    def supervisor_id(self):
        return "s1" if self.who is OTHER_SUPERVISOR else "s0"


def of_job(suffix="", kind="running", body=None, **more):
    return lambda case: Ask(f"/v1/jobs/{case.job(kind)}{suffix}", body, **more)


def plain(path, body=None, **more):
    return lambda case: Ask(path, body, **more)


def of_kept(noun, more="", content=None, **also):
    def make(case):
        place = case.attempt
        return Ask(f"/v1/node/{noun}?job_id={place['job_id']}&epoch=1{more}", content=content, **also)

    return make


def token_to_end(case):
    return Ask(f"/v1/tokens/{case.bench.give(case.owner, f'spare-{case.number}-of-{case.owner}')}")


def template(name, **more):
    """Of a service that sleeps from the start."""
    return {**JOB, "name": name, "type": "service", "replicas": "0..9", **more}


def provider_to_remove(case):
    """The head has a provider; nothing answers at its address."""
    settings = SignInSettings(
        issuer=PROVIDER["issuer"], client_id="c", urls=(PROVIDER["url"],), by="root", at_s=NOW_S, grants=()
    )
    case.bench.head.ask(PutSignIn(settings=settings))
    return Ask("/v1/sign-in")


LOGIN = f"/login/50000/{'c' * 43}/{'s' * 22}"
PROVIDER = {"issuer": "http://127.0.0.1:9", "client_id": "c", "url": "http://127.0.0.1:7600"}
SERVICE_CHANGES = itertools.count()


def change_service(case):
    """One of its owner: by turns another revision, another number of replicas, and another number awake."""
    name, number = case.service(), case.number
    bodies = ({"spec": template(name, env={"N": str(number)})}, {"replicas": number % 9}, {"awake": number % 9})
    body = bodies[next(SERVICE_CHANGES) % len(bodies) if case.fresh else 0]  # refused calls send none
    return Ask(f"/v1/services/{name}", body)


def reservation_to_end(case):
    name = f"end-{case.number}"
    body = {"nodes": ["n1"], "time": "1h", "start_s": NOW_S + 86400.0 + 7200.0 * case.number, "maintenance": True}
    reply = case.bench.call(
        None, "PUT", f"/v1/reservations/{name}", body, headers={"authorization": "Bearer secret-of-admin"}
    )
    assert reply.status_code == 200, reply.text
    return Ask(f"/v1/reservations/{name}")


def reservation(case):
    body = {"nodes": ["n1"], "time": "1h", "start_s": NOW_S + 86400.0 * 100 + 7200.0 * case.number, "maintenance": True}
    return Ask(f"/v1/reservations/put-{case.number}", body)


POOL = {"provider": "virtual", "node": "1x2", "max_nodes": 1}


def licence(case):
    """One that no job holds."""
    path = f"/v1/licences/cad-{case.number}"
    admin = {"authorization": "Bearer secret-of-admin"}
    reply = case.bench.call(None, "PUT", path, {"seats": 4}, headers=admin)
    assert reply.status_code == 200, reply.text
    return Ask(path)


def secret_to_remove(scope):
    """One of the project, or of the caller."""

    def make(case):
        name = f"GONE_{case.number}"
        owner = case.who.name if scope is SecretScope.USER else case.project
        known = Secret(
            id=secret_id(scope, owner, name),
            scope=scope,
            owner=owner,
            name=name,
            sealed="",
            key="",
            version=0,
            by="root",
            at_s=1.0,
        )
        case.bench.head.ask(PutSecret(secret=known))
        return Ask(f"/v1/own-secrets/{name}" if scope is SecretScope.USER else f"/v1/projects/{owner}/secrets/{name}")

    return make


def channel(suffix):
    """A channel of its own for each call."""

    def make(case):
        name = f"channel-{case.number}"
        known = Channel(
            id=name, url="json://127.0.0.1", shown="json://127.0.0.1", project="", topics=(), by="root", created_s=1.0
        )
        case.bench.head.ask(PutChannel(channel=known))
        return Ask(f"/v1/channels/{name}{suffix}", ok=(204,))

    return make


def pool(method):
    """One that exists; it has no nodes, so that a removed one is gone at once."""

    def make(case):
        name = f"{method.lower()}-{case.number}"
        admin = {"authorization": "Bearer secret-of-admin"}
        reply = case.bench.call(None, "PUT", f"/v1/pools/{name}", POOL, headers=admin)
        assert reply.status_code == 200, reply.text
        return Ask(f"/v1/pools/{name}")

    return make


def kept_console(case):
    """Of a node of a pool that was given up: written by a head that has one."""
    asked = pool("GET")(case)
    name = asked.path.rpartition("/")[2]
    kept = NodeConsole(id=f"{name}-0", pool=name, machine="i-1", at_s=1.0, text="no driver")
    case.bench.head.store.commit(Batch(records=[kept]))
    return Ask(f"{asked.path}/consoles/{name}-0")


def down_node(case):
    """One that joined once and is gone: nothing but its name is left."""
    supervisor = Supervisor(case.bench.call, f"gone{case.number}", "s9", devices=1)
    supervisor.hello()
    case.bench.head.driver.report(
        [NodeDied(node_id=supervisor.node_id, supervisor_id="s9", why="unplugged", confirmed=True)]
    ).result(100)
    return Ask(f"/v1/nodes/{supervisor.node_id}")


def node_with_power_limits(case):
    limits = PowerLimits(index=0, min_mw=200_000, max_mw=700_000, default_mw=700_000, limit_mw=700_000)
    case.bench.head.driver.report([PowerLimited(node_id="n1", milliwatts=None, limits=(limits,))]).result(100)
    return Ask("/v1/nodes/n1/power", {"limit": "300W", "time": "8h"})


def profile(case):
    found = NodeMeasurement(node="n0", gpu="virtual", devices=128, virtual=True, memory_bytes_per_s=9.0 + case.number)
    return Ask("/v1/profile", encode_record(Profile(at="2026-11-21", at_s=NOW_S, nodes=(found,))))


def node_tests(case):
    found = NodeMeasurement(node="n1", gpu="virtual", devices=128, virtual=True, memory_bytes_per_s=9.0 + case.number)
    tested = Profile(at="2026-11-21", at_s=NOW_S, nodes=(found,), job=str(case.number))
    return Ask("/v1/node-tests", {"profile": encode_record(tested)})


def join(case):
    name = case.who.name if case.who.name.startswith("n") and case.who.token else f"h{case.number}"
    return Ask("/v1/join", {"node_id": name})


def blob(case):
    data = f"blob {case.number}".encode()
    return Ask(f"/v1/blobs/{hashlib.sha256(data).hexdigest()}", content=data)


def known_blob(path):
    def make(case):
        case.bench.head.parts.blobs.put(SHA, iter([b"bytes"]))
        return Ask(path.format(SHA))

    return make


def record(route, make):
    return lambda case: Ask(f"/v1/node/{route}", content=msgspec.json.encode(make(case)))


def hello(case):
    return HelloRequest(version=1, supervisor_id="s0", node=make_node("n0", 128), members=[])


def events(case):
    event = MemberReady(**case.attempt, generation=0, node_id="n0", port=29500)
    return EventsRequest(supervisor_id=case.supervisor_id, events=[encode_envelope(1000 + case.number, event)])


def streams(case):
    chunk = StreamChunk(**case.attempt, stream="rank-0", offset=0, data=b"words\n")
    return StreamsRequest(supervisor_id=case.supervisor_id, chunks=[chunk])


def samples(case):
    return SamplesRequest(
        supervisor_id=case.supervisor_id, node_id="n0", at_s=NOW_S, devices=[], load_1m=float(case.number)
    )


def data_peers(case):
    return DataPeersRequest(supervisor_id=case.supervisor_id, **case.attempt, port=20001, fingerprint="sha256:00")


def lease(case):
    return LeaseRequest(supervisor_id="s0", node_id="n0", epochs=[])


def put_project(case):
    """What a project's admin may: who its members are. The same with one more, so that a refusal has something to refuse."""
    others = (
        ["otto"] if case.project == "cv" else ["sam", "viewer", "user", "project-admin", "operator", "admin", "dan"]
    )
    return Ask(f"/v1/projects/{case.project}", {"members": [*others, "nobody-yet"]})


OUTPUT = b"left by a rank"
CRC = f"&crc32={zlib.crc32(OUTPUT)}&size={len(OUTPUT)}"
# Of these the right answer needs a whole checkpoint that was published; tests/contract/test_checkpoint_uploads.py has those.
PAST_THE_GATE = (200, 400, 404, 409, 422)

SPECIMENS = {
    "GET /v1/health": plain("/v1/health"),
    "GET /v1/ca": plain("/v1/ca"),
    "GET /v1/openapi.json": plain("/v1/openapi.json"),
    "GET /v1/me": plain("/v1/me"),
    "GET /metrics": plain("/metrics"),
    "GET /v1/overview": plain("/v1/overview"),
    "GET /v1/events": plain("/v1/events"),
    "GET /v1/story": plain("/v1/story"),
    # jobs
    "POST /v1/jobs": lambda case: Ask("/v1/jobs", {**JOB, "hold": True, "project": "nlp"}),
    "POST /v1/jobs/dry-run": lambda case: Ask("/v1/jobs/dry-run", {**JOB, "project": "nlp"}),
    "GET /": plain("/"),
    "GET /sign-in": plain("/sign-in"),
    "POST /sign-in": plain("/sign-in", content=b"token=x", ok=(401,)),
    "GET /sign-in/provider": plain("/sign-in/provider", ok=(403, 404)),
    "GET /sign-in/return": plain("/sign-in/return?code=x&state=y"),
    "GET /sign-in/finish": plain("/sign-in/finish?code=x&state=y", ok=(401, 404)),
    "GET /login/{port}/{challenge}/{state}": plain(LOGIN),
    "POST /login/{port}/{challenge}/{state}": plain(LOGIN, content=b"csrf=x", ok=(401,)),
    "GET /device": plain("/device"),
    "POST /device": plain("/device", content=b"code=x", ok=(401,)),
    "GET /device/{code}": plain("/device/BCDF-GHJK", ok=(404, 503)),
    "POST /device/{code}": plain("/device/BCDF-GHJK", content=b"answer=allow", ok=(401,)),
    "POST /v1/login/device": plain("/v1/login/device", {"note": "of the matrix"}, ok=(200, 503)),
    "POST /v1/login/device/token": plain("/v1/login/device/token", {"handle": "x"}, ok=(401, 404)),
    "POST /v1/login/token": plain("/v1/login/token", {"code": "x", "verifier": "y"}, ok=(401,)),
    "POST /sign-out": plain("/sign-out", content=b"", ok=(303,)),
    "GET /web/{version}/{name:path}": plain("/web/none/dashboard.js", ok=(404,)),
    "POST /v1/dashboard/link": plain("/v1/dashboard/link"),
    "GET /v1/history": plain("/v1/history"),
    "GET /v1/history/devices": plain("/v1/history/devices"),
    "GET /v1/history/nodes": plain("/v1/history/nodes"),
    "GET /v1/fleet": plain("/v1/fleet"),
    "GET /v1/fleet/events": plain("/v1/fleet/events"),
    # Only a session of a browser is led to a program; a caller with a token is told how else to reach it.
    "GET /j/{address:path}": lambda case: Ask(f"/j/{case.job('running')}/8888/", ok=(409,)),
    "GET /jobs": plain("/jobs"),
    "GET /jobs/{job_id}": lambda case: Ask(f"/jobs/{case.job('running')}"),
    "GET /services": plain("/services"),
    "GET /services/{service_id}": lambda case: Ask(f"/services/{case.service()}"),
    "GET /settings": plain("/settings"),
    "GET /use": plain("/use"),
    "GET /plan": plain("/plan?model=gpt2&gpus=h100:8"),
    "GET /what-if": plain("/what-if?gpus=2"),
    "POST /v1/plan": plain("/v1/plan", {"model": "gpt2", "gpus": "h100:8"}),
    "POST /v1/what-if": lambda case: Ask("/v1/what-if", {"job": {**JOB, "project": "nlp"}, "add_nodes": 1}),
    "GET /queues": plain("/queues"),
    "GET /nodes": plain("/nodes"),
    "GET /nodes/{node_id}": plain("/nodes/n0"),
    "GET /audit": plain("/audit"),
    "GET /v1/jobs": plain("/v1/jobs"),
    "GET /v1/jobs/{job_id}": of_job(),
    "GET /v1/jobs/{job_id}/why": of_job("/why"),
    "GET /v1/jobs/{job_id}/request": of_job("/request"),
    "GET /v1/jobs/{job_id}/story": of_job("/story"),
    "GET /v1/jobs/{job_id}/receipt": of_job("/receipt"),
    "GET /v1/jobs/{job_id}/usage": of_job("/usage"),
    "GET /v1/jobs/{job_id}/steps": of_job("/steps"),
    "GET /v1/jobs/{job_id}/history": of_job("/history"),
    "GET /v1/jobs/{job_id}/events": of_job("/events"),
    "GET /v1/jobs/{job_id}/logs": of_job("/logs?follow=1"),
    "GET /v1/jobs/{job_id}/files": of_job("/files", ok=(200, 404)),  # it has left nothing yet
    "GET /v1/jobs/{job_id}/files/archive": of_job("/files/archive", ok=(200, 404)),
    "PATCH /v1/jobs/{job_id}": lambda case: Ask(f"/v1/jobs/{case.job('held')}", {"priority": case.number % 50}),
    "POST /v1/jobs/{job_id}/cancel": of_job("/cancel", "waiting", {"why": "no more"}),
    "POST /v1/jobs/cancel": lambda case: Ask("/v1/jobs/cancel", {"jobs": [case.job("waiting")]}),
    "POST /v1/jobs/{job_id}/hold": of_job("/hold", "waiting"),
    "POST /v1/jobs/{job_id}/release": of_job("/release", "held"),
    "POST /v1/jobs/{job_id}/park": of_job("/park", "waiting"),
    "POST /v1/jobs/{job_id}/resume": of_job("/resume", "waiting"),
    "POST /v1/jobs/{job_id}/requeue": of_job("/requeue", "running"),
    "WEBSOCKET /v1/jobs/{job_id}/exec": of_job("/exec", "running", {"argv": ["id"]}, ok=(101,)),
    # services
    "POST /v1/services": lambda case: Ask("/v1/services", {**template(f"new-{case.number}"), "project": "nlp"}),
    "GET /v1/services": plain("/v1/services"),
    "GET /v1/services/{service_id}": lambda case: Ask(f"/v1/services/{case.service()}"),
    "GET /v1/services/{service_id}/load": lambda case: Ask(f"/v1/services/{case.service()}/load"),
    "GET /v1/services/{service_id}/request": lambda case: Ask(f"/v1/services/{case.service()}/request"),
    "PATCH /v1/services/{service_id}": change_service,
    "POST /v1/gateways/load": lambda case: Ask("/v1/gateways/load", {"gateway": "gateway-1", "services": []}),
    "POST /v1/services/{service_id}/stop": lambda case: Ask(f"/v1/services/{case.service()}/stop"),
    "HEAD /v1/blobs/{sha256}": known_blob("/v1/blobs/{}"),
    "PUT /v1/blobs/{sha256}": blob,
    # nodes and queues
    "GET /v1/nodes": plain("/v1/nodes"),
    "GET /v1/nodes/{node_id}": plain("/v1/nodes/n0"),
    "GET /v1/nodes/{node_id}/usage": plain("/v1/nodes/n0/usage"),
    "PATCH /v1/nodes": lambda case: Ask("/v1/nodes", {"labels": {"n1": {"rack": f"r{case.number}"}}}),
    "POST /v1/nodes/{node_id}/drain": plain("/v1/nodes/n1/drain", {"why": "a fan"}),
    "POST /v1/nodes/{node_id}/undrain": plain("/v1/nodes/n1/undrain"),
    "PUT /v1/nodes/{node_id}/power": node_with_power_limits,
    "DELETE /v1/nodes/{node_id}/power": plain("/v1/nodes/n1/power"),
    "DELETE /v1/nodes/{node_id}": down_node,
    "GET /v1/reservations": plain("/v1/reservations"),
    "PUT /v1/reservations/{reservation_id}": reservation,
    "DELETE /v1/reservations/{reservation_id}": reservation_to_end,
    "POST /v1/gateways/{gateway_id}/usage": lambda case: Ask(
        f"/v1/gateways/g{case.number}/usage", {"sequence": 1, "hours": []}
    ),
    "GET /v1/token-usage": plain("/v1/token-usage?since_s=0"),
    "POST /v1/gateways/{gateway_id}/demand": plain("/v1/gateways/g1/demand", {"demand": {"project nlp": 2.5}}),
    "GET /v1/licences": plain("/v1/licences"),
    "PUT /v1/licences/{name}": lambda case: Ask(f"/v1/licences/put-{case.number}", {"seats": 4}),
    "DELETE /v1/licences/{name}": licence,
    "POST /v1/clouds/check": lambda case: Ask("/v1/clouds/check", {"provider": "virtual"}),
    "GET /v1/join/files": plain("/v1/join/files"),
    "GET /v1/join/order": plain("/v1/join/order"),
    "POST /v1/join/order": plain("/v1/join/order", {"why": "spot"}),
    "GET /v1/pools": plain("/v1/pools"),
    "GET /v1/pools/{pool_id}": pool("GET"),
    "GET /v1/pools/{pool_id}/consoles/{node_id}": kept_console,
    "PUT /v1/pools/{pool_id}": lambda case: Ask(f"/v1/pools/put-{case.number}", POOL),
    "DELETE /v1/pools/{pool_id}": pool("DELETE"),
    "GET /v1/profile": plain("/v1/profile"),
    "PUT /v1/profile": profile,
    "GET /v1/nodes/{node_id}/tests": plain("/v1/nodes/n1/tests"),
    "POST /v1/node-tests": node_tests,
    "GET /v1/channels": plain("/v1/channels"),
    "PUT /v1/channels/{name}": lambda case: Ask(f"/v1/channels/put-{case.number}", {"url": "json://127.0.0.1"}),
    "DELETE /v1/channels/{name}": channel(""),
    "POST /v1/channels/{name}/test": channel("/test"),
    "GET /v1/retention": plain("/v1/retention"),
    "GET /v1/archives": plain("/v1/archives"),
    "GET /v1/archives/{month}": plain("/v1/archives/2026-08", ok=(404,)),
    "GET /v1/sign-in": plain("/v1/sign-in"),
    "PUT /v1/sign-in": lambda case: Ask("/v1/sign-in", {**PROVIDER, "client_id": f"c{case.number}"}),
    "DELETE /v1/sign-in": provider_to_remove,
    "POST /v1/sign-in/check": plain("/v1/sign-in/check", ok=(404, 503)),
    "PUT /v1/retention": lambda case: Ask("/v1/retention", {"periods_s": {"logs": 1e9 + case.number}}),
    "POST /v1/retention/runs": lambda case: Ask(
        "/v1/retention/runs", {"older_than_s": 1e9 + case.number, "kinds": ["logs"]}, ok=(200, 409)
    ),
    "GET /v1/rules": plain("/v1/rules"),
    "PUT /v1/rules": lambda case: Ask("/v1/rules", {"rules": [{**SPOT, "name": f"spot-{case.number}"}]}),
    "GET /v1/queues": plain("/v1/queues"),
    "GET /v1/queues/{queue_id}": plain("/v1/queues/default"),
    "PUT /v1/queues/{queue_id}": lambda case: Ask("/v1/queues/fast", {"priority": case.number}),
    "POST /v1/queues/parse": plain("/v1/queues/parse", content=b"queues: {slow: {priority: 3}}"),
    "PUT /v1/queues": lambda case: Ask("/v1/queues", {"queues": [{"id": "slow", "priority": case.number}]}),
    # A planned stop ends the bench: with running jobs it is refused past the gate. tests/contract/test_api_nodes.py stops heads.
    "POST /v1/stop": plain("/v1/stop", {}, ok=(409,)),
    # people
    "GET /v1/users": plain("/v1/users"),
    "GET /v1/users/{user_id}": plain("/v1/users/sam"),
    "PUT /v1/users/{user_id}": lambda case: Ask(f"/v1/users/new{case.number}", {"role": "admin"}),
    "GET /v1/projects": plain("/v1/projects"),
    "GET /v1/projects/{project_id}": plain("/v1/projects/nlp"),
    "PUT /v1/projects/{project_id}": put_project,
    "GET /v1/secrets": plain("/v1/secrets"),
    "PUT /v1/projects/{project_id}/secrets/{name}": lambda case: Ask(
        f"/v1/projects/{case.project}/secrets/PUT_{case.number}", {"value": "a value of no use"}
    ),
    "DELETE /v1/projects/{project_id}/secrets/{name}": secret_to_remove(SecretScope.PROJECT),
    "PUT /v1/own-secrets/{name}": lambda case: Ask(
        f"/v1/own-secrets/OWN_{case.number}", {"value": "a value of no use"}
    ),
    "DELETE /v1/own-secrets/{name}": secret_to_remove(SecretScope.USER),
    "POST /v1/secrets/rotate-key": plain("/v1/secrets/rotate-key"),
    "GET /v1/tokens": plain("/v1/tokens"),
    "POST /v1/tokens": plain("/v1/tokens", {"note": "laptop"}),
    "DELETE /v1/tokens/{token_id}": token_to_end,
    "GET /v1/heads": plain("/v1/heads"),
    "GET /v1/usage": plain("/v1/usage?since_s=0"),
    "GET /v1/cost": plain("/v1/cost?since_s=0"),
    "GET /v1/invoice": plain("/v1/invoice?since_s=0"),
    "GET /v1/failures": plain("/v1/failures?since_s=0"),
    "GET /v1/projects/{project_id}/spending": plain("/v1/projects/nlp/spending"),
    "GET /v1/prices": plain("/v1/prices"),
    "PUT /v1/prices": lambda case: Ask(
        "/v1/prices", {"currency": "EUR", "prices": [{"gpu": f"h{case.number}", "per_gpu_hour": "2.49"}]}
    ),
    "GET /v1/waste": plain("/v1/waste"),
    "GET /v1/energy": plain("/v1/energy?since_s=0"),
    "GET /v1/audit": plain("/v1/audit"),
    "GET /v1/audit/verify": plain("/v1/audit/verify"),
    "GET /v1/join": plain("/v1/join"),
    "POST /v1/join/renew": plain("/v1/join/renew"),
    "POST /v1/join": join,
    # supervisors
    "POST /v1/node/hello": record("hello", hello),
    "POST /v1/node/lease": record("lease", lease),
    "POST /v1/node/events": record("events", events),
    "POST /v1/node/streams": record("streams", streams),
    "POST /v1/node/samples": record("samples", samples),
    "POST /v1/node/data": record("data", data_peers),
    "GET /v1/node/commands": plain("/v1/node/commands"),
    "GET /v1/node/storage": plain("/v1/node/storage"),
    "GET /v1/node/blobs/{sha256}": known_blob("/v1/node/blobs/{}"),
    "GET /v1/node/secrets/{job_id}/{epoch}": lambda case: Ask(  # another node runs no part of the job
        f"/v1/node/secrets/{case.attempt['job_id']}/1", ok=(403,) if case.who is OTHER_SUPERVISOR else (200,)
    ),
    "GET /v1/node/exec/{session_name}/input": lambda case: Ask(f"/v1/node/exec/{session_on_n0(case)}/input"),
    "POST /v1/node/exec/{session_name}/output": lambda case: Ask(
        f"/v1/node/exec/{session_on_n0(case)}/output", content=msgspec.json.encode(ExecOutput(offset=0, data=b"x"))
    ),
    "PUT /v1/node/checkpoints/manifest": of_kept(
        "checkpoints/manifest", f"&step=1&digest={SHA}", b"{}", ok=PAST_THE_GATE
    ),
    "PUT /v1/node/checkpoints/file": of_kept(
        "checkpoints/file", f"&step=1&digest={SHA}&path=a&offset=0", b"x", ok=PAST_THE_GATE
    ),
    "GET /v1/node/checkpoints": of_kept("checkpoints", f"&step=1&digest={SHA}", ok=PAST_THE_GATE),
    "GET /v1/node/checkpoints/file": of_kept("checkpoints/file", "&of_epoch=1&step=1&path=a", ok=PAST_THE_GATE),
    "GET /v1/node/outputs": of_kept("outputs"),
    "GET /v1/node/outputs/file": of_kept("outputs/file", "&path=a", ok=PAST_THE_GATE),
    "PUT /v1/node/outputs/file": of_kept("outputs/file", f"&path=b&offset=0{CRC}", OUTPUT),
    "DELETE /v1/node/outputs/file": of_kept("outputs/file", "&path=b", ok=(204, 404)),
}


def session_on_n0(case):
    """Sam's, whose command runs on n0."""
    sessions = case.bench.head.app.state.runtime.sessions
    job_id = case.bench.jobs["sam", "running"]
    return sessions.open(user="sam", job_id=job_id, supervisor="n0", rows=24, cols=80).name
