"""The spool with real pipes, real files and real writers."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading

import pytest

from phalanx.node.member.rank_reports import RankReport, parse_report
from phalanx.node.transfer.spool import LAST_BYTES, Spool
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind, encode_report
from tests.e2e.process_rig import Rig, until

pytestmark = pytest.mark.serial
MIB = 1024 * 1024


@pytest.fixture
def heard():
    return queue.SimpleQueue()


@pytest.fixture
def spool(heard):
    made = Spool(on_bytes=heard.put, cap_bytes=4 * MIB, tail_bytes=64 * 1024)
    yield made
    made.close()


def put(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def test_bytes_are_readable_by_offset_and_their_coming_is_told(spool, heard, tmp_path):
    spool.add("rank-0", str(tmp_path / "rank-0"))
    pipe = spool.open_pipe("rank-0")
    put(pipe, b"hello ")
    put(pipe, b"world\n")
    assert spool.drain("rank-0")
    assert heard.get(timeout=60) == "rank-0"
    assert (spool.length("rank-0"), spool.read("rank-0", 0, 100), spool.read("rank-0", 6, 3)) == (
        12,
        b"hello world\n",
        b"wor",
    )
    assert spool.read("rank-0", 12, 100) == b""
    assert not spool.closed("rank-0")
    os.close(pipe)
    until(lambda: spool.closed("rank-0"), "the end of the pipe")


def test_drain_after_the_exit_finds_all_the_task_printed(spool, tmp_path):
    spool.add("rank-0", str(tmp_path / "rank-0"))
    with Rig() as rig:
        attempt = rig.open()
        for turn in range(20):
            pipe = spool.open_pipe("rank-0")
            _, output = rig.run(attempt, "true")  # keeps the keeper busy between
            output()
            from phalanx.node.processes.attempt_processes import TaskSpec

            line = f"turn {turn} " + "x" * 50_000
            attempt.spawn(TaskSpec(task_id=f"t{turn}", command=("echo", line), cwd="/", env={"PATH": os.defpath}), pipe)
            os.close(pipe)
            while rig.exit().task_id != f"t{turn}":
                pass
            assert spool.drain("rank-0")
            end = spool.length("rank-0")
            assert spool.read("rank-0", end - len(line) - 1, MIB) == line.encode() + b"\n"


def test_later_generations_and_a_restarted_spool_append(tmp_path, heard):
    path = str(tmp_path / "rank-0")
    for turn in range(2):
        spool = Spool(on_bytes=heard.put)
        spool.add("rank-0", path)
        for generation in range(2):
            pipe = spool.open_pipe("rank-0")
            put(pipe, f"{turn}.{generation}\n".encode())
            os.close(pipe)
            until(lambda: spool.closed("rank-0"), "the end of the pipe")
        spool.close()
    with open(path) as file:
        assert file.read() == "0.0\n0.1\n1.0\n1.1\n"


def test_a_stream_is_not_closed_before_its_last_line_is_written(spool, tmp_path, monkeypatch):
    """Found by a run of the suite: the length was read between the end of the pipe and the line on what was dropped."""
    write = spool._write_total_dropped
    seen: list[object] = []

    def write_late(state):
        asking = threading.Thread(target=lambda: seen.append((spool.closed("loud"), spool.length("loud"))))
        asking.start()
        asking.join(0.3)
        seen.append("written")
        write(state)

    monkeypatch.setattr(spool, "_write_total_dropped", write_late)
    spool.add("loud", str(tmp_path / "loud"))
    pipe = spool.open_pipe("loud")
    put(pipe, b"A" * (4 * MIB + 10))
    os.close(pipe)
    until(lambda: len(seen) == 2, "both")
    assert seen == ["written", (True, os.stat(tmp_path / "loud").st_size)]


def test_a_rank_that_prints_a_gigabyte_fills_no_disk_and_blocks_nobody(spool, tmp_path):
    spool.add("loud", str(tmp_path / "loud"))
    spool.add("quiet", str(tmp_path / "quiet"))
    loud, quiet = spool.open_pipe("loud"), spool.open_pipe("quiet")
    total = 1024 * MIB

    def shout():
        chunk = b"A" * (MIB - 1) + b"\n"
        for _ in range(total // MIB):
            put(loud, chunk)
        os.close(loud)

    thread = threading.Thread(target=shout)
    thread.start()
    for number in range(50):
        put(quiet, f"{number}\n".encode())
        assert spool.drain("quiet")
        assert spool.read("quiet", 0, MIB).endswith(f"{number}\n".encode())
    thread.join()
    until(lambda: spool.closed("loud"), "the end of the pipe")
    end = spool.length("loud")
    assert 4 * MIB + LAST_BYTES < end < 4 * MIB + LAST_BYTES + 300
    assert os.stat(tmp_path / "loud").st_size == end
    assert spool.dropped("loud") == total - 4 * MIB - LAST_BYTES
    tail = spool.read("loud", 4 * MIB, MIB).decode()
    assert tail == (
        f"\n[phalanx] output over the cap of {4 * MIB} bytes is dropped from here on\n"
        f"[phalanx] {total - 4 * MIB - LAST_BYTES} bytes of output were dropped in all; its last lines follow\n"
        + "A" * (LAST_BYTES - 1)
        + "\n"
    )
    os.close(quiet)


def test_what_a_loud_program_said_last_is_read_before_it_ends_and_kept_after(spool, tmp_path):
    spool.add("loud", str(tmp_path / "loud"))
    pipe = spool.open_pipe("loud")
    put(pipe, b"".join(b"step %d\n" % number for number in range(1_000_000)) + b"ValueError: the end\n")
    assert spool.drain("loud")
    assert spool.tail("loud", 40) == b"step 999998\nstep 999999\nValueError: the end\n"[-40:]
    os.close(pipe)
    until(lambda: spool.closed("loud"), "the end of the pipe")
    kept = spool.read("loud", 4 * MIB, MIB)
    assert kept.endswith(b"\nstep 999999\nValueError: the end\n")
    last = kept.partition(b"its last lines follow\n")[2]
    assert last.startswith(b"step ")
    assert LAST_BYTES - 20 < len(last) <= LAST_BYTES
    assert spool.tail("loud", 20) == b"ValueError: the end\n"


def test_the_newest_output_below_the_cap_begins_where_the_caller_says(spool, tmp_path):
    spool.add("rank-0", str(tmp_path / "rank-0"))
    spool.write("rank-0", b"an earlier run\n")
    begin = spool.length("rank-0")
    spool.write("rank-0", b"this run\n")
    assert spool.tail("rank-0", 1000, begin) == b"this run\n"
    assert spool.tail("rank-0", 4, begin) == b"run\n"


def test_acknowledged_bytes_are_freed_but_for_a_tail(spool, tmp_path):
    spool.add("rank-0", str(tmp_path / "rank-0"))
    spool.write("rank-0", os.urandom(2 * MIB))
    before = os.stat(tmp_path / "rank-0").st_blocks
    tail = spool.read("rank-0", 2 * MIB - 64 * 1024, MIB)
    spool.acknowledge("rank-0", 2 * MIB)
    spool.acknowledge("rank-0", MIB)  # late and out of order
    after = os.stat(tmp_path / "rank-0")
    assert spool.length("rank-0") == after.st_size == 2 * MIB
    assert after.st_blocks <= before
    if after.st_blocks < before:  # the file system can
        assert after.st_blocks * 512 <= 2 * 64 * 1024
    assert spool.read("rank-0", 2 * MIB - 64 * 1024, MIB) == tail


def test_a_full_disk_drops_with_a_count_and_stops_nobody(heard):
    spool = Spool(on_bytes=heard.put)
    spool.add("rank-0", "/dev/full")
    pipe = spool.open_pipe("rank-0")
    put(pipe, b"x" * 1000)
    assert spool.drain("rank-0")
    assert (spool.length("rank-0"), spool.dropped("rank-0")) == (0, 1000)
    os.close(pipe)
    spool.close()


_ON_A_SMALL_DISK = """
import os, sys
from phalanx.node.transfer.spool import Spool
MIB = 1 << 20
told = []
spool = Spool(on_bytes=lambda key: None, on_missing=lambda key, text: told.append(text), tail_bytes=64 << 10)
spool.add("rank-0", sys.argv[1] + "/rank-0")
def shout(data):
    pipe = spool.open_pipe("rank-0")
    while data:
        data = data[os.write(pipe, data):]
    assert spool.drain("rank-0")
    return pipe
