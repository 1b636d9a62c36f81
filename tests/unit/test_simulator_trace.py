"""Traces: both formats, and bad rows named by line."""

from __future__ import annotations

import pytest

from phalanx.core.errors import BadFile
from phalanx.simulator.fleet import equal_nodes, read_fleet
from phalanx.simulator.trace import read_trace

HEADER = "job_id,submit_s,duration_s,num_gpus,gpu_type,vc,status"


def test_jobs_come_by_submit_time_and_ties_in_file_order():
    trace = read_trace([HEADER, "late,9,1,1,,,", "b,5,1,1,,x,", "a,5,1,2,,,"])
    assert [job.id for job in trace.jobs] == ["b", "a", "late"]
    assert trace.jobs[0].virtual_cluster == "x"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("a,1,2", "too few cells"),
        ("a,x,2,1,,,", "submit_s 'x' is not a number"),
        ("a,1,-2,1,,,", "duration_s -2 is not between"),
        ("a,1,nan,1,,,", "duration_s nan is not between"),
        ("a,1,2,0.5,,,", "not an integer"),
        ("a,1,2,0,,,", "at least 1"),
        (",1,2,1,,,", "job_id is blank"),
    ],
)
def test_a_bad_row_is_named_by_line_and_refused(row, why):
    with pytest.raises(BadFile, match=f"line 3: .*{why}"):
        read_trace([HEADER, "good,0,1,1,,,", row])
    trace = read_trace([HEADER, "good,0,1,1,,,", row], skip_bad=True)
    assert [job.id for job in trace.jobs] == ["good"]
    assert trace.invalid_rows[0].line == 3


def test_a_job_that_stands_twice_is_refused():
    with pytest.raises(BadFile, match="duplicate job_id a"):
        read_trace([HEADER, "a,0,1,1,,,", "a,1,1,1,,,"])


def test_a_missing_column_is_named():
    with pytest.raises(BadFile, match="lacks the column num_gpus"):
        read_trace(["job_id,submit_s,duration_s", "a,0,1"])


def test_swf_takes_what_was_asked_else_what_was_used():
    rows = [
        "; Version: 2.2",
        "1 0 3 100 4 -1 -1 8 200 -1 1 2 3 4 7 1 -1 -1",
        "2 5 3 50 4 -1 -1 -1 -1 -1 1 2 3 4 -1 1 -1 -1",
    ]
    jobs = read_trace(rows).jobs
    assert [(job.gpus, job.duration_s, job.limit_s, job.virtual_cluster) for job in jobs] == [
        (8, 100.0, 200.0, "7"),
        (4, 50.0, None, ""),
    ]


def test_swf_row_without_a_run_time_is_bad():
    with pytest.raises(BadFile, match="line 2: its run time is unknown"):
        read_trace(["; SWF", "1 0 3 -1 4 -1 -1 8 200 -1 1 2 3 4 7 1 -1 -1"])


def test_a_fleet_leaves_out_nodes_without_devices():
    nodes = read_fleet(["node,gpu_type,gpus,vc", "a,,8,x", "b,,0,x"])
    assert [(node.name, node.gpus, node.virtual_cluster) for node in nodes] == [("a", 8, "x")]


def test_a_fleet_row_without_a_number_is_named():
    with pytest.raises(BadFile, match="line 2: gpus 'many'"):
        read_fleet(["node,gpus", "a,many"])


def test_a_node_that_stands_twice_is_named():
    with pytest.raises(BadFile, match="line 3: duplicate node a"):
        read_fleet(["node,gpus", "a,8", "a,4"])


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("", ()),
        ("V100|p100", ("v100", "p100")),
        ("Tesla V100-SXM2 | v100|V100", ("tesla_v100_sxm2", "v100")),
        ("A100-80GB", ("a100_80gb",)),  # not a memory to be asked for: this fleet has no other
        ("3090", ("gpu_3090",)),  # the grammar of requests wants a letter first; nodes are named alike
    ],
)
def test_models_of_a_row_become_words_of_the_request_grammar(text, models):
    (job,) = read_trace([HEADER, f"a,0,1,1,{text},,"]).jobs
    assert job.models == models


def test_equal_nodes():
    assert [node.gpus for node in equal_nodes(2, 4)] == [4, 4]
