"""Instances created under faults while the head is killed: none is left over, none is doubled, and the ledger is the bill."""

import shutil

import pytest

from benchmarks.clouds.__main__ import run
from benchmarks.clouds.campaign_clouds import MAKERS, MOTO
from benchmarks.clouds.judge import judge

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not MOTO.exists(), reason="moto is not installed: make s3-tools"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here: make compiler-tools"),
]


def test_creates_under_faults_leave_nothing_and_double_nothing():
    found = run(creates=300, kills=12, jumps=12, seed=7, faults=1.0, pool_nodes=15, shares=dict.fromkeys(MAKERS, 1.0))
    assert {name: one["machines"] >= 60 for name, one in found["clouds"].items()} == {
        "aws": True,
        "google": True,
        "azure": True,
    }
    assert (found["leaked"], found["doubled"], found["without_a_ledger_line"]) == (0, 0, 0), found
    assert abs(found["billed_minus_ledger_s"]) <= 1.0, found
    assert sum(found["head_kills"].values()) >= 12, found
    assert found["clock_jumps"] >= 12, found


def test_the_judge_sees_what_is_left_over_doubled_or_not_written():
    machines = [
        {"machine": "i-1", "token": "a", "since_s": 1.0, "until_s": 9.0},
        {"machine": "i-2", "token": "a", "since_s": 1.0, "until_s": None},
        {"machine": "i-3", "token": "b", "since_s": 1.0, "until_s": 4.0},
    ]
    lines = [
        {"kind": "machine_ended", "facts": {"machine": "i-1", "since_s": 1.0, "until_s": 8.5}},
        {"kind": "other", "facts": {}},
    ]
    assert judge(machines, lines, ["disk-1"]) == {
        "machines": 3,
        "leaked": 2,
        "doubled": 1,
        "billed_minus_ledger_s": 3.0,
        "apart_by_more_than_1_s": ["i-3"],
        "without_a_ledger_line": 2,
        "strays_stopped": 0,
    }
