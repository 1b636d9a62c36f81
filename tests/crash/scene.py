"""What a head is asked while strace looks on: every call that changes something, each with a mark that only it makes durable."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from benchmarks.cluster import wait_until
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.wire.supervisor import HelloRequest
from tests.builders import make_node
from tests.crash.armed_head import HeadGone
from tests.crash.homes import Home
from tests.crash.ledger import Submitted, sha256_of
from tests.crash.load import checkpoint, place
from tests.crash.syscalls import TRACED, Answered, Call, answers_of, calls_of


class Seen(NamedTuple):
    """Routes of the head as its description has them; what strace saw; `there`: the files that had been there before."""

    routes: Mapping[str, Any]
    calls: list[Call]
    answers: list[Answered]
    there: frozenset[str]

    def answered(self, route):
        """What this route was asked for with success."""
        return [one for one in self.answers if 200 <= one.status < 300 and route_of(one, self.routes) == route]


def looked_at(home, folder, *, beside=tuple, folders=()):
    """A head that is asked everything. `beside`: names other processes, once the head has its connections to them; `folders`: theirs."""
    home.recover()
    routes = home.head.ask("GET", "/v1/openapi.json")["paths"]
    gone = home.head.node("n1")
    home.head.kill_node(gone)
    wait_until(lambda: node_of(home, gone)["state"] == "down", f"{gone} is seen dead")
    look = Look(home, os.path.join(folder, "trace"), beside=beside(), folders=folders)
    look.begin()
    ask_everything(home)
    calls = look.end()
    return Seen(routes=routes, calls=calls, answers=answers_of(calls), there=look.there)


def why_not() -> str:
    """Why strace cannot look on here; empty where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed; make prove installs it"
    looked = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    return "" if looked.returncode == 0 else "strace may not trace here (ptrace is not permitted)"


@dataclass
class Look:
    """strace on a head, and what it wrote. `beside`: other processes that it looks at; `there`: the files in `folders` as it began."""

    home: Home
    path: str
    beside: Sequence[int] = ()
    folders: Sequence[str] = ()
    process: Any = None
    there: frozenset[str] = frozenset()

    def begin(self):
        head = self.home.head.head
        assert head is not None
        words = ["-f", "-yy", "-s", "65536", "-e", f"trace={TRACED}", "-e", "signal=none", "-o", self.path]
        for pid in (head.pid, *self.beside):
            words += ["-p", str(pid)]
        self.process = subprocess.Popen(["strace", *words], stderr=subprocess.PIPE)
        assert b"attached" in self.process.stderr.readline()
        time.sleep(0.2)  # until it holds every thread
        self.there = frozenset(
            os.path.join(folder, name)
            for top in (self.home.head.home, *self.folders)
            for folder, _, names in os.walk(top)
            for name in names
        )

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)
        with open(self.path, encoding="utf-8", errors="replace") as file:
            return calls_of(file)


def ask_everything(home):
    """Every call that changes something, the end of the head last."""
    jobs_change(home)
    services_change(home)
    people_change(home)
    nodes_change(home)
    gang_brings(home)
    home.head.ask("POST", "/v1/join/renew")
    with contextlib.suppress(HeadGone):
        home.head.ask("POST", "/v1/stop", {"keep_jobs": True})
    home.head.head.wait(timeout=60)


# A mark stands in what a request makes durable and in nothing before it: a name that it gives, or a word of its line in the history.


def jobs_change(home):
    ask = home.head.ask
    for name in ("one", "two", "three"):
        ask(
            "POST",
            "/v1/jobs",
            {"run": "sleep 1000", "gpus": 1, "name": f"mark-{name}", "workdir": "/"},
            key=name,
            mark=f"mark-{name}",
        )
    wait_until(lambda: home.head.job("1")["state"] == "running", "it runs")
    ask("PATCH", "/v1/jobs/1", {"name": "mark-renamed"}, mark="mark-renamed")
    ask("POST", "/v1/jobs/1/requeue", mark="requeued: requeued by root")
    late = {"run": "true", "gpus": 1, "name": "mark-late", "workdir": "/", "begin": time.time() + 1e6}
    held = ask("POST", "/v1/jobs", late, key="late", mark="mark-late")["job"]["id"]
    ask("POST", f"/v1/jobs/{held}/hold", mark="held by root")
    ask("POST", f"/v1/jobs/{held}/release", mark="released by root")
    ask("POST", f"/v1/jobs/{held}/park", mark="parked by root")
    ask("POST", f"/v1/jobs/{held}/resume", mark="resumed by root")
    ask("POST", "/v1/jobs/2/cancel", {"why": "mark-cancelled"}, mark="mark-cancelled")
    each = (f'cancelled: mark-both","job_id":"{job}"' for job in (1, 3))
    ask("POST", "/v1/jobs/cancel", {"jobs": ["1", "3"], "why": "mark-both"}, mark=" & ".join(each))
    talk = {"run": "echo mark-said", "gpus": 1, "name": "mark-talk", "workdir": "/", "tasks_per_node": 1}
    home.head.wait_for_state(ask("POST", "/v1/jobs", talk, key="talk", mark="mark-talk")["job"]["id"], "succeeded")


