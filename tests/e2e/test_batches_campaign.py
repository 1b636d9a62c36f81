"""Batches through a real gateway and head: kills, preemption, rights. Requests are those that OpenAI's client sends; with `openai` installed, it sends some itself."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.e2e.test_gateway import Gateway

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ENDED = ("completed", "failed", "expired", "cancelled")
SLOW = 0.05  # seconds of a token; an answer has 8, and 8 answers are under way at once
FILE = f"""
type: service
name: chat
run: exec {sys.executable} -m tests.protocol_engine --port $PORT --served-model-name chat --pause {SLOW} --max-num-seqs 8
env: {{PYTHONPATH: "{ROOT}"}}
gpus: 2
replicas: 0..2
ready: /health
"""


def request(number, text="hello", **more):
    body = {"model": "chat", "messages": [{"role": "user", "content": f"{text} {number}"}], "max_tokens": 8}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body | more}


def lines(count):
    return b"".join(json.dumps(request(number)).encode() + b"\n" for number in range(count))


class Batches:
    """The routes, as OpenAI's client calls them."""

    def __init__(self, gateway, key=None):
        headers = {"Authorization": f"Bearer {key or gateway.key}"}
        self.http = httpx.Client(base_url=gateway.url + "/v1", headers=headers, timeout=120, trust_env=False)

    def ask(self, method, path, status=200, **more):
        answer = self.http.request(method, path, **more)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()

    def file(self, content):
        form = {"file": ("in.jsonl", content, "application/octet-stream")}
        return self.ask("POST", "/files", data={"purpose": "batch"}, files=form)["id"]

    def create(self, content, endpoint="/v1/chat/completions", **more):
        body = {"input_file_id": self.file(content), "endpoint": endpoint, "completion_window": "24h", **more}
        return self.ask("POST", "/batches", json=body)

    def until(self, batch, check, within_s=180.0):
        limit_s = time.monotonic() + within_s
        while not check(found := self.ask("GET", f"/batches/{batch}")):
            assert time.monotonic() < limit_s, found
            time.sleep(0.1)
        return found

    def until_ended(self, batch):
        return self.until(batch, lambda found: found["status"] in ENDED)

    def until_answered(self, batch, count):
        return self.until(batch, lambda found: found["request_counts"]["completed"] >= count)

    def answers(self, file):
        return [json.loads(one) for one in self.http.get(f"/files/{file}/content").text.splitlines()]


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("batches"))
    shell("up", "--virtual", "1x2", "--min-run-by-right", "1s", "--port", str(free_port()))
    (shell.work / "chat.yaml").write_text(FILE)
    shell("submit", "chat.yaml")
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(scope="module")
def gateway(phalanx):
    process = Gateway(phalanx)
    yield process
    assert process.stop() == 0


@pytest.fixture
def batches(gateway):
    client = Batches(gateway)
    yield client
    client.http.close()


def assert_each_once(batches, ended, count):
    """Every request has one answer, in one of the files."""
    assert ended["status"] == "completed", ended
    assert ended["request_counts"] == {"total": count, "completed": count, "failed": 0}
    assert ended["error_file_id"] is None
    answers = batches.answers(ended["output_file_id"])
    assert sorted(one["custom_id"] for one in answers) == sorted(f"r{number}" for number in range(count))
    for one in answers:
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["usage"]["completion_tokens"] <= 8
    total = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
    assert ended["usage"]["total_tokens"] == total


