"""Failure rules over HTTP: everyone reads those in force, operators put their own, and the head refuses what cannot be."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.planner.facts.failure_rules import shipped_rules
from tests.contract.api_head import ApiHead, code

SPOT = {"name": "spot", "codes": [117], "blame": "preempted", "remedy": "elsewhere", "says": "the spot market took it"}


def own(reply):
    return [rule["name"] for rule in reply.json()["rules"] if rule["own"]]


def test_shipped_rules_are_there_for_everyone_with_their_sources(call):
    reply = call("viewer", "GET", "/v1/rules").json()
    assert [rule["name"] for rule in reply["rules"]] == [rule.name for rule in shipped_rules()]
    assert all(rule["source"] for rule in reply["rules"])


def test_operators_rules_go_first_and_outlive_the_head(head, call, tmp_path):
    reply = call("operator", "PUT", "/v1/rules", {"rules": [SPOT]})
    assert (own(reply), reply.json()["by"]) == (["spot"], "opal")
    again = ApiHead(str(tmp_path / "again"), store=head.store)
    try:
        with again.calling() as later:
            kept = later("viewer", "GET", "/v1/rules").json()
    finally:
        again.close()
    assert kept["rules"][0] == {**kept["rules"][0], **SPOT, "own": True}


def test_empty_list_leaves_the_shipped_ones(call):
    call("operator", "PUT", "/v1/rules", {"rules": [SPOT]})
    assert own(call("operator", "PUT", "/v1/rules", {"rules": []})) == []


def test_dry_run_changes_nothing(call):
    assert own(call("operator", "PUT", "/v1/rules", {"rules": [SPOT], "dry_run": True})) == ["spot"]
    assert own(call("operator", "GET", "/v1/rules")) == []


def test_profile_and_rules_do_not_stand_in_each_others_place(call):
    call("operator", "PUT", "/v1/rules", {"rules": [SPOT]})
    assert call("viewer", "GET", "/v1/profile").json()["profile"] is None


def test_users_may_not_put_rules(call):
    assert code(call("user", "PUT", "/v1/rules", {"rules": [SPOT]})) == (403, "not_permitted")


@pytest.mark.parametrize(
    "body",
    [
        {"rules": [{**SPOT, "remdy": "here"}]},
        {"rules": [{**SPOT, "blame": "usr"}]},
        {"rules": [SPOT, SPOT]},
        {"rules": {}},
        {"rule": []},
        {"rules": [{**SPOT, "weight": 1e99}]},
        {"rules": [{**SPOT, "codes": [10**30]}]},
    ],
)
def test_rules_that_cannot_be_are_refused_whole(call, body):
    assert call("operator", "PUT", "/v1/rules", body).status_code == 400
    assert own(call("viewer", "GET", "/v1/rules")) == []
