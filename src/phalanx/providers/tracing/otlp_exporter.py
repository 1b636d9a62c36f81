"""The span exporter on the OpenTelemetry SDK: OTLP over HTTP with protobuf. The SDK is the extra `otel`, imported at the first export."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from phalanx.core.accounting.job_trace import JobSpan
from phalanx.core.errors import BadRequest, TryLater

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TIMEOUT_S: Final = 10.0  # of one export, with the SDK's own retries
_PATH: Final = "/v1/traces"
_EXAMPLE: Final = "use http://HOST:4318 or https://HOST"
_INSTALL: Final = "pip install '.[otel]' in the checkout"
_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_SDK_LOGGER: Final = logging.getLogger("opentelemetry")
_REASON_MAX: Final = 200


def check_endpoint(url: str) -> str:
    """Return the URL to which spans are posted; OpenTelemetry's path is added to a base URL.

    Raises:
        BadRequest: it is no such URL, or the packages are missing.
    """
    refusal = BadRequest("--otlp is not the URL of a collector", hint=_EXAMPLE)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise refusal from error
    if not valid or not url.isascii() or not url.isprintable() or any(mark in url for mark in " ?#"):
        raise refusal
    if parts.username is not None:
        raise BadRequest(
            "--otlp contains a user or password, which every user of this machine can read in the process list",
            hint="set OTEL_EXPORTER_OTLP_HEADERS in the environment of the head",
        )
    if not all(_installed(name) for name in _PACKAGES):
        raise BadRequest("--otlp needs the packages of OpenTelemetry", hint=_INSTALL)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


class OtlpExporter:
    """See the port. Headers and certificates come from the standard variables OTEL_EXPORTER_OTLP_*."""

    def __init__(self, endpoint: str, version: str) -> None:
        self._endpoint, self._version = endpoint, version
        self._exporter: Any = None
        self._log = _LastMessage()

    def export(self, spans: Sequence[JobSpan]) -> None:
        """Send spans.

        Raises:
            TryLater: the collector did not accept them.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter is None:
            self._exporter = self._open()
        self._log.text = ""
        try:
            result = self._exporter.export([self._span(span) for span in spans])
        except Exception as error:  # the SDK's transport may raise anything
            raise TryLater(f"the collector of traces: {type(error).__name__}") from error
        if result is not SpanExportResult.SUCCESS:
            raise TryLater(f"the collector of traces did not accept spans: {self._log.text or 'no reason given'}")

    def _open(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        _SDK_LOGGER.propagate = False  # its lines become the reason of one line of ours
        _SDK_LOGGER.addHandler(self._log)
        return OTLPSpanExporter(endpoint=self._endpoint, timeout=TIMEOUT_S, compression=Compression.Gzip)

    def _span(self, span: JobSpan) -> ReadableSpan:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(span_id: int) -> SpanContext:
            return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent_id) if span.parent_id else None,
            resource=Resource({"service.name": "phalanx", "service.version": self._version}),
            attributes=dict(span.attributes),
            events=[Event(event.name, {"phalanx.text": event.text}, event.at_ns) for event in span.events],
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope("phalanx", self._version),
        )


class _LastMessage(logging.Handler):
    """Keeps the newest message of the SDK, in one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.text = " ".join(record.getMessage().split())[:_REASON_MAX]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
