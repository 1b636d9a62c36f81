"""TEMPORARY transport until phalanx.client lands."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from phalanx.core.errors import BY_CODE, PhalanxError, Unreachable

T = TypeVar("T")


class ServerEvent(NamedTuple):
    name: str
    data: bytes
    id: str


class Head:
    def __init__(self, url: str, token: str, local: bool) -> None:
        self.url, self._token, self.local = url, token, local

    def _open(self, method, path, body=None, headers=None, timeout=30.0):
        parts = urlsplit(self.url)
        c = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        try:
            c.request(method, path, body=body, headers={"Authorization": f"Bearer {self._token}", **(headers or {})})
            r = c.getresponse()
        except OSError as e:
            raise Unreachable(f"the head at {self.url} does not answer: {e.strerror or e}", hint="phalanx up") from None
        if r.status >= 400:
            raw = r.read()
            try:
                e = json.loads(raw)["error"]
            except Exception:
                raise PhalanxError(f"{r.status} {raw[:200]!r}")
            raise BY_CODE.get(e["code"], PhalanxError)(e["message"], hint=e.get("hint", ""))
        return r

    def _query(self, path, query):
        q = {k: v for k, v in query.items() if v not in (None, "")}
        return quote(path) + ("?" + urlencode(q, doseq=True) if q else "")

    def _json(self, kind, method, path, body):
        import msgspec

        raw = None if body is None else (json.dumps(body).encode() if isinstance(body, dict) else msgspec.json.encode(_drop(body)))
        r = self._open(method, quote(path), raw, {"Content-Type": "application/json"})
        return msgspec.json.decode(r.read(), type=kind)

    def get(self, kind: type[T], path: str, /, **query: object) -> T:
        import msgspec

        return msgspec.json.decode(self._open("GET", self._query(path, query)).read(), type=kind)

    def post(self, kind: type[T], path: str, body: Any) -> T:
        return self._json(kind, "POST", path, body)

    def put(self, kind: type[T], path: str, body: Any) -> T:
        return self._json(kind, "PUT", path, body)

    def patch(self, kind: type[T], path: str, body: Any) -> T:
        return self._json(kind, "PATCH", path, body)

    def send(self, method: str, path: str, body: Any = None) -> None:
        import msgspec

        self._open(method, quote(path), None if body is None else msgspec.json.encode(body)).read()

    def submit(self, mapping: dict[str, object]) -> dict[str, Any]:
        r = self._open("POST", "/v1/jobs", json.dumps(mapping).encode(), {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)})
        return json.loads(r.read())

    def upload(self, sha256: str, file: IO[bytes], size: int) -> bool:
        try:
            self._open("HEAD", f"/v1/blobs/{sha256}").read()
            return False
        except PhalanxError:
            self._open("PUT", f"/v1/blobs/{sha256}", file, {"Content-Length": str(size)}).read()
            return True

    def events(self, path: str, /, *, cursor: str | None = None, **query: object) -> Iterator[ServerEvent]:
        r = self._open("GET", self._query(path, query), headers={"Accept": "text/event-stream", **({"Last-Event-ID": cursor} if cursor else {})}, timeout=3600)
        name, data, id_ = "", [], ""
        for line in r:
            line = line.decode().rstrip("\r\n")
            if not line:
                if name:
                    yield ServerEvent(name, "\n".join(data).encode(), id_)
                name, data = "", []
            elif line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].lstrip())
            elif line.startswith("id:"):
                id_ = line[3:].strip()

    @contextmanager
    def download(self, path: str, /, **query: object) -> Iterator[IO[bytes]]:
        yield self._open("GET", self._query(path, query))


def _drop(body):
    import msgspec

    return {k: v for k, v in msgspec.to_builtins(body).items() if v is not None}


def connect() -> Head:
    home = os.environ.get("PHALANX_HOME") or os.path.expanduser("~/.phalanx")
    url = os.environ.get("PHALANX_URL")
    local = not url
    if not url:
        try:
            url = json.load(open(os.path.join(home, "head.json")))["url"]
        except OSError:
            raise Unreachable("no head runs here", hint="phalanx up") from None
    token = os.environ.get("PHALANX_TOKEN")
    if not token:
        try:
            token = open(os.path.join(home, "token")).read().strip()
        except OSError:
            token = ""
    return Head(url, token, local)


def healthy(url: str) -> str:
    try:
        r = Head(url, "", True)._open("GET", "/v1/health", timeout=2)
        return json.loads(r.read())["head_id"]
    except PhalanxError:
        return ""
