"""Several heads over one PostgreSQL: one is killed, stopped, cut off or told to go, and another leads. Everything is real."""

import contextlib
import glob
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.json import decode

from benchmarks.cluster import ROOT, wait_until
from benchmarks.cuttable_link import CuttableLink
from benchmarks.heads import HeadGroup, HeadProcess, heads
from phalanx.client import Client
from phalanx.client.connection.discovery import membership_urls
from phalanx.core.errors import PhalanxError
from phalanx.store.sql import backups
from phalanx.wire.join import JoinArguments
from tests import postgres_here

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here"),
]


class Stream:
    """Submits jobs one after the other, each with its key, whoever leads; keeps what was acknowledged."""

    def __init__(self, cluster: HeadGroup, diary: str) -> None:
        self._client = cluster.client()
        self._diary = diary
        self._ended = threading.Event()
        self.acknowledged: dict[str, str] = {}  # key -> job id
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.submit(f"key-{len(self.acknowledged)}")
            time.sleep(0.1)

    def submit(self, key: str) -> None:
        line = f"echo $PHALANX_JOB_ID >> {self._diary}"
        try:
            job = self._client.submit({"run": ["sh", "-c", line], "workdir": "/tmp", "gpus": 1, "name": key}, key=key)
            self.acknowledged[key] = job.id
        except PhalanxError as error:
            self.failed.append(f"{key}: {error}")

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


def sleeper(client: Client, seconds: int = 100) -> str:
    job = client.submit(
        {"run": ["sleep", str(seconds)], "workdir": "/tmp", "gpus": 1, "name": "sleep", "grace": "1s"}
    ).id
    wait_until(lambda: client.job(job).job.state == "running", "it runs")
    return job


def check_all_once(cluster: HeadGroup, stream: Stream, diary: str) -> None:
    """Every acknowledged job is there once, has ended well, and ran once."""
    assert not stream.failed
    with cluster.client() as client:
        for job_id in stream.acknowledged.values():
            assert client.wait(job_id, timeout_s=120).state == "succeeded"
        listed = Counter(job.name for job in client.jobs(limit=1000).jobs)
    assert [name for name, count in listed.items() if count > 1] == []
    assert set(stream.acknowledged) <= set(listed)
    with open(diary, encoding="utf-8") as file:
        ran = Counter(line.strip() for line in file)
    assert ran == Counter(stream.acknowledged.values())


def kill_leaders(cluster: HeadGroup, times: int) -> None:
    for _ in range(times):
        leader = cluster.wait_for_leader()
        leader.send(signal.SIGKILL)
        cluster.wait_for_leader(but=leader)
        leader.start()


def test_leader_killed_under_a_stream_of_submits_loses_none_and_doubles_none(tmp_path):
    diary = str(tmp_path / "ran")
    with heads(postgres_here.server().empty(), "1x2", "1x2") as cluster, cluster.client() as client:
        job = sleeper(client)
        stream = Stream(cluster, diary)
        wait_until(lambda: stream.acknowledged, "jobs come in")
        kill_leaders(cluster, 2)
        stream.end()
        check_all_once(cluster, stream, diary)
        kept = client.job(job).job
        assert (kept.state, kept.attempts, kept.restarts) == ("running", 1, 0)
        client.cancel(job)


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_leader_killed_ten_times_in_a_row_of_three_heads(tmp_path):
    diary = str(tmp_path / "ran")
    with heads(postgres_here.server().empty(), "1x2", "1x2", "1x2") as cluster:
        stream = Stream(cluster, diary)
        kill_leaders(cluster, 10)
        stream.end()
        check_all_once(cluster, stream, diary)
        with cluster.client() as client:
            assert client.heads().term == 11


