"""The program of a batch: starts the engine, sends it the requests of a file, and writes the answers. It runs in the job, on the node.

It travels with the requests and runs under the Python of the service's environment: standard library only, Python >= 3.9, no import from phalanx.

The two files of answers are the journal. An answer is in them whole or not at all: they only grow, are synced, and a torn line at their end is cut
off at the next start. The number of its request is in each line, so that a start finds what is left. `progress.json` is for readers only.
`tokens.json` says what was answered in which hour, as it is reported to the head by the pipe of the job.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
PROGRESS = "progress.json"
TOKENS = "tokens.json"
SETTINGS = "batch.json"
INPUT = "input.jsonl.gz"

TRIES = 3  # of one request, at an engine that breaks, refuses for now or is silent
STARTS = 3  # of the engine, without an answer in between
SILENT_S = 3600.0  # an engine that answers nothing for so long is started again
BUSY_PAUSES_S = 60.0  # how long a request waits altogether for an engine that says "too many requests"
DEATH_LOOKS = 20  # of 50 ms each
STOP_S = 5.0  # between SIGTERM and SIGKILL for the engine
SYNC_S = 0.1  # between two syncs of the files of answers
UNSYNCED_MAX = 4 << 20  # bytes of answers that wait for a sync
REPORT_S = 1.0
TOKENS_S = 10.0  # between two reports of tokens
HOUR_S = 3600
STOPPED = 143  # 128 + SIGTERM
_NUMBER = re.compile(rb'\{"id": ?"batch_req_[A-Za-z0-9_]*?_(\d{1,9})",')
_BUSY = (429, 503)


class Line(NamedTuple):
    """One request. `number`: of its line, from 1; `body`: its JSON."""

    number: int
    custom_id: str
    body: bytes


class AnswerFiles:
    """The files of answers.

    Args:
        folder: that has them.
        job: in the ids of the answers.
    """

    def __init__(self, folder: str, job: str) -> None:
        self._job = job
        self.taken: set[int] = set()  # numbers of the requests that have an answer, on the disk or on its way there
        self.completed = self.failed = self.tokens_in = self.tokens_out = 0
        self.error: OSError | None = None
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, bytes, int, int]] = []
        self._bytes = 0
        self._closed = False
        self._output = self._open(os.path.join(folder, OUTPUT), good=True)
        self._errors = self._open(os.path.join(folder, ERRORS), good=False)
        self._thread = threading.Thread(target=self._write, name="answers", daemon=True)
        self._thread.start()

    def _open(self, path: str, *, good: bool) -> int:
        """Open a file for appending, cut off at its first line that is not whole, and count the others."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = 0
        with open(os.dup(fd), "rb") as file:
            for text in file:
                match = _NUMBER.match(text)
                if match is None or not text.endswith(b"}\n"):
                    break
                self.taken.add(int(match[1]))
                tokens = usage_of(text) if good else (0, 0)
                self._count(good=good, tokens=tokens)
                end += len(text)
        os.ftruncate(fd, end)
        os.lseek(fd, end, os.SEEK_SET)
        return fd

    def _count(self, *, good: bool, tokens: tuple[int, int]) -> None:
        if good:
            self.completed += 1
        else:
            self.failed += 1
        self.tokens_in += tokens[0]
        self.tokens_out += tokens[1]

    def add(self, line: Line, response: bytes | None, error: dict[str, str] | None, *, good: bool) -> None:
        """Write the answer of one request; it is counted once it is on the disk. `response`, `error`: JSON and values of the line's fields."""
        text = b"".join(
            (
                f'{{"id":"batch_req_{self._job}_{line.number}","custom_id":'.encode(),
                json.dumps(line.custom_id).encode(),
                b',"response":',
                response or b"null",
                b',"error":',
                json.dumps(error).encode(),
                b"}\n",
            )
        )
        tokens = usage_of(text) if good else (0, 0)
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < UNSYNCED_MAX or self._closed)
            if self._closed or line.number in self.taken:  # the next start sends it again; or it has an answer
                return
            self.taken.add(line.number)
            self._waiting.append((good, text, *tokens))
            self._bytes += len(text)
            self._changed.notify_all()

    def close(self) -> None:
        """Sync what has come, and take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def flush(self) -> None:
        """Wait until everything that has come is on the disk."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._waiting and not self._bytes) or self._closed)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                taken, self._waiting = self._waiting, []
                closed = self._closed
            try:
                for fd, good in ((self._output, True), (self._errors, False)):
                    parts = b"".join(one[1] for one in taken if one[0] is good)
                    if parts:
                        write_all(fd, parts)
                        os.fdatasync(fd)
            except OSError as error:
                self.error = error
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                return
            with self._changed:
                for good, text, tokens_in, tokens_out in taken:
                    self._count(good=good, tokens=(tokens_in, tokens_out))
                    self._bytes -= len(text)
                self._changed.notify_all()
            if closed and not taken:
                return
            if not closed:
                time.sleep(SYNC_S)


