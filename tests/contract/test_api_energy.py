"""Energy over HTTP: what supervisors send, the report over a restart of the head, and caps on power from request to answer."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

from dataclasses import replace

import msgspec
import pytest

from phalanx.cli.cluster.power import power_lines
from phalanx.cli.report.energy import energy_table
from phalanx.cli.report.report_table import report_page
from phalanx.cli.terminal import Terminal
from phalanx.core.fleet.power_limits import PowerLimits
from phalanx.core.state.commands import LimitPower
from phalanx.core.state.reports import DatasetsHeld, NodeHealthReported, PowerLimited
from phalanx.wire.api.energy import EnergyReportView
from phalanx.wire.api.nodes import NodeView
from phalanx.wire.supervisor import CommandsReply, EnergyReading, HelloRequest, SamplesRequest, decode_command
from tests.contract.api_head import ApiHead, Supervisor, make_node

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)
NS = 1_000_000_000


def report(call, by="job"):
    found = call("viewer", "GET", f"/v1/energy?since_s=0&by={by}").json()
    millijoules = sum(row["counter_mj"] + row["integrated_mj"] for row in found["rows"])
    assert millijoules == found["total"]["counter_mj"] + found["total"]["integrated_mj"] == found["metered_mj"]
    return found


class Meter:
    """The counters of a node's GPUs, as its supervisor sends them: each draws 90 W, the first 500 W more while `busy`."""

    def __init__(self, supervisor, devices=4):
        self.supervisor, self.millijoules, self.busy, self.at_s = supervisor, [7_000_000] * devices, False, 0.0
        self.throttle: tuple[str, ...] = ()

    def passes(self, head, seconds):
        head.clock.ahead_s += seconds
        self.at_s += seconds
        for index in range(len(self.millijoules)):
            self.millijoules[index] += round((590 if self.busy and index == 0 else 90) * seconds * 1000)

    def sends(self):
        readings = [
            EnergyReading(
                index=index,
                meter=f"GPU-{index}",
                millijoules=counted,
                at_ns=round(self.at_s * NS),
                throttle=self.throttle if index == 0 else None,
            )
            for index, counted in enumerate(self.millijoules)
        ]
        request = SamplesRequest(
            supervisor_id=self.supervisor.id,
            node_id=self.supervisor.node_id,
            at_s=0.0,
            devices=[],
            energy=readings,
            sent_ns=round(self.at_s * NS),
        )
        assert self.supervisor.post("samples", request).status_code == 204


def notes_of(found):
    return energy_table(msgspec.convert(found, EnergyReportView)).notes


