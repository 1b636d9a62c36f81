"""The history of a job or node: one line for each event, with its cause. Append-only and without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.ids import Epoch, JobId, NodeId

HistoryFacts = Mapping[str, str | int | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One line. `seq` is dense over all lines of a head, assigned at commit; `kind` is a machine-readable word, `text` a sentence."""

    seq: int
    at_s: float
    kind: str
    text: str
    job_id: JobId | None = None
    epoch: Epoch | None = None
    node_id: NodeId | None = None
    by: str = ""
    facts: dict[str, str | int | float | None] = field(default_factory=dict)
