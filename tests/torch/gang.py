"""A gang of real processes with a supervisor made of this test: lease page, report pipe, environment. No head, no engine."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from phalanx.wire.rank import LeasePage, boottime_ns

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src"
HANG_S = 60.0
"""A guard, never an assertion: importing torch in four processes takes seconds on a busy machine."""


class Gang:
    """`world_size` ranks of one script. Use as a context: leaving it kills every rank and closes the pipe."""

    def __init__(
        self, tmp_path, *argv, world_size=1, epoch=1, generation=0, lease_s=3600.0, supervised=True, checkpoints=None, **variables
    ):
        self.folder = Path(tmp_path)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.reports: list[dict] = []
        self.page = None
        self._torn = b""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_", "SLURM_", "TORCHELASTIC_"))
        }
        environment |= {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "PHALANX_VIRTUAL": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        if checkpoints is not None:
            environment["PHALANX_CHECKPOINT_DIR"] = str(checkpoints)
        if supervised:
            environment |= self._supervise(epoch, generation, lease_s)
        environment |= {name: str(value) for name, value in variables.items()}
        self.ranks = [self._spawn(rank, world_size, argv, environment) for rank in range(world_size)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGCONT)
            rank.kill()
            rank.wait()
        if self.page is not None:
            os.close(self._pipe)

    def renew(self, lease_s=3600.0):
        self.page.write(deadline_ns=boottime_ns() + int(lease_s * 1e9))

    def expire(self):
        self.page.write(deadline_ns=boottime_ns() - 1)

    def log(self, rank=0):
        return (self.folder / f"rank-{rank}.log").read_text()

    def of(self, kind, rank=None):
        """Reports of one kind so far, in order."""
        self._drain(0.0)
        return [report for report in self.reports if report["k"] == kind and rank in {None, report["rank"]}]

    def until(self, condition, what):
        """Read reports until `condition(self)`; fail with the ranks' logs when it never comes."""
        until_s = time.monotonic() + HANG_S
        while not condition(self):
            self._drain(0.05)
            if time.monotonic() > until_s:
                logs = "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(len(self.ranks)))
                raise AssertionError(f"never happened: {what}; reports {self.reports[-5:]}\n{logs}")

    def until_step(self, step):
        self.until(lambda gang: any(report["step"] >= step for report in gang.of("step", rank=0)), f"step {step}")

    def ended(self):
        return all(rank.poll() is not None for rank in self.ranks)

    def finish(self):
        """Wait for all ranks; their exit codes."""
        self.until(Gang.ended, "the end of all ranks")
        self._drain(0.0)
        return [rank.returncode for rank in self.ranks]

    def kill(self):
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _supervise(self, epoch, generation, lease_s):
        page, pipe = self.folder / "lease", self.folder / "reports"
        self.page = LeasePage.create(
            str(page), epoch=epoch, generation=generation, deadline_ns=boottime_ns() + int(lease_s * 1e9)
        )
        with suppress(FileExistsError):
            os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        return {
            "PHALANX_LEASE_PAGE": str(page),
            "PHALANX_REPORT_PIPE": str(pipe),
            "PHALANX_EPOCH": str(epoch),
            "PHALANX_GENERATION": str(generation),
        }

    def _spawn(self, rank, world_size, argv, environment):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        with (self.folder / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *map(str, argv)], env=environment | own, stdout=log, stderr=subprocess.STDOUT
            )

    def _drain(self, patience_s):
        if self.page is None:
            time.sleep(patience_s)
            return
        while select.select([self._pipe], [], [], patience_s)[0]:
            patience_s = 0.0
            *lines, self._torn = (self._torn + os.read(self._pipe, 65536)).split(b"\n")
            self.reports += [json.loads(line) for line in lines]


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
