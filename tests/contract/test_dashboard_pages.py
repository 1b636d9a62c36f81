"""The pages: what they show reads without JavaScript, and no name in them is ever markup. Their files may be kept for ever."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import time
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from phalanx.api.pages import audit as audit_pages
from phalanx.api.pages import pages as page_routes
from phalanx.api.pages import planning, service_pages
from phalanx.api.pages import use as use_routes
from phalanx.api.routes import what_if as what_if_routes
from phalanx.api.routes import why as why_routes
from phalanx.api.views.fleet import cell_state, fleet_frame
from phalanx.core.accounting.cost_report import Amount, CostRow
from phalanx.core.accounting.usage_report import UsagePeriod, UsageSum, UsageTotals
from phalanx.core.accounting.usage_states import PartState, UsageState
from phalanx.core.fleet.node import NodeState
from phalanx.core.hints import HintCode
from phalanx.core.state.events import LabelNodes
from phalanx.core.state.reports import MemberReady, MemberStarted, ReadinessChanged
from phalanx.web.assets import load_assets
from phalanx.web.document import Viewer
from phalanx.web.plan_page import PLAN_FIELDS
from phalanx.web.use_page import HOUR_US, STATES, Costs, Use, UseAsked, use_page
from phalanx.wire.api.waste import WasteRowView, WasteView
from tests.contract.api_head import JOB, TOKENS, Supervisor, code, until
from tests.contract.xss_payloads import PAYLOADS

OUR_TAGS = frozenset(
    (
        *("html", "head", "meta", "title", "link", "script", "body", "header", "main", "nav", "a", "span", "form"),
        *("input", "button", "h1", "h2", "p", "ul", "li", "strong", "div", "table", "caption", "thead", "tbody"),
        *("tr", "th", "td", "dl", "dt", "dd", "code", "time", "label", "select", "option"),
        *(
            "section",
            "noscript",
            "fieldset",
            "legend",
            "textarea",
            "meter",
            "datalist",
            "svg",
            "rect",
            "ol",
            "details",
            "summary",
            "wbr",
        ),
    )
)
PAGES = (
    "/",
    "/jobs",
    "/services",
    "/queues",
    "/nodes",
    "/nodes/n0",
    "/audit",
    "/settings",
    "/use",
    "/plan",
    "/what-if",
)
SERVICE = {**JOB, "gpus": 1, "name": "web", "type": "service", "replicas": "1..3", "port": 8000, "ready": "/health"}


class Page(HTMLParser):
    """A page as a browser reads it: its tags, its text, and the cells of its rows."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.rows, self.open = [], "", [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        if tag == "td":
            self.open = False

    def handle_data(self, data):
        self.text += data
        if self.open:
            self.rows[-1][-1] += data

    @property
    def cells(self):
        return [row for row in self.rows if row]


@pytest.fixture
def page(call):
    def get(path, role="admin"):
        reply = call(role, "GET", path)
        assert reply.status_code == 200, (path, reply.text)
        return Page(reply.text)

    return get


def show_fleet(head):
    """The fleet page has only the session to go by; here its content alone matters."""
    return fleet_frame(head.parts)


def test_list_without_a_filter_says_that_there_are_no_jobs_yet(page):
    assert "No jobs yet." in page("/jobs").text
    found = page("/jobs?name=nope").text
    assert "No job matches." in found
    assert "No jobs yet." not in found


def test_fleet_states_each_gpu_by_a_letter(head, call, page):
    supervisor = Supervisor(call)
    supervisor.hello()
    job = call.submit()
    supervisor.run(job)
    Supervisor(call, "n1", "s2", devices=2).hello()
    assert call("operator", "POST", "/v1/nodes/n1/drain", {"why": "fan"}).status_code == 200
    frame = show_fleet(head)
    assert (frame.nodes, frame.cells, frame.states) == (["n0", "n1"], ["HHFF", "DD"], ["up", "draining"])
    assert frame.jobs == [[job, job, "", ""], []]
    shown = page("/")
    assert ["n0", "", "up", "HHFF", f"{job} "] in shown.cells


