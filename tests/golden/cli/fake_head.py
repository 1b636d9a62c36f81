"""A head made of canned views behind http.server: what the command line needs to be tried without a cluster."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from phalanx.core.work.job_file.launchers import known_task_count
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.wire.api.history import HistoryStatus
from phalanx.wire.api.jobs import JobList
from phalanx.wire.api.nodes import NodeList
from phalanx.wire.api.output import LogsReply
from phalanx.wire.api.people import TokenList, UserList, UserView
from phalanx.wire.api.queues import QueueList, QueueView
from tests.golden.cli import views

TOKEN = "right"


class FakeHead:
    """Answers on a port of its own; keeps every request. `refuse[path]` answers (status, code, message, hint) instead."""

    def __init__(self):
        self.requests = []
        self.refuse = {}
        self.log_events = []
        self.reservations = []
        self.reservation = {}
        self.detail = ""  # why its job ended so
        self.ran_s = 2.0
        self.on_stop = lambda: None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def sent(self, method, path):
        return [request for request in self.requests if request["method"] == method and request["path"] == path]

    def answer(self, method, path, body):
        detail = {
            "job": json.loads(views.encoded(views.training())),
            "attempts": json.loads(views.encoded(views.attempts())),
        }
        match method, path:
            case "GET", "/v1/health":
                return {"status": "ok", "version": "0.1.0", "head_id": "h1"}
            case "GET", "/v1/history":
                return HistoryStatus(problem="", size_bytes=1 << 20, stored_s=1.0, lost=0)
            case "GET", "/v1/heads":
                return {"heads": []}
            case "GET", "/v1/me":
                return {"user": "ada", "role": "admin", "token_id": "t1"}
            case "POST", "/v1/jobs":
                job = views.job(21, body.get("name") or "train.py", "pending")
                return {
                    "job": json.loads(views.encoded(job)),
                    "tasks": known_task_count(spec_from_mapping(body, workdir="/", now_s=0.0).role),
                    "notes": ["2 nodes x 8 = 16 GPUs", "16 tasks: 2 nodes x 8, one per GPU"],
                }
            case "GET", "/v1/jobs":
                return JobList(jobs=views.jobs())
            case "GET", "/v1/services":
                return {"services": []}
            case "GET", "/v1/nodes":
                return NodeList(nodes=views.nodes())
            case "GET", "/v1/overview":
                return views.overview()
            case "GET", "/v1/fleet":
                return views.fleet()
            case "GET", "/v1/users":
                return UserList(
                    users=[views.make(UserView, id="ada", role="admin"), views.make(UserView, id="bob", role="user")]
                )
            case "GET", "/v1/queues":
                return QueueList(queues=[views.make(QueueView, id="default", running=1)])
            case "GET", "/v1/reservations":
                return {"reservations": self.reservations}
            case "PUT", _ if path.startswith("/v1/reservations/"):
                return {"reservation": self.reservation}
            case "DELETE", _ if path.startswith("/v1/reservations/"):
                return {}
            case "GET", "/v1/tokens":
                return TokenList(tokens=[])
            case "POST", "/v1/stop":
                self.on_stop()
                return {"stopping": True, "running": 0}
            case "GET", _ if re.fullmatch(r"/v1/jobs/\d+/receipt", path):
                return views.usage()
            case "GET", _ if re.fullmatch(r"/v1/jobs/\d+/usage", path):
                return views.job_usage()
            case "GET", _ if re.fullmatch(r"/v1/jobs/\d+/story", path):
                return {"story": json.loads(views.encoded(views.history())), "last": 4}
            case "GET", _ if re.fullmatch(r"/v1/jobs/\d+/logs", path):
                return LogsReply(chunks=[], cursor="")
            case "GET", _ if re.fullmatch(r"/v1/jobs/\d+", path):
                return self.ended() if self.log_events else detail
            case "POST", _ if re.fullmatch(r"/v1/jobs/\d+/(cancel|hold|release|park|resume|requeue)", path):
                return {"job": detail["job"]}
            case "PATCH", _ if re.fullmatch(r"/v1/jobs/\d+", path):
                return {"job": detail["job"]}
            case _:
                return None

    def ended(self):
        end = self.log_events[-1][1]
        job = views.job(
            21,
            "train.py",
            end["state"],
            exit_code=end["exit_code"],
            detail=self.detail,
            started_s=views.NOW_S,
            ended_s=views.NOW_S + self.ran_s,
        )
        return {"job": json.loads(views.encoded(job)), "attempts": []}


def _handler_of(head):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._serve("GET")

        def do_POST(self):
            self._serve("POST")

        def do_PUT(self):
            self._serve("PUT")

        def do_PATCH(self):
            self._serve("PATCH")

        def do_DELETE(self):
            self._serve("DELETE")

        def _serve(self, method):
            path, _, query = self.path.partition("?")
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(raw) if raw else {}
            head.requests.append(
                {
                    "method": method,
                    "path": path,
                    "query": query,
                    "body": body,
                    "key": self.headers.get("Idempotency-Key"),
                    "at_s": time.monotonic(),
                }
            )
            if path in head.refuse:
                status, code, message, hint = head.refuse[path]
                self._reply(status, {"error": {"code": code, "message": message, "hint": hint, "retry": False}})
            elif path != "/v1/health" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._reply(
                    401,
                    {
                        "error": {
                            "code": "not_signed_in",
                            "message": "the token is unknown",
                            "hint": "phalanx tokens add",
                            "retry": False,
                        }
                    },
                )
            elif path.endswith("/logs") and "follow=1" in query:
                self._stream()
            else:
                found = head.answer(method, path, body)
                if found is None:
                    self._reply(
                        404, {"error": {"code": "not_found", "message": f"no {path}", "hint": "", "retry": False}}
                    )
                else:
                    self._reply(200, found)

        def _reply(self, status, value):
            payload = value if isinstance(value, bytes) else views.encoded(value)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def _stream(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for number, (kind, fields) in enumerate(head.log_events, start=1):
                self.wfile.write(f"id: {number}\nevent: {kind}\ndata: {json.dumps(fields)}\n\n".encode())
                self.wfile.flush()
            self.close_connection = True

        def log_message(self, *_):
            pass

    return Handler
