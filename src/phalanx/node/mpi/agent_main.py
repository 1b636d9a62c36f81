"""The launch agent: `phalanx-launch [SSH OPTIONS] HOST COMMAND...`, which mpirun calls in place of ssh.

Asks the launcher's node (`launch_main.py`) to run the command on a node of the job, prints its output and exits with its exit code. As with
ssh, the words are joined and a shell there reads them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from phalanx.node.gang.job_link import JobLink, LinkClosed, NotInJob, open_link
from phalanx.node.logic.variables.mpi_variables import changed_variables
from phalanx.node.logic.variables.secret_variables import without_secrets
from phalanx.node.mpi.launch_order import LAUNCH_STEP, launch_folder, read_launch_order, read_start_environment

_DIAL_S: Final = 10.0
_SSH_FAILED: Final = 255  # as ssh's own errors
# Source: ssh(1), options with a value.
_WITH_VALUE: Final = frozenset("BbcDEeFIiJLlmOopQRSWw")


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code, or 255 if it could not be started."""
    host, command = split_words(words)
    if not host or not command:
        _complain("usage: phalanx-launch HOST COMMAND...")
        return _SSH_FAILED
    try:
        order = read_launch_order()
        link = open_link(order.master, order.port, order.key, {"agent": order.node_rank}, within_s=_DIAL_S)
        # Only what the job exported: the other node has devices, paths and an agent of its own.
        exported = changed_variables(read_start_environment(), without_secrets(os.environ))
        folder = launch_folder()
        link.send({"host": host, "command": command, "folder": folder, "env": exported, "cwd": os.getcwd()})
        return _follow(link)
    except (NotInJob, LinkClosed) as error:
        _complain(f"cannot start on {host}: {error}")
        return _SSH_FAILED


def split_words(words: Sequence[str]) -> tuple[str, str]:
    """Return host and command of an ssh command line; its options are dropped."""
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        if len(word) == 2 and word[1] in _WITH_VALUE and left:
            left.pop(0)
    return (left[0], " ".join(left[1:])) if left else ("", "")


def _follow(link: JobLink) -> int:
    """Copy the output until the command ends.

    Raises:
        LinkClosed: the launcher's node is gone.
    """
    # The daemon is left alone by SIGTERM as the launcher is (`launch_main.py`), so this process stays with it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: _forward(link, got))
    while True:
        message = link.receive()
        if "error" in message:
            _complain(str(message["error"]))
            return _SSH_FAILED
        if "exit" in message:
            return int(message["exit"])
        out = sys.stdout.buffer if message["out"] == 1 else sys.stderr.buffer
        out.write(base64.b64decode(message["data"]))
        out.flush()


def _forward(link: JobLink, number: int) -> None:
    with contextlib.suppress(LinkClosed):
        link.send({"signal": number})


def _complain(text: str) -> None:
    sys.stderr.write(f"{LAUNCH_STEP}: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
