"""A fault in one of the spool's streams: the others are read on."""

import errno
import os
import queue
import shutil

import pytest

from phalanx.node.transfer.spool import Spool
from phalanx.wire.rank import ReportKind, encode_report
from tests.e2e.process_rig import until

PATIENCE_S = 100.0


def report(step):
    return encode_report(ReportKind.STEP, rank=0, epoch=1, generation=0, step=step)


def test_a_report_that_nobody_can_bear_costs_itself_alone(tmp_path, caplog):
    """Found by reading: what it raised ended the one thread that reads all pipes, and every rank of the node waited for ever."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def hear(found):
        if found.fields["step"] == 1:
            raise OverflowError("cannot convert float infinity to integer")
        heard.put(found.fields["step"])

    spool = Spool(on_bytes=lambda _: None)
    pipe = spool.open_reports(str(tmp_path / "reports"), hear)
    with open(pipe.path, "wb", buffering=0) as writer:
        writer.write(report(1) + report(2))
    assert heard.get(timeout=PATIENCE_S) == 2
    assert "report of rank 0 (step) skipped" in caplog.text
    spool.close()


def test_a_stream_that_fails_is_not_kept_and_the_others_are(tmp_path, caplog):
    grown: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_bytes(stream):
        if stream == "bad":
            raise RuntimeError("on purpose")
        grown.put(stream)

    spool = Spool(on_bytes=on_bytes)
    pipes = {}
    for name in ("bad", "good"):
        spool.add(name, str(tmp_path / name))
        pipes[name] = spool.open_pipe(name)
    os.write(pipes["bad"], b"x")
    until(lambda: "failed" in caplog.text, "the fault in the log")
    os.write(pipes["good"], b"y")
    assert grown.get(timeout=PATIENCE_S) == "good"
    for pipe in pipes.values():
        os.close(pipe)
    until(lambda: spool.closed("bad") and spool.closed("good"), "the end of both")
    spool.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_does_not_answer_counts_as_full(tmp_path, monkeypatch, number):
    """Found by reading: the question for its room stood outside of every guard."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    spool = Spool(on_bytes=lambda _: None)
    spool.add("rank-0", str(tmp_path / "rank-0"))
    pipe = spool.open_pipe("rank-0")
    monkeypatch.setattr(os, "fstatvfs", refuse)
    os.write(pipe, b"lost\n")
    assert spool.drain("rank-0")
    assert spool.dropped("rank-0") == 5
    monkeypatch.undo()
    os.write(pipe, b"kept\n")
    assert spool.drain("rank-0")
    assert spool.read("rank-0", 0, 1000).endswith(b"kept\n")
    os.close(pipe)
    spool.close()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENODEV])
def test_a_disk_that_takes_nothing_stops_no_rank(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    spool = Spool(on_bytes=lambda _: None)
    spool.add("rank-0", str(tmp_path / "rank-0"))
    pipe = spool.open_pipe("rank-0")
    monkeypatch.setattr(os, "pwrite", refuse)
    for _ in range(40):
        os.write(pipe, b"x" * 65536)  # more than a pipe holds
    assert spool.drain("rank-0")
    assert spool.dropped("rank-0") == 40 * 65536
    monkeypatch.undo()
    os.close(pipe)
    spool.close()


def test_output_is_kept_of_a_job_that_removed_its_folder_before_it_printed(tmp_path):
    """Found by review: files are made with the first byte, so that there was none, and the disk was said to be full."""
    missing: list[tuple[str, str]] = []
    spool = Spool(on_bytes=lambda _: None, on_missing=lambda stream, text: missing.append((stream, text)))
    folder = tmp_path / "node" / "attempts"
    folder.mkdir(parents=True)
    spool.add("s", str(folder / "rank-0.log"))
    shutil.rmtree(tmp_path / "node")
    pipe = spool.open_pipe("s")
    os.write(pipe, b"after all\n")
    os.close(pipe)
    until(lambda: spool.closed("s"), "the end of the pipe")
    assert (spool.read("s", 0, 99), spool.dropped("s"), missing) == (b"after all\n", 0, [])
    spool.remove("s")
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_a_file_that_cannot_be_made_is_said_once_and_its_writer_goes_on(tmp_path, caplog):
    spool = Spool(on_bytes=lambda _: None)
    spool.add("s", str(tmp_path / "rank-0.log"))
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "elsewhere")
    for _ in range(3):
        spool.write("s", b"line\n")
    assert spool.dropped("s") == 15
    assert caplog.text.count("cannot be written") == 1
    assert not (tmp_path / "elsewhere").exists()
    spool.close()


def test_a_rolling_stream_goes_on_once_the_head_has_what_it_sent(tmp_path):
    """A service prints for months: its cap counts only what the head does not have."""
    spool = Spool(on_bytes=lambda _: None, cap_bytes=1 << 20, tail_bytes=0)
    for name, rolling in (("job", False), ("service", True)):
        spool.add(name, str(tmp_path / name), rolling=rolling)
    line = b"x" * 1023 + b"\n"
    for name in ("job", "service"):
        for _ in range(1500):  # half a MiB too much
            spool.write(name, line)
        cut = spool.length(name)
        assert 1 << 20 <= cut < (1 << 20) + 1024
        spool.acknowledge(name, cut)
        spool.write(name, b"newest\n")
    if os.stat(tmp_path / "service").st_blocks * 512 > 1 << 19:
        pytest.skip("this file system frees no ranges")
    added = spool.read("service", 1 << 20, 1 << 20)
    assert b"output over the cap of 1048576 bytes is dropped from here on\n[phalanx] " in added
    assert b"bytes of output were dropped in all; its last lines follow\n" in added
    assert added.endswith(line + b"newest\n")
    assert b"newest" not in spool.read("job", 0, 1 << 21)
    spool.close()