def write_all(fd: int, content: bytes) -> None:
    """Write all bytes at the end of a file."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


_USAGE = re.compile(rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens)"\s*:\s*(\d{1,12})')


def usage_of(text: bytes) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answer, as the last `usage` of the text says; 0 for none."""
    at = text.rfind(b'"usage"')
    found = {} if at < 0 else {name: int(value) for name, value in _USAGE.findall(text, at)}
    return (
        found.get(b"prompt_tokens", found.get(b"input_tokens", 0)),
        found.get(b"completion_tokens", found.get(b"output_tokens", 0)),
    )


def read_lines(file: Iterable[bytes]) -> Iterator[Line]:
    """The requests of a file, which was checked before it was sent here."""
    for number, text in enumerate(file, 1):
        if text.strip():
            record = json.loads(text)
            yield Line(number, record["custom_id"], json.dumps(record["body"]).encode())


def say(text: str) -> None:
    """Write a line to the job's log."""
    sys.stderr.write(f"batch: {text}\n")
    sys.stderr.flush()


class TokenReports:
    """Reports to the head what was answered, by hour. Each report has the whole of its hour, so that a lost or repeated one does no harm.

    Args:
        folder: keeps the hours, so that another start goes on with them.
        files: whose counts are reported.
        environment: of the job; without a pipe in it, nothing is reported.
    """

    def __init__(self, folder: str, files: AnswerFiles, environment: Mapping[str, str]) -> None:
        self._path, self._files = os.path.join(folder, TOKENS), files
        self._pipe = environment.get("PHALANX_REPORT_PIPE", "")
        self._head: dict[str, Any] = {"k": "tokens", "rank": 0}
        for name in ("epoch", "generation"):
            self._head[name] = int(environment.get(f"PHALANX_{name.upper()}") or 0)
        self._hours: dict[int, list[int]] = {}
        with (
            contextlib.suppress(OSError, ValueError, TypeError, AttributeError),
            open(self._path, encoding="utf-8") as file,
        ):
            self._hours = {int(hour): [int(one) for one in counts[:3]] for hour, counts in json.load(file).items()}
        self._due_s = 0.0

    def report(self, now_s: float, *, last: bool = False) -> None:
        """Report, unless the last one was just before. `now_s`: Unix time."""
        if not self._pipe or (time.monotonic() < self._due_s and not last):
            return
        self._due_s = time.monotonic() + TOKENS_S
        hour = int(now_s) // HOUR_S * HOUR_S
        whole = (self._files.completed, self._files.tokens_in, self._files.tokens_out)
        others = [counts for at, counts in self._hours.items() if at != hour]
        self._hours[hour] = [max(0, total - sum(one[at] for one in others)) for at, total in enumerate(whole)]
        with contextlib.suppress(OSError):
            with open(self._path + ".new", "w", encoding="utf-8") as file:
                json.dump(self._hours, file)
            os.replace(self._path + ".new", self._path)
        counts = dict(zip(("requests", "prompt_tokens", "answer_tokens"), self._hours[hour]))  # noqa: B905  # Python 3.9
        line = json.dumps({**self._head, "hour": hour, **counts}).encode() + b"\n"
        with contextlib.suppress(OSError):
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, line)
            finally:
                os.close(pipe)


