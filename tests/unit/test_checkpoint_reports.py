"""A supervisor hears of a checkpoint: whatever a line says, it costs that line alone."""

# mypy: disable-error-code="arg-type"

import json

import pytest

from phalanx.node.logic.events import CheckpointReported
from phalanx.node.member.rank_reports import parse_report
from phalanx.node.transfer.checkpoint_report_handler import handle_checkpoint_report
from phalanx.wire import supervisor as wire
from tests.unit.test_unshared_folders import make_prepare, member

GOOD = {
    "k": "checkpoint",
    "rank": 0,
    "epoch": 3,
    "generation": 0,
    "step": 40,
    "path": "/mnt/mine/step-00000040",
    "digest": "d",
}


def heard(tmp_path, **changes):
    """What is published and what is said of a report with these changes."""
    published: list[CheckpointReported] = []
    said: list[str] = []
    report = parse_report(json.dumps(GOOD | changes).encode())
    assert report is not None
    present = member(make_prepare(), 0, tmp_path)
    handle_checkpoint_report(
        present, report, uploader=None, note=said.append, before_upload=lambda: None, publish=published.append
    )
    return published, said


def test_a_checkpoint_is_published_with_what_the_rank_said_of_it(tmp_path):
    (saved,), said = heard(tmp_path, bytes=7, stall_s=0.5, write_s=2)
    assert (saved.step, saved.path, saved.digest, saved.size_bytes) == (40, GOOD["path"], "d", 7)
    assert (saved.stall_s, saved.write_s, said) == (0.5, 2.0, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"step": float("inf")},
        {"step": float("nan")},
        {"step": 1e300},
        {"step": -1},
        {"step": "many"},
        {"step": None},
        {"bytes": float("-inf")},
        {"bytes": 1e30},
        {"path": "/x/\udc80"},
        {"path": "/x/\0"},
        {"path": ["x"]},
        {"path": None},
        {"digest": "\ud800"},
        {"digest": 7},
    ],
)
def test_a_line_that_is_no_checkpoint_is_passed_over_and_told(tmp_path, changes):
    """Found by reading: an infinite step ended the spool's thread, and half a surrogate pair the supervisor with every job on it."""
    published, said = heard(tmp_path, **changes)
    assert published == []
    assert len(said) == 1
    assert "is invalid and skipped" in said[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "long"])
def test_a_checkpoint_counts_also_where_its_times_are_no_numbers(tmp_path, value):
    (saved,), _ = heard(tmp_path, stall_s=value, write_s=value)
    assert (saved.stall_s, saved.write_s) == (0.0, 0.0)
    wire.encode(saved)
