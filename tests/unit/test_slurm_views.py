"""Slurm's listing commands as views: their options, formats and words, as Slurm 22.05 prints them."""

import json
import os

import pytest

from phalanx.cli.jobs.request.sbatch_script import exported_environment, script_mapping
from phalanx.cli.slurm_views import main as views
from phalanx.cli.slurm_views.arguments import parse_words
from phalanx.cli.slurm_views.formats import parse_columns, parse_letters, parse_past_s, render_columns, render_letters
from phalanx.cli.slurm_views.lists import print_lines
from phalanx.cli.slurm_views.own_job import job_id, use_head_of_job
from phalanx.cli.slurm_views.rows import (
    SQUEUE_TITLES,
    exit_code_text,
    job_lines,
    job_states,
    sinfo_rows,
    slurm_duration,
    squeue_row,
)
from phalanx.cli.slurm_views.submit import take_wrap
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.node import NodeState
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.work.sbatch_scripts.sbatch import split_command_line
from phalanx.core.work.states import JobState
from phalanx.node.gang.job_link import BATCH_VARIABLE
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import NodeView


def job(state=JobState.RUNNING, **fields):
    given = {"id": "17", "seq": 17, "name": "train", "user": "ada", "project": "lab", "queue": "gpu", "submit_s": 0.0}
    return JobView(state=state, **{**given, **fields})


RUNS = {"nodes": ["n0", "n1"], "started_s": 100.0, "shape": "2x8", "time_limit_s": 3600.0}


# ---- options and formats ------------------------------------------------------------------------------------------------


def test_short_long_and_combined_options_are_the_same():
    flags, values = {"noheader": "h", "long": "l"}, {"format": "o"}
    for words in (["-hl", "-o%i", "x"], ["--noheader", "-l", "--format=%i", "x"], ["-h", "-l", "-o", "%i", "x"]):
        found, others = parse_words(words, flags, values, "phalanx ps")
        assert (found, others) == ({"noheader": "", "long": "", "format": "%i"}, ["x"])


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--formt=%i"], "did you mean --format"), (["-z"], "not an option"), (["-o"], "no value")],
)
def test_an_option_that_the_view_lacks_is_refused(words, why):
    with pytest.raises(BadRequest) as refused:
        parse_words(words, {"noheader": "h"}, {"format": "o"}, "phalanx ps")
    assert why in f"{refused.value} {refused.value.hint}"


def test_squeue_lines_are_those_of_slurm():
    default = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
    fields, rest = parse_letters(default, SQUEUE_TITLES)
    rows = [squeue_row(job(**RUNS), 161.0), squeue_row(job(JobState.PENDING, shape="4x8", held=True), 161.0)]
    assert render_letters(fields, rest, rows, SQUEUE_TITLES) == [
        "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)",
        "                17       gpu    train      ada  R       1:01      2 n[0-1]",
        "                17       gpu    train      ada PD       0:00      4 (JobHeldUser)",
    ]


def test_a_field_is_cut_and_filled_to_its_width_also_the_last():
    fields, rest = parse_letters("<%3j|%8T>", SQUEUE_TITLES)
    assert render_letters(fields, rest, [squeue_row(job(**RUNS), 0.0)], None) == ["<tra|RUNNING >"]
    with pytest.raises(BadRequest, match="%w is not known"):
        parse_letters("%w", SQUEUE_TITLES)


def test_sacct_columns_are_right_justified_and_long_values_end_with_a_plus():
    columns = parse_columns("jobid,JobName%4,state%-9", {"JobID": 5, "JobName": 10, "State": 9})
    rows = [{"JobID": "17", "JobName": "training", "State": "FAILED"}]
    assert render_columns(columns, rows, titles=True) == [
        "JobID JobN State     ",
        "----- ---- --------- ",
        "   17 tra+ FAILED    ",
    ]
    assert render_columns(columns, rows, titles=False, separator="|") == ["17|training|FAILED"]


def test_times_of_sacct():
    assert parse_past_s("now-2hours", 10_000.0) == 2800.0
    assert parse_past_s("now", 10_000.0) == 10_000.0
    assert parse_past_s("2026-12-01T08:00", 0.0) - parse_past_s("2026-12-01", 0.0) == 8 * 3600
    with pytest.raises(BadRequest, match="not a time"):
        parse_past_s("yesterday", 0.0)


# ---- words --------------------------------------------------------------------------------------------------------------


def test_states_and_durations_are_slurms():
    assert job_states("PD,running") == (JobState.PENDING, JobState.RUNNING)
    assert set(job_states("all")) == set(JobState)
    assert [slurm_duration(s) for s in (5, 3605, 90_000)] == ["0:05", "1:00:05", "1-01:00:00"]
    assert slurm_duration(5, hours=True) == "00:00:05"


def test_exit_codes_are_code_and_signal():
    ended = {"started_s": 1.0, "ended_s": 2.0}
    assert exit_code_text(job(JobState.FAILED, exit_code=3, **ended)) == "3:0"
    assert exit_code_text(job(JobState.CANCELLED, exit_code=143, **ended)) == "0:15"
    assert exit_code_text(job(JobState.CANCELLED, exit_code=143)) == "0:0", "it never started"


def test_scontrol_show_job_has_the_words_that_scripts_look_for():
    said = " ".join(job_lines(job(command="/home/ada/train.sh 7", workdir="/home/ada", **RUNS), 161.0))
    for word in ("JobId=17", "JobState=RUNNING", "NodeList=n[0-1]", "NumNodes=2", "Command=/home/ada/train.sh 7"):
        assert word in said.replace("   ", " ")
    assert "TimeLimit=01:00:00" in said


