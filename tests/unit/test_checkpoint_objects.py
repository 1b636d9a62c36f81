"""Checkpoints in an object store, against moto's S3 server: complete or not there, resumed, refused if their bytes differ."""

import json
import os
import threading
import zlib

import pytest

from phalanx.node.data import checkpoint_objects
from phalanx.node.data.object_store import ObjectFolder
from phalanx.node.data.sources import ObjectsRefused, SourceUnavailable
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointInvalid, CheckpointManifest, ManifestFile
from tests.object_rig import BUCKET, MOTO, faulty_store

pytestmark = pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools")
CHUNK = 1 << 12


@pytest.fixture(scope="module")
def moto():
    with faulty_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, text in store.variables.items():
            patch.setenv(name, text)
        patch.setattr(checkpoint_objects, "CHUNK_BYTES", CHUNK)
        patch.setattr("phalanx.node.data.object_store._RETRY", {"max_retries": 0})
        yield store


@pytest.fixture
def store(moto):
    moto.forget()
    return moto


@pytest.fixture
def save(tmp_path):
    """A checkpoint of two nodes: their folders and the digest of its manifest."""

    def made(step=10, seed=1):
        data = {
            f"rank-{rank}.pt": bytes((seed + rank + i // 7) % 251 for i in range(CHUNK * 3 + rank)) for rank in range(2)
        }
        data["empty"] = b""
        encoded = manifests.encode(
            CheckpointManifest(
                format=1,
                step=step,
                epoch=1,
                world_size=2,
                files=tuple(
                    ManifestFile(path=name, size_bytes=len(text), crc32=zlib.crc32(text)) for name, text in data.items()
                ),
            )
        )
        folders = [tmp_path / f"{seed}-{step}-node{rank}" for rank in range(2)]
        for rank, folder in enumerate(folders):
            folder.mkdir()
            (folder / "manifest.json").write_bytes(encoded)
            (folder / f"rank-{rank}.pt").write_bytes(data[f"rank-{rank}.pt"])
        (folders[1] / "empty").write_bytes(b"")
        return [str(folder) for folder in folders], manifests.digest(encoded), data

    return made


def _url(request, step=10, attempt="epoch-1-k"):
    return f"s3://{BUCKET}/p/{request.node.name[:40].replace('[', '-')}/7-key/{attempt}/step-{step:08d}"


def _upload(url, folders, digest, ranks=(1, 0), **words):
    return [
        checkpoint_objects.upload(
            ObjectFolder(url), folders[rank], digest, rank=rank, nodes=2, on_bytes=lambda _number: None, **words
        )
        for rank in ranks
    ][-1]


def test_two_nodes_store_their_own_files_and_another_gets_all(request, store, save, tmp_path):
    (folders, digest, data), url = save(), _url(request)
    stored = _upload(url, folders, digest)
    checkpoint_objects.download(ObjectFolder(url), stored, str(tmp_path / "new"))
    assert manifests.verify(str(tmp_path / "new")).step == 10
    assert {name: (tmp_path / "new" / name).read_bytes() for name in data} == data
    sent = store.sent_bytes
    assert _upload(url, folders, digest) == stored, "a repeated upload changes nothing"
    assert store.sent_bytes - sent < 4000, "and sends no chunk again"
    os.unlink(tmp_path / "new" / "rank-1.pt")
    store.forget()
    checkpoint_objects.download(ObjectFolder(url), stored, str(tmp_path / "new"))
    assert store.read_bytes < len(data["rank-1.pt"]) + 4000, "files that are there are not read again"


def test_it_is_not_complete_until_every_node_has_stored_its_files(request, store, save):
    (folders, digest, _), url = save(), _url(request)
    with pytest.raises(CheckpointInvalid, match="node rank 1 has not stored its files"):
        _upload(url, folders, digest, ranks=(0,), others_s=0.1)
    assert "manifest.json" not in ObjectFolder(url).list()
    assert checkpoint_objects.remove_incomplete(ObjectFolder(url.rpartition("/")[0])) > 0
    assert ObjectFolder(url).list() == {}


def test_an_interrupted_upload_sends_only_what_is_missing(request, store, save):
    (folders, digest, data), url = save(), _url(request)
    stored: dict[str, int] = {}  # by path: bytes
    again: dict[str, int] = {}
    guard = threading.Lock()  # objects are sent side by side

    def two_then_none(method, path, body):
        if method != "PUT":
            return False
        with guard:
            if "/objects/" in path and len(stored) < 2:
                stored[path] = len(body)
                return False
        return len(stored) == 2

    def count(method, path, body):
        if method == "PUT" and "/objects/" in path:
            again[path] = len(body)
        return False

    store.fault = two_then_none
    with pytest.raises(SourceUnavailable):
        _upload(url, folders, digest)
    store.fault = count
    assert _upload(url, folders, digest)
    assert len(stored) == 2
    assert not stored.keys() & again.keys()
    assert sum(stored.values()) + sum(again.values()) <= sum(map(len, data.values()))
    assert again


def test_a_store_that_lost_or_changed_a_chunk_does_not_complete(request, store, save):
    (folders, digest, _), url = save(), _url(request)
    _upload(url, folders, digest, ranks=(1,))
    folder = ObjectFolder(url)
    chunk = next(path for path in folder.list("objects"))
    folder.delete([chunk])
    with pytest.raises(CheckpointInvalid, match="the store has another chunk"):
        _upload(url, folders, digest, ranks=(0,))
    folder.put(chunk, b"torn")
    with pytest.raises(CheckpointInvalid, match="the store has another chunk"):
        _upload(url, folders, digest, ranks=(0,))
    assert "manifest.json" not in folder.list()


@pytest.mark.parametrize("what", ["flipped", "torn", "missing", "other manifest"])
def test_a_checkpoint_whose_bytes_differ_is_refused(request, store, save, tmp_path, what):
    (folders, digest, _), url = save(), _url(request)
    stored = _upload(url, folders, digest)
    if what == "missing":
        folder = ObjectFolder(url)
        folder.delete(list(folder.list("objects"))[:1])
    elif what == "other manifest":
        stored = "0" * 64
    else:
        store.change = lambda path, body: (
            body if "/objects/" not in path else body[:-1] if what == "torn" else b"x" + body[1:]
        )
    with pytest.raises((CheckpointInvalid, SourceUnavailable)):
        checkpoint_objects.download(ObjectFolder(url), stored, str(tmp_path / "new"))
    assert not (tmp_path / "new" / "manifest.json").exists()


def test_a_second_checkpoint_of_the_same_step_does_not_replace_the_first(request, store, save, tmp_path):
    url = _url(request)
    (folders, digest, data), (others, another, _) = save(seed=1), save(seed=50)
    stored = _upload(url, folders, digest)
    with pytest.raises(ObjectsRefused, match="exists already"):
        _upload(url, others, another)
    checkpoint_objects.download(ObjectFolder(url), stored, str(tmp_path / "new"))
    assert (tmp_path / "new" / "rank-0.pt").read_bytes() == data["rank-0.pt"]


def test_a_new_attempt_deletes_what_earlier_ones_did_not_publish(request, store, save):
    old, published = _url(request, 20), _url(request, 10)
    for step, url in ((10, published), (20, old)):
        folders, digest, _ = save(step)
        _upload(url, folders, digest)
    job = old.rsplit("/", 2)[0]
    neighbour = f"{job}8/epoch-1-k/step-00000001"
    ObjectFolder(neighbour).put("manifest.json", b"{}")
    assert checkpoint_objects.begin_attempt(ObjectFolder(job), "epoch-2-k", [published], sweep=False) == 0
    assert checkpoint_objects.begin_attempt(ObjectFolder(job), "epoch-2-k", [published], sweep=True) == len(
        ObjectFolder(published).list()
    )
    assert ObjectFolder(old).list() == {}
    assert "manifest.json" in ObjectFolder(published).list()
    assert "manifest.json" in ObjectFolder(neighbour).list(), "of another job"
    checkpoint_objects.remove(ObjectFolder(published))
    assert ObjectFolder(job).list() == {}


def test_a_file_that_changed_after_the_save_is_not_stored(request, store, save):
    (folders, digest, _), url = save(), _url(request)
    with open(f"{folders[1]}/rank-1.pt", "r+b") as file:
        file.write(b"other")
    with pytest.raises(CheckpointInvalid, match="changed after the save"):
        _upload(url, folders, digest)
    assert "manifest.json" not in json.dumps(list(ObjectFolder(url).list()))
