"""Lets the supervisor ask this rank where it stands: a signal on which Python writes the stacks of all its threads into a file.

Done by `faulthandler` in the signal handler itself, so that it works in a call that never comes back. The file's being there tells the
supervisor that the signal is safe to send.
"""

from __future__ import annotations

import faulthandler
import os
from typing import IO, Any

from phalanx.wire.rank import STACK_SIGNAL, stack_file

_file: IO[Any] | None = (
    None  # faulthandler keeps the descriptor alone: closing the file would hand its number to another
)


def answer_with_stacks(folder: str | None, rank: int) -> None:
    """Begin to. Nothing without a folder, or where the file cannot be made: training goes before its own diagnosis."""
    global _file
    if folder is None or _file is not None:
        return
    try:
        _file = open(stack_file(folder, rank, os.getpid()), "a", encoding="utf-8")  # noqa: SIM115  # held for the life of the process
        faulthandler.register(STACK_SIGNAL, file=_file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        if _file is not None:
            os.unlink(_file.name)  # its being there would say that the signal is safe
            _file.close()
            _file = None
