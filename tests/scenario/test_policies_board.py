"""Policies on small fleets drawn in a line: who starts, who waits, who is moved or stopped, and for whom."""

from __future__ import annotations

import pytest

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import DecisionKind, JobEntry
from phalanx.core.scheduling.estimates.hazard_table import HazardTable
from phalanx.core.scheduling.policies import POLICIES, PolicyParameters, policy_named
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.policies.reserved_share import ReservedShare, unserved_s
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.report import build_report
from phalanx.simulator.trace import TraceJob


def board_of(sizes, policy="default"):
    board = Board(sizes)
    deciding = policy_named(policy)()
    deciding.attach(board)
    BOARDS.append(board)
    return board, deciding


BOARDS: list[Board] = []


def entry(seq, gpus, submit_s=0.0, size_s=100.0):
    """A job for the board made last."""
    klass = BOARDS[-1].job_class((BOARDS[-1].need_of(gpus),))
    return JobEntry(seq=seq, job_class=klass, submit_s=submit_s, size_s=size_s)


def run_on(board, one, places, since_s=0.0):
    """The job already runs there."""
    board.add_waiting(one)
    board._listener.on_withdrawn((one,))
    board.start(one, one.job_class.needs[0], places, since_s)
    if one.similar_jobs is not None:
        one.similar_jobs.add_running(one.seq, one)
    board.take_decisions()
    return one


def verbs(board):
    return [(decision.kind, decision.entry.seq, decision.places) for decision in board.take_decisions()]


def job(number, gpus, submit_s, duration_s, label=""):
    return TraceJob(id=f"j{number}", submit_s=submit_s, duration_s=duration_s, gpus=gpus, virtual_cluster=label)


def test_best_fit_leaves_the_whole_node_whole():
    board, policy = board_of([8, 8])
    run_on(board, entry(0, 6), ((1, 6),))
    board.add_waiting(entry(1, 2))
    policy.decide(0.0)
    assert verbs(board) == [(DecisionKind.START, 1, ((1, 2),))]


def test_a_large_gang_takes_whole_nodes_and_the_rest_on_one_more():
    board, policy = board_of([8, 8, 8])
    run_on(board, entry(0, 4), ((2, 4),))
    board.add_waiting(entry(1, 20))
    policy.decide(0.0)
    assert verbs(board) == [(DecisionKind.START, 1, ((0, 8), (1, 8), (2, 4)))]


def test_fifo_lets_nobody_overtake_and_skip_does():
    for name, started in (("fifo", []), ("skip", [2])):
        board, policy = board_of([8], name)
        first = entry(0, 6)
        board.add_waiting(first)
        policy.decide(0.0)
        board.take_decisions()
        board.add_waiting(entry(1, 8, 1.0))
        board.add_waiting(entry(2, 2, 2.0))
        policy.decide(2.0)
        assert [seq for _, seq, _ in verbs(board)] == started


def test_backfill_starts_what_ends_before_the_reservation_only():
    board, policy = board_of([8], "backfill")
    board.add_waiting(entry(0, 6, 0.0, 100.0))
    policy.decide(0.0)
    board.take_decisions()
    board.add_waiting(entry(1, 8, 1.0, 50.0))
    board.add_waiting(entry(2, 2, 2.0, 500.0))
    board.add_waiting(entry(3, 2, 3.0, 60.0))
    policy.decide(3.0)
    assert [seq for _, seq, _ in verbs(board)] == [3]


def test_small_jobs_move_into_holes_so_that_a_gang_gets_its_node():
    # n0: 7 of 8 held by one job, n1: 1 held. Eight are free, on no node: the single one moves beside the seven.
    board, policy = board_of([8, 8])
    run_on(board, entry(0, 7), ((0, 7),))
    run_on(board, entry(1, 1), ((1, 1),))
    board.add_waiting(entry(2, 8, 600.0))
    policy.decide(600.0)
    assert verbs(board) == [(DecisionKind.MOVE, 1, ((0, 1),)), (DecisionKind.START, 2, ((1, 8),))]


@pytest.mark.parametrize(("stops", "moves", "moved"), [(0, 63, 1), (30, 34, 0), (0, 64, 0)])
def test_a_job_that_was_stopped_and_moved_as_often_as_allowed_stays(stops, moves, moved):
    """The larger job goes instead."""
    board, policy = board_of([8, 8])
    often = entry(1, 1)
    often.stops, often.moves = stops, moves
    run_on(board, entry(0, 7), ((0, 7),))
    run_on(board, often, ((1, 1),))
    board.take_decisions()
    board.add_waiting(entry(2, 8, 3000.0))
    policy.decide(3000.0)
    assert [seq for kind, seq, _ in verbs(board) if kind is DecisionKind.MOVE] == [moved]


def test_scattered_devices_are_not_taken_for_a_gang_that_needs_one_node():
    # Four nodes with 2 free each: 8 free in total. The cheapest set on ONE node goes, and nothing elsewhere.
    board, policy = board_of([8, 8, 8, 8])
    for node in range(4):
        run_on(board, entry(node, 6), ((node, 6),))
    board.add_waiting(entry(9, 8, 900_000.0))
    policy.decide(900_000.0)
    decisions = verbs(board)
    assert [verb for verb, _, _ in decisions] == [DecisionKind.STOP, DecisionKind.START]
    assert decisions[1][2] == ((decisions[0][1], 8),)


