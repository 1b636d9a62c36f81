"""The client against heads that fail in every way: found, retried or told, and never a thing done twice."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import fcntl
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from phalanx.client import Client
from phalanx.client.connection.discovery import find_token, find_urls, lock_holder, membership_urls
from phalanx.client.connection.event_stream import follow_stream
from phalanx.client.connection.transport import Retry, Transport, error_from_reply
from phalanx.core.errors import (
    BadRequest,
    Conflict,
    NeverFits,
    NotSignedIn,
    OutcomeUnknown,
    PhalanxError,
    TooLarge,
    TryLater,
    Unreachable,
)
from phalanx.wire.head_url import check_encrypted, is_loopback, split_url

JOB = b'{"job":{"id":"7","seq":7,"name":"x","state":"pending","user":"a","project":"p","queue":"q","submit_s":1.0},"notes":["n"]}'
OK = b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n%s" % (len(JOB), JOB)


def refusal(status, code, message="no", hint="yes"):
    body = json.dumps({"error": {"code": code, "message": message, "hint": hint, "retry": False}}).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@contextmanager
def scripted(*answers):
    """A head that gives one connection each answer in turn and closes it; `seen` holds what each was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = []

    def serve():
        for answer in answers:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                line.settimeout(10)
                seen.append(receive(line))
                line.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a connection
        listener.close()
        thread.join(timeout=60)


def receive(line):
    data = b""
    while b"\r\n\r\n" not in data:
        data += line.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += line.recv(65536)
    return head.decode(), body


class Clock:
    """Patience without waiting."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)


def transport(url, patience_s=30.0):
    clock = Clock()
    return Transport(url, "t", retry_limit_s=patience_s, monotonic=clock, sleep=clock.sleep), clock


def test_submit_goes_again_under_the_same_key_when_the_connection_breaks():
    with scripted(b"", OK) as (url, seen):
        client = Client(url, "t")
        client.transport, _ = transport(url)
        done = client.submit({"run": "true"})
    keys = [h.split(":")[1] for head, _ in seen for h in head.split("\r\n") if h.startswith("Idempotency-Key")]
    assert (done.id, done.notes, done.job.state) == ("7", ["n"], "pending")
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_submit_goes_again_when_the_head_says_later():
    with scripted(refusal(503, "try_later"), OK) as (url, seen):
        client = Client(url, "t")
        client.transport, _ = transport(url)
        assert client.submit({"run": "true"}).id == "7"
    assert len(seen) == 2


def test_upload_that_finds_no_place_is_sent_again_from_its_beginning():
    """Found by reading: the fifth of a user's uploads at once is told to come later, and did not come."""
    with scripted(refusal(404, "not_found"), refusal(503, "try_later"), OK) as (url, seen):
        client = Client(url, "t")
        client.transport, _ = transport(url)
        client.upload(io.BytesIO(b"0123456789"), "ab" * 32, 10)
    assert [body for head, body in seen if head.startswith("PUT")] == [b"0123456789"] * 2


def test_download_whose_connection_is_reset_fails_as_unreachable():
    begun = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            line, _ = listener.accept()
            with line:
                line.settimeout(10)
                receive(line)
                line.sendall(b"HTTP/1.1 200 OK\r\nphalanx-archive-bytes: 9\r\nContent-Length: 9\r\n\r\nabc")
                assert begun.wait(10)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "t") as client, pytest.raises(Unreachable):
            client.download_archive("7", io.BytesIO(), on_size=lambda _: begun.set())
        thread.join()


def test_what_may_have_been_done_is_repeated_only_with_a_key():
    with scripted(refusal(503, "outcome_unknown"), OK) as (url, seen):
        line, _ = transport(url)
        with pytest.raises(OutcomeUnknown):
            line.json("POST", "/v1/tokens", b"{}")
        assert len(seen) == 1
        client = Client(url, "t")
        client.transport, _ = transport(url)
        assert client.submit({"run": "true"}).id == "7"


def test_what_may_not_happen_twice_is_sent_once():
    with scripted(b"", OK) as (url, seen):
        line, _ = transport(url)
        with pytest.raises(Unreachable):
            line.json("POST", "/v1/tokens", b"{}")
        assert len(seen) == 1


