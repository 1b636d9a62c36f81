"""Notification channels over HTTP: messages reach a real receiver on loopback by Apprise, once each, and no reply repeats a secret."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.api.live import channel_sender
from phalanx.api.live.history_tail import newest_seq
from phalanx.core.state.events import ChangeProject
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import CHANNEL_MARKS
from phalanx.core.work.states import JobState
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from phalanx.ports.store import Batch
from phalanx.providers.notifications.apprise_notifier import AppriseNotifier
from tests.contract.api_head import ApiHead, Supervisor, code, until

SECRET = "s3cr3t-t0ken"


class Receiver:
    """A webhook: keeps what it was sent, and refuses while `status` says so."""

    def __init__(self):
        self.status, self.got = 200, []
        self.free = threading.Event()  # cleared: it takes its time
        self.free.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                receiver.free.wait(60)
                if receiver.status == 200:
                    receiver.got.append((body["title"], body["message"]))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"json://user:{SECRET}@127.0.0.1:{self.server.server_port}/hook/{SECRET}?+X-Key={SECRET}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def head(tmp_path):
    """With a sender that the test steps itself."""
    head = ApiHead(str(tmp_path / "head"))
    runtime = head.app.state.runtime
    runtime.channel_sender._services = replace(runtime.services, notifier=AppriseNotifier())
    yield head
    runtime.channel_sender.close()
    head.close()


@pytest.fixture
def sender(head):
    return head.app.state.runtime.channel_sender


def add(call, receiver, name="ops", **more):
    reply = call("admin", "PUT", f"/v1/channels/{name}", {"url": receiver.url, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["channels"]


@pytest.fixture
def fail(head, call):
    """`fail()` runs a job that fails."""
    supervisor = Supervisor(call, devices=8)
    supervisor.hello()
    supervisor.lease()
    head.driver.leases.grant_long(1e9, math.inf)  # nobody renews here
    return lambda **changes: failed(head, call, supervisor, **changes)


def failed(head, call, supervisor, **changes):
    job = call.submit(retry=0, **changes)
    until(lambda: call("user", "GET", f"/v1/jobs/{job}").json()["job"]["state"] != "pending")
    supervisor.run(job)
    supervisor.end(job, code=3)
    until(lambda: head.store.job(job).state.terminal)
    return job


def sent(head, sender):
    """Step until nothing is on its way, as the thread does."""
    sender.step()
    until(lambda: all(one.sending is None or one.sending.done() for one in sender._progress.values()))
    sender.step()
    head.clock.ahead_s += 11.0  # until the next message may go


def test_a_channel_receives_what_happens_after_it_was_added(head, call, fail, sender, receiver):
    before = fail()
    add(call, receiver, topics=["jobs"])
    sent(head, sender)
    assert receiver.got == []
    job = fail()
    sent(head, sender)
    sent(head, sender)
    [(title, message)] = receiver.got
    assert title.startswith(f"Phalanx: job {job} (train) of ada in default: failed")
    assert "exit code 3" in message
    assert f"job {before} " not in message
    assert call("admin", "GET", "/v1/channels").json()["channels"][0]["messages"] == 1


def test_no_reply_no_history_and_no_audit_line_has_the_secret(head, call, fail, sender, receiver):
    [channel] = add(call, receiver)
    assert channel["shown"].startswith("json://user:****@127.0.0.1")
    receiver.status = 500
    fail()
    sent(head, sender)
    refused = call("admin", "POST", "/v1/channels/ops/test")
    assert code(refused) == (503, "try_later")
    everywhere = [
        refused.text,
        call("admin", "GET", "/v1/channels").text,
        call("admin", "GET", "/v1/story").text,
        call("admin", "GET", "/v1/audit").text,
    ]
    assert [text for text in everywhere if SECRET in text] == []


def test_lines_that_come_together_are_one_message_and_a_refused_one_is_sent_again(head, call, fail, sender, receiver):
    add(call, receiver, topics=["jobs"])
    sent(head, sender)
    receiver.status = 503
    first = fail()
    sent(head, sender)
    assert call("admin", "GET", "/v1/channels").json()["channels"][0]["error"].startswith("JSON: ")
    second = fail()
    receiver.status = 200
    sent(head, sender)
    [(title, message)] = receiver.got
    assert title == "Phalanx: 2 messages about jobs"
    assert [line.partition(" (")[0] for line in message.splitlines()] == [f"job {first}", f"job {second}"]
    assert call("admin", "GET", "/v1/channels").json()["channels"][0]["error"] == ""


def test_a_head_that_starts_again_goes_on_where_it_was(head, call, fail, sender, receiver, tmp_path):
    add(call, receiver, topics=["jobs"])
    sent(head, sender)
    fail()
    sent(head, sender)
    missed = fail()
    again = ApiHead(str(tmp_path / "again"), store=head.store, head_id="head-2")
    try:
        later = again.app.state.runtime.channel_sender
        later._services = replace(again.app.state.runtime.services, notifier=AppriseNotifier())
        again.clock.ahead_s = head.clock.ahead_s
        sent(again, later)
        assert [message.partition(" (")[0] for _, message in receiver.got[1:]] == [f"job {missed}"]
    finally:
        again.close()


def test_a_channel_of_a_project_receives_messages_about_its_jobs_only(head, call, fail, sender, receiver):
    head.ask(ChangeProject(project_id="vision", by="root", as_admin=True))
    add(call, receiver, project="vision", topics=["jobs"])
    sent(head, sender)
    fail()
    job = fail(project="vision")
    sent(head, sender)
    assert [message.partition(" (")[0] for _, message in receiver.got] == [f"job {job}"]


def test_data_that_cannot_be_copied_is_one_message_of_the_job_that_wants_it(head, call, sender, receiver):
    supervisor = Supervisor(call, devices=8)
    supervisor.hello()
    supervisor.lease()
    head.driver.leases.grant_long(1e9, math.inf)  # nobody renews here
    add(call, receiver, topics=["jobs"])
    sent(head, sender)
    job = call.submit(retry=0, data={"train": "/nfs/train"})
    until(lambda: head.store.job(job).staged_on)
    copy = head.store.job(job).unmet_dependencies[0].job_id
    for one in (copy, job):
        until(lambda: head.store.job(one).state is not JobState.PENDING)
        supervisor.run(one)
        supervisor.end(one, code=3)
        until(lambda: head.store.job(one).state is JobState.FAILED)
    sent(head, sender)
    sent(head, sender)
    assert [message.partition(" (")[0] for _, message in receiver.got] == [f"job {job}"]


def test_a_channel_of_a_project_receives_messages_about_its_budget_only(head, call, sender, receiver):
    for project in ("vision", "nlp"):
        head.ask(ChangeProject(project_id=project, by="root", as_admin=True))
    add(call, receiver, project="vision", topics=["budget"])
    sent(head, sender)
    for project in ("vision", "nlp"):
        facts = {"project": project}
        line = HistoryLine(seq=0, at_s=1.0, kind="budget_warning", text=f"project {project} has spent", facts=facts)
        head.store.commit(Batch(history=[replace(line, seq=newest_seq(head.store) + 1)]))
    sent(head, sender)
    assert [message for _, message in receiver.got] == ["project vision has spent"]


def test_the_digest_comes_once_after_the_month(head, call, sender, receiver):
    add(call, receiver, topics=["digest"])
    sent(head, sender)
    assert receiver.got == []
    hour_s = int(head.clock.now_s()) // 3600 * 3600
    amounts = (("computing", "", 5_400_000_000), ("idle", "", 1_800_000_000))
    row = UsageRow(model="h100", pool="", project="nlp", user="ada", queue="default", job="1", amounts=amounts)
    hours = [UsageHour(id=str(hour_s), fleet=7_200_000_000, rows=(row,))]
    sender._services = replace(sender._services, usage_hours=lambda *_: hours)
    head.clock.ahead_s += 32 * 86400.0
    for _ in range(3):
        sent(head, sender)
    [(title, message)] = receiver.got
    assert title.startswith("Phalanx: use of GPUs in 20")
    assert "2.0 GPU-hours of the fleet" in message
    assert "nlp: 2.0 h, 25% wasted" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"jsons://hooks.example.org/services/{SECRET}", "jsons://hooks.example.org/..."),
        (f"ntfy://{SECRET}", "ntfys://..."),
        (f"ntfys://ntfy.example.org/{SECRET}", "ntfys://ntfy.example.org/..."),
        ("json://hooks.example.org", "json://hooks.example.org"),
    ],
)
def test_the_path_of_a_webhook_is_a_secret(url, shown):
    assert AppriseNotifier().describe(url) == shown


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"url": "nothing://x"}, "known service"),
        ({"url": "syslog://"}, "own machine"),
        ({"url": "json://h", "topics": ["job"]}, "no topic"),
    ],
)
def test_wrong_channels_are_refused(call, head, body, word):
    reply = call("admin", "PUT", "/v1/channels/ops", body)
    assert code(reply) == (400, "bad_request")
    assert word in reply.json()["error"]["message"]
    assert call("admin", "GET", "/v1/channels").json()["channels"] == []


def test_operators_cannot_read_or_add_channels(call, receiver):
    assert code(call("operator", "GET", "/v1/channels")) == (403, "not_permitted")
    assert code(call("operator", "PUT", "/v1/channels/ops", {"url": receiver.url})) == (403, "not_permitted")


def test_a_removed_channel_receives_nothing(head, call, fail, sender, receiver):
    add(call, receiver, topics=["jobs"])
    sent(head, sender)
    reply = call("admin", "DELETE", "/v1/channels/ops")
    assert reply.status_code == 204, reply.text
    fail()
    sent(head, sender)
    assert receiver.got == []


def return_to_service(call, times):
    """Each time makes one line."""
    for _ in range(times):
        assert call("operator", "POST", "/v1/nodes/n0/drain", {"why": "fan", "cordon_only": True}).status_code == 200
        assert call("operator", "POST", "/v1/nodes/n0/undrain").status_code == 200


def test_lines_that_come_while_a_message_is_sent_are_sent_although_older_ones_are_dropped(
    head, call, sender, receiver, monkeypatch
):
    Supervisor(call).hello()
    add(call, receiver, topics=["nodes"])
    sent(head, sender)
    monkeypatch.setattr(channel_sender, "PENDING_MAX", 2)
    receiver.free.clear()
    return_to_service(call, 2)
    sender.step()  # two lines are on their way
    assert [one.daemon for one in threading.enumerate() if one.name == "channel"] == [
        True
    ]  # a stop of the head does not wait
    return_to_service(call, 1)
    sender.step()  # a third one waits; the oldest of those on their way is dropped from the list
    receiver.free.set()
    sent(head, sender)
    sent(head, sender)
    assert [title for title, _ in receiver.got] == [
        "Phalanx: 2 messages about nodes",
        "Phalanx: n0 is in service again",
    ]


def test_a_channel_that_is_replaced_gets_what_waits_at_its_new_url_and_with_its_new_topics(
    head, call, fail, sender, receiver
):
    wrong = Receiver()
    try:
        wrong.status = 404
        add(call, wrong, topics=["jobs", "nodes"])
        sent(head, sender)
        return_to_service(call, 1)
        job = fail()
        sender.step()
        until(sender._progress["ops"].sending.done)
        sender.step()  # refused: it would wait ten seconds before the next try
        add(call, receiver, topics=["jobs"])
        sent(head, sender)
    finally:
        wrong.close()
    [(_, message)] = receiver.got
    assert message.startswith(f"job {job} ")
    assert "in service" not in message


def test_what_was_sent_is_recorded_at_once_on_a_machine_that_has_just_started(head, call, sender, receiver):
    Supervisor(call).hello()
    add(call, receiver, topics=["nodes"])
    sent(head, sender)
    head.clock.ahead_s -= head.clock.boottime_s() - 60.0
    sender._progress.clear()
    return_to_service(call, 1)
    sent(head, sender)
    assert head.store.record(CHANNEL_MARKS, "ops").seq == sender._progress["ops"].seq


def test_messages_leave_no_line_in_the_audit_trail(head, call, sender, receiver):
    Supervisor(call).hello()
    add(call, receiver, topics=["nodes"])
    return_to_service(call, 1)
    before = call("admin", "GET", "/v1/audit").json()["lines"]
    sent(head, sender)
    drained = [line["action"] for line in call("admin", "GET", "/v1/audit").json()["lines"]]
    assert drained == [line["action"] for line in before]
