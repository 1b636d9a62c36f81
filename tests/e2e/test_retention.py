"""Old files are removed from a real head while jobs write: nothing of theirs is missing, and what was removed says so."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.states import JobState
from phalanx.ports.store import Batch, JobFilter
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(900)]

OLD_JOBS, WRITERS, RUNS = 40, 3, 6
# Writes lines and files until the file `stop` appears, and then how many they were.
WRITER = """
import os, time
out, number = os.environ["PHALANX_OUTPUT_DIR"], 0
while not os.path.exists("stop"):
    for number in range(number + 1, number + 101):
        print("line", number, flush=True)
    with open(os.path.join(out, f"part-{number}"), "w") as file:
        file.write(str(number))
    time.sleep(0.2)
with open(os.path.join(out, "count"), "w") as file:
    file.write(str(number))
"""
DAY_S = 86_400.0


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    (shell.work / "writer.py").write_text(WRITER)
    yield shell
    shell("down", "--cancel-jobs")


def age(shell, days):
    """Move the end of all jobs that have ended into the past; the head is down."""
    store = SqliteStore(str(shell.home / "phalanx.db"))
    store.load()
    ended = store.jobs(JobFilter(states=frozenset({JobState.SUCCEEDED}), limit=1000))
    store.commit(Batch(records=[replace(job, ended_s=job.ended_s - days * DAY_S) for job in ended]))
    store.close()
    return len(ended)


def test_retention_runs_while_jobs_write(shell):
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    shell(
        "submit",
        "--wait",
        "--array",
        f"0-{OLD_JOBS - 1}",
        "--",
        "sh",
        "-c",
        "echo old; echo file >$PHALANX_OUTPUT_DIR/result",
    )
    shell("down", "--keep-jobs")
    assert age(shell, 40) >= OLD_JOBS
    shell("up")
    writers = [
        shell("submit", "--name", f"writer-{number}", "--", sys.executable, "writer.py").stdout.split()[1]
        for number in range(WRITERS)
    ]
    for writer in writers:
        shell.until(writer, "running")
    preview = shell("clean", "--older-than", "30d")
    assert "would free" in preview.stdout
    assert preview.stdout.splitlines()[-1] == "next: phalanx clean --older-than 30d --yes"
    first = shell.json("clean", "--older-than", "30d", "--yes")
    assert {kind: found["count"] for kind, found in first["removed"].items()} == {"logs": OLD_JOBS, "outputs": OLD_JOBS}
    for _ in range(RUNS):
        assert shell.json("clean", "--older-than", "1h", "--yes")["removed"] == {}
        time.sleep(0.5)
    (shell.work / "stop").touch()
    for writer in writers:
        shell.until(writer, "succeeded", within_s=600)
        shell("get", writer, f"of-{writer}")
        files = {path.name: path.read_text() for path in Path(shell.work, f"of-{writer}").rglob("*") if path.is_file()}
        count = int(files.pop("count"))
        assert files == {f"part-{number}": str(number) for number in range(100, count + 1, 100)}
        assert shell("logs", writer).stdout.splitlines() == [f"line {number}" for number in range(1, count + 1)]
    old = shell("logs", "1_0")
    assert "were removed on" in old.stderr
    assert shell.json("archives")["months"] == []
    assert "were removed" in shell("get", "1_0", code=64).stderr
    assert "the job ended more than 30d00h ago" in shell("show", "1_0").stdout


def test_old_records_go_into_archives_while_the_head_serves(shell):
    """The newest 1,000 ended jobs stay in memory, so there are more."""
    shell("up", "--virtual", "1x2", "--port", str(free_port()))
    shell("submit", "--wait", "--array", "0-2", "--", "sh", "-c", "echo old; echo file >$PHALANX_OUTPUT_DIR/result")
    shell("submit", "--wait", "--name", "single", "--", "echo", "single")
    shell("down", "--keep-jobs")
    assert age(shell, 90) == 4
    add_jobs(shell, 1000)
    shell("up")
    assert "to remove" in shell("clean", "--older-than", "30d", "--only", "records").stdout  # they have files
    assert shell.json("clean", "--older-than", "30d", "--yes")["removed"]["logs"]["count"] == 4
    page = shell("show", "4").stdout
    done = shell.json("clean", "--older-than", "30d", "--only", "records", "--yes")
    assert done["removed"]["records"]["count"] == 4
    [month] = shell.json("archives")["months"]
    assert month["jobs"] == 4
    assert [one["id"] for one in shell.json("archives", "jobs", month["month"])] == ["1_0", "1_1", "1_2", "4"]
    shell("down", "--keep-jobs")
    shell("up")
    archived = shell("show", "4").stdout
    assert f"archived with the jobs of {month['month']}" in archived
    assert page.splitlines()[0] == archived.splitlines()[0]
    assert "array" in shell("show", "1", code=64).stderr
    assert shell("submit", "--wait", "--", "true").stdout.split()[1] == "1005"


def add_jobs(shell, count):
    """Add jobs that ended after the newest one; the head is down."""
    store = SqliteStore(str(shell.home / "phalanx.db"))
    store.load()
    [newest] = store.jobs(JobFilter(limit=1))
    now_s = time.time()
    more = [
        replace(newest, id=JobId(str(seq)), seq=seq, folder=f"{seq}-k", epoch=Epoch(0), submit_s=now_s, ended_s=now_s)
        for seq in range(newest.seq + 1, newest.seq + 1 + count)
    ]
    store.commit(Batch(records=more))
    store.close()
