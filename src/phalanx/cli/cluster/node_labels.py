"""Labels of many nodes at once, and the label that marks a measured position in the topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from phalanx.core.ids import NodeId

if TYPE_CHECKING:
    from phalanx.client import Client

# Label with the value "measured" on nodes whose position was measured, not set by a person
MEASURED_LABEL: Final = "topology"
_AT_ONCE: Final = 1000  # nodes in one request: some 100 KB, below the body limit of the head


def put_labels(head: Client, labels: Mapping[NodeId, Mapping[str, str]]) -> None:
    """Label any number of nodes."""
    names = list(labels)
    for at in range(0, len(names), _AT_ONCE):
        head.label_nodes({name: dict(labels[name]) for name in names[at : at + _AT_ONCE]})
