"""Data staged to one node and to eight, over shaped links: `python -m benchmarks.staging --json`.

A real head (h0), a web server with the data (h1) and joined nodes (h2 ...) are hosts of the lab: network namespaces whose links carry `--rate`
Mbit/s each way (docs/lab.md). One job stages a file on one node, then one job stages another file of the same size on all nodes. A third job on
the node of the first shows what a copy that is there moves. Needs root.

    nodes8_over_1   time of the job on all nodes over that of the job on one
    source_reads    bytes that the server sent to the gang over the size of the file
    second_bytes    bytes that it sent to the third job: the first byte, which proves that the job may read
    head_bytes      bytes over the head's link during the job on all nodes
    cpu_s_per_gib   CPU of staging programs and servers of chunks on all nodes, per GiB that a node got
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.cluster import wait_until
from benchmarks.engine_clusters import HOME, JOIN_S, PHALANX, LabCluster
from benchmarks.figures import argument_parser, print_progress
from tests.lab.lab import ROOT, Lab
from tests.lab.needs import why_not
from tests.lab.typed import join_words

SOURCE_PORT: Final = 8080
_MIB: Final = 1 << 20
_END_S: Final = 3600.0
_CPU: Final = re.compile(r"data train: .* staged in .* ([\d.]+)s of CPU")


@dataclass(slots=True, kw_only=True)
class StagingCluster(LabCluster):
    """A head on h0, the source on h1, and nodes with one virtual device on the others. `folder`: of the nodes' caches, on a disk."""

    folder: str

    def begin(self) -> None:
        """Start the head, and let the nodes join."""
        self.environment = dict(os.environ)
        output = self.lab.run("h0", [*PHALANX, "up", *self.up_arguments], timeout_s=JOIN_S)
        self.join_arguments = tuple(join_words(output))
        for name in self.stagers:
            home = f"PHALANX_HOME={self.folder}/{name}"
            self.lab.run(name, ["env", home, *PHALANX, *self.join_arguments, "--virtual", "1"], timeout_s=JOIN_S)
        wait_until(lambda: set(self.stagers) <= self.nodes_up(), "all nodes are up", every_s=0.1)

    def end(self) -> None:
        """Stop the head; the lab ends the nodes."""
        self.lab.run("h0", [*PHALANX, "down", "--cancel-jobs"], check=False, timeout_s=60.0)

    @property
    def stagers(self) -> list[str]:
        """The hosts that stage."""
        return list(self.lab.hosts)[2:]

    def stage(self, file: str, nodes: list[str]) -> float:
        """Run a job that stages a file on these nodes; return the seconds from submit to end.

        Raises:
            AssertionError: it failed.
        """
        source = f"http://{self.lab.host('h1').address}:{SOURCE_PORT}/{file}"
        began = time.monotonic()
        job_id = self.submit(
            run=["true"], gpus=f"{len(nodes)}x1", nodelist=",".join(nodes), data={"train": source}, workdir="/var/tmp"
        )
        last, copier = 0.0, job_id
        while (job := self.job(job_id))["state"] in {"pending", "running"}:
            copier = next((one.removeprefix("afterany:") for one in job["unmet"]), copier)
            assert time.monotonic() - began < _END_S, f"job {job_id} does not end: {job}"
            if time.monotonic() - last > 10.0:
                last = time.monotonic()
                parts = [f"{one['node']} {one['done_bytes'] // _MIB} MiB" for one in job["staging"]]
                print_progress(f"  {file} after {time.monotonic() - began:.0f} s: {', '.join(parts)}")
            time.sleep(0.1)
        assert job["state"] == "succeeded", job
        self.last_job = copier
        return time.monotonic() - began

    last_job: str = ""  # that copied: the job itself, or the one before it that held no GPUs

    def cpu_s(self) -> float:
        """Return the CPU time of the servers of chunks so far, and of the staging programs of the last job."""
        total = 0.0
        for name in self.stagers:
            for pid in self.lab.processes(name):
                with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                    serves = "phalanx.node.data.server_main" in file.read()
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                    words = file.read().rpartition(")")[2].split()
                total += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") * serves
        said = self.lab.run("h0", [*PHALANX, "logs", self.last_job, "--rank", "supervisor"])
        return total + sum(float(seconds) for seconds in _CPU.findall(said))

    def sent_bytes(self) -> int:
        """Return what the source sent so far."""
        code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{SOURCE_PORT}/sent').read().decode())"
        return int(self.lab.run("h1", [sys.executable, "-c", code]))

    def head_bytes(self) -> int:
        """Return what went over the head's link so far, both ways."""
        folder = "/sys/class/net/eth0/statistics"
        return sum(
            int(text) for text in self.lab.run("h0", ["cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes"]).split()
        )


def main() -> int:
    """Measure and print."""
    parser = argument_parser("data staged to one node and to several")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the second job")
    parser.add_argument("--size", type=int, default=256, help="of the file, in MiB")
    parser.add_argument("--rate", type=float, default=100.0, help="of all links, each way, in Mbit/s")
    asked = parser.parse_args()
    if why_not():
        print(f"staging: skipped: {why_not()}")
        return 0
    os.makedirs(ROOT / "build", exist_ok=True)
    folder = tempfile.mkdtemp(prefix="staging-", dir=ROOT / "build")
    try:
        with Lab(size=asked.nodes + 2, gpus=0, rate_mbit=asked.rate) as lab:
            found = measure(lab, folder, size_bytes=asked.size * _MIB)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found |= {"nodes": asked.nodes, "size_mib": asked.size, "rate_mbit": asked.rate}
    print(json.dumps(found, indent=1) if asked.json else "\n".join(f"{name} {value}" for name, value in found.items()))
    return 0


def measure(lab: Lab, folder: str, *, size_bytes: int) -> dict[str, Any]:
    """Return the figures; see the module."""
    address = lab.host("h1").address
    words = [sys.executable, "-m", "benchmarks.staging_source", "0.0.0.0", str(SOURCE_PORT), str(size_bytes)]
    with lab.start("h1", words, stdout=subprocess.DEVNULL) as server:
        try:
            head = lab.host("h0").address
            cluster = StagingCluster(
                home="/var/tmp", port=7600, virtual="", lab=lab, up_arguments=("--listen", head), folder=folder
            )
            cluster.begin()
            print_progress(f"{len(cluster.stagers)} nodes are up, head {head}, source {address}, state {HOME}")
            one_s = cluster.stage("one", cluster.stagers[:1])
            sent, carried, spent_s = cluster.sent_bytes(), cluster.head_bytes(), cluster.cpu_s()
            all_s = cluster.stage("all", cluster.stagers)
            carried = cluster.head_bytes() - carried
            reads = cluster.sent_bytes() - sent
            own_s = sum(map(float, _CPU.findall(lab.run("h0", [*PHALANX, "logs", "1", "--rank", "supervisor"]))))
            cpu_s = cluster.cpu_s() - (spent_s - own_s)
            sent = cluster.sent_bytes()
            second_s = cluster.stage("one", cluster.stagers[:1])
            second = cluster.sent_bytes() - sent
            cluster.end()
        finally:
            server.kill()
    got_gib = size_bytes * len(cluster.stagers) / (1 << 30)
    return {
        "nodes8_over_1": round(all_s / one_s, 3),
        "source_reads": round(reads / size_bytes, 3),
        "one_s": round(one_s, 2),
        "all_s": round(all_s, 2),
        "second_s": round(second_s, 2),
        "second_bytes": second,
        "head_bytes": carried,
        "cpu_s_per_gib": round(cpu_s / got_gib, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
