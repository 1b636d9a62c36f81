"""A command line on a machine that knows nothing of the cluster logs in at a head with TLS: fingerprint, code, page in a real Chromium."""
# mypy: disable-error-code="index, type-arg, attr-defined, arg-type"

import json
import os
import pty
import re
import select
import signal
import time

import pytest

from benchmarks.cluster import free_port
from tests import axe_here, chromium_here
from tests.e2e.test_requirements import Shell, until

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
PATIENCE_S = 120.0  # a hang guard


class Terminal:
    """A command in a terminal of its own, with a new home folder."""

    def __init__(self, shell, home, *words):
        self.shown, self.pid, self.fd = "", *pty.fork()
        if self.pid == 0:
            kept = {name: value for name, value in shell.env.items() if not name.startswith("PHALANX_")}
            os.chdir(home)
            os.execve(
                "/usr/bin/env",
                ["env", "python", "-m", "phalanx.app.cli", *words],
                {**kept, "HOME": str(home), "NO_COLOR": "1"},
            )

    def wait_for(self, pattern):
        """Read until this appears; the match."""
        end_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end_s, self.shown
            if select.select([self.fd], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode()
                except OSError:  # the terminal has ended
                    assert re.search(pattern, self.shown), self.shown
        return found

    def write(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """Wait for the command's exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("login"))
    shell.url = f"https://127.0.0.2:{free_port()}"
    listen = shell.url.removeprefix("https://")
    shell("up", "--virtual", "1x1", "--port", str(free_port()), "--listen", listen, cwd=shell.folder)
    shell.fingerprint = re.search(r"sha256:[0-9a-f]{64}", shell("join", "--print", cwd=shell.folder).stdout)[0]
    yield shell
    shell("down", "--cancel-jobs", cwd=shell.folder)


def test_code_is_confirmed_in_a_browser_and_the_saved_cluster_works_until_its_token_is_revoked(phalanx, tmp_path):
    laptop = Terminal(phalanx, tmp_path, "login", phalanx.url, "--name", "lab")
    assert laptop.wait_for(r"fingerprint: (\S+)")[1] == phalanx.fingerprint
    laptop.wait_for(r"\[y/N\]")
    laptop.write("y\n")
    code = laptop.wait_for(r"code: (\S+)")[1]
    place = laptop.wait_for(r"type it in at (\S+)")[1]
    token = re.search(r"[\w-]{43}", phalanx("tokens", "add", cwd=phalanx.folder).stdout)[0]
    with chromium_here.chromium() as page:
        page.send("Security.setIgnoreCertificateErrors", ignore=True)
        page.open(place)
        page.click("#token")
        page.type(token)
        page.click("form button")
        page.until("document.querySelector('#code')")  # the sign-in leads back
        page.click("#code")
        page.type("BBBB-BBBB")
        page.click("main form button")
        page.until("document.body.innerText.includes('no command line waits with this code')")
        page.click("#code")
        page.type(code.lower())
        page.click("main form button")
        page.until("document.querySelector('strong.word')")
        text = page.run("document.body.innerText")
        assert code in text
        assert os.uname().nodename in text
        assert page.run("document.cookie") == ""
        if axe_here.SCRIPT.exists():
            assert axe_here.findings(page) == []
        page.screenshot(os.environ.get("PX_PICTURE") or str(tmp_path / "device.png"))
        page.click("main form button")
        page.until("document.body.innerText.includes('The command line continues')")
    laptop.wait_for(r"signed in as root at \S+ for 89d\S*; saved as cluster lab")
    assert laptop.end() == 0
    listed = Terminal(phalanx, tmp_path, "config")
    assert listed.wait_for(r"\*\s+lab\s+root")
    assert listed.end() == 0
    run = Terminal(phalanx, tmp_path, "run", "--", "echo", "from the laptop")
    run.wait_for("from the laptop")
    assert run.end() == 0
    tokens = json.loads(phalanx("tokens", "--json", cwd=phalanx.folder).stdout)
    (mine,) = [one for one in tokens if one["note"] == f"phalanx login on {os.uname().nodename}"]
    phalanx("tokens", "revoke", mine["id"], cwd=phalanx.folder)
    again = Terminal(phalanx, tmp_path, "ps")
    again.wait_for("not signed in|not valid|revoked|unknown")
    assert again.end() != 0


def test_wrong_fingerprint_sends_nothing(phalanx, tmp_path):
    laptop = Terminal(phalanx, tmp_path, "login", phalanx.url)
    laptop.wait_for(r"\[y/N\]")
    laptop.write("n\n")
    laptop.wait_for("nothing was sent to a head with that fingerprint")
    assert laptop.end() != 0
    assert not (tmp_path / ".config" / "phalanx").exists()


def test_login_that_is_interrupted_saves_nothing(phalanx, tmp_path):
    laptop = Terminal(phalanx, tmp_path, "login", phalanx.url)
    laptop.wait_for(r"\[y/N\]")
    laptop.write("y\n")
    laptop.wait_for("type it in at")
    os.kill(laptop.pid, signal.SIGINT)
    assert laptop.end() == 130
    assert until(lambda: not (tmp_path / ".config" / "phalanx" / "clusters.json").exists(), "nothing is saved")
