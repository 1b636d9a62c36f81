"""`phalanx dev` and `run --tty` on a real head: the session outlives its client and the head, and frees its GPUs when it is parked."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import os
import re
import subprocess
import sys
import textwrap

import pytest

from benchmarks.cluster import ROOT, cluster, wait_until
from tests.pty_client import PtyClient

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(180)]
PHALANX = (sys.executable, "-m", "phalanx.app.cli")


@pytest.fixture(scope="module")
def head():
    with cluster("1x2", revive_s=0.5) as made:
        yield made


def environment(head, **more):
    return {**os.environ, "PHALANX_HOME": head.home, "PYTHONPATH": os.path.join(ROOT, "src"), **more}


def typed(head, *words):
    return PtyClient(*PHALANX, *words, env=environment(head))


def ran(head, *words, **more):
    return subprocess.run(
        [*PHALANX, *words],
        check=False,
        env=environment(head, **more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_a_session_outlives_its_client_and_the_head(head, tmp_path):
    first = typed(head, "dev", "--gpus", "1", "-C", str(tmp_path), "--", sys.executable, "-I", "-q")
    first.until(">>> ")
    first.type("x = 41\r")
    first.until(">>> ")
    first.kill()
    second = typed(head, "dev", "--gpus", "2", "missing.yaml")
    second.until("ignores FILE, --gpus")
    second.until("x = 41")
    second.until(">>> ")
    second.type("x + 1\r")
    second.until("42")
    head.kill_head()
    second.until("connecting again")
    head.start()
    second.until("42")
    second.until(">>> ")
    second.type("x + 2\r")
    second.until("43")
    second.type("\x1d\x1d\x1d")
    assert second.end() == 0
    (job_id,) = re.findall(rb"phalanx shell (\d+)", second.seen)
    third = typed(head, "shell", job_id.decode())
    third.until("43")
    third.type("exit(3)\r")
    assert third.end() == 3
    assert b"exit code 3" in third.seen


def test_a_parked_session_frees_its_gpus_and_comes_back_with_its_files(head, tmp_path):
    client = typed(head, "dev", "--name", "work", "--gpus", "2", "-C", str(tmp_path), "--grace", "5s")
    client.until("job ")
    client.until("$ " if os.getuid() else "# ")
    client.type("echo kept > file\r")
    wait_until((tmp_path / "file").exists, "it writes")
    job_id = re.findall(rb"job (\d+)", client.seen)[0].decode()
    assert ran(head, "park", job_id).returncode == 0
    assert client.end() == 0
    assert b"is parked: parked by" in client.seen
    assert ran(head, "run", "--gpus", "2", "--", "true").returncode == 0
    again = typed(head, "dev", "--name", "work")
    again.until("is queued again")
    again.until("$ " if os.getuid() else "# ")
    again.type("cat file; false\r")
    again.until("kept\r\n")
    again.type("exit\r")
    assert again.end() == 0, "a session that its user ends has succeeded"


def test_an_editor_that_the_node_lacks_is_told_with_the_next_step(head, tmp_path):
    lacks = ran(head, "dev", "--ide", "code", "--name", "none", PATH="/usr/bin:/bin")
    assert lacks.returncode == 1
    (job_id,) = re.findall(r"^job (\d+)", lacks.stderr)
    assert "npm install -g code-server" in ran(head, "logs", job_id).stdout
    assert ran(head, "dev").returncode == 64, "without a terminal it refuses"


def test_an_editor_is_asked_for_its_token_and_is_found_again(head, tmp_path):
    server = """
        import http.server, os, sys
        base, port = [next(w.split("=", 1)[1] for w in sys.argv if w.startswith(f)) for f in ("--ServerApp.base_url", "--port")]
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                found = self.path == base + "?token=" + os.environ["JUPYTER_TOKEN"]
                self.send_response(200 if found else 403)
                self.end_headers()
        http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
    """
    program = tmp_path / "jupyter-lab"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(server)}")
    program.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = [ran(head, "dev", "--ide", "jupyter", "--name", "lab", "-e", f"PATH={path}") for _ in range(2)]
    assert [one.returncode for one in found] == [0, 0], found
    at_head, direct = found[0].stdout.splitlines()
    assert at_head.startswith(f"http://127.0.0.1:{head.port}/j/"), "the address at the head comes first"
    url = re.search(r"http://127.0.0.1:(\d+)(/\S+)", direct)
    assert url
    assert url[0] in found[1].stdout
    import urllib.request

    with urllib.request.urlopen(url[0], timeout=30) as reply:  # the virtual node is this machine
        assert reply.status == 200
    shown = ran(head, "ps").stdout
    (job_id,) = re.findall(r"^job (\d+)", found[0].stderr)
    assert url[2].rpartition("=")[2] not in shown + ran(head, "show", job_id).stdout, "the token is in no record"
    ran(head, "cancel", job_id)
