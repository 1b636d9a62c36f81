"""A page of a job in a real Chromium tries what it can to use the dashboard's session of who opened it, and gets nowhere."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import http.server
import threading

import pytest

from tests import chromium_here
from tests.contract.api_head import TOKENS, ApiHead
from tests.contract.relay_node import RelayNode

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(300),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
# Each attempt reports what it got hold of; "" for nothing.
PAGE = """<!doctype html><title>program</title><h1>program</h1><script>
const head = 'HEAD', found = {};
const attempt = async (name, run) => { try { found[name] = String(await run() ?? '') } catch { found[name] = '' } };
const read = (url, more) => fetch(url, {credentials: 'include', ...more}).then((reply) => reply.ok ? reply.text() : '');
const framed = (url) => new Promise((done) => {
  const frame = document.createElement('iframe'); frame.src = url;
  frame.onload = () => { let text = ''; try { text = frame.contentDocument.body.innerText } catch {} done(text) };
  frame.onerror = () => done(''); document.body.append(frame); setTimeout(() => done(''), 3000) });
const opened = (url) => new Promise((done) => {
  const page = window.open(url); setTimeout(() => { let text = ''; try { text = page.document.body.innerText } catch {} done(text) }, 1500) });
(async () => {
  for (const path of ['/v1/me', '/v1/jobs', '/', '/jobs/1', '/j/1/80/']) {
    await attempt('read ' + path, () => read(head + path));
    await attempt('read quietly ' + path, () => read(head + path, {referrerPolicy: 'no-referrer', cache: 'no-store'}));
    await attempt('read opaquely ' + path, () => read(head + path, {mode: 'no-cors'}));
    await attempt('frame ' + path, () => framed(head + path));
  }
  await attempt('open', () => opened(head + '/jobs'));
  await attempt('cancel', () => read(head + '/v1/jobs/1/cancel', {method: 'POST', body: '{}'}));
  await attempt('cancel by form', () => read(head + '/v1/jobs/1/cancel', {method: 'POST', mode: 'no-cors', headers: {'content-type': 'text/plain'}, body: '{}'}));
  await attempt('event stream', () => new Promise((done, fail) => { const s = new EventSource(head + '/v1/fleet/events', {withCredentials: true}); s.onmessage = () => done('events'); s.onerror = fail }));
  await attempt('socket', () => new Promise((done, fail) => { const s = new WebSocket(head.replace('http', 'ws') + '/v1/jobs/1/exec'); s.onopen = () => done('open'); s.onerror = fail }));
  await attempt('cookies', () => document.cookie.includes('phalanx') ? document.cookie : '');
  await attempt('own API', () => read('/v1/me'));
  await attempt('another\\'s program', () => read('/j/2/PORT/secret'));
  await attempt('worker of all programs', () => navigator.serviceWorker.register('worker.js', {scope: '/j/'}).then(() => 'registered'));
  await attempt('worker of the origin', () => navigator.serviceWorker.register('worker.js', {scope: '/'}).then(() => 'registered'));
  await attempt('script of the head', () => import(head + '/web/x/dashboard.js').then(() => 'imported'));
  window.found = found;
})();
</script>"""


class Hostile(http.server.BaseHTTPRequestHandler):
    """Serves the page. `sent`: what the head passed on."""

    page = b""
    sent: list[str] = []  # noqa: RUF012  # one program runs at a time

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.sent.append(f"{self.path} {self.headers}")
        worker = self.path.endswith("worker.js")
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if worker else "text/html")
        self.send_header("Service-Worker-Allowed", "/")
        self.send_header("Set-Cookie", "phalanx-session-1=planted; Path=/")
        self.send_header("Clear-Site-Data", '"cookies"')
        self.end_headers()
        self.wfile.write(b"" if worker else self.page)


@pytest.fixture
def program():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("names", ["", "localhost"])
def test_a_page_of_a_job_does_nothing_with_the_session_of_who_opens_it(tmp_path, program, names):
    head = ApiHead(str(tmp_path), programs=names)
    with head.calling() as call, RelayNode(call) as node, chromium_here.chromium() as page:
        for role in ("user", "other"):
            node.run(call.submit(role, gpus=1))
        Hostile.page = PAGE.replace("HEAD", call.url).replace("PORT", str(program)).encode()
        Hostile.sent.clear()
        path = f"{call.url}/j/1/{program}/"
        page.send("Page.navigate", url=path)
        page.until("document.querySelector('#token') !== null")
        page.run(f"document.querySelector('#token').value = '{TOKENS['user']}'; document.forms[0].submit()")
        page.until("document.title === 'program'")
        page.screenshot(tmp_path / "program.png")
        host = f"1-p{program}.{names}" if names else "127.0.0.1"
        assert page.run("location.host") == f"{host}:{head.parts.programs.port}"
        found = page.until("window.found")
        got = {name: what for name, what in found.items() if what}
        # At a name of its own every path is the program's, and the whole origin.
        own = {"own API", "another's program", "worker of all programs", "worker of the origin"}
        assert set(got) == (own if names else set()), got
        assert len(found) >= 30
        assert not any(secret in sent for sent in Hostile.sent for secret in ("phalanx-session", TOKENS["user"]))
        page.send("Page.navigate", url=f"{call.url}/v1/me")
        page.until("document.body.innerText.includes('\"ada\"')")  # the session stands
        assert call("user", "GET", "/v1/jobs/1").json()["job"]["state"] == "running"
        page.send("Page.navigate", url=f"{call.url}/j/2/{program}/")
        page.until("document.body.innerText.includes('belongs to bob')")
    head.close()
