"""Output and events: pages, streams that follow, and their promise: no gap, no double, across reconnects, restarts and attempts."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import asyncio
import contextlib
import json
import threading
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.live.cursor import read_cursor, write_cursor
from phalanx.api.live.event_streams import EventStream
from phalanx.api.live.pending_output import PendingOutput
from phalanx.api.routes import logs as logs_routes
from phalanx.api.routes.logs import complete_characters
from phalanx.api.services import ApiLimits
from phalanx.client import Client
from phalanx.client.connection.event_stream import follow_stream
from phalanx.core.errors import BadRequest, NotPermitted, WaitTimedOut
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import JobId
from phalanx.core.state.records import NODES
from phalanx.core.state.reports import MemberStopped, TaskExited
from phalanx.core.work.attempt import TaskExit
from phalanx.ports.logs import stream_key
from tests.contract.api_head import TOKENS, ApiHead, Caller, Supervisor, bearer, code, until


@pytest.fixture
def supervisor(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    return supervisor


def texts(events):
    return "".join(event.fields["text"] for event in events if event.kind == "log")


def followed(call, job_id, **asked):
    with Client(call.url, TOKENS["user"]) as client:
        return list(client.follow_logs(job_id, **asked))


class Following:
    """A follower on a thread of its own."""

    def __init__(self, call, job_id, **asked):
        self.events = []
        self.thread = threading.Thread(target=self._run, args=(call, job_id), kwargs=asked, daemon=True)
        self.thread.start()

    def _run(self, call, job_id, **asked):
        with Client(call.url, TOKENS["user"]) as client:
            for event in client.follow_logs(job_id, **asked):
                self.events.append(event)

    def finish(self):
        self.thread.join(timeout=30)
        assert not self.thread.is_alive(), "the stream did not end"
        return self.events


def test_pages_come_by_rank_and_go_on_by_cursor(call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"one\ntwo\n")
    supervisor.ship(job_id, 1, "rank-1", 0, b"uno\n")
    supervisor.ship(job_id, 1, "supervisor-0", 0, b"a note\n")
    page = call("user", "GET", f"/v1/jobs/{job_id}/logs").json()
    assert [(c["stream"], c["rank"], c["text"]) for c in page["chunks"]] == [
        ("rank-0", 0, "one\ntwo\n"),
        ("rank-1", 1, "uno\n"),
    ]
    supervisor.ship(job_id, 1, "rank-0", 8, b"three\n")
    rest = call("user", "GET", f"/v1/jobs/{job_id}/logs", params={"cursor": page["cursor"]}).json()
    assert [(c["offset"], c["end"], c["text"]) for c in rest["chunks"]] == [(8, 14, "three\n")]
    only = call("user", "GET", f"/v1/jobs/{job_id}/logs?rank=1").json()["chunks"]
    assert [c["text"] for c in only] == ["uno\n"]
    notes = call("user", "GET", f"/v1/jobs/{job_id}/logs?rank=supervisor").json()["chunks"]
    assert [(c["rank"], c["text"]) for c in notes] == [(None, "a note\n")]
    tail = call("user", "GET", f"/v1/jobs/{job_id}/logs?rank=0&tail_bytes=8").json()["chunks"]
    assert [c["text"] for c in tail] == ["three\n"]


def test_pages_are_bounded_and_say_that_there_is_more(call, supervisor):
    job_id = call.submit()
    supervisor.ship(job_id, 1, "rank-0", 0, b"x" * 100_000)
    got, cursor, more = b"", "", True
    while more:
        asked = {"limit_bytes": 30_000, "cursor": cursor}
        page = call("user", "GET", f"/v1/jobs/{job_id}/logs", params=asked).json()
        got += "".join(chunk["text"] for chunk in page["chunks"]).encode()
        cursor, more = page["cursor"], page["more"]
    assert got == b"x" * 100_000


@pytest.mark.parametrize("asked", [{"rank": "x"}, {"cursor": "1:rank=a"}, {"cursor": "x"}, {"epoch": "0"}])
def test_odd_questions_are_refused(call, supervisor, asked):
    job_id = call.submit()
    assert call("user", "GET", f"/v1/jobs/{job_id}/logs", params=asked).status_code == 400


def test_follower_sees_all_output_then_the_end(call, supervisor):
    job_id = call.submit()
    follower = Following(call, job_id)
    supervisor.run(job_id)
    written = 0
    for n in range(50):
        line = f"step {n} é\n".encode()
        supervisor.ship(job_id, 1, "rank-0", written, line)
        written += len(line)
    supervisor.end(job_id)
    events = follower.finish()
    assert texts(events) == "".join(f"step {n} é\n" for n in range(50))
    assert (events[-1].kind, events[-1].fields["state"], events[-1].fields["exit_code"]) == ("end", "succeeded", 0)
    states = [event.fields["state"] for event in events if event.kind == "state"]
    assert states[-1] == "succeeded"


def test_output_that_arrives_after_the_end_of_the_job_is_waited_for(call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"first\n")
    supervisor.end(job_id, unsent=(("rank-0", 11), ("steps-0", 99)))
    assert call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["state"] == "succeeded"
    follower = Following(call, job_id)
    until(lambda: texts(follower.events) == "first\n")
    page = call("user", "GET", f"/v1/jobs/{job_id}/logs").json()
    later = call("user", "GET", f"/v1/jobs/{job_id}/logs", params={"cursor": page["cursor"]}).json()
    assert (page["more"], later["more"], later["chunks"]) == (True, True, [])
    assert not call("user", "GET", f"/v1/jobs/{job_id}/logs?rank=1").json()["more"], "that rank is complete"
    assert follower.thread.is_alive()
    supervisor.ship(job_id, 1, "rank-0", 6, b"last\n")
    events = follower.finish()
    assert (texts(events), events[-1].kind) == ("first\nlast\n", "end")
    page = call("user", "GET", f"/v1/jobs/{job_id}/logs").json()
    assert ([chunk["text"] for chunk in page["chunks"]], page["more"]) == (["first\nlast\n"], False)


@pytest.fixture
def arrives_meanwhile(head, monkeypatch):
    """Stores the last output of a rank right after the next read of a batch has ended."""
    read_batch, left = logs_routes.read_batch, []

    def read_and_store(*args, **more):
        chunks = read_batch(*args, **more)
        if left:
            head.logs.append(left.pop())
        return chunks

    monkeypatch.setattr(logs_routes, "read_batch", read_and_store)
    return left


def test_output_that_arrives_while_the_last_page_is_read_is_not_left_out(call, supervisor, head, arrives_meanwhile):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"first\n")
    supervisor.end(job_id, unsent=(("rank-0", 11),))
    (attempt,) = head.store.attempts(JobId(job_id))
    path = f"/v1/jobs/{job_id}/logs"
    arrives_meanwhile.append([(stream_key(attempt, "rank-0"), 6, b"last\n")])
    page = call("user", "GET", path).json()
    assert ([chunk["text"] for chunk in page["chunks"]], page["more"]) == (["first\n"], True)
    page = call("user", "GET", path, params={"cursor": page["cursor"]}).json()
    assert ([chunk["text"] for chunk in page["chunks"]], page["more"]) == (["last\n"], False)


def test_a_follower_gets_all_output_that_arrives_after_its_last_read(
    call, supervisor, head, arrives_meanwhile, monkeypatch
):
    monkeypatch.setattr(logs_routes, "BATCH_BYTES", 8)
    job_id = call.submit()
    supervisor.run(job_id)
    rest = b"".join(b"line %d\n" % n for n in range(10))
    supervisor.end(job_id, unsent=(("rank-0", len(rest)),))
    (attempt,) = head.store.attempts(JobId(job_id))
    arrives_meanwhile.append([(stream_key(attempt, "rank-0"), 0, rest)])
    events = followed(call, job_id)
    assert (texts(events), events[-1].kind) == (rest.decode(), "end")


def test_output_that_never_arrives_is_waited_for_two_minutes_after_the_last_progress(call, supervisor, head):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"1\n")
    supervisor.end(job_id, unsent=(("rank-0", 6), ("no stream", 5)))
    pending, attempts = PendingOutput(head.store, head.logs), head.store.attempts(JobId(job_id))
    unix_s = head.clock.now_s()
    assert [key.stream for key in pending.streams(attempts, 100.0, unix_s)] == ["rank-0"]
    assert pending.streams(attempts, 219.0, unix_s)
    supervisor.ship(job_id, 1, "rank-0", 2, b"2\n")
    assert pending.streams(attempts, 221.0, unix_s), "it made progress"
    assert not pending.streams(attempts, 341.0, unix_s)
    supervisor.ship(job_id, 1, "rank-0", 4, b"3\n")
    assert not pending.streams(attempts, 342.0, unix_s), "all is there"


def test_output_of_an_attempt_whose_logs_were_removed_is_not_waited_for(call, supervisor, head):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.end(job_id, unsent=(("rank-0", 6),))
    (attempt,) = head.store.attempts(JobId(job_id))
    assert PendingOutput(head.store, head.logs).streams([attempt], 5.0, attempt.ended_s + 100.0), "none has arrived yet"
    assert not PendingOutput(head.store, head.logs).streams([attempt], 5.0, attempt.ended_s + 121.0)


def test_output_of_a_node_that_is_down_for_long_is_not_waited_for(call, supervisor, head):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"1\n")
    supervisor.end(job_id, unsent=(("rank-0", 6),))
    node, attempts = head.store.record(NODES, "n0"), head.store.attempts(JobId(job_id))

    class Store:
        def record(self, kind, key):
            return replace(node, state=NodeState.DOWN, changed_s=1000.0)

    assert PendingOutput(Store(), head.logs).streams(attempts, 5.0, 1100.0), "it may start again"
    assert not PendingOutput(Store(), head.logs).streams(attempts, 5.0, 1121.0)
    pending = PendingOutput(Store(), head.logs)
    assert pending.streams(attempts, 5.0, 1100.0)
    supervisor.ship(job_id, 1, "rank-0", 2, b"2\n")
    assert pending.streams(attempts, 30.0, 1125.0), "it made progress"


def test_a_line_says_what_was_removed_of_a_long_stream(call, supervisor, head, monkeypatch):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"old 1\nold 2\nnew 3\nnew 4\n")
    monkeypatch.setattr(head.logs, "begin", lambda key: 9 if key.stream == "rank-0" else 0)
    note = "[phalanx] 12 bytes of older output were removed: of a service the newest part is kept\n"
    page = call("user", "GET", f"/v1/jobs/{job_id}/logs").json()
    assert [(one["offset"], one["end"], one["text"]) for one in page["chunks"]] == [
        (0, 12, note),
        (12, 24, "new 3\nnew 4\n"),
    ]
    again = call("user", "GET", f"/v1/jobs/{job_id}/logs", params={"cursor": page["cursor"]}).json()
    assert again["chunks"] == []
    tail = call("user", "GET", f"/v1/jobs/{job_id}/logs?tail_bytes=20").json()["chunks"]
    assert [one["text"] for one in tail] == ["new 3\nnew 4\n"]


def test_follower_goes_on_into_the_next_attempt(call, supervisor):
    job_id = call.submit(retry=1)
    follower = Following(call, job_id)
    supervisor.run(job_id)
    supervisor.ship(job_id, 1, "rank-0", 0, b"first life\n")
    call("user", "POST", f"/v1/jobs/{job_id}/requeue")
    place = {"job_id": job_id, "epoch": 1, "generation": 0}
    exits = [
        TaskExited(
            **place, exit=TaskExit(rank=r, node_id="n0", code=None, signal=15, requested_by_phalanx=True, ended_s=0.0)
        )
        for r in (0, 1)
    ]
    supervisor.tell(*exits, MemberStopped(**place, node_id="n0", at_s=0.0))
    until(lambda: call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["epoch"] == 2)
    supervisor.run(job_id, epoch=2)
    supervisor.ship(job_id, 2, "rank-0", 0, b"second life\n")
    supervisor.end(job_id, epoch=2)
    logs = [(e.fields["epoch"], e.fields["text"]) for e in follower.finish() if e.kind == "log"]
    assert logs == [(1, "first life\n"), (2, "second life\n")]


def test_reconnect_with_the_last_id_has_no_gap_and_no_double(call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    for rank in (0, 1):
        supervisor.ship(job_id, 1, f"rank-{rank}", 0, b"".join(b"%d:%04d\n" % (rank, n) for n in range(1000)))
    supervisor.end(job_id)
    whole = followed(call, job_id)
    marks = [event.cursor for event in whole if event.kind == "log"]
    assert all(marks)
    for cut, mark in enumerate(marks):
        rest = followed(call, job_id, cursor=mark)
        logs = [e for e in whole if e.kind == "log"]
        assert texts(logs[: cut + 1]) + texts(rest) == texts(whole)


def test_stream_goes_on_where_it_broke_when_the_head_restarts(tmp_path, head):
    with head.served() as url:
        port = int(url.rsplit(":", 1)[1])
        with httpx.Client(base_url=url, trust_env=False) as http:
            call = Caller(http, url)
            supervisor = Supervisor(call)
            supervisor.hello()
            job_id = call.submit()
            supervisor.run(job_id)
            supervisor.ship(job_id, 1, "rank-0", 0, b"before\n")
            follower = Following(call, job_id)
            until(lambda: texts(follower.events))
    head.driver.stop()
    later = ApiHead(str(tmp_path), store=head.store, head_id="head-2")
    with later.served(port=port) as url, httpx.Client(base_url=url, trust_env=False) as http:
        call = Caller(http, url)
        supervisor = Supervisor(call, supervisor_id="s1")
        supervisor.hello([(job_id, 1, 0)])
        supervisor.ship(job_id, 1, "rank-0", 7, b"after\n")
        supervisor.end(job_id)
        events = follower.finish()
    later.close()
    assert texts(events) == "before\nafter\n"
    assert events[-1].kind == "end"


def test_idle_stream_beats(call, supervisor):
    job_id = call.submit(hold=True)
    with httpx.stream("GET", f"{call.url}/v1/jobs/{job_id}/logs?follow=1", headers=bearer("user"), timeout=20) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith(":"):
                break


def test_streams_are_bounded(tmp_path):
    head = ApiHead(str(tmp_path), limits=ApiLimits(streams_open=1, recheck_s=0.02))
    with head.calling() as call:
        job_id = call.submit(hold=True)
        path = f"{call.url}/v1/jobs/{job_id}/events"
        with httpx.stream("GET", path, headers=bearer("user"), timeout=20) as first:
            lines = first.iter_lines()
            next(lines)
            for busy in (path, f"{call.url}/v1/fleet/events"):
                refusal = httpx.get(busy, headers=bearer("user"))
                assert code(refusal) == (503, "try_later"), busy
        until(lambda: head.app.state.runtime.streams_open == 0)
    head.close()


def test_one_user_leaves_streams_for_others(tmp_path):
    """Found by reading: one viewer's token could hold every stream."""
    head = ApiHead(str(tmp_path), limits=ApiLimits(streams_open=8, heartbeat_s=0.1, recheck_s=0.02))
    with head.calling() as call, contextlib.ExitStack() as others:
        path = f"{call.url}/v1/jobs/{call.submit(hold=True)}/events"
        first = others.enter_context(contextlib.ExitStack())
        first.enter_context(following(path, "viewer"))
        others.enter_context(following(path, "viewer"))
        for asked in (path, f"{call.url}/v1/events"):
            with httpx.stream("GET", asked, headers=bearer("viewer"), timeout=20) as refused:
                assert refused.status_code == 503
                error = json.loads(refused.read())["error"]
            assert (error["code"], error["message"]) == (
                "try_later",
                "2 event streams of vic are already open, the most for one user",
            )
            assert "close some of yours" in error["hint"]
        others.enter_context(following(path, "admin"))
        first.close()
        until(lambda: head.app.state.runtime.streams_by_user == {"vic": 1, "root": 1})
        others.enter_context(following(path, "viewer"))
    until(lambda: not head.app.state.runtime.streams_by_user)
    head.close()


