"""Folders that a job filled are gone through and removed whatever is in them: deep, closed, linked."""

import os
import subprocess

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.ids import Epoch, JobId
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.member import scratch
from phalanx.node.transfer import output_sync
from phalanx.store.checkpoints.copies import CheckpointCopies, CheckpointKey
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointManifest, ManifestFile

LEVELS = 2200  # past what Python's own stack takes, and past the longest path (PATH_MAX of limits.h: 4096)


@pytest.fixture
def deep(tmp_path):
    """A folder whose folders go down LEVELS, with a file on each hundredth."""
    top = tmp_path / "n" / "attempts" / "7.1"
    top.mkdir(parents=True)
    at = os.open(top, os.O_RDONLY)
    for level in range(LEVELS):
        if level % 100 == 0:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=at))
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    yield top
    subprocess.run(["rm", "-rf", str(tmp_path / "n")], check=True)  # pytest's own removal would end at the thousandth


@pytest.mark.slow
def test_folders_in_folders_past_pythons_stack_are_removed(deep):
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(str(deep))
    assert not deep.exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_a_supervisor_starts_again_where_a_job_left_folders_in_folders(deep):
    scratch.remove_old_scratch(str(deep.parent.parent))
    assert not deep.exists()


@pytest.mark.slow
def test_an_attempt_that_left_folders_in_folders_is_forgotten(deep):
    scratch.scratch_of(str(deep.parent.parent), JobId("7"), Epoch(1)).remove()
    assert not deep.exists()


@pytest.mark.slow
def test_outputs_past_the_longest_path_are_passed_over_and_the_others_go(deep):
    (deep / "e").mkdir()
    (deep / "e" / "result").write_text("x")
    files, whole = output_sync._files(str(deep))
    names = [path for path, _ in files]
    assert names[0] == "file"
    assert names[-1] == "e/result"
    assert not whole


def test_what_is_closed_is_opened_and_what_is_linked_stays(tmp_path):
    beside, doomed = tmp_path / "beside", tmp_path / "doomed"
    beside.mkdir()
    (beside / "kept").write_text("x")
    for name in ("a/b/c", "a/b/d", "e"):
        (doomed / name).mkdir(parents=True)
    (doomed / "a" / "b" / "file").write_text("x")
    (doomed / "a" / "out").symlink_to(beside)
    os.mkfifo(doomed / "e" / "pipe")
    for name in ("a/b/c", "a/b", "a", "e", ""):
        (doomed / name).chmod(0)
    remove_tree(str(doomed), make_accessible=True)
    assert not doomed.exists()
    assert (beside / "kept").read_text() == "x"


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kept").write_text("x")
    (tmp_path / "link").symlink_to(beside)
    remove_tree(str(tmp_path / "link"), make_accessible=True)
    remove_tree(str(tmp_path / "none"), make_accessible=True)
    assert (beside / "kept").read_text() == "x"
    assert (tmp_path / "link").is_symlink()


def test_a_checkpoint_whose_files_lie_deeper_than_any_does_is_refused(tmp_path):
    kept = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    deepest, deeper = ("/".join(["d"] * count) for count in (manifests.DEPTH_MAX, 1500))
    for path, taken in ((deepest, True), (deeper, False)):
        encoded = manifests.encode(
            CheckpointManifest(
                format=1, step=4, epoch=1, world_size=1, files=(ManifestFile(path=path, size_bytes=1, crc32=0),)
            )
        )
        place = CheckpointKey(
            job_id=JobId("7"), epoch=Epoch(1), folder="7-k/epoch-1-k", step=4, digest=manifests.digest(encoded)
        )
        if taken:
            assert kept.begin_upload(place, encoded, published=()) == (False, 1, {})
            continue
        with pytest.raises(BadRequest, match="not a file below the folder"):
            kept.begin_upload(place, encoded, published=())
