"""`run --plan` against a real head with virtual nodes: the layout reaches every rank, and the shape keeps tensor groups whole."""

import json
import sys

import pytest

from benchmarks.cluster import free_port
from phalanx.core.work.gang_topology import gang_topology_from_json
from phalanx.core.work.layouts.layout import layout_from_json, parse_layout
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PYTHON = sys.executable
SAYS = """
import json, os
print(json.dumps([os.environ.get(name) for name in ("RANK", "PHALANX_NODE_RANK", "PHALANX_LAYOUT", "PHALANX_MACHINE")]), flush=True)
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("plan"))
    (shell.work / "says.py").write_text(SAYS)
    shell("up", "--virtual", "3x3", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def said(output):
    return sorted(json.loads(line.partition("] ")[2]) for line in output.splitlines())


def test_layout_and_machine_reach_every_rank(phalanx):
    done = phalanx("run", "--plan", "tp=2,fsdp=3", "--", PYTHON, "says.py")
    # 3 nodes of 3: as few nodes as hold 6 would be 2 x 3, which cuts a pair in two.
    assert "3 nodes x 2 = 6 GPUs; 6 tasks: 3 nodes x 2, one per GPU; layout tp=2,fsdp=3: 6 ranks" in done.stderr
    ranks = said(done.stdout)
    assert [(rank, node) for rank, node, _, _ in ranks] == [(str(rank), str(rank // 2)) for rank in range(6)]
    for _, _, layout, machine in ranks:
        assert layout_from_json(json.loads(layout)) == parse_layout("tp=2,fsdp=3")
        found = gang_topology_from_json(json.loads(machine))
        assert (found.gpu, found.virtual, found.nodes, found.gpus_per_node) == ("virtual", True, 3, 2)


def test_auto_is_left_to_the_ranks_and_show_says_so(phalanx):
    done = phalanx("run", "--gpus", "2", "--plan", "auto", "--", PYTHON, "says.py")
    assert [layout for _, _, layout, _ in said(done.stdout)] == ["auto", "auto"]
    job = phalanx.json("ps", "-a")[-1]["id"]
    assert "layout    auto: chosen by the ranks" in phalanx("show", job).stdout


def test_job_without_a_plan_is_told_of_none(phalanx):
    done = phalanx("run", "--gpus", "2", "--", PYTHON, "says.py")
    assert [rank[2:] for rank in said(done.stdout)] == [[None, None], [None, None]]


def test_show_prints_the_layout_of_a_job_file(phalanx):
    (phalanx.work / "job.yaml").write_text(f"run: {PYTHON} says.py\nplan: pp=2,dp=2\n")
    job = phalanx("submit", "--quiet", "job.yaml").stdout.strip()
    phalanx.until(job, "succeeded")
    assert "layout    pp=2,dp=2 (4 ranks)" in phalanx("show", job).stdout
    assert phalanx.json("show", job)["job"]["plan"] == "pp=2,dp=2"


def test_wider_than_a_node_is_told_before_it_starts(phalanx):
    told = phalanx("submit", "--hold", "--plan", "tp=6", "--", PYTHON, "says.py").stdout
    assert "tensor parallel over 6 ranks crosses nodes: a node of this job has 3" in told
    asked = phalanx("submit", "--hold", "--gpus", "2x3", "--plan", "tp=2,dp=3", "--", PYTHON, "says.py").stdout
    assert "3 ranks per node are not a multiple of the tensor group size 2" in asked


SMALL = "layers=4,hidden=128,heads=4,vocab=1000"


def test_mapping_is_planned_on_the_fleet_when_it_is_handed_in(phalanx):
    (phalanx.work / "wish.yaml").write_text(
        f"run: {PYTHON} says.py\ngpus: 4\nplan:\n  model: {SMALL}\n  seq: 128\n  global_batch: 16\n"
    )
    done = phalanx("run", "wish.yaml")
    assert "s per step" in done.stderr
    layout = layout_from_json(json.loads(said(done.stdout)[0][2]))
    assert (layout.ranks, layout.global_batch) == (4, 16)


def test_mapping_that_cannot_be_is_refused_before_it_is_handed_in(phalanx):
    (phalanx.work / "wish.yaml").write_text(f"run: {PYTHON} says.py\nplan: {{model: llama-9-8b}}\n")
    before = len(phalanx.json("ps", "-a"))
    assert "the job requests no GPUs" in phalanx("submit", "wish.yaml", code=64).stderr
    assert "unknown model" in phalanx("submit", "wish.yaml", "--gpus", "2", code=64).stderr
    assert (
        "no node of this fleet has h100 GPUs"
        in phalanx("plan", SMALL, "--fleet", "here", "--gpus", "h100:2", code=64).stderr
    )
    assert len(phalanx.json("ps", "-a")) == before


def test_plan_here_is_on_what_the_head_has(phalanx):
    found = phalanx.json("plan", SMALL, "--fleet", "here", "--seq", "128", "--global-batch", "18")
    assert found["machine"] == {"nodes": 3, "gpus_per_node": 3, "gpus": 9, "gpu": "virtual"}
    assert any("phalanx calibrate" in note for note in found["notes"])
