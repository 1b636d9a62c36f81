"""Lines of waiting jobs: the order in which a pass goes through them."""

from __future__ import annotations

import pytest

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.estimates.hazard_table import SimilarJobs
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.policies.waiting_lines import ClassOrder, OrderedLines, WaitingLines, ordered

BOARD = Board([8])
CLASSES = [BOARD.job_class((Need(nodes=1, devices=gpus),)) for gpus in (1, 2, 4)]


def head(number, seq, value):
    """The head of a line of this class, whose index gives it this value per GPU."""
    klass = CLASSES[number]
    return (-value * klass.gpus, 0.0, seq, JobEntry(seq=seq, job_class=klass, submit_s=0.0))


def order_of(*values):
    """Lines of each class by value; a job's seq is ten times its value."""
    return ordered(
        ClassOrder(CLASSES[number], (), [head(number, round(10 * value), value) for value in own], 1.0)
        for number, own in enumerate(values)
    )


def test_the_best_line_of_all_classes_comes_first():
    assert [line[-1].seq for line in OrderedLines(order_of([0.6, 0.1], [0.9, 0.5, 0.2], [0.7]))] == [9, 7, 6, 5, 2, 1]


def test_the_rest_of_a_skipped_class_is_not_yielded():
    lines, seen = OrderedLines(order_of([0.6, 0.1], [0.9, 0.5, 0.2], [0.7])), []
    for line in lines:
        seen.append(line[-1].seq)
        if line[-1].job_class is CLASSES[1]:
            lines.skip_class()
    assert seen == [9, 7, 6, 1]


def test_a_resumed_class_goes_on_after_the_current_line():
    lines, seen = OrderedLines(order_of([0.6, 0.1], [0.9, 0.8, 0.5, 0.2], [0.7])), []
    for line in lines:
        seen.append(line[-1].seq)
        if line[-1].seq == 9:
            lines.skip_class()
        if line[-1].seq == 6:
            lines.resume_skipped(line)
    assert seen == [9, 7, 6, 5, 2, 1]


def test_lines_that_are_valued_already_are_merged_with_the_others():
    entry = JobEntry(seq=7, job_class=CLASSES[0], submit_s=0.0)
    order = ClassOrder(CLASSES[0], [(0, -0.5, 0.0, 7, entry)], [head(0, 6, 0.6), head(0, 3, 0.3)], 1.0)
    assert [line[-1].seq for line in order.lines()] == [6, 7, 3]


def test_a_class_is_sorted_again_only_after_a_change():
    lines, groups = WaitingLines(), [SimilarJobs(1), SimilarJobs(1)]
    for seq, group in enumerate(groups):
        lines.join(JobEntry(seq=seq, job_class=CLASSES[0], submit_s=float(seq)), group)
    own = lines.by_class[CLASSES[0]]
    own.sort(lambda group: float(groups.index(group)))
    assert [one[2] for one in own.heads] == [1, 0]
    own.sort(lambda group: pytest.fail(f"{group} is valued again"))
    lines.invalidate_group(groups[0])
    own.sort(lambda group: 1.0 - groups.index(group))
    assert [one[2] for one in own.heads] == [0, 1]


def test_an_empty_line_is_dropped_with_its_class():
    lines, group = WaitingLines(), SimilarJobs(1)
    lines.join(JobEntry(seq=3, job_class=CLASSES[0], submit_s=5.0), group)
    assert [entry.seq for entry in lines.heads_before(6.0)] == [3]
    assert list(lines.heads_before(5.0)) == []
    lines.pop(CLASSES[0], group)
    assert lines.head(CLASSES[0], group) is None
    assert not lines.by_class
