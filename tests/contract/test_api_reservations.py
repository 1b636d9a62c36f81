"""Reservations over HTTP: made once however often they are sent, shown on their nodes, given back."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from tests.contract.api_head import Supervisor, code, until

FANS = {"nodes": ["n0"], "time": "4h", "maintenance": True, "why": "new fans"}


@pytest.fixture
def call(call):
    Supervisor(call).hello()
    return call


def reserve(call, name="fans", role="operator", **changes):
    return call(role, "PUT", f"/v1/reservations/{name}", {**FANS, **changes})


def listed(call):
    return [one["id"] for one in call("viewer", "GET", "/v1/reservations").json()["reservations"]]


def test_reserved_nodes_are_shown_so_until_given_back(head, call):
    start_s = head.clock.now_s() + 3600
    made = reserve(call, start_s=start_s).json()["reservation"]
    assert made == {
        "id": "fans",
        "nodes": ["n0"],
        "start_s": start_s,
        "end_s": start_s + 4 * 3600,
        "users": [],
        "queues": [],
        "maintenance": True,
        "begun": False,
        "why": "new fans",
        "by": "opal",
        "open_ended": False,
    }
    assert call("viewer", "GET", "/v1/reservations").json()["reservations"] == [made]
    for path, nodes in (("/v1/nodes", "nodes"), ("/v1/overview", "nodes")):
        (node,) = call("viewer", "GET", path).json()[nodes]
        assert node["reserved"] == [
            {
                "id": "fans",
                "start_s": start_s,
                "end_s": start_s + 4 * 3600,
                "holders": "maintenance",
                "begun": False,
                "why": "new fans",
                "open_ended": False,
                "stops": [],
            }
        ]
    for _ in range(2):
        assert call("operator", "DELETE", "/v1/reservations/fans").status_code == 204
    assert listed(call) == []
    assert call("viewer", "GET", "/v1/nodes/n0").json()["node"]["reserved"] == []


def test_without_a_start_it_begins_now_and_sent_again_it_is_the_same(call):
    first, again = reserve(call), reserve(call)
    assert (first.status_code, again.status_code) == (200, 200)
    first, again = first.json()["reservation"], again.json()["reservation"]
    assert (again["start_s"], again["begun"]) == (first["start_s"], True)
    assert code(reserve(call, time="5h")) == (409, "conflict")


def test_name_is_free_again_once_its_reservation_ended(head, call):
    reserve(call)
    call("operator", "DELETE", "/v1/reservations/fans")
    head.clock.ahead_s += 60
    assert reserve(call, time="1h").json()["reservation"]["start_s"] >= head.clock.now_s() - 30
    assert listed(call) == ["fans"]


def test_first_to_begin_is_listed_first(head, call):
    now_s = head.clock.now_s()
    for name, in_h in (("a", 30), ("b", 20), ("c", 10)):
        reserve(call, name, start_s=now_s + in_h * 3600)
    assert listed(call) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"maintenance": False}, (400, "bad_request")),
        ({"users": ["ada"]}, (400, "bad_request")),
        ({"time": "4"}, (400, "bad_request")),
        ({"start_s": 1e308}, (400, "bad_request")),
        ({"nodes": ["n7"]}, (404, "not_found")),
        ({"maintenance": False, "users": ["nobody"]}, (404, "not_found")),
        ({"colour": "x"}, (400, "bad_request")),
    ],
)
def test_odd_reservations_are_refused(call, changes, expected):
    assert code(reserve(call, **changes)) == expected
    assert listed(call) == []


def test_odd_names_and_unknown_ones_are_refused(call):
    assert code(reserve(call, "-fans")) == (400, "bad_request")
    assert code(call("operator", "DELETE", "/v1/reservations/never")) == (404, "not_found")


def test_begun_and_over_by_the_clock_it_is_recorded_in_the_history(head, call):
    reserve(call, maintenance=False, users=["ada"], queues=["default"])
    head.clock.ahead_s += 5 * 3600
    until(lambda: listed(call) == [])
    history = call("viewer", "GET", "/v1/story").json()["story"]
    told = [(line["kind"], line["text"]) for line in history if line["kind"].startswith("reserv")]
    assert told == [
        ("reserved", "fans, n0 for ada and queue default, from now on, for 4h00m: new fans"),
        ("reservation_begun", "reservation fans begins: n0 for ada and queue default, for 4h00m"),
        ("reservation_ended", "reservation fans has ended: n0 no longer reserved for ada and queue default"),
    ]
