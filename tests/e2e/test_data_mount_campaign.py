"""Object stores that nodes mount by rclone, against moto's S3 server: read, refused, ended, killed."""

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from benchmarks.cluster import cluster as bench_cluster
from benchmarks.cluster import command_words, wait_until
from phalanx.node.data import fuse_mounts
from phalanx.node.data.rclone_remote import find_rclone
from phalanx.node.files.job_accounts import first_closed_parent
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.prepare import data_mounts
from tests.e2e import owners_rig
from tests.object_rig import BUCKET, MOTO, faulty_store

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools"),
    pytest.mark.skipif(find_rclone(os.environ["PATH"]) is None, reason="rclone is not installed: make mount-tools"),
    pytest.mark.skipif(bool(fuse_mounts.why_not()), reason=fuse_mounts.why_not()),
]
BIG = bytes(range(251)) * 20_000  # 5 MB
SECRET = "the-key-of-the-bucket-7f3a"
UNPRIVILEGED = """
import os, sys
from phalanx.node.data import mount_main
# As "nobody": fusermount3 asks for the name of its user.
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.exit(mount_main.main())
"""
READ = """
import hashlib, os, sys
folder = os.environ["PHALANX_DATA_TRAIN"]
print("folder", folder)
print("names", sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/sub")))
print("big", hashlib.sha256(open(f"{folder}/sub/big.bin", "rb").read()).hexdigest())
for path, flags in ((f"{folder}/new", os.O_WRONLY | os.O_CREAT), (f"{folder}/a.txt", os.O_WRONLY)):
    try:
        os.open(path, flags)
        print("written")
    except OSError as error:
        print("refused", error.errno)
sys.stdout.flush()
"""
HOLD = (
    READ
    + "file = open(f'{folder}/sub/big.bin', 'rb'); file.read(9); print('holds', flush=True)\nimport time; time.sleep(600)"
)


@pytest.fixture(scope="module")
def store():
    with faulty_store() as made:
        made.variables["AWS_SECRET_ACCESS_KEY"] = SECRET
        host = made.variables["AWS_ENDPOINT_URL"].removeprefix("http://")
        for name, data in (("train/a.txt", b"hello"), ("train/sub/big.bin", BIG), ("train/odd[1],x.txt", b"odd")):
            link = http.client.HTTPConnection(host, timeout=20)
            path = f"/{BUCKET}/{quote(name)}"
            link.request("PUT", path, data, {"Content-Type": "application/octet-stream"})
            assert link.getresponse().status == 200
            link.close()
        yield made


@pytest.fixture
def head(store):
    store.forget()
    with bench_cluster("1x2") as made:
        yield made
        wait_until(lambda: not mounts(made), "nothing is mounted at the end")
        assert not rclones(made)
    store.forget()


def mounts(head):
    return fuse_mounts.mounts_below(str(head.home))


def rclones(head):
    """Pids of the programs that serve mounts of this cluster."""
    found = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    return [
        pid
        for pid in found
        if "mount2" in (words := command_words(pid)) and any(str(head.home) in one for one in words)
    ]


def mounter(head):
    """Pid of the program that mounts for the node's one job."""
    (pid,) = [pid for pid in head.node_pids("n0") if "phalanx.node.data.mount_main" in command_words(pid)]
    return pid


def submit(head, store, script, source=f"s3://{BUCKET}/train", **words):
    return head.submit(
        run=[sys.executable, "-c", script],
        gpus="1",
        data={"train": source, "mode": "mount"},
        env=store.variables,
        workdir="/tmp",
        **words,
    )


