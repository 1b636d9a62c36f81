"""What a keeper of uploads must do."""

import hashlib
import os
import threading

import pytest

from phalanx.core.errors import BadRequest, NotFound
from phalanx.failpoints import FAILPOINTS, FailureMode, armed
from phalanx.ports.store import StoreRefused
from phalanx.store.blobs.files import FileBlobs

CONTENT = b"an archive" * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def chunks(content=CONTENT, size=1000):
    return (content[start : start + size] for start in range(0, len(content), size))


@pytest.fixture
def blobs(tmp_path):
    return FileBlobs(str(tmp_path / "blobs"))


def left_over(tmp_path):
    return [name for name in os.listdir(tmp_path / "blobs") if name.startswith(".")]


def test_what_is_put_is_there_whole(blobs):
    assert not blobs.has(DIGEST)
    assert blobs.put(DIGEST, chunks()) == len(CONTENT)
    assert blobs.has(DIGEST)
    with open(blobs.path(DIGEST), "rb") as file:
        assert file.read() == CONTENT


def test_nothing_at_all_is_a_blob_too(blobs):
    empty = hashlib.sha256(b"").hexdigest()
    assert blobs.put(empty, iter(())) == 0
    assert blobs.has(empty)


def test_equal_bytes_are_kept_once(blobs):
    blobs.put(DIGEST, chunks())
    before = os.stat(blobs.path(DIGEST))
    assert blobs.put(DIGEST, chunks()) == len(CONTENT)
    assert os.stat(blobs.path(DIGEST)).st_ino == before.st_ino


def test_other_bytes_are_refused_and_leave_nothing(blobs, tmp_path):
    with pytest.raises(BadRequest, match="hash"):
        blobs.put(DIGEST, chunks(CONTENT + b"!"))
    assert not blobs.has(DIGEST)
    assert left_over(tmp_path) == []
    blobs.put(DIGEST, chunks())
    with pytest.raises(BadRequest, match="hash"):
        blobs.put(DIGEST, chunks(b"wrong"))
    with open(blobs.path(DIGEST), "rb") as file:
        assert file.read() == CONTENT


def test_an_upload_that_breaks_off_is_not_stored(blobs, tmp_path):
    def broken():
        yield CONTENT[:1000]
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        blobs.put(DIGEST, broken())
    assert not blobs.has(DIGEST)


def test_an_interrupted_upload_goes_on_where_it_stopped(blobs, tmp_path):
    def broken():
        yield CONTENT[:1000]
        assert blobs.received(DIGEST) == 0  # another upload is in it
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        blobs.put(DIGEST, broken())
    again = FileBlobs(str(tmp_path / "blobs"))  # also after a restart
    assert again.received(DIGEST) == 1000
    assert again.put(DIGEST, chunks(CONTENT[1000:]), 1000) == len(CONTENT)
    assert left_over(tmp_path) == []
    with open(again.path(DIGEST), "rb") as file:
        assert file.read() == CONTENT


def test_bytes_that_do_not_fit_the_earlier_ones_are_refused_and_dropped(blobs, tmp_path):
    def broken():
        yield b"?" * 1000
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        blobs.put(DIGEST, broken())
    with pytest.raises(BadRequest, match="not here"):
        blobs.put(DIGEST, chunks(CONTENT[2000:]), 2000)
    assert blobs.received(DIGEST) == 1000
    with pytest.raises(BadRequest, match="hash"):
        blobs.put(DIGEST, chunks(CONTENT[1000:]), 1000)
    assert (blobs.received(DIGEST), left_over(tmp_path)) == (0, [])
    assert blobs.put(DIGEST, chunks()) == len(CONTENT)


def test_two_uploads_of_one_blob_at_once_both_succeed(blobs, tmp_path):
    def first():
        yield CONTENT[:1000]
        assert blobs.put(DIGEST, chunks()) == len(CONTENT)
        yield CONTENT[1000:]

    assert blobs.put(DIGEST, first()) == len(CONTENT)
    assert left_over(tmp_path) == []


def test_second_upload_of_one_blob_that_breaks_off_leaves_nothing(blobs, tmp_path):
    def broken():
        yield CONTENT[:1000]
        raise RuntimeError("the client went away")

    def first():
        yield CONTENT[:1000]
        with pytest.raises(RuntimeError):
            blobs.put(DIGEST, broken())
        assert len(left_over(tmp_path)) == 1, "that of this upload"
        yield CONTENT[1000:]

    assert blobs.put(DIGEST, first()) == len(CONTENT)


def test_what_an_upload_left_is_dropped_after_a_day(blobs, tmp_path):
    def broken():
        yield CONTENT[:1000]
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        blobs.put(DIGEST, broken())
    (name,) = left_over(tmp_path)
    os.utime(tmp_path / "blobs" / name, (0, 0))
    blobs.put(hashlib.sha256(b"x").hexdigest(), iter((b"x",)))
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", DIGEST[:-1] + "\n", "g" * 64]
)
def test_a_name_that_is_no_hash_is_refused(blobs, name):
    with pytest.raises(BadRequest, match="not a SHA-256"):
        blobs.put(name, iter((b"x",)))
    assert not blobs.has(name)
    with pytest.raises(NotFound):
        blobs.path(name)


def test_an_unknown_blob_is_not_found(blobs):
    with pytest.raises(NotFound, match="no upload"):
        blobs.path(DIGEST)


@pytest.mark.parametrize(
    ("point", "failure"),
    [
        (name, failure)
        for name, failures in FAILPOINTS.items()
        if name.startswith("blobs.put.")
        for failure in sorted(failures & {FailureMode.ERROR, FailureMode.FULL})
    ],
)
def test_a_failing_disk_refuses_and_the_same_upload_goes_through_later(blobs, tmp_path, point, failure):
    with (
        armed(point, failure),
        pytest.raises(StoreRefused, match="full" if failure is FailureMode.FULL else "cannot be written"),
    ):
        blobs.put(DIGEST, chunks())
    assert left_over(tmp_path) == []
    assert blobs.put(DIGEST, chunks()) == len(CONTENT)
    with open(blobs.path(DIGEST), "rb") as file:
        assert file.read() == CONTENT


def test_it_is_synced_before_it_has_a_name_and_the_name_is_synced_too(blobs, tmp_path, monkeypatch):
    done = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd):
        done.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        real_sync(fd)

    def name(old, new, **folders):
        done.append(("name", new))
        real_rename(old, new, **folders)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", name)
    blobs.put(DIGEST, chunks())
    root = str(tmp_path / "blobs")
    assert done[0][0] == "sync"
    assert done[1:] == [("name", blobs.path(DIGEST)), ("sync", f"{root}/{DIGEST[:2]}"), ("sync", root)]


def test_a_starting_head_sweeps_what_a_crash_left_but_not_what_is_being_written(blobs, tmp_path):
    (tmp_path / "blobs/.coming-dead").write_bytes(b"half")

    def slow():
        yield CONTENT[:1000]
        FileBlobs(str(tmp_path / "blobs"))
        assert not (tmp_path / "blobs/.coming-dead").exists()
        yield CONTENT[1000:]

    assert blobs.put(DIGEST, slow()) == len(CONTENT)
    assert left_over(tmp_path) == []


def test_two_uploads_of_the_same_bytes_at_once_both_succeed(blobs):
    barrier = threading.Barrier(2)
    sizes = []

    def upload():
        def together():
            barrier.wait(timeout=30)
            yield from chunks()

        sizes.append(blobs.put(DIGEST, together()))

    threads = [threading.Thread(target=upload) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [len(CONTENT)] * 2
    assert blobs.has(DIGEST)
