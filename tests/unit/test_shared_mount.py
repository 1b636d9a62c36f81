"""The program of a mount and its supervisor: many open files, and an rclone that ends in the moment in which its mount is up."""

# mypy: disable-error-code="no-untyped-call, arg-type"

import os
import resource
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from phalanx.node.data import mount_main
from phalanx.node.data.rclone_remote import why_no_mounts
from phalanx.node.prepare import shared_mount
from phalanx.node.prepare.data_mounts import DataMounts
from phalanx.node.prepare.shared_mount import SharedMount
from tests.e2e.process_rig import until

ANSWERS = 'import sys; sys.stdin.readline(); print(\'{"path": "/x", "seconds": 0.5}\', flush=True); sys.stdin.read()'
DESCRIPTORS = 1100  # more than select(2) can name


@pytest.fixture
def many_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], DESCRIPTORS + 500), before[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(DESCRIPTORS)]
    yield
    for one in held:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_node_with_more_than_a_thousand_open_files_mounts(many_open_files, monkeypatch, tmp_path):
    """Found by review: a supervisor with 500 ranks has as many, and its `select` refused the descriptor."""
    monkeypatch.setattr(shared_mount, "_MAIN", (sys.executable, "-S", "-c", ANSWERS))
    mount = SharedMount(str(tmp_path / "mount"), str(tmp_path / "cache"))
    assert mount.start({}, threading.Event()) == 0.5
    assert mount.path == "/x"
    mount.end()


def test_many_jobs_that_join_at_once_share_a_refresh_and_none_waits_for_one_that_ended(monkeypatch, tmp_path):
    asked = tmp_path / "asked"
    counts = ANSWERS.replace(
        "sys.stdin.read()",
        f"f = open({str(asked)!r}, 'w')\n"
        "for line in sys.stdin:\n f.write('x'); f.flush(); print('{\"refreshed\": true}', flush=True)",
    )
    monkeypatch.setattr(shared_mount, "_MAIN", (sys.executable, "-S", "-c", counts))
    mount = SharedMount(str(tmp_path / "mount"), str(tmp_path / "cache"))
    mount.start({}, threading.Event())
    jobs = [threading.Thread(target=mount.refresh) for _ in range(20)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert 1 <= len(asked.read_text()) <= 20
    mount.end()
    until(lambda: mount.broken, "the end of its program")
    mount.refresh()


@pytest.mark.parametrize("early", [True, False])
def test_the_end_of_rclone_is_told_once_also_if_it_came_before_the_mount_was_reported(early, monkeypatch):
    answers: list[dict[str, object]] = []
    told = threading.Event()

    def answer(words):
        answers.append(words)
        told.set()

    monkeypatch.setattr(mount_main, "_say", lambda _: None)
    monkeypatch.setattr(mount_main, "_answer", answer)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); print('bad', file=sys.stderr); sys.exit(3)"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        log = mount_main._Log(process)
        if not early:
            log.pass_on()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        for thread in threading.enumerate():
            if getattr(thread, "_target", None) == log._read:
                thread.join()
        if early:
            assert answers == []
            log.pass_on()
        assert told.wait(20)
    assert answers == [{"ended": 3}]


@pytest.mark.skipif(bool(why_no_mounts(os.environ["PATH"])), reason="this machine cannot mount: make mount-tools")
def test_a_job_that_joins_a_mount_sees_what_the_store_has_now(tmp_path):
    """Found by review: it saw what the first job had listed, for up to the five minutes of rclone's cache of folders."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "a.txt").write_text("one")

    class Web(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    mounts = DataMounts(folder=str(tmp_path / "mounts"), shared_folder="", path=os.environ["PATH"])
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Web, directory=str(store))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        sources = (("train", f"http://127.0.0.1:{web.server_port}"),)

        def job():
            who = SimpleNamespace(account=None, cancelled=threading.Event())
            return mounts.hold(who, sources, {}, lambda: os.open(os.devnull, os.O_WRONLY))

        with job() as first:
            assert os.listdir(first["train"]) == ["a.txt"]
            (store / "b.txt").write_text("two")
            with job() as second, job() as third:
                assert second == third == first
                assert sorted(os.listdir(second["train"])) == ["a.txt", "b.txt"]
        web.shutdown()
