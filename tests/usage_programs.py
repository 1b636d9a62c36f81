"""Programs that write down what they do and when, for the scenarios of `tests/e2e/test_usage_scenarios.py`.

    python usage_programs.py PROGRAM FILE PARAMETERS

Each line of FILE is a JSON object: from `at` on (Unix seconds) the device is in one of the states `is`; `share` is the CPU time that the phase
before this line used, as a part of its time. A phase that says its state by that share is cut every few seconds: a loaded machine does not give the
same share all the time. What Phalanx makes of the program's samples and reports is never seen here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from phalanx.wire.rank import REPORT_PIPE_VARIABLE, ReportKind, boottime_ns, encode_report

BUSY: Final = 0.2  # of a core: several programs share two cores, and each must get what it wants
FRAME_S: Final = 0.1
CUT_S: Final = 5.0
BY_SHARE: Final = "by its CPU time"
BEFORE_FIRST_STEP: Final = ("starting",)


# ---- the programs -----------------------------------------------------------------------------------------------------


class Diary:
    """Writes the truth of this process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._begin = (time.time(), time.process_time())
        self._states: tuple[str, ...] = ()

    def cut(self) -> None:
        """Say again what it does, if the phase is long and its state follows from its share."""
        if self._states == (BY_SHARE,) and time.time() - self._begin[0] >= CUT_S:
            self.write(BY_SHARE)

    def write(self, *states: str, at_s: float | None = None) -> None:
        """From now on it is in one of these states; without any it is not told."""
        now_s, cpu_s = time.time(), time.process_time()
        share = (cpu_s - self._begin[1]) / max(now_s - self._begin[0], 1e-6)
        self._begin, self._states = (now_s, cpu_s), states
        line = {"at": now_s if at_s is None else at_s, "is": states, "share": share}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def claim_cpu() -> None:
    """Get what this process wants to use although others load this machine: by its session (sched(7), autogroup) and by its cgroups."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.rstrip("\n").split(":") for line in file]
    for _, controllers, path in lines:
        root = "/sys/fs/cgroup/cpu" if "cpu" in controllers.split(",") else "/sys/fs/cgroup"
        at = next((place for place, part in enumerate(path.split("/")) if part.startswith("phalanx-")), None)
        for depth in () if at is None else range(at, path.count("/") + 1):
            folder = root + "/".join(path.split("/")[: depth + 1])
            for name, weight in (("cpu.shares", "16384"), ("cpu.weight", "1600")):
                with contextlib.suppress(OSError), open(f"{folder}/{name}", "w", encoding="ascii") as file:
                    file.write(weight)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
        with open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write("-15")


def burn(share: float, seconds: float) -> None:
    """Use this share of a core, measured by the CPU time that the process gets."""
    until_s = time.monotonic() + seconds
    while (frame_s := time.monotonic()) < until_s:
        until_cpu_s = time.process_time() + share * FRAME_S
        while time.process_time() < until_cpu_s and time.monotonic() < until_s:
            pass
        time.sleep(max(0.0, min(frame_s + FRAME_S, until_s) - time.monotonic()))


def phases(diary: Diary, plan: Sequence[tuple[float, float]]) -> None:
    """Sleep or work, as (share of a core, seconds)."""
    for share, seconds in plan:
        diary.write(BY_SHARE)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            burn(share, min(left_s, CUT_S))
            diary.cut()
    diary.write()


def bare(diary: Diary, *, start_s: float, plan: Sequence[tuple[float, float]]) -> None:
    """A script without reports."""
    diary.write("starting")
    time.sleep(start_s)
    phases(diary, plan)


def sleeper(diary: Diary, *, starting_s: float, idle_s: float) -> None:
    """Never does anything."""
    diary.write("starting")
    time.sleep(starting_s)
    diary.write("idle")
    time.sleep(idle_s)
    diary.write()


def orphan(diary: Diary, *, start_s: float, works_s: Sequence[float], sleeps_s: Sequence[float], path: str) -> None:
    """Rank 0 sleeps while a process works that it has left behind; rank 1 has left one too, and has ended."""
    rank = int(os.environ["RANK"])
    diary = Diary(f"{path}-{rank}")
    diary.write("starting")
    time.sleep(start_s)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            left = Diary(f"{path}-{rank}")
            phases(left, [(BUSY, works_s[rank])])
            left.write("unoccupied" if rank else "idle")
            os._exit(0)
        os._exit(0)
    os.wait()
    if rank == 0:
        time.sleep(sum(works_s) + sum(sleeps_s))
        for each in (0, 1):
            Diary(f"{path}-{each}").write()


class Trainer:
    """Makes steps and reports them, as a training loop does."""

    def __init__(self, diary: Diary, step_s: float) -> None:
        self._diary, self._step_s, self._step = diary, step_s, 0
        self._pipe = os.open(os.environ[REPORT_PIPE_VARIABLE], os.O_WRONLY)
        diary.write(*BEFORE_FIRST_STEP)

    def report(self, kind: ReportKind, **fields: Any) -> None:
        """Send a report of rank 0."""
        origin = {
            "rank": 0,
            "epoch": int(os.environ["PHALANX_EPOCH"]),
            "generation": int(os.environ["PHALANX_GENERATION"]),
        }
        os.write(self._pipe, encode_report(kind, **origin, **fields))

    def steps(self, seconds: float, *states: str, wait: str = "", wait_share: float = 0.0, share: float = BUSY) -> None:
        """Make steps that wait for a part of their time, and work in the rest."""
        until_s = time.monotonic() + seconds
        if self._step:
            self._diary.write(*states)
        while time.monotonic() < until_s:
            begin_ns, wait_s = boottime_ns(), wait_share * self._step_s
            time.sleep(wait_s)
            burn(share, self._step_s - wait_s)
            self._step += 1
            waited = {wait: wait_s} if wait else {}
            self.report(
                ReportKind.STEP, step=self._step, begin_ns=begin_ns, end_ns=boottime_ns(), at_s=time.time(), **waited
            )
            if self._step == 1:
                self._diary.write(*states)
            self._diary.cut()

    def save(self, seconds: float) -> None:
        """Stand still for a save."""
        self._diary.write("checkpointing")
        self.report(ReportKind.BUSY, what="save")
        time.sleep(seconds)
        self.report(ReportKind.STALL, seconds=seconds, cause="save")
        self._diary.write(BY_SHARE)


def waits(diary: Diary, *, wait: str, state: str, step_s: float, plan: Sequence[tuple[float, float]]) -> None:
    """Steps that wait for data or for other ranks, as (part of the step, seconds)."""
    trainer = Trainer(diary, step_s)
    for share, seconds in plan:
        trainer.steps(seconds, state if share > 0.5 else BY_SHARE, wait=wait, wait_share=share)
    diary.write()


def saves(diary: Diary, *, step_s: float, plan: Sequence[tuple[float, float]]) -> None:
    """Trains and saves, as (seconds of steps, seconds of the save)."""
    trainer = Trainer(diary, step_s)
    for steps_s, save_s in plan:
        trainer.steps(steps_s, BY_SHARE)
        trainer.save(save_s)
    trainer.steps(5.0, BY_SHARE)
    diary.write()


def long_start(diary: Diary, *, compile_s: float, load_s: float, step_s: float, steps_s: float) -> None:
    """Compiles, then loads, then trains."""
    trainer = Trainer(diary, step_s)
    burn(BUSY, compile_s)
    time.sleep(load_s)
    trainer.steps(steps_s, BY_SHARE)
    diary.write()


def hangs(diary: Diary, *, step_s: float, steps_s: Sequence[float], stopped_s: float) -> None:
    """Is stopped by a signal between two steps, and continued later."""
    trainer = Trainer(diary, step_s)
    trainer.steps(steps_s[0], BY_SHARE)
    rank = os.getpid()
    if os.fork() == 0:
        time.sleep(stopped_s)
        os.kill(rank, signal.SIGCONT)
        os._exit(0)
    diary.write("hung", at_s=time.time() + step_s)  # when the next step is due
    os.kill(rank, signal.SIGSTOP)
    diary.write("hung")
    trainer.steps(step_s / 2, BY_SHARE)
    trainer.steps(steps_s[1], BY_SHARE)
    diary.write()


def crashes(diary: Diary, *, sleeps_s: Sequence[float]) -> None:
    """Fails at its start, again and again, and then ends well."""
    diary.write("starting", "lost")
    count = int(os.environ["PHALANX_RESTART_COUNT"])
    time.sleep(sleeps_s[count])
    if count == len(sleeps_s) - 1:
        diary.write()
    sys.exit(int(count < len(sleeps_s) - 1))


def stops_slowly(diary: Diary, *, state: str, start_s: float, saves_s: float) -> None:
    """Works until it is asked to end, and then takes its time."""
    asked: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.time()))
    diary.write("starting")
    time.sleep(start_s)
    diary.write(BY_SHARE)
    while not asked:
        burn(BUSY, FRAME_S)
        diary.cut()
    diary.write(state)
    burn(BUSY, saves_s)
    diary.write()


def sleeping_server(diary: Diary, *, start_s: float) -> None:
    """A replica of a service that works while it is awake, and says so."""
    import http.server  # only this program needs it
    import threading

    awake = threading.Event()

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            if self.path == "/sleep":
                awake.clear()
                diary.write("free")
            else:
                diary.write(BY_SHARE)
                awake.set()
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    def work() -> None:
        diary.write("starting")
        time.sleep(start_s)
        diary.write(BY_SHARE)
        awake.set()
        while awake.wait():
            burn(BUSY, FRAME_S)
            diary.cut()

    threading.Thread(target=work, daemon=True).start()
    server = http.server.ThreadingHTTPServer(("", int(os.environ["PORT"])), Server)

    def end(*_: object) -> None:
        diary.write()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    server.serve_forever()


PROGRAMS: Final[Mapping[str, Callable[..., None]]] = {
    one.__name__: one
    for one in (bare, sleeper, orphan, waits, saves, long_start, hangs, crashes, stops_slowly, sleeping_server)
}


if __name__ == "__main__":
    claim_cpu()
    name, file_path, parameters = sys.argv[1:]
    PROGRAMS[name](Diary(file_path), **json.loads(parameters))
