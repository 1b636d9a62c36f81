"""Sends spans of jobs to a collector of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.core.accounting.job_trace import JobSpan


class JobSpanExporter(Protocol):
    """Sends spans; used by one thread, and blocks on the network for a bounded time."""

    def export(self, spans: Sequence[JobSpan]) -> None:
        """Send spans. Repeating it sends the same spans with the same ids.

        Raises:
            TryLater: the collector did not accept them; the message says why, without secrets.
        """
        ...
