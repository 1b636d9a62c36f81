"""Arrays, dependencies and later begins against a real head with virtual nodes, as a user types them."""

import sys

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PYTHON = sys.executable
SAYS = """
import os, sys
place = {name: os.environ[f"PHALANX_ARRAY_{name}"] for name in ("JOB_ID", "TASK_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX")}
print(os.environ["PHALANX_JOB_ID"], *place.values(), flush=True)
open(os.path.join(os.environ["PHALANX_OUTPUT_DIR"], "id.txt"), "w").write(place["TASK_ID"])
sys.exit(3 if place["TASK_ID"] in sys.argv[1:] else 0)
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("arrays"))
    (shell.work / "says.py").write_text(SAYS)
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def submitted(phalanx, *words):
    return phalanx("submit", "--quiet", *words).stdout.strip()


def test_array_runs_every_element_with_its_own_variables_and_outputs(phalanx):
    array = submitted(phalanx, "--array", "3,5-7:2%2", "--gpus", "1", "--", PYTHON, "says.py")
    assert phalanx.until(array, "succeeded")["states"] == {"succeeded": 3}
    for index in (3, 5, 7):
        assert phalanx("logs", f"{array}_{index}").stdout == f"{array}_{index} {array} {index} 3 3 7\n"
    phalanx("get", f"{array}_5", "got")
    assert (phalanx.work / "got" / "id.txt").read_text() == "5"
    page = phalanx("show", array).stdout
    assert f"array {array} says.py: 3 elements, {array}_[3-7:2], at most 2 at once" in page
    lines = [f"[{array}_{index}] {array}_{index} {array} {index} 3 3 7\n" for index in (3, 5, 7)]
    assert phalanx("logs", array).stdout == "".join(lines)
    phalanx("get", array, "all")
    assert [(phalanx.work / "all" / f"{array}_{index}" / "id.txt").read_text() for index in (3, 5, 7)] == [
        "3",
        "5",
        "7",
    ]


def test_get_of_an_array_brings_what_there_is_though_an_element_never_started(phalanx):
    array = submitted(phalanx, "--array", "0-1", "--hold", "--", PYTHON, "says.py", "9")
    phalanx("cancel", f"{array}_0")
    phalanx("release", f"{array}_1")
    phalanx.until(f"{array}_1", "succeeded")
    phalanx("get", array, "some")
    assert [path.name for path in (phalanx.work / "some").iterdir()] == [f"{array}_1"]


def test_wait_for_an_array_ends_with_a_failure_of_any_element(phalanx):
    done = phalanx("submit", "--wait", "--array", "0-3", "--", PYTHON, "says.py", "2", code=1)
    assert "failed: 3 succeeded, 1 failed; unsuccessful: 2" in done.stderr


def test_chain_waits_and_a_failed_parent_cancels_it(phalanx):
    parent = submitted(phalanx, "--hold", "--array", "0-1", "--", PYTHON, "says.py", "1")
    child = submitted(phalanx, "--depends-on", parent, "--", "true")
    sweeper = submitted(phalanx, "--dependency", f"afternotok:{parent}", "--", "true")
    waits = next(line for line in phalanx("ps").stdout.splitlines() if line.split()[:1] == [child])
    assert "waits for" in waits
    assert phalanx.json("show", child)["job"]["unmet"] == [f"afterok:{parent}"]
    phalanx("release", parent)
    assert phalanx.until(child, "cancelled")["detail"] == f"job {parent}_1 failed, so afterok:{parent} can never be met"
    phalanx.until(sweeper, "succeeded")
    late = phalanx("submit", "--wait", "--depends-on", f"afterok:{parent}", "--", "true", code=143).stderr
    assert "can never be met" in late


def test_list_folds_what_waits(phalanx):
    array = submitted(phalanx, "--hold", "--array", "0-99%8", "--", "true")
    lines = [line for line in phalanx("ps").stdout.splitlines() if f"{array}_" in line]
    assert len(lines) == 1
    assert lines[0].split()[0] == f"{array}_[0-99]%8"
    assert (
        len([line for line in phalanx("ps", "-1").stdout.splitlines() if line.strip().startswith(f"{array}_")]) == 100
    )
    assert len([job for job in phalanx.json("ps", "-n", "500") if job["array_id"] == array]) == 100
    assert "are cancelled" in phalanx("cancel", array).stdout
    assert phalanx.until(array, "cancelled")["states"] == {"cancelled": 100}


def test_begin_is_told_by_the_clock_on_the_wall_and_can_be_brought_forward(phalanx):
    job = submitted(phalanx, "--begin", "2030-01-01T08:00", "--", "true")
    assert "not before 2030-01-01 08:00" in phalanx("ps").stdout
    phalanx("update", job, "--begin", "now")
    phalanx.until(job, "succeeded")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--array", "9-3"], "--array: 9-3 ends before it begins (write 3-9)"),
        (["--depends-on", "afterokay:1"], "did you mean afterok?"),
        (["--depends-on", "99999"], "job 99999 does not exist"),
        (["--begin", "25:00"], "--begin: '25:00' is not a valid day or time"),
    ],
)
def test_wrong_words_are_told_in_a_line(phalanx, words, told):
    refused = phalanx("submit", *words, "--", "true", code=64).stderr
    assert told in refused
    assert refused.count("\n") == 1


def test_run_does_not_stay_with_an_array(phalanx):
    assert "run cannot follow the output of an array" in phalanx("run", "--array", "0-3", "--", "true", code=64).stderr
