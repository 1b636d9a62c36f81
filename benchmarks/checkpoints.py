"""Checkpoints in an object store: `python -m benchmarks.checkpoints --json`. The second part needs `make s3-tools` and root.

First one node's part of `--size` MiB goes to a store in memory on loopback and back, by the code that nodes run. Then a job of two nodes saves a model
in moto's S3 server: the head (h0), the store (h1) and the nodes (h2, h3) are hosts of the lab, whose links carry `--rate` Mbit/s each way.

    up_mib_per_s, down_mib_per_s    of one node, over loopback
    cpu_s_per_gib_up                of the program that stores, without the store
    published_mib                   of the checkpoints of the job that are published at its end
    head_bytes                      over the head's link meanwhile, both ways, from the submit to the end of the job
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any, Final

from benchmarks.cluster import wait_until
from benchmarks.figures import argument_parser, print_progress
from benchmarks.staging import StagingCluster
from phalanx.node.data import checkpoint_objects
from phalanx.node.data.object_store import ObjectFolder
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointManifest, ManifestFile
from tests.lab.lab import ROOT, Lab
from tests.lab.needs import why_not
from tests.object_rig import BUCKET, MOTO

_PORT: Final = 8081
_MIB: Final = 1 << 20
_SAVES: Final = 3
_PIECE: Final = os.urandom(_MIB)


def main() -> int:
    """Measure and print."""
    parser = argument_parser("checkpoints in an object store")
    parser.add_argument("--size", type=int, default=1024, help="of one node's part, in MiB")
    parser.add_argument("--model", type=int, default=16, help="of the job's model, in MiB")
    parser.add_argument("--rate", type=float, default=1000.0, help="of all links, each way, in Mbit/s")
    asked = parser.parse_args()
    os.makedirs(ROOT / "build", exist_ok=True)
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=ROOT / "build")
    try:
        found = _one_node(folder, asked.size)
        why = why_not() or ("" if MOTO else "make s3-tools")
        if why:
            print_progress(f"no job: {why}")
        else:
            with Lab(size=4, gpus=0, rate_mbit=asked.rate) as lab:
                found |= _job(lab, folder, asked.model)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found |= {"size_mib": asked.size, "model_mib": asked.model, "rate_mbit": asked.rate}
    print(json.dumps(found, indent=1) if asked.json else "\n".join(f"{name} {value}" for name, value in found.items()))
    return 0


def _one_node(folder: str, size_mib: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.memory_store", str(port)], cwd=ROOT) as server:
        try:
            os.environ |= _variables(f"127.0.0.1:{port}")
            wait_until(lambda: _make_bucket("127.0.0.1", port), "the store answers")
            digest = _save(f"{folder}/save", size_mib)
            store = ObjectFolder(f"s3://{BUCKET}/one/7-k/epoch-1-k/step-00000001")
            began_s, cpu_s = time.monotonic(), time.process_time()
            stored = checkpoint_objects.upload(
                store, f"{folder}/save", digest, rank=0, nodes=1, on_bytes=lambda _number: None
            )
            up_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
            began_s = time.monotonic()
            checkpoint_objects.download(store, stored, f"{folder}/back")
            down_s = time.monotonic() - began_s
        finally:
            server.kill()
    return {
        "up_mib_per_s": round(size_mib / up_s, 1),
        "down_mib_per_s": round(size_mib / down_s, 1),
        "cpu_s_per_gib_up": round(cpu_s * 1024 / size_mib, 2),
    }


def _job(lab: Lab, folder: str, model_mib: int) -> dict[str, Any]:
    head, store = lab.host("h0").address, lab.host("h1").address
    assert MOTO is not None
    words = [MOTO, "-H", "0.0.0.0", "-p", str(_PORT)]
    with lab.start("h1", words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            made = f"import benchmarks.checkpoints as b; print('made' if b._make_bucket('127.0.0.1', {_PORT}) else '')"
            asks = [sys.executable, "-c", made]
            wait_until(lambda: lab.run("h1", asks, check=False) == "made\n", "the store answers", every_s=0.5)
            cluster = StagingCluster(
                home="/var/tmp", port=7600, virtual="", lab=lab, up_arguments=("--listen", head), folder=folder
            )
            cluster.begin()
            before = cluster.head_bytes()
            job_id = cluster.submit(
                run=[sys.executable, f"{ROOT}/benchmarks/checkpoints_rank.py", str(model_mib), str(_SAVES)],
                gpus="2x1",
                checkpoint=f"s3://{BUCKET}/job",
                env=_variables(f"{store}:{_PORT}"),
                workdir="/var/tmp",
            )
            wait_until(lambda: cluster.job(job_id)["state"] not in {"pending", "running"}, "the job ends", every_s=0.2)
            job = cluster.job(job_id)
            assert job["state"] == "succeeded", job
            carried = cluster.head_bytes() - before
            stored = sum(one["bytes"] for one in job["checkpoints"])
            cluster.end()
        finally:
            server.kill()
    return {"published_mib": round(stored / _MIB, 1), "head_bytes": carried}


def _variables(address: str) -> dict[str, str]:
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
    return {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_REGION": "us-east-1", **keys}


def _make_bucket(host: str, port: int) -> bool:
    try:
        made = http.client.HTTPConnection(host, port, timeout=5)
        made.request("PUT", f"/{BUCKET}")
        return made.getresponse().status == 200
    except OSError:
        return False


def _save(folder: str, size_mib: int) -> str:
    """Write a checkpoint of one file; returns the digest of its manifest."""
    os.makedirs(folder)
    crc = 0
    with open(f"{folder}/rank-0.pt", "wb") as file:
        for number in range(size_mib):
            piece = number.to_bytes(8, "big") + _PIECE[8:]
            crc = zlib.crc32(piece, crc)
            file.write(piece)
    one = ManifestFile(path="rank-0.pt", size_bytes=size_mib * _MIB, crc32=crc)
    encoded = manifests.encode(CheckpointManifest(format=1, step=1, epoch=1, world_size=1, files=(one,)))
    with open(f"{folder}/manifest.json", "wb") as file:
        file.write(encoded)
    return manifests.digest(encoded)


if __name__ == "__main__":
    sys.exit(main())
