"""The driver of a batch as a process, with an engine of a few lines, and its journal."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from phalanx.batches import driver
from phalanx.batches.driver import AnswerFiles, Line, one_line, usage_of

ENGINE = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def answer(self, status, body):
        self.send_response(status); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self): self.answer(200, b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("asked", "a") as file: file.write(str(asked["n"]) + "\\n")
        kind = asked.get("kind")
        if kind == "poison": os._exit(9)
        if kind == "slow": time.sleep(60)
        if kind == "once" and not os.path.exists("once"):
            open("once", "w").close(); return self.answer(503, b"busy")
        if kind == "wrong": return self.answer(400, b'{"error":\\n {"message": "no"}}')
        if kind == "broken": return self.answer(500, b"oh")
        self.answer(200, json.dumps({"n": asked["n"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode())
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "engine.py").write_text(ENGINE)
    shutil.copy(driver.__file__, tmp_path / "batch_driver.py")
    return tmp_path


def prepare(folder, kinds, *, at_once=8, expires_s=60.0, run=None):
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"n": number, "kind": kind},
        }
        for number, kind in enumerate(kinds, 1)
    ]
    with gzip.open(folder / driver.INPUT, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    settings = {
        "batch": "b",
        "service": "chat",
        "revision": 1,
        "endpoint": "/v1/chat/completions",
        "lines": len(rows),
        "expires_s": time.time() + expires_s,
        "at_once": at_once,
        "run": run or [sys.executable, "-S", "engine.py"],
        "workdir": str(folder),
        "ready": "/health",
        "ready_within_s": 30.0,
    }
    (folder / driver.SETTINGS).write_text(json.dumps(settings))


def start(folder, **more):
    env = {"PATH": os.environ["PATH"], "PHALANX_OUTPUT_DIR": str(folder / "out"), "PHALANX_JOB_ID": "7", **more}
    return subprocess.Popen([sys.executable, "-S", "batch_driver.py"], cwd=folder, env=env, stderr=subprocess.PIPE)


def ended(process, within_s=60):
    _, log = process.communicate(timeout=within_s)
    return process.returncode, log.decode()


def answers(folder, name=driver.OUTPUT):
    return [json.loads(text) for text in (folder / "out" / name).read_text().splitlines()]


def progress(folder):
    return json.loads((folder / "out" / driver.PROGRESS).read_text())


def test_every_request_is_answered_once_whatever_the_engine_does(folder):
    kinds = ["", "once", "", "wrong", "broken", "poison", *[""] * 14]
    prepare(folder, kinds)
    code, log = ended(start(folder))
    assert code == 0, log
    good, bad = answers(folder), {one["custom_id"]: one for one in answers(folder, driver.ERRORS)}
    assert sorted(one["response"]["body"]["n"] for one in good) == [n for n in range(1, 21) if n not in (4, 5, 6)]
    assert sorted(bad) == ["r4", "r5", "r6"]
    assert (bad["r4"]["response"]["status_code"], bad["r4"]["error"]) == (400, None)
    assert bad["r5"]["response"]["body"] == "oh"
    assert (bad["r6"]["response"], bad["r6"]["error"]["code"]) == (None, "engine_failed")
    found = progress(folder)
    assert (found["state"], found["completed"], found["failed"]) == ("completed", 17, 3)
    assert (found["input_tokens"], found["output_tokens"]) == (34, 51)


def test_a_stopped_batch_goes_on_at_its_line(folder):
    prepare(folder, [*[""] * 5, "slow", *[""] * 5], at_once=1)
    process = start(folder)
    limit_s = time.monotonic() + 30
    while not (folder / "asked").exists() or "6" not in (folder / "asked").read_text().split():
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert [one["custom_id"] for one in answers(folder)] == ["r1", "r2", "r3", "r4", "r5"]
    with (folder / "out" / driver.OUTPUT).open("ab") as file:
        file.write(b'{"id":"batch_req_7_9","custom_id":"r9","respon')  # as a power cut leaves it
    prepare(folder, [*[""] * 11])
    assert ended(start(folder))[0] == 0
    assert sorted(one["response"]["body"]["n"] for one in answers(folder)) == list(range(1, 12))
    asked = (folder / "asked").read_text().split()
    assert sorted(asked) == sorted([*map(str, range(1, 12)), "6"])  # only the one that was under way twice


def test_what_is_late_expires(folder):
    prepare(folder, ["", "slow", ""], at_once=2, expires_s=2.0)
    code, log = ended(start(folder))
    assert code == 0, log
    assert {one["error"]["code"] for one in answers(folder, driver.ERRORS)} == {"batch_expired"}
    assert sorted(one["custom_id"] for one in answers(folder) + answers(folder, driver.ERRORS)) == ["r1", "r2", "r3"]
    assert progress(folder)["state"] == "expired"


def test_an_engine_that_never_starts_fails_the_job(folder):
    prepare(folder, [""], run="exit 3")
    code, log = ended(start(folder))
    assert code == 1
    assert log.count("the engine ended with code 3") == 3
    assert "failed 3 times without an answer" in log


def test_the_journal_cuts_what_is_torn_and_takes_nothing_twice(tmp_path):
    files = AnswerFiles(str(tmp_path), "7_1")
    for number in (1, 2, 2):
        files.add(Line(number, f"r{number}", b"{}"), b'{"status_code": 200}', None, good=True)
    files.close()
    path = tmp_path / driver.OUTPUT
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    for torn in (whole[:-1], whole + b"{", whole + b"\0" * 100, whole + whole[:20]):
        path.write_bytes(torn)
        again = AnswerFiles(str(tmp_path), "7_1")
        again.close()
        assert path.read_bytes() in (whole, whole[: whole.index(b"\n") + 1])
        assert again.taken in ({1, 2}, {1})


def test_answers_are_one_line_of_json():
    assert one_line(b'{"a":\n1}') == b'{"a": 1}'
    assert one_line(b'{"a":1.0}') == b'{"a":1.0}'
    assert json.loads(one_line(b"\xff\n")) == "\ufffd\n"
    assert usage_of(b'{"usage":{"input_tokens": 3, "output_tokens": 4}}') == (3, 4)
    assert usage_of(b"{}") == (0, 0)


def test_tokens_are_reported_by_hour_and_each_report_has_the_whole_of_it(folder):
    pipe = str(folder / "reports")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    prepare(folder, ["", "wrong", "", ""])
    before = int(time.time()) // 3600 * 3600
    assert ended(start(folder, PHALANX_REPORT_PIPE=pipe, PHALANX_EPOCH="3", PHALANX_GENERATION="1"))[0] == 0
    reports = [json.loads(text) for text in os.read(reader, 1 << 16).splitlines()]
    assert {(one["k"], one["rank"], one["epoch"], one["generation"]) for one in reports} == {("tokens", 0, 3, 1)}
    assert reports[0]["requests"] == 0, "the first one, so that the time of loading counts as the batch's"
    newest = {one["hour"]: one for one in reports}
    assert min(newest) >= before
    sums = [sum(one[name] for one in newest.values()) for name in ("requests", "prompt_tokens", "answer_tokens")]
    assert sums == [3, 6, 9]
    os.close(reader)


def test_hours_before_a_restart_keep_their_counts(folder):
    files = AnswerFiles(str(folder / "out"), "7")
    pipe = str(folder / "reports")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    environment = {"PHALANX_REPORT_PIPE": pipe}
    files.completed, files.tokens_in, files.tokens_out = 5, 10, 15
    driver.TokenReports(str(folder), files, environment).report(7300.0)
    files.completed, files.tokens_in, files.tokens_out = 8, 16, 24
    driver.TokenReports(str(folder), files, environment).report(10900.0)
    files.completed, files.tokens_in, files.tokens_out = 6, 12, 18  # on another node, which has fewer answers
    driver.TokenReports(str(folder), files, environment).report(14500.0)
    found = [json.loads(text) for text in os.read(reader, 1 << 16).splitlines()]
    assert [(one["hour"], one["requests"], one["answer_tokens"]) for one in found] == [
        (7200, 5, 15),
        (10800, 3, 9),
        (14400, 0, 0),
    ]
    (folder / driver.TOKENS).write_text("[")
    driver.TokenReports(str(folder), files, environment).report(14500.0)
    assert json.loads(os.read(reader, 1 << 16))["requests"] == 6, "a broken file is none"
    os.close(reader)
    files.close()
