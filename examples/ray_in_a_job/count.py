"""A Ray cluster inside a job, one task on each node: the first starts Ray's head and is the driver, the others join it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
OWN_ADDRESS = os.environ["PHALANX_NODE_IPS"].split()[RANK]
TASKS = 60
START_S = 120.0


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def square(number: int) -> tuple[int, str]:
    """One task, and the Ray node on which it ran."""
    time.sleep(0.5)
    return number * number, ray.get_runtime_context().get_node_id()


def start_ray(*words: str) -> subprocess.Popen[bytes]:
    """Start the daemons of one Ray node."""
    program = Path(sys.executable).with_name("ray")
    shape = ("--block", "--disable-usage-stats", "--num-cpus", "2", "--object-store-memory", "80000000")
    return subprocess.Popen(
        [str(program), "start", *words, "--node-ip-address", OWN_ADDRESS, *shape], stdout=subprocess.DEVNULL
    )


def head_listens() -> bool:
    """Whether Ray's head takes connections."""
    try:
        socket.create_connection((HOST, PORT), timeout=5.0).close()
    except OSError:
        return False
    return True


def await_head(daemons: subprocess.Popen[bytes] | None) -> None:
    """Wait until Ray's head listens."""
    until_s = time.monotonic() + START_S
    while not head_listens():
        if time.monotonic() > until_s or (daemons is not None and daemons.poll() is not None):
            raise SystemExit(f"no Ray head listens at {HOST}:{PORT}")
        time.sleep(0.2)


def lead() -> None:
    """Start the head, wait for all nodes, compute, and end the cluster."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # a short path, for Ray's sockets
        daemons = start_ray("--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", folder)
        try:
            await_head(daemons)
            ray.init(address=f"{HOST}:{PORT}", log_to_driver=False)
            list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
            while sum(node["Alive"] for node in list_nodes()) < SIZE:
                time.sleep(0.2)
            print(f"step 0: {SIZE} Ray nodes", flush=True)
            found = ray.get([square.remote(number) for number in range(TASKS)])
            nodes = len({node for _, node in found})
            print(f"done: sum {sum(value for value, _ in found)} on {nodes} nodes", flush=True)
            ray.shutdown()
        finally:
            daemons.terminate()
            daemons.wait()


def serve() -> None:
    """Be a Ray node until the head ends. The daemons end with the task."""
    await_head(None)
    daemons = start_ray("--address", f"{HOST}:{PORT}")
    while head_listens() and daemons.poll() is None:
        time.sleep(0.5)


if __name__ == "__main__":
    lead() if RANK == 0 else serve()
