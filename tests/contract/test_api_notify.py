"""Messages that jobs ask for: a real mail server and a real webhook get them by Apprise, once each, and nothing stores a URL of a user in clear."""

# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import math
import socketserver
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from phalanx.api.live import job_notifier
from phalanx.core.errors import TryLater
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import CHANNEL_MARKS
from phalanx.core.work.channel import JOB_MARKS, Message
from phalanx.providers.notifications.apprise_notifier import AppriseNotifier
from phalanx.providers.notifications.public_connections import is_public
from tests.contract.api_head import ApiHead, Supervisor, until
from tests.contract.test_api_channels import SECRET, Receiver, add
from tests.smtp_here import MailServer

ADA = "ada@example.org"
CHAT_SECRET = "CHAT_URL"


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def mail():
    with MailServer() as server:
        yield server


@pytest.fixture
def head(tmp_path):
    """With a notifier that the test steps itself."""
    head = ApiHead(str(tmp_path / "head"))
    with_apprise(head)
    yield head
    head.close()


def with_apprise(head):
    notifier = head.app.state.runtime.job_notifier
    notifier._services = replace(notifier._services, notifier=AppriseNotifier(), url="https://head.example.org/")
    head.app.state.runtime.channel_sender._services = notifier._services


@pytest.fixture
def node(head, call):
    supervisor = Supervisor(call, devices=8)
    supervisor.hello()
    supervisor.lease()
    head.driver.leases.grant_long(1e9, math.inf)  # nobody renews here
    return supervisor


@pytest.fixture
def mail_channel(call, mail):
    add(call, mail, name="mail", topics=["notify"])


def start(head, call, node, **changes):
    job = call.submit(retry=0, **changes)
    until(lambda: head.store.job(job).state == "running")
    node.run(job)
    return job


def run(head, call, node, exit_code=0, **changes):
    job = start(head, call, node, **changes)
    node.end(job, code=exit_code)
    until(lambda: head.store.job(job).state.terminal)
    return job


def sent(head, seconds=11.0):
    """Step until nothing is on its way, as the thread does; then until the next message may go."""
    notifier = head.app.state.runtime.job_notifier
    notifier.step()
    until(lambda: all(one.sending is None or one.sending.done() for one in notifier._outboxes.values()))
    notifier.step()
    head.clock.ahead_s += seconds


def history(call, job):
    return [line["text"] for line in call("user", "GET", f"/v1/jobs/{job}/story").json()["story"]]


def test_a_mail_comes_at_the_start_and_at_the_end_with_runtime_reason_and_the_next_step(
    head, call, node, mail, mail_channel
):
    job = start(head, call, node, notify=ADA)
    sent(head)
    node.end(job, code=3)
    until(lambda: head.store.job(job).state.terminal)
    sent(head)
    sent(head)
    (begun, started), (failed, reason) = mail.texts(ADA)
    assert begun == f"Phalanx: job {job} (train) started"
    assert f"Job {job} (train) of ada in project default started on n0, " in started
    assert f"Next: phalanx attach {job}\n" in started
    assert f"https://head.example.org/jobs/{job}" in started
    assert failed == f"Phalanx: job {job} (train) failed"
    assert "Reason: failed: rank 0 on n0: exit code 3\n" in reason
    assert f"Next: phalanx logs {job}\n" in reason
    assert "project default failed after " in reason


def test_only_the_events_that_are_named_are_sent(head, call, node, mail, mail_channel):
    run(head, call, node, notify={"to": ADA, "on": ["failure"]})
    failed = run(head, call, node, exit_code=1, notify={"to": [ADA], "on": "failure,stall"})
    run(head, call, node, exit_code=1)
    sent(head)
    sent(head)
    assert [title for title, _ in mail.texts(ADA)] == [f"Phalanx: job {failed} (train) failed"]


