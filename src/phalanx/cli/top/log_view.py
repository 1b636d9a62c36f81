"""Shows the log of a job in place of `top`'s screen, until a key returns."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

from phalanx.cli.keyboard import Keyboard
from phalanx.cli.terminal import strip_control

_LEAVE: Final = ("q", "Q", "\x1b")
_LEAVE_AT_END: Final = (*_LEAVE, "\r", "\n")
_POLL_S: Final = 0.2
_STOP_S: Final = 2.0


def show_log(job_id: str, name: str, *, follow: bool) -> None:
    """Print the log, and follow it if the job has not ended, until q, Esc or Ctrl-C. At its end Enter returns, too."""
    print(f"log of job {job_id} ({strip_control(name)}); q returns to top", flush=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "phalanx.app.cli",
        "logs",
        "--tail",
        "200",
        *(["-f"] if follow else []),
        job_id,
    ]
    interrupted: list[int] = []
    # A handler, not SIG_IGN: the child would inherit an ignored signal.
    before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    try:
        with Keyboard() as keys:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            try:
                _wait_for_key(keys, child, interrupted)
            finally:
                _stop(child)
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_key(keys: Keyboard, child: subprocess.Popen[bytes], interrupted: list[int]) -> None:
    ended = False
    while not interrupted:
        key = keys.read_key(_POLL_S)
        if key in (_LEAVE_AT_END if ended else _LEAVE):
            return
        if not ended and child.poll() is not None:
            ended = True
            print("end of the log; q or Enter returns to top", flush=True)


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
