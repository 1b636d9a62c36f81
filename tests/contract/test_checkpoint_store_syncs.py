"""What the head says that it keeps has outlived a failed sync, a kill and a lost answer, and what came after a look is not judged by it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import os
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.api.nodes.retention import PendingUploads, RetentionWorker
from phalanx.core.errors import TryLater
from phalanx.failpoints import FailureMode, armed
from phalanx.store.checkpoints.copies import CheckpointCopies, CheckpointKey
from phalanx.store.outputs.copies import OutputCopies, OutputOrigin
from phalanx.torch import checkpoint_folder as folders
from phalanx.wire import manifest

NODE = OutputOrigin(job_id="7", epoch=1, folder="7-k", node_rank=0)
DATA = bytes(range(250)) * 12  # 3000 bytes


@pytest.fixture
def synced(monkeypatch):
    """Paths of what was synced, in order."""
    paths, fsync = [], os.fsync

    def noting(fd):
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    return paths


@pytest.fixture
def written(monkeypatch):
    """Begin and end of what was written to whichever file, in order."""
    spans, pwrite = [], os.pwrite

    def noting(fd, data, offset):
        spans.append((offset, offset + len(data)))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    return spans


# ---- outputs that grow -----------------------------------------------------------------------------------------------


def grown(tmp_path):
    """Outputs in which x.txt is `begun`, and the piece `, more` was written and never synced."""
    outputs = OutputCopies(str(tmp_path))
    outputs.append_upload(NODE, "x.txt", 0, b"begun")
    outputs.finish_upload(NODE, "x.txt", size_bytes=5, crc32=zlib.crc32(b"begun"), mode=0o600)
    with armed("outputs.extend.sync", FailureMode.ERROR), pytest.raises(TryLater):
        outputs.append_stored(NODE, "x.txt", 5, b", more")
    return outputs


def test_a_piece_that_is_sent_again_is_written_and_synced_again(tmp_path, synced, written):
    """Found by reading: the end of the file was answered at once, which says that the piece is durable."""
    outputs = grown(tmp_path)
    synced.clear()
    written.clear()
    assert outputs.append_stored(NODE, "x.txt", 5, b", more") == 11
    assert written == [(5, 11)], "the kernel may take pages for written whose sync has failed"
    assert synced == [f"{tmp_path}/7-k/x.txt", f"{tmp_path}/7-k"]
    assert Path(tmp_path, "7-k/x.txt").read_bytes() == b"begun, more"


def test_other_bytes_of_the_same_length_are_not_taken_for_the_piece_that_is_here(tmp_path):
    outputs = grown(tmp_path)
    assert outputs.append_stored(NODE, "x.txt", 5, b", less") == -1
    assert outputs.append_stored(NODE, "x.txt", 5, b", less of it") == 11, "where it ends"
    assert Path(tmp_path, "7-k/x.txt").read_bytes() == b"begun, more"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def opened(tmp_path):
    return CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))


def checkpoint(step=5, epoch=1):
    file = manifest.ManifestFile(path="a.bin", size_bytes=len(DATA), crc32=zlib.crc32(DATA))
    encoded = folders.encode_manifest(step=step, epoch=epoch, world_size=1, files=[file])
    folder = f"7-k/epoch-{epoch}-k"
    return CheckpointKey(job_id="7", epoch=epoch, folder=folder, step=step, digest=manifest.digest(encoded)), encoded


def save(kept, *, step, epoch):
    place, encoded = checkpoint(step, epoch)
    kept.begin_upload(place, encoded, published=())
    kept.append(place, "a.bin", 0, DATA)
    assert kept.upload_state(place) == (True, 0)


def test_of_a_file_whose_sync_failed_all_bytes_come_again(tmp_path):
    """Found by reading: only the last piece was sent again, and a second sync says nothing of pages that the first has given up."""
    place, encoded = checkpoint()
    kept = opened(tmp_path)
    kept.begin_upload(place, encoded, published=())
    for offset in (0, 1000):
        kept.append(place, "a.bin", offset, DATA[offset : offset + 1000])
    with armed("kept.piece.sync", FailureMode.ERROR), pytest.raises(TryLater):
        kept.append(place, "a.bin", 2000, DATA[2000:])
    assert kept.begin_upload(place, encoded, published=()) == (False, 3000, {})
    assert kept.append(place, "a.bin", 2000, DATA[2000:]) == 0
    assert kept.append(place, "a.bin", 0, DATA) == 3000
    assert kept.upload_state(place) == (True, 0)
    manifest.verify(str(tmp_path / "c/7-k/epoch-1-k/step-00000005"), expected_digest=place.digest)


def test_of_a_file_of_an_earlier_life_whose_sync_fails_all_bytes_come_again(tmp_path):
    place, encoded = checkpoint()
    first = opened(tmp_path)
    first.begin_upload(place, encoded, published=())
    first.append(place, "a.bin", 0, DATA[:1000])
    second = opened(tmp_path)
    with armed("kept.begin.sync", FailureMode.ERROR), pytest.raises(TryLater):
        second.begin_upload(place, encoded, published=())
    assert second.begin_upload(place, encoded, published=()) == (False, 3000, {})
    assert second.append(place, "a.bin", 0, DATA) == 3000


def refused(tmp_path, point="kept.finish.sync_directory"):
    """A head that has a whole checkpoint, and whose disk refused this: unless told otherwise to sync the folder of the name that it gave it."""
    place, encoded = checkpoint()
    kept = opened(tmp_path)
    kept.begin_upload(place, encoded, published=())
    with armed(point, FailureMode.ERROR), pytest.raises(TryLater):
        kept.append(place, "a.bin", 0, DATA)
    return kept


def above(tmp_path):
    return [str(tmp_path / folder) for folder in ("c/7-k/epoch-1-k", "c/7-k", "c")]


def test_a_checkpoint_is_told_to_be_whole_only_when_its_name_is_synced_and_that_once(tmp_path, synced):
    """Found by reading: what lay under its name was whole, though a power cut could still take the name away."""
    kept = refused(tmp_path)
    place, encoded = checkpoint()
    synced.clear()
    with armed("kept.finish.sync_directory", FailureMode.ERROR), pytest.raises(TryLater):
        kept.begin_upload(place, encoded, published=())
    assert kept.begin_upload(place, encoded, published=()) == (True, 0, {})
    assert synced == above(tmp_path)
    assert kept.upload_state(place) == (True, 0)
    assert kept.begin_upload(place, encoded, published=()) == (True, 0, {})
    assert synced == above(tmp_path), "who polls costs no more"


def test_a_head_that_starts_syncs_the_name_of_what_it_finds_whole(tmp_path, synced):
    refused(tmp_path)
    place, _ = checkpoint()
    kept = opened(tmp_path)
    synced.clear()
    with armed("kept.finish.sync_directory", FailureMode.ERROR), pytest.raises(TryLater):
        kept.upload_state(place)
    assert kept.upload_state(place) == kept.upload_state(place) == (True, 0)
    assert synced == above(tmp_path)


def test_a_copy_that_comes_again_under_a_name_synced_before_is_synced_again(tmp_path, synced):
    """Its step was saved again meanwhile, otherwise, and that was not published."""
    kept = opened(tmp_path)
    save(kept, step=5, epoch=1)
    place, encoded = checkpoint()
    other = encoded.replace(b'"world_size": 1', b'"world_size": 2')
    kept.begin_upload(replace(place, digest=manifest.digest(other)), other, published=())
    assert kept.begin_upload(place, encoded, published=()) == (False, 3000, {})
    with armed("kept.finish.sync_directory", FailureMode.ERROR), pytest.raises(TryLater):
        kept.append(place, "a.bin", 0, DATA)
    synced.clear()
    assert kept.begin_upload(place, encoded, published=()) == (True, 0, {})
    assert synced == above(tmp_path)


def test_a_whole_checkpoint_that_the_disk_refuses_at_begin_is_asked_for_later(tmp_path):
    place, encoded = checkpoint()
    kept = refused(tmp_path, "kept.inside.sync_directory")
    with armed("kept.inside.sync_directory", FailureMode.ERROR), pytest.raises(TryLater):
        kept.begin_upload(place, encoded, published=())
    assert kept.begin_upload(place, encoded, published=())[0] is True


# ---- what is removed -------------------------------------------------------------------------------------------------


class Store:
    """Job 7, of which epoch 1 is over. Epoch 2 is placed and saves as soon as its attempts have been read."""

    def __init__(self, comes):
        self.comes = comes

    def attempts(self, _job_id):
        return [SimpleNamespace(epoch=1, folder="7-k/epoch-1-k", holds_allocation=False)]

    def job(self, _job_id):
        self.comes()
        return SimpleNamespace(id="7", folder="7-k", checkpoints=())


def test_what_an_attempt_brings_that_came_after_the_look_is_not_removed(tmp_path):
    """Found by reading: the live attempt was read first and the folders last, and whatever was of another attempt counted as over."""
    kept, outputs, carried = opened(tmp_path), OutputCopies(str(tmp_path / "o")), PendingUploads()
    now = checkpoint(step=20, epoch=2)[0]

    def comes():
        save(kept, step=20, epoch=2)
        outputs.append_upload(replace(NODE, epoch=2), "x.txt", 0, b"half of it")
        carried.nodes_done[now] = {"n0"}

    save(kept, step=10, epoch=1)
    outputs.append_upload(NODE, "x.txt", 0, b"half of it")
    carried.nodes_done[checkpoint(step=10)[0]] = {"n0"}
    RetentionWorker(Store(comes), kept, outputs, carried)._settle("7")
    assert sorted(os.listdir(tmp_path / "c/7-k")) == ["epoch-2-k"]
    assert sorted(os.listdir(tmp_path / "c/7-k/epoch-2-k")) == [".kept", "step-00000020"]
    assert os.listdir(tmp_path / "o/.coming") == ["7.2.0"]
    assert list(carried.nodes_done) == [now]
