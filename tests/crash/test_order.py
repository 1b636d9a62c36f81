"""What a head acknowledges is on its disk before: shown by the order of its system calls, for every request that changes something.

The head is real and strace looks on; the judge is `syscalls`, whose own tests plant wrong orders.
"""

import pytest

from benchmarks.cluster import free_port
from phalanx.api.app import _RESOURCES
from tests.crash.homes import Home
from tests.crash.scene import looked_at, says_something, why_not
from tests.crash.syscalls import out_of_order

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "strace is here"),
]
WAL = "/phalanx.db-wal"
# What is kept in a file and not in the database, by part of its path.
IN_FILES = {
    "PUT /v1/blobs/{sha256}": "/blobs/",
    "PUT /v1/node/checkpoints/file": "/checkpoints/",
    "PUT /v1/node/outputs/file": "/outputs/",
    "POST /v1/node/streams": "/logs/",
    "POST /v1/join/renew": "/join_salt.json.new",
    "POST /v1/stop": "/planned_stop.json.new",
}
# What changes nothing that has to outlive the head; each with its reason.
PASSING = {
    "POST /v1/jobs/dry-run": "nothing is kept",
    "POST /v1/plan": "nothing is kept",
    "POST /v1/what-if": "nothing is kept",
    "POST /v1/queues/parse": "nothing is kept",
    "POST /v1/channels/{name}/test": "sends a message, which needs a service that receives it",
    "PUT /v1/nodes/{node_id}/power": "virtual devices have no power limit; it waits for the same request as a drain",
    "DELETE /v1/nodes/{node_id}/power": "the same",
    "POST /v1/gateways/{gateway_id}/demand": "gateways repeat it every second",
    "POST /v1/node/lease": "leases live in memory; a head that starts presumes each of them",
    "POST /v1/node/samples": "telemetry",
    "POST /v1/gateways/load": "figures live in memory; gateways repeat theirs each second",
    "POST /v1/node/data": "addresses live in memory; nodes repeat theirs every few seconds",
    "POST /v1/node/exec/{session_name}/output": "a session ends with the head",
    "WEBSOCKET /v1/jobs/{job_id}/exec": "a session ends with the head",
    "POST /login/{port}/{challenge}/{state}": "a one-time code lives in memory for a minute",
    "POST /device": "only looks for a code",
    "POST /device/{code}": "a waiting login ends with the head",
    "POST /v1/login/device": "a waiting login ends with the head; a provider's code is sealed, and kept nowhere",
    "POST /v1/login/device/token": "needs a provider; it waits for the same request as POST /v1/tokens",
    "POST /v1/login/token": "needs a browser; it waits for the same request as POST /v1/tokens",
    "POST /v1/sign-in/check": "only reads what the provider says about itself",
    "POST /v1/dashboard/link": "a one-time code lives in memory for a minute",
    "POST /sign-in": "a browser's session ends with the head",
    "POST /sign-out": "a browser's session lives in memory; a head that starts knows none",
    "POST /v1/join": "answers with a token derived from the head's secret; the node is kept when it says hello",
    "PUT /v1/node/checkpoints/manifest": "only the last piece of the last file is acknowledged as durable",
    "DELETE /v1/node/outputs/file": "the node asks again at each attempt until the file is gone",
}
CHANGING = [
    f"{method} {route.path}"
    for resource in _RESOURCES
    for route in resource.routes.declared
    for method in sorted(route.methods - {"GET", "HEAD"})
]
# What each route makes durable, by part of the path of the file that holds it.
DURABLE = {route: IN_FILES.get(route, WAL) for route in CHANGING if route not in PASSING}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    home = Home.make(words=("--listen", f"127.0.0.2:{free_port()}"))
    try:
        yield looked_at(home, str(tmp_path_factory.mktemp("look")))
    finally:
        home.close()


def test_each_exception_is_a_route():
    assert IN_FILES.keys() | PASSING.keys() <= set(CHANGING)


@pytest.mark.parametrize("route", DURABLE)
def test_it_is_on_the_disk_before_the_answer_goes_out(seen, route):
    told = [answer for answer in seen.answered(route) if says_something(answer, route, seen, WAL)]
    assert told, f"nothing was answered by {route}"
    assert [out_of_order(answer, seen.calls, DURABLE[route], seen.there) for answer in told] == [""] * len(told)