def test_kills_of_the_engine_of_the_driver_and_of_the_head_lose_and_double_nothing(phalanx, batches):
    batch = batches.create(lines(400), metadata={"team": "nlp"})
    assert (batch["status"], batch["metadata"]) == ("validating", {"team": "nlp"})
    job = batch["id"].removeprefix("batch_")
    batches.until_answered(batch["id"], 40)
    (engine,) = phalanx.processes("tests.protocol_engine", PHALANX_JOB_ID=job)
    os.kill(engine, signal.SIGKILL)
    batches.until_answered(batch["id"], 120)
    (driver,) = phalanx.processes("batch_driver.py", PHALANX_JOB_ID=job)
    os.kill(driver, signal.SIGKILL)
    batches.until_answered(batch["id"], 200)
    head = json.loads((phalanx.home / "head.json").read_text())
    os.kill(head["pid"], signal.SIGKILL)
    with contextlib.suppress(AssertionError):  # 503 is what it may say now
        batches.ask("GET", f"/batches/{batch['id']}", status=503)
    phalanx("up")
    ended = batches.until_ended(batch["id"])
    assert_each_once(batches, ended, 400)
    shown = phalanx.job(job)
    assert len(shown["attempts"]) >= 1
    log = phalanx("logs", job).stdout
    assert "died of signal 9" in log
    deadline_s = time.monotonic() + 60
    wanted = {
        "requests": 400,
        "prompt_tokens": ended["usage"]["input_tokens"],
        "answer_tokens": ended["usage"]["output_tokens"],
    }
    row: dict[str, object] = {}
    while not wanted.items() <= row.items():
        assert time.monotonic() < deadline_s, row
        time.sleep(0.5)
        rows = json.loads(phalanx("report", "tokens", "--json").stdout)["rows"]
        row = next((one for one in rows if one["batch"]), {})
    spans = json.loads(phalanx("report", "usage", "--by", "job", "--json").stdout)["rows"]
    assert [row["gpu_us"]] == [one["gpu_us"] for one in spans if one["key"] == job], "the whole span of the job"


def test_a_batch_gives_way_to_a_job_and_goes_on_at_its_line(phalanx, batches):
    batch = batches.create(lines(300))
    job = batch["id"].removeprefix("batch_")
    answered = batches.until_answered(batch["id"], 60)["request_counts"]["completed"]
    phalanx("run", "--gpus", "2", "--", sys.executable, "-c", "print('it ran')")
    found = batches.ask("GET", f"/batches/{batch['id']}")
    assert found["status"] == "in_progress"
    assert found["request_counts"]["completed"] >= answered
    ended = batches.until_ended(batch["id"])
    assert_each_once(batches, ended, 300)
    attempts = phalanx.job(job)["attempts"]
    assert len(attempts) >= 2
    assert "preempted" in json.dumps(attempts[0])


def test_a_cancelled_batch_keeps_what_was_answered(batches):
    batch = batches.create(lines(300))
    batches.until_answered(batch["id"], 20)
    cancelled = batches.ask("POST", f"/batches/{batch['id']}/cancel")
    assert cancelled["status"] in ("cancelling", "cancelled")
    ended = batches.until_ended(batch["id"])
    assert ended["status"] == "cancelled"
    answers = batches.answers(ended["output_file_id"])
    ids = [one["custom_id"] for one in answers]
    assert 20 <= len(ids) == len(set(ids)) == ended["request_counts"]["completed"] < 300
    assert batches.ask("POST", f"/batches/{batch['id']}/cancel", status=409)["error"]["code"] == "batch_ended"


