"""Dump the stacks of this rank on request of the supervisor: on a signal, Python writes the stacks of all threads to a file.

`faulthandler` does so in the signal handler itself, so that it works in a call that never returns. The existence of the file tells the
supervisor that it may send the signal.
"""

from __future__ import annotations

import faulthandler
import os
from typing import IO, Any

from phalanx.wire.rank import STACK_SIGNAL, stack_file

# Stays open: faulthandler stores only the descriptor, whose number another file would get after a close.
_file: IO[Any] | None = None


def install_stack_dump(folder: str | None, rank: int) -> None:
    """Install the handler. Without a folder, or if the file cannot be created, do nothing: training has priority over diagnosis."""
    global _file
    if folder is None or _file is not None:
        return
    try:
        _file = open(stack_file(folder, rank, os.getpid()), "a", encoding="utf-8")  # noqa: SIM115  # open until the process ends
        faulthandler.register(STACK_SIGNAL, file=_file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        if _file is not None:
            os.unlink(_file.name)  # its existence would mean that the signal is safe
            _file.close()
            _file = None
