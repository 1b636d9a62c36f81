"""Requests whose very form is odd: what no client library would send."""

from __future__ import annotations

import gzip
import json
import random

from tests.hostile.asked import NOBODY, Asked
from tests.hostile.head import ADMIN
from tests.hostile.operations import EVERYBODY, Operation

BOMB = gzip.compress(b"\x00" * 50_000_000)  # 50 MB in 50 kB
METHODS = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "FOO",
    "G\u00c9T",
    "X" * 3000,
)
PATHS = (
    "/v1//jobs",
    "//v1/jobs",
    "/v1/jobs/",
    "/v1/./jobs",
    "/v1/../v1/jobs",
    "/v1/%2e%2e/v1/jobs",
    "/v1/jobs%2f1",
    "/v1/jobs%00",
    "/v1/jobs/%00",
    "/v1/jobs/%ff%fe",
    "/v1/jobs/%c0%ae",
    "/v1/jobs/%ed%a0%80",
    "/v1/jobs/%",
    "/v1/jobs/%zz",
    "/v1/jobs/1;x=y",
    "/v1/jobs#a",
    "/v1/jobs?",
    "/v1/jobs?&&&",
    "/v1/jobs?=",
    "/v1/jobs?limit",
    "/v1/jobs?limit=1&limit=2",
    "/V1/JOBS",
    "/v1/jobs/\xff",
    "*",
    "http://127.0.0.1/v1/jobs",
    "http://evil.example/v1/jobs",
    "/v1/jobs?limit=%31",
    "/v1/jobs?name=" + "a" * 40_000,
    "/v1/jobs/" + "9" * 20_000,
    "/v1/jobs?" + "&".join(f"a{n}=1" for n in range(5000)),
    "/v1/jobs?name=%u0041",
    "/v1/jobs?name=a+b%20c%2Bd",
    "/v1/jobs?before_seq=1e3",
    "/v1/jobs?before_seq=%D9%A1",
    "/v1/jobs?name=%00",
    "/v1/jobs?state=pending&state=pending",
    "/v1/jobs?user[]=a",
    "/v1/jobs?fold=maybe",
    "",
    "/static/../../etc/passwd",
    "/..%2f..%2fetc/passwd",
    "/metrics/..",
    "/v1/jobs/1/logs?cursor=1:2:3",
    "/v1/jobs/1/logs?cursor=" + "A" * 9000,
    "/v1/jobs/1/steps?after=-1",
    "/v1/jobs/1/files?path=../../..",
    "/v1/jobs/1/files?path=%00",
    "/v1/story?limit=9007199254740992",
    "/v1/story?after=9007199254740992",
    "/v1/jobs/1/logs?tail_bytes=9007199254740992",
    "/v1/events?after=9007199254740992x",
)
HEADERS = (
    "Content-Length: -1",
    "Content-Length: 1e3",
    "Content-Length: 5, 5",
    "Content-Length: \u0661",
    "Content-Length: " + "9" * 400,
    "Content-Length: +5",
    "Content-Length:",
    "Content-Length: 0\r\nContent-Length: 9",
    "Transfer-Encoding: chunked\r\nContent-Length: 4",
    "Transfer-Encoding: gzip",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding:\tchunked",
    "Host: evil.example",
    "Host: 127.0.0.1\r\nHost: 127.0.0.1",
    "Host :x",
    "X Y: 1",
    ": empty",
    "no colon at all",
    " folded: 1",
    "X-Nul: a\x00b",
    "X-Bare: a\rb",
    "X-High: \xff\xfe",
    "X-Long: " + "a" * 70_000,
    "\r\n".join(f"X-{n}: 1" for n in range(400)),
    "Authorization: Basic YTpi",
    "Authorization: Bearer",
    "Authorization: Bearer \xe9",
    "Authorization: Bearer phxn.n0.00",
    "Authorization: Bearer phxj.1.2.3",
    "Authorization: Bearer phxn." + "." * 500,
    "Authorization: Bearer " + "a" * 50_000,
    "Authorization: Bearer {token}\r\nAuthorization: Bearer x",
    "Origin: null",
    "Origin: http://evil.example",
    "Origin: http://[bad",
    "Origin: " + "a" * 9000,
    "Expect: 100-continue",
    "Expect: 200-ok",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
    "Connection: close, keep-alive",
    "Connection: \x01",
    "Range: bytes=0-,0-,0-",
    "If-Modified-Since: never",
    "Last-Event-ID: -1",
    "Last-Event-ID: " + "9" * 5000,
    "Last-Event-ID: 1 2",
    "Idempotency-Key: " + "k" * 5000,
    "Idempotency-Key: \xff",
    "Idempotency-Key:",
    "X-Forwarded-For: 1.2.3.4",
    "X-HTTP-Method-Override: DELETE",
    "Cookie: " + "a=b; " * 3000,
    "Accept-Encoding: gzip;q=x",
    "Content-Type: application/json; charset=nonsense",
    "Content-Type: \x7f",
    "Accept: " + ",".join("a/b" for _ in range(2000)),
)
VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "HTTP/9999.1", "http/1.1", "HTTP/1.1 extra", "", "HTTP/")
CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;x=y\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"-1\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"5\r\nhel",
    b"5\r\nhelloworld\r\n0\r\n\r\n",
    b"1\r\n{\r\n" * 500 + b"0\r\n\r\n",
    b"5" + b"0" * 200 + b"\r\nhello",
    b"5;" + b"x" * 70_000 + b"\r\nhello\r\n0\r\n\r\n",
    b"\r\n",
    b"0\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
)
BLOBS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
    b"GET",
    b"GET /\r\n",
    b"GET / HTTP/1.1\nHost: {host}\n\n",
    b"SSH-2.0-x\r\n",
    b"\xff" * 1000,
    b"GET /v1/health HTTP/1.1\r\nHost: {host}\r\n\r\n" * 30,
    b"A" * 100_000,
)


