"""What a user types to set nodes aside: moments in their own zone, what is sent, what is shown."""

import time

import msgspec
import pytest

from phalanx.cli.cluster.nodes import node_lines
from phalanx.cli.cluster.reservations import (
    _lines,
    _name,
    _start_s,
    reservation_summary,
)
from phalanx.cli.root import main
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest
from phalanx.wire.api.nodes import ReservationView, ReservedView, node_state
from tests.golden.cli import views
from tests.golden.cli.fake_head import TOKEN, FakeHead

NOW_S = 1_796_151_600.0  # Tue 2026-12-01 20:00 in Berlin
H = 3600.0


@pytest.fixture(autouse=True)
def _berlin(monkeypatch):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def head(monkeypatch, tmp_path):
    fake = FakeHead()
    monkeypatch.setenv("PHALANX_URL", fake.url)
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    yield fake
    fake.close()


@pytest.fixture
def typed(capsys):
    def run(*words):
        code = main(list(words))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


def planned(**changes):
    one = {
        "id": "fans",
        "nodes": ["gpu001", "gpu002"],
        "start_s": NOW_S + 2 * H,
        "end_s": NOW_S + 6 * H,
        "maintenance": True,
        "why": "new fans",
        "by": "op",
    }
    return {**one, **changes}


# ---- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("now", 0),
        ("+2h", 2),
        ("now+90m", 1.5),
        ("22:00", 2),
        ("19:59", 23 + 59 / 60),
        ("2026-12-01T22:00", 2),
        ("2026-12-01T22:00+02:00", 1),
    ],
)
def test_start_is_read_in_the_terminals_zone_unless_it_says_another(text, hours):
    assert _start_s(text, NOW_S) == NOW_S + hours * H


@pytest.mark.parametrize("text", ["", "tomorrow", "25:00", "12:60", "+", "+2", "2026-13-01T00:00", "2026-02-30"])
def test_what_is_no_moment_is_refused_naming_the_option(text):
    with pytest.raises(BadRequest, match=r"^--start"):
        _start_s(text, NOW_S)


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_reserve_sends_what_was_asked_and_says_when_with_the_zone(head, typed):
    head.reservation = planned()
    code, out, _ = typed(
        "nodes", "reserve", "gpu[001-002]", "--start", "22:00", "--for", "4h", "--maintenance", "--why", "new fans"
    )
    assert code == 0
    (sent,) = head.sent("PUT", "/v1/reservations/maintenance-1201-2200")
    assert sent["body"] == {
        "nodes": ["gpu001", "gpu002"],
        "time": "4h",
        "start_s": NOW_S + 2 * H,
        "users": [],
        "queues": [],
        "maintenance": True,
        "why": "new fans",
    }
    assert out.splitlines() == [
        "reservation fans: gpu[001-002] (2 nodes) reserved for maintenance from Tue 2026-12-01 22:00 CET to Wed 2026-12-02 02:00 CET",
        "next: phalanx nodes unreserve fans",
    ]


def test_reserve_for_users_and_queues_from_now_on(head, typed):
    head.reservation = planned(maintenance=False, users=["ada", "bob"], queues=["nlp"], id="exam")
    words = ("--for", "4h", "--user", "ada", "--user", "bob", "--queue", "nlp", "--why", "exam", "--name", "exam")
    code, out, _ = typed("nodes", "reserve", "gpu[001-002]", *words)
    assert code == 0
    (sent,) = head.sent("PUT", "/v1/reservations/exam")
    assert (sent["body"]["start_s"], sent["body"]["users"], sent["body"]["queues"]) == (None, ["ada", "bob"], ["nlp"])
    assert "reserved for ada and bob and queue nlp from" in out
    assert out.splitlines()[-1] == "next: phalanx submit --reservation exam ..."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "4h", "--why", "x"], "give either --maintenance"),
        (["--for", "4h", "--why", "x", "--user", "ada", "--maintenance"], "give either --maintenance"),
        (["--for", "4", "--why", "x", "--maintenance"], "--for"),
        (["--for", "4h", "--why", "x", "--maintenance", "--start", "soon"], "--start: 'soon'"),
        (["--for", "4h", "--maintenance"], "--why"),
    ],
)
def test_wrong_words_are_64_and_send_nothing(head, typed, words, said):
    code, _, err = typed("nodes", "reserve", "n0", *words)
    assert (code, head.requests) == (64, [])
    assert said in err


def test_unreserve_ends_each_and_reservations_lists_what_is_left(head, typed):
    head.reservations = [planned()]
    assert typed("nodes", "unreserve", "fans", "exam")[1] == "reservation fans ended\nreservation exam ended\n"
    assert [request["path"] for request in head.requests if request["method"] == "DELETE"] == [
        "/v1/reservations/fans",
        "/v1/reservations/exam",
    ]
    _, out, _ = typed("nodes", "reservations")
    assert "fans  planned  gpu[001-002]  maintenance  22:00  4h00m  new fans  op" in out
    assert out.splitlines()[-1] == "next: phalanx nodes unreserve fans"
    assert '"start_s"' in typed("nodes", "reservations", "--json")[1]


def test_generated_names_do_not_meet():
    assert _name("ada", NOW_S, set()) == "ada-1201-2000"
    assert _name("ada", NOW_S, {"ada-1201-2000", "ada-1201-2000-2"}) == "ada-1201-2000-3"


# ---- what is seen ----------------------------------------------------------------------------------------------------

SCREEN = Terminal(width=200, height=40, interactive=True, colour=False, blocks=True)


def reserved(**changes):
    one = {"id": "fans", "start_s": NOW_S + 2 * H, "end_s": NOW_S + 6 * H, "holders": "maintenance", "why": "new fans"}
    return ReservedView(**{**one, **changes})


def test_nodes_show_what_they_are_reserved_for_before_and_while():
    node = views.nodes()[0]
    later = msgspec.structs.replace(node, reserved=[reserved()])
    held = msgspec.structs.replace(node, reserved=[reserved(begun=True), reserved(id="exam", holders="ada")])
    assert (node_state(later), node_state(held)) == ("up", "reserved")
    assert "reserved from 22:00 for 4h00m for maintenance (fans): new fans" in node_lines([later], SCREEN, NOW_S)[1]
    assert (
        "reserved until 2026-12-02 02:00 for maintenance (fans): new fans; and 1 more"
        in node_lines([held], SCREEN, NOW_S)[1]
    )
    assert reservation_summary([], NOW_S) == ""


def test_open_reservations_show_what_is_left():
    one = ReservationView(**planned(begun=True, start_s=NOW_S - H, maintenance=False, users=["ada"]))
    line = _lines([one], SCREEN, NOW_S)[1]
    assert line.split() == ["fans", "open", "gpu[001-002]", "ada", "19:00", "7h00m", "6h00m", "new", "fans", "op"]
    assert _lines([], SCREEN, NOW_S) == ["no reservations"]
