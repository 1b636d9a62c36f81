"""The engine `kubernetes` on a real API server: gangs, lost pods and nodes, first lines, requests at rest, memory. Beside it, Kubernetes' own ways.

    make kubernetes-tools
    python -m benchmarks.kubernetes --json      root

Kubernetes 1.20.2 (etcd, API server, scheduler, controllers) runs on this machine. Nodes that run something are stand-in kubelets, which start a
pod's command as a process at once, without an image; nodes of the gang of 128 are hollow: pods are bound to them and nothing runs. So a bare
pod costs less here than on any real node, and figures that divide by it are upper bounds. Times of requests are those of the API server's audit log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Final

from benchmarks.cluster import BenchmarkCluster, wait_until
from benchmarks.engine_clusters import pss_mib
from benchmarks.figures import Figure, argument_parser, at_most, plain_figure, print_progress, print_report
from benchmarks.hollow_nodes import admin_api, hollow_nodes
from phalanx.engines.kubernetes.cluster_view import ObjectTable
from phalanx.engines.kubernetes.parse import parse_pod
from phalanx.engines.kubernetes.rest import ResourcePath
from phalanx.node.processes.proctable import descendants, process_environment, read_table
from tests.contract.kubernetes_real_rig import RealKubernetesRig, real_kubernetes
from tests.kubernetes.real_cluster import why_not

GANG: Final = 128
REST_S: Final = 240.0  # a watch lasts 120 to 240 s
REST_NODES: Final = 100
OTHERS: Final = 2_000  # pods of others, for the head's memory
LEASE_S: Final = 6.0  # the default of a head
RUNS: Final = 5
FIGURES: Final = ("line", "resident", "killed", "lost", "gang", "rest", "memory")
PODS: Final = ResourcePath("pods", namespace="default")
JOBS: Final = ResourcePath("jobs", "batch", namespace="default")


def main() -> None:
    """Measure and print."""
    given = argument_parser(__doc__ or "").parse_args()
    wanted = set(filter(None, given.only.split(","))) or set(FIGURES)
    if missing := why_not():
        sys.exit(missing)
    runs = given.runs or RUNS
    figures: list[Figure] = []
    for name, measure in (("line", _lines), ("resident", _resident), ("killed", _losses), ("gang", _many)):
        parts = {"killed": {"killed", "lost"}, "gang": {"gang", "rest", "memory"}}.get(name, {name})
        if parts & wanted:
            figures += measure(runs, wanted)
    print_report("Kubernetes", figures, as_json=given.json)


# ---- first lines --------------------------------------------------------------------------------------------------------


def _lines(runs: int, wanted: set[str]) -> list[Figure]:
    """From submit to the first line, with a pod for the attempt; and a bare pod, from its create to the same command's first write."""
    del wanted
    ours, bare = [], []
    with _head() as rig:
        for run in range(runs + 1):
            took_s, plain_s = _first_line(rig), _bare_pod(rig, run)
            if run:
                ours.append(took_s)
                bare.append(plain_s)
                print_progress(f"first line {took_s:.2f} s, a bare pod {plain_s:.2f} s")
    ratio = [one / other for one, other in zip(ours, bare, strict=True)]
    return [
        plain_figure("attempt_first_line_s", ours, "s"),
        plain_figure("bare_pod_s", bare, "s"),
        at_most("attempt_per_bare_pod", ratio, "times", 1.2, note="a bare pod of these kubelets starts no container"),
    ]


def _resident(runs: int, wanted: set[str]) -> list[Figure]:
    """The same in a pod that stays."""
    del wanted
    with _head("--kubernetes-resident", "1-1x1", wait_nodes=False) as rig:
        wait_until(lambda: any(node["state"] == "up" for node in rig.nodes()), "the resident pod is up", limit_s=60.0)
        taken = [1000 * _first_line(rig) for _ in range(3 * runs + 2)][2:]
    print_progress(f"first lines in a resident pod: {', '.join(f'{one:.0f}' for one in taken)} ms")
    return [at_most("first_line_ms", taken, "ms", 300.0)]


