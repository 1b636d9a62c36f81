"""What a porter leaves of a node's own copies while it brings checkpoints to the head. Real files in a folder of the test."""

# mypy: disable-error-code="arg-type"

import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.member.member_runtime import MemberRuntimes
from phalanx.node.transfer.checkpoint_upload import CheckpointUpload, CheckpointUploader
from tests.unit.test_unshared_folders import folder, make_prepare, member

PATIENCE_S = 100.0


def live(tmp_path, *steps, brought=None):
    """The members of an attempt that may resume from these steps of its own."""
    candidates = tuple(
        PublishedCheckpoint(epoch=3, step=step, path=f"/c/7/epoch-3/step-{step:08d}", digest="d") for step in steps
    )
    order = make_prepare(kept=True, candidates=candidates)
    present = member(order, 0, tmp_path)
    present.checkpoints = str(tmp_path / "own")
    if brought is not None:
        present.local_checkpoint = replace(candidates[0], step=brought, path=f"/c/7/epoch-3/step-{brought:08d}")
    presents = MemberRuntimes()
    presents.add(present)
    return presents, order


def test_the_checkpoint_that_ranks_load_stays_while_an_earlier_generations_saves_still_travel(tmp_path):
    """Found by reading: a gang that started again in place lost it from under its ranks, once two newer ones lay there."""
    own = tmp_path / "own" / "epoch-3"
    folder(own, *(f"step-{step:08d}" for step in (10, 20, 30, 40, 50)))
    presents, order = live(tmp_path, 20, brought=30)
    ended = threading.Event()
    ended.set()  # nothing is brought any more, but what was to be is tidied behind
    access = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t", ca_file=None)
    uploader = CheckpointUploader(access, ended, resume_folders=presents.resume_folders)
    done = threading.Event()
    uploader.submit(
        CheckpointUpload(
            job_id=order.job_id, epoch=order.epoch, step=50, digest="d", folder=str(own / "step-00000050"), note=print
        )
    )
    uploader._pool.submit((order.job_id, order.epoch), done.set)
    assert done.wait(PATIENCE_S)
    assert sorted(path.name for path in own.iterdir()) == [f"step-{step:08d}" for step in (20, 30, 40, 50)]


class Hold:
    """A porter whose first upload stays in hand until it is let go, and what came of the uploads."""

    def __init__(self):
        ended = threading.Event()
        ended.set()
        self.go, self.begun, self.all_done = threading.Event(), threading.Event(), threading.Event()
        self.brought: list[int] = []
        self.said: list[str] = []
        access = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t", ca_file=None)
        self.uploader = CheckpointUploader(access, ended)

    def put(self, step, *, first=False):
        def before():
            self.brought.append(step)
            if first:
                self.begun.set()
                assert self.go.wait(PATIENCE_S)

        folder = f"/nowhere/step-{step}"
        self.uploader.submit(
            CheckpointUpload(
                job_id="7", epoch=3, step=step, digest="d", folder=folder, note=self.said.append, before_upload=before
            )
        )

    def finish(self):
        self.go.set()
        self.uploader._pool.submit(("7", 3), self.all_done.set)
        assert self.all_done.wait(PATIENCE_S)


def test_of_a_flood_of_saves_one_waits_and_it_is_the_newest():
    """50,000 reports while the first upload lasted left as many closures: +190 MiB, until the system ended the supervisor."""
    hold = Hold()
    hold.put(0, first=True)
    assert hold.begun.wait(PATIENCE_S)
    for step in range(1, 1001):
        hold.put(step)
    assert len(hold.uploader._pool._lanes["7", 3]) == 2  # the one in hand, and one that waits
    assert [one.step for one in hold.uploader._uploads] == [0, 1000]
    hold.finish()
    assert hold.brought == [0, 1000]
    assert hold.said == ["checkpoint of step 1000 replaced older ones: 999 earlier were not uploaded to the head"]


def test_save_after_a_flood_is_brought_too():
    hold = Hold()
    for step in (1, 2):
        hold.put(step, first=step == 1)
        assert hold.begun.wait(PATIENCE_S)
    hold.finish()
    hold.all_done.clear()
    hold.put(3)
    hold.finish()
    assert hold.brought == [1, 2, 3]
    assert hold.said == []


def test_save_for_which_there_was_no_thread_is_brought_with_the_next(monkeypatch):
    hold = Hold()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            hold.put(1)
    hold.put(2)
    hold.finish()
    assert hold.brought == [2]
    assert hold.said == ["checkpoint of step 2 replaced older ones: 1 earlier was not uploaded to the head"]


def test_what_an_attempt_resumes_from_is_that_attempts_alone(tmp_path):
    presents, order = live(tmp_path, 20)
    assert presents.resume_folders(order.job_id, order.epoch) == {str(tmp_path / "own/epoch-3/step-00000020")}
    assert presents.resume_folders(order.job_id, order.epoch + 1) == set()
    assert presents.resume_folders("other", order.epoch) == set()