def test_jobs_and_idle_add_up_to_the_counters(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    meter = Meter(supervisor)
    meter.sends()
    meter.passes(head, 10_000.0)
    job = call.submit(gpus=1)
    meter.sends()
    meter.busy = True
    meter.passes(head, 5_000.0)
    meter.sends()
    found = report(call)
    rows = {row["key"]: row for row in found["rows"]}
    # The clock of the head goes on by itself too: seconds on a busy machine.
    assert rows[job]["counter_mj"] == pytest.approx(5_000 * 590_000, rel=0.02)
    assert rows[job]["mean_w"] == pytest.approx(590, rel=0.05)
    assert {row["key"] for row in report(call, by="project")["rows"]} == {"default", ""}
    assert found["total"].get("throttled", {}) == {}
    meter.throttle = ("sw_power_cap",)
    meter.passes(head, 36.0)
    meter.sends()
    found = report(call)
    rows = {row["key"]: row for row in found["rows"]}
    assert rows[job]["throttled"] == {"power": pytest.approx(0.01, rel=0.5)}
    assert any(note.startswith("clocks were held down in 0.0") for note in notes_of(found))
    shown = energy_table(msgspec.convert(found, EnergyReportView))
    title, *lines = shown.lines(WIDE)
    assert title.split()[:4] == ["JOB", "KWH", "MEAN", "W"]
    assert [line.split()[0] for line in lines] == ["(no", job, "total"]
    assert all(len(row) == len(shown.csv_rows[0]) for row in shown.csv_rows)
    assert report_page(shown, "phalanx report energy").count("<tr>") == 4


def test_next_reading_covers_the_time_without_a_head(tmp_path):
    first = ApiHead(str(tmp_path))
    with first.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        meter = Meter(supervisor)
        meter.sends()
        job = call.submit(gpus=1)
        meter.busy = True
        meter.passes(first, 60.0)
        meter.sends()
        first.usage.start(first.driver.report)
        first.usage.stop()
    first.close()
    second = ApiHead(str(tmp_path), store=first.store, head_id="head-2")
    with second.calling() as call:
        second.clock.ahead_s = first.clock.ahead_s
        meter.supervisor = Supervisor(call)
        meter.supervisor.hello(carries=[(job, 1, 0)])
        meter.passes(second, 7200.0)
        meter.sends()
        found = report(call)
        rows = {row["key"]: row for row in found["rows"]}
        assert found["metered_mj"] == sum(meter.millijoules) - 4 * 7_000_000
        assert rows[job]["counter_mj"] == pytest.approx(7260 * 590_000, rel=0.01)
    second.close()


def test_electricity_has_a_price_and_the_overhead_is_stated(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    meter = Meter(supervisor)
    meter.sends()
    meter.passes(head, 3600.0)
    meter.sends()
    rates = [{"per_kwh": "0.18", "pue": "1.25", "gco2_per_kwh": "344.5", "source": "grid"}]
    body = {"currency": "EUR", "prices": [{"gpu": "h100", "per_gpu_hour": "2"}], "electricity": rates}
    assert call("operator", "PUT", "/v1/prices", body).json()["electricity_changed"]
    total = report(call)["total"]
    kwh = (sum(meter.millijoules) - 4 * 7_000_000) / 3.6e9
    assert float(total["cost"]) == pytest.approx(kwh * 0.18 * 1.25, abs=1e-6)
    assert total["gco2"] == pytest.approx(kwh * 344.5 * 1.25)
    shown = energy_table(msgspec.convert(report(call), EnergyReportView))
    assert any("0.18 EUR a kWh, 344.5 g CO2 a kWh, PUE 1.25 (in cost and CO2) (grid)" in note for note in shown.notes)
    without = {key: value for key, value in body.items() if key != "electricity"}
    assert call("operator", "PUT", "/v1/prices", without).json()["electricity_rates"] == 1, "the rates stay"
    assert call("operator", "PUT", "/v1/prices", {**without, "currency": "USD"}).status_code == 409
    assert call("operator", "PUT", "/v1/prices", {**body, "electricity": []}).json()["electricity_rates"] == 0
    assert report(call)["total"]["cost"] is None


def test_device_without_a_meter_is_unknown_and_never_nothing(head, call):
    Supervisor(call).hello()
    head.clock.ahead_s += 3600.0
    found = report(call)
    assert found["total"]["unknown_gpu_hours"] == pytest.approx(found["total"]["gpu_hours"])
    assert found["total"]["mean_w"] is None
    assert any("unknown" in note for note in energy_table(msgspec.convert(found, EnergyReportView)).notes)


@pytest.mark.parametrize("query", ["", "since_s=-1", "since_s=0&by=colour", "since_s=0&limit=0"])
def test_wrong_parameters_are_refused(call, query):
    assert 400 <= call("viewer", "GET", f"/v1/energy?{query}").status_code < 500


# ---- caps --------------------------------------------------------------------------------------------------------------


def limits(limit_w, original_w=None):
    return tuple(
        PowerLimits(
            index=index,
            min_mw=200_000,
            max_mw=700_000,
            default_mw=700_000,
            limit_mw=limit_w * 1000,
            original_mw=None if original_w is None else original_w * 1000,
        )
        for index in range(4)
    )


def power(call, method, body=None, role="operator"):
    return call(role, method, "/v1/nodes/n0/power", body)


def commands(supervisor):
    reply = supervisor.call("node:n0", "GET", f"/v1/node/commands?supervisor_id={supervisor.id}&after=0&wait_s=0")
    assert reply.status_code == 200, reply.text
    found = [decode_command(one) for one in msgspec.json.decode(reply.content, type=CommandsReply).commands]
    return [None if one.milliwatts is None else one.milliwatts / 1000 for one in found if isinstance(one, LimitPower)]


@pytest.fixture
def supervisor(call):
    found = Supervisor(call)
    node = replace(make_node("n0", 4), power_limits=limits(700))
    reply = found.post("hello", HelloRequest(version=1, supervisor_id=found.id, node=node, members=[]))
    assert reply.status_code == 200, reply.text
    return found


def test_cap_goes_to_the_supervisor_and_its_answer_to_the_reader(head, call, supervisor):
    node = power(call, "PUT", {"limit": "300W", "time": "8h"}).json()["node"]
    cap = node["power_cap"]
    assert (cap["limit_w"], cap["applied"]) == (300.0, False)
    assert cap["until_s"] == pytest.approx(head.clock.now_s() + 8 * 3600, abs=60)
    assert commands(supervisor) == [300.0]
    supervisor.tell(PowerLimited(node_id="n0", milliwatts=300_000, limits=limits(300, 700)))
    node = call("viewer", "GET", "/v1/nodes/n0").json()["node"]
    assert node["power_cap"]["applied"]
    assert node["devices"][3]["power_limits"] == {
        "limit_w": 300.0,
        "default_w": 700.0,
        "min_w": 200.0,
        "max_w": 700.0,
        "original_w": 700.0,
    }
    (line,) = power_lines(msgspec.convert(node, NodeView), head.clock.now_s())
    assert line.startswith("power limit of 4 GPUs: 300 W; cap: 300 W by opal until")
    assert power(call, "DELETE").json()["node"].get("power_cap") is None
    assert commands(supervisor)[-1] is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"limit": "900W"}, "out of range; its GPUs allow 200 W to 700 W"),
        ({"limit": "-3"}, "not a power limit"),
        ({"limit": "300W", "time": "soon"}, "not a duration"),
        ({"limit": "300W", "time": "0s"}, "longer than nothing"),
        ({"limit": 300}, "limit"),
        ({}, "limit"),
    ],
)
def test_wrong_cap_is_refused(call, supervisor, body, says):
    reply = power(call, "PUT", body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert commands(supervisor) == []


def test_supervisor_reports_limits_of_its_own_node_only(call, supervisor):
    power(call, "PUT", {"limit": "300W"})
    stranger = Supervisor(call, "n1", "s2")
    stranger.hello()
    with pytest.raises(AssertionError, match="not_permitted"):
        stranger.tell(PowerLimited(node_id="n0", milliwatts=300_000, limits=()))
    with pytest.raises(AssertionError, match="not_permitted"):
        stranger.tell(NodeHealthReported(node_id="n0", why="broken", checked=True))
    with pytest.raises(AssertionError, match="not_permitted"):
        stranger.tell(DatasetsHeld(node_id="n0", datasets=()))
