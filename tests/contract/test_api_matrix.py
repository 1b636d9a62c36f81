"""Every route x every role: who gets in is what core.access.roles says, and nothing else."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.api.app import build_app
from phalanx.api.routes import Declared, GatedRoute, Routes, Shown, check_every_route_is_gated
from phalanx.core.access.roles import Caller, may
from phalanx.core.work.people import Action, UserRole
from tests.contract.api_head import PEOPLE, ApiHead, Supervisor

ROLES = [None, *PEOPLE, "node:n0", "never issued"]
STREAMS = {
    "job_events",
    "all_events",
    "stop_head",
}  # asked with what they refuse below: one never ends, the other ends the head


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    head = ApiHead(str(tmp_path_factory.mktemp("home")))
    with head.calling() as call:
        Supervisor(call).hello()
        job_id = call.submit()
        yield head, call, job_id
    head.close()


@pytest.fixture(scope="module")
def every_route(bench):
    return [(route, method) for route in bench[0].app.router.routes for method in sorted(route.methods)]


def ask(bench, route, method, role):
    _, call, job_id = bench
    names = {
        "job_id": job_id, "node_id": "n9", "user_id": "nobody", "project_id": "none", "queue_id": "none", "token_id": "none",
        "reservation_id": "none", "sha256": "0" * 64, "session_name": "none",
    }  # fmt: skip
    path = route.path.format(**names)
    if route.name in ("job_events", "all_events"):
        return call(role, method, path, headers={"last-event-id": "no seq"})
    # An odd body: past the gate it is refused as what it is, and changes nothing.
    content = b"[]" if route.declared.body is not Shown.NOTHING else b""
    return call(role, method, path, content=content)


def allowed(role, route):
    if route.declared.open_to_all:
        return True
    if role in (None, "never issued"):
        return False
    kind = UserRole.NODE if role.startswith("node:") else PEOPLE[role][1]
    return may(Caller(user="x", role=kind, token_id="t"), route.declared.action)


def own_job(route):
    return "{job_id}" in route.path and route.declared.action in (Action.CHANGE_OWN, Action.SEE_OUTPUT)


def test_every_route_lets_in_whom_the_roles_say(bench, every_route):
    wrong = []
    for route, method in every_route:
        # "ada" would end her own job here, which other rows need: the operator's row proves the same.
        roles = [role for role in ROLES if not (role == "user" and own_job(route))]
        for role in roles:
            status = ask(bench, route, method, role).status_code
            if not allowed(role, route):
                expected = status == (401 if role in (None, "never issued") else 403)
            elif role == "other" and own_job(route):
                expected = status == 403  # it is ada's
            else:
                expected = status not in (401, 403, 500)
            if not expected:
                wrong.append((method, route.path, role, status))
    assert wrong == []


def test_there_are_routes_for_all_that_the_contract_names(every_route):
    offered = {(method, route.path) for route, method in every_route}
    job = "/v1/jobs/{job_id}"
    promised = {
        ("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", job), ("PATCH", job), ("GET", f"{job}/story"), ("GET", f"{job}/logs"),
        *(("POST", f"{job}/{verb}") for verb in ("cancel", "hold", "release", "requeue", "exec")),
        *(("GET", f"{job}/{noun}") for noun in ("events", "steps", "receipt", "files", "files/archive")),
        ("GET", "/v1/nodes"), ("DELETE", "/v1/nodes/{node_id}"), ("GET", "/v1/me"), ("GET", "/v1/overview"), ("GET", "/metrics"),
        ("POST", "/v1/stop"), ("GET", "/v1/health"), ("GET", "/v1/events"), ("POST", "/v1/tokens"), ("GET", "/v1/openapi.json"),
        *(("POST", f"/v1/node/{word}") for word in ("hello", "lease", "events", "streams", "samples")),
        ("GET", "/v1/node/commands"), ("GET", "/v1/node/blobs/{sha256}"), ("GET", "/v1/node/exec/{session_name}/input"),
    }  # fmt: skip
    assert promised - offered == set()


def test_only_health_and_the_public_certificate_are_open(every_route):
    assert [route.path for route, _ in every_route if route.declared.open_to_all] == ["/v1/health", "/v1/ca"]


def test_node_tokens_reach_the_supervisors_channel_and_the_way_in_alone(every_route):
    assert [route.path for route, _ in every_route if route.declared.action is Action.JOIN] == ["/v1/join"]
    for route, _ in every_route:
        assert (route.declared.action is Action.SUPERVISE) == route.path.startswith("/v1/node/")


def test_app_with_a_route_without_action_is_refused(tmp_path):
    head = ApiHead(str(tmp_path))
    app = build_app(head.parts)
    app.get("/v1/forgotten")(lambda: None)
    with pytest.raises(TypeError, match="/v1/forgotten declares no action"):
        check_every_route_is_gated(app)
    head.close()


def test_app_with_another_open_route_is_refused(tmp_path):
    async def peek(request):
        raise AssertionError(request)

    head = ApiHead(str(tmp_path))
    app = build_app(head.parts)
    routes = Routes()
    routes.add("GET", "/v1/peek", Declared(action=Action.SEE, open_to_all=True))(peek)
    app.router.routes.extend(routes.declared)
    with pytest.raises(TypeError, match="open to all"):
        check_every_route_is_gated(app)
    head.close()


def test_description_names_action_bodies_and_refusals_of_every_route(bench, every_route):
    _, call, _ = bench
    document = call("viewer", "GET", "/v1/openapi.json").json()
    for route, method in every_route:
        assert isinstance(route, GatedRoute)
        operation = document["paths"][route.path][method.lower()]
        assert operation["x-phalanx-action"] == route.declared.action
        assert operation["summary"], route.path
        assert ("requestBody" in operation) == (route.declared.body is not Shown.NOTHING)
        reply = operation["responses"][str(route.declared.status)]
        assert ("content" in reply) == (route.declared.reply is not Shown.NOTHING)
        assert "403" in operation["responses"]
    names = set(document["components"]["schemas"])
    assert {"JobView", "ErrorReply", "HelloRequest", "Overview", "Receipt", "StoryLine"} <= names
    assert all(ref in names for ref in references(document))


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner.rsplit("/", 1)[1]
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
