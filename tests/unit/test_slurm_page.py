"""The page on Slurm compatibility says what the code does."""

import csv
from dataclasses import replace

import pytest

from phalanx.core.work.sbatch_scripts.sbatch import parse_script_options
from tests.slurm_compat import cases
from tests.slurm_compat.cluster import Outcome
from tests.slurm_compat.compare import compare
from tests.slurm_compat.differences import ALLOWED, Kind, allowed
from tests.slurm_compat.page import PAGE, page


def test_the_page_is_what_the_tables_of_the_code_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.slurm_compat.page writes it"


def test_every_script_of_the_comparison_can_be_read_and_has_a_public_source():
    with (cases.FOLDER / "sources.tsv").open(encoding="utf-8") as file:
        sources = {row["draw"].zfill(2) for row in csv.DictReader(file, delimiter="\t")}
    assert {script.name[:2] for script in cases.SCRIPTS} == sources
    assert len(sources) == 60
    for script in cases.SCRIPTS:
        parse_script_options(script.read_text(encoding="utf-8"))


def test_a_variable_may_differ_only_in_the_way_that_its_reason_covers():
    assert allowed("SLURM_TASK_PID", "7", "8")
    assert not allowed("SLURM_TASK_PID", "7", None)
    assert allowed("SLURM_MEM_PER_CPU", "10240", None)
    assert not allowed("SLURM_MEM_PER_CPU", "4096", None)
    assert not allowed("SLURM_NTASKS", "2", "4")
    assert {one.kind for one in ALLOWED} == set(Kind)
    assert all(one.reason for one in ALLOWED)


def call(step, word):
    return {"program": "python", "argv": [word], "cwd": "/", "env": {"SLURM_STEP_ID": step, "SLURM_PROCID": "0"}}


def outcome(*calls):
    return Outcome(submitted=True, exit_code=0, said="", job="870001", calls=calls)


@pytest.mark.parametrize("text", ["srun a &\nsrun b\nwait\n", "srun a && srun b\nsrun c 2>&1 # a & b\n"])
def test_numbers_of_steps_in_the_background_are_in_no_order_and_those_of_others_are(text):
    slurm, ours = outcome(call("0", "a"), call("1", "b")), outcome(call("1", "a"), call("0", "b"))
    assert bool(compare(slurm, ours, text)) == ("wait" not in text)
    assert compare(slurm, outcome(call("0", "a"), call("0", "b")), text), "one step is not two"


def test_a_time_that_the_shell_measured_may_differ_and_the_line_may_not_be_absent():
    slurm, ours = (replace(outcome(), files={"err": f"real\t0m0.01{digit}s\n"}) for digit in "35")
    assert compare(slurm, ours, "") == []
    assert compare(slurm, replace(outcome(), files={"err": ""}), "")
