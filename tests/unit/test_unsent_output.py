"""What a starting supervisor keeps of the output that an earlier one had not sent."""

# The uploader here is a drawing.
# mypy: disable-error-code="arg-type"

import os
import queue
import threading

import pytest

from phalanx.core.ids import Epoch, JobId, SupervisorId
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.transfer.spool import Spool
from phalanx.node.transfer.stream_upload import StreamName, StreamUploader
from phalanx.node.transfer.unsent_output import keep_unsent_output, send_unsent_output


class Uploader:
    """Takes the streams; `done` of each is called by the test."""

    def __init__(self):
        self.added, self.done, self.removed = {}, {}, []

    def add(self, name, end):
        self.added[name.key] = end

    def mark_grown(self, key):
        assert key in self.added

    def notify_when_uploaded(self, keys, timeout_s, done):
        assert timeout_s == float("inf")
        (key,) = keys
        self.done[key] = done

    def remove(self, keys):
        self.removed += keys


@pytest.fixture
def spool():
    grown: queue.SimpleQueue[str] = queue.SimpleQueue()
    spool = Spool(on_bytes=grown.put)
    yield spool
    spool.close()


def test_streams_are_kept_and_nothing_else_of_an_attempt(tmp_path, spool):
    attempt = tmp_path / "attempts" / "17_3.2"
    (attempt / "workdir").mkdir(parents=True)
    for name, text in {"rank-0.log": "0123456789", "rank-1.log": "", "page": "x", "image.log": "x"}.items():
        (attempt / name).write_text(text)
    (attempt / "steps-0.log").symlink_to("/etc/passwd")
    keep_unsent_output(str(tmp_path), str(tmp_path / "attempts"))
    kept = [str(path.relative_to(tmp_path / "unsent")) for path in (tmp_path / "unsent").rglob("*") if path.is_file()]
    assert kept == ["17_3.2/rank-0.log"]
    uploader = Uploader()
    send_unsent_output(str(tmp_path), spool, uploader)
    assert uploader.added == {"17_3.2.rank-0": 0}
    assert spool.read("17_3.2.rank-0", 4, 100) == b"456789"
    uploader.done["17_3.2.rank-0"]()
    assert uploader.removed == ["17_3.2.rank-0"]
    assert not (tmp_path / "unsent" / "17_3.2").exists()


def test_what_the_head_has_stored_is_not_sent_again(tmp_path, spool):
    path = tmp_path / "rank-0.log"
    spool.add("1.1.rank-0", str(path))
    spool.write("1.1.rank-0", b"x" * (4 << 20))
    spool.acknowledge("1.1.rank-0", 3 << 20)
    spool.remove("1.1.rank-0")
    if os.stat(path).st_blocks * 512 >= 4 << 20:
        pytest.skip("this file system punches no holes")
    (tmp_path / "attempts" / "1.1").mkdir(parents=True)
    path.rename(tmp_path / "attempts" / "1.1" / "rank-0.log")
    keep_unsent_output(str(tmp_path), str(tmp_path / "attempts"))
    uploader = Uploader()
    send_unsent_output(str(tmp_path), spool, uploader)
    assert uploader.added == {"1.1.rank-0": 2 << 20}, "all but the tail that is kept for inspection"


def test_a_file_of_which_everything_was_freed_ends_like_one_that_was_sent(tmp_path, spool):
    path = tmp_path / "unsent" / "1.1" / "rank-0.log"
    path.parent.mkdir(parents=True)
    with path.open("xb") as file:
        file.truncate(8192)
    uploader = Uploader()
    send_unsent_output(str(tmp_path), spool, uploader)
    with path.open("rb") as file:
        try:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError:
            assert uploader.added == {"1.1.rank-0": 8192}
        else:
            pytest.skip("this file system does not say where a file has no data")
    uploader.done["1.1.rank-0"]()
    assert not path.parent.exists()


def test_a_node_without_old_output_keeps_nothing(tmp_path, spool):
    keep_unsent_output(str(tmp_path), str(tmp_path / "attempts"))
    send_unsent_output(str(tmp_path), spool, Uploader())
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_the_spool_has_removed_has_nothing_unsent(spool):
    access = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="")
    uploader = StreamUploader(access, None, supervisor_id=SupervisorId("s"), ended=threading.Event())
    uploader.set_spool(spool)
    name = StreamName(JobId("1"), Epoch(1), "supervisor-0")
    uploader.add(name)  # by a late note, between the removals of the attempt's streams here and there
    assert uploader.unsent([name.key]) == ()
    uploader.wait_sent(60.0)