def output(head, job_id, stream="rank-0"):
    words = [sys.executable, "-P", "-m", "phalanx.app.cli", "logs", job_id, "--rank", stream.removeprefix("rank-")]
    done = subprocess.run(
        words,
        env={**os.environ, "PHALANX_HOME": str(head.home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def holding(head, store):
    """A job that has a file of its mount open."""
    job_id = submit(head, store, HOLD)
    wait_until(lambda: "holds" in output(head, job_id), "the rank holds a file")
    assert len(mounts(head)) == 1, output(head, job_id)
    return job_id


def test_a_rank_reads_a_mounted_bucket_and_cannot_write_to_it(head, store):
    job_id = submit(head, store, READ)
    head.wait_for_state(job_id, "succeeded")
    said = output(head, job_id)
    assert "names ['a.txt', 'odd[1],x.txt', 'sub'] ['big.bin']" in said
    assert f"big {hashlib.sha256(BIG).hexdigest()}" in said
    assert said.count("refused 30") == 2
    assert "written" not in said
    folder = next(line for line in said.splitlines() if line.startswith("folder ")).removeprefix("folder ")
    assert not os.path.exists(folder)
    assert "data train: mounted in " in output(head, job_id, "supervisor")
    assert "data train: mounted on each node, 0 bytes to copy" in head.job(job_id)["terms"]
    notes = head.call(
        "POST", "/v1/jobs/dry-run", {"run": ["true"], "data": {"train": "s3://b/x", "mode": "mount"}, "workdir": "/"}
    )
    assert "data train: mounted on each node, 0 bytes to copy" in notes["notes"]


def test_one_object_is_a_file_whatever_its_name(head, store):
    script = "import os; path = os.environ['PHALANX_DATA_TRAIN']; print('got', open(path).read(), os.listdir(os.path.dirname(path)))"
    job_id = submit(head, store, script, f"s3://{BUCKET}/train/odd[1],x.txt")
    head.wait_for_state(job_id, "succeeded")
    assert "got odd ['odd[1],x.txt']" in output(head, job_id)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("s3://no-such-bucket/train", "no-such-bucket/train: no such bucket or folder"),
        (f"s3://{BUCKET}/nothing", "nothing: no files there"),
    ],
)
def test_what_is_not_there_ends_the_job_before_it_starts(head, store, source, why):
    job_id = submit(head, store, "print('started')", source)
    head.wait_for_state(job_id, "failed")
    assert why in json.dumps(head.job(job_id)) + head.call("GET", f"/v1/jobs/{job_id}/why")["headline"]
    assert "started" not in output(head, job_id)


def test_a_cancelled_job_is_unmounted_although_it_holds_a_file(head, store):
    job_id = holding(head, store)
    waits = head.submit(run=["true"], gpus="2", data={"train": f"s3://{BUCKET}/train", "mode": "mount"}, workdir="/tmp")
    headline = head.call("GET", f"/v1/jobs/{waits}/why")["headline"]
    assert headline.endswith("data train: mounted on each node, 0 bytes to copy"), headline
    head.call("POST", f"/v1/jobs/{waits}/cancel", {})
    assert SECRET.encode() not in b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in rclones(head))
    assert BUCKET.encode() not in b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in rclones(head))
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})
    head.wait_for_state(job_id, "cancelled")
    wait_until(lambda: not mounts(head) and not rclones(head), "it is unmounted")


def test_a_killed_rank_is_unmounted(head, store):
    job_id = holding(head, store)
    (rank,) = [pid for pid in head.node_pids("n0") if HOLD in command_words(pid)]
    (first,) = mounts(head)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: first not in mounts(head), "it is unmounted")
    wait_until(lambda: len(mounts(head)) == len(rclones(head)) == 1, "the next attempt has a mount of its own")
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})
    head.wait_for_state(job_id, "cancelled")
    wait_until(lambda: not mounts(head) and not rclones(head), "it is unmounted")


def test_nothing_stays_mounted_after_a_killed_supervisor(head, store):
    holding(head, store)
    os.kill(head.node_pids("n0")[0], signal.SIGKILL)
    wait_until(lambda: not mounts(head) and not rclones(head), "the program that it started unmounts")


def mounted_job(head, store, **words):
    job_id = submit(head, store, HOLD, **words)
    wait_until(lambda: "holds" in output(head, job_id), "the rank holds a file")
    return job_id


