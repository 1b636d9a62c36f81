"""Notices of clouds, read from metadata services that answer as their documents say: plain HTTP servers here."""

# mypy: disable-error-code="union-attr, var-annotated, no-untyped-def"

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.node.probes.spot_notices import LOOK_S, SILENT_LOOK_S, SpotNotices, fetch_from, notices_of, read_ec2

NOTICE = {"action": "terminate", "time": "2026-11-28T08:22:00Z"}
AZURE = {"DocumentIncarnation": 1, "Events": [{"EventId": "1", "EventType": "Preempt", "EventStatus": "Scheduled"}]}


class Metadata:
    """A metadata service on loopback. `answers`: status and body by path; `needs`: the header that each request must have."""

    def __init__(self):
        self.answers, self.needs, self.asked = {}, ("", ""), []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                outer.asked.append((self.command, self.path))
                name, value = outer.needs
                if self.command == "PUT":
                    status, body = (
                        (200, "the-token") if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else (400, "")
                    )
                elif name and self.headers.get(name) != value:
                    status, body = 401, ""
                else:
                    status, body = outer.answers.get(self.path, (404, "no"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self):
                self.answer()

            def do_PUT(self):
                self.answer()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def metadata():
    made = Metadata()
    yield made
    made.server.shutdown()
    made.server.server_close()


EC2, GOOGLE, SCHEDULED = (
    "/latest/meta-data/spot/instance-action",
    "/computeMetadata/v1/instance/",
    "/metadata/scheduledevents?api-version=2020-07-01",
)
CLOUDS = [
    ("aws", ("X-aws-ec2-metadata-token", "the-token"), {}, {EC2: (200, json.dumps(NOTICE))}, "terminate at 2026-11-28"),
    (
        "google",
        ("Metadata-Flavor", "Google"),
        {f"{GOOGLE}preempted": (200, "FALSE"), f"{GOOGLE}maintenance-event": (200, "NONE")},
        {f"{GOOGLE}preempted": (200, "TRUE")},
        "within 30 s",
    ),
    (
        "google",
        ("Metadata-Flavor", "Google"),
        {f"{GOOGLE}preempted": (200, "FALSE"), f"{GOOGLE}maintenance-event": (200, "MIGRATE_ON_HOST_MAINTENANCE")},
        {f"{GOOGLE}maintenance-event": (200, "TERMINATE_ON_HOST_MAINTENANCE")},
        "maintenance of its host",
    ),
    (
        "azure",
        ("Metadata", "true"),
        {SCHEDULED: (200, json.dumps({"Events": [{"EventType": "Freeze", "EventStatus": "Scheduled"}]}))},
        {SCHEDULED: (200, json.dumps(AZURE))},
        "Preempt",
    ),
]


@pytest.mark.parametrize(("cloud", "needs", "calm", "ends", "text"), CLOUDS)
def test_each_cloud_says_so_in_its_own_way(metadata, cloud, needs, calm, ends, text):
    metadata.needs, metadata.answers = needs, dict(calm)
    notices = notices_of(cloud, metadata.url)
    now_s = 100.0
    assert not notices.look(now_s)
    metadata.answers.update(ends)
    assert not notices.look(now_s + LOOK_S - 0.1), "not asked again so soon"
    assert text in notices.look(now_s + LOOK_S)
    metadata.answers.clear()
    assert text in notices.look(now_s + 60.0), "a notice stays"


@pytest.mark.parametrize("answer", [(500, ""), (200, "not json"), (200, "[]")])
def test_a_service_that_answers_otherwise_is_no_notice_and_asked_seldom(metadata, answer):
    metadata.answers[EC2] = answer
    notices = SpotNotices(read=read_ec2, fetch=fetch_from(metadata.url))
    assert not notices.look(0.0)
    asked = len(metadata.asked)
    assert not notices.look(LOOK_S)
    assert len(metadata.asked) == asked
    assert not notices.look(SILENT_LOOK_S)
    assert len(metadata.asked) > asked


def test_a_machine_without_such_a_service_goes_on():
    notices = SpotNotices(read=read_ec2, fetch=fetch_from("http://127.0.0.1:9"))
    assert not notices.look(0.0)
    assert notices_of("", "http://127.0.0.1:9") is None
