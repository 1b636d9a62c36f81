"""`phalanx topology --measure`: measures every pair of nodes with a job, and derives the topology and its slow links."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.cells import count
from phalanx.cli.cluster.node_labels import MEASURED_LABEL, put_labels
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import print_error, warn
from phalanx.cli.terminal import strip_control, terminal
from phalanx.cli.topology.measured_tree_table import measure_lines
from phalanx.core.errors import BadRequest, NotPermitted
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import NodeId
from phalanx.core.work.users import Action
from phalanx.planner.calibration.network_levels import MeasuredTopology, infer_topology

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.planner.calibration.profile import PairMeasurement
    from phalanx.wire.api.nodes import NodeView

_INTERRUPTED: Final = 130  # 128 + SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of the command."""

    nodes: str | None = None
    quick: bool = False
    python: str = ""
    apply: bool = False
    plot: str | None = None
    as_json: bool = False


def measure_topology(submission: MeasureOptions) -> int:
    """Measure and print the topology; on request draw it and apply it. Return the exit code."""
    from phalanx.cli.plan.calibration_job import CalibrationFailed

    if submission.plot is not None:
        from phalanx.cli.figure_files import picture_format
        from phalanx.cli.figure_page import FORMATS

        picture_format(submission.plot, FORMATS)
    head = connect()
    nodes = head.nodes()
    _check_permitted(head, submission)
    try:
        pairs = _pairs(head, nodes, submission)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CalibrationFailed as failed:
        return print_error(failed.message, failed.hint, failed.job_code)
    found = infer_topology(pairs)
    if submission.plot is not None:
        _draw(submission.plot, found)
    applied, by_hand = _apply(head, nodes, found) if submission.apply else ([], [])
    _print(found, pairs, submission, applied)
    if by_hand:
        warn(
            f"unchanged, because labelled by hand: {fold_hostlist(sorted(by_hand))}; remove labels with `phalanx nodes label`"
        )
    return 0


def _check_permitted(head: Client, submission: MeasureOptions) -> None:
    if not (submission.apply or submission.nodes):
        return
    me = head.me()
    if Action.OPERATE not in me.actions:
        what = "label nodes" if submission.apply else "reserve nodes"
        raise NotPermitted(f"{me.user} may not {what}", hint="only operators may use --apply and --nodes")


def _pairs(head: Client, nodes: Sequence[NodeView], submission: MeasureOptions) -> Sequence[PairMeasurement]:
    """Run the job. In any case the job is cancelled and its reservation ended afterwards."""
    from phalanx.cli.plan.calibration_job import reserve_nodes, run_calibration
    from phalanx.cli.plan.calibration_nodes import check_idle, select_nodes

    chosen = select_nodes(
        nodes, None if submission.nodes is None else expand_hostlist(submission.nodes), time.time(), links=True
    )
    if len(chosen.nodes) < 2:
        raise BadRequest(f"{chosen.names[0]} is the only node: it has no links", hint="add a server with phalanx join")
    check_idle(chosen, wait=False, links=True)
    for line in chosen.excluded:
        warn(line)
    only = submission.nodes is not None
    with reserve_nodes(head, chosen, only=only, name="links", why="phalanx topology --measure") as reservation:
        return run_calibration(
            connect(FOLLOW_PATIENCE_S),
            chosen,
            reservation=reservation,
            quick=submission.quick,
            python=submission.python,
            links=True,
        ).pairs


def _apply(head: Client, nodes: Sequence[NodeView], found: MeasuredTopology) -> tuple[list[str], list[str]]:
    """Label the measured nodes, except those labelled by hand. Return the names of the labelled nodes and of the skipped ones."""
    by_hand = [
        str(node.id)
        for node in nodes
        if node.id in found.nodes
        and any(node.labels.get(level) for level in LEVELS)
        and not node.labels.get(MEASURED_LABEL)
    ]
    wanted = {
        NodeId(name): {
            **dict.fromkeys(LEVELS, ""),
            **labels,
            MEASURED_LABEL: "measured" if any(labels.values()) else "",
        }
        for name, labels in found.labels().items()
        if name not in by_hand
    }
    if wanted:
        put_labels(head, wanted)
    return sorted(wanted), by_hand


def _draw(path: str, found: MeasuredTopology) -> None:
    from phalanx.cli.figure_page import write_picture
    from phalanx.cli.topology.measured_tree_drawing import tree_diagram

    lead = "Boxes are domains. The rate is that of a healthy link inside the domain, node to node, in each direction at once."
    write_picture(
        path,
        [("measured topology", tree_diagram(found))],
        title=f"{count(len(found.nodes), 'node')} by measured bandwidth",
        lead=lead,
        command=f"phalanx topology --measure --plot {shlex.quote(str(path))}",
    )


def _print(
    found: MeasuredTopology, pairs: Sequence[PairMeasurement], submission: MeasureOptions, applied: Sequence[str]
) -> None:
    if submission.as_json:
        from phalanx.cli.list_output import to_json
        from phalanx.planner.calibration.record_codec import encode_record

        plain = [encode_record(pair) for pair in pairs]
        value = {**encode_record(found), "pairs": plain, "labels": found.labels(), "applied": list(applied)}
        print(to_json(value, indent=2))
        return
    screen = terminal(sys.stdout)
    print("\n".join(strip_control(line) if not screen.colour else line for line in measure_lines(found, screen)))
    if submission.plot is not None:
        print(f"drawn: {submission.plot}")
    if applied:
        print(f"{count(len(applied), 'node')} labelled with the measured topology")
    unapplied = "phalanx topology --measure --apply" if found.levels else "phalanx nodes"
    print(screen.paint(f"next: {'phalanx topology' if applied else unapplied}", "dim"))