@contextlib.contextmanager
def following(path, role):
    """A stream that has begun."""
    with httpx.stream("GET", path, headers=bearer(role), timeout=20) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()  # held: a reply whose reader is forgotten is closed
        next(lines)
        yield


@pytest.mark.parametrize("at", ["the head", "the first event", "the source", "the caller"])
def test_however_a_stream_ends_its_place_is_free_again(head, at):
    runtime = head.app.state.runtime

    async def source():
        if at == "the source":
            raise RuntimeError(at)
        yield b"one"
        if at == "the caller":
            await asyncio.sleep(60)

    async def send(message):
        assert runtime.streams_by_user == {"ada": 1}
        if at == "the head" or (at == "the first event" and message.get("body")):
            raise RuntimeError(at)

    async def receive():
        await asyncio.sleep(0.05 if at == "the caller" else 60)
        return {"type": "http.disconnect"}

    with contextlib.nullcontext() if at == "the caller" else pytest.raises(RuntimeError, match=at):
        asyncio.run(EventStream(runtime, "ada", source(), lambda: None)({}, receive, send))
    assert not runtime.streams_by_user


def test_a_follower_that_left_is_forgotten(head, call):
    job_id = call.submit(hold=True)
    with httpx.stream("GET", f"{call.url}/v1/events", headers=bearer("user"), timeout=20) as reply:
        lines = reply.iter_lines()
        next(lines)
        until(lambda: head.app.state.runtime.hub.follower_count == 1)
    until(lambda: head.app.state.runtime.hub.follower_count == 0)
    assert call("user", "GET", f"/v1/jobs/{job_id}").status_code == 200