def _first_line(rig: BenchmarkCluster) -> float:
    began = time.monotonic()
    job = rig.submit(run=["echo", "ready"], gpus="1", name="line")
    wait_until(lambda: rig.call("GET", f"/v1/jobs/{job}/logs?cursor=")["chunks"], "the first line", every_s=0.005)
    took_s = time.monotonic() - began
    rig.wait_for_state(job, "succeeded")
    wait_until(lambda: not any(node["jobs"] for node in rig.nodes()), "its device is free")
    return took_s


def _bare_pod(rig: RealKubernetesRig, run: int) -> float:
    """A pod that a user makes without Phalanx: the time of the create is before the request, as of our submit."""
    api, path = admin_api(rig.real), os.path.join(rig.home, f"bare-{run}")
    container = {
        "name": "x",
        "image": "x",
        "command": ["sh", "-c", f"date +%s.%N > {path}.part; mv {path}.part {path}"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    pod = {"metadata": {"name": f"bare-{run}"}, "spec": {"restartPolicy": "Never", "containers": [container]}}
    began_s = time.time()
    api.create(PODS, pod)
    wait_until(lambda: os.path.exists(path), "the pod has run", every_s=0.005)
    with open(path, encoding="ascii") as file:
        ended_s = float(file.read())
    api.delete(PODS, f"bare-{run}", grace_s=0)
    return ended_s - began_s


# ---- losses -------------------------------------------------------------------------------------------------------------


def _losses(runs: int, wanted: set[str]) -> list[Figure]:
    """A gang on two of three nodes loses a pod, or a node: until it runs again."""
    figures = []
    with _head() as rig:
        if "killed" in wanted:
            taken = [_lost(rig, _kill_pod) for _ in range(runs)]
            figures.append(at_most("killed_s", taken, "s", 5.0))
            print_progress(f"pod killed: {', '.join(f'{one:.1f}' for one in taken)} s")
        if "lost" in wanted:
            taken = []
            for _ in range(min(runs, 3)):
                taken.append(_lost(rig, _kill_node))
                wait_until(lambda: _free_nodes(rig) == 3, "the node is back", limit_s=120.0)
            figures.append(at_most("lost_node_s", taken, "s", 15.0, note=f"lease {LEASE_S:g} s"))
            print_progress(f"node lost: {', '.join(f'{one:.1f}' for one in taken)} s")
    return figures


def _free_nodes(rig: BenchmarkCluster) -> int:
    return sum(node["state"] == "up" and not node["cordon"] for node in rig.nodes())


def _lost(rig: RealKubernetesRig, lose: Callable[[RealKubernetesRig, str], None]) -> float:
    job = rig.submit(run=["sleep", "600"], gpus="2x1", name="gang", grace="1s")
    wait_until(lambda: _running_at(rig, job, 0.0), "the gang runs", limit_s=60.0)
    at_s = time.time()
    lose(rig, rig.job(job)["nodes"][1])
    again_s = float(wait_until(lambda: _running_at(rig, job, at_s), "it runs again", limit_s=60.0))
    rig.call("POST", f"/v1/jobs/{job}/cancel")
    rig.wait_for_state(job, "cancelled")
    wait_until(lambda: not admin_api(rig.real).list(PODS), "no pod is left", limit_s=90.0)
    return again_s - at_s


def _kill_pod(rig: RealKubernetesRig, node: str) -> None:
    """Kill the container of the node's pod from outside, as a lack of memory does."""
    kubelet = rig.real.node_pid(node)
    for pid in descendants(read_table(), [kubelet]):
        if process_environment(pid).get(b"PHALANX_NODE_ID") == node.encode():
            os.kill(pid, signal.SIGKILL)


def _kill_node(rig: RealKubernetesRig, node: str) -> None:
    rig.kill_node(node)


def _running_at(rig: BenchmarkCluster, job: str, after_s: float) -> float:
    lines = rig.history(job)
    return next((float(line["at_s"]) for line in lines if line["kind"] == "running" and line["at_s"] > after_s), 0.0)


# ---- many nodes ---------------------------------------------------------------------------------------------------------


def _many(runs: int, wanted: set[str]) -> list[Figure]:
    """A gang on 128 hollow nodes, and what a head costs beside 100 of them at rest."""
    figures: list[Figure] = []
    with _head(nodes=False, wait_nodes=False) as rig:
        if "rest" in wanted:
            figures.append(_at_rest(rig))
        if "gang" in wanted:
            with hollow_nodes(rig.real, GANG):
                # Kubernetes' own controller lifts the taint of a new node after some seconds.
                wait_until(lambda: _free_nodes(rig) >= GANG, "all nodes take pods", limit_s=90.0)
                figures += _gangs(rig, runs)
        if "memory" in wanted:
            figures += _memory(rig)
    return figures


def _gangs(rig: RealKubernetesRig, runs: int) -> list[Figure]:
    created, placed, withdrawn, theirs_created, theirs_placed = [], [], [], [], []
    for run in range(runs):
        began_s = time.time()
        job = rig.submit(run=["sleep", "600"], gpus=f"{GANG}x1", name="gang", tasks_per_node=1)
        placed.append(_until_placed(rig, began_s))
        created.append(max(_creates(rig, began_s)) - began_s)
        rig.call("POST", f"/v1/jobs/{job}/cancel")
        rig.wait_for_state(job, "cancelled")
        _wait_for_none(rig)
        span_s = max(_creates(rig, began_s)) - min(_creates(rig, began_s))
        print_progress(
            f"gang of {GANG}: created {created[-1]:.2f} s (in {span_s:.2f} s), placed {placed[-1]:.2f} s after the submit"
        )
        began_s = time.time()
        admin_api(rig.real).create(JOBS, _plain_job(run))
        theirs_placed.append(_until_placed(rig, began_s))
        theirs_created.append(max(_creates(rig, began_s)) - began_s)
        admin_api(rig.real).delete(JOBS, f"plain-{run}")
        _wait_for_none(rig)
        print_progress(f"plain Job: created {theirs_created[-1]:.2f} s, placed {theirs_placed[-1]:.2f} s")
    for _ in range(min(runs, 2)):
        with rig.real.without_scheduler():
            began_s = time.time()
            job = rig.submit(run=["sleep", "600"], gpus=f"{GANG}x1", name="unplaced", tasks_per_node=1)
            wait_until(lambda: len(_creates(rig, began_s)) >= GANG, "all pods are created")  # used at once
            first_s = min(_creates(rig, began_s))
            _wait_for_none(rig)
            withdrawn.append(time.time() - first_s)
            rig.call("POST", f"/v1/jobs/{job}/cancel")
            rig.wait_for_state(job, "cancelled")
            print_progress(f"gang of {GANG} without a scheduler: withdrawn {withdrawn[-1]:.2f} s after its first pod")
        _wait_for_none(rig)
    return [
        at_most("gang_128_s", created, "s", 2.0, peer=f"plain Job {statistics.median(theirs_created):.2f} s"),
        at_most("gang_128_placed_s", placed, "s", 15.0, peer=f"plain Job {statistics.median(theirs_placed):.2f} s"),
        at_most("gang_128_withdrawn_s", withdrawn, "s", 15.0, peer="plain Job: never", note="no scheduler answers"),
        plain_figure("plain_job_128_s", theirs_created, "s"),
        plain_figure("plain_job_128_placed_s", theirs_placed, "s"),
    ]


def _plain_job(run: int) -> dict[str, Any]:
    container = {
        "name": "x",
        "image": "x",
        "command": ["sleep", "600"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}}
    spec = {"parallelism": GANG, "completions": GANG, "backoffLimit": 0, "template": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"plain-{run}"}, "spec": spec}


def _until_placed(rig: RealKubernetesRig, began_s: float) -> float:
    api = admin_api(rig.real)

    def placed() -> bool:
        return sum(bool(pod["spec"].get("nodeName")) for pod in api.list(PODS)) >= GANG

    wait_until(placed, "all pods have a node", every_s=0.1, limit_s=120.0)
    return time.time() - began_s


def _wait_for_none(rig: RealKubernetesRig) -> None:
    wait_until(lambda: not admin_api(rig.real).list(PODS), "no pod is left", every_s=0.05, limit_s=120.0)


def _at_rest(rig: RealKubernetesRig) -> Figure:
    with hollow_nodes(rig.real, REST_NODES):
        wait_until(lambda: sum(node["state"] == "up" for node in rig.nodes()) >= REST_NODES, "all nodes are up")
        time.sleep(5.0)
        began_s = time.time()
        time.sleep(REST_S)
        requests = len({one["auditID"] for one in _audit(rig, began_s)})
    print_progress(f"{requests} requests of the head in {REST_S:.0f} s, with {REST_NODES} nodes")
    return at_most("requests_per_100_nodes_s", [requests / REST_S * 100 / REST_NODES], "/s", 1.0)


def _memory(rig: RealKubernetesRig) -> list[Figure]:
    """What a head keeps of pods of others: its own record of each, and how its process grows by a list of all."""
    api = admin_api(rig.real)
    assert rig.head is not None
    before_mib = pss_mib(rig.head.pid)
    spec = {
        "schedulerName": "nobody",
        "containers": [{"name": "x", "image": "x", "env": [{"name": "X", "value": "x" * 200}]}],
    }
    for index in range(OTHERS):
        api.create(PODS, {"metadata": {"name": f"other-{index}", "labels": {"app": "other"}}, "spec": spec})
    items = list(api.list(PODS))
    tracemalloc.start()
    table = ObjectTable(partial(parse_pod, gpu_resource="nvidia.com/gpu"), lambda: None, lambda _: None)
    for item in items:
        table.changed(item)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    time.sleep(10.0)
    grown = (pss_mib(rig.head.pid) - before_mib) * 1024 * 1024
    api.delete_all(PODS, labels="app=other", grace_s=0)
    print_progress(
        f"{OTHERS} pods: {kept / OTHERS:.0f} B each in the table; the head grew by {grown / OTHERS:.0f} B each"
    )
    return [
        at_most("head_bytes_per_pod", [kept / OTHERS], "B", 1024.0),
        plain_figure("head_growth_per_pod", [grown / OTHERS], "B", note=f"the whole process, by {OTHERS} pods"),
    ]


# ---- the API server's own times -----------------------------------------------------------------------------------------


def _creates(rig: RealKubernetesRig, after_s: float) -> list[float]:
    """When each create of a pod since then was answered."""
    return [
        _seconds(one["stageTimestamp"])
        for one in _audit(rig, after_s, users=("ada", "admin"))
        if one["verb"] == "create"
        and one["stage"] == "ResponseComplete"
        and one["objectRef"].get("resource") == "pods"
        and not one["objectRef"].get("subresource")
    ]


def _audit(rig: RealKubernetesRig, after_s: float, users: tuple[str, ...] = ("ada",)) -> list[dict[str, Any]]:
    with open(os.path.join(rig.real.folder, "audit.log"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [one for one in lines if one["user"]["username"] in users and _seconds(one["stageTimestamp"]) >= after_s]


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@contextlib.contextmanager
def _head(*words: str, nodes: bool = True, wait_nodes: bool = True) -> Iterator[RealKubernetesRig]:
    with real_kubernetes(
        ("--min-run", "1s", *words), nodes=nodes, wait_nodes=wait_nodes, lease_s=LEASE_S, audited=True
    ) as rig:
        yield rig


if __name__ == "__main__":
    main()