def test_stopped_leader_that_wakes_acknowledges_nothing_and_stands_by(tmp_path):
    diary = str(tmp_path / "ran")
    with heads(postgres_here.server().empty(), "1x2", "1x1") as cluster:
        first = cluster.wait_for_leader()
        with cluster.client() as client:
            job = sleeper(client)
            first.send(signal.SIGSTOP)
            asked = submit_without_waiting(first, cluster.token(), diary)  # lies in its socket when it wakes
            second = cluster.wait_for_leader(but=first)
            first.send(signal.SIGCONT)
            wait_until(lambda: first.role() == "standby", "it stands by, by itself")
            assert b" 201 " not in answer_of(asked)
            assert second.role() == "leader"
            assert "this head no longer leads, and restarts" in first.log()
            kept = client.job(job).job
            assert (kept.state, kept.attempts) == ("running", 1)
            assert [one.name for one in client.jobs().jobs] == ["sleep"]
            client.cancel(job)
        assert not os.path.exists(diary)


def test_leader_cut_off_from_the_database_steps_down_and_comes_back_to_stand_by():
    server = postgres_here.server()
    dsn = server.empty()
    with CuttableLink(server.port) as cable:
        near = dsn.replace(f":{server.port}/", f":{cable.port}/")
        with heads(dsn, "1x1", "1x1", stores=(near,)) as cluster:
            first = cluster.wait_for_leader()
            with cluster.client() as client:
                job = sleeper(client)
                cable.cut.set()
                second = cluster.wait_for_leader(but=first)
                assert second is cluster.heads[1]
                cable.cut.clear()
                wait_until(lambda: first.role() == "standby", "it stands by again")
                wait_until(lambda: [one.role for one in client.heads().heads].count("standby") == 1, "it is seen")
                kept = client.job(job).job
                assert (kept.state, kept.attempts) == ("running", 1)
                client.cancel(job)


def test_planned_end_of_the_leader_hands_over_while_jobs_run():
    with heads(postgres_here.server().empty(), "1x1", "1x1") as cluster:
        first = cluster.wait_for_leader()
        with cluster.client() as client, Client(first.url, cluster.token()) as alone:
            job = sleeper(client)
            wait_until(lambda: len(client.heads().heads) == 2, "both are seen")
            reply = alone.stop()
            assert (reply.stopping, reply.relieved) == (True, True)
            cluster.wait_for_leader(but=first)
            assert first.process is not None
            assert first.process.wait(timeout=60) == 0
            kept = client.job(job).job
            assert (kept.state, kept.attempts, kept.restarts) == ("running", 1, 0)
            client.cancel(job)


def test_numbers_that_a_restore_took_back_carry_no_old_output_on_a_head_that_leads_later(tmp_path):
    dsn, file = postgres_here.server().empty(), str(tmp_path / "b.phx")
    with heads(dsn, "1x1", "1x1") as cluster:
        first, second = cluster.heads
        assert echoed(cluster, "kept") == "1"
        backups.backup(backups.DatabaseLocation(dsn=dsn), file, lambda *_: None)
        first.send(signal.SIGKILL)
        assert cluster.wait_for_leader() is second
        assert echoed(cluster, "secret of a lost job") == "2"
        wait_until(lambda: read_under(second.home, "2") == "secret of a lost job\n", "it is there")
        first.stop()
        second.stop()
        backups.restore(file, backups.DatabaseLocation(dsn=dsn), lambda *_: None, replace=True)
        first.start()
        assert cluster.wait_for_leader() is first
        assert [echoed(cluster, "new"), echoed(cluster, "newer")] == ["2", "3"]
        second.start()
        first.send(signal.SIGKILL)
        assert cluster.wait_for_leader() is second
        with cluster.client() as client:
            assert said(client, "2") == "", "its output is in the other head's folder"
        first.start()
        second.send(signal.SIGKILL)
        assert cluster.wait_for_leader() is first
        with cluster.client() as client:
            assert said(client, "2") == "new\n"
        assert read_under(second.home, "2") == "secret of a lost job\n", "nothing is removed"


