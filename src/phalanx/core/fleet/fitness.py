"""Who is unfit: a node by its own evidence, or by the links that its gang found bad; and how many nodes may be kept out for it.

Pure, from what nodes measured before the ranks of a gang started (`node.logic.fitness` judges a node alone). The attempt machine asks
`judge_links` at the gang barrier, the controller `kept_out` for the node's record. Nothing here measures.
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
"""Who keeps a node out whose evidence is bad: before a gang started, or when one failed on it. What a person ordered bears that person's name."""
KEEPERS: Final = (PREFLIGHT, RECOVERY)
KEPT_OUT_SHARE: Final = 0.4
"""Of the nodes that are up, preflight keeps out no more than this: past it, the test is likelier wrong than the fleet.
Source: `maxUnhealthy: 40%`, rounded down, past which Kubernetes' MachineHealthCheck mends no further node (Cluster API book,
"Configure a MachineHealthCheck", read 2026-11-21)."""
_NAMED_MAX: Final = 5  # partners named in one piece of evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLink:
    """What one node found of its link to another: "no connection in 5 s"."""

    peer: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A node that does not do for this gang.

    Attributes:
        kept_out: the evidence is against it alone, so no gang should come to it.
        by: who says so. drain: what runs there moves too.
    """

    node_id: NodeId
    why: str
    kept_out: bool
    by: str = PREFLIGHT
    drain: bool = False


def judge_links(
    gang: Sequence[NodeId], found: Mapping[NodeId, Sequence[BadLink]], *, spare_later: bool = False
) -> tuple[Fault, ...]:
    """Whom to swap so that no bad link is left, in the order judged; empty without a bad link.

    A node with more bad links than each of its partners is at fault: its own port, cable or firewall is what they have in common. So is one
    that reaches nobody where most of its partners reach others. Else nobody can tell: the pair is named, and the later of the two in the
    gang is swapped but not kept out.

    Args:
        gang: its nodes by node rank.
        found: what each node found of its links; one side's word is enough.
        spare_later: swap the earlier of a pair instead: the later one was swapped before, and that did not help.
    """
    rank = {node_id: number for number, node_id in enumerate(gang)}
    links: dict[NodeId, dict[NodeId, str]] = {node_id: {} for node_id in gang}
    for node_id, bad in found.items():
        for link in bad:
            if node_id in rank and link.peer in rank and link.peer != node_id:
                links[node_id].setdefault(link.peer, link.why)
                links[link.peer][node_id] = link.why  # what others say of a node goes before its own words
    whole = {node_id: dict(bad) for node_id, bad in links.items()}
    faults = []
    while any(links.values()):
        worst = max(gang, key=lambda node_id: (len(links[node_id]), -rank[node_id] if spare_later else rank[node_id]))
        alone = _at_fault(worst, whole)
        named = whole[worst] if alone else links[worst]
        faults.append(Fault(node_id=worst, why=_evidence(worst, named, rank, alone=alone), kept_out=alone))
        for peer in links[worst]:
            del links[peer][worst]
        links[worst] = {}
    return tuple(faults)


def _at_fault(node_id: NodeId, links: Mapping[NodeId, Mapping[NodeId, str]]) -> bool:
    own, others = len(links[node_id]), [len(links[peer]) for peer in links[node_id]]
    return max(others) < own or (own == len(links) - 1 and median(others) < own)


def kept_out(node: Node, fault: Fault, nodes: Iterable[Node], now_s: float) -> Node | None:
    """The node with the cordon of whom the fault names; as it is where somebody's cordon stands already; None past the bound.

    Preflight's is no drain: what already runs there was not what failed, and goes on.
    """
    if node.cordon is not None:
        return node
    if room_to_keep_out(nodes) <= 0:
        return None
    cordon = Cordon(by=fault.by, why=fault.why, since_s=now_s, drain=fault.drain)
    return replace(node, cordon=cordon, changed_s=now_s)


def room_to_keep_out(nodes: Iterable[Node]) -> int:
    """How many more nodes may be kept out by evidence: of two or more that are up at least one, and never the last."""
    up = [node for node in nodes if node.state is NodeState.UP]
    already = sum(node.cordon is not None and node.cordon.by in KEEPERS for node in up)
    most = max(1, int(KEPT_OUT_SHARE * len(up))) if len(up) > 1 else 0
    return most - already


def _evidence(node_id: NodeId, partners: Mapping[NodeId, str], rank: Mapping[NodeId, int], *, alone: bool) -> str:
    names = sorted(partners, key=rank.__getitem__)
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    whys = dict.fromkeys(partners[name] for name in names)
    link = f"link {node_id} - {', '.join(names[:_NAMED_MAX])}{more}: {next(iter(whys))}"
    if not alone:
        return f"{link}; which end is at fault cannot be told"
    return link