def test_a_head_that_starts_again_sends_nothing_twice_and_nothing_too_little(
    head, call, node, mail, receiver, tmp_path
):
    add(call, mail, name="mail", topics=["notify"])
    add(call, receiver, name="hook", topics=["notify"])
    receiver.status = 500  # refuses, while mail is delivered: its position is older than that of the mail
    first = run(head, call, node, notify=[ADA, "hook"])
    sent(head)
    assert len(mail.texts(ADA)) == 1
    receiver.status = 200
    missed = run(head, call, node, notify=[ADA, "hook"])
    again = ApiHead(str(tmp_path / "again"), store=head.store, head_id="head-2")
    try:
        with_apprise(again)
        again.clock.ahead_s = head.clock.ahead_s
        sent(again)
        sent(again)
    finally:
        again.close()
    bodies = [body for _, body in mail.texts(ADA)]
    assert [body.count(f"Job {job} (train)") for body in bodies for job in (first, missed)] == [2, 0, 0, 2]
    [(title, body)] = receiver.got
    assert title == "Phalanx: 4 messages about your jobs"
    assert [body.count(f"Job {job} (train)") for job in (first, missed)] == [2, 2]
    assert [one.id for one in head.store.records(CHANNEL_MARKS) if one.id.startswith(JOB_MARKS)] == [JOB_MARKS]


def test_a_service_that_refuses_is_tried_again_for_a_day_and_the_job_says_so(head, call, node, mail, mail_channel):
    mail.refuses = True
    job = run(head, call, node, notify={"to": ADA, "on": "end"})
    sent(head)
    [line] = [text for text in history(call, job) if text.startswith("notify: ")]
    assert line.startswith(f"notify: {ADA} was not reached, trying again: E-Mail: ")
    sent(head, seconds=30.0)
    mail.refuses = False
    sent(head)
    assert len(mail.texts(ADA)) == 1
    assert len([text for text in history(call, job) if text.startswith("notify: ")]) == 1
    mail.refuses = True
    job = run(head, call, node, notify={"to": ADA, "on": "end"})
    sent(head, seconds=job_notifier.GIVE_UP_S)
    sent(head)
    mail.refuses = False
    sent(head, seconds=700.0)
    sent(head)
    assert len(mail.texts(ADA)) == 1
    assert any(text.startswith(f"notify: 1 messages to {ADA} were dropped") for text in history(call, job))


def test_an_array_sends_its_start_its_first_failure_and_its_end(head, call, node, mail, mail_channel):
    array = call.submit(retry=0, notify=ADA, array="0-3", gpus=2).partition("_")[0]
    elements = [f"{array}_{index}" for index in range(4)]
    for job in elements:
        until(lambda job=job: head.store.job(job).state == "running")
        node.run(job)
    sent(head)
    for job, exit_code in zip(elements, (0, 1, 1, 0), strict=True):
        node.end(job, code=exit_code)
        until(lambda job=job: head.store.job(job).state.terminal)
        sent(head)
    sent(head)
    titles = [title for title, _ in mail.texts(ADA)]
    assert titles == [
        f"Phalanx: job {array}_0 (train) started",
        f"Phalanx: job {array}_1 (train) failed",
        f"Phalanx: array {array} (train) ended: 2 succeeded, 2 failed",
    ]
    assert "2 succeeded, 2 failed; unsuccessful: 1-2." in mail.texts(ADA)[2][1]
    assert mail.texts(ADA)[2][1].rstrip().endswith(f"https://head.example.org/jobs/{array}")


def test_an_element_that_can_never_start_is_not_the_first_failure_of_a_head_that_starts_again(head, call, node):
    array = call.submit(retry=0, notify=ADA, array="0-1%1", gpus=8).partition("_")[0]
    until(lambda: head.store.job(f"{array}_0").state == "running")
    waiting = head.store.job(f"{array}_1")
    node.run(f"{array}_0")
    node.end(f"{array}_0", code=1)
    until(lambda: head.store.job(f"{array}_0").state.terminal)
    line = HistoryLine(seq=1, at_s=0.0, kind="never", text="", job_id=waiting.id)
    assert head.app.state.runtime.job_notifier._notes(waiting, waiting.spec.notify, line) == []


