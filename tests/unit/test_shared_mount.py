"""The program of a mount and its supervisor: many open files, and an rclone that ends in the moment in which its mount is up."""

# mypy: disable-error-code="no-untyped-call"

import os
import resource
import subprocess
import sys
import threading

import pytest

from phalanx.node.data import mount_main
from phalanx.node.prepare import shared_mount
from phalanx.node.prepare.shared_mount import SharedMount

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
