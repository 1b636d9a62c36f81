"""The judge of a campaign: it reads only the clouds' lists of all machines that ever were, and the history in the head's database.

- leaked: machines that still run, and what clouds still charge beside machines, such as disks.
- doubled: orders for which a cloud ever had more than one machine.
- billed_minus_ledger_s: the largest difference of one machine between the time that the cloud charges and the history's.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_history(database: Path) -> list[dict[str, Any]]:
    """Return the lines about machines in the history of a head's database."""
    wanted = ("machine_ended", "machine_stray")
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT doc FROM history ORDER BY seq")
        return [line for row in rows if (line := json.loads(row[0]))["kind"] in wanted]


def judge(
    machines: Sequence[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]], leftovers: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare the list of a cloud with the ledger.

    Args:
        machines: each with `machine`, `token`, `since_s` and `until_s`, which is None while it runs.
        lines: of the history.
        leftovers: what the cloud charges beside machines.
    """
    lines = list(lines)
    ledger = {line["facts"]["machine"]: line["facts"] for line in lines if line["kind"] == "machine_ended"}
    orders = Counter(machine["token"] for machine in machines)
    worst_s, unwritten, apart = 0.0, 0, []
    for machine in machines:
        known = ledger.get(machine["machine"])
        unwritten += known is None
        if machine["until_s"] is not None:
            billed_s = machine["until_s"] - machine["since_s"]
            difference_s = billed_s - (0.0 if known is None else known["until_s"] - known["since_s"])
            worst_s = max(worst_s, difference_s, key=abs)
            if abs(difference_s) > 1.0:
                apart.append(machine["machine"])
    return {
        "machines": len(machines),
        "leaked": sum(machine["until_s"] is None for machine in machines) + len(leftovers),
        "doubled": sum(count > 1 for count in orders.values()),
        "billed_minus_ledger_s": round(worst_s, 3),
        "apart_by_more_than_1_s": apart[:10],
        "without_a_ledger_line": unwritten,
        "strays_stopped": len(
            {line["facts"]["machine"] for line in lines if line["kind"] == "machine_stray"}
            & {machine["machine"] for machine in machines}
        ),
    }


def sum_up(verdicts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the verdict over all clouds."""
    found = list(verdicts.values())
    return {
        **{
            name: sum(one[name] for one in found)
            for name in ("machines", "leaked", "doubled", "without_a_ledger_line", "strays_stopped")
        },
        "billed_minus_ledger_s": max((one["billed_minus_ledger_s"] for one in found), key=abs, default=0.0),
    }
