"""Uploads that crawl, that come from many hands, or whose sender loses the right meanwhile: none keeps a place for long."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import contextlib
import hashlib
import select
import socket
from urllib.parse import urlsplit

import pytest

from phalanx.api.routes import blobs
from phalanx.core.state.events import RevokeToken
from tests.contract.api_head import TOKENS, bearer, code, token_of, until

DATA = b"a working directory"
PATH = f"/v1/blobs/{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture(autouse=True)
def _no_upload_is_left():
    yield
    until(lambda: not blobs._uploads_by_user)


@contextlib.contextmanager
def begun(call, role, size=1 << 20):
    """An upload of which one byte has come."""
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as link:
        lines = [f"PUT {PATH} HTTP/1.1", f"Host: {where.netloc}", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in bearer(role).items()]
        before = sum(blobs._uploads_by_user.values())
        link.sendall("\r\n".join(lines).encode() + b"\r\n\r\na")
        until(lambda: sum(blobs._uploads_by_user.values()) > before)
        yield link


def test_an_upload_of_a_byte_now_and_then_is_ended(head, call):
    """Found by reading: eight that sent a byte every 59 s held all places for as long as they liked."""
    with begun(call, "user") as link:
        for _ in range(100):
            head.clock.ahead_s += 50.0
            link.sendall(b"a")
            if select.select([link], [], [], 0.05)[0]:
                break
        said = b""
        while b"an upload must send 64" not in said and (piece := link.recv(65536)):  # head and body may come apart
            said += piece
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"an upload must send 64" in said


def test_an_upload_ends_soon_after_its_token_does(head, call, monkeypatch):
    """Found by reading: an upload was judged when it began, and then went on with a revoked token."""
    monkeypatch.setattr(blobs, "_REAUTHORIZE_S", 0.05)
    with begun(call, "user") as link:
        head.ask(RevokeToken(token_id=token_of("ada", TOKENS["user"]).id))
        assert link.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_one_user_leaves_places_for_others(head, call):
    """Found by reading: one user's uploads could take all places."""
    with contextlib.ExitStack() as stack:
        for _ in range(blobs.UPLOADS_PER_USER_MAX):
            stack.enter_context(begun(call, "user"))
        assert code(call("user", "PUT", PATH, content=DATA)) == (503, "try_later")
        assert call("other", "PUT", PATH, content=DATA).status_code == 200