def test_first_contact_with_a_dead_head_fails_within_its_patience():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    line, clock = transport(url)
    with pytest.raises(Unreachable, match="does not answer") as caught:
        line.json("GET", "/v1/me")
    assert clock.now <= 1.0
    assert caught.value.hint


def test_head_that_was_there_is_waited_for():
    with scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (url, _):
        line, clock = transport(url)
        line.json("GET", "/v1/me")
    with pytest.raises(Unreachable):
        line.json("GET", "/v1/me")
    assert 30.0 <= clock.now < 40.0


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(422, "never_fits", "too many"), NeverFits),
        (refusal(409, "say_hello", "who"), Conflict),
        (refusal(401, "not_signed_in"), NotSignedIn),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", Unreachable),
        (refusal(500, "error"), PhalanxError),
    ],
)
def test_refusals_come_as_their_classes(answer, kind):
    with scripted(answer) as (url, _), pytest.raises(kind):
        transport(url, patience_s=0)[0].json("GET", "/v1/me")


def test_refusal_keeps_message_and_hint():
    error = error_from_reply(503, b'{"error":{"code":"store_refused","message":"disk full","hint":"make room"}}', "x")
    assert (type(error), error.message, error.hint) == (TryLater, "disk full", "make room")
    assert "status 418" in error_from_reply(418, b"tea", "GET /").message


def answer(status, body, *headers):
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (answer(404, b"<html>nginx</html>"), r"answers, but is no head of Phalanx: GET /v1/health has status 404"),
        (answer(401, b'{"detail":"no"}'), r"is no head of Phalanx: GET /v1/health has status 401"),
        (answer(302, b"", "Location: https://example.org/"), r"is no head of Phalanx: GET /v1/health has status 302"),
        (answer(200, b"<html>It works!</html>"), r"the reply does not come from a head of this release"),
        (answer(200, b"{}"), r"the reply does not come from a head of this release: .*`status`"),
        (answer(200, b""), r"the reply does not come from a head of this release"),
        (answer(501, b"Unsupported"), r"answers GET /v1/health with status 501, but not as a head"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", r"another program listens there, which does not speak HTTP"),
    ],
)
def test_another_server_is_said_to_be_no_head(reply, says):
    """Found by typing the URL of another web server: "status 404 without a reason", or an internal error of ours."""
    with scripted(*[reply] * 9) as (url, _), pytest.raises(PhalanxError, match=says) as caught:
        Client(url, "t", retry_limit_s=0.0).health()
    assert caught.value.hint


def test_an_outage_is_reported_once_and_its_end_too():
    """Found by killing the head under `run`: it said nothing for ten minutes."""
    clock, told = Clock(), []
    head = Transport(None, "t", on_outage=told.append, monotonic=clock, sleep=clock.sleep)
    with scripted(answer(200, b"{}")) as (url, _):
        head._url = url
        head.json("GET", "/v1/health")
    with scripted(*[refusal(503, "try_later", "busy")] * 9, answer(200, b"{}")) as (url, _):
        head._url = url
        head.json("GET", "/v1/health")
    assert [one and one.message for one in told] == ["busy", None]
    assert 20 < told[0].left_s < 30


def test_a_short_outage_is_not_reported():
    clock, told = Clock(), []
    head = Transport(None, "t", on_outage=told.append, monotonic=clock, sleep=clock.sleep)
    with scripted(*[refusal(503, "try_later", "busy")] * 3, answer(200, b"{}")) as (url, _):
        head._url = url
        head.json("GET", "/v1/health")
    assert told == []


def test_a_silent_stream_is_reported_at_once():
    """Found by freezing the head under `run`: the silence alone had lasted 35 s."""
    clock, told = Clock(), []
    head = Transport(None, "t", on_outage=told.append, monotonic=clock, sleep=clock.sleep)
    with scripted(answer(200, b"{}")) as (url, _):
        head._url = url
        head.json("GET", "/v1/health")
    Retry(head).wait_or_raise(TimeoutError(), retryable=True)
    assert len(told) == 1
    assert "does not answer" in told[0].message


def test_large_job_is_refused_here():
    with pytest.raises(TooLarge, match="a head takes"):
        Client("http://127.0.0.1:9", "t").submit({"run": "x" * (10 << 20)})


def test_job_that_is_no_json_is_refused_here():
    with pytest.raises(BadRequest):
        Client("http://127.0.0.1:9", "t").submit({"run": object()})


