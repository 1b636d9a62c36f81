"""`phalanx topology`: shows the topology that gangs are placed by, with free capacity, and sets the position of nodes in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from phalanx.cli import cells
from phalanx.cli.cluster.node_labels import MEASURED_LABEL, put_labels
from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.option_types import HOSTS
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.cli.topology.topology_file import read_topology_file
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.topology import LEVELS, TopologyTree, build_topology_tree
from phalanx.core.ids import NodeId
from phalanx.wire.api.nodes import NodeView

_BAR: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A subtree and its capacity. Unhealthy GPUs and those of unavailable nodes count as `away` unless a job still holds them.

    Attributes:
        level: "" for nodes without a label of the next level.
        path: names from the outermost level to this one.
        whole_free: nodes with every device free.
    """

    level: str
    name: str
    path: list[str]
    nodes: list[NodeId]
    gpus: int
    used: int
    free: int
    away: int
    whole_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The levels in use, outermost first, and all domains, each before its subdomains."""

    levels: list[str]
    domains: list[Domain]


@click.group(cls=CommandGroup, invoke_without_command=True)
@list_options
@click.option("--measure", is_flag=True, help="Measure every pair of nodes with a job, and derive the topology.")
@click.option("--apply", "apply_", is_flag=True, help="With --measure: label the nodes with the result.")
@click.option("--plot", metavar="FILE", help="With --measure: draw the result: tree.svg, tree.png or tree.html.")
@click.option(
    "--nodes", "listed", type=HOSTS, metavar="NODES", help="With --measure: only these nodes. [all that are up]"
)
@click.option("--quick", is_flag=True, help="With --measure: fewer repetitions, less accurate.")
@click.option(
    "--python", default="", metavar="PATH", help="With --measure: Python with Phalanx and torch on the nodes."
)
@click.pass_context
def topology(
    context: click.Context,
    as_json: bool,
    watch: bool,
    measure: bool,
    apply_: bool,
    plot: str | None,
    listed: str | None,
    quick: bool,
    python: str,
) -> int | None:
    """Show the tree of spines, leafs, racks and NVLink domains with free capacity; `set FILE` defines it, --measure measures it."""
    if measure and context.invoked_subcommand is None and not watch:
        from phalanx.cli.topology.topology_measurement import MeasureOptions, measure_topology

        submission = MeasureOptions(nodes=listed, quick=quick, python=python, apply=apply_, plot=plot, as_json=as_json)
        return measure_topology(submission)
    if measure or apply_ or plot or listed or quick or python:
        raise BadRequest(
            "--apply, --plot, --nodes, --quick and --python need --measure, without a subcommand and without --watch",
            hint="phalanx topology --measure",
        )
    if context.invoked_subcommand is None:
        _show(as_json=as_json, watch=watch)
    return None


@topology.command(name="show")
@list_options
def show_(as_json: bool, watch: bool) -> None:
    """Show the tree."""
    _show(as_json=as_json, watch=watch)


@topology.command(name="set")
@click.argument("file", metavar="FILE")
def set_(file: str) -> None:
    """Set the position of nodes by a YAML tree of host lists; - reads standard input. Nodes that are not in the file are unchanged.

    \b
    leaf l0:
      rack r0: gpu[001-004]
      rack r1: gpu[005-008]
    leaf l1: gpu[009-016]
    """  # noqa: D301 - click reads the backspace character itself
    wanted = read_topology_file(file)
    head = connect()
    here = {node.id for node in head.nodes()}
    known = {name: labels for name, labels in wanted.items() if name in here}
    if not known:
        raise NotFound(
            f"{file}: this cluster has none of its nodes: {_few(wanted)}", hint="list nodes with phalanx nodes"
        )
    put_labels(head, {name: {MEASURED_LABEL: "", **labels} for name, labels in known.items()})
    absent = [name for name in wanted if name not in here]
    if absent:
        warn(f"not labelled, because they have not joined: {_few(absent)}; set the file again later")
    print(f"{cells.count(len(known), 'node')} labelled")
    print("next: phalanx topology")


@click.command()
@click.argument("names", metavar="NODES")
@click.argument("pairs", metavar="NAME=VALUE...", nargs=-1, required=True)
def label(names: str, pairs: tuple[str, ...]) -> None:
    """Label nodes, for example rack=r1 leaf=l2; NAME= removes a label. The levels of the topology are spine, leaf, rack and nvlink."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise BadRequest(f"{pair!r} is not a label", hint="write rack=r1, or rack= to remove it")
        labels[name] = value
    if set(labels) & set(LEVELS):
        labels.setdefault(MEASURED_LABEL, "")  # its position is now set by hand
    hosts = expand_hostlist(names)
    changed = connect().label_nodes(dict.fromkeys(hosts, labels))
    for node in changed:
        shown = " ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
        print(f"node {node.id}: {shown or 'no labels'}")


