"""`phalanx whatif`, as typed, on the history of a head."""

import json

import pytest

from phalanx.cli.root import main
from phalanx.cli.simulate import head_history
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.trace import Trace, TraceJob
from tests.builders import queue


@pytest.fixture
def whatif(capsys, tmp_path, monkeypatch):
    """The history: 30 jobs of 2 GPUs, and 25 of 8, which queue nlp can never admit today."""
    monkeypatch.chdir(tmp_path)
    jobs = tuple(
        TraceJob(id=f"{at}", submit_s=60.0 * at, duration_s=100.0, gpus=8 if at < 25 else 2, virtual_cluster="nlp")
        for at in range(55)
    )
    found = head_history.HeadHistory(
        trace=Trace(jobs=jobs), nodes=tuple(equal_nodes(2, 8)), queues=(queue("nlp", gpus_per_user=6),)
    )
    monkeypatch.setattr("phalanx.cli.connection.connect", lambda: None)
    monkeypatch.setattr(head_history, "read_head_history", lambda *_, **__: found)

    def run(*words):
        code = main(["whatif", "--since", "30d", *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_jobs_that_can_never_start_are_left_out_by_name(whatif):
    code, out, err = whatif("--add", "1x8")
    assert code == 0
    lines = err.splitlines()
    assert lines[0] == (
        "phalanx: current fleet: left out job 0, which can never start: 8 GPUs asked; queue nlp allows 6 a user"
    )
    names = ", ".join(str(at) for at in range(3, 23))
    assert lines[3] == f"phalanx: current fleet: left out 22 more jobs that can never start: {names}, ..."
    assert "GPU-hours used" in out


def test_json_names_every_job_left_out(whatif):
    code, out, _ = whatif("--add", "1x8", "--json")
    figures = json.loads(out)
    assert code == 0
    for side in (figures["now"], figures["then"]):
        assert side["jobs_left_out"] == 25
        assert [one["job"] for one in side["left_out"]] == [str(at) for at in range(25)]
        assert {one["why"] for one in side["left_out"]} == {"8 GPUs asked; queue nlp allows 6 a user"}
