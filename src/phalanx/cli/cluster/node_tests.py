"""`phalanx nodes test`: measures nodes with a short job, compares each with its model and its kind, and cordons those that fail."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import print_error
from phalanx.cli.option_types import HOSTS
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.core.errors import BadRequest, NotFound, NotPermitted, TryLater
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.fleet.node import NodeState
from phalanx.core.work.users import Action

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.nodes import NodeTestsView, NodeTestView, NodeView

_INTERRUPTED: Final = 130  # 128 + SIGINT
_FAILED: Final = 1
_RESERVED_FOR: Final = (
    "1h"  # of nodes that are cordoned: a test takes a minute; if this command dies, they are cordoned again after that
)
_COLUMNS: Final = (
    Column(title="NODE"),
    Column(title="WHAT", min_width=12),
    Column(title="MEASURED", right=True),
    Column(title="MODEL", right=True, hide_empty=True, drop_order=1),
    Column(title="MEDIAN", right=True, hide_empty=True, drop_order=2),
    Column(title="RESULT", min_width=8),
)


@click.command(name="test")
@click.argument("names", metavar="NODES", type=HOSTS, shell_complete=complete_nodes)
@click.option("--wait", is_flag=True, help="Wait until the nodes are free instead of failing.")
@click.option(
    "--threshold", default="30%", metavar="SHARE", show_default=True, help="Fail this far below the median of its kind."
)
@click.option("--no-drain", is_flag=True, help="Only report nodes that fail.")
@click.option("--undrain", is_flag=True, help="Return cordoned nodes that do not fail to service.")
@click.option("--history", "show_history", is_flag=True, help="Show earlier tests instead.")
@click.option(
    "--python",
    default="",
    metavar="PATH",
    help="Python with Phalanx and torch on the nodes. [default: this one, or python]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def test_command(
    names: str,
    wait: bool,
    threshold: str,
    no_drain: bool,
    undrain: bool,
    show_history: bool,
    python: str,
    as_json: bool,
) -> int:
    """Test nodes: matrix products, memory, and all-reduce within and between them; cordon those that fail.

    One job for each kind of node measures all of its devices at once, in about a minute. A node fails if a rate is under half of its
    model's figure, or too far below the median of at least three nodes of its kind. Exits with 1 if a node fails.

    \b
    phalanx nodes test gpu[001-004]
    phalanx nodes test gpu003 --history
    """  # noqa: D301 - click reads the backspace character itself
    from phalanx.cli.plan.calibration_job import CalibrationFailed

    head, wanted, share = connect(), expand_hostlist(names), _share(threshold)
    if show_history:
        _print([head.node_tests(name) for name in wanted], as_json=as_json, every=True)
        return 0
    me = head.me()
    if Action.OPERATE not in me.actions:
        raise NotPermitted(f"{me.user} may not test nodes", hint="ask an operator; --history prints earlier tests")
    try:
        found = _test(head, wanted, wait=wait, threshold=share, drain=not no_drain, python=python)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CalibrationFailed as failed:
        return print_error(failed.message, failed.hint, failed.job_code)
    _print(found, as_json=as_json, every=False)
    if undrain:
        _return_to_service(head, [node.node for node in found if node.tests[-1].passed is not False])
    return _FAILED if any(test.passed is False for node in found for test in node.tests) else 0


def _return_to_service(head: Client, names: Sequence[str]) -> None:
    cordoned = {str(node.id) for node in head.nodes() if _is_cordoned(node)}
    for name in names:
        if name in cordoned:
            head.undrain(name)
            print(f"{name} is in service", file=sys.stderr)


def last_test_line(node: NodeTestsView, now_s: float) -> str:
    """Return the line of a node's page about its last test; empty without one."""
    if not node.tests:
        return ""
    last = node.tests[-1]
    return f"tested {cells.age(last.at_s, now_s)} ago by job {last.job}: {_result(last)}"


def _test(
    head: Client, wanted: Sequence[str], *, wait: bool, threshold: float, drain: bool, python: str
) -> list[NodeTestsView]:
    """Run one job for each kind of node, one after the other, and return the results by node."""
    nodes = head.nodes()
    known = {str(node.id): node for node in nodes}
    cordoned = [name for name in wanted if name in known and _is_cordoned(known[name])]
    busy = [name for name in cordoned if known[name].jobs]
    if busy:
        raise TryLater(
            f"{busy[0]} is cordoned, and job {known[busy[0]].jobs[0]} still runs there",
            hint="wait for its end, or cancel it",
        )
    test = functools.partial(_test_group, head, wait=wait, threshold=threshold, drain=drain, python=python)
    others = [name for name in wanted if name not in cordoned]
    found = test(nodes, others, reservation="") if others else []
    if cordoned:
        with _opened(head, cordoned) as reservation:
            found += test([_without(node, reservation) for node in head.nodes()], cordoned, reservation=reservation)
    return found


def _is_cordoned(node: NodeView) -> bool:
    """Whether an operator, or the head in their stead, keeps jobs away from a node that is up."""
    return node.state is NodeState.UP and node.cordon is not None and node.cordon.by != node.engine


