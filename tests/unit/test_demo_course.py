"""The course of a demo: when a node is killed, what keys do, what is refused before anything starts."""

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cli.demo import example
from phalanx.cli.demo.command import _fleet_of, demo
from phalanx.cli.demo.node_kill import kill_marked, kill_node
from phalanx.cli.demo.runner import DemoQuit, DemoRunner
from phalanx.core.errors import BadFile, BadRequest, Conflict
from phalanx.core.ids import NodeId
from phalanx.engines.local import records
from phalanx.node.processes.proctable import alive, identity, process_environment, read_table
from tests.e2e.process_rig import until
from tests.unit.demo_drawn import KILL_S, make_scene


class RecordedCluster:
    def __init__(self):
        self.killed = []

    def kill_node(self, node):
        if node in self.killed:
            raise Conflict(f"{node} is not running")
        self.killed.append(node)
        return 7


class Log:
    def __init__(self):
        self.said = []

    def show_message(self, text, scene):
        self.said.append(text)


def conductor(at_s, *, kill_step=142) -> Any:
    cluster: Any = RecordedCluster()
    log: Any = Log()
    return DemoRunner(cluster, make_scene(at_s), log, kill_step=kill_step)


# ---- the demo's own kill ----------------------------------------------------------------------------------------------


def test_no_node_is_killed_before_its_step():
    led = conductor(12.0)
    led.kill_if_due()
    assert led.cluster.killed == []


def test_the_jobs_last_node_is_killed_once_the_step_is_reached():
    led = conductor(KILL_S - 0.001, kill_step=130)
    led.kill_if_due()
    led.kill_if_due()
    assert led.cluster.killed == ["n1"]
    assert led.scene.kills[0].held
    assert led.scene.kills[0].by == "demo"


def test_nothing_is_killed_before_a_checkpoint_is_published():
    led = conductor(8.0, kill_step=10)
    led.scene.job = type(led.scene.job)(
        **{**{f: getattr(led.scene.job, f) for f in led.scene.job.__struct_fields__}, "checkpoints": []}
    )
    led.kill_if_due()
    assert led.cluster.killed == []


def test_with_no_kill_all_nodes_live():
    led = conductor(16.0, kill_step=None)
    led.kill_if_due()
    assert led.cluster.killed == []


@pytest.mark.parametrize("steps", [40, 60, 100, 300, 1000])
def test_the_kill_comes_after_a_checkpoint_and_leaves_steps_to_make_again(steps):
    every, at = example.checkpoint_interval(steps), example.kill_step(steps)
    assert every < at < steps * 3 // 4
    assert at % every >= 2


# ---- keys -------------------------------------------------------------------------------------------------------------


def test_k_asks_and_a_number_kills():
    led = conductor(10.0)
    led.handle_key("k")
    assert "0 n0   1 n1   2 n2" in led.scene.prompt
    led.handle_key("")
    assert led.scene.prompt
    led.handle_key("2")
    assert led.cluster.killed == ["n2"]
    assert led.scene.prompt == ""
    assert not led.scene.kills[0].held


def test_another_key_takes_the_question_back():
    led = conductor(10.0)
    led.handle_key("k")
    led.handle_key("x")
    led.handle_key("1")
    assert led.cluster.killed == []


def test_killing_a_dead_node_is_told_and_starts_no_stopwatch():
    led = conductor(10.0)
    led.kill_node("n1", by="visitor")
    led.kill_node("n1", by="visitor")
    assert len(led.scene.kills) == 1
    assert led.audience.said[-1] == "n1 is not running"


def test_q_quits():
    with pytest.raises(DemoQuit):
        conductor(10.0).handle_key("q")


# ---- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--html", "/no/such/folder/x.html"], ["--json", "/"]])
def test_a_file_that_cannot_be_written_is_refused_at_once(words):
    result = CliRunner().invoke(demo, words)
    assert isinstance(result.exception, BadFile)


@pytest.mark.parametrize("fleet", ["", "3", "x4", "0x4", "3x", "3x4x5"])
def test_a_fleet_out_of_form_is_refused(fleet):
    with pytest.raises(BadRequest, match="NODESxDEVICES"):
        _fleet_of(fleet, 0)


def test_the_job_is_no_larger_than_the_fleet():
    assert _fleet_of("3x4", 0)[1] == "2x2"
    assert _fleet_of("1x1", 0)[1] == "1x1"
    assert _fleet_of("3x4", 8) == ("this machine with 8 GPUs", "1x4", 1)


def test_the_example_is_found_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.path.isfile(os.path.join(example.find_example(), "train.py"))


def test_a_missing_example_names_the_places(monkeypatch):
    with pytest.raises(BadFile, match="was not found in"):
        example.find_example("no_such_example")


# ---- the kill itself --------------------------------------------------------------------------------------------------

TREE = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session={})"
WAIT = "; print('up', flush=True); import time; time.sleep(600)"


@contextmanager
def running(code, **variables):
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **variables}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def living_of(key):
    marked = [
        row for row in read_table().values() if process_environment(row.pid).get(b"PHALANX_NODE_KEY") == key.encode()
    ]
    return [row.pid for row in marked if not row.dead]


@pytest.mark.serial
@pytest.mark.parametrize("orphan", [False, True])
def test_a_killed_node_leaves_no_process(tmp_path, orphan):
    key = f"n0-{os.getpid()}-{orphan}"
    with running(TREE.format(orphan) + WAIT, PHALANX_NODE_KEY=key) as root:
        living = identity(root.pid)
        assert living is not None
        folder = tmp_path / "nodes" / "n0"
        folder.mkdir(parents=True)
        records.write(
            str(folder), records.StartedNode(id=NodeId("n0"), node_key=key, identity=living, virtual_devices=4)
        )
        assert root.pid in living_of(key)
        assert kill_node(str(tmp_path), "n0") == 2
        root.wait(timeout=30)
        assert not alive(living)
        until(lambda: not living_of(key), "SIGKILL takes effect on each of them")
        with pytest.raises(Conflict, match="is not running"):
            kill_node(str(tmp_path), "n0")


@pytest.mark.serial
def test_whatever_bears_the_demos_mark_is_killed_at_the_end(tmp_path):
    with running("0" + WAIT, SOME_PATH=f"{tmp_path}/outputs") as stray:
        assert kill_marked([str(tmp_path)]) == 1
        assert stray.wait(timeout=30) == -9
