"""As much of S3 as `benchmarks.checkpoints` needs, in memory and without checks, so that the store is not the bound: `memory_store PORT`."""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape


class Handler(BaseHTTPRequestHandler):
    """PUT, GET and a list of all objects below a prefix."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytearray]] = {}

    def do_PUT(self) -> None:
        """Keep an object."""
        body = bytearray(int(self.headers["Content-Length"] or 0))
        view = memoryview(body)
        while view and (number := self.rfile.readinto(view)):
            view = view[number:]
        path = urlsplit(self.path).path
        known = path in self.objects and self.headers.get("If-None-Match") == "*"
        if not known:
            self.objects[path] = body
        self._answer(412 if known else 200, b"", ETag=_tag(body))

    def do_GET(self) -> None:
        """Return an object, or the list."""
        address = urlsplit(self.path)
        asked = parse_qs(address.query)
        if "list-type" in asked:
            bucket = address.path.rstrip("/") + "/"
            prefix = bucket + asked.get("prefix", [""])[0]
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            found = "".join(
                f"<Contents><Key>{escape(path.removeprefix(bucket))}</Key><LastModified>{at}</LastModified>"
                f"<ETag>{_tag(body)}</ETag><Size>{len(body)}</Size></Contents>"
                for path, body in sorted(self.objects.items())
                if path.startswith(prefix)
            )
            self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())
        elif address.path in self.objects:
            body = self.objects[address.path]
            self._answer(200, body, ETag=_tag(body), **{"Last-Modified": self.date_time_string()})
        else:
            self._answer(404, b"")

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, status: int, body: bytes | bytearray, **headers: str) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


def _tag(body: bytes | bytearray) -> str:
    return f'"{len(body)}"'


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
