"""The list of waste over HTTP, its filters and its metrics, and idle policies of queues as they are put and shown."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import msgspec
import pytest

from phalanx.api.routes.money.waste import ROWS_MAX
from phalanx.cli.jobs.ps import waste_text
from phalanx.cli.report.waste import waste_lines, with_commands
from phalanx.cli.terminal import Terminal
from phalanx.controller.usage.waste_monitor import WasteNow
from phalanx.core.accounting.usage_alarms import Spell, WastedPart, WasteSighting
from phalanx.core.work.usage.waste_terms import WasteKind
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.waste import WasteView
from tests.builders import job
from tests.contract.api_head import Supervisor

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)


def spell(number, *, user="ada", kind=WasteKind.IDLE, for_s=3600, ended_s=3600, nodes=("n0",)):
    seen = WasteSighting(
        kind=kind,
        job=job(str(number), user=user),
        nodes=nodes,
        parts=(WastedPart(2000, 0),),
        held_milli=4000,
    )
    since_ms = (ended_s - for_s) * 1000
    return Spell(newest=seen, since_ms=since_ms, seen_ms=ended_s * 1000, after_ms=900_000, lost=2000 * for_s * 1000)


@pytest.fixture
def found(head):
    over = spell(4, user="eve", for_s=60, ended_s=3590)  # no waste any more, and never an alarm
    spells = (spell(1), spell(2, user="bob", kind=WasteKind.LOW), spell(3, for_s=60), over)
    head.usage._monitor.now = WasteNow(3_600_000, spells, {"idle": 4})


def waste(call, query=""):
    return call("viewer", "GET", f"/v1/waste{query}").json()


@pytest.mark.parametrize(
    ("query", "jobs"),
    [
        ("", ["1", "2"]),
        ("?early=true", ["1", "2", "3"]),
        ("?user=bob", ["2"]),
        ("?kind=idle", ["1"]),
        ("?queue=other", []),
        ("?project=gpt&limit=1", ["1"]),
    ],
)
def test_filters_choose_rows(found, call, query, jobs):
    reply = waste(call, query)
    assert [row["job"] for row in reply["rows"]] == jobs
    assert reply["left_off"] == (1 if "limit" in query else 0)
    assert reply["alarms"] == len(jobs) + reply["left_off"] - ("early" in query)


def test_a_row_says_who_since_when_how_much_and_what_mends_it(found, call):
    row = waste(call)["rows"][0]
    assert (row["user"], row["project"], row["gpus"], row["gpus_held"]) == ("ada", "gpt", 2.0, 4.0)
    assert row["gpu_hours"] == 2.0
    assert (row["hint"], row["hint_code"]) == ("submit it with gpus 2", "submit-with")
    view = with_commands(msgspec.convert(waste(call), WasteView))
    title, first, _ = waste_lines(view, WIDE, 3600.0, early=False)
    assert title.split()[:4] == ["JOB", "NAME", "USER", "PROJECT"]
    assert first.rstrip().endswith("phalanx submit --gpus 2 ...")


def test_the_longest_list_is_bounded(head, call):
    long = "n" * 100
    nodes = tuple(f"{long}{index}" for index in range(40))
    spells = tuple(spell(number, nodes=nodes, user="u" * 64) for number in range(2 * ROWS_MAX))
    head.usage._monitor.now = WasteNow(3_600_000, spells)
    reply = call("viewer", "GET", "/v1/waste")
    assert len(reply.content) < 1 << 20
    assert reply.json()["left_off"] == ROWS_MAX


@pytest.mark.parametrize("query", ["?kind=colour", "?limit=0", "?limit=501", "?early=perhaps"])
def test_wrong_parameters_are_refused(call, query):
    assert 400 <= call("viewer", "GET", f"/v1/waste{query}").status_code < 500


def test_metrics_count_alarms_of_each_kind(found, call):
    text = call("viewer", "GET", "/metrics").text
    for line in (
        'phalanx_waste_alarms{kind="idle"} 1.0',
        'phalanx_waste_alarm_gpus{kind="low"} 2.0',
        'phalanx_waste_alarms{kind="broken"} 0.0',
        'phalanx_waste_alarms_begun_total{kind="idle"} 4.0',
    ):
        assert line in text.splitlines()


def test_an_idle_policy_is_put_shown_and_compared(call):
    policy = {"action": "release", "after_s": 1800.0, "grace_s": 300.0, "states": ["low", "idle"], "exempt": "keep"}
    body = {"queues": [{"id": "research", "idle": policy, "alarms": {"low": None, "idle": 60.0}}]}
    assert call("operator", "PUT", "/v1/queues", body).status_code == 200
    shown = call("viewer", "GET", "/v1/queues/research").json()["queue"]
    assert shown["idle"] == {**policy, "states": ["idle", "low"]}
    assert shown["alarms"] == {"idle": 60.0, "low": None}
    assert call("operator", "PUT", "/v1/queues", body).json()["unchanged"] == 1
    (change,) = call("operator", "PUT", "/v1/queues", {"queues": [{"id": "research"}], "dry_run": True}).json()[
        "changed"
    ]
    assert change["before"]["idle"].startswith("release after 30m00s idle or low, warning 5m00s before")
    assert change["after"] == {"idle": None, "alarms": None}


@pytest.mark.parametrize(
    "idle",
    [
        {"action": "kill", "after_s": 60.0},
        {"action": "stop", "after_s": 1.0},
        {"action": "stop", "after_s": 60.0, "grace_s": 90.0},
        {"action": "stop", "after_s": 60.0, "states": []},
        {"action": "stop", "after_s": 1e300},
    ],
)
def test_policies_that_make_no_sense_are_refused(call, idle):
    reply = call("operator", "PUT", "/v1/queues", {"queues": [{"id": "research", "idle": idle}]})
    assert reply.status_code == 400


def test_a_job_shows_its_alarm_while_it_runs(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    number = call("user", "POST", "/v1/jobs", {"run": ["true"], "gpus": 2, "workdir": "/w"}).json()["job"]["id"]
    head.usage._monitor.now = WasteNow(3_600_000, (spell(number), spell(number, kind=WasteKind.LOW, for_s=1000)))
    seen = call("viewer", "GET", f"/v1/jobs/{number}").json()["job"]["waste"]
    assert (seen["kind"], seen["gpus"], seen["gpu_hours"]) == ("idle", 2, 2.0)
    view = msgspec.convert(call("viewer", "GET", f"/v1/jobs/{number}").json()["job"], JobView)
    assert waste_text(view, 5400.0) == "idle for 1h30m"
    call("user", "POST", f"/v1/jobs/{number}/cancel")
    head.usage._monitor.now = WasteNow(3_600_000, (spell(number, for_s=60),))
    assert call("viewer", "GET", f"/v1/jobs/{number}").json()["job"]["waste"] is None, "below its threshold"