def test_sinfo_folds_nodes_of_one_state_and_marks_the_default_partition():
    nodes = [
        NodeView(id=NodeId(f"n{n}"), state=state, engine="local", devices=[], cpus=8, memory_bytes=1 << 30)
        for n, state in enumerate((NodeState.UP, NodeState.UP, NodeState.DOWN))
    ]
    rows = sinfo_rows(nodes, ["default"], "PDtN", each=False)
    assert [(row["P"], row["D"], row["t"], row["N"]) for row in rows] == [
        ("default*", "2", "idle", "n[0-1]"),
        ("default*", "1", "down", "n2"),
    ]
    assert [row["N"] for row in sinfo_rows(nodes, ["default", "big"], "N", each=False)] == ["n[0-2]"], "nodes once"
    assert [row["D"] for row in sinfo_rows(nodes, ["default", "big"], "Dt", each=False)] == ["2", "1"]
    assert [row["n"] for row in sinfo_rows(nodes, ["default", "big"], "n", each=True)] == [
        "n0",
        "n0",
        "n1",
        "n1",
        "n2",
        "n2",
    ]


# ---- sbatch -------------------------------------------------------------------------------------------------------------


def test_options_of_sbatch_end_at_the_script():
    given, rest = split_command_line(["-N2", "--time", "5", "-J", "x", "-H", "run.sh", "--epochs", "3"])
    assert (given, rest) == (["-N2", "--time", "5", "-J", "x", "-H"], ["run.sh", "--epochs", "3"])


def test_wrap_is_a_command_and_an_argument_of_the_script_is_not(tmp_path):
    assert take_wrap(["-N1", "--wrap", "echo hi"]) == (["-N1"], "echo hi")
    assert take_wrap(["--wrap=a b", "-n1"]) == (["-n1"], "a b")
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n")
    assert take_wrap([str(script), "--wrap=x"]) == ([str(script), "--wrap=x"], None)


def test_options_of_the_command_line_replace_the_scripts_and_what_sbatch_does_itself_is_not_noted(capsys, tmp_path):
    script = tmp_path / "run.sh"
    text = "#!/bin/bash\n#SBATCH -J inside -t 5\n"
    script.write_text(text)
    given = ["-J", "outside", "--parsable"]
    mapping, _ = script_mapping(text, str(script), ["7"], given, by_sbatch=True)
    assert mapping["name"] == "outside"
    assert f"{script} 7" in str(mapping["slurm"])
    assert capsys.readouterr().err == ""
    script_mapping(text, str(script), [], given)
    assert "--parsable is not honoured" in capsys.readouterr().err


def test_a_nested_sbatch_exports_the_variables_of_its_job_as_on_slurm():
    here = {"SLURM_NTASKS": "4", "PHALANX_RANK": "0", "PATH": "/bin"}
    assert exported_environment("ALL", here, nested=True) == {"SLURM_NTASKS": "4", "PATH": "/bin"}
    assert exported_environment("ALL", here) == {"PATH": "/bin"}


def test_errors_have_hints_in_the_words_of_the_command_line(capsys, monkeypatch):
    def refuse(_):
        raise NotFound("no job 9", hint=Hint(HintCode.LIST_JOBS))

    monkeypatch.setattr(views, "_view", lambda name: refuse)
    assert views.main(["squeue", "-j", "9"]) == 1
    assert "squeue: error: no job 9 (phalanx ps -a lists them)" in capsys.readouterr().err


# ---- the job of a view --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_element(monkeypatch, tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    order = {"batch": {"options": {"home": str(tmp_path)}, "job_number": "19", "array": array}}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(order))
    monkeypatch.setenv(BATCH_VARIABLE, str(path))
    return tmp_path


def test_the_number_of_an_element_is_its_id_and_the_arrays_means_all(in_element, monkeypatch):
    assert [job_id(number) for number in ("19", "17", "18")] == ["17_3", "17", "18"]
    monkeypatch.delenv(BATCH_VARIABLE)
    assert job_id("19") == "19"


def test_a_view_in_a_job_asks_the_head_of_the_job(in_element, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", "/other")
    use_head_of_job()
    assert os.environ["PHALANX_HOME"] == "/other"
    monkeypatch.delenv("PHALANX_HOME")
    monkeypatch.delenv("PHALANX_URL", raising=False)
    use_head_of_job()
    assert os.environ["PHALANX_HOME"] == str(in_element)


def test_each_view_says_once_that_it_is_one(in_element, capsys):
    for _ in range(2):
        assert views.main(["scontrol", "update", "x"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "view of Phalanx" in line] == [
        "scontrol: this is a view of Phalanx; its own command is `phalanx show JOB, phalanx nodes show NODE or phalanx update JOB`"
    ]
    assert sum("scontrol update x is not in this view" in line for line in said) == 2


def test_a_job_of_another_user_does_not_control_the_terminal(capsys):
    name = "\x1b]0;owned\x07a\nb"
    print_lines(render_letters(*parse_letters("%i %j", SQUEUE_TITLES), [squeue_row(job(name=name), 0.0)], None))
    print_lines(job_lines(job(name=name), 0.0))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert shown.splitlines()[0].startswith("17 ")
    assert shown.splitlines()[1].startswith("JobId=17")
