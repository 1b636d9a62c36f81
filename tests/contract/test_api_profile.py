"""The fleet's profile over HTTP: operators store it, everyone reads it, and the head says whether to believe it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.planner.calibration.profile import (
    VALID_S,
    NodeMeasurement,
    Profile,
    parse_profile,
)
from phalanx.planner.calibration.record_codec import encode_record
from tests.contract.api_head import ApiHead, Supervisor, code


@pytest.fixture
def call(call):
    Supervisor(call).hello()
    Supervisor(call, "n1", "s2").hello()
    return call


def profile(head, *memory, **more):
    nodes = [
        NodeMeasurement(node=f"n{i}", gpu="virtual", devices=4, virtual=True, memory_bytes_per_s=rate)
        for i, rate in enumerate(memory or (9.0, 9.0))
    ]
    return encode_record(Profile(**{"at": "2026-11-21", "at_s": head.clock.now_s(), "nodes": tuple(nodes), **more}))


def test_before_the_first_calibration_there_is_none(call):
    reply = call("viewer", "GET", "/v1/profile")
    assert (reply.status_code, reply.json()["profile"]) == (200, None)


def test_what_an_operator_stores_everyone_reads_as_it_was(head, call):
    stored = profile(head, job="7")
    assert call("operator", "PUT", "/v1/profile", stored).status_code == 200
    kept = call("viewer", "GET", "/v1/profile").json()
    assert (kept["profile"], kept["by"], kept["stale"], kept["slow"]) == (stored, "opal", [], [])
    assert parse_profile(kept["profile"]).job == "7"


def test_users_may_not_store_one(head, call):
    assert code(call("user", "PUT", "/v1/profile", profile(head))) == (403, "not_permitted")
    assert call("user", "GET", "/v1/profile").json()["profile"] is None


def test_the_newest_one_counts_and_outlives_the_head(head, call, tmp_path):
    call("operator", "PUT", "/v1/profile", profile(head, job="1"))
    call("admin", "PUT", "/v1/profile", profile(head, job="2"))
    again = ApiHead(str(tmp_path / "again"), store=head.store)
    try:
        with again.calling() as later:
            kept = later("viewer", "GET", "/v1/profile").json()
    finally:
        again.close()
    assert (kept["profile"]["job"], kept["by"]) == ("2", "root")


def test_slow_nodes_are_named(head, call):
    call("operator", "PUT", "/v1/profile", profile(head, 9.0, 5.0))
    assert call("viewer", "GET", "/v1/profile").json()["slow"] == ["n1"]


def test_an_old_profile_and_one_without_a_node_of_the_fleet_are_stale(head, call):
    call("operator", "PUT", "/v1/profile", profile(head, 9.0))
    assert call("viewer", "GET", "/v1/profile").json()["stale"] == ["n1 was never measured"]
    call("operator", "PUT", "/v1/profile", profile(head, at_s=head.clock.now_s() - VALID_S - 86400))
    (said,) = call("viewer", "GET", "/v1/profile").json()["stale"]
    assert said.startswith("it is 31 days old")


def test_what_is_no_profile_is_refused_and_the_kept_one_stays(head, call):
    call("operator", "PUT", "/v1/profile", profile(head, job="7"))
    for wrong in ({}, {"at": "x", "at_s": 1.0, "nodes": []}, {**profile(head), "speed": 3}):
        assert code(call("operator", "PUT", "/v1/profile", wrong)) == (400, "bad_request")
    assert call("operator", "PUT", "/v1/profile", content=b"[1]").status_code == 400
    assert call("viewer", "GET", "/v1/profile").json()["profile"]["job"] == "7"


def test_storing_is_recorded_in_the_history(head, call):
    call("operator", "PUT", "/v1/profile", profile(head))
    told = [line["text"] for line in call("viewer", "GET", "/v1/story").json()["story"]]
    assert "opal stored the fleet's profile" in told