@contextlib.contextmanager
def _opened(head: Client, cordoned: Sequence[str]) -> Iterator[str]:
    """Reserve cordoned nodes, and open them to jobs that name the reservation, which this yields. They are cordoned again afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    why = "phalanx nodes test"
    head.reserve(name, list(cordoned), _RESERVED_FOR, users=[head.me().user], why=why, open_cordoned=True)
    try:
        yield name
    finally:
        with contextlib.suppress(NotFound):  # it has ended: the nodes are cordoned again
            head.unreserve(name)


def _without(node: NodeView, reservation: str) -> NodeView:
    """The node as it is to those for whom it is reserved."""
    import msgspec

    return msgspec.structs.replace(node, reserved=[one for one in node.reserved if one.id != reservation])


def _test_group(
    head: Client,
    nodes: Sequence[NodeView],
    wanted: Sequence[str],
    *,
    wait: bool,
    threshold: float,
    drain: bool,
    python: str,
    reservation: str,
) -> list[NodeTestsView]:
    from phalanx.cli.plan.calibration_job import run_calibration
    from phalanx.cli.plan.calibration_nodes import check_idle, select_nodes
    from phalanx.planner.calibration.record_codec import encode_record

    groups = []
    for kind in _kinds(nodes, wanted):
        try:
            chosen = select_nodes(nodes, kind, time.time())
            check_idle(chosen, wait=wait)
        except NotFound as error:
            raise NotFound(error.message, hint="test the others, or repair and undrain it first") from None
        except TryLater as error:
            raise TryLater(error.message, hint="wait with --wait, or test the others") from None
        groups.append(chosen)
    found: list[NodeTestsView] = []
    for chosen in groups:  # all were checked first, so that a refusal costs no test
        if len(groups) > 1:
            print(f"{fold_hostlist(chosen.names)}: {chosen.devices} x {chosen.gpu}", file=sys.stderr, flush=True)
        profile = run_calibration(
            connect(FOLLOW_PATIENCE_S), chosen, reservation=reservation, quick=True, python=python, parts=True
        )
        found += head.put_node_tests(encode_record(profile), threshold=threshold, drain=drain)
    return found


def _kinds(nodes: Sequence[NodeView], wanted: Sequence[str]) -> list[list[str]]:
    """Return the names by kind, since one job measures one kind. Unknown nodes are a kind, which `select_nodes` refuses."""
    known = {str(node.id): node for node in nodes}
    kinds: dict[tuple[str, int], list[str]] = {}
    for name in dict.fromkeys(wanted):
        devices = known[name].devices if name in known else []
        kinds.setdefault((devices[0].model if devices else "", len(devices)), []).append(name)
    return [kinds[kind] for kind in sorted(kinds)]


def _print(found: Sequence[NodeTestsView], *, as_json: bool, every: bool) -> None:
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json(list(found), indent=2))
        return
    screen, now_s = terminal(sys.stdout), time.time()
    if every:
        for node in found:
            print(f"node {node.node}" + ("" if node.tests else ": never tested; run phalanx nodes test " + node.node))
            for test in node.tests:
                print(
                    strip_control(f"  {cells.age(test.at_s, now_s)} ago, job {test.job} by {test.by}: {_result(test)}")
                )
        return
    print("\n".join(_lines(found, screen)))


def _lines(found: Sequence[NodeTestsView], screen: Terminal) -> list[str]:
    from phalanx.cli.plan.calibration_table import format_amount

    rows: list[list[Cell | str]] = []
    for node in found:
        for rate in node.tests[-1].rates:
            unit = "FLOP/s" if rate.what.startswith("matmul") else "B/s"
            compared = rate.table is not None or rate.median is not None
            rows.append(
                [
                    Cell(node.node, "bold"),
                    rate.what,
                    format_amount(rate.value, unit),
                    "" if rate.table is None else format_amount(rate.table, unit),
                    "" if rate.median is None else format_amount(rate.median, unit),
                    Cell("FAILS", "red") if rate.why else "passes" if compared else Cell("not compared", "dim"),
                ]
            )
    lines = table(_COLUMNS, rows, screen)
    failed = [node for node in found if node.tests[-1].passed is False]
    lines += [strip_control(f"{node.node} fails: {node.tests[-1].why}") for node in failed]
    lines += [strip_control(f"{node.node} is cordoned: {node.cordoned}") for node in failed if node.cordoned]
    if any(node.tests[-1].passed is None for node in found):
        lines.append("not compared: the facts table lacks the model, and fewer than 3 nodes of this kind were tested")
    sound = sum(node.tests[-1].passed is True for node in found)
    lines.append(f"{sound} of {cells.count(len(found), 'node')} {'passes' if sound == 1 else 'pass'}")
    return lines


def _result(test: NodeTestView) -> str:
    if test.passed is None:
        return "not compared"
    return "passed" if test.passed else f"failed: {test.why}"


def _share(text: str) -> float:
    """Return a share from 30% or 0.3.

    Raises:
        BadRequest: it is neither.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = float("nan")
    if not 0.05 <= share <= 0.95:
        raise BadRequest(f"--threshold: {text!r} is no share from 5% to 95%", hint="--threshold 30%")
    return share
