"""Prices, reports of cost, invoices, budgets and failures over HTTP, and the tables that the command line makes of them."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import msgspec
import pytest

from phalanx.api.views import failures
from phalanx.cli.report.cost import cost_table, invoice_table
from phalanx.cli.report.failures import failures_table
from phalanx.cli.terminal import Terminal
from phalanx.wire.api.cost import CostReportView, FailuresReportView, InvoiceView
from tests.contract.api_head import Supervisor

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)


def put_prices(call, amount="2.49", **fields):
    body = {"currency": "EUR", "prices": [{"gpu": "virtual", "per_gpu_hour": amount, **fields}]}
    return call("operator", "PUT", "/v1/prices", body)


def report(call, kind="cost", **query):
    words = "&".join(f"{name}={value}" for name, value in {"since_s": 0, **query}.items())
    return call("viewer", "GET", f"/v1/{kind}?{words}").json()


def with_job(head, call, ahead_s=3600.0):
    Supervisor(call).hello()
    job = call("user", "POST", "/v1/jobs", {"run": ["true"], "gpus": 1, "workdir": "/w"}).json()["job"]["id"]
    head.clock.ahead_s += ahead_s
    return job


def test_rows_of_every_kind_add_up_to_the_invoice(head, call):
    put_prices(call)
    job = with_job(head, call, ahead_s=7200.0)
    until_s = head.clock.now_s() // 3600 * 3600  # nothing later counts, however long the calls take
    invoice = report(call, "invoice", until_s=until_s)
    assert invoice["currency"] == "EUR"
    assert invoice["cost_cents"] == sum(line["cost_cents"] for line in invoice["lines"]) > 0
    exact = sum(line["gpu_us"] for line in invoice["lines"]) * 249 / 3.6e9
    assert abs(invoice["cost_cents"] - exact) <= 0.5 * len(invoice["lines"])
    for by in ("project", "user", "queue", "gpu", "pool", "job"):
        for rule in ("none", "by-use") if by == "job" else ("by-quota",):
            found = report(call, by=by, share_idle=rule, until_s=until_s)
            assert (
                sum(row["cost_cents"] for row in found["rows"]) == found["total"]["cost_cents"] == invoice["cost_cents"]
            )
    rows = {row["key"]: row for row in report(call, by="job", until_s=until_s)["rows"]}
    assert rows[job]["used"] == rows[job]["cost"] != "0.00"
    assert rows[""]["idle"] == rows[""]["cost"] != "0.00"


def test_gpus_without_a_price_are_named(head, call):
    with_job(head, call)
    call("admin", "PUT", "/v1/projects/default", {"budget": "1000 EUR/month"})
    unpriced = msgspec.convert(report(call), CostReportView)
    assert unpriced.currency == ""
    assert (len(unpriced.budgets), cost_table(unpriced).notes[1:]) == (
        1,
        ["no prices are stored, so nothing has a cost"],
    )
    put_prices(call, gpu="a100")
    found = report(call, by="gpu")
    assert [(one["gpu"], one["pool"]) for one in found["unpriced"]] == [("virtual", "")]
    assert found["unpriced"][0]["gpu_hours"] == pytest.approx(found["rows"][0]["unpriced_gpu_hours"])
    assert found["rows"][0]["cost"] == "0.00"
    shown = cost_table(msgspec.convert(found, CostReportView))
    assert shown.lines(WIDE)[1].endswith("0.00+?")
    assert any("without a price" in note and "virtual in no pool" in note for note in shown.notes)


def test_prices_are_replaced_compared_and_recorded(head, call):
    dry = call("operator", "PUT", "/v1/prices", {"currency": "EUR", "prices": [], "dry_run": True}).json()
    assert (dry["unchanged"], call("viewer", "GET", "/v1/prices").json()["currency"]) == (0, "")
    changed = put_prices(call, source="offer").json()
    assert [one["per_gpu_hour"] for one in changed["added"]] == ["2.49"]
    assert changed["past_from_s"] == 0
    assert put_prices(call, source="offer").json()["unchanged"] == 1
    found = call("viewer", "GET", "/v1/prices").json()
    assert (found["by"], found["prices"][0]["source"]) == ("opal", "offer")
    kinds = [line.kind for line in head.store.history(limit=100)]
    assert kinds.count("prices_set") == 1
    assert put_prices(call, amount="2.1234567").status_code == 400
    assert call("user", "PUT", "/v1/prices", {"currency": "EUR", "prices": []}).status_code == 403


def test_a_budget_is_set_by_admins_and_shown_with_a_forecast(head, call):
    put_prices(call, amount="100")
    call("admin", "PUT", "/v1/projects/default", {"budget": "1000 USD/month"})
    with_job(head, call)
    path = "/v1/projects/default/spending"
    other = call("viewer", "GET", path).json()
    assert (other["budget"], other["percent"]) == ("1000 USD/month", None)
    call("admin", "PUT", "/v1/projects/default", {"budget": "200 EUR/month"})
    found = call("viewer", "GET", path).json()
    assert found["percent"] == found["spent_cents"] * 100 // 20_000
    assert found["forecast_cents"] >= found["spent_cents"]
    assert report(call)["budgets"][0]["project"] == "default"
    assert call("viewer", "GET", "/v1/projects/default").json()["project"]["budget"] == "200 EUR/month"
    call("admin", "PUT", "/v1/projects/default", {"budget": "none"})
    assert call("viewer", "GET", path).json()["budget"] == ""
    assert call("admin", "PUT", "/v1/projects/default", {"budget": "much"}).status_code == 400
    assert call("viewer", "GET", "/v1/projects/none/spending").status_code == 404


def test_tables_have_the_rows_and_the_total(head, call):
    put_prices(call)
    with_job(head, call)
    found = msgspec.convert(report(call, by="user", share_idle="by-use"), CostReportView)
    lines = cost_table(found).lines(WIDE)
    assert lines[0].split() == ["USER", "GPU-HOURS", "IDLE", "HOURS", "USED", "IDLE", "COST", "EUR"]
    assert [line.split()[0] for line in lines[1:]] == ["ada", "total"]
    assert "spread over jobs" in cost_table(found).notes[0]
    invoice = invoice_table(msgspec.convert(report(call, "invoice"), InvoiceView))
    assert invoice.lines(WIDE)[-1].split()[-1] == invoice.csv_rows[-1][-2].replace(",", "")
    nothing = failures_table(msgspec.convert(report(call, "failures"), FailuresReportView))
    assert nothing.lines(WIDE) == ["no failures in this period"]


def test_failed_jobs_past_a_number_are_counted_and_not_read(head, call, monkeypatch):
    monkeypatch.setattr(failures, "FAILED_JOBS_MAX", 2)
    supervisor = Supervisor(call)
    supervisor.hello()
    jobs = []
    for _ in range(3):
        body = {"run": ["false"], "gpus": 2, "workdir": "/w"}
        jobs.append(call("user", "POST", "/v1/jobs", body).json()["job"]["id"])
        supervisor.run(jobs[-1])
        supervisor.end(jobs[-1], code=3, at_s=head.clock.now_s())
    found = report(call, "failures", by="job")
    assert ({row["key"] for row in found["rows"]}, found["unread_jobs"]) == (set(jobs[1:]), 1)


def test_failures_are_counted_with_what_they_lost(head, call):
    put_prices(call)
    supervisor = Supervisor(call)
    supervisor.hello()
    body = {"run": ["false"], "gpus": 2, "workdir": "/w"}
    job = call("user", "POST", "/v1/jobs", body).json()["job"]["id"]
    supervisor.run(job)
    head.clock.ahead_s += 3600.0
    supervisor.end(job, code=3, at_s=head.clock.now_s())
    found = report(call, "failures", by="node")
    assert [(row["key"], row["failures"], row["jobs"]) for row in found["rows"]] == [("n0", 1, 1)]
    assert found["total"]["lost_gpu_hours"] == pytest.approx(2.0, rel=0.05)
    assert found["total"]["cost_cents"] == pytest.approx(498, rel=0.05)
    assert {row["key"] for row in report(call, "failures", by="user")["rows"]} == {"ada"}
    lines = failures_table(msgspec.convert(found, FailuresReportView)).lines(WIDE)
    assert [line.split()[0] for line in lines] == ["NODE", "n0", "total"]
    assert report(call, "failures", until_s=3600)["rows"] == []
