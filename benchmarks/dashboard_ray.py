"""Ray's dashboard for the dashboard's benchmark: a cluster of as many nodes and jobs as this machine carries, and its page in Chromium.

`python -m benchmarks.dashboard_ray` is the cluster itself, run by a Python that has Ray: it prints one line of JSON when it is complete, and
ends with its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

ROOT: Final = os.path.dirname(
    os.path.dirname(os.path.abspath(__file__))
)  # Phalanx is not imported: Ray's Python has it not
NODE_S: Final = 30.0  # a node that takes longer to join is one too many
JOINING_S: Final = 240.0
FREE_BYTES_MIN: Final = 6 << 30
JOBS_MAX: Final = 16
GPUS: Final = 8
_START_S: Final = 600.0
_PAINTED: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_ROWS: Final = 10  # on a page of Ray's table of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPage:
    """How large the cluster became, and how long its page of nodes took."""

    version: str
    nodes: int
    jobs: int
    first_view_ms: list[float]
    usable_ms: list[float]
    transfer_kb: list[float]


def measure_ray(python: str, nodes: int, runs: int) -> RayPage:
    """Run a cluster of at most `nodes` nodes and open its page `runs` times, each with a new browser."""
    from tests.chromium_here import chromium

    environment = {**os.environ, "PYTHONPATH": ROOT, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [python, "-m", "benchmarks.dashboard_ray", str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        facts = _first_json(process)
        views = []
        for _ in range(runs):
            with chromium() as page:
                page.received.clear()
                page.send("Page.navigate", url=f"{facts['url']}/#/cluster")
                rows = min(_ROWS, facts["nodes"])
                usable = page.until(f"document.querySelectorAll('tbody tr').length >= {rows} && performance.now()")
                views.append((page.until(_PAINTED), usable, sum(page.received.values()) / 1000))
    finally:
        process.communicate()
    return RayPage(
        version=facts["version"],
        nodes=facts["nodes"],
        jobs=facts["jobs"],
        first_view_ms=[view[0] for view in views],
        usable_ms=[view[1] for view in views],
        transfer_kb=[view[2] for view in views],
    )


def _first_json(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"Ray's cluster ended with {process.wait()}: does this Python have ray[default]? (make ray)")


def main() -> None:
    """Run the cluster until standard input ends."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    wanted = int(sys.argv[1])
    arguments = {"num_cpus": 4, "num_gpus": GPUS, "include_dashboard": True, "dashboard_port": 0}
    cluster: Any = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        end = time.monotonic() + JOINING_S
        while len(cluster.list_all_nodes()) < wanted and time.monotonic() < end and _free_bytes() > FREE_BYTES_MIN:
            began = time.monotonic()
            cluster.add_node(num_cpus=4, num_gpus=GPUS, wait=True)
            if time.monotonic() - began > NODE_S:
                break
        url = (
            f"http://{cluster.webui_url}" if hasattr(cluster, "webui_url") else f"http://{cluster.head_node.webui_url}"
        )
        client = JobSubmissionClient(url)
        jobs = 0
        while jobs < JOBS_MAX and _free_bytes() > FREE_BYTES_MIN:
            client.submit_job(entrypoint="sleep 3600")
            jobs += 1
        sys.stdout.write(
            json.dumps({"url": url, "nodes": len(cluster.list_all_nodes()), "jobs": jobs, "version": ray.__version__})
            + "\n"
        )
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


def _free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


if __name__ == "__main__":
    main()