def wire(operation: Operation, names: dict[str, str], rng: random.Random) -> Asked:
    """A request with an odd form, about the operation where it is about one."""
    role = NOBODY if operation.id == "stop_head" else rng.choice((ADMIN, operation.role(rng), rng.choice(EVERYBODY)))
    target = operation.target(names, operation.good.query)
    body = (
        operation.good.body
        if isinstance(operation.good.body, bytes)
        else json.dumps(operation.good.body).encode()
        if operation.good.body is not None
        else b""
    )
    method, version, extra, ends, odd = operation.method, "HTTP/1.1", "", True, ""
    match rng.randrange(10):
        case 0:
            method = odd = rng.choice(METHODS)
            if operation.id == "stop_head":
                body = b"[]"
        case 1 | 2:
            target = odd = rng.choice(PATHS)
            method = rng.choice((method, "GET", "GET"))
        case 3 | 4 | 5:
            extra = odd = rng.choice(HEADERS)
        case 6:
            version = odd = rng.choice(VERSIONS)
        case 7:
            chunks = rng.choice(CHUNKS)
            return _asked(
                operation,
                role,
                _head(method, target, version, "Transfer-Encoding: chunked") + chunks,
                f"chunks {chunks[:40]!r}",
            )
        case 8:
            blob = rng.choice(BLOBS)
            return _asked(operation, NOBODY, blob, f"no request {blob[:40]!r}")
        case _:
            body, extra = rng.choice(
                (
                    (BOMB, "Content-Encoding: gzip"),
                    (body[: len(body) // 2], f"Content-Length: {len(body) + 7}"),
                    (body, "Content-Type: application/xml"),
                    (b"--x\r\n\r\n--x--", "Content-Type: multipart/form-data; boundary=x"),
                )
            )
            odd = extra
    head = _head(
        method,
        target,
        version,
        *([extra] if extra else []),
        *([] if "ontent-Length" in extra or "ransfer" in extra else [f"Content-Length: {len(body)}"]),
    )
    return _asked(operation, role, head + body, odd[:80], ends=ends)


def _head(method: str, target: str, version: str, *headers: str) -> bytes:
    lines = [f"{method} {target} {version}".rstrip(" "), "Host: {host}", *headers]
    if not any(header.lower().startswith("authorization") for header in headers):
        lines.append("Authorization: Bearer {token}")
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n"


def _asked(operation: Operation, role: str, content: bytes, odd: str, *, ends: bool = True) -> Asked:
    # Half-closed at the end, so that the head need not wait for what never comes; a stream may be meant, so it is left soon.
    return Asked(
        source="wire",
        operation=operation.id,
        method="",
        role=role,
        wire=content,
        ends=ends,
        odd=odd,
        waits=b"/events" in content or b"follow" in content or b"wait_s" in content,
    )