# ---- finding the head -----------------------------------------------------------------------------------------------


def test_head_is_found_in_the_state_folder_and_overridden_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.delenv("PHALANX_URL", raising=False)
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    with pytest.raises(Unreachable, match="no head is running"):
        find_urls()
    with pytest.raises(NotSignedIn):
        find_token()
    (tmp_path / "head.json").write_text(
        json.dumps({"url": "http://127.0.0.1:7600/", "pid": os.getpid(), "head_id": "x"})
    )
    (tmp_path / "token").write_text("abc\n")
    assert (find_urls(), find_token()) == (["http://127.0.0.1:7600"], "abc")
    monkeypatch.setenv("PHALANX_URL", "https://head.example:1/")
    monkeypatch.setenv("PHALANX_TOKEN", "def")
    assert (find_urls(), find_token()) == (["https://head.example:1"], "def")


def test_head_that_died_is_said_to_have_died(tmp_path, monkeypatch):
    monkeypatch.delenv("PHALANX_URL", raising=False)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=30)
    (tmp_path / "head.json").write_text(json.dumps({"url": "http://127.0.0.1:7600", "pid": gone.pid}))
    with pytest.raises(Unreachable, match="has died"):
        find_urls(str(tmp_path))
    (tmp_path / "head.json").write_text("{")
    with pytest.raises(Unreachable, match="does not contain the URL"):
        find_urls(str(tmp_path))


def test_urls_are_read():
    assert split_url("http://127.0.0.1:7600") == (False, "127.0.0.1", 7600)
    assert split_url("https://head") == (True, "head", 443)
    assert split_url("http://[::1]:1") == (False, "::1", 1)
    for odd in ("127.0.0.1:7600", "ftp://x", "http://x/y", "http://", "http://x:y", "http://x:0", "http://x:99999"):
        with pytest.raises(BadRequest):
            split_url(odd)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "::1"])
def test_loopback_hosts(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.5", "head", "127.evil.example", "localhost.evil.example", "::2", "0.0.0.0", ""]
)
def test_other_hosts_are_not_loopback(host):
    """A name that begins with 127. or localhost may resolve to any machine."""
    assert not is_loopback(host)


@pytest.mark.parametrize("url", ["http://10.0.0.5:7600", "http://127.evil.example", "http://[fd00::5]:7600"])
def test_token_is_not_sent_in_clear_text_to_another_machine(monkeypatch, url):
    def refuse(*_, **__):
        pytest.fail("a connection was opened")

    monkeypatch.delenv("PHALANX_INSECURE", raising=False)
    monkeypatch.setenv("PHALANX_FINGERPRINT", "sha256:" + "0" * 64)
    monkeypatch.setattr("http.client.HTTPConnection.connect", refuse)
    for call in (Client(url, "secret").health, lambda: next(Client(url, "secret").follow_logs("1"))):
        with pytest.raises(BadRequest, match=r"not encrypted: .*nothing was sent") as caught:
            call()
        assert caught.value.exit_code == 64
        assert f"use https://{url.removeprefix('http://')}" in caught.value.hint
        assert "PHALANX_FINGERPRINT" in caught.value.hint


def test_redirect_to_plain_http_on_another_machine_is_not_followed(monkeypatch):
    monkeypatch.delenv("PHALANX_INSECURE", raising=False)
    with scripted(standing_by("http://10.0.0.5:7600")) as (url, seen), pytest.raises(BadRequest, match="not encrypted"):
        transport(url)[0].json("GET", "/v1/me")
    assert len(seen) == 1


def test_plain_http_to_another_machine_can_be_permitted(monkeypatch):
    monkeypatch.setenv("PHALANX_INSECURE", "1")
    assert not check_encrypted("http://10.0.0.5:7600")
    assert check_encrypted("https://10.0.0.5:7600")
    assert check_encrypted("http://127.0.0.1:7600")
    for off in ("", "0"):
        monkeypatch.setenv("PHALANX_INSECURE", off)
        with pytest.raises(BadRequest):
            check_encrypted("http://10.0.0.5:7600")


