"""Datasets: the key, chunks, sources, and the program that stages them on a node."""

import contextlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import data_variable
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.node.data.dataset_cache import DatasetCache, NoRoom
from phalanx.node.data.source_opener import open_source
from phalanx.node.data.stored_dataset import ChunkCorrupt, StoredDataset
from phalanx.node.logic.dataset import CHUNK_BYTES_MIN, DataFile, Dataset, DatasetInvalid

PROGRAM = (sys.executable, "-I", "-m", "phalanx.node.data.staging_main")


def spec(data):
    return spec_from_mapping({"run": "true", "data": data}, workdir="/w")


# ---- the key


def test_job_carries_its_datasets_and_their_mode():
    found = spec({"train": "s3://b/p", "tok": "/nfs/x", "mode": "stream"})
    assert found.data == (("train", "s3://b/p"), ("tok", "/nfs/x"))
    assert found.data_mode is DataMode.STREAM
    assert not found.has_long_preparation
    assert spec({"train": "hf://datasets/a/b"}).stages_data
    assert not spec({"train": "s3://b/p", "mode": "mount"}).stages_data
    assert data_variable("train") == "PHALANX_DATA_TRAIN"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"1x": "/nfs/x"}, "not a name"),
        ({"x": "nfs/x"}, "not a source"),
        ({"x": "/nfs/../etc"}, "not an absolute path"),
        ({"x": "ftp://b/p"}, "not a source"),
        ({"x": "s3://"}, "not a source"),
        ({"x": "https://ann:word@example.org/x"}, "contains a password"),
        ({"x": "hf://datasets/a/b", "mode": "mount"}, "cannot be mounted"),
        ({"x": "/a", "X": "/b"}, "only in capitals"),
        ({"x": "/a", "mode": "later"}, "not known"),
        ({"x": "/a\n/b"}, "no valid source"),
    ],
)
def test_key_that_names_no_dataset_is_refused(data, says):
    with pytest.raises(BadFile, match=says):
        spec(data)


# ---- chunks


def test_chunks_cover_every_byte_of_every_file_once():
    rng = random.Random(7)
    sizes = [rng.choice([0, 1, 1000, CHUNK_BYTES_MIN, 3 * CHUNK_BYTES_MIN + 17]) for _ in range(60)]
    dataset = Dataset("/d", [DataFile(f"{number:03}", size, "v") for number, size in enumerate(sizes)])
    ends = dict.fromkeys(range(len(sizes)), 0)
    for index in range(dataset.chunks):
        pieces = dataset.pieces(index)
        assert sum(piece.size_bytes for piece in pieces) == dataset.chunk_size(index)
        for piece in pieces:
            assert piece.offset == ends[piece.file]
            ends[piece.file] += piece.size_bytes
    assert list(ends.values()) == sizes


def test_dataset_has_another_name_if_one_version_differs():
    one = Dataset("/d", [DataFile("a", 1, "v1"), DataFile("b", 1, "v1")])
    assert one.id == Dataset("/d", [DataFile("b", 1, "v1"), DataFile("a", 1, "v1")]).id
    assert one.id != Dataset("/d", [DataFile("a", 1, "v2"), DataFile("b", 1, "v1")]).id


@pytest.mark.parametrize("paths", [[], ["../x"], ["a/../b"], ["/x"], ["a//b"], ["a", "a/b"], ["x\0y"]])
def test_list_that_leaves_its_folder_is_refused(paths):
    with pytest.raises(DatasetInvalid):
        Dataset("/d", [DataFile(path, 1, "v") for path in paths])


# ---- the store and the cache


def stored(tmp_path, data=b"x" * (2 * CHUNK_BYTES_MIN + 5)):
    dataset = Dataset("/d", [DataFile("a", len(data) - 5, "v"), DataFile("in/b", 5, "v")])
    return StoredDataset(str(tmp_path / "d"), dataset), data


def test_chunk_with_another_digest_is_not_stored(tmp_path):
    store, data = stored(tmp_path)
    with pytest.raises(ChunkCorrupt):
        store.put(0, data[:CHUNK_BYTES_MIN], expected=b"\0" * 32)
    with pytest.raises(ChunkCorrupt):
        store.put(0, data[:100])
    assert store.missing() == [0, 1, 2]


def test_after_a_restart_of_the_machine_only_chunks_that_match_are_kept(tmp_path):
    store, data = stored(tmp_path)
    store.put(0, data[:CHUNK_BYTES_MIN])
    store.put(2, data[2 * CHUNK_BYTES_MIN :])
    store.close()
    with open(tmp_path / "d/files/a", "r+b") as file:
        file.write(b"y")
    (tmp_path / "d/chunks").open("ab").write(b"torn record")
    assert StoredDataset(store.folder, store.dataset).missing() == [1]  # the same boot: the kernel has what was written
    (tmp_path / "d/boot").write_text("another boot")
    again = StoredDataset(store.folder, store.dataset)
    assert again.missing() == [0, 1]
    again.put(0, data[:CHUNK_BYTES_MIN])
    assert StoredDataset(store.folder, store.dataset).missing() == [1]


