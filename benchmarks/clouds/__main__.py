"""Creates machines under faults, and compares the cloud's bill with the ledger: `python -m benchmarks.clouds --creates 1000 --json`.

Pools of a real head order instances from moto's server over HTTP, through the provider `aws` (`moto_cloud.py` has the faults). The head is killed
by SIGKILL again and again, at random moments and at failpoints of its store. Pools are removed and added all the while. In the end all are
removed. The judge then reads only the cloud's list of all instances that ever were, and the history in the head's database:

- leaked: instances that still run.
- doubled: orders for which the cloud ever had more than one instance.
- billed_minus_ledger_s: the largest difference of one instance between the time that the cloud charges and the history's.

Needs `make s3-tools`, and botocore.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import free_port

ROOT: Final = Path(__file__).parents[2]
MOTO: Final = ROOT / "build" / "moto" / "bin" / "python"
POOLS: Final = 3  # at a time
FAILPOINTS: Final = ("store.commit.begin", "store.commit.rows", "store.commit.commit", "store.commit.done")
ROUND_S: Final = 0.3
SETTLE_S: Final = 900.0  # a guard: until everything is released after the last create
WORDS: Final = ("--provider", "aws", "--type", "g4dn.xlarge", "--max")
IMAGE: Final = "ami-12c6146b"  # one that moto has


@dataclass(slots=True)
class Campaign:
    """One run.

    Attributes:
        kills: how often the head was killed by a signal of ours, or died at a failpoint.
        added: pools so far.
    """

    home: Path
    cloud_port: int
    dice: random.Random
    pool_nodes: int
    kills: Counter[str] = field(default_factory=Counter)
    added: int = 0
    live: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def phalanx(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the program."""
        return subprocess.run(
            [sys.executable, "-m", "phalanx.app.cli", *words],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def head_pid(self) -> int | None:
        """The process of the head; None if it does not run."""
        try:
            pid = int(json.loads((self.home / "head.json").read_text())["pid"])
            os.kill(pid, 0)
        except (OSError, ValueError, KeyError):
            return None
        return pid

    def up(self, *, calm: bool = False) -> None:
        """Start the head, often with a failpoint at which it dies."""
        more = {}
        if not calm and self.dice.random() < 0.3:
            more["PHALANX_FAILPOINT"] = f"{self.dice.choice(FAILPOINTS)}=kill:{self.dice.randint(20, 200)}"
        for _ in range(20):
            if self.phalanx("up", **more).returncode == 0:
                return
            more = {}
        raise RuntimeError(self.phalanx("up").stderr)

    def step(self) -> None:
        """Kill or start the head, add or remove a pool."""
        pid = self.head_pid()
        if pid is None:
            self.kills["failpoint"] += 1
            self.up()
        elif self.dice.random() < 0.08:
            os.kill(pid, signal.SIGKILL)
            self.kills["signal"] += 1
            while self.head_pid() == pid:
                time.sleep(0.02)
            self.up()
        due = [name for name, until_s in self.live.items() if until_s < time.monotonic()]
        for name in due:
            if self.phalanx("pools", "remove", name).returncode in (0, 64, 66):  # 64, 66: it is gone already
                del self.live[name]
        if len(self.live) < POOLS:
            name, size = f"c{self.added}", str(self.pool_nodes)
            settings = ("--set", "region=us-east-1", "--set", f"image={IMAGE}", "--set", f"endpoint={self.endpoint}")
            done = self.phalanx("pools", "add", name, *WORDS, size, "--min", size, *settings)
            if done.returncode == 0 or "exists already" in done.stderr:
                self.added += 1
                self.live[name] = time.monotonic() + self.dice.uniform(4.0, 15.0)
            elif "needs botocore" in done.stderr:
                raise SystemExit(done.stderr)
        time.sleep(ROUND_S)

    @property
    def endpoint(self) -> str:
        """The URL of the cloud."""
        return f"http://127.0.0.1:{self.cloud_port}"

    def settle(self) -> None:
        """Remove all pools, and wait until the head has none."""
        cloud(self.endpoint, "calm")
        if self.head_pid() is not None:
            self.phalanx("down", "--keep-jobs")
        self.up(calm=True)
        until_s, found = time.monotonic() + SETTLE_S, []
        while time.monotonic() < until_s:
            found = json.loads(self.phalanx("pools", "--json").stdout or "[]")
            if not found:
                return
            for pool in found:
                if not pool["removing"]:
                    self.phalanx("pools", "remove", pool["id"])
            time.sleep(3.0)
        print(f"pools that do not end: {[pool['id'] for pool in found]}", file=sys.stderr)


def cloud(endpoint: str, word: str = "list") -> dict[str, Any]:
    """Ask the cloud itself: `list` or `calm`."""
    with urllib.request.urlopen(f"{endpoint}/cloud/{word}", timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def history(database: Path) -> list[dict[str, Any]]:
    """Return all lines of the history in a head's database."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return [json.loads(row[0]) for row in connection.execute("SELECT doc FROM history ORDER BY seq")]


def judge(machines: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the cloud's list with the ledger."""
    ledger = {line["facts"]["machine"]: line["facts"] for line in lines if line["kind"] == "machine_ended"}
    orders = Counter(machine["token"] for machine in machines)
    worst_s, unwritten = 0.0, 0
    for machine in machines:
        known = ledger.get(machine["machine"])
        unwritten += known is None
        if machine["until_s"] is not None:
            billed_s = machine["until_s"] - machine["since_s"]
            difference_s = billed_s - (0.0 if known is None else known["until_s"] - known["since_s"])
            worst_s = max(worst_s, difference_s, key=abs)
    return {
        "machines": len(machines),
        "leaked": sum(machine["until_s"] is None for machine in machines),
        "doubled": sum(count > 1 for count in orders.values()),
        "billed_minus_ledger_s": round(worst_s, 3),
        "without_a_ledger_line": unwritten,
        "strays_stopped": sum(line["kind"] == "machine_stray" for line in lines),
    }


def run(creates: int, seed: int, faults: float, pool_nodes: int) -> dict[str, Any]:
    """Run the campaign, and return the judgement with what happened."""
    if not MOTO.exists():
        raise SystemExit("moto is not installed: make s3-tools")
    folder, port, began_s = Path(tempfile.mkdtemp(prefix="phalanx-clouds.")), free_port(), time.monotonic()
    home = folder / "home"
    environment = {
        **os.environ,
        "PHALANX_HOME": str(home),
        "AWS_ACCESS_KEY_ID": "campaign",
        "AWS_SECRET_ACCESS_KEY": "campaign",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    campaign = Campaign(
        home=home, cloud_port=port, dice=random.Random(seed), pool_nodes=pool_nodes, environment=environment
    )
    words = [str(MOTO), str(Path(__file__).with_name("moto_cloud.py"))]
    words += ["--port", str(port), "--seed", str(seed), "--faults", str(faults)]
    with open(folder / "cloud", "wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        _await_cloud(campaign.endpoint)
        ports = ("--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}")
        first = campaign.phalanx("up", "--virtual", "1x1", *ports)
        if first.returncode != 0:
            raise SystemExit(first.stderr)
        while len(cloud(campaign.endpoint)["machines"]) < creates:
            campaign.step()
        created_s = time.monotonic() - began_s
        campaign.settle()
        campaign.phalanx("down")
        found = cloud(campaign.endpoint)
        verdict = judge(found["machines"], history(home / "phalanx.db"))
    finally:
        pid = campaign.head_pid()
        if pid is not None:
            campaign.phalanx("down", "--cancel-jobs")
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        **verdict,
        "pools": campaign.added,
        "head_kills": dict(campaign.kills),
        "calls_and_faults": found["counts"],
        "seed": seed,
        "creating_s": round(created_s),
        "all_s": round(time.monotonic() - began_s),
    }


def _await_cloud(endpoint: str) -> None:
    for _ in range(600):
        try:
            cloud(endpoint)
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("moto's server did not start")


def main() -> None:
    """Run, and print a table or JSON."""
    words = argparse.ArgumentParser(prog="python -m benchmarks.clouds", description=(__doc__ or "").splitlines()[0])
    words.add_argument("--creates", type=int, default=300)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--faults", type=float, default=1.0, help="factor of all shares of faults")
    words.add_argument("--nodes", type=int, default=20, help="of each pool")
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    found = run(given.creates, given.seed, given.faults, given.nodes)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
