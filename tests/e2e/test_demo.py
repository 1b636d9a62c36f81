"""`phalanx demo` as a visitor runs it: a real head, real supervisors, real training, a real SIGKILL."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

import pytest

from phalanx.node.processes.proctable import process_environment, read_table
from tests import canaries

pytest.importorskip("torch")
pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(400)]

COMMAND = [sys.executable, "-m", "phalanx.app.cli", "demo"]
HANG_S = 300  # a guard, not a measurement
STEPS = 120


def surroundings(folder) -> dict[str, str]:
    """An environment whose temporary files, the demo's cluster among them, lie in `folder`."""
    kept = canaries.environment()
    return {**kept, "TMPDIR": str(folder), "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}


def left_behind(folder) -> list[int]:
    mark = str(folder).encode()
    return [
        row.pid
        for row in read_table().values()
        if row.pid != os.getpid()
        and not row.dead
        and any(mark in value for value in process_environment(row.pid).values())
    ]


@contextmanager
def started(folder, *words) -> Any:
    process: Any = subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        env=surroundings(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until_line(process, pattern):
    """Lines up to the first that matches."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(f"no line like {pattern!r} in:\n" + "".join(lines))


def test_a_job_outlives_its_node_and_nothing_is_left(tmp_path):
    with started(tmp_path, "--plain", "--steps", str(STEPS), "--json", "out.json", "--html", "out.html") as process:
        printed, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, printed
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["causes"] == ["node_fail", "succeeded"], printed
    assert record["steps_kept"] == STEPS
    assert record["overlapping_steps"] == 0
    assert record["resumed_from_step"] > 0
    assert record["killed_at_step"] >= record["resumed_from_step"]
    assert record["steps_redone"] == record["killed_at_step"] - record["resumed_from_step"]
    assert record["loss_last"] < record["loss_first"]
    assert record["largest_loss_difference"] < 1e-3
    assert 0 < record["goodput"] < 1
    spent = record["gpu_seconds"]
    parts = ("productive", "lost", "saving", "restarting", "idle")
    assert sum(round(spent[part] * 1e6) for part in parts) == round(spent["total"] * 1e6)
    held = [(attempt["ended_s"] - attempt["placed_s"]) * attempt["gpus"] for attempt in record["attempts"]]
    assert spent["total"] == pytest.approx(sum(held), abs=1e-3)
    assert record["sample"]
    assert "Usage summary of job 1" in printed
    assert "<svg" in (tmp_path / "out.html").read_text()
    assert left_behind(tmp_path) == []
    assert list(tmp_path.glob("phalanx-demo-*")) == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.prove),
        pytest.param(signal.SIGHUP, marks=pytest.mark.prove),
    ],
)
def test_an_interrupted_demo_takes_everything_down(tmp_path, number):
    with started(tmp_path, "--plain") as process:
        until_line(process, r"step \d+/200")
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=HANG_S) == 130
    assert left_behind(tmp_path) == []
    assert list(tmp_path.glob("phalanx-demo-*")) == []


@pytest.mark.prove
def test_the_visitor_kills_a_node_by_its_number(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(
            COMMAND[0], [*COMMAND, "--no-kill", "--steps", str(STEPS), "--json", "out.json"], surroundings(tmp_path)
        )
    screen = Screen(terminal)
    try:
        screen.until(r"checkpoint \d+")
        os.write(terminal, b"k")
        screen.until("kill which node")
        os.write(terminal, b"0")
        screen.until("The job finished after|demo failed")
        screen.to_the_end()
    finally:
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, screen.text[-3000:]
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["causes"] == ["node_fail", "succeeded"]
    assert [(kill["node"], kill["by"]) for kill in record["kills"]] == [("n0", "visitor")]
    assert left_behind(tmp_path) == []


class Screen:
    """What a terminal was sent, without colours."""

    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def until(self, pattern):
        begun = len(self.text)
        until_s = time.monotonic() + HANG_S
        while not re.search(pattern, self.text[begun:]):
            assert time.monotonic() < until_s, self.text[-3000:]
            assert self.read(), f"it ended without {pattern!r}: {self.text[-3000:]}"

    def to_the_end(self):
        while self.read():
            pass

    def read(self) -> bool:
        ready, _, _ = select.select([self.terminal], [], [], HANG_S)
        try:
            sent = os.read(self.terminal, 65536) if ready else b""
        except OSError:
            return False  # the other side closed
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent.decode(errors="replace"))
        return bool(sent)
