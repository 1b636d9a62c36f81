"""Labels put on many nodes, and the one that tells a measured place from a person's word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from phalanx.core.ids import NodeId

if TYPE_CHECKING:
    from phalanx.client import Client

MEASURED: Final = "topology"  # a label that says "measured" of a node whose place was, and not said by a person
_AT_ONCE: Final = 1000  # nodes in one request: some 100 KB, below what a head takes as one body


def put_labels(head: Client, labels: Mapping[NodeId, Mapping[str, str]]) -> None:
    """Label nodes, however many."""
    names = list(labels)
    for at in range(0, len(names), _AT_ONCE):
        head.label_nodes({name: dict(labels[name]) for name in names[at : at + _AT_ONCE]})
