"""Pieces of the supervisor's shell that need no process: hands, events on their way, uploads, checkpoints, the page, the log."""

import io
import logging
import os
import tarfile
import threading

import pytest

from benchmarks.cluster import wait_until
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.reports import MemberStarted, MemberStopped
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.files import checkpoint_folders, workdir_upload
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.logic import pending_events
from phalanx.node.logic.actions import UpdateLeasePage
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.pending_events import PendingEvents
from phalanx.node.logs.log_file import SizeLimitedLogHandler, log_to_file
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.scratch import scratch_of
from phalanx.node.processes.thread_pool import KeyedThreadPool
from phalanx.wire.rank import LeasePage, RankStopReason


def started(job="1"):
    return MemberStarted(job_id=JobId(job), epoch=Epoch(1), generation=Generation(0), node_id=NodeId("n0"), at_s=0.0)


def stopped(job="1"):
    return MemberStopped(job_id=JobId(job), epoch=Epoch(1), generation=Generation(0), node_id=NodeId("n0"), at_s=0.0)


# ---- outgoing


def test_events_are_numbered_and_kept_until_acknowledged():
    events = PendingEvents()
    assert [events.put(started(str(n))) for n in range(3)] == [1, 2, 3]
    events.acknowledge(2)
    assert [seq for seq, _ in events.batch()] == [3]
    events.acknowledge(1)
    assert len(events) == 1
    events.discard(3)
    assert events.batch() == []


def test_overfull_queue_keeps_what_the_head_waits_for(monkeypatch):
    monkeypatch.setattr(pending_events, "PENDING_MAX", 3)
    events = PendingEvents()
    for event in (stopped("1"), started("2"), stopped("3"), started("4")):
        events.put(event)
    assert [getattr(event, "job_id", "") for _, event in events.batch()] == ["1", "3", "4"]
    assert events.dropped == 1


# ---- hands


def test_lane_keeps_its_order_while_others_go_on():
    hands, done, gate = KeyedThreadPool("t", 2), [], threading.Event()

    def wait_at_gate() -> None:
        gate.wait()

    hands.submit("slow", wait_at_gate)
    hands.submit("slow", lambda: done.append("after"))
    other = threading.Event()
    hands.submit("quick", other.set)
    assert other.wait(100)
    assert done == []
    gate.set()
    last = threading.Event()
    hands.submit("slow", last.set)
    assert last.wait(100)
    assert done == ["after"]
    hands.close(10)


def test_slow_work_of_many_holds_up_nobody_and_hands_that_came_for_it_go_again():
    hands, gate, at_it = KeyedThreadPool("t", 2, 5), threading.Event(), threading.Semaphore(0)

    def slow() -> None:
        at_it.release()
        gate.wait(60)

    def quick_is_done() -> bool:
        done = threading.Event()
        hands.submit("quick", done.set)
        return done.wait(100)

    for number in range(5):
        hands.submit(number, slow, slow=True)
    assert all(at_it.acquire(timeout=60) for _ in range(5))
    assert quick_is_done()
    for number in range(5, 7):
        hands.submit(number, slow, slow=True)
    assert all(at_it.acquire(timeout=60) for _ in range(2))
    assert not at_it.acquire(timeout=0.05), "two hands and five more are all there are"
    gate.set()
    wait_until(lambda: sum(one.name.startswith("t-") for one in threading.enumerate()) <= 2, "they are gone again")
    assert quick_is_done()
    hands.close(10)


def test_failed_work_takes_no_hand_away(caplog):
    hands, done = KeyedThreadPool("t", 1), threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    hands.submit("a", fail)
    hands.submit("a", done.set)
    assert done.wait(100)
    hands.close(10)
    assert "failed" in caplog.text


# ---- uploads


def archive(tmp_path, *entries):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind, body in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size, info.mode = len(body), 0o755
                tar.addfile(info, io.BytesIO(body))
            else:
                info.linkname = body.decode()
                tar.addfile(info)
    return str(path)


def test_files_folders_and_inner_links_arrive(tmp_path):
    packed = archive(
        tmp_path, ("d", tarfile.DIRTYPE, b""), ("d/run.sh", tarfile.REGTYPE, b"#!"), ("l", tarfile.SYMTYPE, b"d/run.sh")
    )
    workdir_upload.unpack(packed, str(tmp_path / "w"), threading.Event())
    assert (tmp_path / "w/l").read_bytes() == b"#!"
    assert os.access(tmp_path / "w/d/run.sh", os.X_OK)


@pytest.mark.parametrize(
    "entries",
    [
        [("../out", tarfile.REGTYPE, b"x")],
        [("/abs", tarfile.REGTYPE, b"x")],
        [("l", tarfile.SYMTYPE, b"/etc/passwd")],
        [("d/l", tarfile.SYMTYPE, b"../../out")],
        [("a/b/up", tarfile.SYMTYPE, b"../.."), ("l", tarfile.SYMTYPE, b"a/b/up/..")],
        [("h", tarfile.LNKTYPE, b"l")],
        [("f", tarfile.FIFOTYPE, b"")],
    ],
)
def test_nothing_leads_outside(tmp_path, entries):
    with pytest.raises(workdir_upload.UploadInvalid):
        workdir_upload.unpack(archive(tmp_path, *entries), str(tmp_path / "w"), threading.Event())
    assert not (tmp_path / "out").exists()


