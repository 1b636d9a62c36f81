"""Datasets on real clusters: eight nodes over shaped links, accounts of several users, a staging program that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import cluster as bench_cluster
from benchmarks.cluster import command_words, wait_until
from phalanx.node.files.job_accounts import first_closed_parent
from tests.e2e import owners_rig
from tests.lab import needs
from tests.lab.lab import ROOT
from tests.unit.test_data_staging import RangeServer

pytestmark = [pytest.mark.prove, pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(500)]


@pytest.mark.root
@pytest.mark.skipif(bool(needs.why_not()), reason=needs.why_not())
def test_eight_nodes_take_half_as_long_again_as_one_and_read_the_source_once():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.staging", "--json", "--size", "512"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=480,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["nodes8_over_1"] <= 1.5
    assert found["source_reads"] <= 1.2
    assert found["second_bytes"] == 1
    assert found["head_bytes"] < found["size_mib"] << 15  # 3 % of the file, of which the nodes got eight copies


def test_killed_staging_of_a_real_job_goes_on_in_its_next_attempt():
    server = RangeServer(bytes(range(256)) * (1 << 16))
    server.free = 5
    with bench_cluster("1x1") as head:
        job_id = head.submit(run=["true"], gpus="1", data={"train": server.url}, workdir="/tmp")

        def chunks():
            return sum(
                os.path.getsize(os.path.join(folder, name))
                for folder, _, names in os.walk(head.home)
                for name in names
                if name == "chunks"
            )

        wait_until(lambda: chunks() == 5 * 36, "five chunks are here")
        wait_until(lambda: head.job(job_id)["staging"], "the head knows how far it is")
        assert head.job(job_id)["staging"][0]["total_bytes"] == len(server.data)
        assert "n0 copies train: 5 MiB of 16 MiB" in head.call("GET", f"/v1/jobs/{job_id}/why")["headline"]
        (pid,) = [pid for pid in head.node_pids("n0") if "phalanx.node.data.staging_main" in command_words(pid)]
        os.kill(pid, signal.SIGKILL)
        server.gate.set()
        server.free = 1 << 30
        time.sleep(0.2)
        server.bytes = 0
        head.wait_for_state(job_id, "succeeded")
        assert server.bytes == len(server.data) - 5 * (1 << 20)
        again = head.submit(run=["true"], gpus="1", data={"train": server.url}, workdir="/tmp")
        server.bytes = 0
        head.wait_for_state(again, "succeeded")
        assert server.bytes == 0
        notes = head.call("POST", "/v1/jobs/dry-run", {"run": ["true"], "data": {"train": server.url}, "workdir": "/"})
        assert any("train: 16 MiB, on n0 already, about " in note for note in notes["notes"])
    server.server.shutdown()
    server.server.server_close()


@pytest.mark.root
@pytest.mark.skipif(bool(owners_rig.unfit()), reason=owners_rig.unfit() or "root")
@pytest.mark.skipif(bool(first_closed_parent(sys.executable)), reason="other accounts cannot run this Python")
def test_data_is_read_with_the_rights_of_the_job_s_owner_and_its_copy_is_closed_to_others():
    rig = owners_rig.Cluster()
    try:
        rig.up()
        private = rig.home("ada") / "private"
        private.mkdir(mode=0o700)
        (private / "a.bin").write_bytes(b"of ada" * 1000)
        for path in (private, private / "a.bin"):
            os.chown(path, owners_rig.ACCOUNTS["ada"], owners_rig.ACCOUNTS["ada"])
        for name in ("ada", "ben"):
            text = {"run": ["sh", "-c", "cat $PHALANX_DATA_X/a.bin | wc -c; echo $PHALANX_DATA_X"], "gpus": 1}
            file = rig.home(name) / "job.yaml"
            file.write_text(json.dumps({**text, "data": {"x": str(private)}}))
            os.chown(file, owners_rig.ACCOUNTS[name], owners_rig.ACCOUNTS[name])
        said = rig.phalanx("ada", "run", str(rig.home("ada") / "job.yaml"), cwd=rig.home("ada")).stdout
        assert "6000" in said
        folder = said.split()[-1]
        refused = rig.phalanx("ben", "run", str(rig.home("ben") / "job.yaml"), cwd=rig.home("ben"), check=False)
        assert "Permission denied" in refused.stderr + refused.stdout
        spied = rig.run("ben", f"cat {folder}/a.bin; ls {folder}", check=False)
        assert "of ada" not in spied.stdout
        assert "Permission denied" in spied.stdout + spied.stderr
        logs = rig.phalanx("ada", "logs", "1", "--rank", "supervisor").stdout
        assert "staged in" in logs
        servers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        servers = [pid for pid in servers if "phalanx.node.data.server_main" in command_words(pid)]
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in servers}
        assert owners & {owners_rig.ACCOUNTS["ada"]}
        assert owners_rig.ACCOUNTS["ben"] in owners  # his job began to stage, and was refused by the file system
        for pid in servers:
            assert b"OPERATORS_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        rig.down()
