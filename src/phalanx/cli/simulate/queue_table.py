"""`phalanx simulate --per-queue`: a table of the queues of one replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.cli.simulate.chart_data import format_short
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.simulator.queue_report import QueueReport

QUEUES_SHOWN: Final = 30  # those with the most work; --json has all
_TITLES: Final = ("jobs", "GPU-hours", "share", "of waits", "mean wait", "of >= 8 GPUs", "longest", "stops a job")


def queue_table(policy: str, queues: Sequence[QueueReport], screen: Terminal) -> str:
    """Return the table of a policy, under its name."""
    columns = [Column(title=policy, min_width=12), *(Column(title=title, right=True) for title in _TITLES)]
    rows: list[list[Cell | str]] = [
        [
            one.queue or "(none)",
            f"{one.jobs:,}",
            f"{one.gpu_h:,.0f}",
            f"{one.gpu_share:.1%}",
            f"{one.wait_share:.1%}",
            format_short(one.avg_wait_s),
            format_short(one.avg_wait_large_s),
            format_short(one.max_wait_s),
            f"{one.stops_per_job:.2f}",
        ]
        for one in queues[:QUEUES_SHOWN]
    ]
    lines = table(columns, rows, screen, titles=True)
    if len(queues) > QUEUES_SHOWN:
        lines = [*lines, f"and {len(queues) - QUEUES_SHOWN} more queues; --json lists all"]
    return "\n".join(lines)