def test_jobs_with_the_same_credentials_share_a_mount_which_goes_with_the_last(head, store):
    first, second = mounted_job(head, store), mounted_job(head, store)
    assert len(mounts(head)) == len(rclones(head)) == 1
    assert "data train: mounted in " in output(head, first, "supervisor")
    assert "data train: mounted already for another job, 0 bytes to copy" in output(head, second, "supervisor")
    head.call("POST", f"/v1/jobs/{first}/cancel", {})
    head.wait_for_state(first, "cancelled")
    third = submit(head, store, READ)
    head.wait_for_state(third, "succeeded")
    assert hashlib.sha256(BIG).hexdigest() in output(head, third)
    assert len(mounts(head)) == len(rclones(head)) == 1
    (pid,) = rclones(head)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "data train: rclone ended with code -9" in output(head, second, "supervisor"), "its log says so")
    fourth = submit(head, store, READ)
    head.wait_for_state(fourth, "succeeded")
    assert hashlib.sha256(BIG).hexdigest() in output(head, fourth), "a new one takes the place of the broken one"
    head.call("POST", f"/v1/jobs/{second}/cancel", {})
    head.wait_for_state(second, "cancelled")
    wait_until(lambda: not mounts(head) and not rclones(head), "it goes with the last")
    assert not [place for place, _, names in os.walk(f"{head.home}/nodes") if "vfs" in place and names], "and its cache"


def test_jobs_with_other_credentials_have_mounts_of_their_own(head, store):
    first = mounted_job(head, store)
    other = {**store.variables, "AWS_ACCESS_KEY_ID": "another"}
    second = head.submit(
        run=[sys.executable, "-c", HOLD],
        gpus="1",
        data={"train": f"s3://{BUCKET}/train", "mode": "mount"},
        env=other,
        workdir="/tmp",
    )
    wait_until(lambda: "holds" in output(head, second), "the rank holds a file")
    assert len(mounts(head)) == len(rclones(head)) == 2
    for job_id in (first, second):
        head.call("POST", f"/v1/jobs/{job_id}/cancel", {})
        head.wait_for_state(job_id, "cancelled")


def test_nothing_of_a_shared_mount_is_left_after_a_killed_supervisor(head, store):
    for _ in range(2):
        mounted_job(head, store)
    assert len(mounts(head)) == 1
    os.kill(head.node_pids("n0")[0], signal.SIGKILL)
    wait_until(lambda: not mounts(head) and not rclones(head), "the program that it started unmounts")
    wait_until(
        lambda: not [place for place, _, _ in os.walk(f"{head.home}/nodes") if place.endswith("/vfs")],
        "no cache is left",
    )


def test_the_next_supervisor_unmounts_what_a_killed_node_left(store):
    with bench_cluster("1x2", revive_s=1.0) as head:
        holding(head, store)
        os.kill(mounter(head), signal.SIGKILL)
        wait_until(lambda: not rclones(head), "rclone ends with it")
        head.kill_node("n0")
        assert mounts(head)  # nothing is left that could have unmounted
        wait_until(lambda: not mounts(head) and not rclones(head), "it is unmounted")


def test_a_killed_rclone_is_reported_and_a_killed_mounter_leaves_none(head, store):
    job_id = holding(head, store)
    (pid,) = rclones(head)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "rclone ended with code -9" in output(head, job_id, "supervisor"), "the log says so")
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})
    head.wait_for_state(job_id, "cancelled")
    wait_until(lambda: not mounts(head), "it is unmounted")
    job_id = holding(head, store)
    os.kill(mounter(head), signal.SIGKILL)
    wait_until(lambda: not rclones(head), "rclone ends with it")
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})
    head.wait_for_state(job_id, "cancelled")
    wait_until(lambda: not mounts(head), "the supervisor unmounts")