def test_link_first_then_file_through_it_stays_inside(tmp_path):
    entries = [("l", tarfile.SYMTYPE, b"d"), ("l/f", tarfile.REGTYPE, b"x")]
    with pytest.raises(workdir_upload.UploadInvalid, match="twice"):
        workdir_upload.unpack(archive(tmp_path, *entries), str(tmp_path / "w"), threading.Event())


def test_what_is_no_archive_is_said(tmp_path):
    (tmp_path / "a").write_bytes(b"nonsense" * 100)
    with pytest.raises(workdir_upload.UploadInvalid, match="not a readable tar"):
        workdir_upload.unpack(str(tmp_path / "a"), str(tmp_path / "w"), threading.Event())


# ---- checkpoints


def test_only_checkpoint_folders_of_the_job_are_deleted(tmp_path):
    mine = tmp_path / "7-k/epoch-1-k/step-00000010"
    mine.mkdir(parents=True)
    other = tmp_path / "8-k/epoch-1-k/step-00000010"
    other.mkdir(parents=True)
    wrong = [str(other), str(tmp_path), f"{mine}/../../../8-k/epoch-1-k/step-00000010", f"{mine}/inner"]
    assert checkpoint_folders.delete_checkpoints(JobId("7"), [str(mine), *wrong]) == wrong
    assert not (tmp_path / "7-k/epoch-1-k").exists()
    assert other.exists()
    assert checkpoint_folders.delete_checkpoints(JobId("7"), [str(mine)]) == []


# ---- page, scratch, address, log


def present(tmp_path) -> MemberRuntime:
    grant = NodeGrant(node_id=NodeId("n0"), node_rank=0, devices=(), cpus=1, memory_bytes=0, tasks=1, first_rank=0)
    key = MemberKey(JobId("1"), Epoch(1), Generation(0))
    order = PrepareTasks(
        node_id=NodeId("n0"),
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        spec=JobSpec(name="j", role=Role(argv=("t",)), workdir="/"),
        allocation=Allocation(grants=(grant,)),
        addresses=("127.0.0.1",),
        candidates=(),
        checkpoint_dir="",
        output_dir="",
        deadline_s=None,
        restarts=0,
        mtbf_s=1.0,
    )
    scratch = scratch_of(str(tmp_path), key.job_id, key.epoch)
    scratch.make()
    return MemberRuntime(key=key, prepare=order, grant=grant, scratch=scratch, workdir="/")


def test_what_was_written_before_the_page_is_on_it(tmp_path):
    member = present(tmp_path)
    member.write_page(UpdateLeasePage(key=member.key, deadline_ns=700))
    member.write_page(UpdateLeasePage(key=member.key, save_now=True))
    member.make_page(deadline_ns=500, job_deadline_ns=900)
    page = LeasePage.attach(member.scratch.page)
    assert [page.read(name) for name in ("deadline_ns", "job_deadline_ns", "checkpoint_now", "stop")] == [
        700,
        900,
        1,
        0,
    ]
    member.write_page(UpdateLeasePage(key=member.key, stop=RankStopReason.DRAIN, stop_by_ns=800, save_now=True))
    assert [page.read(name) for name in ("stop", "stop_by_ns", "checkpoint_now")] == [5, 800, 2]
    page.close()
    member.close_page()


def test_scratch_folder_goes_whole(tmp_path):
    member = present(tmp_path)
    inner = os.path.join(member.scratch.path, "workdir/locked")
    os.makedirs(inner)
    with open(os.path.join(inner, "f"), "w"):
        pass
    os.chmod(inner, 0)
    member.scratch.remove()
    member.scratch.remove()
    assert not os.path.exists(member.scratch.path)


def test_head_file_is_read_again_and_a_torn_one_changes_nothing(tmp_path):
    path = tmp_path / "head.json"
    address = HeadAddress("http://a:1", str(path))
    assert address.url == "http://a:1"
    path.write_text('{"url": "http://b:2"}')
    address.switch_head()
    path.write_text('{"url": ')
    address.switch_head()
    assert address.url == "http://b:2"


def test_log_never_grows_past_its_cap(tmp_path):
    path = tmp_path / "log"
    handler = SizeLimitedLogHandler(str(path), cap_bytes=1000)
    for number in range(100):
        handler.emit(logging.LogRecord("n", logging.INFO, "f", 1, "line %d %s", (number, "x" * 40), None))
    assert path.stat().st_size <= 1000
    assert (tmp_path / "log.1").stat().st_size <= 1000


def test_no_job_forges_a_line_of_its_supervisors_log(tmp_path):
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        log_to_file(str(tmp_path / "log"), "INFO")
        logging.getLogger("phalanx").warning(
            "checkpoint %s is no folder", "/c\n2026-01-01 00:00:00 INFO root: forged\x1b[2J"
        )
    finally:
        root.handlers, root.level = handlers, level
    text = (tmp_path / "log").read_text()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "/c\\x0a2026" in text
