"""Object stores as sources of datasets, against moto's S3 server on loopback; and the Hugging Face hub, against a server that answers as it does."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from phalanx.node.data.source_opener import open_source
from phalanx.node.data.sources import SourceUnavailable
from phalanx.node.logic.dataset import DataFile, DatasetInvalid

ROOT = Path(__file__).resolve().parents[2]
MOTO = shutil.which("moto_server", path=f"{ROOT}/build/moto/bin:{os.environ.get('PATH', '')}")


@pytest.fixture(scope="module")
def s3():
    """A store with a bucket of three objects, and the variables of a job that reads it."""
    if MOTO is None:
        pytest.skip("moto_server is not installed: make s3-tools")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    with (
        subprocess.Popen(
            [MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            _fill(port)
            yield
        finally:
            server.terminate()


def _fill(port):
    import http.client

    import obstore
    from obstore.store import from_url

    deadline = time.monotonic() + 30
    while True:
        try:
            made = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            made.request("PUT", "/corpus")
            assert made.getresponse().status == 200
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    store = from_url("s3://corpus", client_options={"allow_http": True})
    for key, data in {"train/a.bin": b"0123456789", "train/in/b.bin": b"b", "trainer/c.bin": b"c"}.items():
        obstore.put(store, key, data)


@pytest.mark.serial
def test_objects_below_a_prefix_are_files_and_ranges_are_read(s3):
    source = open_source("s3://corpus/train", {})
    dataset = source.list()
    assert [(file.path, file.size_bytes) for file in dataset.files] == [("a.bin", 10), ("in/b.bin", 1)]
    assert source.read(dataset.files[0], 2, 4) == b"2345"
    single = open_source("s3://corpus/train/a.bin", {})
    assert single.list().single
    assert single.read(single.list().files[0], 0, 3) == b"012"


@pytest.mark.serial
def test_program_stages_a_bucket_with_the_variables_of_the_job(s3, tmp_path):
    names = {name: str(tmp_path / name) for name in ("answer", "progress", "peers")}
    request = {"sources": [["train", "s3://corpus/train"]], "cache": str(tmp_path), "bytes_max": 1 << 30, "rank": 0}
    (tmp_path / "order").write_text(json.dumps({**request, **names, "nodes": 1}))
    program = [sys.executable, "-I", "-m", "phalanx.node.data.staging_main", str(tmp_path / "order")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "data" / json.loads((tmp_path / "answer").read_text())["paths"]["train"][0] / "files"
    assert {path.name: path.read_bytes() for path in folder.rglob("*.bin")} == {"a.bin": b"0123456789", "b.bin": b"b"}


@pytest.mark.serial
def test_object_that_changed_since_the_list_is_refused(s3):
    source = open_source("s3://corpus/train", {})
    old = source.list().files[0]
    with pytest.raises(DatasetInvalid, match="changed"):
        source.read(DataFile(old.path, old.size_bytes, '"another" 1'), 0, 2)
    with pytest.raises(DatasetInvalid, match="no files"):
        open_source("s3://corpus/nothing", {}).list()


class Hub(BaseHTTPRequestHandler):
    """The hub's list in two pages, and files by redirect to a store that must not get the token."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self):
        base = f"http://127.0.0.1:{self.connection.getsockname()[1]}"
        headers = {"Content-Type": "application/json"}
        status, body = 200, b""
        match self.path:
            case "/api/datasets/org/set/revision/v1":
                body = json.dumps({"sha": "c0ffee"}).encode()
            case "/api/datasets/org/set/tree/c0ffee?recursive=true":
                body = json.dumps([{"type": "directory", "path": "data", "size": 0}]).encode()
                headers["Link"] = f'<{base}/api/datasets/org/set/tree/c0ffee?cursor=x>; rel="next"'
            case "/api/datasets/org/set/tree/c0ffee?cursor=x":
                lfs = {"oid": "abc", "size": 10}
                body = json.dumps([{"type": "file", "path": "data/a.bin", "size": 10, "oid": "x", "lfs": lfs}]).encode()
            case "/datasets/org/set/resolve/c0ffee/data/a.bin":
                status, headers["Location"] = 302, f"http://localhost:{self.connection.getsockname()[1]}/store/a.bin"
            case "/store/a.bin":
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                body, status = b"0123456789"[first : last + 1], 206
                headers["Content-Range"] = f"bytes {first}-{last}/10"
            case _:
                status = 404
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.asked.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_hub_is_listed_by_revision_and_its_token_stays_with_it(hub):
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_secret"}
    source = open_source("hf://datasets/org/set@v1/data", variables)
    dataset = source.list()
    assert dataset.files == [DataFile("data/a.bin", 10, "abc")]
    assert source.read(dataset.files[0], 3, 4) == b"3456"
    assert {path: token for path, token in Hub.asked if path.startswith("/store")} == {"/store/a.bin": None}
    assert all(token == "Bearer hf_secret" for path, token in Hub.asked if not path.startswith("/store"))
    with pytest.raises(DatasetInvalid, match="404"):
        open_source("hf://datasets/org/other", variables).list()
    with pytest.raises(SourceUnavailable):
        open_source("http://127.0.0.1:1/x", {}).list()
