"""Ten questions of an operator who has only the dashboard: each is answered by following links and reading what is shown.

The true answers come from the API, or are what was planted; never from the page.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import time

import pytest

from tests import chromium_here
from tests.dashboard.planted_head import BROKEN, CORDONED, FAILING, FAULT, planted_head

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
CLICKS_MAX = 20
SEEN = "one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    with planted_head(str(tmp_path_factory.mktemp("head"))) as planted:
        yield planted


@pytest.fixture(scope="module")
def browser():
    with chromium_here.chromium() as page:
        yield page


class Operator:
    """Somebody with a browser: sees what is visible, clicks it, and fills in what has a label. Types no address."""

    def __init__(self, page):
        self.page = page

    def follow(self, text, within="body"):
        """Click the visible link or button with this text, and wait for the page that it leads to."""
        mark = f"followed-{time.monotonic()}"
        self.page.run(f"window.mark = '{mark}'")
        left = f"window.mark !== '{mark}' && document.readyState === 'complete'"
        place = f"""(() => {{
          if (window.mark !== '{mark}') return null;
          const one = [...document.querySelectorAll({json.dumps(f"{within} a, {within} button")})].find((one) => one.innerText.trim() === {json.dumps(text)} && {SEEN});
          if (!one) return null;
          one.scrollIntoView({{ block: "center" }});
          const box = one.getClientRects()[0]; // of its first line
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        found = None
        for _ in range(CLICKS_MAX):  # fresh rows may replace what is being clicked: a person clicks again
            found = self.page.until(f"({left}) || {place}")
            if found is True:
                break
            for kind in ("mousePressed", "mouseReleased"):
                self.page.send(
                    "Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1
                )
            time.sleep(0.3)
        assert found is True, f"{text!r} leads nowhere"
        self.page.until("document.querySelector('.connection')?.textContent === 'live'")

    def choose(self, label, value):
        """Set the field with this label."""
        field = (
            f"[...document.querySelectorAll('label')].find((one) => one.firstChild.textContent.trim() === {json.dumps(label)}"
            f" && {SEEN})?.querySelector('input, select')"
        )
        self.page.until(field)
        self.page.run(f"(() => {{ const one = {field}; one.value = {json.dumps(value)}; return one.value }})()")
        assert self.page.run(f"{field}.value") == value, (label, value)

    def table(self, caption):
        """The rows of a table as they are rendered: its cells by the titles of its columns."""
        found = self.page.until(
            f"""(() => {{
              const found = [...document.querySelectorAll('table')].find((one) => one.caption?.textContent.startsWith({json.dumps(caption)}));
              if (!found || !((one) => {SEEN})(found)) return null;
              const titles = [...found.tHead.rows[0].cells].map((one) => one.innerText.replace(/[\u25b4\u25be]/, "").trim());
              return [...found.tBodies[0].rows].map((row) => Object.fromEntries([...row.cells].map((one, at) => [titles[at], one.innerText.trim()])));
            }})()"""
        )
        return found

    def text(self, selector):
        """What is rendered in an element."""
        return self.page.until(f"document.querySelector({json.dumps(selector)})?.innerText")

    def reads(self, selector, words):
        """Wait until an element shows these words."""
        self.page.until(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(words)})")

    def facts(self):
        """The facts of the page by name."""
        return self.page.run(
            "Object.fromEntries([...document.querySelectorAll('.facts dt')].map((one) => [one.innerText, one.nextElementSibling.innerText]))"
        )


@pytest.fixture
def operator(planted, browser):
    """Signed in as an admin, on the start page."""
    browser.open(planted.call.url + planted.call("admin", "POST", "/v1/dashboard/link").json()["path"])
    browser.until("location.pathname === '/' && document.querySelector('.connection')?.textContent === 'live'")
    yield Operator(browser)
    assert browser.problems == []


def api(planted, path):
    reply = planted.call("admin", "GET", path)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json()


def test_1_who_wastes_most_this_week(planted, operator):
    operator.follow("Use")
    operator.choose("Days", "7")
    operator.choose("Wasters by", "user")
    operator.follow("Show")
    shown = operator.table("Who wasted most")[0]
    since_s = planted.head.clock.now_s() - 7 * 86400
    rows = api(planted, f"/v1/usage?by=user&since_s={since_s}")["rows"]
    wasted = ("idle", "unoccupied", "hung", "lost", "low", "data_bound", "communicating", "broken", "fragmented")
    most = max(
        (row for row in rows if row["key"]), key=lambda row: sum(row["by_state_us"].get(one, 0) for one in wasted)
    )
    people = [row for row in operator.table("Who wasted most") if row["User"] != "(no job)"]
    assert people[0]["User"] == most["key"] == "bob"
    assert people[0]["Most of it"].startswith("idle: ")
    assert shown["Wasted"]


def test_2_why_does_a_job_wait_and_what_would_help(planted, operator):
    job = planted.jobs["quick-eval"]
    why = api(planted, f"/v1/jobs/{job}/why")
    operator.follow("Jobs")
    operator.choose("State", "pending")
    operator.follow("Show")
    assert {row["Name"] for row in operator.table("Jobs")} == {"quick-eval", "llama-70b-pretrain"}
    operator.follow(job, within="tbody")
    operator.reads(".why", why["detail"])
    assert why["changes"], "nothing would help: the question has no answer"
    for change in why["changes"]:
        operator.reads(".why", change["text"])
    assert any(CORDONED in change["text"] for change in why["changes"])


def test_3_which_node_failed_most(planted, operator):
    operator.follow("Use")
    shown = operator.table("Nodes that failed")
    rows = api(planted, "/v1/failures?by=node&since_s=0")["rows"]
    most = max(rows, key=lambda row: row["failures"])
    assert (shown[0]["Node"], shown[0]["Failures"]) == (most["key"], str(most["failures"])) == (FAILING, "4")
    operator.follow(FAILING, within="main")
    operator.reads("h1", FAILING)


def test_4_who_holds_gpus_and_does_nothing(planted, operator):
    operator.follow("Use")
    (shown,) = [row for row in operator.table("Waste now") if row["Waste"] == "idle"]
    (truth,) = [row for row in api(planted, "/v1/waste")["rows"] if row["kind"] == "idle"]
    assert (truth["user"], truth["name"]) == ("bob", "notebook")
    assert shown["Job or node"] == f"job {truth['job']} {truth['name']} of {truth['user']}"
    assert shown["GPUs"] == f"{truth['gpus']:g} of {truth['gpus_held']:g}"
    assert shown["What mends it"]
    operator.follow(f"job {truth['job']}", within="main")
    assert operator.facts()["Waste"].startswith("7 GPUs idle, since ")


def test_5_what_did_a_project_cost_this_month(planted, operator):
    operator.follow("Use")
    (shown,) = [row for row in operator.table("Spending in") if row["Project"] == "speech"]
    truth = api(planted, "/v1/projects/speech/spending")
    words = json.dumps(truth["month"])
    assert operator.page.run(
        f"[...document.querySelectorAll('caption')].some((one) => one.textContent.includes({words}))"
    )
    amount, currency = shown["Spent"].split()
    assert currency == truth["currency"] == "EUR"
    # The project goes on computing between the two readings.
    assert 0 <= float(truth["spent"]) - float(amount.replace(",", "")) < 1


def test_6_which_queue_lends_and_which_borrows(planted, operator):
    operator.follow("Queues")
    shown = {row["Queue"]: row for row in operator.table("Queues")}
    truth = {row["id"]: row for row in api(planted, "/v1/queues")["queues"]}
    for column, key in (("Borrowed", "borrowed_gpus"), ("Lent", "lent_gpus")):
        assert {name: row[column] for name, row in shown.items()} == {
            name: f"{row[key]:g}" for name, row in truth.items()
        }
    assert {name for name, row in shown.items() if row["Borrowed"] != "0"} == {"research"}
    assert {name for name, row in shown.items() if row["Lent"] != "0"} == {"prod"}


def test_7_is_a_node_broken_and_with_what_evidence(planted, operator):
    operator.reads("#legend", "broken")
    operator.follow("Nodes")
    broken = [row for row in operator.table("Nodes") if "broken" in row["Health"]]
    assert [row["Node"] for row in broken] == [BROKEN]
    assert "broken GPUs: 3" in broken[0]["Health"]
    assert FAULT in broken[0]["Health"]
    operator.follow(BROKEN, within="tbody")
    (gpu,) = [row for row in operator.table("GPUs") if row["Health"] != "healthy"]
    assert (gpu["GPU"], gpu["Health"]) == ("3", "broken")
    assert FAULT in operator.facts()["State"]


def test_8_what_did_a_user_do_to_a_job(planted, operator):
    job = planted.jobs["llama-70b-pretrain"]
    operator.follow("Jobs")
    operator.follow(job, within="tbody")
    operator.follow("What people did to this job")
    operator.choose("User", "opal")
    operator.follow("Show")
    shown = operator.table("Audit trail")
    lines = [
        line for line in api(planted, "/v1/audit?user=opal&limit=1000")["lines"] if line["target"] == f"job_id={job}"
    ]
    assert [row["Request"] for row in shown] == [line["action"] for line in reversed(lines)]
    assert [row["Request"].rpartition("/")[2] for row in shown] == ["hold", "hold"]
    assert {(row["User"], row["Result"]) for row in shown} == {("opal", "done")}


def test_9_is_a_budget_nearly_used_up(planted, operator):
    operator.follow("Use")
    shown = [row for row in operator.table("Spending in") if row["Used"]]
    truth = {name: api(planted, f"/v1/projects/{name}/spending") for name in ("vision", "nlp")}
    assert [row["Project"] for row in shown] == ["vision", "nlp"], "the most used budget is first"
    assert [row["Used"] for row in shown] == [f"{truth[row['Project']]['percent']} %" for row in shown]
    assert 90 <= int(shown[0]["Used"].split()[0]) <= 100
    assert shown[0]["Budget"] == truth["vision"]["budget"]


def test_10_which_job_is_stuck_in_which_step_at_which_loss(planted, operator):
    operator.follow("Use")
    (shown,) = [row for row in operator.table("Waste now") if row["Waste"] == "hung"]
    job = planted.jobs["reward-model"]
    assert shown["Job or node"] == f"job {job} reward-model of opal"
    operator.follow(f"job {job}", within="main")
    progress = api(planted, f"/v1/jobs/{job}")["job"]["progress"]
    assert progress["step"] == 40
    operator.reads("main", f"Step {progress['step']} of {progress['steps_total']}")
    operator.reads("main", f"loss {progress['loss']:#.4g}")
    operator.reads("main", "newest step at")
    assert operator.facts()["Waste"].startswith("8 GPUs hung, since ")