class StoreThat(BaseHTTPRequestHandler):
    """A store that refuses every request, or answers none."""

    silent = False

    def do_GET(self):
        if self.silent:
            time.sleep(60)
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")

    do_HEAD = do_GET  # noqa: N815  a name of http.server

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def program(tmp_path, endpoint, by="root", **account):
    """The program that mounts, with an order for one bucket."""
    found, rclone = find_rclone(os.environ["PATH"]), tmp_path / "rclone"
    assert found is not None
    if account:  # it cannot reach the binary of this Python
        shutil.copy(found, rclone)
    else:
        rclone.symlink_to(found)
    folder, cache = tmp_path / "mounts", tmp_path / "cache"
    for one in (folder, cache):
        one.mkdir()
    for one in (folder, cache) if by == "fusermount3" else (cache,):
        os.chown(one, account.get("user", 0), account.get("group", 0))
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "x",
    }
    order = {
        "rclone": str(rclone),
        "folder": str(folder),
        "source": f"s3://{BUCKET}/train",
        "variables": variables,
        "account": {} if by == "fusermount3" else account,
        "uid": account.get("user", 0),
        "gid": account.get("group", 0),
        "cache": str(cache),
        "cache_bytes": 1 << 20,
        "free_bytes": 1 << 20,
    }
    main = ("-c", UNPRIVILEGED) if by == "fusermount3" else ("-m", "phalanx.node.data.mount_main")
    words = [sys.executable, "-I", *main]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        yield process
        process.stdin.close()
        process.wait(20)
    assert not fuse_mounts.mounts_below(str(tmp_path))


@contextlib.contextmanager
def web_server(*, silent):
    handler = type("Handler", (StoreThat,), {"silent": silent})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_refusal_is_the_job_s_fault_and_says_so(tmp_path):
    with web_server(silent=False) as url, program(tmp_path, url) as process:
        answer = json.loads(process.stdout.readline())
        assert answer["charge"] is True
        assert answer["why"].startswith(f"data: s3://{BUCKET}/train: the job may not read it: ")
        assert SECRET not in answer["why"]


def test_a_store_that_cannot_be_reached_is_not_the_job_s_fault(tmp_path):
    with program(tmp_path, "http://127.0.0.1:1") as process:
        answer = json.loads(process.stdout.readline())
        assert answer["charge"] is False
        assert "connection refused" in answer["why"]


def test_a_stop_does_not_wait_for_a_silent_store(tmp_path):
    with web_server(silent=True) as url, program(tmp_path, url) as process:
        wait_until(lambda: rclone_of(tmp_path), "it asks the store")
        process.stdin.close()
        process.wait(20)
        assert not rclone_of(tmp_path)


def rclone_of(tmp_path):
    found = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    return [pid for pid in found if command_words(pid)[:1] == [str(tmp_path / "rclone")]]


def test_the_cache_stays_within_its_bound(store, tmp_path):
    with program(tmp_path, store.variables["AWS_ENDPOINT_URL"]) as process:
        path = json.loads(process.stdout.readline())["path"]
        assert hashlib.sha256(Path(f"{path}/sub/big.bin").read_bytes()).hexdigest() == hashlib.sha256(BIG).hexdigest()

        def cached_bytes():
            files = [Path(at) / name for at, _, names in os.walk(tmp_path / "cache" / "vfs") for name in names]
            return sum(one.stat().st_blocks * 512 for one in files)

        wait_until(lambda: cached_bytes() <= 1 << 20, "a file of 5 MB is dropped from a cache of 1 MB", every_s=0.5)


@pytest.mark.parametrize("by", ["root", "fusermount3"])
def test_an_account_reads_its_mount_and_another_does_not(store, by):
    if by == "fusermount3" and shutil.which(by) is None:
        pytest.skip("fusermount3 is not installed: make mount-tools")
    if by == "fusermount3" and os.stat(fuse_mounts.DEVICE).st_mode & 0o006 != 0o006:
        pytest.skip(f"this machine gives {fuse_mounts.DEVICE} to root alone")
    with tempfile.TemporaryDirectory() as made:  # pytest's own is closed to other accounts
        folder = Path(made)
        folder.chmod(0o711)
        with program(
            folder, store.variables["AWS_ENDPOINT_URL"], by, user=65534, group=65534, extra_groups=[]
        ) as process:
            answer = json.loads(process.stdout.readline())
            assert "path" in answer, answer
            path = answer["path"]
            assert [os.stat(f"/proc/{pid}").st_uid for pid in rclone_of(folder)] == [65534]
            for uid, said in ((65534, b"hello"), (61002, b"")):
                read = subprocess.run(
                    ["cat", f"{path}/a.txt"], user=uid, group=uid, extra_groups=[], capture_output=True, check=False
                )
                assert read.stdout == said
                assert (read.returncode == 0) == bool(said)


