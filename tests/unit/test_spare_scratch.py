"""Folders of ended attempts that others take over: only if a job could not tell them from new ones."""

from __future__ import annotations

import os
import stat

import pytest

from phalanx.core.ids import Epoch, JobId
from phalanx.node.member.rank_reports import ReportPipeReader, unused_fifo
from phalanx.node.member.scratch import remove_old_scratch, scratch_of, spares_folder
from phalanx.node.member.spare_scratch import SpareScratch

TEXTS = {"hostfile": "localhost slots=1\n", "hostfile.mpich": "localhost:1\n"}


def attempt(folder, job="1"):
    return scratch_of(str(folder), JobId(job), Epoch(1))


def make(spares, scratch, texts=TEXTS):
    """Make an attempt's folder as preparation does; returns the inode of the folder."""
    spares.make(scratch, texts)
    for name, text in texts.items():
        path = os.path.join(scratch.path, name)
        if not os.path.exists(path):
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    with open(scratch.page, "x", encoding="utf-8") as page:
        page.write(scratch.path)
    return os.stat(scratch.path).st_ino


def test_the_next_attempt_takes_over_the_folder_but_not_the_page(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")
    inode = make(spares, first)
    page = os.open(first.page, os.O_RDONLY)
    with open(first.log("rank-0"), "x", encoding="utf-8") as log:
        log.write("output\n")

    spares.keep_or_remove(first, TEXTS)
    assert not os.path.exists(first.path)

    assert make(spares, second) == inode
    assert sorted(os.listdir(second.path)) == ["hostfile", "hostfile.mpich", "page"]
    assert os.pread(page, 4096, 0).decode() == first.path, (
        "a process that outlived its attempt reads the page of that one"
    )
    os.close(page)


def test_other_host_files_need_another_folder(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")
    make(spares, first)
    spares.keep_or_remove(first, TEXTS)
    two = {"hostfile": "localhost slots=2\n", "hostfile.mpich": "localhost:2\n"}
    make(spares, second, two)
    with open(second.hostfile, encoding="utf-8") as file:
        assert file.read() == two["hostfile"]


def other_text(scratch):
    with open(scratch.hostfile, "a", encoding="utf-8") as file:
        file.write("elsewhere slots=8\n")


def same_size(scratch):
    with open(scratch.hostfile, "r+", encoding="utf-8") as file:
        file.write("localhost slots=9")


def linked_elsewhere(scratch):
    os.link(scratch.hostfile, f"{os.path.dirname(os.path.dirname(scratch.path))}/mine")


def symbolic_link(scratch):
    os.rename(scratch.hostfile, f"{scratch.path}/moved")
    os.symlink("moved", scratch.hostfile)


def pipe(scratch):
    os.unlink(scratch.hostfile)
    os.mkfifo(scratch.hostfile)


def missing(scratch):
    os.unlink(scratch.hostfile)


def open_to_all(scratch):
    os.chmod(scratch.path, 0o777)


def program(scratch):
    os.chmod(scratch.hostfile, 0o755)


def folder_inside(scratch):
    os.makedirs(f"{scratch.path}/workdir/deep")


def many_files(scratch):
    for number in range(100):
        with open(f"{scratch.path}/{number}", "x", encoding="ascii"):
            pass


@pytest.mark.parametrize(
    "changed",
    [
        other_text,
        same_size,
        linked_elsewhere,
        symbolic_link,
        pipe,
        missing,
        open_to_all,
        program,
        folder_inside,
        many_files,
    ],
)
def test_a_folder_that_a_job_has_changed_is_removed(tmp_path, changed):
    spares, scratch = SpareScratch(str(tmp_path)), attempt(tmp_path)
    make(spares, scratch)
    changed(scratch)
    spares.keep_or_remove(scratch, TEXTS)
    assert not os.path.lexists(scratch.path)
    assert not os.path.isdir(spares_folder(str(tmp_path))) or os.listdir(spares_folder(str(tmp_path))) == []


def test_a_later_generation_keeps_the_files_of_its_attempt(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")
    make(spares, first)
    spares.keep_or_remove(first, TEXTS)
    inode = os.stat(os.path.join(spares_folder(str(tmp_path)), "0")).st_ino
    second.make()
    other_text(second)
    spares.make(second, TEXTS)
    with open(second.hostfile, encoding="utf-8") as file:
        assert file.read() == "elsewhere slots=8\n"
    assert os.stat(second.path).st_ino != inode


def test_spare_folders_end_with_their_supervisor_or_with_the_start_of_the_next(tmp_path):
    for remove in (lambda spares: spares.close(), lambda _: remove_old_scratch(str(tmp_path))):
        spares, scratch = SpareScratch(str(tmp_path)), attempt(tmp_path)
        make(spares, scratch)
        spares.keep_or_remove(scratch, TEXTS)
        assert os.listdir(spares_folder(str(tmp_path))) == ["0"]
        remove(spares)
        assert not os.path.exists(spares_folder(str(tmp_path)))
        spares.make(scratch, TEXTS)  # works without them
        assert os.listdir(scratch.path) == []
        scratch.remove()


def test_the_report_pipe_goes_with_the_folder_and_brings_no_old_report(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")
    got: list[object] = []

    def reader(scratch):
        return ReportPipeReader(scratch.reports, got.append, lambda _: None, lambda *_: True)

    make(spares, first)
    pipe = reader(first)
    inode = os.fstat(pipe.descriptor).st_ino
    with open(first.reports, "wb", buffering=0) as rank:
        rank.write(b'{"k": "late"}\n')
    pipe.close()
    assert not os.path.exists(first.reports), "nothing can open a pipe that nothing reads"
    spares.keep_or_remove(first, TEXTS)

    make(spares, second)
    pipe = reader(second)
    assert os.fstat(pipe.descriptor).st_ino == inode
    with pytest.raises(BlockingIOError):
        os.read(pipe.descriptor, 100)
    pipe.close()


def test_a_process_that_outlived_its_attempt_cannot_report_for_the_next_one(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")

    def reader(scratch):
        return ReportPipeReader(scratch.reports, lambda _: None, lambda _: None, lambda *_: True)

    make(spares, first)
    pipe = reader(first)
    with open(first.reports, "wb", buffering=0) as survivor:
        survivor.write(b'{"k": "late"}\n')
        pipe.close()
        spares.keep_or_remove(first, TEXTS)
        make(spares, second)
        pipe = reader(second)
        with pytest.raises(BrokenPipeError):
            survivor.write(b'{"k": "later"}\n')
        with pytest.raises(BlockingIOError):
            os.read(pipe.descriptor, 100)
        pipe.close()


def test_a_file_in_the_place_of_the_unused_pipe_is_removed(tmp_path):
    spares, first, second = SpareScratch(str(tmp_path)), attempt(tmp_path), attempt(tmp_path, "2")
    make(spares, first)
    with open(unused_fifo(first.reports), "x", encoding="ascii"):
        pass
    spares.keep_or_remove(first, TEXTS)
    make(spares, second)
    assert sorted(os.listdir(second.path)) == ["hostfile", "hostfile.mpich", "page"]


def test_what_a_job_puts_in_the_place_of_the_unused_pipe_does_not_stop_its_next_generation(tmp_path):
    scratch = attempt(tmp_path)
    scratch.make()
    for spoil in (
        lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL)),
        lambda path: os.symlink("/dev/null", path),
    ):
        spoil(unused_fifo(scratch.reports))
        pipe = ReportPipeReader(scratch.reports, lambda _: None, lambda _: None, lambda *_: True)
        assert stat.S_ISFIFO(os.lstat(scratch.reports).st_mode)
        os.unlink(scratch.reports)
        pipe.close()
