"""Hostile requests against a real head (10,000 in `make prove`); and that the campaign would see a fault if there were one."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import os
from types import SimpleNamespace

import pytest

from tests import effort
from tests.contract.api_head import TOKENS, ApiHead, bearer
from tests.hostile.asked import NOBODY, Asked
from tests.hostile.campaign import GROWTH_MIB_PER_10K, Campaign, Shapes
from tests.hostile.good import good_requests
from tests.hostile.head import ADMIN, SUPERVISING, Served, serving
from tests.hostile.line import Answer

# 10,000 are too few to judge growth by: one valid profile of 400 kB costs 13 MiB once, and a slope over 6,000 requests makes 37 of it.
INPUTS = effort.size(200, 30_000)
SEED = 20261121  # the same commit gives the same requests; `python -m tests.hostile --seed N` asks others


@pytest.mark.serial
@pytest.mark.timeout(900)
def test_hostile_requests_find_no_fault_nothing_slow_and_no_growth():
    with serving() as served:
        diagnosis = Campaign(served, inputs=INPUTS, seed=SEED).run()
    print(diagnosis.told())
    assert diagnosis.inputs == sum(diagnosis.by_source.values()) == INPUTS
    assert diagnosis.failures == []
    assert diagnosis.by_status[200] > INPUTS // 20, "hardly any request was accepted"
    if effort.FULL:  # fewer inputs reach fewer operations, and show no growth
        assert diagnosis.growth_mib_per_10k <= GROWTH_MIB_PER_10K
        assert diagnosis.operations_reached >= 75, "operations were left out"


@pytest.mark.timeout(600)
def test_every_number_at_every_edge_is_taken_or_refused():
    with serving() as served:
        diagnosis = Campaign(served, inputs=0, seed=0).at_edges()
        assert served.faults() == []
    assert diagnosis.failures == []
    assert sum(diagnosis.by_status.values()) > 1000
    assert diagnosis.by_status[200] > 50, "hardly anything got past the door"


@pytest.fixture
def description(tmp_path):
    head = ApiHead(str(tmp_path))
    with head.calling() as call:
        yield call("admin", "GET", "/v1/openapi.json").json()
    head.close()


def test_every_route_has_a_good_request(description):
    good = good_requests("1", 1)
    told = {told["operationId"]: told for methods in description["paths"].values() for told in methods.values()}
    lacking = [
        name
        for name, operation in told.items()
        if name not in good
        and ("requestBody" in operation or any(each["in"] == "query" for each in operation.get("parameters", ())))
    ]
    assert lacking == [], "add them to tests/hostile/good.py"
    assert set(good) - set(told) == set()


@pytest.mark.timeout(600)
def test_good_requests_are_taken():
    refused = {}
    with serving() as served:
        campaign = Campaign(served, inputs=0, seed=0)
        for operation, asked in campaign.good():
            answer = campaign.ask(asked)
            if answer.status >= 300:
                refused[operation.id] = answer.status
    # Only what contradicts the state of the played world: a running job is not held, its node not forgotten, nobody may join here, and
    # a session ends with its attempt, which an earlier request has stopped; virtual devices have no power limit, no service listens
    # where the channel leads, and no month is archived; no provider answers at the address of the sign-in, nobody has begun a login there,
    # and its groups are the only members of a project. A user who is drawn is no admin of the project, and an attempt that has ended gets no secrets.
    # The head has no credentials of a cloud.
    may_be = {
        "update_job",
        "hold_job",
        "resume_job",
        "remove_node",
        "show_ca",
        "join",
        "download_machine_files",
        "renew_join_line",
        "download_output_file",
        "archive_files",
        "fetch_exec_input",
        "fetch_secrets",
        "put_project_secret",
        "remove_project_secret",
        "receive_exec_output",
        "cap_node_power",
        "test_channel",
        "list_archived_jobs",
        "check_cloud",
        "show_node_console",
        "check_sign_in",
        "start_device_login",
        "finish_device_login",
        "finish_browser_login",
        "remove_sign_in",
    }
    assert set(refused) <= may_be, refused
    assert 500 not in refused.values()


@pytest.mark.timeout(600)
def test_a_planted_fault_is_found_and_told_with_a_line_that_repeats_it(tmp_path, monkeypatch):
    head = ApiHead(str(tmp_path))
    (tmp_path / "head.log").touch()
    monkeypatch.setattr("phalanx.api.routes.profile.stored_profile", lambda parts: 1 / 0)
    with head.served() as url:
        tokens = {role: bearer(role)["authorization"].split()[1] for role in TOKENS}
        served = Served(
            home=str(tmp_path),
            process=SimpleNamespace(pid=os.getpid(), poll=lambda: None),
            port=int(url.rsplit(":", 1)[1]),
            tokens={
                **tokens,
                ADMIN: tokens["admin"],
                SUPERVISING: bearer("node:n0")["authorization"].split()[1],
                NOBODY: "",
            },
        )
        diagnosis = Campaign(served, inputs=300, seed=3).run()
    head.close()
    found = [failure for failure in diagnosis.failures if "show_profile" in failure]
    assert found
    assert "500" in found[0]
    assert "curl -sS -i -X GET" in found[0] or "nc 127.0.0.1" in found[0]


def answer(status, body, kind="application/json"):
    return Answer(status=status, headers={"content-type": kind}, body=body, seconds=0.0)


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (200, b'{"nodes": 3}', "application/json", "not as described"),
        (200, b'{"nodes": [', "application/json", "no JSON"),
        (200, b"<html>", "text/html", "of type"),
        (302, b"", "", "not described"),
        (404, b'{"detail": "x"}', "application/json", "not as described"),
    ],
)
def test_answers_that_the_description_does_not_say_are_found(description, status, body, kind, said):
    asked = Asked(source="test", operation="list_nodes", target="/v1/nodes")
    assert said in Shapes(description).wrong(asked, answer(status, body, kind))


def test_answers_as_described_are_left_alone(description):
    asked = Asked(source="test", operation="list_nodes", target="/v1/nodes")
    assert Shapes(description).wrong(asked, answer(200, b'{"nodes": []}')) == ""