def test_the_folders_token_is_shown_to_its_own_head_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    (tmp_path / "head.json").write_text(json.dumps({"url": "http://127.0.0.1:7600", "pid": os.getpid()}))
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("PHALANX_URL", "http://127.0.0.1:7600/")
    assert find_token() == "abc"
    for elsewhere in ("http://head.example:7600", "https://127.0.0.1:7600", "http://127.0.0.1:7601"):
        monkeypatch.setenv("PHALANX_URL", elsewhere)
        with pytest.raises(NotSignedIn, match="PHALANX_TOKEN") as caught:
            find_token()
        assert caught.value.exit_code == 77
        with pytest.raises(NotSignedIn, match="PHALANX_TOKEN"):
            Transport(elsewhere, home=str(tmp_path)).headers()


@pytest.mark.parametrize("token", ["", "  ", "two words", "line\nbreak"])
def test_a_token_that_is_none_is_told_and_not_replaced(tmp_path, monkeypatch, token):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.delenv("PHALANX_URL", raising=False)
    (tmp_path / "head.json").write_text(json.dumps({"url": "http://127.0.0.1:7600", "pid": os.getpid()}))
    (tmp_path / "token").write_text("abc")
    monkeypatch.setenv("PHALANX_TOKEN", token)
    with pytest.raises(NotSignedIn, match="PHALANX_TOKEN"):
        find_token()


def test_head_without_a_record_is_found_by_its_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.delenv("PHALANX_URL", raising=False)
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    (tmp_path / "token").write_text("abc")
    with open(tmp_path / "head.lock", "w+") as lock:
        json.dump({"pid": os.getpid(), "url": "http://127.0.0.1:7611"}, lock)
        lock.flush()
        assert lock_holder(str(tmp_path)) is None, "nobody holds it"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lock_holder(str(tmp_path)) == ("http://127.0.0.1:7611", os.getpid())
        assert (find_urls(), find_token()) == (["http://127.0.0.1:7611"], "abc")
    with pytest.raises(Unreachable, match="no head is running"):
        find_urls()


