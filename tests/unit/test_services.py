"""Services at the edges: the keys of their files, the ports and probes of their nodes, the environment of their replicas."""

import http.server
import re
import socket
import threading
from dataclasses import replace

import pytest

from phalanx.core.ids import ServiceId
from phalanx.core.state.reports import ReadinessChanged
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.service_terms import ReplicaPosition, ServiceTerms
from phalanx.core.work.spec import LaunchMode
from phalanx.node.logic import member as members
from phalanx.node.logic.actions import SendEvent
from phalanx.node.logic.events import ReadinessProbed
from phalanx.node.logic.local_member import MemberPhase, StepClock
from phalanx.node.logic.variables.environment import MemberFolders, NodeContext, rank_environment
from phalanx.node.prepare.service_port import reserve_port
from phalanx.node.probes.link_probe import PORT_FIRST, PORT_LAST
from phalanx.node.probes.readiness import probe
from tests.scenario.supervisor_world import NODE, prepare, start

FILE = {"type": "service", "name": "web", "run": "serve"}


def terms(**keys):
    return spec_from_mapping({**FILE, **keys}, workdir="/w").service


# ---- the job file ---------------------------------------------------------------------------------------------------


def test_keys_of_a_service():
    found = terms(replicas="1..4", port=8000, ready="/health", ready_within="90s")
    assert found == ServiceTerms(replicas_min=1, replicas_max=4, port=8000, ready="/health", ready_within_s=90.0)
    assert terms() == ServiceTerms(replicas_min=1, replicas_max=1)
    assert terms(replicas=3).range_text == "3"
    assert terms(replicas=" 0 .. 2 ", port="auto", ready="TCP") == ServiceTerms(replicas_min=0, replicas_max=2)


def test_server_starts_once_on_a_node_and_is_not_preempted():
    spec = spec_from_mapping({**FILE, "gpus": 4}, workdir="/w")
    assert (spec.role.launch, spec.role.tasks_per_node) == (LaunchMode.FIXED, 1)
    assert not spec.preemptible
    assert spec_from_mapping({**FILE, "preemptible": True, "tasks_per_node": 2}, workdir="/w").preemptible


def test_job_says_nothing_of_services():
    assert spec_from_mapping({"run": "true", "type": "job"}, workdir="/w").service is None
    with pytest.raises(InvalidKey, match="only services have it") as refused:
        spec_from_mapping({"run": "true", "port": 80}, workdir="/w")
    assert refused.value.hint == "add type: service"


BAD = [
    ({"type": "deamon"}, "neither job nor service"),
    ({"replicas": "4..1"}, "replicas: '4..1' is not a number or range"),
    ({"replicas": 0}, "replicas: '0'"),
    ({"replicas": True}, "replicas: 'True'"),
    ({"replicas": "1..2000"}, "from 0 to 1000"),
    ({"replicas": "two"}, "replicas: 'two'"),
    ({"port": 70000}, "port: '70000' is not a port"),
    ({"port": 0}, "port: '0'"),
    ({"port": "9" * 30}, "is not a port"),
    ({"port": "٣"}, "is not a port"),
    ({"ready": "health"}, "ready: 'health' is not a path"),
    ({"ready": "/a b"}, "is not a path"),
    ({"ready": "/a\r\nHost: x"}, "is not a path"),
    ({"ready_within": "25h"}, "not between 0 and 24 hours"),
    ({"ready_within": "5"}, "5"),
    ({"name": "Web"}, "name: 'Web' is not a name for a service"),
    ({"name": "17"}, "name: '17'"),
    ({"name": "a" * 64}, "is not a name"),
    ({"array": "0-3"}, "array: a service has no array"),
    ({"time": "2h"}, "time: a service has no time"),
    ({"retry": 2}, "retry: a service has no retry"),
    ({"nodes": "2..4", "gpus_per_node": 1}, "fixed number of nodes"),
]


@pytest.mark.parametrize(("keys", "said"), BAD, ids=lambda one: str(one)[:30])
def test_wrong_keys_are_named(keys, said):
    with pytest.raises(InvalidKey, match=re.escape(said)) as refused:
        terms(**keys)
    assert refused.value.key in keys


# ---- ports and probes -----------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def test_preferred_port_is_given_once(listener):
    with socket.create_server(("", 0)) as free:
        wanted = free.getsockname()[1]
    first, second = reserve_port(wanted), reserve_port(wanted)
    try:
        assert first.number == wanted
        assert second.number != wanted, "reserved, although nothing listens there yet"
        assert PORT_FIRST <= second.number <= PORT_LAST
        taken = reserve_port(listener.getsockname()[1])
        taken.close()
        assert taken.number != listener.getsockname()[1]
    finally:
        first.close()
        second.close()
    again = reserve_port(wanted)
    again.close()
    assert again.number == wanted


STATUSES = {"/ok": 200, "/moved": 302, "/starting": 503}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/cut":
            return
        self.send_response(STATUSES.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_):
        pass


def test_probe_of_a_path_and_of_a_port(listener):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    port = server.server_port
    assert probe("127.0.0.1", port, "/ok") == ""
    assert probe("127.0.0.1", port, "/moved") == ""
    assert probe("127.0.0.1", port, "/starting") == "GET /starting answered 503"
    assert probe("127.0.0.1", port, "tcp") == ""
    assert "127.0.0.1" in probe("127.0.0.1", port, "/cut")
    server.shutdown()
    server.server_close()
    assert "Connection refused" in probe("127.0.0.1", port, "tcp")
    assert "Connection refused" in probe("127.0.0.1", port, "/ok")


# ---- the supervisor -------------------------------------------------------------------------------------------------


def replica_prepare():
    order = prepare(replica=ReplicaPosition(service=ServiceId("web"), revision=3))
    return replace(order, spec=replace(order.spec, env=(("PORT", "80"),)))


def test_replica_gets_its_port_and_place():
    order = replica_prepare()
    node = NodeContext(
        base={}, devices=("g0", "g1"), virtual=True, folders=MemberFolders(hostfile="h", page="p", reports="r")
    )
    variables, notes = rank_environment(
        order, replace(start(), service_port=21_234), order.allocation.grants[0], 0, node
    )
    ours = {name: variables[name] for name in ("PORT", "PHALANX_PORT", "PHALANX_SERVICE", "PHALANX_REVISION")}
    assert ours == {
        "PORT": "21234",
        "PHALANX_PORT": "21234",
        "PHALANX_SERVICE": "web",
        "PHALANX_REVISION": "3",
    }
    assert notes == ["env: PORT is set by Phalanx; the job's value is not used"]


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"phase": MemberPhase.RUNNING}, True),
        ({"phase": MemberPhase.STARTING}, False),
        ({"phase": MemberPhase.RUNNING, "superseded": True}, False),
        ({"phase": MemberPhase.STOPPING, "stop_requested_ns": 5}, False),
    ],
)
def test_readiness_is_reported_while_the_replica_runs_and_nobody_stops_it(fields, reported):
    order = replica_prepare()
    member, _ = members.begin(order, order.allocation.grants[0], StepClock(ns=1, unix_s=1.0))
    happened = ReadinessProbed(key=member.key, ready=False, why="refused \udcff")
    _, actions = members.on_readiness(replace(member, **fields), happened)
    told = [one for one in actions if isinstance(one, SendEvent)]
    assert len(told) == len(actions)
    expected = ReadinessChanged(
        job_id=order.job_id, epoch=order.epoch, generation=order.generation, node_id=NODE, ready=False, why="refused ?"
    )
    assert [one.event for one in told] == ([expected] if reported else [])