def test_room_is_made_by_the_least_recently_used_that_no_job_holds(tmp_path):
    cache = DatasetCache(str(tmp_path), bytes_max=100 << 10)
    for age, name in enumerate(("new", "held", "old")):
        os.makedirs(cache.path(name))
        Path(cache.path(name), "x").write_bytes(b"x" * (40 << 10))
        cache.mark_complete(name)
        os.utime(cache.path(name) + "/.phalanx-complete", (1e9 - age, 1e9 - age))
    held = cache.acquire("held")
    os.utime(cache.path("held") + "/.phalanx-complete", (1e8, 1e8))
    assert cache.make_room("more", 40 << 10) == ["old", "new"]
    with pytest.raises(NoRoom, match="running jobs"):
        cache.make_room("more", 80 << 10)
    os.close(held)
    with pytest.raises(NoRoom, match="datasets may use"):
        cache.make_room("more", 101 << 10)


# ---- the program


class RangeServer:
    """An HTTP server of one file with ranges. `bytes`: of all answers; `gate`: answers wait while it is cleared after `free` of them."""

    def __init__(self, data):
        self.data, self.bytes, self.free, self.version = data, 0, 1 << 30, '"one"'
        self.gate, self.lock = threading.Event(), threading.Lock()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                part = owner.data[first : last + 1]
                if last:
                    owner.free -= 1
                    if owner.free < 0:
                        owner.gate.wait(60)
                self.send_response(206)
                self.send_header("ETag", owner.version)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(owner.data)}")
                with contextlib.suppress(OSError):  # the program was killed
                    self.end_headers()
                    self.wfile.write(part)
                    with owner.lock:
                        owner.bytes += len(part) if last else 0

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/train.bin"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    made = RangeServer(random.Random(1).randbytes(6 * CHUNK_BYTES_MIN + 99))
    yield made
    made.gate.set()
    made.server.shutdown()
    made.server.server_close()


def order(tmp_path, *sources):
    path = tmp_path / "order"
    names = {"answer": str(tmp_path / "answer"), "progress": str(tmp_path / "progress")}
    request = {
        "sources": sources,
        "cache": str(tmp_path / "cache"),
        "bytes_max": 1 << 30,
        "rank": 0,
        "nodes": 1,
        "peers": "",
    }
    path.write_text(json.dumps({**request, **names}))
    return str(path)


def run(path):
    done = subprocess.run([*PROGRAM, path], capture_output=True, text=True, timeout=60, check=False)
    return json.loads(Path(path).with_name("answer").read_text()), done.stdout


@pytest.mark.parametrize("version", ['"one"', 'W/"one"'])
def test_file_that_changed_on_its_server_is_never_mixed_with_the_listed_one(server, version):
    server.version = version
    source = open_source(server.url, {})
    (file,) = source.list().files
    assert source.read(file, 5, 20) == server.data[5:25]
    server.version = version.replace("one", "two")
    with pytest.raises(DatasetInvalid, match="changed since it was listed"):
        source.read(file, 5, 20)


@pytest.mark.serial
def test_killed_staging_goes_on_and_a_second_job_moves_nothing(tmp_path, server):
    path = order(tmp_path, ["train", server.url])
    server.free = 3
    with subprocess.Popen([*PROGRAM, path], stdout=subprocess.PIPE) as first:
        journals = tmp_path / "cache/data"
        deadline = time.monotonic() + 30
        while sum(found.stat().st_size for found in journals.glob("*/chunks")) < 3 * 36:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    server.gate.set()
    server.free, server.bytes = 1 << 30, 0
    answer, said = run(path)
    assert "goes on at 3 MiB" in said
    assert server.bytes == len(server.data) - 3 * CHUNK_BYTES_MIN
    name, inner = answer["paths"]["train"]
    copy = journals / name / "files" / inner
    assert copy.read_bytes() == server.data
    server.bytes = 0
    assert "0 bytes moved" in run(path)[1]
    assert server.bytes == 0
    copy.chmod(0o600)
    with copy.open("r+b") as file:
        file.seek(CHUNK_BYTES_MIN + 5)
        file.write(b"damage")
    answer, said = run(path)
    assert "1 chunk does not match" in said
    assert server.bytes == CHUNK_BYTES_MIN
    assert copy.read_bytes() == server.data


@pytest.mark.serial
def test_source_that_is_not_there_is_the_job_s_fault(tmp_path):
    answer, _ = run(order(tmp_path, ["train", str(tmp_path / "absent")]))
    assert answer["charge"] is True
    assert "absent" in answer["why"]


@pytest.mark.serial
def test_error_repeats_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_SECRETS", "TOKEN")
    monkeypatch.setenv("TOKEN", "hf_do_not_tell")
    answer, _ = run(order(tmp_path, ["train", str(tmp_path / "hf_do_not_tell")]))
    assert "hf_do_not_tell" not in answer["why"]
    assert "***" in answer["why"]


def test_folder_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_bytes(b"first")
    source = open_source(str(tmp_path), {})
    dataset = source.list()
    assert [file.path for file in dataset.files] == ["in/a"]
    assert source.read(dataset.files[0], 1, 3) == b"irs"
    (tmp_path / "in/a").write_bytes(b"second")
    with pytest.raises(DatasetInvalid, match="changed"):
        source.read(dataset.files[0], 1, 3)
