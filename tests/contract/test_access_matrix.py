"""Every route x everybody who may call x whose thing it is: what is answered is what the table says, and what is refused does nothing."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import os
from pathlib import Path

import pytest

from phalanx.api import runtime
from phalanx.api.auth.access_matrix import gated_routes, render_page
from phalanx.controller.driver import ControllerDriver
from phalanx.controller.requests.registry import HANDLERS
from phalanx.core.access.rules import AccessDecision, AccessScope, CallerRelation
from phalanx.core.state.events import CancelAllJobs, PreparePlannedStop
from tests.contract.access_bench import CALLS, OTHER_SUPERVISOR, ROLES, STRANGERS, Bench, send, token_id
from tests.contract.access_specimens import SPECIMENS, Case
from tests.effort import size

# After a stop that was let in by mistake nothing works; after the renewal the join token is none.
LAST = {"POST /v1/stop": 1, "POST /v1/join/renew": 2}
pytestmark = pytest.mark.timeout(600)  # two thousand calls: 20 s on a quiet machine
ADMIN = next(who for who in ROLES if who.title == "admin")
EVERY = size(5, 1)  # one caller of so many for each route
PAGE = Path(__file__).resolve().parents[2] / "docs" / "access-matrix.md"


# Routes whose specimen has several bodies by turns: each is sent.
BODIES = {"PATCH /v1/services/{service_id}": 3}
# (route, type of the request that it sends to the controller). The bench's stop is refused before it sends any.
SENT: set[tuple[str, type]] = {("POST /v1/stop", CancelAllJobs), ("POST /v1/stop", PreparePlannedStop)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(str(tmp_path_factory.mktemp("home")))
    post = ControllerDriver._post

    def recorded(driver, events, calls=(), **terms):
        SENT.update((call.action, type(event)) for event, call in zip(events, calls, strict=False))
        return post(driver, events, calls, **terms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControllerDriver, "_post", recorded)
        patch.setattr(runtime, "UPKEEP_S", 1e6)  # what is written down every minute is no call's doing
        with bench.head.calling() as call:
            bench.open(call)
            yield bench
    bench.head.close()


@pytest.fixture(scope="module")
def routes(bench):
    return [
        (f"{method} {route.path}", method, route)
        for route in gated_routes(bench.head.app)
        for method in sorted(route.methods)
    ]


def expected(route, who, tie):
    if route.declared.open_to_all:
        return AccessDecision.ALLOWED
    return AccessDecision.NOT_SIGNED_IN if who.refused else who.column.judge(route, tie)


def test_every_route_has_a_call_of_its_own(routes):
    assert {name for name, _, _ in routes} == set(SPECIMENS)


def test_every_call_is_answered_as_the_table_says_and_a_refused_one_does_nothing(bench, routes):
    wrong, refused, allowed = [], 0, 0
    for turn, (name, method, route) in enumerate(sorted(routes, key=lambda one: LAST.get(one[0], 0))):
        asks = (
            CALLS
            if route.scope is not AccessScope.UNOWNED
            else [one for one in CALLS if one[1] is not CallerRelation.SAME_PROJECT]
        )
        # In turn another share of the callers, so that a few routes meet all of them.
        asks = [*asks[turn % EVERY :: EVERY], *[(ADMIN, CallerRelation.OWN)] * BODIES.get(name, 1)]
        # What is refused first: afterwards nothing moves that an allowed call has set going.
        for who, tie in asks:
            if expected(route, who, tie) is not AccessDecision.ALLOWED:
                refused += 1
                wrong += refusal(bench, name, method, route, who, tie)
        for who, tie in asks:
            if expected(route, who, tie) is AccessDecision.ALLOWED:
                allowed += 1
                wrong += admission(bench, name, method, route, who, tie)
        bench.settle()
    print(f"{refused} refused calls, {allowed} allowed, {len(routes)} routes")
    wrong += disagreements(routes)
    assert not wrong, "\n".join(map(str, wrong))
    assert refused > 900 // EVERY
    assert allowed > 400 // EVERY


def disagreements(routes):
    """Where a route demands another action than the request that it sends, or a request names an action and no route sends it."""
    actions = {name: route.declared.action for name, _, route in routes}
    sent = {(name, request) for name, request in SENT if name in actions}
    for name, request in sent:
        if actions[name] is not HANDLERS[request].action:
            yield name, actions[name], request.__name__, HANDLERS[request].action
    named = {request for request, handler in HANDLERS.items() if handler.action is not None}
    for request in named - {request for _, request in sent}:
        yield request.__name__, "sent by no route"


def refusal(bench, name, method, route, who, tie):
    """What is wrong with a refused call: its answer, or that anything is other than before."""
    asked = SPECIMENS[name](Case(bench, who, tie, fresh=False))
    bench.rest()  # to make what is asked about may have set something going
    before = bench.state()
    reply = send(bench.call, who, method, asked.path, json=asked.json, content=asked.content)
    bench.rest()
    after, where, wanted = bench.state(), (name, who.title, str(tie), reply.status_code), expected(route, who, tie)
    if str(reply.status_code) != wanted:
        yield (*where, f"expected {wanted}")
    if after != before:
        yield (*where, "changed", [key for key in before if before[key] != after[key]])
    # Whom a supervisor speaks for, and which jobs are to end, stands in the body: there alone it is read before the refusal.
    in_body = route.scope is AccessScope.NODE or name == "POST /v1/jobs/cancel"
    if method in ("POST", "PUT", "PATCH") and not in_body:
        garbled = send(bench.call, who, method, asked.path, content=b"{ this is no body")
        if garbled.status_code != reply.status_code:
            yield (*where, "the body was looked at first", garbled.status_code)


def admission(bench, name, method, route, who, tie):
    """What is wrong with an allowed call: its answer, or its line in the audit trail."""
    asked = SPECIMENS[name](Case(bench, who, tie, fresh=route.audited))
    tip = bench.head.driver.audit_tip.seq
    reply = send(bench.call, who, method, asked.path, json=asked.json, content=asked.content)
    if reply.status_code not in asked.ok:
        yield (name, who.title, str(tie), reply.status_code, reply.text[:200], f"expected {asked.ok}")
    told = [(line.action, line.user, line.token_id) for line in bench.head.store.audit(after=tip)]
    line = (f"{method} {route.path}", *told_as(who))
    if (line in told) != route.audited and reply.status_code < 300:
        yield (name, who.title, str(tie), "audit", told, line)


def told_as(who):
    """User and token, as the audit trail tells them."""
    node = {"supervisor": "node:n0", "supervisor of another node": "node:n1"}.get(who.title)
    return (
        (node, node) if node else ("joining", "join") if who.title == "join token" else (who.name, token_id(who.secret))
    )


def test_the_page_says_what_the_table_says(bench):
    text = render_page(bench.head.app)
    if os.environ.get("PHALANX_GOLDEN") == "write":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_everybody_is_asked():
    titles = {who.title for who, _ in CALLS}
    assert titles >= {*(who.title for who in ROLES), *(who.title for who in STRANGERS), OTHER_SUPERVISOR.title}
