"""An engine of another package: that of docs/add-an-engine.md, as the page says, with a shell on this machine in place of ssh."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import free_port, wait_until

pytestmark = [pytest.mark.serial, pytest.mark.e2e]
PAGE = Path(__file__).parents[2] / "docs" / "add-an-engine.md"
SSH = '#!/bin/sh\nexport HOME="{home}" PHALANX_NODE_VIRTUAL=2\nshift\nexec sh -c "$*"\n'


@pytest.fixture
def phalanx(tmp_path):
    """Run a command, with the page's package installed."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = {kind: re.findall(rf"```{kind}\n(.+?)```", page, re.DOTALL)[0] for kind in ("python", "toml")}
    site, tools = tmp_path / "site", tmp_path / "bin"
    installed = site / "phalanx_ssh-1.0.dist-info"
    installed.mkdir(parents=True)
    tools.mkdir()
    (site / "phalanx_ssh.py").write_text(blocks["python"], encoding="utf-8")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx-ssh\nVersion: 1.0\n", encoding="utf-8")
    declared = blocks["toml"].replace('project.entry-points."phalanx.engines"', "phalanx.engines").replace('"', "")
    (installed / "entry_points.txt").write_text(declared, encoding="utf-8")
    (tools / "ssh").write_text(SSH.format(home=tmp_path / "far"), encoding="utf-8")
    (tools / "ssh").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "PHALANX_HOME": str(tmp_path / "home"),
    }

    def run(*words, code=0):
        argv = [sys.executable, "-m", "phalanx.app.cli", *words]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    yield run
    run("down", "--cancel-jobs")


def nodes_up(phalanx):
    return {(node["id"], node["engine"]) for node in json.loads(phalanx("nodes", "--json")) if node["state"] == "up"}


def test_the_engine_of_the_page_brings_up_nodes_and_runs_a_job(phalanx, tmp_path):
    assert "--ssh-hosts A,B" in phalanx("up", "--help")
    assert "--ssh-hosts needs the engine SSH" in phalanx("up", "--ssh-hosts", "gpu1", code=64)
    phalanx("up", "--engine", "ssh", "--ssh-hosts", "gpu1,gpu2", "--port", str(free_port()))
    wait_until(lambda: nodes_up(phalanx) == {("gpu1", "ssh"), ("gpu2", "ssh")}, "both nodes are up")
    assert "rank 1" in phalanx("run", "--gpus", "2", "--", "sh", "-c", "echo rank $RANK")
    phalanx("down")
    assert json.loads((tmp_path / "home" / "cluster.json").read_text())["engine_options"] == {"ssh-hosts": "gpu1,gpu2"}
    phalanx("up")
    wait_until(lambda: nodes_up(phalanx) == {("gpu1", "ssh"), ("gpu2", "ssh")}, "the stored options are used again")
