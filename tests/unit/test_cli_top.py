"""`phalanx top`: a picture at once, and a log that q leaves."""

import signal
import subprocess
import sys

import msgspec
import pytest

from phalanx.cli.terminal import Terminal
from phalanx.cli.top import log_view
from phalanx.cli.top.command import first_picture
from phalanx.core.work.states import JobState
from phalanx.wire.api.fleet import FleetFrame
from tests.golden.cli.views import overview

SCREEN = Terminal(width=60, height=8, interactive=True, colour=False, blocks=True)
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
ENDS = [sys.executable, "-c", "print('line')"]


class Keys:
    """A keyboard on which one key after another is pressed."""

    def __init__(self, *typed):
        self._typed = list(typed)

    def read_key(self, _wait_s):
        return self._typed.pop(0)


def test_the_first_picture_fits_the_screen():
    frame = FleetFrame(now_s=0.0, nodes=["n"] * 1234, places=[], states=[], cells=[], jobs=[], counts={})  # type: ignore[list-item]
    seen = msgspec.structs.replace(overview(), counts={JobState.RUNNING: 500, JobState.PENDING: 5000})
    lines = first_picture(seen, frame, SCREEN)
    assert len(lines) <= SCREEN.height
    assert all(len(line) <= SCREEN.width for line in lines)
    assert lines[0].split("   ")[1:] == [
        "1234 nodes",
        "500 running, 5000 waiting",
    ]  # not those that the overview has room for
    assert lines[1].split()[:2] == ["JOB", "NAME"]


@pytest.mark.parametrize("key", ["q", "Q", "\x1b"])
def test_a_key_leaves_the_log_of_a_running_job(key):
    child = subprocess.Popen(SLEEPS)
    log_view._wait_for_key(Keys("", "x", "\n", key), child, [])  # type: ignore[arg-type]
    log_view._stop(child)
    assert child.returncode == -signal.SIGTERM


def test_at_the_end_of_the_log_enter_returns(capsys):
    child = subprocess.Popen(ENDS, stdout=subprocess.DEVNULL)
    child.wait()
    log_view._wait_for_key(Keys("", "x", "\n"), child, [])  # type: ignore[arg-type]
    assert capsys.readouterr().out == "end of the log; q or Enter returns to top\n"


def test_ctrl_c_returns_at_once():
    child = subprocess.Popen(SLEEPS)
    log_view._wait_for_key(Keys(), child, [signal.SIGINT])  # type: ignore[arg-type]
    log_view._stop(child)
