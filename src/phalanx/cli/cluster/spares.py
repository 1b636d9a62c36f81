"""`phalanx nodes spares`: computes the number of spare nodes from the failure rate of this fleet and the repair time."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from phalanx.cli.cells import count
from phalanx.cli.connection import connect
from phalanx.cli.option_types import DURATION
from phalanx.core.errors import BadRequest
from phalanx.core.recovery.failure_rate import node_mtbf_s
from phalanx.core.recovery.spares import REPAIR_DEFAULT_S, SHORT_MAX, spares, under_repair
from phalanx.core.units import format_duration, parse_duration_s

_DAY_S = 86_400.0


class SparesEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    nodes: int
    failures: int
    node_days: float
    node_mtbf_s: float
    repair_s: float
    under_repair: float
    spares: int


@click.command(name="spares")
@click.option("--repair", type=DURATION, metavar="TIME", help="Time from a failure until the node is back; default 3d.")
@click.option(
    "--nodes",
    "wanted",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Number of working nodes; default: all of this fleet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def spares_command(repair: str | None, wanted: int | None, as_json: bool) -> None:
    """Compute how many spare nodes keep a shortage of nodes below 1 % of the time."""
    now_s, nodes = time.time(), connect().nodes()
    failures = sum(node.failures for node in nodes)
    exposure_s = sum(max(0.0, now_s - node.joined_s) for node in nodes)
    repair_s = REPAIR_DEFAULT_S if repair is None else parse_duration_s(repair, what="--repair")
    mtbf_s, number = node_mtbf_s(failures, exposure_s), wanted or len(nodes)
    try:
        needed = spares(number, node_mtbf_s=mtbf_s, repair_s=repair_s)
    except ValueError as error:
        raise BadRequest(f"--repair {format_duration(repair_s)}: {error}") from None
    found = SparesEstimate(
        nodes=number,
        failures=failures,
        node_days=exposure_s / _DAY_S,
        node_mtbf_s=mtbf_s,
        repair_s=repair_s,
        under_repair=under_repair(number, node_mtbf_s=mtbf_s, repair_s=repair_s),
        spares=needed,
    )
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    print(
        f"{count(found.spares, 'spare')} for {count(number, 'node')}: with fewer, nodes are short for more than {SHORT_MAX:.0%} of the time"
    )
    print(
        f"  a node fails once in {mtbf_s / _DAY_S:.0f} days: {count(failures, 'failure')} in {found.node_days:.1f} node-days here, combined with published failure rates"
    )
    print(f"  a repair takes {format_duration(repair_s)}: {found.under_repair:.2f} nodes are under repair on average")
