"""The client of chats before small servers of every temper, and the conversation at the prompt."""

import json
import socket
import threading
from contextlib import closing, contextmanager

import pytest

from phalanx.cli.serve.chat import _stats_text, chat
from phalanx.client.chat import ChatServer, ChatTimes, messages, read_event
from phalanx.core import errors

BODY = {"model": "chat", "messages": messages("be brief", [("user", "hi")])}


def event(**value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def word(text, **more):
    return event(choices=[{"delta": {"content": text}, **more}])


@contextmanager
def server(*answers, status="200 OK", headers=""):
    """Answers one request with these bytes, then closes. Yields its URL, the request's parts, and an event set once the client has left."""
    seen, left = [], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)

    def serve():
        with closing(listener), listener.accept()[0] as client:
            client.settimeout(30)
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            size = int(
                next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1]
            )
            while len(body) < size:
                body += client.recv(65536)
            seen.extend([head.decode(), json.loads(body)])
            client.sendall(f"HTTP/1.1 {status}\r\n{headers}\r\n".encode())
            for one in answers:
                if one is None:  # until the client leaves
                    while client.recv(1024):
                        pass
                    left.set()
                    return
                client.sendall(one)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen, left
    finally:
        thread.join(30)


def answer(url, key=""):
    times = ChatTimes()
    found = ChatServer(url=url, headers={"Authorization": key} if key else {})
    return list(found.ask(BODY, times)), times


def test_pieces_arrive_in_order_with_what_waits_and_what_was_counted():
    usage = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    events = (
        b": waiting for a replica of chat (starting), 3 before\n\n",
        event(choices=[{"delta": {"role": "assistant"}}]),
        event(choices=[{"delta": {"reasoning_content": "hm"}}]),
        word("a"),
        word("b", finish_reason="stop"),
        event(choices=[], usage=usage),
        b"data: [DONE]\n\n",
    )
    with server(*events) as (url, seen, _):
        pieces, times = answer(url, "Bearer phx_1")
    assert [one.waits for one in pieces if one.waits] == ["waiting for a replica of chat (starting), 3 before"]
    assert "".join(one.text for one in pieces) == "ab"
    assert "".join(one.thought for one in pieces) == "hm"
    assert (times.tokens, times.prompt_tokens, times.cached_tokens, times.finish) == (3, 9, 4, "stop")
    head, body = seen
    assert "Authorization: Bearer phx_1" in head
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert body["stream"] is True


def test_replica_gets_no_key():
    with server(word("a", finish_reason="stop")) as (url, seen, _):
        answer(url)
    assert "authorization" not in seen[0].lower()


def test_closing_an_answer_ends_the_request_at_the_server():
    with server(word("a"), None) as (url, _, left):
        stream = ChatServer(url=url).ask(BODY, ChatTimes())
        assert next(stream).text == "a"
        stream.close()
        assert left.wait(30)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("400 Bad", errors.BadRequest),
        ("401 No", errors.NotSignedIn),
        ("403 No", errors.NotPermitted),
        ("404 No", errors.NotFound),
        ("413 Large", errors.TooLarge),
        ("429 Many", errors.TryLater),
        ("500 Ouch", errors.Conflict),
        ("503 None", errors.TryLater),
    ],
)
def test_refusals_are_errors_of_their_kind(status, kind):
    body = json.dumps({"error": {"message": "the reason", "type": "x"}}).encode()
    headers = f"Content-Length: {len(body)}\r\nRetry-After: 7\r\n"
    with (
        server(body, status=status, headers=headers) as (url, _, _),
        pytest.raises(kind, match="the reason") as refused,
    ):
        answer(url)
    assert refused.value.hint == "try again in 7 s"


@pytest.mark.parametrize(
    "body", [b"<html>no</html>", b'{"detail": "no"}', b"[1]", b"", b'{"error": "no"}', b'{"error": 5}']
)
def test_refusals_in_no_form_at_all_are_still_errors(body):
    with (
        server(body, status="404 No", headers=f"Content-Length: {len(body)}\r\n") as (url, _, _),
        pytest.raises(errors.NotFound) as refused,
    ):
        answer(url)
    assert refused.value.message


@pytest.mark.parametrize(
    ("events", "kind", "match"),
    [
        ((word("a"),), errors.Unreachable, "broke off"),
        ((word("a"), event(error={"message": "the engine died"})), errors.TryLater, "the engine died"),
        ((b"data: {nonsense\n\n",), errors.Conflict, "not one of a chat"),
        ((b"data: []\n\n",), errors.Conflict, "not one of a chat"),
        ((b'data: {"choices": {"a": 1}}\n\n',), errors.Conflict, "not one of a chat"),
        ((b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',), errors.Conflict, "not one of a chat"),
    ],
)
def test_answers_that_break_off_or_are_none_are_errors(events, kind, match):
    with server(*events) as (url, _, _), pytest.raises(kind, match=match):
        answer(url)


def test_server_that_is_not_there_is_unreachable():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(errors.Unreachable, match=f"no answer from 127.0.0.1:{port}"):
        answer(f"http://127.0.0.1:{port}")


def test_rate_counts_the_tokens_after_the_first():
    times = ChatTimes(first_s=1.0, last_s=3.0, pieces=5, tokens=21, prompt_tokens=9, cached_tokens=4, finish="length")
    assert times.tokens_per_s == 10.0
    assert _stats_text(times) == (
        "first token after 1.00 s, 21 tokens in 3.00 s, 10.0 tokens/s, prompt 9 tokens, 4 of them cached, cut at its longest"
    )
    assert ChatTimes(first_s=1.0, last_s=1.0, pieces=1).tokens_per_s is None
    assert _stats_text(ChatTimes()) == "no token"
    with pytest.raises(errors.PhalanxError):
        read_event("null", ChatTimes())


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_message_is_asked_of_no_model(text):
    with pytest.raises(errors.BadRequest, match="the message is empty"):
        chat.main(["llama-8b", "-m", text], standalone_mode=False)
