"""Creates machines under faults, and compares the clouds' bills with the ledger: `python -m benchmarks.clouds --creates 10000 --kills 200 --json`.

Pools of a real head order machines over HTTP: through the provider `aws` from moto's server, through `google` and `azure` from servers that answer
as the references of these clouds say. All have the same faults (`cloud_faults.py`). The head is killed by SIGKILL again and again, at random
moments and at failpoints of its store. Its wall clock is set by up to eleven hours, forward and back (`head_clock.py`). Pools are removed and
added all the while. In the end all are removed. `judge.py` has the verdict: `leaked`, `doubled` and `billed_minus_ledger_s`.

Needs `make s3-tools compiler-tools`, botocore and google-auth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.clouds.campaign import Campaign
from benchmarks.clouds.campaign_clouds import MAKERS, make_clouds
from benchmarks.clouds.head_clock import HeadClock
from benchmarks.clouds.judge import judge, read_history, sum_up
from benchmarks.cluster import free_port

KILL_EVERY: Final = 50  # creates, unless `--kills` says another number


def run(
    creates: int,
    kills: int,
    jumps: int,
    seed: int,
    faults: float,
    pool_nodes: int,
    shares: Mapping[str, float],
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Run the campaign, and return the verdict with what happened. `shares`: the weight of each cloud in the creates."""
    folder, began_s = Path(tempfile.mkdtemp(prefix="phalanx-clouds.")), time.monotonic()
    home, clouds = folder / "home", make_clouds(shares, folder)
    clock = HeadClock(folder) if jumps else None
    environment = {**os.environ, "PHALANX_HOME": str(home), **(clock.environment if clock is not None else {})}
    for cloud in clouds:
        environment |= cloud.environment
    campaign = Campaign(home, clouds, random.Random(seed), pool_nodes, environment, clock)
    try:
        with open(folder / "clouds", "wb") as output:
            for number, cloud in enumerate(clouds):
                cloud.begin(seed * 10 + number, faults, output)
        first = ("--virtual", "1x1", "--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}")
        campaign.up(*first, calm=True)
        campaign.run(creates, kills, jumps, limit_s)
        created_s = time.monotonic() - began_s
        campaign.settle()
        campaign.phalanx("down")
        lists = {cloud.name: cloud.ask("list") for cloud in clouds}
        lines = read_history(home / "phalanx.db")
        verdicts = {name: judge(one["machines"], lines, one.get("leftovers", ())) for name, one in lists.items()}
    finally:
        if campaign.head_pid() is not None:
            campaign.phalanx("down", "--cancel-jobs")
        for cloud in clouds:
            cloud.end()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        **sum_up(verdicts),
        "clouds": verdicts,
        "pools": campaign.added,
        "head_kills": dict(campaign.kills),
        "clock_jumps": campaign.jumps,
        "calls_and_faults": {name: one["counts"] for name, one in lists.items()},
        "seed": seed,
        "creating_s": round(created_s),
        "all_s": round(time.monotonic() - began_s),
    }


def main() -> None:
    """Run, and print a table or JSON."""
    words = argparse.ArgumentParser(prog="python -m benchmarks.clouds", description=(__doc__ or "").splitlines()[0])
    words.add_argument("--creates", type=int, default=300)
    words.add_argument("--kills", type=int, default=None, help=f"of the head; by default one for {KILL_EVERY} creates")
    words.add_argument("--jumps", type=int, default=None, help="of the head's wall clock; by default as many as kills")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--faults", type=float, default=1.0, help="factor of all shares of faults")
    words.add_argument("--nodes", type=int, default=20, help="of each pool")
    words.add_argument("--seconds", type=float, default=float("inf"), help="of creates and kills, at most")
    words.add_argument("--clouds", default=",".join(MAKERS), help="with weights of their shares: aws,google:4,azure:4")
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    kills = given.creates // KILL_EVERY if given.kills is None else given.kills
    shares = {name: float(weight or 1) for name, _, weight in (one.partition(":") for one in given.clouds.split(","))}
    jumps = kills if given.jumps is None else given.jumps
    found = run(given.creates, kills, jumps, given.seed, given.faults, given.nodes, shares, given.seconds)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
