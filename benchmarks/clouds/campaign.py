"""One campaign: pools of a real head come and go, the head is killed again and again, and in the end everything is released."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.clouds.campaign_clouds import CampaignCloud
from benchmarks.clouds.head_clock import JUMPS_S, HeadClock
from phalanx.client.client import Client
from phalanx.core.errors import Conflict, NotFound, PhalanxError

POOLS: Final = 2  # of each cloud at a time
LIFE_S: Final = (6.0, 20.0)  # of a pool
FAILPOINTS: Final = ("store.commit.begin", "store.commit.rows", "store.commit.commit", "store.commit.done")
FAILPOINT_SHARE: Final = 0.3  # of the starts of a head, which then dies at one
ROUND_S: Final = 0.2
SETTLE_S: Final = 1200.0  # a guard: until everything is released after the last create
PATIENCE_S: Final = 20.0  # of a request


@dataclass(slots=True)
class Campaign:
    """One run.

    Attributes:
        pool_nodes: of each pool.
        clock: of the head, which is set again and again; None: it is not.
        jumps: how often it was.
        kills: how often the head was killed by a signal of ours, or died at a failpoint.
        live: the cloud of each pool, and until when it lives.
    """

    home: Path
    clouds: list[CampaignCloud]
    dice: random.Random
    pool_nodes: int
    environment: dict[str, str]
    clock: HeadClock | None = None
    jumps: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    added: int = 0
    live: dict[str, tuple[str, float]] = field(default_factory=dict)

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

    def up(self, *words: str, calm: bool = False) -> None:
        """Start the head, often with a failpoint at which it dies."""
        more = {}
        if not calm and self.dice.random() < FAILPOINT_SHARE:
            more["PHALANX_FAILPOINT"] = f"{self.dice.choice(FAILPOINTS)}=kill:{self.dice.randint(20, 200)}"
        for _ in range(20):
            if self.phalanx("up", *words, **more).returncode == 0:
                return
            if more:
                self.kills["failpoint"] += 1
            more = {}
        raise RuntimeError(self.phalanx("up", *words).stderr)

    def run(self, creates: int, kills: int, jumps: int, limit_s: float) -> None:
        """Create so many machines, of each cloud its share, kill the head so often, and set its clock so often; no longer than `limit_s`."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            made = {cloud.name: int(cloud.ask("count")["machines"]) for cloud in self.clouds}
            wanted = {cloud.name: creates * cloud.share for cloud in self.clouds}
            left = [cloud for cloud in self.clouds if made[cloud.name] < wanted[cloud.name]]
            done = sum(min(made[name], wanted[name]) for name in made) / max(1.0, sum(wanted.values()))
            if not left and self.kills.total() >= kills and self.jumps >= jumps:
                return
            if self.jumps < jumps * done and self.dice.random() < 0.7:
                self._set_clock()
            self._keep_head(killed=self.kills.total() < kills * done and self.dice.random() < 0.7)
            self._change_pools(left or self.clouds)
            time.sleep(self.dice.uniform(0.0, 2 * ROUND_S))

    def settle(self) -> None:
        """Remove all pools, and wait until the head has none."""
        for cloud in self.clouds:
            cloud.ask("calm")
        if self.head_pid() is not None:
            self.phalanx("down", "--keep-jobs")
        self.up(calm=True)
        until_s, found = time.monotonic() + SETTLE_S, []
        while time.monotonic() < until_s:
            with Client(home=str(self.home), retry_limit_s=PATIENCE_S) as client:
                found = client.pools()
                for pool in found:
                    if not pool.removing:
                        client.remove_pool(pool.id)
            if not found:
                return
            time.sleep(3.0)
        print(f"pools that do not end: {[pool.id for pool in found]}", file=sys.stderr)

    def _keep_head(self, *, killed: bool) -> None:
        """Start the head if it has died; kill it if that is due."""
        pid = self.head_pid()
        if pid is None:
            self.kills["failpoint"] += 1
            self.up()
        elif killed:
            os.kill(pid, signal.SIGKILL)
            self.kills["signal"] += 1
            while self.head_pid() == pid:
                time.sleep(0.02)
            self.up()

    def _set_clock(self) -> None:
        """Set the wall clock of the head, while machines are created and stopped."""
        assert self.clock is not None
        self.clock.set(self.dice.choice([one for one in JUMPS_S if one != self.clock.offset_s]))
        self.jumps += 1

    def _change_pools(self, clouds: list[CampaignCloud]) -> None:
        """Remove the pools whose time is over, and add others."""
        due = [name for name, (_, until_s) in self.live.items() if until_s < time.monotonic()]
        # A head that dies meanwhile answers nothing: the next round goes on.
        with contextlib.suppress(PhalanxError, OSError), Client(home=str(self.home), retry_limit_s=0.0) as client:
            for name in due:
                with contextlib.suppress(NotFound):
                    client.remove_pool(name)
                del self.live[name]
            for cloud in clouds:
                for _ in range(POOLS - sum(one == cloud.name for one, _ in self.live.values())):
                    self._add_pool(client, cloud)

    def _add_pool(self, client: Client, cloud: CampaignCloud) -> None:
        name = f"c{self.added}"
        self.live[name] = (cloud.name, time.monotonic() + self.dice.uniform(*LIFE_S))
        self.added += 1
        try:
            client.put_pool(
                name,
                provider=cloud.name,
                node=cloud.node,
                max_nodes=self.pool_nodes,
                min_nodes=self.pool_nodes,
                price_per_h=1.0,
                zones=cloud.zones,
                settings=cloud.settings,
            )
        except Conflict:
            pass
        except PhalanxError:
            if "needs" in str(sys.exception()):  # a library is missing
                raise SystemExit(str(sys.exception())) from None
            raise
