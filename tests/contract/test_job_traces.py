"""Traces of jobs reach a real receiver of OTLP over HTTP, once for each ended job, with the ids that a second export repeats."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import gzip
import logging
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.api.live import job_tracer
from phalanx.api.live.history_tail import newest_seq
from phalanx.api.live.job_tracer import JobTracer
from phalanx.api.services import JobTracing
from phalanx.core.errors import BadRequest, TryLater
from phalanx.providers.tracing import otlp_exporter
from phalanx.providers.tracing.otlp_exporter import OtlpExporter, check_endpoint
from phalanx.providers.tracing.position_file import PositionFile
from tests.contract.api_head import ApiHead, Supervisor, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed here")
SECRET = "s3cr3t-t0ken"


class Collector:
    """Keeps the spans that it was sent, and refuses while `status` says so."""

    def __init__(self):
        self.status, self.spans, self.requests, self.headers = 200, [], 0, {}
        self.free = threading.Event()  # cleared: it takes its time
        self.free.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
                collector.requests, collector.headers = collector.requests + 1, dict(self.headers)
                collector.free.wait(60)
                if collector.status == 200:
                    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                        collector.resource = facts(resource.resource)
                        collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def jobs(self):
        return [facts(span)["phalanx.job.id"] for span in self.spans if span.name == "job"]

    def close(self):
        self.free.set()
        self.server.shutdown()
        self.server.server_close()


def facts(one):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in one.attributes}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The SDK's own retries end soon, and its log is as in a new process."""
    monkeypatch.setattr(otlp_exporter, "TIMEOUT_S", 0.5)
    sdk = logging.getLogger("opentelemetry")
    monkeypatch.setattr(sdk, "propagate", True)
    monkeypatch.setattr(sdk, "handlers", [])


def tracer_of(head, collector, folder):
    position = PositionFile(str(folder / "trace_position"))
    exporter = OtlpExporter(check_endpoint(collector.url), "0.1.0")
    tracing = JobTracing(exporter=exporter, read_position=position.read, write_position=position.write)
    services = replace(head.parts, tracing=tracing)
    head.app.state.runtime.job_tracer = tracer = JobTracer(services, tracing, lambda: newest_seq(head.store))
    return tracer


@pytest.fixture
def tracer(head, collector, tmp_path):
    tracer = tracer_of(head, collector, tmp_path)
    tracer.step()  # begins with the jobs that end from now on
    return tracer


@pytest.fixture
def finish(head, call):
    """`finish()` runs a job to its end."""
    supervisor = Supervisor(call, devices=8)
    supervisor.hello()
    supervisor.lease()
    head.driver.leases.grant_long(1e9, math.inf)  # nobody renews here

    def finished(code=0):
        job = call.submit(retry=0)
        until(lambda: call("user", "GET", f"/v1/jobs/{job}").json()["job"]["state"] != "pending")
        supervisor.run(job)
        supervisor.end(job, code=code)
        until(lambda: head.store.job(job).state.terminal)
        return job

    return finished


def later(head, tracer):
    head.clock.ahead_s += 601.0
    tracer.step()


def test_an_ended_job_is_one_trace(head, call, finish, tracer, collector):
    done, failed = finish(), finish(code=3)
    tracer.step()
    assert collector.jobs() == [done, failed]
    assert collector.resource == {"service.name": "phalanx", "service.version": "0.1.0"}
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert [span.status.code for span in roots] == [0, 2]
    mine = [span for span in collector.spans if span.trace_id == roots[1].trace_id]
    assert {"job", "attempt", "preparing", "starting", "running"} <= {span.name for span in mine}
    assert facts(roots[1])["user.name"] == "ada"
    assert facts(roots[1])["process.exit.code"] == 3
    attempt = next(span for span in mine if span.name == "attempt")
    assert facts(attempt)["phalanx.attempt.end_cause"] == "failed"
    assert "running" in [event.name for event in attempt.events]
    ids = {span.span_id for span in mine}
    assert all(span.parent_span_id in ids for span in mine if span.parent_span_id)
    tracer.step()
    assert len(collector.jobs()) == 2
    text = call("viewer", "GET", "/metrics").text
    assert f"phalanx_trace_spans_exported_total {float(len(collector.spans))}" in text
    assert "phalanx_trace_jobs_dropped_total 0.0" in text


def test_headers_come_from_the_environment_and_are_in_no_message(
    head, finish, collector, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET}")
    tracer = tracer_of(head, collector, tmp_path)
    tracer.step()
    collector.status = 401
    finish()
    tracer.step()
    assert collector.headers["x-key"] == SECRET
    assert "401" in tracer.failure or "Unauthorized" in tracer.failure
    assert SECRET not in tracer.failure + caplog.text
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_a_collector_that_fails_is_asked_again_later(head, call, finish, tracer, collector):
    collector.status = 500
    job = finish()
    tracer.step()
    asked = collector.requests
    assert (collector.jobs(), tracer.pending) == ([], 1)
    assert "phalanx_trace_export_failing 1.0" in call("viewer", "GET", "/metrics").text
    tracer.step()  # too early
    assert collector.requests == asked
    collector.status = 200
    later(head, tracer)
    assert (collector.jobs(), tracer.pending, tracer.failure) == ([job], 0, "")