def test_job_events_report_history_state_and_end(call, supervisor):
    job_id = call.submit()
    with Client(call.url, TOKENS["viewer"]) as client:
        seen = iter(client.follow_events(job_id))
        first = next(seen)
        assert (first.kind, first.fields["kind"]) == ("story", "submitted")
        supervisor.run(job_id)
        supervisor.end(job_id)
        rest = list(seen)
        seqs = [event.fields["seq"] for event in [first, *rest] if event.kind == "story"]
        assert seqs == sorted(set(seqs))
        assert rest[-1].kind == "end"
        assert client.wait(job_id, timeout_s=20).state == "succeeded"


def test_wait_ends_with_its_time_though_nothing_happens_and_heartbeats_come(call, supervisor):
    """Its job stands still, and its head gives no sign but heartbeats, more seldom than the time asked."""
    job_id = call.submit(hold=True)
    with Client(call.url, TOKENS["user"]) as client:
        with pytest.raises(WaitTimedOut, match=r"not ended after 0\.3 s: it is pending"):
            client.wait(job_id, timeout_s=0.3)
        with pytest.raises(WaitTimedOut):
            client.wait(job_id, timeout_s=0)


def test_all_events_begin_now_and_carry_every_job(call, supervisor):
    call.submit(name="old")
    with Client(call.url, TOKENS["viewer"]) as client:
        stream = follow_stream(client.transport, "/v1/events")
        heard = []
        thread = threading.Thread(target=lambda: heard.extend(next(stream) for _ in range(2)), daemon=True)
        thread.start()
        # The first event can only be of what happens after the stream began: submit until one is heard.
        until(lambda: call.submit(name="new", hold=True) and heard)
        thread.join(timeout=100)
    assert heard[0].kind == "story"
    assert heard[0].fields["job_id"] != "1"