def test_nodes_of_one_rack_are_beside_each_other(head, call):
    for node, rack in (("n0", "b"), ("n1", "a"), ("n2", "b")):
        Supervisor(call, node, f"s-{node}").hello()
        head.ask(LabelNodes(labels={node: {"rack": rack}}, by="root"))
    assert show_fleet(head).nodes == ["n1", "n0", "n2"]
    assert show_fleet(head).places == ["rack a", "rack b", "rack b"]


def test_node_that_is_down_shows_all_its_gpus_down(head, call):
    Supervisor(call).hello()
    (node,) = head.store.nodes()
    down = replace(node, state=NodeState.DOWN)
    assert {cell_state(down, device, held=True, utilization=1.0).letter for device in node.devices} == {"X"}


def test_held_gpu_shows_what_the_ledger_of_states_says(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    supervisor.run(call.submit())
    parts = replace(head.parts, part_states=head.usage.part_states)
    until(lambda: fleet_frame(parts).cells == ["SSFF"])  # its ranks have just begun


@pytest.mark.parametrize(
    ("state", "note", "letter"),
    [
        ("computing", "", "A"),
        ("computing", "progress unknown", "A"),
        ("computing", "unobserved", "H"),
        ("data_bound", "", "W"),
        ("hung", "", "G"),
        ("unoccupied", "", "U"),
        ("free", "", "A"),  # the ledger has not seen the allocation yet: the sample decides
    ],
)
def test_state_of_the_ledger_gives_the_letter(head, call, state, note, letter):
    Supervisor(call).hello()
    (node,) = head.store.nodes()
    usage = PartState(UsageState(state), note)
    assert cell_state(node, node.devices[0], held=True, utilization=0.9, usage=usage).letter == letter


def test_jobs_are_filtered_and_paged_from_the_newest(call, page):
    jobs = [call.submit(name=f"j{number}") for number in range(103)]
    first = page("/jobs")
    assert [row[0] for row in first.cells] == jobs[:2:-1]
    (older,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "after=" in attrs.get("href", "")]
    assert [row[0] for row in page(older).cells] == jobs[2::-1]
    # The titles sort all jobs, not only the page; the filter and the order stay.
    (by_name,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "sort=name" in attrs.get("href", "")]
    names = sorted(f"j{number}" for number in range(103))
    assert [row[1] for row in page(by_name).cells] == names[:100]
    (more,) = [attrs["href"] for tag, attrs in page(by_name).tags if tag == "a" and "after=" in attrs.get("href", "")]
    assert [row[1] for row in page(more).cells] == names[100:]
    (back,) = [
        attrs["href"]
        for tag, attrs in page(by_name).tags
        if tag == "a" and "sort=name" in attrs.get("href", "") and "after=" not in attrs["href"]
    ]
    assert [row[1] for row in page(back).cells][:3] == names[:-4:-1]
    assert call("admin", "GET", "/jobs?sort=luck").status_code in (400, 422)
    assert [row[1] for row in page("/jobs?name=j7").cells] == ["j7"]
    assert page("/jobs?state=failed").cells == []
    assert call("admin", "GET", "/jobs?state=asleep").status_code == 400


def test_nodes_come_in_pages_by_name(call, page, monkeypatch):
    monkeypatch.setattr(page_routes, "NODES_SHOWN", 2)
    for name in ("n2", "n0", "n1"):
        Supervisor(call, name, f"s-{name}").hello()
    first = page("/nodes")
    assert [row[0] for row in first.cells] == ["n0", "n1"]
    (further,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "after=" in attrs.get("href", "")]
    assert [row[0] for row in page(further).cells] == ["n2"]
    assert call("operator", "POST", "/v1/nodes/n1/drain", {"why": "fan"}).status_code == 200
    for query, names in (
        ("sort=state&ascending=false", ["n2", "n0", "n1"]),
        ("sort=state", ["n1", "n0", "n2"]),
        ("sort=held&ascending=false", ["n2", "n1", "n0"]),
    ):
        first = page(f"/nodes?{query}")
        (further,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "after=" in attrs.get("href", "")]
        assert [row[0] for row in (*first.cells, *page(further).cells)] == names


def test_node_shows_its_newest_history_first(call, page):
    Supervisor(call).hello()
    for why in ("first", "second"):
        assert call("operator", "POST", "/v1/nodes/n0/drain", {"why": why}).status_code == 200
        assert call("operator", "POST", "/v1/nodes/n0/undrain").status_code == 200
    drained = [row[2] for row in page("/nodes/n0").cells if row[1] == "drained"]
    assert drained == ["n0 is drained by opal: second", "n0 is drained by opal: first"]


def test_job_shows_its_history_and_hides_from_others_what_the_api_hides(call, page):
    job = call.submit()
    own, other = page(f"/jobs/{job}", "user"), page(f"/jobs/{job}", "other")
    assert "train.py" in own.text
    assert "train.py" not in other.text
    assert any(row[1] == "submitted" for row in own.cells)
    assert call("user", "GET", "/jobs/999").status_code == 404


def test_service_shows_replicas_revisions_and_rollout(head, call, page):
    supervisor = Supervisor(call)
    supervisor.hello()
    assert "no services" in page("/services").text
    assert call("user", "POST", "/v1/services", SERVICE).status_code == 201
    until(lambda: page("/services/web").cells[0][:2] == ["1", "1"])
    place = {"job_id": "1", "epoch": 1, "generation": 0, "node_id": "n0"}
    supervisor.tell(MemberReady(**place, port=29500, service_port=8000))
    supervisor.tell(MemberStarted(**place, at_s=time.time()), ReadinessChanged(**place, ready=True))
    until(lambda: page("/services").cells[0][:4] == ["web", "ready", "1 of 1 ready 1 of 1 ready", "1"])  # text and bar
    assert page("/services").cells[0][8].strip() == "127.0.0.1:8000"
    assert (
        call("user", "PATCH", "/v1/services/web", {"spec": {**SERVICE, "run": ["python", "two.py"]}}).status_code == 200
    )
    shown = page("/services/web", "user")
    assert "rollout from 1 to 2: 0 of 1 ready" in shown.text
    assert [row[0] for row in shown.cells if "two.py" in row[-1] or "train.py" in row[-1]] == [
        "2 (wanted now)",
        "1 (serving)",
    ]
    assert "train.py" not in page("/services/web", "other").text
    assert live_data(shown)["data-may-change"] == "yes"
    assert "data-may-change" not in live_data(page("/services/web", "other"))
    assert call("user", "POST", "/v1/services/web/stop").status_code == 200
    assert page("/services").cells == []
    assert "data-may-change" not in live_data(page("/services/web", "user"))
    assert call("user", "GET", "/services/nothing").status_code == 404


def test_plan_shows_what_the_command_line_says(call, page):
    shown = page("/plan?model=llama-3-8b&gpus=2xh100:8&tokens=300B", "viewer")
    same = {"model": "llama-3-8b", "gpus": "2xh100:8", "tokens": "300B"}
    found = call("viewer", "POST", "/v1/plan", same).json()
    assert found["fits"]
    layouts = [row for row in shown.cells if len(row) == 10]
    assert [row[1] for row in layouts] == [one["text"] for one in found["layouts"]]
    assert found["layouts"][0]["text"] in shown.text.partition("Run it:")[2]
    assert {row[0].strip() for row in shown.cells if len(row) == 3} >= set(found["layouts"][0]["memory"]["items"])
    assert sum(tag == "li" and "b-s" in str(attributes.get("class")) for tag, attributes in shown.tags) == 16  # ranks
    offloaded = page("/plan?model=llama-3-8b&gpus=a100-80gb:8&global_batch=64&offload=optimizer", "viewer").text
    assert "offload optimizer: saves" in offloaded
    assert "Memory of each host" in offloaded
    asked = {"model": "llama-3-8b", "gpus": "a100-80gb:8", "method": "lora", "mean_length": "600", "host_memory": "2T"}
    lengths = call("viewer", "GET", "/plan", params=asked).text
    assert "samples of 600 tokens, at most 4,096, padded to" in lengths
    assert "<details open>" in lengths  # the fields that were filled in are seen
    assert call("viewer", "POST", "/v1/plan", asked).json()["asked"]["samples"]["mean_length"] == 600
    refused = call("viewer", "GET", "/plan?model=llama-3.1-405b&gpus=h100:1").text
    assert "does not fit" in refused
    assert "Run it:" not in refused


def test_plan_reads_no_file_of_the_heads_machine(call, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 1}')
    for model in (str(path), str(tmp_path), "/etc/passwd"):
        reply = call("viewer", "POST", "/v1/plan", {"model": model, "gpus": "h100:8"})
        assert code(reply) == (400, "bad_request")
        assert "unknown model" in reply.json()["error"]["message"]


def test_plan_says_whether_this_fleet_has_the_gpus_now(call, page):
    Supervisor(call).hello()
    sizes = "layers=2,hidden=64,heads=4,vocab=1000"
    assert "This fleet now: these 4 GPUs are free" in page(f"/plan?model={sizes}&global_batch=8", "user").text
    assert "This fleet now" not in page(f"/plan?model={sizes}&global_batch=8", "viewer").text  # may not submit
    call.submit(gpus=3)
    until(lambda: "a job on them would wait" in page(f"/plan?model={sizes}&global_batch=8", "user").text)


def test_what_if_compares_the_start_with_more_nodes_drained_nodes_and_quotas(head, call, page):
    supervisor = Supervisor(call)
    supervisor.hello()
    running = call.submit(gpus=4, time="1h")
    supervisor.run(running)
    quota = {"id": "default", "quota_gpus": 12, "borrow_gpus": 0}
    assert call("operator", "PUT", "/v1/queues", {"queues": [quota]}).status_code == 200
    before = head.store.load()
    asked = {"job": {**JOB, "gpus": 4, "time": "30m"}}
    now = call("user", "POST", "/v1/what-if", asked).json()
    assert (now["now"]["starts"], now["then"], now["changes"]) == (False, None, [])
    more = call("user", "POST", "/v1/what-if", {**asked, "add_nodes": 1}).json()
    assert (more["now"]["starts"], more["then"]["starts"]) == (False, True)
    assert more["changes"] == ["1 more node like n0 (4 x virtual)"]
    limits = {"add_nodes": 1, "quotas": {"default": 4}}
    less = call("user", "POST", "/v1/what-if", {**asked, **limits}).json()["then"]
    assert (less["starts"], less["reason"]) == (False, "quota")
    drained = call("user", "POST", "/v1/what-if", {"job": {**JOB, "gpus": 1}, "drain": "n0"}).json()["then"]
    assert not drained["starts"]
    never = call("user", "POST", "/v1/what-if", {"job": {**JOB, "gpus": 8}, "add_nodes": 2}).json()
    assert (never["now"]["reason"], never["then"]["starts"]) == ("never", True)
    shown = page("/what-if?gpus=4&time=30m&add_nodes=1", "user")
    assert "With 1 more node like n0 (4 x virtual)" in shown.text
    bars = [row for row in shown.cells if len(row) == 3]
    assert [row[0] for row in bars] == [f"job {running} train", "this job", "this job"]
    assert "starts now and runs for at most 30m00s" in bars[2][2]
    assert head.store.load() == before  # nothing was written
    assert code(call("user", "POST", "/v1/what-if", {**asked, "drain": "n9"})) == (404, "not_found")
    assert code(call("user", "POST", "/v1/what-if", {**asked, "quotas": {"x": 1}})) == (404, "not_found")
    assert call("user", "POST", "/v1/what-if", {**asked, "add_nodes": 5000}).status_code == 400


def test_use_shows_the_hours_of_the_report_by_state_and_who_wasted_them(head, call, page):
    Supervisor(call).hello()
    empty = page("/use?days=1")
    assert "Nothing wastes GPUs now" in empty.text
    job = call.submit(gpus=1)
    head.clock.ahead_s += 4 * 3600.0
    shown = page("/use?days=1&by=project")
    report = call("viewer", "GET", f"/v1/usage?since_s={head.clock.now_s() - 86400}").json()
    states = {row[0].strip(): row for row in shown.cells if len(row) == 5 and row[2].endswith("%")}
    occurred = {STATES[state] for state, amount in report["total"]["by_state_us"].items() if amount}
    assert set(states) == occurred
    columns = [attributes for tag, attributes in shown.tags if tag == "rect" and attributes.get("y") is not None]
    assert len({attributes["x"] for attributes in columns}) in (4, 5)  # hours
    assert f"{report['total']['fleet_gpu_hours']:.1f}"[:2] in shown.text
    call("user", "POST", f"/v1/jobs/{job}/cancel")
    assert page("/use", "viewer").cells
    assert call("viewer", "GET", "/use?days=3").status_code == 400
    assert call("viewer", "GET", "/use?by=moon").status_code == 400


def test_waste_now_names_the_job_and_the_command_that_mends_it(head, call, page):
    row = WasteRowView(
        kind="idle",
        alarm=True,
        gpus=1.0,
        gpus_held=2.0,
        since_s=1.0,
        after_s=1.0,
        gpu_hours=12.5,
        gpu_us=45_000_000_000,
        advice=PAYLOADS[0],
        hint="stop it",
        hint_code=HintCode.CANCEL_JOB.value,
        hint_args={"job": "7"},
        job="7",
        name=PAYLOADS[1],
        user="ada",
    )
    sums = UsageSum(key="ada", total=4 * HOUR_US, by_state={"idle": 3 * HOUR_US, "lost": HOUR_US}, by_note={})
    period = UsagePeriod(since_s=0, fleet=4 * HOUR_US, by_state=sums.by_state)
    none, amount = Amount(), Amount(gpu_us=2 * HOUR_US)
    costs = [
        CostRow(key=PAYLOADS[2], used=amount, idle=none, used_cents=600, idle_cents=0),
        CostRow(key="", used=none, idle=amount, used_cents=0, idle_cents=200),
    ]
    use = Use(
        series=[period],
        wasters=UsageTotals(rows=(sums,), total=sums, fleet=sums.total),
        failed=[replace(sums, key="7")],
        waste=WasteView(at_s=1.0, rows=[row], alarms=1, gpus=1.0, gpu_hours=12.5, left_off=3),
        costs=Costs(currency="EUR", rows=costs, series=[(0, costs[:1]), (86400, costs[1:])]),
        nodes=[("n3", 4, 2)],
        nodes_of_jobs=1000,
    )
    viewer = Viewer(user="ada", role="user", csrf="", assets="/web", actions=("see",))
    shown = Page(use_page(UseAsked(days=30, by="user", hourly=False), use, (30,), ("user",), viewer))
    check(shown)
    (waste,) = [cells for cells in shown.cells if len(cells) == 8]
    assert waste == [
        "alarm",
        f"job 7 {PAYLOADS[1]} of ada",
        "idle",
        "1 of 2",
        *waste[4:5],
        "12.5",
        PAYLOADS[0],
        "phalanx cancel 7",
    ]
    assert ["n3", "4", "2"] in shown.cells
    assert [PAYLOADS[2], "2.000", "6.00", "75%"] in shown.cells
    assert ["(no job)", "2.000", "2.00", "25%"] in shown.cells
    assert ["total", "4.000", "8.00", ""] in shown.cells
    assert ["ada", "4.000", "4.000", "100%"] in [cells[:4] for cells in shown.cells]
    assert ["job 7", "4.000", "1.000"] in shown.cells
    assert "3 more" in shown.text


def test_job_shows_each_attempt_with_its_time_and_the_cause_of_its_end(head, call, page):
    supervisor = Supervisor(call)
    supervisor.hello()
    job = call.submit()
    assert "Attempts" not in page(f"/jobs/{call.submit(gpus=64, allow_never=True)}").text
    supervisor.run(job)
    (row,) = [cells for cells in page(f"/jobs/{job}").cells if len(cells) == 6]
    assert row[4].endswith(", not ended")
    supervisor.end(job, code=3)
    until(lambda: head.store.job(job).state.terminal)
    (row,) = [cells for cells in page(f"/jobs/{job}").cells if len(cells) == 6]
    assert (row[0], row[1], row[2].strip()) == ("1", "ended", "n0")
    assert ", ran " in row[4]
    assert "3" in row[5]


def live_data(page):
    return next(attributes for _, attributes in page.tags if attributes.get("id") == "live")


def test_services_come_in_pages_by_name(call, page, monkeypatch):
    monkeypatch.setattr(service_pages, "SERVICES_SHOWN", 2)
    for name in ("s2", "s0", "s1"):
        assert call("user", "POST", "/v1/services", {**SERVICE, "name": name}).status_code == 201
    first = page("/services")
    assert [row[0] for row in first.cells] == ["s0", "s1"]
    (further,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "after=" in attrs.get("href", "")]
    assert [row[0] for row in page(further).cells] == ["s2"]


def test_settings_show_tokens_and_forms_as_the_role_has_rights(call, page):
    def forms(role):
        return [attributes["data-form"] for _, attributes in page("/settings", role).tags if "data-form" in attributes]

    assert call("user", "PUT", "/v1/projects/nlp", {}).status_code == 403
    assert call("admin", "PUT", "/v1/projects/nlp", {"members": ["ada"], "admins": ["ada"]}).status_code == 200
    assert forms("admin") == ["token", "user", "project", "queues"]
    assert forms("operator") == ["token", "queues"]
    assert forms("user") == ["token", "project"]  # she administers one
    assert forms("other") == ["token"]
    own, every = page("/settings", "other"), page("/settings")
    assert {row[1] for row in own.cells if "all that the user may" in row} == {"bob"}
    assert {row[1] for row in every.cells if "all that the user may" in row} == {"vic", "ada", "bob", "opal", "root"}
    assert not any(secret in every.text for secret in TOKENS.values())
    made = call("user", "POST", "/v1/tokens", {"note": "laptop", "scope": ["see"]}).json()
    (row,) = [row for row in page("/settings", "user").cells if row[2] == "laptop"]
    assert (row[0], row[3]) == (made["token"]["id"], "see")
    assert call("user", "DELETE", f"/v1/tokens/{made['token']['id']}").status_code == 204
    assert "laptop" not in page("/settings", "user").text


def test_queue_file_on_the_page_changes_nothing_when_it_is_applied(call, page):
    tree = "queues:\n  ml:\n    quota: {gpus: 4, memory: 3GiB}\n    queues:\n      nlp: {weight: 2, open: false}\n"
    parsed = call("operator", "POST", "/v1/queues/parse", content=tree)
    assert parsed.status_code == 200
    assert call("operator", "PUT", "/v1/queues", parsed.json()).json()["added"] == ["ml", "nlp"]
    shown = call("operator", "GET", "/settings").text
    text = unescape(shown.partition("<textarea")[2].partition(">")[2].partition("</textarea>")[0])
    again = call("operator", "POST", "/v1/queues/parse", content=text).json()
    outcome = call("operator", "PUT", "/v1/queues", {**again, "prune": True, "dry_run": True}).json()
    assert (outcome["added"], outcome["changed"], outcome["removed"], outcome["unchanged"]) == ([], [], [], 3)
    wrong = call("operator", "POST", "/v1/queues/parse", content="queues:\n  ml:\n    quota: many\n")
    assert (wrong.status_code, wrong.json()["error"]["message"].split(":")[:2]) == (422, ["line", "3"])
    assert call("user", "POST", "/v1/queues/parse", content=tree).status_code == 403


@pytest.mark.parametrize("path", PAGES)
def test_pages_ask_for_the_right_that_the_api_asks_for(call, path):
    Supervisor(call).hello()
    wanted = 403 if path in ("/audit", "/what-if") else 200
    assert call("viewer", "GET", path).status_code == wanted
    assert call("admin", "GET", path).status_code == 200


def test_no_text_of_a_user_becomes_markup(head, call, page):
    Supervisor(call).hello()
    fields = {"env": {"X": "y"}}
    jobs = [call.submit("admin", name=text, labels={"note": text}, run=["echo", text], **fields) for text in PAYLOADS]
    for job, text in zip(jobs, PAYLOADS, strict=True):
        assert call("admin", "POST", f"/v1/jobs/{job}/cancel", {"why": text}).status_code == 200
        assert call("operator", "POST", "/v1/nodes/n0/drain", {"why": text}).status_code == 200
        shown = page(f"/jobs/{job}")
        assert text in shown.text
        check(shown)
        check(page("/nodes/n0"))
    assert all(any(row[1] == text for row in page("/jobs").cells) for text in PAYLOADS)
    for text in PAYLOADS[:5]:
        assert call("admin", "POST", "/v1/tokens", {"note": text}).status_code == 201
    run = {"run": ["echo", PAYLOADS[0]], "labels": {"note": PAYLOADS[6]}}
    assert call("admin", "POST", "/v1/services", {**SERVICE, **run}).status_code == 201
    for path in (*PAGES, "/services/web"):
        check(page(path))
    assert all(text in page("/settings").text for text in PAYLOADS[:5])
    for text in PAYLOADS:  # and what a link of another site puts into an address
        for path in ("/plan", "/what-if"):
            fields = dict.fromkeys((*PLAN_FIELDS, *planning.JOB_FIELDS, *planning.CHANGE_FIELDS), text)
            reply = call("admin", "GET", path, params=fields)
            assert reply.status_code in (400, 422), text
            check(Page(reply.text))
        for path in ("/jobs", "/nodes/" + text.replace("/", "").replace("?", "").replace("#", ""), "/sign-in"):
            reply = call("admin", "GET", path, params={"name": text, "user": text, "queue": text, "code": text})
            check(Page(reply.text))


def check(page):
    """A page has our tags alone, none with a handler, and addresses of this head alone."""
    assert {tag for tag, _ in page.tags} <= OUR_TAGS
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc")]
        for name in ("href", "src", "action"):
            if name in attributes:
                assert attributes[name].startswith(("/", "#")), (tag, attributes)
                assert not attributes[name].startswith("//")


def test_files_of_the_pages_are_compressed_and_kept_for_ever(call):
    assets = load_assets()
    for name, asset in assets.by_name.items():
        reply = call(None, "GET", f"{assets.path}/{name}")
        assert (reply.status_code, reply.headers["content-encoding"], reply.content) == (200, "gzip", asset.body)
        assert reply.headers["content-type"] == asset.media_type
        assert "immutable" in reply.headers["cache-control"]
    plain = call(None, "GET", f"{assets.path}/dashboard.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    again = call(None, "GET", f"{assets.path}/dashboard.css", headers={"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["{now}/../vendor.json", "{now}/vendor/vendor.json", "{now}/%2e%2e/assets.py", "old/dashboard.js"]
)
def test_nothing_but_the_pages_files_is_served(call, path):
    version = load_assets().version
    assert code(call(None, "GET", "/web/" + path.format(now=version))) == (404, "not_found")


def test_use_names_the_node_that_failed_and_says_when_older_jobs_are_left_out(head, call, page, monkeypatch):
    supervisor = Supervisor(call)
    supervisor.hello()
    for _ in range(2):
        job = call.submit()
        supervisor.run(job)
        supervisor.end(job, code=3)
        until(lambda job=job: head.store.job(job).state.terminal)
    shown = page("/use?days=1")
    assert ["n0", "2", "2"] in shown.cells
    assert "Of the newest" not in shown.text
    assert "phalanx prices apply FILE" in shown.text
    monkeypatch.setattr(use_routes, "JOBS_MAX", 1)
    shown = page("/use?days=1")
    assert ["n0", "1", "1"] in shown.cells
    assert "Of the newest 1 jobs." in shown.text


def test_audit_trail_is_filtered_by_user_and_object_and_goes_back_page_by_page(call, page, monkeypatch):
    monkeypatch.setattr(audit_pages, "LINES_SHOWN", 2)
    monkeypatch.setattr(audit_pages, "_READ", 3)
    jobs = [call.submit(name=name) for name in ("one", "two")]
    for role, job, verb in (
        ("operator", 0, "hold"),
        ("user", 1, "hold"),
        ("user", 0, "release"),
        ("operator", 0, "hold"),
    ):
        assert call(role, "POST", f"/v1/jobs/{jobs[job]}/{verb}").status_code == 200
    of_job = f"/audit?object=job_id={jobs[0]}"
    first = page(of_job)
    assert [(row[2], row[4].rpartition("/")[2]) for row in first.cells] == [("opal", "hold"), ("ada", "release")]
    (older,) = [attrs["href"] for tag, attrs in first.tags if tag == "a" and "before=" in attrs.get("href", "")]
    assert [(row[2], row[4].rpartition("/")[2]) for row in page(older).cells] == [("opal", "hold")]
    assert [row[2] for row in page(f"{of_job}&user=opal").cells] == ["opal", "opal"]
    assert page(f"/audit?object={jobs[0]}").cells == first.cells, "the value alone is enough"
    assert page("/audit?object=job_id=999").cells == []
    seen, path = [], "/audit"
    while path:
        shown = page(path)
        seen += [int(row[0]) for row in shown.cells]
        path = next(
            (attrs["href"] for tag, attrs in shown.tags if tag == "a" and "before=" in attrs.get("href", "")), ""
        )
    assert seen == list(range(seen[0], 0, -1)), "every line once, none left out"
    monkeypatch.setattr(audit_pages, "READS_MAX", 1)
    cut = page("/audit?object=job_id=999")
    assert f"No line matches, back to line {seen[0] - 2}." in cut.text
    assert page("/audit?before=0").cells == page("/audit?before=1").cells == []
    assert f"/audit?object=job_id%3D{jobs[0]}" in [attrs.get("href") for _, attrs in page(f"/jobs/{jobs[0]}").tags]
    assert "audit trail" not in page(f"/jobs/{jobs[0]}", "user").text


def test_use_shows_what_projects_spent_this_month_beside_their_budgets(head, call, page):
    Supervisor(call).hello()
    prices = {"currency": "EUR", "prices": [{"gpu": "virtual", "per_gpu_hour": "2.00"}]}
    assert call("operator", "PUT", "/v1/prices", prices).status_code == 200
    assert call("admin", "PUT", "/v1/projects/default", {"budget": "1000 EUR/month"}).status_code == 200
    call.submit(gpus=1)
    head.clock.ahead_s += 600.0
    spending = call("viewer", "GET", "/v1/projects/default/spending").json()
    (row,) = [row for row in page("/use?days=30").cells if len(row) == 5 and row[0] == "default"]
    assert row[1:] == [f"{spending['spent']} EUR", f"{spending['forecast']} EUR", "1000 EUR/month", "0 %"]
    assert "a period of 30 days" in page("/use?days=7").text


def test_what_if_draws_the_fleet_over_time_as_things_are_and_with_the_changes(head, call, page):
    supervisor = Supervisor(call)
    supervisor.hello()
    supervisor.run(call.submit(gpus=4, time="1h"))
    asked = {"job": {**JOB, "gpus": 4, "time": "30m"}, "add_nodes": 1}
    reply = call("user", "POST", "/v1/what-if", asked)
    curves = reply.json()["curves"]
    assert (curves["fleet_now"], curves["fleet_then"], curves["left_out"]) == (4, 8, 0)
    names = ("gpus_now", "waiting_now", "gpus_then", "waiting_then")
    assert {len(curves[name]) for name in names} == {what_if_routes.CURVE_POINTS}
    # The last start is after an hour, and the curves go on for a quarter of that: the job of 30 minutes still runs at their end.
    times = [at * curves["step_s"] for at in range(what_if_routes.CURVE_POINTS)]
    assert times[-1] == pytest.approx(1.25 * 3600, rel=0.01)
    for at_s, *values in zip(times, *(curves[name] for name in names), strict=True):
        if abs(at_s - 1800) > 60 and abs(at_s - 3600) > 60:
            assert values == [4, int(at_s < 3600), 8 if at_s < 1800 else 4 if at_s < 3600 else 0, 0], at_s
    alone = call("user", "POST", "/v1/what-if", {"job": asked["job"]}).json()["curves"]
    assert (alone["gpus_then"], alone["waiting_then"], alone["fleet_then"]) == ([], [], 0)
    shown = page("/what-if?gpus=4&time=30m&add_nodes=1", "user")
    assert [row[1:] for row in shown.cells if len(row) == 5][::24] == [["4", "1", "8", "0"], ["4", "0", "0", "0"]]
    (drawn,) = [attrs["data-curves"] for _, attrs in shown.tags if "data-curves" in attrs]
    assert json.loads(drawn).keys() == curves.keys()


def test_what_if_says_that_the_rest_is_unknown_if_the_projection_takes_too_long(call, page, monkeypatch):
    monkeypatch.setattr(why_routes, "PROJECTION_TIME_S", -1.0)
    supervisor = Supervisor(call)
    supervisor.hello()
    supervisor.run(call.submit(gpus=4, time="1h"))
    curves = call("user", "POST", "/v1/what-if", {"job": {**JOB, "gpus": 4, "time": "30m"}}).json()["curves"]
    assert (curves["gpus_now"][:2], curves["waiting_now"][:2]) == ([4, None], [1, None])
    assert "the rest of the time is unknown" in page("/what-if?gpus=4&time=30m", "user").text
