"""Formats a measured topology as a table, and its slow links. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.planner.calibration.network_levels import MeasuredTopology, SlowLink

_SLOW_SHOWN: Final = 12  # lines; --json has all


def measure_lines(found: MeasuredTopology, screen: Terminal) -> list[str]:
    """Return the tree as a table, and the slow links below it."""
    columns = (
        Column(title="DOMAIN"),
        Column(title="NODES", right=True),
        Column(title="LINK", right=True),
        Column(title="HOSTS", min_width=12),
    )
    rows: list[list[Cell | str]] = [
        [
            "all" if found.levels else "no levels: all nodes are equally near",
            str(len(found.nodes)),
            format_gbit_per_s(found.bytes_per_s),
            "" if found.levels else fold_hostlist(list(found.nodes)),
        ]
    ]
    rows += _rows(found, 0, found.nodes)
    return [*table(columns, rows, screen), *slow_lines(found.slow)]


def slow_lines(slow: Sequence[SlowLink]) -> list[str]:
    """List slow links: `slow: n3 - n7: 1.1 Gbit/s, its level has 9.4`."""
    lines = [f"slow: {slow_link_text(one)}" for one in slow[:_SLOW_SHOWN]]
    more = len(slow) - _SLOW_SHOWN
    return [*lines, f"and {more} more; --json prints all"] if more > 0 else lines


def slow_link_text(one: SlowLink) -> str:
    """Describe one slow link."""
    link = f"{one.first} - {one.second}" if one.second else f"all links of {one.first}"
    return f"{link}: {format_gbit_per_s(one.bytes_per_s)}, its level has {format_gbit_per_s(one.level_bytes_per_s).removesuffix(' Gbit/s')}"


def format_gbit_per_s(bytes_per_s: float | None) -> str:
    """Format a rate: `9.4 Gbit/s`; empty if unknown."""
    if bytes_per_s is None:
        return ""
    value = bytes_per_s * 8 / 1e9
    return f"{value:.0f} Gbit/s" if value >= 100 else f"{value:.1f} Gbit/s" if value >= 1 else f"{value:.2f} Gbit/s"


def _rows(found: MeasuredTopology, depth: int, inside: Sequence[str]) -> list[list[Cell | str]]:
    """Return the rows of the domains within `inside`, each followed by its subdomains; then the nodes in no domain."""
    if depth == len(found.levels):
        return []
    level, seen = found.levels[depth], set[str]()
    rows: list[list[Cell | str]] = []
    last = depth + 1 == len(found.levels)
    for number, domain in enumerate(level.domains):
        if domain[0] in inside:
            seen |= set(domain)
            name = f"{'  ' * (depth + 1)}{level.name} m{number}"
            rows.append(
                [
                    name,
                    str(len(domain)),
                    format_gbit_per_s(level.bytes_per_s),
                    fold_hostlist(list(domain)) if last else "",
                ]
            )
            rows += _rows(found, depth + 1, domain)
    alone = [node for node in inside if node not in seen]
    if alone and (seen or depth == 0):
        rows.append([Cell(f"{'  ' * (depth + 1)}no {level.name}", "dim"), str(len(alone)), "", fold_hostlist(alone)])
    return rows
