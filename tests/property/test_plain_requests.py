"""Requests that are read without h11 are read as h11 reads them, and answered with the bytes that uvicorn and h11 would send, whatever the pieces."""

import asyncio
from itertools import pairwise

import h11
import hypothesis.strategies as st
import pytest
import uvicorn
from hypothesis import example, given
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.api.http import timeouts
from phalanx.api.http.plain_cycle import PlainCycle
from phalanx.api.http.plain_requests import read_plain_head
from phalanx.api.http.timeouts import ReadTimeoutProtocol

LINES = (
    b"Host: a",
    b"host:a:1",
    b"HOST: \t b \t",
    b"Accept: application/json",
    b"Authorization: Bearer x.y-z",
    b"Connection: keep-alive",
    b"Connection: close",
    b"Connection: Keep-Alive, Upgrade",
    b"Upgrade: websocket",
    b"Expect: 100-continue",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 3",
    b"content-length: 03",
    b"Content-Length: 3, 3",
    b"Content-Length: -3",
    b"Content-Length: \xb3",
    b"Content-Length: 99999999999999999999",
    b"Content-Length:",
    b"X: \x80\xff",
    b"X: \x00",
    b"X: \x0b",
    b"X: \x7f",
    b"X: \x01",
    b"X: a\rb",
    b"X : a",
    b" folded",
    b"\tfolded",
    b": empty",
    b"",
    b"no colon",
)
FIRST = st.one_of(
    st.just(b"POST /v1/jobs HTTP/1.1"),
    st.builds(
        lambda method, target, version: method + b" " + target + b" " + version,
        st.sampled_from((b"GET", b"POST", b"PUT", b"HEAD", b"get", b"M-SEARCH")),
        st.sampled_from((b"/", b"/a?b=c&d", b"/%2e%00", b"*", b"http://a/b", b"/\x80", b"/a b", b"/\x7f", b"//")),
        st.sampled_from((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ")),
    ),
)
BYTES = st.builds(
    lambda first, lines, end, body: end.join([first, *lines, b"", b""]) + body,
    FIRST,
    st.lists(st.sampled_from(LINES), max_size=6),
    st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n")),
    st.sampled_from((b"", b"abc", b"abcd", b"GET / HTTP/1.1\r\n")),
)


@given(BYTES)
@example(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc")
@example(b"GET /v1/jobs?a=b HTTP/1.1\r\nhOsT:\ta:1 \r\n\r\n")
def test_what_is_read_without_h11_is_what_h11_reads(data):
    found = read_plain_head(data)
    if found is None:
        return
    judge = h11.Connection(h11.SERVER)
    judge.receive_data(data)
    event = judge.next_event()
    assert isinstance(event, h11.Request)
    assert (found.method, found.target, found.headers) == (event.method, event.target, list(event.headers))
    body, ended = b"", False
    while not ended and (event := judge.next_event()) is not h11.NEED_DATA:
        assert isinstance(event, (h11.Data, h11.EndOfMessage))
        ended = isinstance(event, h11.EndOfMessage)
        body += b"" if ended else event.data
    assert body == data[found.size : found.size + found.length]
    assert ended == (len(data) >= found.size + found.length)


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: \x80\r\n\r\n",
    ],
)
def test_plain_requests_are_read_without_h11(data):
    assert read_plain_head(data) is not None
    assert read_plain_head(data[:-1]) is None


# ---- whole connections ------------------------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A transport that notes what is written."""

    def __init__(self):
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data):
        assert not self.closed or not data
        self.sent += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def echo(scope, receive, send):
    """Answer with what has arrived, as the path says."""
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    length = [(b"content-length", b"%d" % len(body))]
    match scope["path"]:
        case "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
            for piece in (body, b"", b"more"):
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        case "/none":
            await send({"type": "http.response.start", "status": 204})
            await send({"type": "http.response.body"})
        case "/close":
            await send({"type": "http.response.start", "status": 413, "headers": [*length, (b"connection", b"close")]})
            await send({"type": "http.response.body", "body": body})
        case "/fails":
            raise ValueError("as it should")
        case "/breaks":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c"), *length]})
        case "/short":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"12"})
        case _:
            await send({"type": "http.response.start", "status": 200, "headers": length})
            await send({"type": "http.response.body", "body": body[:1], "more_body": True})
            await send({"type": "http.response.body", "body": body[1:]})


async def answered(kind, pieces):
    """What a protocol sends to these pieces, whether it closes the connection, and by which cycles it answers."""
    config = uvicorn.Config(echo, log_config=None, lifespan="off")
    config.load()
    state = uvicorn.Server(config).server_state
    protocol, wire = kind(config=config, server_state=state, app_state={}), Wire()
    protocol.connection_made(wire)
    cycles = []
    for piece in pieces:
        if wire.closed:
            break
        protocol.data_received(piece)
        cycles.append(type(protocol.cycle))
        for _ in range(8):
            await asyncio.sleep(0)
    closed = wire.closed  # the end of the connection closes it too
    protocol.connection_lost(None)
    await asyncio.gather(*state.tasks)
    return wire.sent, closed, cycles


def request(path, body=b"", more=b""):
    return b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (path, more, len(body), body)


PATHS = (b"/", b"/stream", b"/none", b"/early", b"/close")


@given(
    st.lists(
        st.builds(
            request,
            st.sampled_from(PATHS),
            st.binary(max_size=20),
            st.sampled_from((b"", b"", b"Expect: x\r\n", b"Connection: close\r\n")),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_a_connection_is_answered_as_by_uvicorn(requests, cuts):
    """Also a client that sends the next request early, or a head and a body in any pieces, or nothing that h11 can leave out."""
    data = b"".join(requests)
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert asyncio.run(answered(ReadTimeoutProtocol, pieces))[:2] == asyncio.run(answered(H11Protocol, pieces))[:2]


@pytest.mark.parametrize("path", PATHS)
def test_plain_requests_take_the_plain_way(path):
    _, _, cycles = asyncio.run(answered(ReadTimeoutProtocol, [request(path, b"abc")]))
    assert cycles == [PlainCycle]


@pytest.mark.parametrize(
    ("path", "begins"),
    [(b"/fails", b"HTTP/1.1 500"), (b"/breaks", b"HTTP/1.1 500"), (b"/short", b"")],
    ids=["fails", "header", "length"],
)
def test_a_handler_that_fails_closes_the_connection(path, begins):
    """No header can end another one, and no response is shorter or longer than its head says."""
    sent, closed, _ = asyncio.run(answered(ReadTimeoutProtocol, [request(path, b"abc")]))
    assert closed
    assert sent.startswith(begins)
    assert b"b: c" not in sent


@pytest.mark.parametrize(
    "head", [b"Content-Length: 10\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\na\r\n"], ids=["plain", "h11"]
)
def test_a_body_that_arrives_after_its_answer_leaves_no_timer_for_a_head(head, monkeypatch):
    """Found by attack: an idle connection got a 408 after 20 s, which its client took for the answer to its next request."""
    monkeypatch.setattr(timeouts, "REQUEST_HEAD_TIMEOUT_S", 0.0)
    rest = b"0123456789" + (b"\r\n0\r\n\r\n" if b"chunked" in head else b"")
    pieces = [b"POST /early HTTP/1.1\r\nHost: a\r\n" + head, rest, request(b"/", b"next")]
    sent, closed, _ = asyncio.run(answered(ReadTimeoutProtocol, pieces))
    assert (sent.count(b"HTTP/1.1 200"), sent.count(b"HTTP/1.1 408"), closed) == (2, 0, False)