def test_output_is_its_owners(call, supervisor):
    job_id = call.submit()
    with Client(call.url, TOKENS["other"]) as client, pytest.raises(NotPermitted):
        list(client.follow_logs(job_id))


def test_steps_come_by_attempt_and_go_on_by_cursor(call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    lines = [report(step, rank) for step in range(1, 6) for rank in (0, 1)]
    data = b"".join(lines) + b"no report\n" + b'{"k":"plan'
    supervisor.ship(job_id, 1, "steps-0", 0, data)
    page = call("viewer", "GET", f"/v1/jobs/{job_id}/steps?limit=3").json()
    assert [step["step"] for step in page["steps"]] == [1, 2, 3]
    assert page["more"]
    rest = call("viewer", "GET", f"/v1/jobs/{job_id}/steps", params={"after": page["cursor"]}).json()
    assert [(s["step"], s["loss"], s["tokens"], s["epoch"]) for s in rest["steps"]] == [
        (4, 0.25, 512, 1),
        (5, 0.2, 512, 1),
    ]
    assert call("viewer", "GET", f"/v1/jobs/{job_id}/steps", params={"after": rest["cursor"]}).json()["steps"] == []
    both = call("viewer", "GET", f"/v1/jobs/{job_id}/steps?rank=all").json()["steps"]
    assert [(s["step"], s["rank"]) for s in both[:2]] == [(1, 0), (1, 1)]
    progress = call("viewer", "GET", f"/v1/jobs/{job_id}").json()["job"]["progress"]
    assert (progress["step"], progress["loss"]) == (5, 0.2)


def test_progress_is_there_again_after_a_restart(tmp_path, head, call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    plan = json.dumps({"k": "planned", "rank": 0, "epoch": 1, "generation": 0, "steps_total": 4000}).encode() + b"\n"
    supervisor.ship(job_id, 1, "steps-0", 0, plan + b"".join(report(step) for step in range(1, 1000)))
    later = ApiHead(str(tmp_path), store=head.store, head_id="head-2")
    with later.calling() as call_later:
        progress = call_later("viewer", "GET", f"/v1/jobs/{job_id}").json()["job"]["progress"]
    later.close()
    assert (progress["step"], progress["steps_total"]) == (999, 4000)


def report(step, rank=0):
    fields = {"k": "step", "rank": rank, "epoch": 1, "generation": 0, "step": step, "loss": 1 / step, "tokens": 512}
    times = {"begin_ns": step * 10**8, "end_ns": (step + 1) * 10**8, "at_s": step / 10}
    return json.dumps({**fields, **times}).encode() + b"\n"


# ---- cursors and characters -----------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 99), st.sampled_from(["rank-0", "rank-11", "steps-0"])), st.integers(1, 10**12)
    )
)
def test_cursor_reads_back_what_was_written(place):
    assert read_cursor(write_cursor(place)) == place


@pytest.mark.parametrize(
    "text", ["1", "1:", "a:rank-0=1", "1:rank-0", "1:rank-0=-1", "1:RANK-0=1", "1:rank-0=1;", ":rank-0=1"]
)
def test_what_is_no_cursor_is_refused(text):
    with pytest.raises(BadRequest):
        read_cursor(text)


@given(st.text(), st.integers(0, 60))
def test_chunks_end_between_characters(text, cut):
    piece = text.encode()[:cut]
    whole = complete_characters(piece)
    assert piece.startswith(whole)
    assert len(piece) - len(whole) <= 3
    assert text.startswith(whole.decode())


@given(st.binary(max_size=20))
def test_what_is_no_text_is_held_back_by_three_bytes_at_most(piece):
    assert len(piece) - len(complete_characters(piece)) <= 3
