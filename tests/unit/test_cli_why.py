"""`why`, dry runs and `whatif` as people read them."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import json

import pytest

from phalanx.cli.jobs.dry_run import dry_run_page
from phalanx.cli.jobs.why import format_time_range, why_page
from phalanx.cli.root import main
from phalanx.cli.terminal import Terminal
from phalanx.core.work.states import JobState
from phalanx.wire.why import (
    BlockerView,
    DryRunReply,
    RunTimeView,
    StartView,
    SuggestedChangeView,
    WhyReply,
)

WIDE = Terminal(width=120, height=40, interactive=False, colour=False, blocks=True)
NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("early_s", "late_s", "words"),
    [
        (0.0, 0.0, "now"),
        (0.0, None, "at an unknown time"),
        (None, None, "at an unknown time"),
        (7200.0, None, "not before 2h00m from now; latest time unknown"),
        (0.0, 3000.0, "within 50 min "),
        (1200.0, 11_000.0, "in 20 min to 3h00m "),
        (600.0, 610.0, "in 10 min "),
        (50.0, 80.0, "in a minute ("),
        (2e9, 2e9, "in 23148d03h (2087-"),
    ],
)
def test_range_is_told_no_finer_than_it_is_known(early_s, late_s, words):
    start = StartView(
        earliest_s=None if early_s is None else NOW + early_s, latest_s=None if late_s is None else NOW + late_s
    )
    assert format_time_range(start, NOW).startswith(words)


def test_page_of_a_running_job_has_its_speeds():
    found = WhyReply(
        job_id="7",
        state=JobState.RUNNING,
        now_s=NOW,
        headline="has run for 5s on n2",
        speeds=["fastest on h100", "2.1x slower on a100 (observed, 3 runs)"],
    )
    assert why_page(found, WIDE) == [
        "job 7 has run for 5s on n2",
        "  fastest on h100, 2.1x slower on a100 (observed, 3 runs)",
    ]


def test_page_has_reason_range_who_and_commands():
    found = WhyReply(
        job_id="17",
        state=JobState.PENDING,
        now_s=NOW,
        headline="waits (resources): needs 1 x 4 GPUs",
        reason="resources",
        blockers=[
            BlockerView(
                id="9", user="bob", name="big", state=JobState.RUNNING, gpus=4, end=StartView(latest_s=NOW + 600.0)
            )
        ],
        blockers_more=3,
        start=StartView(unknown="nobody knows how long job 9 runs"),
        changes=[
            SuggestedChangeView(
                kind="shape", text="2 x 2 GPUs instead of 1 x 4", command="phalanx submit --gpus 2x2 ..."
            ),
            SuggestedChangeView(
                kind="undrain", text="node n1 takes work again", command="phalanx nodes undrain n1", operator=True
            ),
        ],
    )
    assert why_page(found, WIDE) == [
        "job 17 waits (resources): needs 1 x 4 GPUs",
        "  expected to start at an unknown time: nobody knows how long job 9 runs",
        "",
        "blocked by",
        "  JOB  USER  NAME  STATE    GPUS  SINCE  EXPECTED TO END",
        "  9    bob   big   running     4         within 10 min",
        "  and 3 more",
        "",
        "to start sooner",
        "  2 x 2 GPUs instead of 1 x 4",
        "      phalanx submit --gpus 2x2 ...",
        "  node n1 takes work again (needs an operator)",
        "      phalanx nodes undrain n1",
    ]


def test_dry_run_tells_hours_and_from_what_they_are_known():
    run = RunTimeView(low_s=600.0, high_s=7200.0, ends=12, likes="of ada called train")
    found = DryRunReply(
        now_s=NOW,
        starts=True,
        gpus=4,
        nodes=["n0"],
        start=StartView(earliest_s=NOW, latest_s=NOW),
        run=run,
        gpu_hours_low=0.666,
        gpu_hours_high=8.0,
        notes=["1 node x 4 = 4 GPUs"],
    )
    assert dry_run_page(found, "train", WIDE)[2:] == [
        "  would start now on n0",
        "  runs 10m00s to 2h00m, 0.67 to 8 GPU-hours, estimated from 12 finished jobs of ada called train",
    ]


# ---- whatif -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    rows = ["job_id,submit_s,duration_s,num_gpus,gpu_type,vc", *(f"j{at},{at},100,8,,red" for at in range(4))]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")

    def run(*words, fleet=("--nodes", "1", "--gpus-per-node", "8")):
        code = main(["whatif", "--trace", "t.csv", *fleet, *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


def figures(typed, *words):
    code, out, err = typed(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    return found["now"], found["then"]


def test_twice_the_fleet_halves_the_time_and_keeps_the_hours_used(typed):
    now, then = figures(typed, "--add", "1x8", "--price", "2")
    assert (now["gpus"], then["gpus"]) == (8, 16)
    assert (now["makespan_s"], then["makespan_s"]) == (
        400.0,
        201.0,
    )  # the first two side by side, then the others a second later
    assert (now["max_wait_s"], then["max_wait_s"]) == (297.0, 98.0)
    assert round(now["gpu_hours_used"], 6) == round(then["gpu_hours_used"], 6) == round(4 * 8 * 100 / 3600, 6)
    assert (now["cost_per_day"], then["cost_per_day"]) == (384.0, 768.0)
    assert round(now["cost"], 6) == round(2 * 8 * 400 / 3600, 6)


def test_no_price_no_cost(typed):
    now, then = figures(typed, "--add", "1x8")
    assert (now["cost"], then["cost_per_day"]) == (None, None)
    assert "cost" not in typed("--add", "1x8")[1].replace("what it costs", "")


def test_queue_with_a_quota_takes_back_what_was_lent(typed):
    with open("t.csv", "a", encoding="utf-8") as file:
        file.write("b,5,100,8,,blue\n")
    now, then = figures(typed, "--quota", "blue=8")
    assert (now["preemptions"], then["preemptions"]) == (0, 1)


def test_another_policy_stands_beside_the_default_one(typed):
    now, then = figures(typed, "--policy", "fifo")
    assert (now["policy"], then["policy"]) == ("default", "fifo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no change given"),
        (("--add", "8"), "needs a number of nodes and of GPUs per node"),
        (("--remove", "n9"), "no node 'n9'"),
        (("--remove", "n0"), "--remove removes every node"),
        (("--quota", "red"), "is not a quota"),
        (("--add", "1x8", "--price", "h200=cheap"), "'cheap' is not a price"),
        (("--add", "1x8", "--price", "h200=3"), "no price for GPUs without a model"),
        (("--since", "1h"), "no jobs given"),
        (("--policy", "best"), "unknown policy 'best'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_replayed(typed, words, message):
    code, out, err = typed(*words)
    assert (code, out) == (64, "")
    assert message in err


def test_a_page_in_colour_has_its_styles_and_nothing_of_a_program():
    found = WhyReply(job_id="7", state=JobState.FAILED, now_s=NOW, headline="failed: \x1b[2J")
    screen = Terminal(width=80, height=24, interactive=True, colour=True, blocks=True)
    assert why_page(found, screen) == ["\x1b[1mjob 7\x1b[0m failed: \ufffd[2J"]