def services_change(home):
    ask = home.head.ask
    sleeping = {"run": "sleep 1000", "gpus": 1, "workdir": "/", "type": "service", "replicas": "0..2"}
    ask("POST", "/v1/services", {**sleeping, "name": "mark-web"}, mark="mark-web")
    changed = {**sleeping, "name": "mark-web", "env": {"A": "mark-revision"}}
    ask("PATCH", "/v1/services/mark-web", {"spec": changed}, mark="mark-revision")
    ask("PATCH", "/v1/services/mark-web", {"replicas": 1}, mark="mark-web: scaled to 1 replicas")
    hooks = {**sleeping, "name": "mark-nap", "replicas": 1, "sleep": "/sleep", "wake": "/wake"}
    ask("POST", "/v1/services", hooks, mark="mark-nap")
    ask("PATCH", "/v1/services/mark-nap", {"asleep": 1}, mark="mark-nap: 1 of 1 replicas shall sleep")
    ask("POST", "/v1/gateways/mark-gateway/usage", {"sequence": 1, "hours": []}, mark="mark-gateway")
    ask("POST", "/v1/services/mark-web/stop", mark="mark-web: stopped by root")


def people_change(home):
    ask = home.head.ask
    ask("PUT", "/v1/users/mark-user", {"role": "user"}, mark="mark-user")
    ask("PUT", "/v1/projects/mark-project", {"members": ["mark-user"]}, mark="mark-project")
    ask("PUT", "/v1/queues/mark-queue", {"priority": 3}, mark="mark-queue")
    ask("PUT", "/v1/queues", {"queues": [{"id": "mark-queues"}]}, mark="mark-queues")
    made = ask("POST", "/v1/tokens", {"note": "mark-token"}, mark="mark-token")
    ask("DELETE", f"/v1/tokens/{made['token']['id']}", mark='"revoked_s":1')
    provider = {"issuer": "http://127.0.0.1:9", "client_id": "mark-client", "url": "http://127.0.0.1:7600"}
    ask("PUT", "/v1/sign-in", provider, mark="mark-client")
    ask("DELETE", "/v1/sign-in", mark="DELETE /v1/sign-in")
    ask("PUT", "/v1/channels/mark-channel", {"url": "json://127.0.0.1:9/hook"}, mark="mark-channel")
    ask("DELETE", "/v1/channels/mark-channel", mark="DELETE /v1/channels/{name}")
    value = {"value": "a value of no use"}
    ask("PUT", "/v1/projects/default/secrets/MARK_SECRET", value, mark="MARK_SECRET")
    ask("PUT", "/v1/own-secrets/MARK_OWN", value, mark="MARK_OWN")
    home.give_key()
    ask("POST", "/v1/secrets/rotate-key", mark="POST /v1/secrets/rotate-key")
    ask("DELETE", "/v1/projects/default/secrets/MARK_SECRET", mark="DELETE /v1/projects/{project_id}/secrets/{name}")
    ask("DELETE", "/v1/own-secrets/MARK_OWN", mark="DELETE /v1/own-secrets/{name}")
    price = {"gpu": "h100", "per_gpu_hour": "2.49", "source": "mark-price"}
    ask("PUT", "/v1/prices", {"currency": "EUR", "prices": [price]}, mark="mark-price")
    ask("PUT", "/v1/retention", {"periods_s": {"logs": 987654.0}}, mark="987654")
    ask("POST", "/v1/retention/runs", {"older_than_s": 876543.0, "kinds": ["logs"]}, mark="POST /v1/retention/runs")
    content = b"mark-blob" * 100
    ask("PUT", f"/v1/blobs/{sha256_of(content)}", content, mark="mark-blob")


