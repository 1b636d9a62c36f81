"""The lease page and the report line: what both sides of a supervisor's pipe may rely on."""

from __future__ import annotations

import errno
import json
import mmap
import os

import pytest

from phalanx.wire.rank import (
    PAGE_BYTES,
    REPORT_BYTES_MAX,
    LeasePage,
    RankStopReason,
    ReportKind,
    boottime_ns,
    encode_report,
)


def make_page(path, **fields):
    return LeasePage.create(str(path), **({"epoch": 3, "generation": 1, "deadline_ns": 77} | fields))


def test_rank_reads_what_the_supervisor_wrote(tmp_path):
    written = make_page(tmp_path / "lease", job_deadline_ns=99)
    read = LeasePage.attach(str(tmp_path / "lease"))
    assert [read.read(name) for name in ("epoch", "generation", "deadline_ns", "job_deadline_ns")] == [3, 1, 77, 99]
    written.write(deadline_ns=1 << 62, stop=RankStopReason.DRAIN, stop_by_ns=5, checkpoint_now=2)
    assert [read.read(name) for name in ("deadline_ns", "stop", "stop_by_ns", "checkpoint_now")] == [1 << 62, 5, 5, 2]
    assert read.read("epoch") == 3


def test_page_is_exactly_one_page(tmp_path):
    make_page(tmp_path / "lease")
    assert (tmp_path / "lease").stat().st_size == PAGE_BYTES == mmap.PAGESIZE
    assert (tmp_path / "lease").stat().st_mode & 0o077 == 0


def test_a_full_disk_is_said_and_the_page_of_before_stays(tmp_path, monkeypatch):
    """Found by reading: the page was a hole, and the first store into it ended the supervisor by SIGBUS."""

    make_page(tmp_path / "lease", generation=0)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        make_page(tmp_path / "lease", generation=1)
    assert LeasePage.attach(str(tmp_path / "lease")).read("generation") == 0


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_a_file_system_keeps_no_room_the_page_is_written(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    make_page(tmp_path / "lease")
    assert (tmp_path / "lease").stat().st_size == PAGE_BYTES
    assert LeasePage.attach(str(tmp_path / "lease")).read("deadline_ns") == 77


def test_new_page_at_the_same_path_leaves_the_old_ranks_theirs(tmp_path):
    """An old generation that is still mapped must not see its lease renewed by the new one's page."""
    make_page(tmp_path / "lease", generation=0)
    old = LeasePage.attach(str(tmp_path / "lease"))
    make_page(tmp_path / "lease", generation=1, deadline_ns=1 << 62)
    assert (old.read("generation"), old.read("deadline_ns")) == (0, 77)
    assert LeasePage.attach(str(tmp_path / "lease")).read("generation") == 1


def test_rank_cannot_write_the_page(tmp_path):
    make_page(tmp_path / "lease")
    with pytest.raises(TypeError):
        LeasePage.attach(str(tmp_path / "lease")).write(deadline_ns=1 << 62)


def test_file_that_is_no_page_is_refused(tmp_path):
    (tmp_path / "lease").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="is not a lease page"):
        LeasePage.attach(str(tmp_path / "lease"))
    with pytest.raises(FileNotFoundError):
        LeasePage.attach(str(tmp_path / "nothing"))


def test_clock_of_leases_goes_forward():
    assert 0 < boottime_ns() <= boottime_ns()


def test_report_is_one_line_of_json():
    line = encode_report(ReportKind.STEP, rank=2, epoch=3, generation=0, step=7, loss=1.5)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"k": "step", "rank": 2, "epoch": 3, "generation": 0, "step": 7, "loss": 1.5}


def test_report_too_long_to_be_atomic_is_refused():
    with pytest.raises(ValueError, match=f"at most {REPORT_BYTES_MAX}"):
        encode_report(ReportKind.CHECKPOINT_FAILED, rank=0, epoch=0, generation=0, error="x" * REPORT_BYTES_MAX)