def test_many_jobs_of_one_user_send_few_messages(head, call, node, mail, mail_channel, monkeypatch):
    monkeypatch.setattr(job_notifier, "QUICK_MAX", 2)
    for _ in range(5):
        run(head, call, node, notify={"to": ADA, "on": "end"})
        sent(head, seconds=20.0)
    assert len(mail.texts(ADA)) == job_notifier.QUICK_MAX
    sent(head, seconds=job_notifier.BETWEEN_LATER_S)
    sent(head)
    [*_, (title, body)] = mail.texts(ADA)
    assert title == "Phalanx: 3 messages about your jobs"
    assert body.count("succeeded after") == 3


def test_addresses_do_not_multiply_the_messages_of_a_user(head, call, node, mail, mail_channel, monkeypatch):
    monkeypatch.setattr(job_notifier, "USER_MAX", 3)
    addresses = [f"ada{number}@example.org" for number in range(5)]
    run(head, call, node, notify={"to": addresses, "on": "end"})
    for _ in range(5):
        sent(head)
    assert len(mail.mails) == 3
    sent(head, seconds=job_notifier.HOUR_S)
    sent(head)
    sent(head)
    assert sorted(to for [to], _ in mail.mails) == addresses


MESSAGE = Message(title="t", body="b")
# The program that sends to users' URLs, for a test whose receiver is on loopback, and with less time and memory.
LOOPBACK = """
from phalanx.providers.notifications import public_connections, user_message_main as program
is_public = public_connections.is_public
public_connections.is_public = lambda address: address == "127.0.0.1" or is_public(address)
program.TIME_MAX_S, program._MEMORY_MAX_BYTES = %d, 200 << 20
program.main()
"""
RESTRICTED = """
import socket, subprocess
from phalanx.providers.notifications.public_connections import restrict_process
restrict_process()
def tried(what):
    try:
        what()
    except PermissionError:
        return
    raise SystemExit(f"line {what.__code__.co_firstlineno} is allowed")
tried(lambda: open("/etc/hostname"))
tried(lambda: open(b"/etc/hostname"))
tried(lambda: subprocess.run(["true"]))
tried(lambda: socket.create_connection(("127.0.0.1", 9)))
tried(lambda: socket.create_connection(("1.1.1.1", 25)))
tried(lambda: socket.socket(socket.AF_UNIX).connect("/run/x"))
tried(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
print("all refused")
"""


class Answers:
    """A web server that sends this to each request: pieces, of which the last is repeated until the client has gone; an empty one waits for that."""

    def __init__(self, *pieces):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.recv(65536)
                try:
                    for piece in pieces[:-1]:
                        self.request.sendall(piece)
                    while pieces[-1]:
                        self.request.sendall(pieces[-1])
                    self.request.recv(1)  # until the client has gone
                except OSError:
                    pass

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"json://127.0.0.1:{self.server.server_address[1]}/{SECRET}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def to_loopback(time_s=30):
    return AppriseNotifier(user_program=(sys.executable, "-I", "-c", LOOPBACK % time_s))


def refusal(url, time_s=30):
    with pytest.raises(TryLater) as refused:
        to_loopback(time_s).send(url, MESSAGE, from_user=True)
    assert SECRET not in str(refused.value)
    return str(refused.value)


def test_the_url_of_a_user_is_a_secret_and_no_reply_repeats_it(head, call, node, receiver):
    notifier = head.app.state.runtime.job_notifier
    notifier._services = replace(notifier._services, notifier=to_loopback())
    reply = call("user", "PUT", f"/v1/own-secrets/{CHAT_SECRET}", {"value": receiver.url})
    assert reply.status_code == 200, reply.text
    job = run(head, call, node, notify="$CHAT_URL")
    sent(head)
    [(title, _)] = receiver.got
    assert title == "Phalanx: 2 messages about your jobs"
    receiver.status = 500
    failed = run(head, call, node, notify="${CHAT_URL}")
    sent(head)
    assert "notify: $CHAT_URL was not reached" in "; ".join(history(call, failed))
    texts = [
        call("user", "GET", f"/v1/jobs/{job}").text,
        call("admin", "GET", "/v1/story").text,
        call("admin", "GET", "/v1/audit").text,
    ]
    assert [text for text in texts if SECRET in text] == []