def test_nobody_is_stopped_within_the_guaranteed_run():
    board, policy = board_of([8])
    run_on(board, entry(0, 8), ((0, 8),), since_s=0.0)
    board.running[0].protected_until_s = 900.0
    board.add_waiting(entry(1, 1, 600.0))
    policy.decide(600.0)
    assert verbs(board) == []


def test_an_inadmissible_class_blocks_nobody():
    board, policy = board_of([8, 8])
    run_on(board, entry(0, 8), ((0, 8),))
    board.running[0].protected_until_s = 1e9
    board.add_waiting(entry(1, 16, 1.0))
    board.add_waiting(entry(2, 4, 2.0))
    policy.decide(2.0)
    assert [seq for _, seq, _ in verbs(board)] == [2]


def test_a_node_that_left_gets_nothing_until_it_is_back():
    board, policy = board_of([8])
    board.remove_node(0)
    board.add_waiting(entry(0, 1))
    policy.decide(0.0)
    assert verbs(board) == []
    board.restore_node(0)
    policy.decide(60.0)
    assert [seq for _, seq, _ in verbs(board)] == [0]


@pytest.mark.slow
def test_endless_small_jobs_do_not_starve_a_long_large_one():
    # One node, single-GPU jobs for ever at 94 % load, and one gang of 8 for a day. At most 8 GPUs of small work and the gang itself wait,
    # hence the limit stretches to 1 + 3 x 2 times; what a stop costs comes on top.
    jobs = [job(n, 1, n * 80.0, 600.0) for n in range(4000)]
    jobs.append(job("big", 8, 1000.0, 86_400.0))
    jobs.sort(key=lambda one: one.submit_s)
    knobs = PolicyParameters(overdue_s=10_000.0, overdue_service_factor=0.0)
    done = replay_board(jobs, equal_nodes(1, 8), lambda: DefaultPolicy(knobs))
    big = next(outcome for outcome in done.jobs if outcome.job.id == "jbig")
    assert big.wait_s <= 7 * 10_000.0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_finishes_every_job_and_loses_no_device(name):
    jobs = [
        job(n, (1, 2, 4, 8, 12, 1, 3)[n % 7], (n * 37) % 5000, 50.0 + (n * 7919) % 4000, label=f"q{n % 3}")
        for n in range(400)
    ]
    jobs.sort(key=lambda one: one.submit_s)
    done = replay_board(jobs, equal_nodes(3, 8), policy_named(name))
    figures = build_report([done], wall_s=0.0)
    assert figures.jobs == 400
    assert all(outcome.wait_s > -1e-6 for outcome in done.jobs)
    again = replay_board(jobs, equal_nodes(3, 8), policy_named(name))
    assert [outcome.end_s for outcome in again.jobs] == [outcome.end_s for outcome in done.jobs]


@pytest.mark.slow
def test_endless_small_jobs_past_capacity_do_not_starve_a_gang():
    """The limit of a job must not grow with those who come after it: at 150 % load they are ever more."""
    small = [job(number, 1, 50.0 * number, 600.0) for number in range(4000)]  # 12 GPUs' worth on 8
    gang = job(9999, 8, 25.0, 600.0)
    knobs = PolicyParameters(overdue_s=7200.0, overdue_service_factor=0.0)
    replayed = replay_board(
        sorted([*small, gang], key=lambda one: one.submit_s),
        equal_nodes(1, 8),
        lambda: DefaultPolicy(knobs),
    )
    waited = next(one for one in replayed.jobs if one.job is gang)
    ahead = 1  # the one small job that was submitted before it had started: nobody who came before it waits
    assert waited.first_start_s - 25.0 <= 7200.0 * (1 + ahead / 8) + knobs.run_min_s + 600.0 + knobs.round_s


def test_limit_counts_waits_restarts_and_lost_work_of_the_whole_life():
    """A job that started at once and is stopped again and again starves as one that never started."""
    board = Board([8], restart_cost_s=60.0)
    need = board.need_of(8)
    entry = JobEntry(seq=1, job_class=board.job_class((need,)), submit_s=0.0)
    board.add_waiting(entry)
    for start_s in (0.0, 1000.0, 2000.0):
        board.start(entry, need, ((0, 8),), start_s)
        board.stop(entry, start_s + 700.0)
    assert unserved_s(entry, 3000.0) == 3000.0 - 3 * (700.0 - 60.0)
    share = ReservedShare(board, HazardTable(), PolicyParameters(overdue_s=1500.0, overdue_service_factor=0.0))
    assert share.promote([entry], 3000.0 + 419.0) == []
    assert share.promote([entry], 3000.0 + 421.0) == [entry]


def test_a_gang_that_is_stopped_for_ever_younger_ones_is_overdue_at_its_limit():
    """The audit's case: it starts at once, and each later gang is worth more. Without a limit it waits until no other comes."""
    young = [job(f"y{number}", 8, 2400.0 * (1 + number), 1900.0, label="young") for number in range(150)]
    old = job("old", 8, 0.0, 40_000.0, label="old")

    def wait_s(limit_s: float) -> float:
        knobs = PolicyParameters(overdue_s=limit_s, overdue_service_factor=0.0, hysteresis=1.0)
        first = replay_board([old, *young], equal_nodes(1, 8), lambda: DefaultPolicy(knobs)).jobs[0]
        assert first.first_start_s == 0.0
        assert first.preemptions > 2
        return first.wait_s

    assert wait_s(20_000.0) < 20_000.0 + 1900.0 + 1800.0 + 60.0
    assert wait_s(float("inf")) > 2 * 20_000.0
