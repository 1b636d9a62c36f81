"""Limits on requests to services at the head: who may set them, who shares them, and what gateways get of them."""

# mypy: disable-error-code="arg-type"

import pytest

from phalanx.api.live.gateway_demands import SETTLING_S, GatewayDemands
from phalanx.core.state.events import PutProject
from phalanx.core.state.records import SERVICE_USE_HOURS
from phalanx.core.work.queue import Project
from tests.contract.api_head import code


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


def test_only_admins_limit_projects_and_gateways_get_the_limits_with_the_list(head, call):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}), admins=frozenset({"ada"}))))
    limits = {"requests_per_minute": "60", "tokens_per_minute": "200k", "request_weight": "2.5"}
    assert code(call("user", "PUT", "/v1/projects/nlp", {"tokens_per_minute": "none"})) == (403, "not_permitted")
    shown = call("admin", "PUT", "/v1/projects/nlp", limits).json()["project"]
    expected = {"requests_per_minute": 60, "tokens_per_minute": 200_000}
    assert {name: shown[name] for name in expected} == expected
    call("admin", "PUT", "/v1/projects/nlp", {"requests_per_minute": "none"})
    terms = {one["project"]: one for one in call("viewer", "GET", "/v1/services").json()["projects"]}
    assert terms["nlp"] == {
        "project": "nlp",
        "open": False,
        "requests_per_minute": 0,
        "tokens_per_minute": 200_000,
        "weight": 2.5,
    }
    for wrong in ({"requests_per_minute": "0"}, {"tokens_per_minute": "1e9"}, {"request_weight": "nan"}):
        assert code(call("admin", "PUT", "/v1/projects/nlp", wrong)) == (400, "bad_request")


def test_only_admins_set_the_burst_rule_of_a_project(head, call):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}), admins=frozenset({"ada"}))))
    rule = "when wait > 2h and price < 40"
    assert code(call("user", "PUT", "/v1/projects/nlp", {"burst": rule})) == (403, "not_permitted")
    assert code(call("admin", "PUT", "/v1/projects/nlp", {"burst": "when idle"})) == (400, "bad_request")
    for given, shown in ((rule, rule), (None, rule), ("none", "")):
        assert call("admin", "PUT", "/v1/projects/nlp", {"burst": given}).json()["project"]["burst"] == shown


def test_tokens_made_with_a_limited_one_share_its_limits(call):
    made = call("user", "POST", "/v1/tokens", {"requests_per_minute": "6"}).json()
    assert (made["token"]["requests_per_minute"], made["token"]["limited_as"]) == (6, None)
    derived = call(made["secret"], "POST", "/v1/tokens", {}).json()
    third = call(derived["secret"], "POST", "/v1/tokens", {}).json()["token"]
    assert (third["requests_per_minute"], third["limited_as"]) == (6, made["token"]["id"])
    me = call(derived["secret"], "GET", "/v1/me").json()
    assert (me["requests_per_minute"], me["limited_as"]) == (6, made["token"]["id"])
    wider = call(derived["secret"], "POST", "/v1/tokens", {"requests_per_minute": "600"})
    assert code(wider) == (400, "bad_request")


def test_gateways_report_their_demand_and_get_shares(head, call):
    head.app.state.runtime.gateway_demands = GatewayDemands(began_s=-SETTLING_S)
    body = {"demand": {"project nlp": 90.0}}
    call("operator", "POST", "/v1/gateways/a/demand", body)
    found = call("operator", "POST", "/v1/gateways/b/demand", {}).json()
    assert found == {"gateways": 2, "even": 0.5, "shares": {"project nlp": pytest.approx(0.05)}}
    assert code(call("user", "POST", "/v1/gateways/a/demand", body)) == (403, "not_permitted")
    wrong = {"demand": {"project nlp": -1.0}}
    assert call("operator", "POST", "/v1/gateways/a/demand", wrong).status_code in (400, 422)


def test_reports_of_use_are_counted_once_and_make_the_bill(head, call):
    now_s = int(head.clock.now_s())
    hour = str(now_s - now_s % 3600)
    use = {
        "service": "chat",
        "project": "nlp",
        "user": "ada",
        "requests": 2,
        "prompt_tokens": 900,
        "answer_tokens": 100,
    }
    body = {
        "sequence": 1,
        "hours": [{"id": hour, "uses": [use], "replicas": [{"service": "chat", "job": "1", "busy": 5}]}],
    }
    path = "/v1/gateways/a/usage"
    assert call("operator", "POST", path, body).json() == {"sequence": 1, "ignored": 0}
    assert call("operator", "POST", path, body).json() == {"sequence": 1, "ignored": 0}
    other = {**body, "sequence": 7}
    assert call("operator", "POST", "/v1/gateways/b/usage", other).json()["sequence"] == 7
    old = {"sequence": 2, "hours": [{"id": "7200", "uses": [use]}]}
    assert call("operator", "POST", path, old).json() == {"sequence": 2, "ignored": 1}
    stored = head.store.record(SERVICE_USE_HOURS, hour)
    assert [(one.requests, one.prompt_tokens) for one in stored.uses] == [(4, 1800)]
    assert head.store.record(SERVICE_USE_HOURS, "7200") is None
    for wrong in ({**use, "requests": -1}, {**use, "user": "x" * 300}):
        refused = call("operator", "POST", path, {"sequence": 3, "hours": [{"id": hour, "uses": [wrong]}]})
        assert code(refused) == (400, "bad_request")
    assert code(call("operator", "POST", path, {"sequence": 3, "hours": [{"id": "1", "uses": []}]})) == (
        400,
        "bad_request",
    )
    assert code(call("user", "POST", path, body)) == (403, "not_permitted")
