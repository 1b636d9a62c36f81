"""The usage report over HTTP, and the ledger behind it over a planned restart of the head."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import msgspec
import pytest

from phalanx.cli.report.report_table import report_page
from phalanx.cli.report.usage import usage_table
from phalanx.cli.terminal import Terminal
from phalanx.core.accounting.usage_states import UsageState
from phalanx.core.state.records import USAGE_HOURS, USAGE_MARKS
from phalanx.wire.api.usage import UsageReportView
from tests.contract.api_head import ApiHead, Supervisor

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)


def report(call, by="project", **parameters):
    query = "&".join(f"{name}={value}" for name, value in {"since_s": 0, "by": by, **parameters}.items())
    return call("viewer", "GET", f"/v1/usage?{query}").json()


def check_sums(found):
    """Rows, states and fleet x time are equal, to the microsecond of a GPU."""
    total = found["total"]
    assert set(total["by_state"]) == set(UsageState)
    assert total["fleet_gpu_us"] == sum(total["by_state_us"].values()) == sum(row["gpu_us"] for row in found["rows"])
    assert all(row["gpu_us"] == sum(row["by_state_us"].values()) for row in found["rows"])
    assert sum(total["by_state"].values()) == pytest.approx(total["fleet_gpu_hours"])
    return total["fleet_gpu_us"]


def test_states_of_all_rows_add_up_to_the_fleet_times_time(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job = call("user", "POST", "/v1/jobs", {"run": ["true"], "gpus": 1, "workdir": "/w"}).json()["job"]["id"]
    head.clock.ahead_s += 600.0
    found = report(call, by="job")
    devices = len(head.store.nodes()[0].devices)
    assert check_sums(found) >= devices * 600e6
    rows = {row["key"]: row for row in found["rows"]}
    assert rows[job]["by_state"]["starting"] == pytest.approx(1 / 6, rel=0.02)
    assert rows[""]["by_state"].keys() == {"free"}
    for by, key in (("user", "ada"), ("queue", "default"), ("project", "default"), ("gpu", "h200")):
        grouped = report(call, by=by)
        check_sums(grouped)
        assert by == "gpu" or {row["key"] for row in grouped["rows"]} == {key, ""}


def test_series_by_hour_and_by_day_adds_up_to_the_total(head, call):
    Supervisor(call).hello()
    call.submit(gpus=1)
    head.clock.ahead_s += 30 * 3600.0
    now_s = head.clock.now_s()
    found = report(call, since_s=now_s - 86400 * 3, bucket="day")
    whole = check_sums(found)
    assert found["series"] == sorted(found["series"], key=lambda one: one["since_s"])
    assert all(one["since_s"] % 86400 == 0 for one in found["series"])
    assert all(one["fleet_gpu_us"] == sum(one["by_state_us"].values()) for one in found["series"])
    assert sum(one["fleet_gpu_us"] for one in found["series"]) == whole
    assert len(found["series"]) in (2, 3)
    hours = report(call, since_s=now_s - 86400 * 3, bucket="hour")["series"]
    assert {one["since_s"] % 3600 for one in hours} == {0}
    assert len(hours) in (30, 31)
    assert report(call)["series"] == []
    assert call("viewer", "GET", "/v1/usage?since_s=0&bucket=day").status_code == 400  # more than 400 days
    assert call("viewer", "GET", "/v1/usage?since_s=0&bucket=week").status_code == 400


def test_rows_past_the_limit_are_added_up_in_one(head, call):
    Supervisor(call).hello()
    call("user", "POST", "/v1/jobs", {"run": ["true"], "gpus": 1, "workdir": "/w"})
    head.clock.ahead_s += 60.0
    found = report(call, by="job", limit=1)
    check_sums(found)
    assert [row["merged"] for row in found["rows"]] == [0, 1]


def test_a_period_has_the_hours_that_it_touches(head, call):
    Supervisor(call).hello()
    head.clock.ahead_s += 3 * 3600.0
    now_s = head.clock.now_s()
    middle = report(call, since_s=now_s - 7200.0, until_s=now_s - 3600.0)
    assert middle["since_s"] == now_s - 7200.0 - (now_s - 7200.0) % 3600.0
    hours = (middle["until_s"] - middle["since_s"]) / 3600
    devices = len(head.store.nodes()[0].devices)
    assert check_sums(middle) == devices * 3600e6 * hours > 0


def test_hours_are_read_one_by_one_and_only_those_of_the_period(head, call, monkeypatch):
    Supervisor(call).hello()
    head.usage.start(head.driver.report)
    head.clock.ahead_s += 6 * 3600.0
    head.usage.stop()
    now_s, reads, read = head.clock.now_s(), [], head.store.record

    def counted(kind, key):
        if kind is USAGE_HOURS:
            reads.append(key)
        return read(kind, key)

    monkeypatch.setattr(head.store, "record", counted)
    hours = head.usage.hours(now_s - 6 * 3600.0)
    first = next(hours)
    assert reads == [first.id]
    rest = list(hours)
    assert [int(hour.id) for hour in rest] == [int(first.id) + 3600 * number for number in range(1, len(rest) + 1)]
    assert len(reads) >= 4
    reads.clear()
    report(call, since_s=now_s - 6 * 3600.0, until_s=now_s - 5 * 3600.0)
    assert first.id in reads
    assert len(reads) <= 2


@pytest.mark.parametrize("query", ["", "since_s=-1", "since_s=nan", "since_s=0&by=colour", "since_s=0&limit=0"])
def test_wrong_parameters_are_refused(call, query):
    assert 400 <= call("viewer", "GET", f"/v1/usage?{query}").status_code < 500


def test_a_planned_stop_stores_everything_and_the_next_head_goes_on(tmp_path):
    first = ApiHead(str(tmp_path))
    with first.calling() as call:
        Supervisor(call).hello()
        first.usage.start(first.driver.report)
        first.clock.ahead_s += 7200.0
        before = check_sums(report(call))
        first.usage.stop()
    first.close()
    (mark,) = first.store.records(USAGE_MARKS)
    assert [node.id for node in mark.nodes] == ["n0"]
    second = ApiHead(str(tmp_path), store=first.store, head_id="head-2")
    with second.calling() as call:
        second.clock.ahead_s = first.clock.ahead_s + 600.0
        found = report(call)
        devices = len(second.store.nodes()[0].devices)
        assert check_sums(found) >= before + devices * 599e6
        hours = list(second.usage.hours(0.0))
        assert len(hours) == len({hour.id for hour in hours}) >= 3, "no hour twice, none lost"
    second.close()


def test_the_table_shows_states_that_occurred_and_what_is_unsure(head, call):
    Supervisor(call).hello()
    call("user", "POST", "/v1/jobs", {"run": ["true"], "gpus": 1, "workdir": "/w"})
    head.clock.ahead_s += 3600.0
    found = msgspec.convert(report(call, by="user"), UsageReportView)
    shown = usage_table(found)
    title, *rows = shown.lines(WIDE)
    assert title.split() == ["USER", "GPU-HOURS", "STARTING", "FREE"]
    assert [row.split()[0] for row in rows] == ["(no", "ada", "total"]
    assert shown.notes == ()
    assert report_page(shown, "phalanx report usage <x>").count("<tr>") == 4
