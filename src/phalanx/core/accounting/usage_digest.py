"""The monthly message: what the GPUs were used for, and who wasted most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from phalanx.core.accounting.usage_report import UsageKey, UsageSum, sum_usage
from phalanx.core.work.channel import Message
from phalanx.core.work.usage.usage_hour import UsageHour

_US_PER_HOUR: Final = 3_600_000_000  # GPU-microseconds
_WASTED: Final = ("idle", "unoccupied", "hung", "lost")
_PROJECTS: Final = 5
_STATES: Final = 6


def digest_message(hours: Sequence[UsageHour], month: str, project: str = "") -> Message:
    """The message about the hours of a month, such as 2026-11; with a project only about its GPU-hours."""
    if project:
        hours = [replace(hour, rows=tuple(row for row in hour.rows if row.project == project)) for hour in hours]
    found = sum_usage(hours, UsageKey.PROJECT, rows_max=1000)
    total = found.total
    lines = [f"{_hours(total.total)} GPU-hours of {f'project {project}' if project else 'the fleet'}:"]
    states = sorted(total.by_state.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"  {_share(amount, total.total)} {state} ({_hours(amount)} h)" for state, amount in states[:_STATES]]
    projects = [row for row in found.rows if row.key]
    if projects:
        lines += ["", "Projects with the most GPU-hours:"]
        lines += [
            f"  {row.key}: {_hours(row.total)} h, {_share(_wasted(row), row.total)} wasted"
            for row in projects[:_PROJECTS]
        ]
    wasters = sorted((row for row in projects if _wasted(row)), key=lambda row: (-_wasted(row), row.key))
    if wasters:
        lines += ["", "Projects that wasted most (idle, unoccupied, hung or lost):"]
        lines += [f"  {row.key}: {_hours(_wasted(row))} h" for row in wasters[:_PROJECTS]]
    return Message(title=f"Phalanx: use of GPUs in {month}", body="\n".join(lines))  # fmt: skip


def _wasted(row: UsageSum) -> int:
    return sum(row.by_state.get(state, 0) for state in _WASTED)


def _hours(amount: int) -> str:
    return f"{amount / _US_PER_HOUR:,.1f}"


def _share(amount: int, total: int) -> str:
    return f"{amount / total:.0%}" if total else "0%"