def test_the_url_of_a_user_reaches_no_address_that_is_not_public(head, call, node, receiver):
    url = f"json://localhost:{receiver.server.server_port}/"
    assert call("user", "PUT", f"/v1/own-secrets/{CHAT_SECRET}", {"value": url}).status_code == 200
    job = run(head, call, node, notify="$CHAT_URL")
    sent(head)
    [line] = [text for text in history(call, job) if text.startswith("notify: ")]
    assert line == "notify: $CHAT_URL was not reached, trying again: it leads to an address that is not public"
    assert receiver.got == []


def test_a_redirect_of_a_users_service_leads_to_no_private_address():
    with Answers(b"HTTP/1.1 307 x\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n", b"") as url:
        assert refusal(url) == "it leads to an address that is not public"


def test_a_users_service_whose_reply_does_not_end_takes_neither_time_nor_memory_of_the_head():
    with Answers(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1_000_000) as url:
        assert refusal(url) == "JSON: MemoryError"
    with Answers(b"HTTP/1.1 200 OK\r\n\r\n", b"") as url:
        assert refusal(url, time_s=1) == "json: it was ended for taking too much time or memory"


def test_for_the_url_of_a_user_no_file_is_read_no_program_started_and_nothing_else_reached():
    done = subprocess.run([sys.executable, "-c", RESTRICTED], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("all refused\n", "")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:0a00:0001::",
        "head.example.org",
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def test_public_addresses():
    assert is_public("1.1.1.1")
    assert is_public("2606:4700:4700::1111")


def test_a_name_of_a_job_adds_no_header_and_no_markup_to_a_mail(head, call, node, mail, mail_channel):
    wrong = call("user", "POST", "/v1/jobs", {"run": "true", "name": "x\r\nBcc: eve@example.org", "notify": ADA})
    assert wrong.status_code == 422, wrong.text
    run(head, call, node, notify={"to": ADA, "on": "end"}, name="<b>Bcc: eve@example.org</b> \u00e9")
    sent(head)
    [(to, text)] = mail.mails
    assert to == [ADA]
    assert (text["bcc"], text.get_content_type()) == (None, "text/plain")
    assert "<b>Bcc: eve@example.org</b> \u00e9" in text["subject"]


WRONG = (
    ("json://user:s3cr3t-t0ken@h/", 422, "as a secret"),
    ("nobody@", 422, "not a mail address"),
    ({"to": ADA, "on": "ends"}, 422, "no event 'ends'"),
    ({"to": ADA, "when": "end"}, 422, "unknown key 'when'"),
    ([], 422, "no target is named"),
    ([f"a{n}@example.org" for n in range(6)], 422, "at most 5"),
    ("team", 404, "no channel 'team'"),
    ("ops", 404, "no channel 'ops'"),  # it is not for jobs
    ("$CHAT_URL", 404, "no secret CHAT_URL"),
)


def test_wrong_targets_are_refused(call, head, node, receiver):
    add(call, receiver)
    for notify, status, word in WRONG:
        reply = call("user", "POST", "/v1/jobs", {"run": "true", "notify": notify})
        assert reply.status_code == status, reply.text
        assert word in reply.text
        assert SECRET not in reply.text


def test_an_address_that_no_mail_channel_reaches_is_a_warning(call, head, node, mail):
    body = {"run": "true", "notify": ADA}
    for route in ("/v1/jobs", "/v1/jobs/dry-run"):
        [warning] = [one for one in call("user", "POST", route, body).json()["warnings"] if one.startswith("notify")]
        assert warning.startswith(f"notify: nothing is mailed to {ADA} until an admin adds a mail channel")
    add(call, mail, name="mail", topics=["notify"])
    assert [one for one in call("user", "POST", "/v1/jobs", body).json()["warnings"] if one.startswith("notify")] == []


def test_the_channel_of_a_project_is_for_its_jobs_only(call, head, node, receiver):
    add(call, receiver, name="team", project="default")
    assert call("user", "POST", "/v1/jobs", {"run": "true", "notify": "team"}).status_code == 201
    view = call("user", "GET", "/v1/jobs").json()["jobs"][0]
    assert view["notify"] == "team on start, end, failure, stall, idle"
