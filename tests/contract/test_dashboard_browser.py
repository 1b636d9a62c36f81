"""The dashboard in a real Chromium: sign-in, every page, actions by keyboard and mouse, and fifty scripts in names that never run."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import http.server
import json
import threading
from urllib.parse import quote

import pytest

from phalanx.core.state.events import LabelNodes, RevokeToken
from tests import axe_here, chromium_here
from tests.contract.api_head import JOB, TOKENS, Supervisor, until
from tests.contract.xss_payloads import PAYLOADS

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
PAGES = (
    *(
        "/",
        "/jobs",
        "/services",
        "/services/web",
        "/queues",
        "/nodes",
        "/nodes/n0",
        "/audit",
        "/settings",
        "/use?days=1",
    ),
    *("/plan", "/plan?model=llama-3-8b&gpus=2xh100:8&tokens=300B", "/what-if", "/what-if?gpus=4&time=1h&add_nodes=2"),
)
# What the forms of a page send, and the page shows again.
FORMS = {
    "/plan": ("model", "gpus", "tokens"),
    "/what-if": ("gpus", "time", "add_nodes"),
    "/use": ("days", "by"),
    "/audit": ("user", "object"),
    "/sign-in": ("next", "error"),
}
# What the script of a page shows last.
READY = {
    "/": "document.querySelector('canvas')",
    "/jobs/2": "document.querySelector('.why strong')",
    "/services/web": "document.querySelector('.actions')",
    "/settings": "document.body.classList.contains('scripted')",
}
SERVICE = {**JOB, "gpus": 1, "name": "web", "type": "service", "replicas": "1..3"}


@pytest.fixture
def page():
    with chromium_here.chromium() as page:
        yield page


class LivingSupervisor(Supervisor):
    """Renews its lease, so that its node and its jobs live as long as the test."""

    def __init__(self, call):
        super().__init__(call)
        self.epochs, self.ended = [], threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True)

    def renew(self):
        while not self.ended.wait(1.0):
            self.lease(self.epochs)

    def run(self, job_id, epoch=1):
        super().run(job_id, epoch)
        self.epochs.append((job_id, epoch))


@pytest.fixture
def supervisor(call):
    supervisor = LivingSupervisor(call)
    supervisor.hello()
    supervisor.thread.start()
    yield supervisor
    supervisor.ended.set()
    supervisor.thread.join(timeout=60)


def sign_in(call, page, role="admin"):
    page.open(call.url + call(role, "POST", "/v1/dashboard/link").json()["path"])
    page.until("location.pathname === '/' && document.querySelector('nav')")


def live(page):
    page.until("document.querySelector('.connection')?.textContent === 'live'")


def text(page):
    return page.run("document.body.innerText")


def test_link_signs_in_once_and_the_fleet_is_live(head, call, page, supervisor):
    sign_in(call, page)
    assert page.run("location.search") == ""
    assert page.run("document.cookie") == ""  # out of reach of scripts
    live(page)
    page.until("document.querySelector('canvas')")
    page.until("document.querySelector('[data-letter=F] .count').textContent === '4'")
    supervisor.run(call.submit())
    page.until("document.querySelector('[data-letter=H] .count').textContent === '2'")
    assert call("operator", "POST", "/v1/nodes/n0/drain", {"why": "fan"}).status_code == 200
    page.until("document.querySelector('[data-letter=D] .count').textContent === '2'")
    page.run("document.querySelector('[role=application]').focus()")
    page.press("ArrowRight")
    page.until("document.querySelector('.picked h2')?.innerText.includes('draining')")
    page.press("Enter")
    page.until("location.pathname === '/nodes/n0'")
    assert page.problems == []


def test_form_signs_in_and_every_page_reads_without_javascript(call, page, supervisor):
    job = call.submit()
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.open(f"{call.url}/jobs")
    page.click("#token")
    page.type(TOKENS["admin"])
    page.press("Enter")
    page.until("location.pathname === '/jobs' && document.querySelector('tbody')")
    for path, words in (("/", "n0"), ("/jobs", "train"), (f"/jobs/{job}", "submitted"), ("/queues", "default")):
        page.open(call.url + path)
        assert words in text(page)
    for path, words in (("/nodes", "4 x virtual"), ("/nodes/n0", "healthy"), ("/audit", "POST /v1/jobs")):
        page.open(call.url + path)
        assert words in text(page)
    page.click(".leave button")
    page.until("document.querySelector('#token')")
    page.open(f"{call.url}/jobs")
    assert page.run("document.querySelector('nav')") is None


@pytest.mark.parametrize("path", PAGES)
def test_pages_load_without_an_error_and_fit_a_narrow_screen(call, page, supervisor, path):
    supervisor.run(call.submit())
    assert call("user", "POST", "/v1/services", SERVICE).status_code == 201
    sign_in(call, page)
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.send("Emulation.setDeviceMetricsOverride", **size)
    page.open(call.url + path)
    live(page)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []


@pytest.mark.skipif(not axe_here.SCRIPT.exists(), reason="no axe-core here: make browser-tools")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding(call, page, supervisor, scheme):
    supervisor.run(call.submit())
    call.submit(gpus=64, allow_never=True)  # it waits
    assert call("user", "POST", "/v1/services", SERVICE).status_code == 201
    sign_in(call, page)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    for path in (*PAGES, "/jobs/1", "/jobs/2"):
        page.open(call.url + path)
        live(page)
        page.until(READY.get(path, "true"))
        assert axe_here.findings(page) == [], path


def test_job_is_cancelled_by_keyboard_with_its_reason(head, call, page):
    job = call.submit()
    sign_in(call, page, "user")
    page.open(f"{call.url}/jobs/{job}")
    page.until("document.querySelector('.why strong')")
    page.until(
        "[...document.querySelectorAll('.actions button')].find((one) => one.textContent === 'Cancel job')?.focus() ?? true"
    )
    page.press("Enter")
    page.until("document.querySelector('dialog[open] input')")
    page.press("Escape")
    page.until("!document.querySelector('dialog')")
    assert call("user", "GET", f"/v1/jobs/{job}").json()["job"]["state"] == "pending"
    page.run(
        "[...document.querySelectorAll('.actions button')].find((one) => one.textContent === 'Cancel job').focus()"
    )
    page.press("Enter")
    page.until("document.activeElement?.name === 'why'")
    page.type("wrong branch")
    page.press("Enter")
    page.until("document.querySelector('.facts').innerText.includes('cancelled wrong branch')")
    page.until("document.querySelector('.timeline').innerText.includes('cancelled by ada')")
    assert page.run("document.querySelector('.actions')") is None
    assert page.problems == []


def test_others_job_has_no_buttons_and_a_viewer_no_drain(call, page, supervisor):
    job = call.submit(gpus=64, allow_never=True)  # it waits
    sign_in(call, page, "viewer")
    page.open(f"{call.url}/jobs/{job}")
    live(page)
    page.until("document.querySelector('.why strong')")
    assert page.run("document.querySelector('.actions')") is None
    page.open(f"{call.url}/nodes/n0")
    live(page)
    assert page.run("document.querySelector('.actions')") is None
    assert page.run("document.querySelector('nav').innerText.includes('Audit')") is False


def test_node_is_drained_and_taken_back_by_mouse(head, call, page, supervisor):
    sign_in(call, page, "operator")
    page.open(f"{call.url}/nodes/n0")
    page.click(".actions button:nth-child(2)")
    page.until("document.querySelector('dialog[open] input')")
    page.type("new fans")
    page.click("dialog button[type=submit]")
    page.until("document.querySelector('.facts').innerText.includes('new fans')")
    page.click(".actions button:nth-child(3)")
    page.click("dialog button[type=submit]")
    page.until("document.querySelector('.facts .state.up')")
    assert page.problems == []


def test_output_of_all_ranks_is_followed_and_searched(call, page, supervisor):
    job = call.submit()
    supervisor.run(job)
    first = b"\x1b[31mred\x1b[0m one\n"
    supervisor.ship(job, 1, "rank-0", 0, first)
    supervisor.ship(job, 1, "rank-1", 0, b"two\n")
    sign_in(call, page, "user")
    page.open(f"{call.url}/jobs/{job}")
    page.until(
        "document.querySelector('.log').innerText.includes('0: red one') && document.querySelector('.log').innerText.includes('1: two')"
    )
    supervisor.ship(job, 1, "rank-0", len(first), b"later\n")
    page.until("document.querySelector('.log').innerText.includes('later')")
    page.click("input[type=search]")
    page.type("two")
    page.until(
        "document.querySelector('.log mark')?.textContent === 'two' && !document.querySelector('.log').innerText.includes('later')"
    )


def test_fifty_scripts_in_names_labels_reasons_and_output_never_run(head, call, page, supervisor):
    jobs = [call.submit("admin", name=text, labels={"note": text}, run=["echo", text]) for text in PAYLOADS]
    for job, text_ in zip(jobs[1:], PAYLOADS[1:], strict=True):
        assert call("admin", "POST", f"/v1/jobs/{job}/cancel", {"why": text_}).status_code == 200
    until(lambda: head.store.job(jobs[0]).state.value == "running")
    supervisor.run(jobs[0])
    supervisor.ship(jobs[0], 1, "rank-0", 0, "".join(f"{text_}\n" for text_ in PAYLOADS).encode())
    head.ask(LabelNodes(labels={"n0": {"rack": PAYLOADS[4][:60]}}, by="root"))
    for text_ in PAYLOADS:
        call("operator", "POST", "/v1/nodes/n0/drain", {"why": text_, "cordon_only": True})
    sign_in(call, page)
    assert call("admin", "POST", "/v1/services", {**SERVICE, "run": ["echo", *PAYLOADS[:9]]}).status_code == 201
    for text_ in PAYLOADS:
        assert call("admin", "POST", "/v1/tokens", {"note": text_}).status_code == 201
    for path in (*PAGES, *(f"/jobs/{job}" for job in jobs)):
        page.open(call.url + path)
        live(page)
        assert page.run("window.xss === undefined"), path
    for text_ in PAYLOADS:
        page.open(f"{call.url}/jobs?" + "&".join(f"{name}={quoted(text_)}" for name in ("name", "user", "queue")))
        assert page.run("window.xss === undefined"), text_
    page.open(f"{call.url}/jobs/{jobs[0]}")
    page.until(f"document.querySelector('.log').innerText.includes({json.dumps(PAYLOADS[-1])})")
    page.click("input[type=search]")
    page.type("script")
    page.until("document.querySelector('.log mark')")
    assert page.run("window.xss === undefined")
    assert page.problems == []
    for path, names in FORMS.items():
        for text_ in PAYLOADS:
            page.open(f"{call.url}{path}?" + "&".join(f"{name}={quoted(text_)}" for name in names))
            assert page.run("window.xss === undefined"), (path, text_)
    assert page.dialogs == []
    assert [one for one in page.problems if "400 (Bad Request)" not in one] == []


def press_button(page, text_):
    """Press a button of the page by the keyboard."""
    found = f"[...document.querySelectorAll('main button')].find((one) => one.textContent === {json.dumps(text_)})"
    page.until(found)
    page.run(f"{found}.focus()")
    page.press("Enter")


def test_service_is_scaled_and_stopped_by_keyboard(call, page):
    assert call("user", "POST", "/v1/services", SERVICE).status_code == 201
    sign_in(call, page, "user")
    page.open(f"{call.url}/services/web")
    press_button(page, "Scale")
    page.until("document.activeElement?.type === 'number'")
    page.run("document.activeElement.select()")
    page.type("3")
    page.press("Enter")
    page.until("document.querySelector('#live').dataset.desired === '3'")
    press_button(page, "Scale")
    page.until("document.activeElement?.type === 'number'")
    page.run("document.activeElement.select()")
    page.type("9")
    page.press("Enter")
    page.until("document.querySelector('.problem:not([hidden])')?.innerText.includes('3')")  # the head's own words
    press_button(page, "Stop service")
    page.until("document.querySelector('dialog[open]')")
    page.press("Tab")
    page.press("Enter")
    page.until("document.querySelector('.facts').innerText.includes('by ada')")
    page.until("document.querySelector('.actions').hidden")


def test_token_is_shown_once_and_revoked(call, page):
    sign_in(call, page)
    page.open(f"{call.url}/settings")
    page.until("document.querySelector('form[data-form=token]').offsetHeight")
    page.click("form[data-form=token] input[name=note]")
    page.type("laptop")
    page.press("Enter")
    secret = page.until("document.querySelector('.secret')?.textContent")
    assert call.client.get("/v1/me", headers={"authorization": f"Bearer {secret}"}).json()["user"] == "root"
    page.until("document.querySelector('#live-tokens').innerText.includes('laptop')")
    page.run(
        "[...document.querySelectorAll('tr')].find((one) => one.innerText.includes('laptop')).querySelector('button').focus()"
    )
    page.press("Enter")
    page.until("document.querySelector('dialog[open]')")
    page.click("dialog button[type=submit]")
    page.until("!document.querySelector('#live-tokens').innerText.includes('laptop')")
    assert call.client.get("/v1/me", headers={"authorization": f"Bearer {secret}"}).status_code == 401
    page.open(f"{call.url}/settings")
    assert secret not in page.run("document.documentElement.outerHTML")
    assert page.problems == []


def test_queue_file_is_tried_before_it_is_applied(head, call, page):
    sign_in(call, page, "operator")
    page.open(f"{call.url}/settings")
    page.until("document.querySelector('#apply-queues').offsetHeight")
    page.run(
        "document.querySelector('#queue-file').value = 'queues:\\n  ml:\\n    quota: <img src=x onerror=window.xss=1>\\n'"
    )
    press_button(page, "Dry run")
    page.until("document.querySelector('#queue-changes .problem')?.innerText.includes('line:3')")
    assert page.run("window.xss === undefined && document.querySelector('#apply-queues').disabled")
    page.run("document.querySelector('#queue-file').value = 'queues:\\n  ml: {quota: 2}\\n'")
    press_button(page, "Dry run")
    page.until("document.querySelector('#queue-changes')?.innerText.includes('Dry run: 1 added')")
    assert [queue.id for queue in head.store.queues()] == ["default"]
    press_button(page, "Apply")
    page.until("document.querySelector('dialog[open]')")
    page.click("dialog button[type=submit]")
    page.until("document.querySelector('#queue-changes')?.innerText.includes('Applied: 1 added')")
    assert sorted(queue.id for queue in head.store.queues()) == ["default", "ml"]
    assert page.run("document.querySelector('#apply-queues').disabled")


def quoted(text_):
    return quote(text_, safe="")


def test_a_script_that_got_into_a_page_would_not_run_and_reach_no_other_host(call, page):
    """The second wall: the content security policy, tried with markup that is put into the page on purpose."""
    sign_in(call, page)
    live(page)
    page.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.xss=1\"><style>body{color:red}</style>')"
    )
    page.run(
        "(() => { const one = document.createElement('script'); one.textContent = 'window.xss=2'; document.body.append(one) })()"
    )
    outcome = page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert (page.run("window.xss === undefined"), outcome) == (True, "refused")
    assert sum("Content Security Policy" in one for one in page.problems) >= 3


def test_session_that_ends_sends_the_page_to_the_sign_in(head, call, page, supervisor):
    sign_in(call, page, "user")
    live(page)
    head.ask(RevokeToken(token_id=f"t-ada-{len(TOKENS['user'])}"))
    page.until("document.querySelector('#token')")


def test_page_of_another_origin_can_neither_frame_nor_read_nor_change(head, call, page):
    job = call.submit("admin")
    sign_in(call, page)
    attack = f"""<!doctype html><iframe id=frame src="{call.url}/"></iframe>
    <form id=form method=post enctype="text/plain" action="{call.url}/v1/jobs/{job}/cancel" target=gone><input name=a></form>
    <iframe name=gone></iframe><script>
    window.done = (async () => {{
      const tried = [];
      for (const path of ['/v1/me', '/', '/v1/jobs/{job}'])
        tried.push(await fetch('{call.url}' + path, {{credentials: 'include'}}).then(() => 'read', () => 'refused'));
      await fetch('{call.url}/v1/jobs/{job}/cancel', {{method: 'POST', mode: 'no-cors', credentials: 'include', body: '{{}}'}}).catch(() => 0);
      document.getElementById('form').submit();
      await new Promise((resolve) => setTimeout(resolve, 1000));
      return tried.join();
    }})();</script>""".encode()

    class Attacker(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(attack)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), Attacker
    ) as server:  # same site, as ports are not told apart
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{server.server_port}/")
        assert page.run("window.done") == "refused,refused,refused"
        assert page.run("document.getElementById('frame').contentDocument === null")
        server.shutdown()
    assert any("frame" in one.lower() or "403" in one for one in page.problems)
    assert head.store.job(job).state.value == "pending"
