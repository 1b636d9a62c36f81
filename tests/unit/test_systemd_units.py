"""The system units: systemd itself accepts them, and a stop of the node's unit ends no job."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from phalanx.app import server_keeper
from phalanx.app.machine_nodes import virtual_nodes
from phalanx.cli.cluster.systemd_unit import system_head_unit, system_node_unit
from phalanx.client.connection import discovery
from phalanx.core.ids import NodeId
from phalanx.engines.local.engine import LocalEngine
from phalanx.node import membership as records
from phalanx.ports.engine import LocalNode, Membership

JOINED = Membership(
    url="https://h:7600",
    fingerprint="sha256:0",
    node_id=NodeId("g"),
    engine="joined",
    address="1.2.3.4",
    devices=0,
    virtual=True,
)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("phalanx-head.service", system_head_unit(python=sys.executable, arguments=["--listen", "off"])),
        ("phalanx-node.service", system_node_unit(python=sys.executable)),
    ],
)
def test_systemd_accepts_the_unit(tmp_path, name, unit):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / name
    path.write_text(unit)
    # The manual pages are in the wheel, not in a checkout.
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    path.write_text(unit.replace("Restart=on-failure", "Restart=on-fridays"))
    assert (
        "on-fridays"
        in subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
        ).stderr
    )


@pytest.mark.parametrize(
    ("number", "running", "keeps"),
    [
        (signal.SIGTERM, ["7.1"], True),
        (signal.SIGTERM, [], False),
        (signal.SIGINT, ["7.1"], False),
    ],
)
def test_only_sigterm_while_jobs_run_leaves_the_node_running(monkeypatch, tmp_path, number, running, keeps):
    seen = []

    class Engine:
        @staticmethod
        def keep_member(folder, joined, ended):
            os.kill(os.getpid(), number)
            assert ended.wait(10)
            seen.append(ended.keep_node)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setattr(server_keeper, "engine_type", lambda name: Engine)
    monkeypatch.setattr(records, "running_attempts", lambda folder: running)
    try:
        server_keeper._keep(str(tmp_path), JOINED)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert seen == [keeps]


def test_the_supervisor_of_the_service_gets_a_scope_of_its_own():
    def words(inherited):
        engine = LocalEngine(home="h", environment=dict, token_of=str, inherited=lambda: inherited)
        return engine._scope(LocalNode(id=NodeId("g"), virtual_devices=0))

    assert words({}) == []
    scope = words({"PHALANX_SUPERVISOR_SCOPE": "1"})
    assert (scope[:2], scope[-1]) == (["systemd-run", "--scope"], "--")
    assert "--property=Delegate=yes" in scope


def test_a_head_may_bring_no_node():
    assert virtual_nodes("none") == []


def test_root_without_a_folder_of_its_own_uses_that_of_the_service(monkeypatch, tmp_path):
    monkeypatch.delenv("PHALANX_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "root"))
    head, node = tmp_path / "head", tmp_path / "node"
    monkeypatch.setattr(discovery, "SYSTEM_HEAD_FOLDER", str(head))
    monkeypatch.setattr(discovery, "SYSTEM_NODE_FOLDER", str(node))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    own = str(tmp_path / "root" / ".phalanx")
    assert discovery.state_folder() == own
    (node / "joined").mkdir(parents=True)
    (node / "joined" / "joined.json").write_text("{}")
    assert discovery.state_folder() == str(node)
    head.mkdir()
    (head / "cluster.json").write_text("{}")
    assert discovery.state_folder() == str(head)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert discovery.state_folder() == own
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    os.makedirs(own)
    assert discovery.state_folder() == own
    assert discovery.state_folder("/x") == "/x"