# ---- the tree -------------------------------------------------------------------------------------------------------


def _show(*, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> ListView:
        nodes = head.nodes()
        found = topology_of(nodes)
        command = (
            "phalanx run --within LEVEL keeps a job inside one domain" if found.levels else "phalanx topology set FILE"
        )
        return ListView(value=found, lines=lambda screen: topology_lines(found, nodes, screen), next_command=command)

    show_list(fetch, as_json=as_json, watch=watch)


def topology_of(nodes: Sequence[NodeView]) -> Topology:
    """Return the tree of the nodes' labels. Nodes without a label are grouped under their innermost known domain."""
    placed = [
        Node(id=node.id, engine=node.engine, devices=(), cpus=0, memory_bytes=0, state=node.state, labels=node.labels)
        for node in nodes
    ]
    tree = build_topology_tree(placed)
    domains = list(_subdomains(nodes, tree, list(tree.sorted_positions()), 0, [])) if tree.levels else []
    return Topology(levels=list(tree.levels), domains=domains)


def _subdomains(
    nodes: Sequence[NodeView], tree: TopologyTree, positions: Sequence[int], depth: int, path: list[str]
) -> Iterator[Domain]:
    if depth == len(tree.levels):
        return
    level = tree.levels[depth]
    groups: dict[int, list[int]] = {}
    unlabelled: list[int] = []
    for position in positions:
        if nodes[position].labels.get(level):
            groups.setdefault(tree.domains[depth][position], []).append(position)
        else:
            unlabelled.append(position)
    for members in groups.values():
        name = nodes[members[0]].labels[level]
        yield _domain(level, name, [*path, name], [nodes[position] for position in members])
        yield from _subdomains(nodes, tree, members, depth + 1, [*path, name])
    if unlabelled and (groups or depth == 0):  # a level that no node here has is left out
        yield _domain("", f"no {level}", [*path, ""], [nodes[position] for position in unlabelled])


def _domain(level: str, name: str, path: list[str], nodes: Sequence[NodeView]) -> Domain:
    used = sum(device.job_id is not None for node in nodes for device in node.devices)
    gpus = sum(len(node.devices) for node in nodes)
    free = [_free(node) for node in nodes]
    return Domain(
        level=level,
        name=name,
        path=path,
        nodes=[node.id for node in nodes],
        gpus=gpus,
        used=used,
        free=sum(free),
        away=gpus - used - sum(free),
        whole_free=sum(0 < len(node.devices) == count for node, count in zip(nodes, free, strict=True)),
    )


def _free(node: NodeView) -> int:
    if node.state is not NodeState.UP or node.cordon is not None:
        return 0
    return sum(device.healthy and device.job_id is None for device in node.devices)


def topology_lines(found: Topology, nodes: Sequence[NodeView], screen: Terminal) -> list[str]:
    """Return the tree as a table, inner domains indented; innermost domains list their hosts."""
    if not found.levels:
        return [
            f"no node has a topology label ({', '.join(LEVELS)}): all count as equally near",
            f"{cells.count(len(nodes), 'node')}: {fold_hostlist(sorted(node.id for node in nodes)) or 'none'}",
        ]
    columns = (
        Column(title="DOMAIN"),
        Column(title="NODES", right=True),
        Column(title="GPUS", right=True),
        Column(title="USED", right=True),
        Column(title="", drop_order=2),
        Column(title="FREE", right=True),
        Column(title="WHOLE NODES FREE", right=True, drop_order=1),
        Column(title="AWAY", right=True, hide_empty=True),
        Column(title="HOSTS", min_width=12),
    )
    leafs = _innermost(found.domains)
    rows = [_row(domain, screen, leaf=leaf) for domain, leaf in zip(found.domains, leafs, strict=True)]
    return table(columns, rows, screen)


def _innermost(domains: Sequence[Domain]) -> list[bool]:
    """Return for each domain whether it has no subdomains: the next one is not deeper."""
    depths = [len(domain.path) for domain in domains]
    return [following <= depth for depth, following in zip(depths, [*depths[1:], 0], strict=True)]


def _row(domain: Domain, screen: Terminal, *, leaf: bool) -> list[Cell | str]:
    words = f"{domain.level} {domain.name}".strip()
    return [
        Cell("  " * (len(domain.path) - 1) + words, "" if domain.level else "dim"),
        str(len(domain.nodes)),
        str(domain.gpus),
        str(domain.used),
        cells.bar(domain.used / domain.gpus if domain.gpus else None, _BAR, screen),
        Cell(str(domain.free), "green" if domain.free else ""),
        str(domain.whole_free),
        str(domain.away) if domain.away else "",
        fold_hostlist(sorted(domain.nodes)) if leaf else "",
    ]


def _few(names: Sequence[str] | Mapping[NodeId, object]) -> str:
    text = fold_hostlist(sorted(names))
    return text if len(text) <= 80 else text[:80] + " ..."