def echoed(cluster: HeadGroup, text: str) -> str:
    with cluster.client() as client:
        job = client.submit({"run": ["echo", text], "workdir": "/tmp", "gpus": 1, "name": "echo"}).id
        assert client.wait(job, timeout_s=120).state == "succeeded"
    return job


def read_under(home: str, job: str) -> str:
    paths = sorted(pathlib.Path(home, "logs").glob(f"{job}-*/*/rank-*.log"))
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def test_server_that_joined_one_head_goes_over_to_the_next_with_its_job(tmp_path):
    """Over TLS, as from other machines: both heads have one CA, one secret, and each other's word."""
    files = ("--files", str(tmp_path / "files"))
    with heads(postgres_here.server().empty(), "1x1", "1x1", listen=("127.0.0.2", "127.0.0.3"), words=files) as cluster:
        first = cluster.wait_for_leader()
        with cluster.client() as client, joined(client, str(tmp_path / "joined")):
            wait_until(lambda: [node.state for node in client.nodes() if node.id == "far"] == ["up"], "it is up")
            words = ["sh", "-c", "echo before; sleep 12; echo after"]
            job = client.submit({"run": words, "workdir": "/tmp", "gpus": 2, "name": "far"}).id
            wait_until(lambda: "before" in said(client, job), "it speaks")
            wait_until(
                lambda: knows_both(str(tmp_path / "joined")) and knows_both(first.home), "all know the second head"
            )
            first.send(signal.SIGKILL)
            cluster.wait_for_leader(but=first)
            done = client.wait(job, timeout_s=120)
            assert (done.state, done.attempts, done.restarts) == ("succeeded", 1, 0)
            assert said(client, job) == "before\nafter\n" * 2  # of each of its two tasks, once


def knows_both(folder: str) -> bool:
    """Whether what lies in this folder, of a head or of a server that joined, names two heads: each hears of a new one with its next beat."""
    found = [path for name in ("head.json", "heads.json") for path in glob.glob(f"{folder}/**/{name}", recursive=True)]
    by_join = [
        path for path in found if path.endswith("/joined/heads.json")
    ]  # commands read it with what was learned since
    heads = [path for path in found if path not in by_join]
    return (
        bool(heads)
        and all(len(decode(pathlib.Path(path).read_bytes())["heads"]) == 2 for path in heads)
        and (not by_join or len(membership_urls(folder)) == 2)
    )


@contextlib.contextmanager
def joined(client: Client, home: str) -> Iterator[None]:
    """A server of two virtual devices, brought in by the line that the head prints."""
    line = decode(client.transport.json("GET", "/v1/join"), type=JoinArguments)
    command = [sys.executable, "-P", "-m", "phalanx.app.cli"]
    environment = {**os.environ, "PHALANX_HOME": home, "PYTHONPATH": os.path.join(ROOT, "src")}
    words = [
        "join",
        line.address,
        "--token",
        line.token,
        "--fingerprint",
        line.fingerprint,
        "--name",
        "far",
        "--virtual",
        "2",
    ]
    words += ["--address", "127.0.0.1"]
    came = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert came.returncode == 0, came.stderr
    try:
        yield
    finally:
        subprocess.run(
            [*command, "down", "--cancel-jobs"], env=environment, capture_output=True, timeout=120, check=False
        )


def said(client: Client, job: str) -> str:
    return "".join(chunk.text for chunk in client.logs(job).chunks)


def submit_without_waiting(head: HeadProcess, token: str, diary: str) -> socket.socket:
    body = b'{"run":["touch","%s"],"workdir":"/tmp","gpus":1,"name":"late"}' % diary.encode()
    words = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{head.port}\r\nAuthorization: Bearer {token}\r\n"
        f"Idempotency-Key: late\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", head.port), timeout=60)
    connection.sendall(words.encode() + body)
    return connection


def answer_of(connection: socket.socket) -> bytes:
    with connection:
        try:
            return connection.recv(1 << 16)
        except OSError:
            return b""