def nodes_change(home):
    ask, n0, n1 = home.head.ask, home.head.node("n0"), home.head.node("n1")
    ask("PATCH", "/v1/nodes", {"labels": {n0: {"rack": "mark-label"}}}, mark="mark-label")
    ask("POST", f"/v1/nodes/{n0}/drain", {"why": "mark-drain", "cordon_only": True}, mark="mark-drain")
    ask("POST", f"/v1/nodes/{n0}/undrain", mark=f"{n0} is in service again")
    booked = {"nodes": [n0], "time": "1h", "start_s": time.time() + 1e6, "maintenance": True, "why": "mark-booked"}
    ask("PUT", "/v1/reservations/mark-reservation", booked, mark="mark-booked")
    ask("DELETE", "/v1/reservations/mark-reservation", mark="mark-reservation was ended")
    if not home.head.store:  # several heads may share a database, and refuse a pool of virtual nodes
        pool = {"provider": "virtual", "node": "1x1", "max_nodes": 1}
        ask("PUT", "/v1/pools/mark-pool", pool, mark="mark-pool")
        ask("DELETE", "/v1/pools/mark-pool", mark="mark-pool releases its nodes")
    ask("PUT", "/v1/licences/mark-licence", {"seats": 2}, mark="mark-licence")
    ask("DELETE", "/v1/licences/mark-licence", mark="licence mark-licence was removed")
    found = NodeMeasurement(node=NodeId(n0), gpu="virtual", devices=4, virtual=True, memory_bytes_per_s=9.0)
    profile = encode_record(Profile(at="2026-11-21", at_s=time.time(), nodes=(found,), job="mark-profile"))
    ask("PUT", "/v1/profile", profile, mark="mark-profile")
    ask("POST", "/v1/node-tests", {"profile": {**profile, "job": "mark-tested"}}, mark="mark-tested")
    rule = {"name": "mark-rule", "codes": [117], "blame": "preempted", "remedy": "elsewhere", "says": "mark-rule"}
    ask("PUT", "/v1/rules", {"rules": [rule]}, mark="mark-rule")
    ask("DELETE", f"/v1/nodes/{n1}", mark=f"{n1} was removed")
    node = replace(make_node("mark-node"), engine="joined")
    hello = HelloRequest(version=1, supervisor_id=SupervisorId("s"), node=node, members=[])
    home.head.as_node("mark-node", "POST", "/v1/node/hello", msgspec.json.encode(hello), mark="mark-node")


def gang_brings(home):
    """A checkpoint and outputs of a node that shares no folder with the head."""
    gang = Submitted(name="gang", body={"run": ["sleep", "100000"], "gpus": 1})
    home.ledger.submit(gang)
    wait_until(lambda: home.head.job(gang.id)["state"] == "running", "the gang runs")
    content = b"mark-weights" * 50
    about, encoded = checkpoint(gang.id, 1, {"a.bin": content})
    home.head.as_node("n0", "PUT", f"/v1/node/checkpoints/manifest?{urlencode(about)}", encoded)
    where = urlencode({**about, "path": "a.bin", "offset": 0})
    home.head.as_node("n0", "PUT", f"/v1/node/checkpoints/file?{where}", content, mark="mark-weights")
    text = b"mark-output" * 50
    for path in ("c.txt", "sub/deep/c.txt"):
        where = urlencode({**place(gang, path), "offset": 0, "crc32": zlib.crc32(text), "size": len(text)})
        home.head.as_node("n0", "PUT", f"/v1/node/outputs/file?{where}", text, mark="mark-output")
    more = urlencode({**place(gang, "c.txt"), "offset": len(text), "more": "true"})
    home.head.as_node("n0", "PUT", f"/v1/node/outputs/file?{more}", b"mark-longer", mark="mark-longer")


def node_of(home, name):
    return next(node for node in home.head.nodes() if node["id"] == name)


def route_of(answer, routes):
    """The route that took a request, as in the table."""
    found = [
        path
        for path in routes
        if re.fullmatch(re.sub(r"\{[a-z0-9_]+\}", "[^/]+", path), answer.path) and answer.method.lower() in routes[path]
    ]
    return f"{answer.method} {min(found, key=lambda path: path.count('{'))}" if found else ""


def says_something(answer, route, seen, log):
    """A supervisor that has nothing new to say has nothing to make durable. `log`: part of the path of the database's log of commits."""
    if route == "POST /v1/node/streams":
        return "mark-said" in answer.text
    if route == "POST /v1/node/events":
        before = [event for other in seen.answered(route) if other.sent < answer.received for event in events_of(other)]
        return any(
            event not in before and changes_something(event, answer, seen.calls, log) for event in events_of(answer)
        )
    return True


def events_of(answer):
    """What a supervisor told."""
    return msgspec.json.decode(answer.text.partition("\r\n\r\n")[2].encode("latin-1"))["events"]


def changes_something(event, answer, calls, log):
    """That a member is ready, or has started, changes nothing any more in an attempt that is being stopped."""
    if event["kind"] not in ("MemberReady", "MemberStarted"):
        return True
    about = f'"job_id":"{event["body"]["job_id"]}","epoch":{event["body"]["epoch"]},'
    stopping = re.compile(f'"kind":"stopping","text":"[^"]*",{about}')
    return not any(log in call.on and call.ended < answer.sent and stopping.search(call.text) for call in calls)