def test_jobs_of_one_account_share_a_mount_that_no_other_account_reads(store, monkeypatch):
    nobody, other = (
        NodeAccount(name=f"u{uid}", uid=uid, gid=uid, groups=(uid,), home="/", shell="/bin/sh")
        for uid in (65534, 61002)
    )
    with tempfile.TemporaryDirectory() as made:  # pytest's own is closed to other accounts
        folder = Path(made)
        folder.chmod(0o711)
        found = find_rclone(os.environ["PATH"])
        assert found is not None
        shutil.copy(found, folder / "rclone")
        monkeypatch.setattr(data_mounts, "find_rclone", lambda _path: str(folder / "rclone"))
        mounts = data_mounts.DataMounts(
            folder=str(folder / "own"), shared_folder=str(folder / "shared"), path=os.environ["PATH"]
        )

        def held(account):
            member: Any = SimpleNamespace(account=account, cancelled=threading.Event())
            sources = (("train", f"s3://{BUCKET}/train"),)
            return mounts.hold(
                member, sources, store.variables, lambda: os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
            )

        def reads(account, path):
            words = ["cat", f"{path}/a.txt"]
            return subprocess.run(
                words, user=account.uid, group=account.gid, extra_groups=[], capture_output=True, check=False
            ).stdout

        with held(nobody) as first, held(nobody) as second, held(other) as third:
            assert first == second != third
            assert [reads(nobody, first["train"]), reads(other, first["train"])] == [b"hello", b""]
            assert [reads(other, third["train"]), reads(nobody, third["train"])] == [b"hello", b""]
            assert sorted(os.stat(f"/proc/{pid}").st_uid for pid in rclone_of(folder)) == [61002, 65534]
        assert not fuse_mounts.mounts_below(made)
        assert not rclone_of(folder)
        assert os.listdir(folder / "shared") == ["caches"]
        assert os.listdir(folder / "shared/caches") == []


@pytest.mark.skipif(bool(owners_rig.unfit()), reason=owners_rig.unfit() or "root")
@pytest.mark.skipif(bool(first_closed_parent(sys.executable)), reason="other accounts cannot run this Python")
def test_a_mount_is_served_and_read_by_the_job_s_owner_alone(store):
    rig = owners_rig.Cluster()
    try:
        rig.up()
        file = rig.home("ada") / "job.yaml"
        job = {
            "run": [sys.executable, "-c", HOLD],
            "gpus": 1,
            "data": {"train": f"s3://{BUCKET}/train", "mode": "mount"},
        }
        file.write_text(json.dumps({**job, "env": store.variables}))
        os.chown(file, owners_rig.ACCOUNTS["ada"], owners_rig.ACCOUNTS["ada"])
        rig.phalanx("ada", "submit", str(file), cwd=rig.home("ada"))

        def said():
            return rig.phalanx("ada", "logs", "1", check=False).stdout

        wait_until(lambda: "holds" in said(), "the rank holds a file", every_s=0.5)
        assert hashlib.sha256(BIG).hexdigest() in said()
        folder = next(line for line in said().splitlines() if "folder " in line).rpartition("folder ")[2]
        servers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        servers = [
            pid
            for pid in servers
            if any(str(rig.jobs) in word for word in command_words(pid)) and "mount2" in command_words(pid)
        ]
        assert [os.stat(f"/proc/{pid}").st_uid for pid in servers] == [owners_rig.ACCOUNTS["ada"]]
        spied = rig.run("ben", f"cat {folder}/a.txt; ls {folder}", check=False)
        assert "hello" not in spied.stdout
        assert "Permission denied" in spied.stdout + spied.stderr
        rig.phalanx("ada", "cancel", "1")
        wait_until(lambda: not [pid for pid in servers if os.path.exists(f"/proc/{pid}")], "rclone ends", every_s=0.2)
        wait_until(lambda: not os.path.lexists(folder), "its folder is removed", every_s=0.2)
    finally:
        rig.down()