def test_requests_that_the_engine_refuses_are_in_the_file_of_errors(batches):
    good, wrong = request(0), request(1, max_tokens=0)
    ended = batches.until_ended(batches.create(b"\n".join(json.dumps(one).encode() for one in (good, wrong)))["id"])
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (error,) = batches.answers(ended["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("r1", 400, None)
    assert [one["custom_id"] for one in batches.answers(ended["output_file_id"])] == ["r0"]


@pytest.mark.parametrize(
    ("content", "endpoint", "code", "line"),
    [
        (b"", "/v1/chat/completions", "empty_file", None),
        (b"\n \n", "/v1/chat/completions", "empty_file", None),
        (b"{}\nnothing\n", "/v1/chat/completions", "invalid_json_line", 2),
        (lines(1) + lines(1), "/v1/chat/completions", "duplicate_custom_id", 2),
        (lines(2), "/v1/embeddings", "mismatched_endpoint", 1),
        (lines(1).replace(b'"chat"', b'"other"'), "/v1/chat/completions", "model_not_found", None),
        (
            lines(1) + lines(2)[len(lines(1)) :].replace(b'"chat"', b'"b"'),
            "/v1/chat/completions",
            "mismatched_model",
            2,
        ),
        (b'{"custom_id": "\xff\xfe"}\n', "/v1/chat/completions", "invalid_encoding", 1),
        (lines(1).replace(b'"max_tokens": 8', b'"stream": true'), "/v1/chat/completions", "invalid_value", 1),
        (b"[" * 100_000 + b"\n", "/v1/chat/completions", "invalid_json_line", 1),
        (b'{"x": "' + b"y" * (17 << 20) + b'"}\n', "/v1/chat/completions", "line_too_long", 1),
    ],
)
def test_a_wrong_file_fails_its_batch_and_says_where(batches, content, endpoint, code, line):
    batch = batches.create(content, endpoint)
    assert batch["status"] == "failed"
    assert (code, line) in [(one["code"], one["line"]) for one in batch["errors"]["data"]]
    assert batches.ask("GET", f"/batches/{batch['id']}") == batch
    assert batch["id"] in [one["id"] for one in batches.ask("GET", "/batches")["data"]]


@pytest.mark.parametrize("content", [b"", b"--b\r\nbroken", b"--b--", b"--b\r\nA: " + b"x" * 100_000])
def test_a_broken_form_is_no_error_of_the_gateway(batches, content):
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    error = batches.ask("POST", "/files", status=400, content=content, headers=headers)["error"]
    assert error["type"] == "invalid_request_error"


def test_another_users_files_and_batches_do_not_exist(phalanx, gateway, batches):
    phalanx("users", "add", "eve")
    key = phalanx("tokens", "add", "--user", "eve").stdout.split()[0]
    file = batches.file(lines(3))
    batch = batches.create(lines(3))
    ended = batches.until_ended(batch["id"])
    eve = Batches(gateway, key)
    for method, path in (
        ("GET", f"/files/{file}"),
        ("DELETE", f"/files/{file}"),
        ("GET", f"/files/{file}/content"),
        ("GET", f"/files/{ended['output_file_id']}"),
        ("GET", f"/files/{ended['output_file_id']}/content"),
        ("GET", f"/batches/{batch['id']}"),
        ("POST", f"/batches/{batch['id']}/cancel"),
    ):
        assert eve.ask(method, path, status=404)["error"]["code"] in ("file_not_found", "batch_not_found"), path
    assert eve.ask("GET", "/files")["data"] == []
    assert eve.ask("GET", "/batches")["data"] == []
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    eve.ask("POST", "/batches", status=404, json=body)
    own = body | {"input_file_id": eve.file(lines(3))}
    refused = eve.ask("POST", "/batches", status=403, json=own)  # it would start the owner's command
    assert "only its owner" in refused["error"]["message"]


def test_the_same_line_waits_again_and_fetches_again(phalanx):
    (phalanx.work / "in.jsonl").write_bytes(lines(20))
    phalanx("serve", "batch", "chat", "in.jsonl", "-d")
    done = phalanx("serve", "batch", "chat", "in.jsonl")
    assert "has these requests already" in done.stderr
    assert done.stdout.startswith("20 answered, 0 failed; in.output.jsonl ")
    answers = [json.loads(one) for one in (phalanx.work / "in.output.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"r{number}" for number in range(20))
    (phalanx.work / "wrong.jsonl").write_bytes(lines(1) + b"{\n")
    wrong = phalanx("serve", "batch", "chat", "wrong.jsonl", code=65)
    assert "wrong.jsonl:2: the line is not JSON" in wrong.stderr


def test_openais_client(gateway, tmp_path):
    openai = pytest.importorskip("openai")
    (tmp_path / "in.jsonl").write_bytes(lines(20))
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key=gateway.key)
    with (tmp_path / "in.jsonl").open("rb") as source:
        file = client.files.create(file=source, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"team": "nlp"}
    )
    limit_s = time.monotonic() + 120
    while (found := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < limit_s
        time.sleep(0.2)
    assert (found.status, found.request_counts.completed, found.metadata) == ("completed", 20, {"team": "nlp"})
    answers = client.files.content(found.output_file_id).text.splitlines()
    assert sorted(json.loads(one)["custom_id"] for one in answers) == sorted(f"r{number}" for number in range(20))
    assert client.files.retrieve(found.output_file_id).purpose == "batch_output"
    assert next(one.id for one in client.batches.list(limit=1)) == batch.id
    assert len([one.id for one in client.batches.list(limit=2)]) == len(list(client.batches.list(limit=100)))
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
