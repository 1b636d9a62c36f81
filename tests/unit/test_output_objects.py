"""Outputs in an object store, against moto's S3 server: plain objects, sent once, proved, and continued after an interruption."""

import json
import os
import time
import zlib

import pytest

from phalanx.node.data import output_objects
from phalanx.node.data.object_store import ObjectFolder
from phalanx.node.data.output_objects import AttemptOver
from phalanx.node.data.sources import ObjectsRefused, SourceUnavailable
from tests.object_rig import BUCKET, MOTO, faulty_store

pytestmark = pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools")


@pytest.fixture(scope="module")
def moto():
    with faulty_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, text in store.variables.items():
            patch.setenv(name, text)
        patch.setattr("phalanx.node.data.object_store._RETRY", {"max_retries": 0})
        patch.setattr("phalanx.node.data.object_store._PART_BYTES", 6 << 20)
        yield store


@pytest.fixture
def store(moto):
    moto.forget()
    return moto


@pytest.fixture
def place(request):
    return ObjectFolder(f"s3://{BUCKET}/outputs/{zlib.crc32(request.node.name.encode())}/7-key")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "outputs"
    (made / "model").mkdir(parents=True)
    (made / "model" / "weights.bin").write_bytes(os.urandom(13 << 20))
    (made / "log.txt").write_text("one\n")
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    return made


def send(place, folder, *, rank=0, epoch=1, final=True):
    return output_objects.send(place, str(folder), rank=rank, epoch=epoch, final=final, on_bytes=lambda _number: None)


def begin(place, folder, *, rank=0, epoch=2):
    return output_objects.begin(place, str(folder), rank=rank, epoch=epoch, on_bytes=lambda _number: None)


def puts(store):
    return [path for method, path in store.requests if method in {"PUT", "POST"} and ".phalanx" not in path]


def test_files_are_plain_objects_and_only_changes_are_sent(store, place, folder):
    assert send(place, folder) == []
    assert place.get("log.txt") == b"one\n"
    assert place.get("model/weights.bin") == (folder / "model" / "weights.bin").read_bytes()
    store.forget()
    assert send(place, folder) == []
    assert puts(store) == []
    (folder / "log.txt").write_text("one\ntwo\n")
    (folder / "run.sh").unlink()
    assert send(place, folder) == []
    assert {path.partition("?")[0].rpartition("/")[2] for path in puts(store)} <= {"log.txt", BUCKET}
    assert place.get("log.txt") == b"one\ntwo\n"
    assert sorted(place.list()) == [".phalanx/node-0.json", "log.txt", "model/weights.bin"]


def test_other_nodes_have_folders_of_their_own_and_a_new_attempt_gets_its_files(store, place, folder, tmp_path):
    send(place, folder)
    send(place, folder, rank=1)
    assert place.get("node-1/log.txt") == b"one\n"
    fresh = tmp_path / "fresh"
    assert begin(place, fresh, rank=1) == 3
    assert (fresh / "model" / "weights.bin").read_bytes() == (folder / "model" / "weights.bin").read_bytes()
    assert os.access(fresh / "run.sh", os.X_OK)
    store.forget()
    send(place, fresh, rank=1, epoch=2)
    assert puts(store) == [], "what came from the store is not sent again"


def test_an_older_attempt_stores_nothing_more(store, place, folder, tmp_path):
    send(place, folder)
    begin(place, tmp_path / "second", epoch=2)
    (folder / "log.txt").write_text("late\n")
    with pytest.raises(AttemptOver):
        send(place, folder)
    assert place.get("log.txt") == b"one\n"
    with pytest.raises(AttemptOver):
        begin(place, tmp_path / "first", epoch=1)


def test_a_pass_that_fails_goes_on_with_the_next_file(store, place, folder, monkeypatch):
    monkeypatch.setattr(output_objects, "_LIST_EVERY_S", -1.0)
    store.fault = lambda method, path, _body: method == "PUT" and "run.sh" in path
    with pytest.raises(SourceUnavailable):
        send(place, folder)
    store.forget()
    send(place, folder)
    assert not [path for path in puts(store) if "log.txt" in path], "it was stored before"
    assert place.get("run.sh") == b"#!/bin/sh\n"


def test_the_end_proves_that_the_store_has_all_files(store, place, folder):
    send(place, folder)
    other = ObjectFolder(place.url)
    other.replace("log.txt", b"changed by another")
    with pytest.raises(SourceUnavailable, match=r"log\.txt"):
        send(place, folder)
    send(place, folder)
    assert place.get("log.txt") == b"one\n"


def test_large_files_that_are_still_written_wait_for_the_end(store, place, folder, monkeypatch):
    monkeypatch.setattr(output_objects, "SETTLED_BYTES", 1 << 20)
    send(place, folder, final=False)
    assert "model/weights.bin" not in place.list()
    os.utime(folder / "model" / "weights.bin", (1.0, time.time() - 61))
    send(place, folder, final=False)
    assert "model/weights.bin" in place.list()


def test_names_that_are_ours_links_and_unreadable_names_are_not_stored(store, place, folder):
    (folder / "node-1").mkdir()
    (folder / "node-1" / "x").write_text("x")
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "bad\nname").write_text("x")
    refused = dict(send(place, folder))
    assert sorted(refused) == ["'bad\\nname'", "node-1/x"]
    assert "link" not in place.list()


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//b", "", "a/./b", "x\0"])
def test_a_list_that_leads_outside_is_refused(store, place, folder, tmp_path, path):
    send(place, folder)
    known = json.loads(place.get(".phalanx/node-0.json"))
    known["files"][path] = {**known["files"]["log.txt"]}
    place.replace(".phalanx/node-0.json", json.dumps(known).encode())
    with pytest.raises(ObjectsRefused):
        begin(place, tmp_path / "victim")
    assert not (tmp_path / "x").exists()


def test_a_list_that_is_not_ours_and_changed_bytes_are_refused(store, place, folder, tmp_path):
    send(place, folder)
    place.replace("log.txt", b"two\n")
    with pytest.raises(ObjectsRefused, match="other bytes"):
        begin(place, tmp_path / "fresh")
    place.replace(".phalanx/node-0.json", b"[]")
    with pytest.raises(ObjectsRefused, match="not a list"):
        send(place, folder)