class BatchEngine:
    """The engine's process.

    Args:
        settings: of the batch.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ("127.0.0.1", 0)
        self.number = 0  # of its starts
        self.ready = threading.Event()

    def start(self) -> None:
        """Start it on a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self.address = ("127.0.0.1", port)
        self.number += 1
        ours = {
            "PORT": str(port),
            "PHALANX_PORT": str(port),
            "PHALANX_SERVICE": self._settings["service"],
            "PHALANX_REVISION": str(self._settings["revision"]),
        }
        run = self._settings["run"]
        self._process = subprocess.Popen(
            run if isinstance(run, list) else ["bash", "-c", run],
            cwd=self._settings["workdir"],
            env={**os.environ, **ours},
            start_new_session=True,
        )

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def ended(self) -> str:
        """How it ended."""
        code = None if self._process is None else self._process.poll()
        return (
            "did not start" if code is None else f"ended with code {code}" if code >= 0 else f"died of signal {-code}"
        )

    def answers(self) -> bool:
        """Whether it is ready, as the service's check says."""
        port = self.address[1]
        hosts = ["127.0.0.1", *(os.environ.get("PHALANX_NODE_IPS") or "").split("\n")[:1]]
        for host in filter(None, hosts):
            if self._settings["ready"] == "tcp":
                with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
                    self.address = (host, port)
                    return True
                continue
            connection = http.client.HTTPConnection(host, port, timeout=10)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", self._settings["ready"])
                if 200 <= connection.getresponse().status < 400:
                    self.address = (host, port)
                    connection.close()
                    return True
            connection.close()
        return False

    def stop(self) -> None:
        """End it and its children."""
        self.ready.clear()
        process = self._process
        if process is None:
            return
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)


