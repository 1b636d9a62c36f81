"""A machine that never joins is replaced, and what it printed is kept. The cloud is moto's server; its instances are processes of this machine."""

import os
import re
import subprocess
import time

import pytest

from benchmarks.clouds.campaign_clouds import IMAGE, MOTO
from benchmarks.cluster import ROOT, free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not MOTO.exists(), reason="moto is not installed: make s3-tools"),
]
SETUP = "echo the driver of the GPUs is missing; env; sleep 600"  # `env` prints the join token


@pytest.fixture
def phalanx(tmp_path):
    port = free_port()
    environment = {
        **os.environ,
        "CLOUD_MACHINES": str(tmp_path / "machines"),
        "CLOUD_PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    words = [str(MOTO), "-m", "benchmarks.clouds.moto_cloud", "--port", str(port), "--boot", "0-1"]
    with open(tmp_path / "cloud", "wb") as output:
        cloud = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=output, stderr=output)
    shell = Shell(tmp_path)
    shell.env |= {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "CLOUD": f"http://127.0.0.1:{port}",
    }
    shell("up", "--virtual", "1x1", "--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}")
    yield shell
    shell("down", "--cancel-jobs")
    cloud.terminate()
    cloud.wait(timeout=60)


def wait_for(condition, what, within_s=150.0):
    until_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < until_s, what
        time.sleep(0.5)
    return found


def test_a_node_that_never_joins_is_replaced_and_its_console_output_is_kept(phalanx):
    given = (f"region=us-east-1 image={IMAGE} endpoint={phalanx.env['CLOUD']}".split(), [f"setup={SETUP}"])
    phalanx(
        *("pools", "add", "spot", "--provider", "aws", "--type", "g4dn.xlarge", "--zones", "a", "--max", "1"),
        *("--price", "1/h", "--start-limit", "8s"),
        *(word for part in given for one in part for word in ("--set", one)),
    )
    job = phalanx("submit", "--quiet", "--gpus", "t4:1", "--", "true").stdout.strip()

    def pool():
        return phalanx.json("pools", "show", "spot")

    kept = wait_for(lambda: pool()["consoles"], "the console of the first machine")
    assert (kept[0]["node"], kept[0]["machine"][:2]) == ("spot-0", "i-")
    shown = phalanx("pools", "show", "spot").stdout
    assert "it was not up 8 s after its request; its console output is kept" in shown
    assert re.search(r"console output of spot-0, machine i-\w+, \S+ ago: phalanx pools console spot-0", shown)
    why = wait_for(lambda: "tries again" in (text := phalanx("why", job).stdout) and text, "why says so")
    assert "spot-0: it was not up 8 s after its request; its console output is kept" in why
    text = phalanx("pools", "console", "spot-0").stdout
    assert "the driver of the GPUs is missing" in text
    assert "PHALANX_JOIN_TOKEN=[token]" in text
    assert "phxm" not in text
    assert [node["id"] for node in wait_for(lambda: pool()["nodes"], "another node is ordered")] == ["spot-1"]
    assert "no console output of node 'spot-7' is kept" in phalanx("pools", "console", "spot-7", code=64).stderr
    phalanx("cancel", job)
