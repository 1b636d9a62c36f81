"""What an autoscaler says of pods that wait for a node: the events that Cluster Autoscaler and Karpenter write about them.

Cluster Autoscaler writes `TriggeredScaleUp` and `NotTriggerScaleUp` with the source `cluster-autoscaler`. Karpenter, and what is built of
it, writes `Nominated` when it starts a node, and `FailedScheduling` when it cannot; the scheduler writes the latter too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.engines.kubernetes.errors import KubernetesError
from phalanx.engines.kubernetes.parse import one_line
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath

EVERY_S: Final = 10.0  # between two lists of events
FORBIDDEN_S: Final = 600.0  # after a refusal, until the right is tried again
_SCHEDULER: Final = "default-scheduler"
_GROWS: Final = frozenset({"TriggeredScaleUp", "Nominated"})
_REFUSES: Final = frozenset({"NotTriggerScaleUp", "FailedScheduling"})
_SELECTOR: Final = "involvedObject.kind=Pod"
_log = logging.getLogger("phalanx.engines.kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerNote:
    """The last word of an autoscaler about a pod. `grows`: it starts a node for it; `at`: when, as the event has it."""

    grows: bool
    source: str
    text: str
    at: str

    def __str__(self) -> str:
        """In words."""
        return f"{self.source} starts a node: {self.text}" if self.grows else f"{self.source} starts none: {self.text}"


@dataclass(slots=True, kw_only=True)
class AutoscalerNotes:
    """Reads the events of one namespace while pods wait there. Without the right to list events, nothing is known.

    Attributes:
        found: the last note about each pod, by the pod's name, as it was read last.
    """

    api: KubernetesApi
    namespace: str
    found: Mapping[str, AutoscalerNote] = field(default_factory=dict)
    _due_s: float = 0.0

    def read(self) -> Mapping[str, AutoscalerNote]:
        """Return the last note about each pod, by the pod's name. The server is asked at most each `EVERY_S`."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            try:
                path = ResourcePath("events", namespace=self.namespace)
                self.found = notes_of(self.api.list(path, fields=_SELECTOR))
            except PhalanxError as error:
                _log.info("what an autoscaler says of waiting pods is unknown: %s", error)
                forbidden = isinstance(error, KubernetesError) and error.is_forbidden
                self.found, self._due_s = {}, now_s + (FORBIDDEN_S if forbidden else EVERY_S)
        return self.found


def notes_of(events: Iterable[Mapping[str, Any]]) -> dict[str, AutoscalerNote]:
    """Return the newest note about each pod in a list of events."""
    found: dict[str, AutoscalerNote] = {}
    for event in events:
        reason = str(event.get("reason") or "")
        source = str((event.get("source") or {}).get("component") or event.get("reportingComponent") or "")
        if reason not in _GROWS | _REFUSES or source == _SCHEDULER:
            continue
        series = event.get("series") or {}
        times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
        at = max((str(one) for one in times if one), default="")
        pod = str((event.get("involvedObject") or {}).get("name") or "")
        text = one_line(event.get("message")) or reason
        if pod not in found or at >= found[pod].at:
            found[pod] = AutoscalerNote(grows=reason in _GROWS, source=source or "an autoscaler", text=text, at=at)
    return found


def notes_in_words(names: Iterable[str], notes: Mapping[str, AutoscalerNote]) -> str:
    """Return what autoscalers say of these pods, each thing once; empty if nothing."""
    return "; ".join(dict.fromkeys(str(notes[name]) for name in names if name in notes))