class BatchRun:
    """One run of a batch, until it is done or asked to stop.

    Args:
        folder: with the settings and the requests.
        outputs: gets the answers.
        job: id of the job.
    """

    def __init__(self, folder: str, outputs: str, job: str) -> None:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            self.settings: dict[str, Any] = json.load(file)
        self._input = os.path.join(folder, INPUT)
        self._outputs = outputs
        self.files = AnswerFiles(outputs, job)
        self.tokens = TokenReports(outputs, self.files, os.environ)
        self.engine = BatchEngine(self.settings)
        self.asked = False  # to stop, by a signal
        self.stopping = threading.Event()  # nothing more is sent
        self._at_once = int(self.settings["at_once"])
        self._lines: queue.Queue[Line | None] = queue.Queue(self._at_once)
        self._lock = threading.Lock()
        self._flying: set[int] = set()  # numbers of requests under way
        self._tries: dict[int, int] = {}
        self._again: list[Line] = []
        self._alone: list[Line] = []  # were under way when the engine died, twice: one of them may kill it
        self._usable = 0  # number of the engine's start that gets requests; 0 for none
        self._lone = 0  # number of the one of these that is under way
        self._blamed = 0  # requests that killed the engine alone, since the last answer
        self._report_s = 0.0
        self.expired = False
        self._answered_s = time.monotonic()
        self._starts = 0  # since the last answer
        self._reader_done = threading.Event()
        self._reported = -1

    # ---- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Answer all requests; return the exit code."""
        self.report("in_progress")
        say(f"{self.files.completed + self.files.failed} of {self.settings['lines']} requests are answered")
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._at_once)]
        reader = threading.Thread(target=self._read, name="requests", daemon=True)
        code = 0
        try:
            if self._left():
                reader.start()
                for thread in threads:
                    thread.start()
                code = self._supervise()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            done = not self.asked and code == 0
            if done and self.expired:
                self._expire()
            if done:
                self.files.flush()
                self.report("finalizing")
            self.stopping.set()
            self.engine.stop()
            self.files.close()
        if self.files.error is not None:
            say(f"the answers cannot be written: {self.files.error}")
            return 1
        if done:
            self.report("expired" if self.expired else "completed")
            return 0
        self._report_s = 0.0
        self.report("in_progress")
        return code or STOPPED

    def _left(self) -> int:
        return int(self.settings["lines"]) - self.files.completed - self.files.failed

    def _supervise(self) -> int:
        """Keep the engine running until all requests are answered."""
        while not self._stops():
            if self.files.error is not None:
                return 1
            if time.time() >= self.settings["expires_s"]:
                self.expired = True
                return 0
            if self._left() <= 0:
                return 0
            if self.engine.alive() and time.monotonic() - self._answered_s > SILENT_S:
                say(f"no answer for {SILENT_S:g} s; the engine is started again")
                self.engine.stop()
            if not self.engine.alive() and not self._start_engine():
                return 1
            self.report("in_progress")
        return STOPPED

    def _stops(self) -> bool:
        """Wait a moment; return whether it shall stop. A signal handler may set no event: it might interrupt one that is being waited for."""
        if not self.asked:
            time.sleep(0.05)
        if self.asked:
            self.stopping.set()
        return self.asked

    def _start_engine(self) -> bool:
        """Start the engine and wait until it is ready; False if it fails too often."""
        if self.engine.number:
            say(f"the engine {self.engine.ended()}")
            self.engine.stop()  # children that it left
        if self._starts >= STARTS:
            say(f"the engine failed {STARTS} times without an answer")
            return False
        self._starts += 1
        self.engine.start()
        until_s = time.monotonic() + self.settings["ready_within_s"]
        while not self._stops():
            if self.engine.answers():
                self._answered_s = time.monotonic()
                with self._lock:
                    self._usable = self.engine.number
                self.engine.ready.set()
                return True
            if not self.engine.alive() or time.time() >= self.settings["expires_s"]:
                return True  # the next look sees it
            if time.monotonic() >= until_s:
                say("the engine is not ready in time")
                self.engine.stop()
                return True
        return True

    def _expire(self) -> None:
        """Give every request that has no answer the error that says so."""
        error = {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        }
        self.stop_work()
        with gzip.open(self._input, "rb") as file:
            for line in read_lines(file):
                if line.number not in self.files.taken:
                    self.files.add(line, None, error, good=False)

    def stop_work(self) -> None:
        """End the engine, and let no request of it be answered any more."""
        self.stopping.set()
        self.engine.stop()
        self.files.flush()

    # ---- requests -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with gzip.open(self._input, "rb") as file:
            for line in read_lines(file):
                if self.stopping.is_set() or self.expired:
                    return
                if line.number not in self.files.taken:
                    self._lines.put(line)
        self._reader_done.set()

    def _next(self) -> Line | None:
        """The next request, which counts as under way; None if nothing can be sent now."""
        with self._lock:
            if self._lone or self._usable != self.engine.number:
                return None
            line = self._again.pop() if self._again else None
            if line is None:
                with contextlib.suppress(queue.Empty):
                    line = self._lines.get_nowait()
            if line is None and self._alone and not self._flying and self._reader_done.is_set():
                line = self._alone.pop()
                self._lone = line.number
            if line is not None:
                self._flying.add(line.number)
        return line

    def _landed(self, line: Line) -> None:
        """A request is no longer under way. The caller holds the lock."""
        self._flying.discard(line.number)
        if self._lone == line.number:
            self._lone = 0

    def _work(self) -> None:
        connection: http.client.HTTPConnection | None = None
        of = 0
        while not self.stopping.is_set() and not self.expired:
            if not self.engine.ready.wait(0.2):
                continue
            line = self._next()
            if line is None:
                time.sleep(0.02)
                continue
            number = self.engine.number
            if connection is None or of != number:
                connection = http.client.HTTPConnection(*self.engine.address, timeout=SILENT_S)
                of = number
            if not self._ask(connection, line, number):
                connection = None

    def _ask(self, connection: http.client.HTTPConnection, line: Line, engine: int) -> bool:
        """Send one request and write its answer; False if the connection is of no use any more."""
        pause_s, waited_s = 0.1, 0.0
        request_id = f"{self.settings['batch']}-{line.number}"
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        while True:
            try:
                connection.request("POST", self.settings["endpoint"], body=line.body, headers=headers)
                answer = connection.getresponse()
                status, body = answer.status, answer.read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                self._broke(line, engine, f"{type(error).__name__}: {error}"[:200])
                return False
            if status in _BUSY and waited_s < BUSY_PAUSES_S and not self.stopping.is_set():
                time.sleep(pause_s)
                waited_s, pause_s = waited_s + pause_s, min(5.0, pause_s * 2)
                continue
            break
        head = json.dumps({"status_code": status, "request_id": request_id})[:-1].encode()
        response = head + b', "body": ' + one_line(body) + b"}"
        if status >= 500:
            self._broke(line, engine, f"status {status}", response)
            return True
        with self._lock:
            self._landed(line)
        self._answered_s = time.monotonic()
        self._starts = self._blamed = 0
        self.files.add(line, response, None, good=200 <= status < 300)
        return True

    def _broke(self, line: Line, engine: int, why: str, response: bytes | None = None) -> None:
        """A request has no answer, or the answer that the engine has failed. It gets another try, in the end alone, if the engine died."""
        died = False
        for _ in range(DEATH_LOOKS):  # a process that dies closes its connections first
            died = self.engine.number != engine or not self.engine.alive()
            if died or self.stopping.is_set():
                break
            time.sleep(0.05)
        with self._lock:
            alone = self._lone == line.number
            self._landed(line)
            if died and self._usable == engine:  # the next request would only find nothing there
                self._usable = 0
            if self.stopping.is_set():
                return
            tries = self._tries[line.number] = self._tries.get(line.number, 0) + 1
            if died and tries >= TRIES - 1 and not alone:
                self._alone.append(line)
                return
            if tries < TRIES and not (died and alone):
                self._again.append(line)
                return
            if died and self._blamed < STARTS:  # it is this request, not the engine
                self._blamed += 1
                self._starts = 0
        code = "engine_failed" if died else "no_answer"
        error = (
            None if response else {"code": code, "message": f"the engine failed {tries} times with this request: {why}"}
        )
        self.files.add(line, response, error, good=False)

    # ---- reports --------------------------------------------------------------------------------------------------------

    def report(self, state: str) -> None:
        """Write the progress where readers of the outputs and the supervisor find it, at most once a second while it runs."""
        self.tokens.report(time.time(), last=state != "in_progress" or self.stopping.is_set())
        done = self.files.completed + self.files.failed
        if state == "in_progress" and (done == self._reported or time.monotonic() < self._report_s):
            return
        self._reported, self._report_s = done, time.monotonic() + REPORT_S
        record = {
            "state": state,
            "total": self.settings["lines"],
            "completed": self.files.completed,
            "failed": self.files.failed,
            "input_tokens": self.files.tokens_in,
            "output_tokens": self.files.tokens_out,
            "at_s": time.time(),
        }
        path = os.path.join(self._outputs, PROGRESS)
        with contextlib.suppress(OSError):  # the answers are what counts
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(path + ".new", path)


def one_line(body: bytes) -> bytes:
    """JSON without line breaks. What is no JSON becomes a text."""
    try:
        found = json.loads(body)
    except ValueError:  # also bytes that are not UTF-8
        return json.dumps(body.decode("utf-8", "replace")).encode()
    return json.dumps(found).encode() if b"\n" in body or b"\r" in body else body


def main() -> int:
    """Run the batch of this folder."""
    folder = os.path.dirname(os.path.abspath(__file__))
    batch = BatchRun(folder, os.environ["PHALANX_OUTPUT_DIR"], os.environ.get("PHALANX_JOB_ID", "0"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(batch, "asked", True))
    return batch.run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for the engine that is gone
