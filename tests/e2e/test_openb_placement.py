"""A live head places the first pods of the openb trace on the nodes on which the replay of `phalanx simulate` places them.

Real supervisors as processes; the pods' ranks sleep. Virtual nodes have the CPUs of the machine, far fewer than the pods ask for: pods without GPUs
ask for one CPU here, the others for none.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from phalanx.core.fleet.node import NodeState
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.packing_replay import place_in_order
from phalanx.simulator.trace import TraceJob, read_trace
from tests.e2e.test_cli_head import Shell

SHARED = Path(os.environ.get("PHALANX_SHARED", Path(__file__).parents[3] / "shared"))
TRACE = SHARED / "data" / "traces" / "alibaba_openb_2023.csv"
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not TRACE.exists(), reason=f"the trace {TRACE.name} is not here"),
]


def first_pods(count):
    pods = read_trace(TRACE.read_text(encoding="utf-8").splitlines(), with_parts=True).jobs[:count]
    return [replace(pod, cpu_milli=0 if pod.gpus or pod.share_milli else 1000, memory_mib=0, models=()) for pod in pods]


def wait_for_nodes(head, count):
    until_s = time.monotonic() + 600.0  # a guard against hangs
    while len([node for node in head.nodes() if node.state is NodeState.UP]) < count:
        assert time.monotonic() < until_s
        time.sleep(0.5)


def gpus_of(pod: TraceJob):
    return str(pod.gpus) if pod.gpus else f"{pod.share_milli / 1000:g}" if pod.share_milli else "0"


def placed_live(head, pods):
    """The node of each pod; "" for one that fits nowhere, which is cancelled and does not wait."""
    found = []
    for number, pod in enumerate(pods):
        job = head.submit(
            {
                "name": f"pod-{number}",
                "run": ["sleep", "7200"],
                "gpus": gpus_of(pod),
                "cpus": pod.cpu_milli // 1000,
                "allow_never": True,
            }
        ).job
        nodes = head.job(job.id).job.nodes
        if not nodes:
            head.cancel(job.id)
        found.append(nodes[0] if nodes else "")
    return found


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        pytest.param("3x2,1x4", 20, id="small"),
        pytest.param("30x3,10x8", 200, id="40-nodes", marks=pytest.mark.prove),
    ],
)
def test_the_live_head_places_pods_as_the_replay_does(tmp_path, sizes, count):
    shell = Shell(tmp_path)
    shell("up", "--virtual", sizes, "--port", str(free_port()), "--lease", "60")
    try:
        head = Client(home=str(shell.home))
        wait_for_nodes(head, sum(int(part.partition("x")[0]) for part in sizes.split(",")))
        fleet = [
            TraceNode(name=node.id, gpus=len(node.devices), model="virtual", cpu_milli=1000 * node.cpus)
            for node in head.nodes()
        ]
        pods = first_pods(count)
        replay = place_in_order(pods, fleet)
        live = placed_live(head, pods)
        assert live == [fleet[node].name if node >= 0 else "" for node in replay.node_of]
        assert 0 < live.count("") < count
    finally:
        shell("down", "--cancel-jobs")
