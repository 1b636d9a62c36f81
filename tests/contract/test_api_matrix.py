"""What every route says of itself. Who may call it, and on whose things, is asked in test_access_matrix."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.api.app import build_app
from phalanx.api.http.routing import (
    AuthorizedRoute,
    AuthorizedWebSocketRoute,
    MediaType,
    RouteDeclaration,
    RouteTable,
    check_every_route_is_authorized,
)
from phalanx.core.work.users import Action
from tests.contract.api_head import ApiHead, Supervisor


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


def test_there_are_routes_for_all_that_the_contract_names(every_route):
    offered = {(method, route.path) for route, method in every_route}
    job = "/v1/jobs/{job_id}"
    promised = {
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs"),
        ("GET", job),
        ("PATCH", job),
        ("GET", f"{job}/story"),
        ("GET", f"{job}/logs"),
        *(("POST", f"{job}/{verb}") for verb in ("cancel", "hold", "release", "park", "resume", "requeue")),
        ("WEBSOCKET", f"{job}/exec"),
        *(("GET", f"{job}/{noun}") for noun in ("events", "steps", "receipt", "usage", "files", "files/archive")),
        ("GET", "/v1/nodes"),
        ("DELETE", "/v1/nodes/{node_id}"),
        ("GET", "/v1/me"),
        ("GET", "/v1/overview"),
        ("GET", "/metrics"),
        ("POST", "/v1/stop"),
        ("GET", "/v1/health"),
        ("GET", "/v1/events"),
        ("POST", "/v1/tokens"),
        ("GET", "/v1/openapi.json"),
        *(("POST", f"/v1/node/{word}") for word in ("hello", "lease", "events", "streams", "samples")),
        ("GET", "/v1/node/commands"),
        ("GET", "/v1/node/blobs/{sha256}"),
        ("GET", "/v1/node/exec/{session_name}/input"),
    }
    assert promised - offered == set()


def test_only_health_the_public_certificate_and_the_sign_in_are_open(every_route):
    opened = {(method, route.path) for route, method in every_route if route.declared.open_to_all}
    assert opened == {
        ("GET", "/v1/health"),
        ("GET", "/v1/ca"),
        ("GET", "/"),
        ("GET", "/sign-in"),
        ("POST", "/sign-in"),
        ("GET", "/sign-in/provider"),
        ("GET", "/sign-in/return"),
        ("GET", "/sign-in/finish"),
        ("POST", "/login/{port}/{challenge}/{state}"),
        ("POST", "/v1/login/device"),
        ("POST", "/v1/login/device/token"),
        ("POST", "/v1/login/token"),
        ("POST", "/device"),
        ("POST", "/device/{code}"),
        ("POST", "/sign-out"),
        ("GET", "/web/{version}/{name:path}"),
    }


def test_node_tokens_reach_the_supervisors_channel_and_the_way_in_alone(every_route):
    joining = {(method, route.path) for route, method in every_route if route.declared.action is Action.JOIN}
    order = {("GET", "/v1/join/order"), ("POST", "/v1/join/order")}  # whether the machine is wanted, and that it leaves
    assert joining == {("POST", "/v1/join"), ("GET", "/v1/join/files"), *order}
    for route, _ in every_route:
        assert (route.declared.action is Action.SUPERVISE) == route.path.startswith("/v1/node/")


def test_app_with_a_route_without_action_is_refused(tmp_path):
    head = ApiHead(str(tmp_path))
    app = build_app(head.parts)
    app.get("/v1/forgotten")(lambda: None)
    with pytest.raises(TypeError, match="/v1/forgotten declares no action"):
        check_every_route_is_authorized(app)
    head.close()


def test_app_with_another_open_route_is_refused(tmp_path):
    async def peek(request):
        raise AssertionError(request)

    head = ApiHead(str(tmp_path))
    app = build_app(head.parts)
    routes = RouteTable()
    routes.add("GET", "/v1/peek", RouteDeclaration(action=Action.VIEW, open_to_all=True))(peek)
    app.router.routes.extend(routes.declared)
    with pytest.raises(TypeError, match="open to all"):
        check_every_route_is_authorized(app)
    head.close()


def test_description_names_action_bodies_and_refusals_of_every_route(bench, every_route):
    _, call, _ = bench
    document = call("viewer", "GET", "/v1/openapi.json").json()
    for route, method in every_route:
        if isinstance(route, AuthorizedWebSocketRoute):
            continue  # OpenAPI has no words for it: docs/api.md
        assert isinstance(route, AuthorizedRoute)
        if route.declared.reply in (MediaType.HTML, MediaType.ASSET):
            assert route.path not in document["paths"]  # a page is for people
            continue
        operation = document["paths"][route.path][method.lower()]
        assert operation["x-phalanx-action"] == route.declared.action
        assert operation["summary"], route.path
        assert ("requestBody" in operation) == (route.declared.body is not MediaType.NOTHING)
        reply = operation["responses"][str(route.declared.status)]
        assert ("content" in reply) == (route.declared.reply is not MediaType.NOTHING)
        assert "403" in operation["responses"]
    names = set(document["components"]["schemas"])
    assert {"JobView", "ErrorReply", "HelloRequest", "Overview", "UsageSummary", "HistoryLine"} <= names
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
