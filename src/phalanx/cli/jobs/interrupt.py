"""Ctrl-C while following a job (DESIGN 4): the first detaches, a second one within 2 s cancels the job."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from phalanx.client import Client

SECOND_CTRL_C_S: Final = 2.0  # DESIGN 4
_INTERRUPTED: Final = 130  # 128 + SIGINT; not 0, because the outcome of the job is unknown


def detach_or_cancel(head: Client, job_id: str) -> int:
    """Handle the first Ctrl-C; return the exit code of this command."""
    try:
        print(f"\ndetached, job {job_id} continues; next: phalanx attach {job_id}", file=sys.stderr)
        print(f"(Ctrl-C again within {SECOND_CTRL_C_S:.0f} s cancels it)", file=sys.stderr, flush=True)
        time.sleep(SECOND_CTRL_C_S)
    except KeyboardInterrupt:
        head.cancel(job_id, "Ctrl-C")
        print(f"cancelled job {job_id}", file=sys.stderr, flush=True)
    return _INTERRUPTED