os.close(shout((b"x" * 63 + b"\\n") * (40 * MIB // 64)))  # on 16 MiB
assert spool.drain("rank-0")
lost, end = spool.dropped("rank-0"), spool.length("rank-0")
assert 24 * MIB < lost < 30 * MIB, lost
assert os.statvfs(sys.argv[1]).f_bavail > 0  # room is left for whoever must take it over
last = f"\\n[phalanx] the node's disk is full: output is missing here\\n[phalanx] {lost} bytes of output were dropped in all\\n".encode()
assert spool.read("rank-0", end - len(last), MIB) == last
assert "dropped from here on" in told[0] and str(lost) in told[1], told
with open(sys.argv[1] + "/other", "wb", buffering=0) as other:  # now not a byte is left
    try:
        while True:
            other.write(b"y" * 4096)
    except OSError:
        pass
pipe = shout(b"lost\\n")
assert spool.dropped("rank-0") == lost + 5
assert spool.read("rank-0", end, MIB).endswith(b"output is missing here\\n")
spool.add("silent", sys.argv[1] + "/silent")  # the disk is full before its first byte, and at its end
spool.add("late", sys.argv[1] + "/late")  # and has room again before its last one
pipes = [spool.open_pipe("silent"), spool.open_pipe("late")]
for one in pipes:
    os.write(one, b"lost\\n")
os.close(pipes[0])
assert spool.drain("silent") and spool.drain("late")
here = b"\\n[phalanx] the node's disk is full: output is missing here\\n"
total = b"[phalanx] 5 bytes of output were dropped in all\\n"
assert spool.closed("silent") and spool.read("silent", 0, MIB) == here + total, spool.read("silent", 0, MIB)
assert spool.read("late", 0, MIB) == here
os.unlink(sys.argv[1] + "/other")
spool.acknowledge("rank-0", end)
os.write(pipes[1], b"end\\n")
assert spool.drain("late")
here += b"[phalanx] 5 bytes of output are missing here: the node's disk was full\\nend\\n"
assert spool.read("late", 0, MIB) == here, spool.read("late", 0, MIB)
os.close(pipes[1])
with open(sys.argv[1] + "/late", "rb") as file:
    assert file.read() == here
os.write(pipe, b"end\\n")
assert spool.drain("rank-0")
here = b"[phalanx] 5 bytes of output are missing here: the node's disk was full\\nend\\n"
assert spool.read("rank-0", end, MIB).endswith(here)
os.close(pipe)
spool.close()
print("well")
"""


def test_output_lost_on_a_full_disk_is_marked_and_counted(tmp_path):
    mount = f"mount -t tmpfs -o size=16m small {tmp_path}"
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system of its own can be mounted here")
    script = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    done = subprocess.run(
        [unshare, "-Urm", "sh", "-c", script, sys.executable, _ON_A_SMALL_DISK],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_removing_a_stream_ends_its_pipe(spool, tmp_path):
    spool.add("rank-0", str(tmp_path / "rank-0"))
    pipe = spool.open_pipe("rank-0")
    spool.remove("rank-0")
    with pytest.raises(BrokenPipeError):
        os.write(pipe, b"x")
    os.close(pipe)


def test_reports_come_whole_and_other_lines_are_skipped(spool, tmp_path):
    reports: list[RankReport] = []
    path = str(tmp_path / "reports")
    pipe = spool.open_reports(path, reports.append)
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, encode_report(ReportKind.STEP, rank=1, epoch=2, generation=3, step=7, loss=float("nan")))
    os.write(writer, b"not json\n[1]\n{}\n\xff\xfe\n" + b'{"k":"step","rank":true,"epoch":0,"generation":0}\n')
    os.write(writer, b"y" * (3 * REPORT_BYTES_MAX) + b"\n")
    os.close(writer)  # no end for the reader
    for rank in range(8):
        line = encode_report(ReportKind.PLANNED, rank=rank, epoch=2, generation=3, steps_total=rank)
        os.system(f"echo '{line.decode().strip()}' > {path}")
    assert pipe.drain()
    assert (reports[0].kind, reports[0].rank, reports[0].epoch, reports[0].generation) == (ReportKind.STEP, 1, 2, 3)
    assert reports[0].fields["step"] == 7
    assert json.loads(reports[0].line)["k"] == "step"
    assert [report.fields for report in reports[1:]] == [{"steps_total": rank} for rank in range(8)]
    pipe.close()
    assert not os.path.exists(path)


def test_a_report_callback_may_write_to_a_stream(spool, tmp_path):
    spool.add("steps-0", str(tmp_path / "steps-0"))
    path = str(tmp_path / "reports")
    pipe = spool.open_reports(path, lambda report: spool.write("steps-0", report.line + b"\n"))
    with open(path, "wb", buffering=0) as writer:
        writer.write(encode_report(ReportKind.STEP, rank=0, epoch=1, generation=0, step=1))
    assert pipe.drain()
    assert parse_report(spool.read("steps-0", 0, MIB)[:-1]) is not None


def test_streams_of_many_writers_stay_apart(spool, tmp_path):
    pipes = {}
    for rank in range(16):
        spool.add(f"rank-{rank}", str(tmp_path / f"rank-{rank}"))
        pipes[rank] = spool.open_pipe(f"rank-{rank}")
    threads = [
        threading.Thread(target=lambda rank=rank: [put(pipes[rank], f"{rank}\n".encode() * 1000) for _ in range(20)])
        for rank in pipes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, pipe in pipes.items():
        os.close(pipe)
        until(lambda: spool.closed(f"rank-{rank}"), "the end of the pipe")
        assert spool.read(f"rank-{rank}", 0, MIB) == f"{rank}\n".encode() * 20_000
