"""The head and its state folder: what a second head, a lost token, another fleet or a lost database change. Real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import (
    BenchmarkCluster,
    cluster,
    free_port,
    wait_until,
)

pytestmark = [pytest.mark.serial, pytest.mark.e2e]


def read(head: BenchmarkCluster, name: str) -> dict:
    with open(os.path.join(head.home, name), encoding="utf-8") as file:
        record: dict = json.load(file)
        return record


def stop(head: BenchmarkCluster) -> None:
    assert head.head is not None
    head.head.send_signal(signal.SIGTERM)
    head.head.wait(timeout=30)
    head.head = None


def test_head_that_was_stopped_for_longer_than_a_lease_declares_nobody_dead():
    with cluster("2x1", lease_s=2.0) as head:
        job = head.submit(run=["sleep", "100"], gpus="2x1", name="sleep", grace="1s")
        wait_until(lambda: head.job(job)["attempt_state"] == "running", "it runs")
        assert head.head is not None
        for _ in range(2):
            head.head.send_signal(signal.SIGSTOP)
            time.sleep(4.0)
            head.head.send_signal(signal.SIGCONT)
            time.sleep(2.0)
        assert (head.job(job)["attempts"], head.job(job)["restarts"]) == (1, 0), head.history(job)


def test_refused_second_head_changes_nothing_of_the_first():
    with cluster("1x1") as head:
        before = read(head, "cluster.json")
        command = [
            sys.executable,
            "-m",
            "phalanx.app.head",
            "--home",
            head.home,
            "--port",
            str(free_port()),
            "--virtual",
            "5x5",
        ]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, env=head.environment)
        assert refused.returncode == 64
        assert refused.stderr.count("\n") == 1
        assert read(head, "cluster.json") == before
        with open(os.path.join(head.home, "head.lock"), encoding="utf-8") as file:
            assert json.load(file)["pid"] == read(head, "head.json")["pid"]


def test_lost_token_is_made_again_at_the_next_start():
    with cluster("1x1") as head:
        job = head.submit(run=["true"], name="first")
        head.wait_for_state(job, "succeeded")
        stop(head)
        os.unlink(os.path.join(head.home, "token"))
        head.start()
        assert head.job(job)["state"] == "succeeded"


def test_another_fleet_leaves_no_ghosts_of_the_one_before():
    with cluster("3x1") as head:
        stop(head)
        head.virtual = "1x2"
        head.start()
        assert [(node["id"], node["state"]) for node in head.nodes()] == [("n0", "up")]
        with pytest.raises(AssertionError, match="never_fits"):
            head.submit(run=["true"], gpus="3x1")


def test_output_of_jobs_before_a_lost_database_is_no_other_jobs():
    with cluster("1x1") as head:
        lost = head.submit(run=["echo", "first"], name="first")
        head.wait_for_state(lost, "succeeded")
        stop(head)
        for name in os.listdir(head.home):
            if name.startswith("phalanx.db"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(head.home, name))
        head.start()
        job = head.submit(run=["echo", "second"], name="second")
        assert job == lost
        head.wait_for_state(job, "succeeded")
        text = "".join(chunk["text"] for chunk in head.call("GET", f"/v1/jobs/{job}/logs")["chunks"])
        assert text == "second\n"
        assert len(os.listdir(os.path.join(head.home, "logs"))) == 2
        with open(os.path.join(head.home, "head.log"), encoding="utf-8") as log:
            assert "/logs contains files of jobs that the database does not know: 1-" in log.read()


def test_a_job_with_the_number_of_a_job_that_a_restore_lost_has_none_of_its_output(tmp_path):
    file = str(tmp_path / "b.phx")
    with cluster("1x1") as head:
        head.wait_for_state(head.submit(run=["echo", "kept"], name="kept"), "succeeded")
        stop(head)
        said = [sys.executable, "-m", "phalanx.app.cli"]
        environment = {**head.environment, "PHALANX_HOME": head.home}
        subprocess.run([*said, "backup", file], env=environment, check=True)
        head.start()
        lost = head.submit(run=["echo", "secret of a lost job"], name="lost")
        head.wait_for_state(lost, "succeeded")
        stop(head)
        restored = subprocess.run(
            [*said, "restore", file, "--replace"], env=environment, check=True, capture_output=True, text=True
        )
        assert f"{head.home}/logs contains files of jobs that the database does not know: {lost}-" in restored.stdout
        head.start()
        job = head.submit(run=["echo", "new"], name="new")
        assert job == lost
        head.wait_for_state(job, "succeeded")
        for one, text in (("1", "kept\n"), (job, "new\n")):
            assert "".join(chunk["text"] for chunk in head.call("GET", f"/v1/jobs/{one}/logs")["chunks"]) == text
