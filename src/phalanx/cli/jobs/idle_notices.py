"""Prints what the idle limit of a job does beside its output: the warning, its withdrawal, and that the job is parked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.core.errors import PhalanxError

_WARNING: Final = "idle_warning"
_KINDS: Final = (_WARNING, "idle_ended")


def print_idle_notices(job_id: str, say: Callable[[str], None]) -> None:
    """Call `say` with each notice, on a thread of its own, until the job or this program ends. First with a warning that still holds."""
    threading.Thread(target=_follow, args=(job_id, say), name="idle-notices", daemon=True).start()


def _follow(job_id: str, say: Callable[[str], None]) -> None:
    stands: Mapping[str, Any] | None = None
    past = True  # the lines from before come before the first state
    try:
        for event in connect(FOLLOW_PATIENCE_S, quiet=True).follow_events(job_id):
            line = event.fields
            if event.kind == "story" and past:
                if line["kind"] in _KINDS or line["kind"] in ("stopping", "running"):
                    stands = line if line["kind"] == _WARNING else None
            elif event.kind == "story" and line["kind"] in _KINDS:
                say(f"idle: {line['text']}")
            elif event.kind == "state" and past:
                past = False
                if stands is not None:
                    say(f"idle: {stands['text']}")
    except PhalanxError:
        return  # the job's own output says that the head is gone
