"""What a person types on a host of the lab, and what they read there: the real command line, with no file shared between the hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cluster import wait_until
from tests.lab.lab import Lab
from tests.lab.users import as_user

PHALANX = f"{sys.executable} -P -m phalanx.app.cli"
HANG_S = 90.0
_LINE = "on the next server: phalanx "


def join_words(said: str) -> list[str]:
    """What `phalanx up` says is to be typed on the next server, after `phalanx`."""
    return next(line for line in said.splitlines() if line.startswith(_LINE)).removeprefix(_LINE).split()


class OnSlurm:
    """A head on h0, the login node, and what its user types there: root, or who has a name."""

    def __init__(self, lab: Lab, name: str = "") -> None:
        self.lab, self.name = lab, name

    def sh(self, line: str, host: str = "h0", *, check: bool = False) -> str:
        """A line for the shell; what it printed, complaints too."""
        argv = as_user(self.name, line) if self.name else ["sh", "-c", f"cd /var/tmp; ( {line} ) 2>&1"]
        return self.lab.run(host, argv, check=check)

    def __call__(self, words: str) -> str:
        return self.sh(f"{PHALANX} {words}")

    def up(self, words: str = "") -> str:
        """Bring the head up; the lab's three nodes are there."""
        said = self(f"up --engine slurm --listen {self.lab.host('h0').address} {words}")
        assert "h2: 4 x h100, 16 CPUs, up" in said, said
        return said

    def submit(self, words: str) -> str:
        """Submit; the job's id."""
        said = self(f"submit --quiet {words}").strip()
        assert said.splitlines()[-1].isdecimal(), said
        return said.splitlines()[-1]

    def job(self, job: str) -> Any:
        """All that `phalanx show` tells."""
        return json.loads(self.sh(f"{PHALANX} show {job} --json 2>/dev/null"))

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for it; where it never comes, what the head and Slurm say of their jobs is told."""
        try:
            wait_until(holds, what, every_s=0.2, limit_s=HANG_S)
        except TimeoutError as never:
            queue = self.sh("squeue -a -t all; tail -20 ~/.phalanx/head.log")
            raise AssertionError(f"never: {what}\n{self('ps -a')}\n{queue}") from never

    def ended(self, job: str) -> Any:
        """Wait for the end of the job; the job then."""
        self.until(lambda: self.job(job)["job"]["state"] not in ("pending", "running"), f"job {job} ends")
        return self.job(job)["job"]

    def runs(self, job: str) -> None:
        """Wait until all ranks of the job run."""
        self.until(lambda: self.job(job)["job"]["attempt_state"] == "running", f"job {job} runs")
