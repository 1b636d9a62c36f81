"""Mounts of object stores on a node: which jobs share one, who waits for whom, and what is left of it."""

# mypy: disable-error-code="arg-type"

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.prepare import data_mounts
from phalanx.node.prepare.data_mounts import DataMounts

S3 = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
SOURCE = (("train", "s3://b/train"),)


class FakeMount:
    """A mount whose program is this test's: `go` lets it answer, `fails` makes it refuse."""

    made: ClassVar[list["FakeMount"]] = []
    go: threading.Event
    begun: threading.Event
    fails: ClassVar[list[str]] = []

    def __init__(self, folder, cache):
        self.folder, self.cache = folder, cache
        self.users, self.path, self.broken, self.ended = 0, "", False, 0
        self.refreshed = 0
        self.tried = threading.Event()
        self.made.append(self)

    def start(self, order, _cancelled):
        assert os.path.isdir(self.cache)
        self.begun.set()
        assert self.go.wait(20)
        if self.fails:
            raise PreparationFailed(self.fails.pop(), charge=True)
        self.path = f"{self.folder}/data"
        return 0.5

    @contextlib.contextmanager
    def logging_to(self, _name, output):
        yield
        os.close(output)

    def refresh(self):
        self.refreshed += 1

    def end(self):
        self.ended += 1


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    monkeypatch.setattr(data_mounts, "SharedMount", FakeMount)
    monkeypatch.setattr(data_mounts, "why_no_mounts", lambda _path: "")
    FakeMount.made, FakeMount.fails, FakeMount.go = [], [], threading.Event()
    FakeMount.begun = threading.Event()
    FakeMount.go.set()
    return DataMounts(folder=str(tmp_path / "mounts"), shared_folder="", path="")


def member():
    return SimpleNamespace(account=None, cancelled=threading.Event())


def held(mounts, variables=S3, sources=SOURCE, who=None):
    return mounts.hold(who or member(), sources, variables, lambda: os.open(os.devnull, os.O_WRONLY))


def test_a_mount_lasts_from_its_first_job_to_its_last(mounts):
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        paths = first.enter_context(held(mounts))
        assert second.enter_context(held(mounts)) == paths
        (mount,) = FakeMount.made
        assert mount.refreshed == 1  # for the second job
        first.close()
        assert mount.ended == 0
        with held(mounts) as third:
            assert third == paths
        second.close()
        assert mount.ended == 1
    with held(mounts) as later:
        assert later != paths
    assert [one.ended for one in FakeMount.made] == [1, 1]


@pytest.mark.parametrize(
    "other",
    [
        {**S3, "AWS_SECRET_ACCESS_KEY": "another"},
        {**S3, "AWS_SESSION_TOKEN": "t"},
        {},
        {**S3, "AWS_ENDPOINT_URL": "http://h"},
    ],
)
def test_other_credentials_or_another_store_have_a_mount_of_their_own(mounts, other):
    with (
        held(mounts) as mine,
        held(mounts, {**S3, "RANK": "1", "HF_TOKEN": "x"}) as same,
        held(mounts, other) as theirs,
    ):
        assert mine == same
        assert theirs != mine
    assert [one.ended for one in FakeMount.made] == [1, 1]


def test_another_source_is_another_mount_and_one_source_of_two_names_is_one(mounts):
    with held(mounts, sources=(("a", "s3://b/x"), ("b", "s3://b/y"), ("c", "s3://b/x"))) as paths:
        assert paths["a"] == paths["c"] != paths["b"]
        assert len(FakeMount.made) == 2
    assert [one.ended for one in FakeMount.made] == [1, 1]


def test_a_job_waits_for_the_mount_that_another_makes_and_stops_when_it_is_stopped(mounts):
    FakeMount.go.clear()
    found, stopped_member, stopped, release = {}, member(), [], threading.Event()

    def maker():
        with held(mounts) as paths:
            found["maker"] = paths
            assert release.wait(20)

    def waiter():
        with held(mounts) as paths:
            found["waiter"] = paths
        release.set()

    def stopped_one():
        with pytest.raises(PreparationFailed, match="stopped"), held(mounts, who=stopped_member):
            pass
        stopped.append(True)

    threads = [threading.Thread(target=one) for one in (maker, waiter, stopped_one)]
    threads[0].start()
    assert FakeMount.begun.wait(20)
    for one in threads[1:]:
        one.start()
    stopped_member.cancelled.set()
    threads[2].join(20)
    assert stopped
    FakeMount.go.set()
    for one in threads:
        one.join(20)
    assert found["maker"] == found["waiter"]
    assert [one.ended for one in FakeMount.made] == [1]


def test_a_mount_that_failed_for_one_job_is_tried_again_by_the_next(mounts):
    FakeMount.fails = ["no such bucket"]
    with pytest.raises(PreparationFailed, match="no such bucket"), held(mounts):
        pass
    with held(mounts):
        pass
    assert [one.ended for one in FakeMount.made] == [1, 1]


def test_a_broken_mount_stays_for_those_that_have_it_and_is_given_to_nobody_else(mounts):
    with held(mounts) as old:
        FakeMount.made[0].broken = True
        with held(mounts) as new:
            assert new != old
            assert FakeMount.made[0].ended == 0
            with held(mounts) as newer:
                assert newer == new
    assert [one.ended for one in FakeMount.made] == [1, 1]


def test_caches_of_an_earlier_supervisor_are_removed(mounts, tmp_path):
    with held(mounts):
        (tmp_path / "mounts/caches/left/vfs").mkdir(parents=True)
        (tmp_path / "mounts/caches/left/vfs/x").write_text("1")
    mounts.remove_leftovers()
    assert not (tmp_path / "mounts").exists()
