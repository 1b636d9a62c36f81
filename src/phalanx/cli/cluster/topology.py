"""`phalanx topology`: the tree that gangs are placed by, with what is free in each domain; and telling the head where nodes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from phalanx.cli import cells
from phalanx.cli.cluster.labels import MEASURED, put_labels
from phalanx.cli.connect import connect
from phalanx.cli.faults import warn
from phalanx.cli.groups import NounGroup
from phalanx.cli.lists import Shown, list_options, show
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.cli.words import HOSTS
from phalanx.client.given import bytes_of
from phalanx.core.errors import BadFile, BadRequest, NotFound
from phalanx.core.fleet.hostlist import expand, fold
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.topology import LEVELS, Tree, tree_of
from phalanx.core.ids import NodeId
from phalanx.core.work.treefile import labels_in
from phalanx.wire.api.nodes import NodeView

_DEPTH_MAX: Final = 20  # levels are five at most
_EVENTS_MAX: Final = 10_000  # racks of 8 nodes of the largest fleet planned for, 12,500 nodes, are some 4,000
FILE_BYTES_MAX: Final = 1 << 20  # 100,000 hosts as a list fit; the scanner needs a second for this much
_BAR: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A subtree and what is in it. GPUs that are sick, or on nodes that take no work, are `away` unless a job still holds them.

    Attributes:
        level: "" for nodes that do not say in which domain of the next level they are.
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
    """Levels that exist, outermost first, and all domains, each before those in it."""

    levels: list[str]
    domains: list[Domain]


@click.group(cls=NounGroup, invoke_without_command=True)
@list_options
@click.option("--measure", is_flag=True, help="Measure every pair of nodes, by a job, and say what tree that tells of.")
@click.option("--apply", "apply_", is_flag=True, help="With --measure: take it for the topology.")
@click.option("--plot", metavar="FILE", help="With --measure: draw it: tree.svg, tree.png or tree.html.")
@click.option("--nodes", "listed", type=HOSTS, metavar="NODES", help="With --measure: only these. [all that are up]")
@click.option("--quick", is_flag=True, help="With --measure: fewer repeats, a first look.")
@click.option(
    "--python", default="", metavar="PATH", help="With --measure: Python with Phalanx and torch on the nodes."
)
@click.pass_context
def topology(
    context: click.Context, as_json: bool, watch: bool, measure: bool, apply_: bool, plot: str | None, listed: str | None,
    quick: bool, python: str,
) -> int | None:  # fmt: skip
    """Draw the tree of spines, leafs, racks and NVLink domains, with what is free in each; `set FILE` describes it, --measure finds it."""
    if measure and context.invoked_subcommand is None and not watch:
        from phalanx.cli.cluster.measuring import Wish, measured

        wish = Wish(listed=listed, quick=quick, python=python, apply=apply_, plot=plot, as_json=as_json)
        return measured(wish)
    if measure or apply_ or plot or listed or quick or python:
        raise BadRequest(
            "--apply, --plot, --nodes, --quick and --python go with --measure, which goes with no subcommand and no --watch",
            hint="phalanx topology --measure",
        )
    if context.invoked_subcommand is None:
        _show(as_json=as_json, watch=watch)
    return None


@topology.command(name="show")
@list_options
def show_(as_json: bool, watch: bool) -> None:
    """Draw the tree."""
    _show(as_json=as_json, watch=watch)


@topology.command(name="set")
@click.argument("file", metavar="FILE")
def set_(file: str) -> None:
    """Say where nodes are, by a YAML tree of host lists; - reads standard input. Nodes that the file does not name stay where they are.

    \b
    leaf l0:
      rack r0: gpu[001-004]
      rack r1: gpu[005-008]
    leaf l1: gpu[009-016]
    """  # noqa: D301 - click reads the backspace character itself
    wanted = read_tree_file(file)
    head = connect()
    here = {node.id for node in head.nodes()}
    known = {name: labels for name, labels in wanted.items() if name in here}
    if not known:
        raise NotFound(f"{file}: none of its nodes is here: {_few(wanted)}", hint="phalanx nodes lists those that are")
    put_labels(head, {name: {MEASURED: "", **labels} for name, labels in known.items()})
    absent = [name for name in wanted if name not in here]
    if absent:
        warn(f"not here, so not labelled: {_few(absent)}; set the file again once they have joined")
    print(f"{cells.count(len(known), 'node')} placed in the tree")
    print("next: phalanx topology")


def read_tree_file(path: str) -> dict[NodeId, dict[str, str]]:
    """Labels of every node that the file at `path` names; `-` reads standard input.

    Raises:
        BadFile: it cannot be read, is no YAML, or no tree of host lists.
        TooLarge: over 1 MiB.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    text = _text_of(path)
    try:
        _look_through(YAML(typ="safe", pure=True).parse(text))
        tree = YAML(typ="safe", pure=True).load(text)
        return labels_in(tree)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise BadFile(f"{where}: not YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError, ValueError) as error:  # a number of thousands of digits
        raise BadFile(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    except BadFile as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from None


def _look_through(events: Iterable[object]) -> None:
    """Nothing, if the text is one that can be a tree: what is deeper or longer would take minutes to build.

    Raises:
        BadFile: it is.
    """
    depth = 0
    for count, event in enumerate(events):
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _DEPTH_MAX or count > _EVENTS_MAX:
            raise BadFile(
                f"nested more than {_DEPTH_MAX} deep" if depth > _DEPTH_MAX else f"more than {_EVENTS_MAX} entries",
                hint="a tree has a few levels, and host lists as n[0-99]",
            )


def _text_of(path: str) -> str:
    try:
        return bytes_of(path, FILE_BYTES_MAX, "tree of host lists").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not UTF-8") from None


@click.command()
@click.argument("names", metavar="NODES")
@click.argument("pairs", metavar="NAME=VALUE...", nargs=-1, required=True)
def label(names: str, pairs: tuple[str, ...]) -> None:
    """Label nodes, as in rack=r1 leaf=l2; NAME= takes a label away. The levels of the topology are spine, leaf, rack and nvlink."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise BadRequest(f"{pair!r} is no label", hint="write rack=r1, or rack= to take it away")
        labels[name] = value
    if set(labels) & set(LEVELS):
        labels.setdefault(MEASURED, "")  # from now on its place is what a person said
    hosts = expand(names)
    changed = connect().label_nodes(dict.fromkeys(hosts, labels))
    for node in changed:
        shown = " ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
        print(f"node {node.id}: {shown or 'no labels'}")


# ---- the tree -------------------------------------------------------------------------------------------------------


def _show(*, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> Shown:
        nodes = head.nodes()
        found = topology_of(nodes)
        following = (
            "phalanx run --within LEVEL keeps a job inside one domain" if found.levels else "phalanx topology set FILE"
        )
        return Shown(value=found, lines=lambda screen: topology_lines(found, nodes, screen), next=following)

    show(fetch, as_json=as_json, watch=watch)


def topology_of(nodes: Sequence[NodeView]) -> Topology:
    """The tree of the nodes' labels. Nodes that do not say where they are stand together under the domain that they are known to be in."""
    placed = [
        Node(id=node.id, engine=node.engine, devices=(), cpus=0, memory_bytes=0, state=node.state, labels=node.labels)
        for node in nodes
    ]
    tree = tree_of(placed)
    domains = list(_inside(nodes, tree, list(tree.order()), 0, [])) if tree.levels else []
    return Topology(levels=list(tree.levels), domains=domains)


def _inside(
    nodes: Sequence[NodeView], tree: Tree, positions: Sequence[int], depth: int, path: list[str]
) -> Iterator[Domain]:
    if depth == len(tree.levels):
        return
    level = tree.levels[depth]
    groups: dict[int, list[int]] = {}
    unsaid: list[int] = []
    for position in positions:
        if nodes[position].labels.get(level):
            groups.setdefault(tree.domains[depth][position], []).append(position)
        else:
            unsaid.append(position)
    for inside in groups.values():
        name = nodes[inside[0]].labels[level]
        yield _domain(level, name, [*path, name], [nodes[position] for position in inside])
        yield from _inside(nodes, tree, inside, depth + 1, [*path, name])
    if unsaid and (groups or depth == 0):  # where no node says it, the level ends above
        yield _domain("", f"no {level}", [*path, ""], [nodes[position] for position in unsaid])


def _domain(level: str, name: str, path: list[str], nodes: Sequence[NodeView]) -> Domain:
    used = sum(device.job_id is not None for node in nodes for device in node.devices)
    gpus = sum(len(node.devices) for node in nodes)
    free = [_free(node) for node in nodes]
    return Domain(
        level=level, name=name, path=path, nodes=[node.id for node in nodes], gpus=gpus, used=used, free=sum(free),
        away=gpus - used - sum(free),
        whole_free=sum(bool(node.devices) and count == len(node.devices) for node, count in zip(nodes, free, strict=True)),
    )  # fmt: skip


def _free(node: NodeView) -> int:
    if node.state is not NodeState.UP or node.cordon is not None:
        return 0
    return sum(device.healthy and device.job_id is None for device in node.devices)


def topology_lines(found: Topology, nodes: Sequence[NodeView], screen: Terminal) -> list[str]:
    """The tree as a table, inner domains set in below outer ones; hosts at the domains that hold no others."""
    if not found.levels:
        return [
            f"no node says where it is ({', '.join(LEVELS)}): all are taken to be equally near",
            f"{cells.count(len(nodes), 'node')}: {fold(sorted(node.id for node in nodes)) or 'none'}",
        ]
    columns = (
        Column(title="DOMAIN"), Column(title="NODES", right=True), Column(title="GPUS", right=True), Column(title="USED", right=True),
        Column(title="", drop=2), Column(title="FREE", right=True), Column(title="WHOLE NODES FREE", right=True, drop=1),
        Column(title="AWAY", right=True, hide_empty=True), Column(title="HOSTS", least=12),
    )  # fmt: skip
    leafs = _ends(found.domains)
    rows = [_row(domain, screen, leaf=leaf) for domain, leaf in zip(found.domains, leafs, strict=True)]
    return table(columns, rows, screen)


def _ends(domains: Sequence[Domain]) -> list[bool]:
    """Whether each domain holds no others: the next one is not deeper."""
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
        fold(sorted(domain.nodes)) if leaf else "",
    ]


def _few(names: Sequence[str] | Mapping[NodeId, object]) -> str:
    text = fold(sorted(names))
    return text if len(text) <= 80 else text[:80] + " ..."