@contextmanager
def wedged():
    """A head that takes connections and never answers, as one under SIGSTOP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_head_that_is_stopped_is_told_after_one_silence():
    with wedged() as url:
        line = Transport(url, "t", answer_timeout_s=0.1, sleep=lambda _: pytest.fail("asked again"))
        line._reached = True
        with pytest.raises(Unreachable, match="does not answer; it may be stopped or overloaded"):
            line.json("GET", "/v1/me")


def test_only_long_calls_may_take_long(monkeypatch):
    asked = []
    line = Transport("http://127.0.0.1:9", "t")

    def note(*_, timeout_s, **__):
        asked.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(line, "_exchange", note)
    client = Client("http://127.0.0.1:9", "t")
    client.transport = line
    for call in (client.health, client.nodes, lambda: client.submit({"run": "x"})):
        with pytest.raises(Unreachable):
            call()
    assert asked == [5.0, 5.0, 5.0]


def test_names_are_checked_before_they_become_paths():
    client = Client("http://127.0.0.1:9", "t")
    for put in (client.put_user, client.put_project, client.put_queue, client.revoke_token):
        for odd in ("", "..", "a/b", "a b", "x" * 65, "ä", "a\n"):
            with pytest.raises(BadRequest, match="not a valid name"):
                put(odd)


# ---- following ------------------------------------------------------------------------------------------------------


def sse(*events):
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + b"".join(events)


def log(offset, text, cursor=""):
    fields = {
        "epoch": 1,
        "stream": "rank-0",
        "rank": 0,
        "offset": offset,
        "end": offset + len(text.encode()),
        "text": text,
    }
    mark = f"id: {cursor}\n" if cursor else ""
    return f"event: log\n{mark}data: {json.dumps(fields)}\n\n".encode()


END = b'event: end\ndata: {"state":"succeeded"}\n\n'


def test_stream_comes_back_with_its_last_id_and_drops_what_it_had():
    first = sse(log(0, "abc", "1:rank-0=3"), log(3, "def"), b"event: log\ndata: {torn")
    second = sse(b": still here\n\n", log(3, "def"), log(4, "efg€"), log(10, "h", "1:rank-0=11"), END)
    with scripted(first, second) as (url, seen):
        events = list(follow_stream(transport(url)[0], "/v1/jobs/1/logs"))
    assert "".join(event.fields["text"] for event in events if event.kind == "log") == "abcdefg€h"
    assert events[-1].kind == "end"
    assert "Last-Event-ID: 1:rank-0=3" in seen[1][0]


def test_stream_that_is_refused_ends_in_the_refusal():
    with scripted(refusal(403, "not_permitted")) as (url, _), pytest.raises(PhalanxError, match="no"):
        list(follow_stream(transport(url)[0], "/v1/jobs/1/logs"))


def test_stream_gives_up_when_its_head_stays_away():
    with scripted(sse(log(0, "a"))) as (url, _):
        line, clock = transport(url)
        stream = follow_stream(line, "/v1/jobs/1/logs")
        assert next(stream).fields["text"] == "a"
    with pytest.raises(Unreachable):
        list(stream)
    assert clock.now >= 30.0


# ---- what a command pays ----------------------------------------------------------------------------------------------


def test_client_loads_nothing_heavy():
    script = "import phalanx.client, sys; print(*({'msgspec','asyncio','dataclasses','fastapi','concurrent','email.mime'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def standing_by(leader):
    body = json.dumps(
        {"error": {"code": "not_leading", "message": "stands by", "retry": True, "leader": leader}}
    ).encode()
    return b"HTTP/1.1 503 x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_submit_at_a_head_that_stands_by_goes_to_the_one_that_leads_with_the_same_key():
    with scripted(OK) as (leader, asked_leader), scripted(standing_by(leader)) as (standby, asked_standby):
        Client(standby, "t").submit({"run": ["true"], "workdir": "/"}, key="k1")
        assert "Idempotency-Key: k1" in asked_standby[0][0]
        assert "Idempotency-Key: k1" in asked_leader[0][0]


def test_dead_head_of_a_list_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with scripted(OK) as (living, asked):
        Client(f"{dead},{living}", "t").submit({"run": ["true"], "workdir": "/"}, key="k1")
        assert len(asked) == 1


def test_stopped_head_of_a_list_is_left_for_the_next_by_a_client_that_has_just_begun():
    """Its patience is over by then; but who has not been asked may still know."""
    with socket.create_server(("127.0.0.1", 0)) as stopped, scripted(OK) as (living, asked):
        mute = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        Client(f"{mute},{living}", "t", answer_timeout_s=0.7).submit({"run": ["true"], "workdir": "/"}, key="k1")
        assert len(asked) == 1


def test_heads_that_all_are_stopped_are_told_after_one_silence_of_each():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        urls = ",".join(f"http://127.0.0.1:{line.getsockname()[1]}" for line in (one, other))
        with pytest.raises(Unreachable):
            Client(urls, "t", answer_timeout_s=0.7).submit({"run": ["true"], "workdir": "/"}, key="k1")


def test_heads_of_a_folder_whose_own_head_died_are_asked(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "token").write_text("secret")
    with scripted(OK) as (living, asked):
        record = {"url": "http://127.0.0.1:9", "pid": gone.pid, "heads": ["http://127.0.0.1:9", living]}
        (tmp_path / "head.json").write_text(json.dumps(record))
        Client(home=str(tmp_path)).submit({"run": ["true"], "workdir": "/"}, key="k1")
        assert "Bearer secret" in asked[0][0]


def test_token_of_the_folder_is_not_shown_to_a_head_that_is_none_of_its_own(tmp_path):
    (tmp_path / "token").write_text("secret")
    record = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "heads": ["http://127.0.0.1:9", "http://127.0.0.1:10"]}
    (tmp_path / "head.json").write_text(json.dumps(record))
    assert find_token(str(tmp_path), "http://127.0.0.1:10") == "secret"
    with pytest.raises(NotSignedIn):
        find_token(str(tmp_path), "http://127.0.0.1:11")


def test_a_member_knows_the_heads_that_came_after_it_joined(tmp_path):
    nodes = tmp_path / "joined" / "nodes" / "m1"
    nodes.mkdir(parents=True)
    (tmp_path / "joined" / "heads.json").write_text('{"url": "https://a:1/", "heads": []}')
    assert membership_urls(str(tmp_path)) == ["https://a:1"]
    (nodes / "heads.json").write_text('{"heads": ["https://a:1", "https://b:1"]}')
    assert membership_urls(str(tmp_path)) == ["https://a:1", "https://b:1"]
    (nodes / "heads.json").write_text('{"heads": [7, "https')
    assert membership_urls(str(tmp_path)) == ["https://a:1"], "a damaged file hides no head"
    (tmp_path / "joined" / "heads.json").unlink()
    assert membership_urls(str(tmp_path)) == []
