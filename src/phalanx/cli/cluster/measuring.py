"""`phalanx topology --measure`: measures every pair of nodes with a job, and derives the topology and its slow links."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.cells import count
from phalanx.cli.cluster.labels import MEASURED, put_labels
from phalanx.cli.cluster.treetable import measure_lines
from phalanx.cli.connect import FOLLOW_PATIENCE_S, connect
from phalanx.cli.faults import told, warn
from phalanx.cli.terminal import clean, terminal
from phalanx.core.errors import BadRequest, NotPermitted
from phalanx.core.fleet.hostlist import expand, fold
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import NodeId
from phalanx.core.performance.levels import Measure, levels_of
from phalanx.core.work.people import Action

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.core.performance.profile import PairFound
    from phalanx.wire.api.nodes import NodeView

_INTERRUPTED: Final = 130  # 128 + SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Options of the command."""

    listed: str | None = None
    quick: bool = False
    python: str = ""
    apply: bool = False
    plot: str | None = None
    as_json: bool = False


def measured(wish: Wish) -> int:
    """Measure and print the topology; on request draw it and apply it. Return the exit code."""
    from phalanx.cli.plan.calibration_job import CalibrationFailed

    if wish.plot is not None:
        from phalanx.cli.plan.picture import check_picture

        check_picture(wish.plot)
    head = connect()
    nodes = head.nodes()
    _check_permitted(head, wish)
    try:
        pairs = _pairs(head, nodes, wish)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CalibrationFailed as failed:
        return told(failed.message, failed.hint, failed.job_code)
    found = levels_of(pairs)
    if wish.plot is not None:
        _draw(wish.plot, found)
    applied, by_hand = _apply(head, nodes, found) if wish.apply else ([], [])
    _print(found, pairs, wish, applied)
    if by_hand:
        warn(f"unchanged, because labelled by hand: {fold(sorted(by_hand))}; remove labels with `phalanx nodes label`")
    return 0


def _check_permitted(head: Client, wish: Wish) -> None:
    if not (wish.apply or wish.listed):
        return
    me = head.me()
    if Action.OPERATE not in me.actions:
        what = "label nodes" if wish.apply else "reserve nodes"
        raise NotPermitted(f"{me.user} may not {what}", hint="only operators may use --apply and --nodes")


def _pairs(head: Client, nodes: Sequence[NodeView], wish: Wish) -> Sequence[PairFound]:
    """Run the job. In any case the job is cancelled and its reservation ended afterwards."""
    from phalanx.cli.plan.calibration_job import run_calibration, set_aside
    from phalanx.cli.plan.calibration_nodes import check_idle, chosen_nodes

    chosen = chosen_nodes(nodes, None if wish.listed is None else expand(wish.listed), time.time(), links=True)
    if len(chosen.nodes) < 2:
        raise BadRequest(f"{chosen.names[0]} is the only node: it has no links", hint="add a server with phalanx join")
    check_idle(chosen, wait=False, links=True)
    for line in chosen.left_out:
        warn(line)
    only = wish.listed is not None
    with set_aside(head, chosen, only=only, name="links", why="phalanx topology --measure") as reservation:
        return run_calibration(
            connect(FOLLOW_PATIENCE_S),
            chosen,
            reservation=reservation,
            quick=wish.quick,
            python=wish.python,
            links=True,
        ).pairs


def _apply(head: Client, nodes: Sequence[NodeView], found: Measure) -> tuple[list[str], list[str]]:
    """Label the measured nodes, except those labelled by hand. Return the names of the labelled nodes and of the skipped ones."""
    by_hand = [
        str(node.id)
        for node in nodes
        if node.id in found.nodes and any(node.labels.get(level) for level in LEVELS) and not node.labels.get(MEASURED)
    ]
    wanted = {
        NodeId(name): {**dict.fromkeys(LEVELS, ""), **labels, MEASURED: "measured" if any(labels.values()) else ""}
        for name, labels in found.labels().items()
        if name not in by_hand
    }
    if wanted:
        put_labels(head, wanted)
    return sorted(wanted), by_hand


def _draw(path: str, found: Measure) -> None:
    from phalanx import __version__
    from phalanx.cli.cluster.treeview import tree_sheet
    from phalanx.cli.plan.picture import write_picture

    lead = "Boxes are domains. The rate is that of a healthy link inside the domain, node to node, in each direction at once."
    write_picture(
        path,
        [tree_sheet(found)],
        title=f"{count(len(found.nodes), 'node')} by measured bandwidth",
        lead=lead,
        command=f"phalanx topology --measure --plot {path}",
        version=__version__,
    )


def _print(found: Measure, pairs: Sequence[PairFound], wish: Wish, applied: Sequence[str]) -> None:
    if wish.as_json:
        from phalanx.cli.lists import encoded
        from phalanx.core.performance.plain import to_plain

        plain = [to_plain(pair) for pair in pairs]
        value = {**to_plain(found), "pairs": plain, "labels": found.labels(), "applied": list(applied)}
        print(encoded(value, indent=2))
        return
    screen = terminal(sys.stdout)
    print("\n".join(clean(line) if not screen.colour else line for line in measure_lines(found, screen)))
    if wish.plot is not None:
        print(f"drawn: {wish.plot}")
    if applied:
        print(f"{count(len(applied), 'node')} labelled with the measured topology")
    unapplied = "phalanx topology --measure --apply" if found.levels else "phalanx nodes"
    print(screen.paint(f"next: {'phalanx topology' if applied else unapplied}", "dim"))
