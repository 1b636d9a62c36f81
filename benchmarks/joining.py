"""How long a rented machine takes to join, as far as it is up to Phalanx: from the start of its start script until its supervisor is registered.

The cloud is moto's server; each machine is a network namespace with a Python that has no Phalanx, so that it downloads the program from its head over
TLS, joins with its one-use token, and starts a supervisor (`tests/e2e/cloud_hosts.py`). All share the processors of this machine. Needs root,
iproute2, util-linux and `make s3-tools`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.e2e.cloud_hosts import HEAD, HEAD_PORT, CloudHosts, why_not

TARGET_S: Final = 10.0
READY_S: Final = 240.0  # a guard


def run(joins: int, together: int) -> dict[str, Any]:
    """Let so many machines join, `together` at a time, and return the figures."""
    if missing := why_not():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory(prefix="phalanx-joining.") as folder:
        hosts: Any = CloudHosts(Path(folder))
        try:
            took_s = _join(hosts, joins, together)
        finally:
            hosts.close()
    took_s.sort()
    return {
        "joins": len(took_s),
        "together": together,
        "p50_s": round(took_s[len(took_s) // 2], 2),
        "p95_s": round(took_s[math.ceil(0.95 * len(took_s)) - 1], 2),
        "max_s": round(took_s[-1], 2),
        "target_s": TARGET_S,
    }


def _join(hosts: Any, joins: int, together: int) -> list[float]:
    _wait(hosts.ask, "the cloud answers")
    hosts("up", "--virtual", "1x1", "--listen", f"{HEAD}:{HEAD_PORT}")
    took_s: list[float] = []
    while len(took_s) < joins:
        pool = f"join{len(took_s)}"
        hosts.add_pool(pool, "--min", str(together), "--max", str(together), "--price", "1/h")
        nodes = _wait(lambda: _up(hosts, pool, together), f"the nodes of {pool} are up")  # called at once
        begun_s = {one["machine"]: one["booted_s"] for one in hosts.ask()["machines"]}
        print(f"{pool}: up", file=sys.stderr, flush=True)
        took_s += [node["changed_s"] - begun_s[node["machine"]] for node in nodes]
        hosts("pools", "remove", pool)
    return took_s


def _up(hosts: Any, pool: str, count: int) -> list[dict[str, Any]]:
    nodes = [one for one in hosts.json("pools", "show", pool)["nodes"] if one["state"] == "up"]
    return nodes if len(nodes) == count else []


def _wait(condition: Any, what: str) -> Any:
    until_s = time.monotonic() + READY_S
    while not (found := condition()):
        if time.monotonic() > until_s:
            raise SystemExit(f"not within {READY_S:g} s: {what}")
        time.sleep(1.0)
    return found


def main() -> None:
    """Measure, and print the figures."""
    words = argparse.ArgumentParser(prog="python -m benchmarks.joining", description=(__doc__ or "").splitlines()[0])
    words.add_argument("--joins", type=int, default=24)
    words.add_argument("--together", type=int, default=1, help="machines that start at the same time")
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    found = run(given.joins, given.together)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()
