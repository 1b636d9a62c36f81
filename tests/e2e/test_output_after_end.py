"""Output that a node sends after the end of its job: the devices are free before, and a killed supervisor loses none of it."""

import json
import os
import signal
import sys

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

LINES = 600_000  # 60 MB: more than a node sends within the half second for which it waits
PRINTS = """
import sys
sys.stdout.writelines(f"{number:09d} {'x' * 89}\\n" for number in range(int(sys.argv[1])))
"""


@pytest.fixture
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("output"))
    (shell.work / "prints.py").write_text(PRINTS)
    shell("up", "--virtual", "1x1", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def test_output_of_an_ended_job_arrives_although_its_supervisor_is_killed(phalanx):
    job_id = phalanx("submit", "--quiet", "--gpus", "1", "--", sys.executable, "prints.py", str(LINES)).stdout.strip()
    phalanx.until(job_id, "succeeded")
    record = json.loads((phalanx.home / "nodes" / "n0" / "engine.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    lines = phalanx("logs", job_id, "--follow").stdout.splitlines()
    assert len(lines) == LINES
    assert [int(line[:9]) for line in lines] == list(range(LINES))
    phalanx("submit", "--wait", "--gpus", "1", "--", "true")
    left = phalanx.home / "nodes" / "n0"
    assert not any((left / "unsent").rglob("*.log")), "sent, so it is removed"
