"""What the gateway counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from phalanx.gateway.services import ServiceTable

M = TypeVar("M", Counter, Gauge, Histogram)
_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        named = ("service",)
        self._requests = Counter(
            "phalanx_gateway_requests", "Requests by status.", ("service", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "phalanx_gateway_request_seconds",
            "Time from a request to the end of its answer.",
            named,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "phalanx_gateway_tokens",
            "Tokens of prompts and answers.",
            ("service", "project", "kind"),
            registry=self._registry,
        )
        self._flight = Gauge("phalanx_gateway_in_flight", "Requests under way.", named, registry=self._registry)
        self._waits = Counter(
            "phalanx_gateway_waits", "Requests that waited for a replica.", named, registry=self._registry
        )
        self._broken = Counter(
            "phalanx_gateway_broken", "Answers that ended with their replica.", named, registry=self._registry
        )
        self._continued = Counter(
            "phalanx_gateway_continued",
            "Streams that went on at another replica: from their tokens, or by repetition.",
            ("service", "how"),
            registry=self._registry,
        )
        self._prefills = Counter(
            "phalanx_gateway_prefills",
            "Prompts by where they were read: at a replica for prompts, or at that of the answer because none was free or it failed.",
            ("service", "how"),
            registry=self._registry,
        )
        self._waiting = Gauge(
            "phalanx_gateway_waiting", "Requests that wait for a replica.", named, registry=self._registry
        )
        self._ready = Gauge("phalanx_gateway_replicas", "Replicas that are ready.", named, registry=self._registry)

    def _child(self, metric: M, *labels: str) -> M:
        """Return the series of these labels. The library's own look-up costs as much as counting."""
        key = (metric, labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = metric.labels(*labels)
        return cast("M", found)

    @contextmanager
    def in_flight(self, service: str) -> Iterator[None]:
        """Count a request while it is under way."""
        gauge = self._child(self._flight, service)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def answered(self, service: str, status: int, seconds: float) -> None:
        """Count an answer of a replica."""
        self._child(self._requests, service, str(status)).inc()
        self._child(self._seconds, service).observe(seconds)

    def refused(self, service: str, status: int) -> None:
        """Count an answer of the gateway itself. `service`: "" before it is known."""
        self._requests.labels(service, str(status)).inc()

    def tokens(self, service: str, project: str, prompt: int, answer: int) -> None:
        """Count the tokens of an answer."""
        self._child(self._tokens, service, project, "prompt").inc(prompt)
        self._child(self._tokens, service, project, "answer").inc(answer)

    def waits(self, service: str) -> None:
        """Count a request that had to wait."""
        self._waits.labels(service).inc()

    def broken(self, service: str) -> None:
        """Count an answer that ended in its middle."""
        self._broken.labels(service).inc()

    def continued(self, service: str, how: str) -> None:
        """Count a stream that went on at another replica."""
        self._continued.labels(service, how).inc()

    def prefilled(self, service: str, how: str) -> None:
        """Count a prompt: `read` at a replica for prompts, else why not."""
        self._prefills.labels(service, how).inc()

    def text(self, table: ServiceTable) -> bytes:
        """Return all of them."""
        self._waiting.clear()
        self._ready.clear()
        for name, service in table.services.items():
            self._waiting.labels(name).set(len(service.waiting))
            self._ready.labels(name).set(len(service.replicas))
        return generate_latest(self._registry)