class Refusing:
    def export(self, spans):
        raise TryLater("away")


def test_a_collector_that_stays_away_costs_a_bounded_number_of_tries_and_jobs(head, call, finish, tracer, monkeypatch):
    tracer._tracing = replace(tracer._tracing, exporter=Refusing())
    finish()
    for _ in range(job_tracer.TRIES_MAX):
        assert tracer.dropped == 0
        later(head, tracer)
    assert (tracer.dropped, tracer.pending) == (1, 0)
    monkeypatch.setattr(job_tracer, "PENDING_MAX", 2)
    for _ in range(3):
        finish()
    tracer.step()
    assert (tracer.dropped, tracer.pending) == (2, 2)
    assert "phalanx_trace_jobs_dropped_total 2.0" in call("viewer", "GET", "/metrics").text


def test_no_collector_at_the_address_is_a_failure_with_a_reason(head, finish, collector, tmp_path):
    tracer = tracer_of(head, collector, tmp_path)
    tracer.step()
    collector.close()
    finish()
    tracer.step()
    assert tracer.pending == 1
    assert tracer.failure.startswith("the collector of traces did not accept spans: ")


def test_jobs_go_on_while_a_collector_takes_its_time(head, finish, tracer, collector, monkeypatch):
    collector.free.clear()
    first = finish()
    exporting = threading.Thread(target=tracer.step)
    exporting.start()
    until(lambda: collector.requests)
    second = finish()  # it ends although the collector answers nothing
    collector.free.set()
    exporting.join(timeout=60)
    later(head, tracer)
    assert set(collector.jobs()) == {first, second}


@contextmanager
def restarted(head, tmp_path):
    again = ApiHead(str(tmp_path / "again"), store=head.store, head_id="head-2")
    again.clock.ahead_s = head.clock.ahead_s
    try:
        yield again
    finally:
        again.close()


def test_a_head_that_starts_again_sends_what_was_not_sent(head, finish, tracer, collector, tmp_path):
    sent = finish()
    tracer.step()
    missed = finish()
    with restarted(head, tmp_path) as again:
        tracer_of(again, collector, tmp_path).step()
    assert collector.jobs() == [sent, missed]


def test_a_repeated_export_has_the_same_ids(head, finish, tracer, collector, tmp_path):
    position = PositionFile(str(tmp_path / "trace_position"))
    before = position.read()
    finish()
    tracer.step()
    first, collector.spans = collector.spans, []
    position.write(before)  # it stopped after the send
    with restarted(head, tmp_path) as again:
        tracer_of(again, collector, tmp_path).step()
    assert collector.spans == first


def test_a_job_with_odd_records_does_not_stop_the_others(head, finish, tracer, collector, monkeypatch):
    odd, job = finish(), finish()
    real = job_tracer.job_trace
    monkeypatch.setattr(job_tracer, "job_trace", lambda job, *more: 1 / 0 if job.id == odd else real(job, *more))
    tracer.step()
    assert (collector.jobs(), tracer.pending) == ([job], 0)


def test_the_thread_of_a_served_head_exports(collector, tmp_path, monkeypatch):
    monkeypatch.setattr(job_tracer, "TICK_S", 0.01)
    head = ApiHead(str(tmp_path / "head"))
    tracer = tracer_of(head, collector, tmp_path)
    with head.calling() as call:
        until(lambda: tracer._seq is not None)
        call("user", "POST", f"/v1/jobs/{call.submit()}/cancel", {})
        until(collector.jobs)
    assert tracer._closing.is_set()
    head.close()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/", "https://collector/otlp/v1/traces"),
        ("https://collector/v1/traces", "https://collector/v1/traces"),
    ],
)
def test_the_path_of_otlp_is_added_to_a_base_url(url, endpoint):
    assert check_endpoint(url) == endpoint


@pytest.mark.parametrize(
    ("url", "words"),
    [
        *(
            (url, "not the URL")
            for url in ("", "on", "grpc://h:4317", "http://", "http://h:x", "http://h:0", "http://h/?a", "http://h h")
        ),
        (f"https://user:{SECRET}@h", "user or password"),
    ],
)
def test_other_urls_are_refused_in_one_line(url, words):
    with pytest.raises(BadRequest, match=words) as refused:
        check_endpoint(url)
    assert SECRET not in refused.value.message + str(refused.value.hint)


def test_a_head_without_the_packages_names_the_extra(monkeypatch):
    monkeypatch.setattr(otlp_exporter, "_PACKAGES", ("opentelemetry.no_such.package",))
    with pytest.raises(BadRequest, match="needs the packages of OpenTelemetry") as refused:
        check_endpoint("http://h")
    assert "[otel]" in str(refused.value.hint)


@pytest.mark.parametrize("content", [None, b"", b"x", b"-5", b"\xff", b"9" * 100])
def test_a_missing_or_damaged_position_is_none_or_a_number(tmp_path, content):
    file = PositionFile(str(tmp_path / "position"))
    if content is not None:
        (tmp_path / "position").write_bytes(content)
    assert (file.read() or 0) >= 0
    file.write(7)
    assert file.read() == 7
