"""Finds unfit nodes: by their own evidence, or by the links that a gang reported as bad; and limits how many are cordoned for it.

Pure. Its input is what nodes measured before the ranks of a gang started (`node.logic.preflight_checks` judges a node alone). The attempt machine
calls `find_faulty_nodes` at the gang barrier, the controller calls `kept_out` to cordon a node. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import NodeId

PREFLIGHT: Final = "preflight"
RECOVERY: Final = "recovery"
OPERATOR_HOOK: Final = "hook"
HEALTH_CHECK: Final = "health-check"
NODE_TEST: Final = "node-test"
"""Authors of automatic cordons: before a gang started; after one failed on the node; by a prolog or epilog of the node's operator; by a health check
of the operator, whose cordon ends when the check passes; by a test of the node. Manual cordons carry the operator's name."""
FULL_DISK: Final = "full-disk"
"""Author of the cordons of nodes without room on their disk. They end by themselves, and are not limited: free space is measured, not inferred."""
DISK_FREE_BYTES: Final = 64 << 20
"""Free space needed on the disk of the node's folder: for a hostfile, lease pages, and minutes of output while the head is unreachable."""
AUTOMATIC_CORDON_AUTHORS: Final = (PREFLIGHT, RECOVERY, OPERATOR_HOOK, HEALTH_CHECK, NODE_TEST)
AUTOMATIC_CORDON_SHARE_MAX: Final = 0.4
"""Largest share of the nodes that are up that may be cordoned automatically: past it, the test is likelier wrong than the fleet.
Source: `maxUnhealthy: 40%`, rounded down, past which Kubernetes' MachineHealthCheck repairs no further node (Cluster API book,
"Configure a MachineHealthCheck", read 2026-11-21)."""
_NAMED_MAX: Final = 5  # partners named in one piece of evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLink:
    """The fault that one node found on its link to another: "no connection in 5 s"."""

    peer: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A node that is unfit for this gang.

    Attributes:
        cordon: the evidence is against the node alone, so it is cordoned.
        by: the author of the cordon.
        drain: running jobs are moved off too.
    """

    node_id: NodeId
    why: str
    cordon: bool
    by: str = PREFLIGHT
    drain: bool = False


def find_faulty_nodes(
    gang: Sequence[NodeId], found: Mapping[NodeId, Sequence[BadLink]], *, spare_later: bool = False
) -> tuple[NodeFault, ...]:
    """The nodes to replace so that no bad link is left, in the order judged; empty without a bad link.

    A node with more bad links than each of its partners is at fault: its own port, cable or firewall is the common cause. A node that reaches
    no other is at fault too if most of its partners reach others. Otherwise the faulty end is unknown: the pair is named, and the later node of
    the two in the gang is replaced but not cordoned.

    Args:
        gang: its nodes by node rank.
        found: the bad links that each node reported; a report from one side is enough.
        spare_later: replace the earlier node of a pair instead, because replacing the later one before did not help.
    """
    rank = {node_id: number for number, node_id in enumerate(gang)}
    links: dict[NodeId, dict[NodeId, str]] = {node_id: {} for node_id in gang}
    for node_id, bad in found.items():
        for link in bad:
            if node_id in rank and link.peer in rank and link.peer != node_id:
                links[node_id].setdefault(link.peer, link.why)
                links[link.peer][node_id] = link.why  # a report from the peer takes precedence over the node's own
    all_links = {node_id: dict(bad) for node_id, bad in links.items()}
    faults = []
    while any(links.values()):
        suspect = max(gang, key=lambda node_id: (len(links[node_id]), -rank[node_id] if spare_later else rank[node_id]))
        own_fault = _at_fault(suspect, all_links)
        named = all_links[suspect] if own_fault else links[suspect]
        faults.append(
            NodeFault(node_id=suspect, why=_evidence(suspect, named, rank, own_fault=own_fault), cordon=own_fault)
        )
        for peer in links[suspect]:
            del links[peer][suspect]
        links[suspect] = {}
    return tuple(faults)


def _at_fault(node_id: NodeId, links: Mapping[NodeId, Mapping[NodeId, str]]) -> bool:
    own, others = len(links[node_id]), [len(links[peer]) for peer in links[node_id]]
    return max(others) < own or (own == len(links) - 1 and median(others) < own)


def with_automatic_cordon(node: Node, fault: NodeFault, nodes: Iterable[Node], now_s: float) -> Node | None:
    """The node with the cordon of the fault; unchanged if it is already cordoned; None if the limit of inferred cordons is reached.

    A preflight cordon does not drain: the jobs that already run there were not what failed.
    """
    if node.cordon is not None:
        return node
    if fault.by != FULL_DISK and automatic_cordons_left(nodes) <= 0:
        return None
    cordon = Cordon(by=fault.by, why=fault.why, since_s=now_s, drain=fault.drain)
    return replace(node, cordon=cordon, changed_s=now_s)


def automatic_cordons_left(nodes: Iterable[Node]) -> int:
    """How many more nodes may be cordoned by evidence: at least one of two or more that are up, and never the last one."""
    up = [node for node in nodes if node.state is NodeState.UP]
    already = sum(node.cordon is not None and node.cordon.by in AUTOMATIC_CORDON_AUTHORS for node in up)
    most = max(1, int(AUTOMATIC_CORDON_SHARE_MAX * len(up))) if len(up) > 1 else 0
    return most - already


def _evidence(node_id: NodeId, partners: Mapping[NodeId, str], rank: Mapping[NodeId, int], *, own_fault: bool) -> str:
    names = sorted(partners, key=rank.__getitem__)
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    whys = dict.fromkeys(partners[name] for name in names)
    link = f"link {node_id} - {', '.join(names[:_NAMED_MAX])}{more}: {next(iter(whys))}"
    if not own_fault:
        return f"{link}; either end may be at fault"
    return link
