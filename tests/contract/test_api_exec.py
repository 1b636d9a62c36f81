"""Exec sessions: bytes both ways by offset, bounded, the user's own, ended when nobody polls."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import base64
import threading

import pytest

from phalanx.api.live.exec_sessions import ExecSessionRegistry, OffsetBuffer
from phalanx.api.services import ApiLimits
from phalanx.core.access.caller import Caller
from phalanx.core.access.node_tokens import attempt_key, seat_token
from phalanx.core.errors import Conflict
from phalanx.core.work.seats import Seat
from phalanx.core.work.users import UserRole
from phalanx.wire.supervisor import (
    CommandsReply,
    ExecInput,
    ExecOutput,
    OpenExec,
    decode,
    decode_command,
)
from tests.contract.api_head import SECRET, ApiHead, Clock, Supervisor, code


@pytest.fixture
def job_id(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    return job_id


def opened(call, job_id, **changes):
    reply = call(
        "user", "POST", f"/v1/jobs/{job_id}/exec", {"argv": ["bash"], "tty": True, "rows": 30, "cols": 90, **changes}
    )
    assert reply.status_code == 201, reply.text
    return reply.json()["session"]


def typed(call, session, offset, data=b"", **more):
    body = {"offset": offset, "data": base64.b64encode(data).decode(), **more}
    return call("user", "POST", f"/v1/exec/{session}/input", body)


def given(call, session, after=0, wait_s=0):
    reply = call("node:n0", "GET", f"/v1/node/exec/{session}/input?after={after}&wait_s={wait_s}")
    assert reply.status_code == 200, reply.text
    return decode(reply.content, ExecInput)


def printed(call, session, offset, data=b"", **more):
    return call("node:n0", "POST", f"/v1/node/exec/{session}/output", ExecOutput(offset=offset, data=data, **more))


def shown(call, session, after=0, wait_s=0, role="user"):
    return call(role, "GET", f"/v1/exec/{session}/output?after={after}&wait_s={wait_s}")


def test_session_reaches_the_node_and_carries_bytes_both_ways(call, job_id):
    session = opened(call, job_id)
    sent = decode(call("node:n0", "GET", "/v1/node/commands").content, CommandsReply).commands[-1]
    command = decode_command(sent)
    assert isinstance(command, OpenExec)
    assert (command.session, command.argv, command.rows, command.epoch) == (session, ["bash"], 30, 1)
    assert typed(call, session, 0, b"ls\n").json() == {"end": 3}
    assert typed(call, session, 0, b"ls\n").json() == {"end": 3}  # sent twice, typed once
    assert (given(call, session).data, given(call, session, 3).data) == (b"ls\n", b"")
    assert printed(call, session, 0, b"a  b\n").status_code == 204
    first = shown(call, session).json()
    assert (base64.b64decode(first["data"]), first["end"], first["done"]) == (b"a  b\n", 5, False)
    typed(call, session, 3, closed=True)
    assert given(call, session, 3).closed
    printed(call, session, 5, b"bye\n", exit_code=7)
    last = shown(call, session, after=5).json()
    assert (base64.b64decode(last["data"]), last["done"], last["exit_code"]) == (b"bye\n", True, 7)


def test_poll_wakes_when_something_is_printed_and_input_when_something_is_typed_or_resized(call, job_id):
    session = opened(call, job_id)
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(shown(call, session, wait_s=3).json()["end"]), daemon=True),
        threading.Thread(target=lambda: got.append(given(call, session, wait_s=3).rows), daemon=True),
    ]
    for thread in threads:
        thread.start()
    printed(call, session, 0, b"news")
    assert call("user", "POST", f"/v1/exec/{session}/resize", {"rows": 50, "cols": 100}).status_code == 200
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(got) == [4, 50]


def test_session_is_its_users_and_its_nodes_alone(call, job_id):
    Supervisor(call, node_id="n1", supervisor_id="s2").hello()
    session = opened(call, job_id)
    assert shown(call, session, role="other").status_code == 404
    assert call("node:n1", "GET", f"/v1/node/exec/{session}/input").status_code == 404
    assert call("other", "POST", f"/v1/jobs/{job_id}/exec", {"argv": ["id"]}).status_code == 403
    assert call("viewer", "POST", f"/v1/jobs/{job_id}/exec", {"argv": ["id"]}).status_code == 403


@pytest.mark.parametrize("odd", [{"argv": []}, {"argv": ["a\0b"]}, {"rows": 0}, {"node_rank": 1}, {"shell": True}])
def test_odd_sessions_are_refused(call, job_id, odd):
    assert call("user", "POST", f"/v1/jobs/{job_id}/exec", {"argv": ["id"], **odd}).status_code == 400


def test_no_session_beside_a_job_that_does_not_run(call, job_id):
    waiting = call.submit(hold=True)
    assert call("user", "POST", f"/v1/jobs/{waiting}/exec", {"argv": ["id"]}).status_code == 409


@pytest.fixture
def narrow(tmp_path):
    """A head of eight exec sessions: two for each user."""
    head = ApiHead(str(tmp_path), limits=ApiLimits(exec_sessions=8, wait_s=3.0, plan_stop_wait_s=0.2))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        yield head, call, job_id
    head.close()


def asked(call, job_id, role="user"):
    return call(role, "POST", f"/v1/jobs/{job_id}/exec", {"argv": ["id"]})


def test_one_user_leaves_exec_sessions_for_others(narrow):
    """Found by reading: one user could hold every session."""
    _, call, job_id = narrow
    closing, _ = opened(call, job_id), opened(call, job_id)
    refused = asked(call, job_id)
    assert code(refused) == (503, "try_later")
    assert refused.json()["error"]["message"] == "2 exec sessions of ada are already open, the most for one user"
    assert "close one of yours" in refused.json()["error"]["hint"]
    assert asked(call, job_id, "admin").status_code == 201
    assert call("user", "DELETE", f"/v1/exec/{closing}").status_code == 204
    assert asked(call, job_id).status_code == 201
    assert code(asked(call, job_id)) == (503, "try_later")


@pytest.mark.parametrize("end", [{"exit_code": 0}, {"error": "no such command"}])
def test_a_session_that_is_over_holds_no_place(narrow, end):
    """Found by reading: one that had ended, or was refused on its node, counted until nobody had polled it for a minute."""
    head, call, job_id = narrow
    first, second = opened(call, job_id), opened(call, job_id)
    printed(call, second, 0, b"bye", **end)
    printed(call, first, 0, b"bye", **end)
    assert head.app.state.runtime.sessions.count() == 0
    assert shown(call, first).json()["done"]  # its last words are kept
    opened(call, job_id)
    assert shown(call, second).status_code == 404  # until their room is wanted: the one polled longest ago goes
    assert shown(call, first).json()["done"]
    opened(call, job_id)
    assert shown(call, first).status_code == 404
    assert code(asked(call, job_id)) == (503, "try_later")


def test_what_is_kept_of_sessions_that_are_over_is_bounded_for_all_users_together():
    sessions = ExecSessionRegistry(ApiLimits(exec_sessions=4), Clock())
    for number in range(12):
        caller = Caller(user=f"u{number % 6}", role=UserRole.USER, token_id="t")
        sessions.open(caller=caller, job_id="1", supervisor="n0", rows=24, cols=80).ended = True
        assert len(sessions._open) <= 4


def test_session_that_nobody_polls_ends_and_its_node_hears_so(head, call, job_id):
    session = opened(call, job_id)
    head.clock.ahead_s += head.limits.exec_idle_s + 1
    assert call("node:n0", "GET", f"/v1/node/exec/{session}/input").status_code == 404
    assert shown(call, session).status_code == 404


def test_closed_session_is_gone_for_its_node(call, job_id):
    session = opened(call, job_id)
    assert call("user", "DELETE", f"/v1/exec/{session}").status_code == 204
    assert printed(call, session, 0, b"x").status_code == 404


def test_reader_that_lags_slows_the_command(call, job_id, head):
    session = opened(call, job_id)
    offset, piece = 0, b"x" * 65536
    while offset < head.limits.exec_buffer_bytes:
        assert printed(call, session, offset, piece).status_code == 204
        offset += len(piece)
    held = []
    thread = threading.Thread(
        target=lambda: held.append(printed(call, session, offset, piece).status_code), daemon=True
    )
    thread.start()
    shown(call, session, after=0)
    assert held == []
    shown(call, session, after=65536)  # what was read makes room
    thread.join(timeout=20)
    assert held == [204]


def test_pipe_takes_bytes_once_and_refuses_a_gap():
    pipe = OffsetBuffer()
    assert pipe.append(0, b"abc", 4)
    assert pipe.append(1, b"bcd", 4)
    assert not pipe.append(4, b"e", 4)
    assert (pipe.read(2, 10), pipe.base, pipe.end) == (b"cd", 2, 4)
    with pytest.raises(Conflict):
        pipe.append(6, b"g", 4)


def test_a_session_is_its_supervisors_and_not_of_another_jobs_on_the_same_node(call, job_id):
    """Found by reading: a session was any supervisor's of its node, also that of a seat that an engine brought for another job."""
    session = opened(call, job_id)
    seat = Seat(node_id="n0", job_id="99", epoch=1)
    token = {"authorization": f"Bearer {seat_token(attempt_key(SECRET, '99', 1), seat)}"}
    path = f"/v1/node/exec/{session}/input"
    assert call("node:n0", "GET", path).status_code == 200
    assert code(call("never issued", "GET", path, headers=token)) == (404, "not_found")
