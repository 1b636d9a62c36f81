"""Ctrl-C while staying with a job (DESIGN 4): the first detaches and says how to come back, a second within 2 s cancels."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from phalanx.client import Client

SECOND_CTRL_C_S: Final = 2.0  # DESIGN 4
_INTERRUPTED: Final = 130  # 128 + SIGINT: the job's outcome is unknown here, so it is never 0


def leave(head: Client, job_id: str) -> int:
    """What follows the first Ctrl-C; our exit code."""
    try:
        print(f"\ndetached, job {job_id} goes on; next: phalanx attach {job_id}", file=sys.stderr)
        print(f"(Ctrl-C again within {SECOND_CTRL_C_S:.0f} s cancels it)", file=sys.stderr, flush=True)
        time.sleep(SECOND_CTRL_C_S)
    except KeyboardInterrupt:
        head.cancel(job_id, "Ctrl-C")
        print(f"cancelled job {job_id}", file=sys.stderr, flush=True)
    return _INTERRUPTED
