"""The security middleware: limits and checks of every request, on the ASGI level."""

# mypy: disable-error-code="arg-type"

import asyncio
from typing import Any

import pytest

from phalanx.api.http.security import SecurityMiddleware

HOST = (b"host", b"127.0.0.1:7600")
SCOPE = {"path": "/v1/me", "raw_path": b"/v1/me", "query_string": b""}


async def served(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def middleware(app: Any) -> SecurityMiddleware:
    return SecurityMiddleware(app, hosts_allowed=frozenset({"127.0.0.1", "localhost", "[::1]"}))


def sent(*headers: tuple[bytes, bytes], kind: str = "http", scheme: str = "http", app: Any = served) -> list[Any]:
    """The messages that the middleware sends for one request."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    method = {"method": "GET"} if kind == "http" else {}
    asyncio.run(
        middleware(app)({**SCOPE, **method, "type": kind, "scheme": scheme, "headers": list(headers)}, None, send)
    )
    return messages


def status(*headers: tuple[bytes, bytes], scheme: str = "http") -> int:
    found: int = sent(*headers, scheme=scheme)[0]["status"]
    return found


def test_head_of_a_request_is_limited_to_64_kib_as_a_whole():
    def head_of(total: int) -> int:
        fixed = len("GET /v1/me? HTTP/1.1\r\nhost: 127.0.0.1:7600\r\nx-a: \r\nx-b: \r\n\r\n")
        return status(HOST, (b"x-a", b"a" * 40_000), (b"x-b", b"b" * (total - fixed - 40_000)))

    assert [head_of(1 << 16), head_of((1 << 16) + 1), head_of(70_000)] == [200, 431, 431]


@pytest.mark.parametrize(
    ("scheme", "host", "origin", "allowed"),
    [
        ("http", b"127.0.0.1:7600", b"http://127.0.0.1:7600", True),
        ("http", b"LOCALHOST:7600", b"http://localhost:7600", True),
        ("http", b"localhost", b"http://localhost:80", True),
        ("https", b"localhost:443", b"https://localhost", True),
        ("http", b"[::1]:7600", b"http://[::1]:7600", True),
        ("http", b"127.0.0.1:7600", b"http://127.0.0.1:3000", False),
        ("http", b"127.0.0.1:7600", b"http://127.0.0.1", False),
        ("http", b"127.0.0.1:7600", b"https://127.0.0.1:7600", False),
        ("http", b"127.0.0.1:7600", b"http://localhost:7600", False),
        ("http", b"127.0.0.1:7600", b"http://127.0.0.1:99999", False),
        ("http", b"127.0.0.1:7600", b"http://x@127.0.0.1:7600", False),
        ("http", b"127.0.0.1:7600", b"null", False),
    ],
)
def test_origin_must_have_the_scheme_host_and_port_of_the_request(scheme, host, origin, allowed):
    assert status((b"host", host), (b"origin", origin), scheme=scheme) == (200 if allowed else 403)


def test_two_authorization_headers_are_refused():
    token = (b"authorization", b"Bearer x")
    assert [status(HOST, token), status(HOST, token, token)] == [200, 400]


async def unreached(*_: Any) -> None:
    pytest.fail("the app was called")


@pytest.mark.parametrize(
    ("scheme", "origin", "allowed"),
    [
        ("ws", b"http://127.0.0.1:7600", True),
        ("wss", b"https://127.0.0.1:7600", True),
        ("ws", b"https://127.0.0.1:7600", False),
        ("ws", b"http://evil.example", False),
        ("ws", b"null", False),
    ],
)
def test_websocket_passes_the_checks_of_a_request(scheme, origin, allowed):
    async def accepting(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    first = sent(HOST, (b"origin", origin), kind="websocket", scheme=scheme, app=accepting if allowed else unreached)[0]
    assert first["type"] == ("websocket.accept" if allowed else "websocket.http.response.start")
    assert first.get("status", 101) == (101 if allowed else 403)
    assert allowed or (b"x-content-type-options", b"nosniff") in first["headers"]


def test_an_invalid_response_is_an_internal_error_in_json():
    """The server refuses to send such a head. The middleware took that for a caller that had left, and logged no cause."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        if any(b"\n" in value for _, value in message.get("headers", ())):
            raise RuntimeError("a header of the response is invalid")
        messages.append(message)

    async def failing(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\nb")]})

    asyncio.run(
        middleware(failing)({**SCOPE, "type": "http", "method": "GET", "scheme": "http", "headers": [HOST]}, None, send)
    )
    assert messages[0]["status"] == 500
    assert (b"x-content-type-options", b"nosniff") in messages[0]["headers"]
    assert b"failed inside the head" in messages[1]["body"]


def test_other_kinds_of_connections_do_not_reach_the_app():
    assert sent(HOST, kind="webtransport", app=unreached) == []


def test_lifespan_reaches_the_app():
    reached: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        reached.append(scope["type"])

    sent(kind="lifespan", app=app)
    assert reached == ["lifespan"]
