"""When silence is a hang: learned from the gaps between step reports, on drawn histories. Times in seconds."""

import math

import pytest

from phalanx.node.logic.hang_detector import BUSY_LIMIT_S, GAPS_MIN, HangDetector


class Member:
    """Ranks of one node and the clock; the supervisor looks twice a second."""

    def __init__(self, *, timeout_s=20.0, restarts=0, ranks=1):
        self.pace = HangDetector(timeout_s, restarts=restarts)
        self.now_s = 100.0
        self.step = 0
        self.ranks = ranks
        self.found = []

    @property
    def ns(self):
        return round(self.now_s * 1e9)

    def passes(self, seconds):
        end_s = self.now_s + seconds
        while self.now_s + 0.5 <= end_s:
            self.now_s += 0.5
            if silence := self.pace.check(self.ns):
                self.found.append(silence)
        self.now_s = end_s
        return self

    def steps(self, count, every_s=1.0):
        for _ in range(count):
            self.passes(every_s)
            self.step += 1
            for rank in range(self.ranks):
                self.pace.record_step(rank, self.step, self.ns)
        return self


def test_silence_past_the_limit_is_told_once_with_the_last_step():
    member = Member().steps(30).passes(100.0)
    (silence,) = member.found
    assert (silence.step, silence.limit_s) == (30, pytest.approx(10.0))
    assert 10.0 < silence.silent_s <= 11.0


def test_next_step_ends_it_and_another_hang_is_told_again():
    assert len(Member().steps(30).passes(30.0).steps(1).passes(200.0).found) == 2


def test_first_steps_judge_nothing_however_long_they_compile():
    member = Member().passes(3600.0).steps(GAPS_MIN, every_s=1.0).passes(3600.0)
    assert (member.found, member.pace.limit_s) == ([], math.inf)


def test_script_that_reports_no_steps_never_hangs():
    assert Member().passes(86_400.0).found == []


def test_floor_is_half_the_collective_timeout():
    assert Member(timeout_s=600.0).steps(30).passes(299.0).found == []
    assert Member(timeout_s=600.0).steps(30).passes(302.0).found != []


def test_slow_steps_have_a_longer_limit():
    assert Member().steps(30, every_s=8.0).passes(75.0).found == []
    assert Member().steps(30, every_s=8.0).passes(85.0).found != []


def test_evaluation_that_was_seen_once_is_no_hang_later_though_it_is_rarer_than_one_step_in_a_hundred():
    """An evaluation of 9 s every 600 steps of 0.1 s: under the floor the first time; p99 knows nothing of it."""
    member = Member().steps(600, every_s=0.1).passes(9.0).steps(600, every_s=0.1).passes(25.0)
    assert member.found == []


def test_rank_that_says_it_is_busy_is_believed_for_an_hour():
    member = Member().steps(30)
    member.pace.mark_busy()
    assert member.passes(BUSY_LIMIT_S - 1.0).found == []
    assert member.passes(5.0).found != []


def test_step_ends_being_busy():
    member = Member().steps(30)
    member.pace.mark_busy()
    assert member.steps(1).passes(15.0).found != []


def test_frozen_ranks_are_silent_by_our_doing_and_the_freeze_is_no_gap_of_theirs():
    member = Member().steps(30)
    member.pace.pause()
    member.passes(500.0)
    member.pace.resume(member.ns)
    member.steps(5)
    assert (member.found, member.pace.limit_s) == ([], pytest.approx(10.0))
    assert member.passes(12.0).found != []


def test_host_that_stood_still_itself_finds_no_hang_on_waking():
    member = Member().steps(30)
    member.now_s += 3600.0  # nobody looked
    assert member.passes(9.0).found == []
    assert member.passes(3.0).found != []


def test_each_restart_after_a_hang_doubles_the_limit():
    assert Member(restarts=1).steps(30).passes(19.0).found == []
    assert Member(restarts=1).steps(30).passes(22.0).found != []


def test_one_rank_that_still_steps_keeps_its_node_alive():
    member = Member(ranks=2).steps(30)
    for step in range(31, 90):
        member.passes(1.0)
        member.pace.record_step(0, step, member.ns)
    assert member.found == []
    assert member.pace.steps == {0: 89, 1: 30}


def test_bursts_of_reports_do_not_make_the_limit_nothing():
    """Reports that waited in the pipe come at once: gaps of zero; the floor stays."""
    member = Member()
    for step in range(1, 50):
        member.pace.record_step(0, step, member.ns)
    assert member.pace.limit_s == pytest.approx(10.0)
