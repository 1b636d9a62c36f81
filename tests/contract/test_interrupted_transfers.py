"""`phalanx get` and the upload of a working directory go on after a kill -9 of the command: no byte is sent twice, and the result is whole."""

import os
import random
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from phalanx.cli.transfers.get import _fetch
from phalanx.client import Client
from phalanx.core.errors import NotFound
from tests.contract.api_head import TOKENS, ApiHead, until

LARGE = 8 << 20
COPY = 8 << 20
SLACK = 2 << 20  # requests, headers and what was on its way at the kill


class CountingProxy:
    """A TCP proxy that counts what it passes each way, and stops passing, without closing, at a limit."""

    def __init__(self, port):
        self.port, self.limit, self.sent, self.received = port, None, 0, 0
        self.stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, socket.create_connection(("127.0.0.1", self.port)) as head:
            while True:
                for one in select.select([client, head], [], [])[0]:
                    try:
                        data = one.recv(1 << 16)
                        (head if one is client else client).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if one is client:
                        self.sent += len(data)
                    else:
                        self.received += len(data)
                    if self.limit is not None and max(self.sent, self.received) > self.limit:
                        self.stopped.set()
                        while self.limit is not None:  # what arrives meanwhile is not passed
                            time.sleep(0.01)
                        return


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    head = ApiHead(str(home))
    with head.calling() as call:
        yield call, home
    head.close()


@pytest.fixture
def proxy(bench):
    made = CountingProxy(int(bench[0].url.rsplit(":", 1)[1]))
    yield made
    made.close()


def command(url, home, *words):
    env = {**os.environ, "PHALANX_URL": url, "PHALANX_TOKEN": TOKENS["user"], "PHALANX_HOME": str(home / "own")}
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx.app.cli", *words],
        env=env,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_at(proxy, limit, process, folder=None, before=lambda: None):
    proxy.limit = limit
    assert proxy.stopped.wait(60), process.communicate()[0]
    if folder is not None:  # the command has received what was passed
        until(lambda: sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) > limit - (3 << 19))
    before()
    process.kill()
    process.communicate()
    proxy.limit = None


def outputs(bench, large):
    call, home = bench
    job_id = call.submit()
    out = home / "outputs" / f"{job_id}-k"
    (out / "deep").mkdir(parents=True)
    (out / "a.bin").write_bytes(large)
    (out / "deep" / "b.bin").write_bytes(large[::-1])
    (out / "deep" / "link").symlink_to("../a.bin")
    for number in range(50):
        (out / f"z{number}").write_text(f"file {number}")
    return job_id, out


def same(folder, out):
    names = sorted(os.path.relpath(os.path.join(top, name), out) for top, _, names in os.walk(out) for name in names)
    found = sorted(os.path.relpath(os.path.join(top, name), folder) for top, _, own in os.walk(folder) for name in own)
    assert found == names
    assert all((folder / name).read_bytes() == (out / name).read_bytes() for name in names)


def test_killed_download_goes_on_and_sends_no_byte_twice(bench, proxy, tmp_path):
    job_id, out = outputs(bench, random.Random(0).randbytes(LARGE))
    until(lambda: time.time() - out.stat().st_ctime > 1.1)  # what is younger than a second when it begins is sent again

    def others_are_refused():
        other = command(bench[0].url, tmp_path, "get", job_id, "here")
        assert "another command downloads into here now" in other.communicate(timeout=60)[0]
        assert other.returncode != 0

    kill_at(
        proxy,
        LARGE + LARGE // 2,
        command(proxy.url, tmp_path, "get", job_id, "here"),
        tmp_path / "here",
        others_are_refused,
    )
    second = command(proxy.url, tmp_path, "get", job_id, "here")
    assert "53 files, 16 MiB, in here" in second.communicate(timeout=60)[0]
    assert second.returncode == 0
    same(tmp_path / "here", out)
    assert proxy.received < 2 * LARGE + SLACK


def test_file_that_changed_in_between_is_sent_again(bench, proxy, tmp_path):
    job_id, out = outputs(bench, random.Random(1).randbytes(LARGE))
    kill_at(proxy, LARGE + LARGE // 2, command(proxy.url, tmp_path, "get", job_id, "here"), tmp_path / "here")
    (out / "a.bin").write_bytes(b"complete before, and other bytes now")
    (out / "deep" / "b.bin").write_bytes(random.Random(2).randbytes(LARGE))  # the one that was half received
    second = command(proxy.url, tmp_path, "get", job_id, "here")
    assert "53 files" in second.communicate(timeout=60)[0]
    assert second.returncode == 0
    same(tmp_path / "here", out)


def test_download_of_nothing_leaves_no_folder(bench, tmp_path):
    call, _ = bench
    job_id = call.submit()
    (tmp_path / "mine").mkdir()
    with Client(call.url, TOKENS["user"]) as client:
        shown = client.job(job_id).job
        for folder in ("here", "mine"):
            with pytest.raises(NotFound):
                _fetch(client, shown, job_id, "", str(tmp_path / folder), label="")
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == []


def test_killed_upload_goes_on_and_sends_no_byte_twice(bench, proxy, tmp_path):
    (tmp_path / "data.bin").write_bytes(random.Random(4).randbytes(COPY))
    words = ("submit", "--copy", "--", "python", "data.bin")
    kill_at(proxy, COPY // 2, command(proxy.url, tmp_path, *words))
    until(lambda: list((bench[1] / "blobs").glob(".partial-*")))
    second = command(proxy.url, tmp_path, *words)
    said = second.communicate(timeout=60)[0]
    assert second.returncode == 0, said
    assert "uploaded a copy" in said
    assert COPY < proxy.sent < COPY + SLACK
    assert not list((bench[1] / "blobs").glob(".partial-*"))
