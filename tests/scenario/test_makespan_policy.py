"""The makespan policy: the end of all known work."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import DecisionKind, JobEntry
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.policies.device_prices import DevicePrices
from phalanx.core.scheduling.policies.makespan import ROUND_S, MakespanPolicy
from phalanx.core.scheduling.pool import DevicePool
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.report import build_report
from phalanx.simulator.run_times import RunTimeKnowledge
from phalanx.simulator.simulation import SimulationSettings, simulate_lifecycle
from phalanx.simulator.trace import Trace, TraceJob

HOUR_S = 3600.0
EITHER = (Need(nodes=1, devices=1, kinds=(0,)), Need(nodes=1, devices=1, kinds=(1,)))


def mixed_board(fast, slow):
    """Nodes of one device: kind 0 is fast, kind 1 slow."""
    pools = [DevicePool([1] * fast + [-1] * slow), DevicePool([-1] * fast + [1] * slow)]
    board = Board([1] * (fast + slow), pools=pools, pool_of_node=[0] * fast + [1] * slow)
    policy = MakespanPolicy()
    policy.attach(board)
    return board, policy


def submit(board, seq, size_s, *, slow=0.5, now_s=0.0):
    entry = JobEntry(
        seq=seq, job_class=board.job_class(EITHER, label=seq, speeds=(1.0, slow)), submit_s=now_s, size_s=size_s
    )
    board.add_waiting(entry)
    return entry


def test_the_longest_job_starts_first():
    board, policy = mixed_board(1, 0)
    short, long = submit(board, 0, HOUR_S), submit(board, 1, 5 * HOUR_S)
    policy.decide(0.0)
    assert long.places
    assert not short.places


def test_each_job_runs_where_it_has_the_comparative_advantage():
    """Equal jobs but for the slow device: one of them hardly loses there."""
    board, policy = mixed_board(1, 1)
    loses, hardly = submit(board, 0, 4 * HOUR_S, slow=0.2), submit(board, 1, 4 * HOUR_S, slow=0.9)
    policy.decide(0.0)
    assert (board.kind_of(loses), board.kind_of(hardly)) == (0, 1)


def test_a_critical_job_stops_one_that_can_wait():
    """Two devices, four hours of work each: the job of four hours must run all the time."""
    board, policy = mixed_board(2, 0)
    others = [submit(board, seq, 2 * HOUR_S) for seq in range(2)]
    policy.decide(0.0)
    board.take_decisions()
    critical = submit(board, 2, 4 * HOUR_S, now_s=ROUND_S + 1.0)
    policy.decide(ROUND_S + 1.0)
    assert critical.places
    assert [(one.kind, one.entry in others) for one in board.take_decisions()] == [
        (DecisionKind.STOP, True),
        (DecisionKind.START, False),
    ]


def test_a_job_that_can_wait_stops_none():
    board, policy = mixed_board(2, 0)
    for seq in range(4):
        submit(board, seq, 2 * HOUR_S)
    policy.decide(0.0)
    board.take_decisions()
    submit(board, 4, HOUR_S, now_s=ROUND_S + 1.0)
    policy.decide(ROUND_S + 1.0)
    assert not board.take_decisions()


def test_jobs_exchange_places_at_the_round_after_their_start():
    """The one that came first has the fast device, and could do without."""
    board, policy = mixed_board(1, 1)
    first = submit(board, 0, 120.0)
    policy.decide(0.0)
    needs_fast = submit(board, 1, 1800.0, slow=0.2, now_s=1.0)
    policy.decide(1.0)
    could_be_slow = submit(board, 2, 1200.0, now_s=2.0)
    board.finish(first, 120.0)
    policy.decide(120.0)
    policy.on_placed(could_be_slow, 121.0)
    assert (board.kind_of(could_be_slow), board.kind_of(needs_fast)) == (0, 1)
    board.take_decisions()
    policy.decide(120.0 + ROUND_S)
    assert (board.kind_of(could_be_slow), board.kind_of(needs_fast)) == (1, 0)
    assert [one.kind for one in board.take_decisions()] == [DecisionKind.MOVE] * 2


def test_a_job_of_unknown_run_time_counts_as_the_longest():
    board, policy = mixed_board(1, 0)
    submit(board, 0, HOUR_S)
    unknown = submit(board, 1, -1.0)
    submit(board, 2, HOUR_S / 2)
    policy.decide(0.0)
    board.finish(next(iter(board.running.values())), 60.0)
    policy.decide(60.0)
    assert unknown.places or not board.waiting.get(1)


def least_end_s(rest_s, gpus, capacity):
    """The least end on two kinds if no job is critical: the jobs by what they lose on the second, the first of them on the first kind."""
    order = np.argsort(rest_s[:, 0] / rest_s[:, 1])
    first, second = (rest_s[order] * gpus[order, None] / capacity).T
    ends = []
    for at in range(len(order)):
        done, rest = first[:at].sum(), second[at + 1 :].sum()
        share = np.clip((rest + second[at] - done) / (first[at] + second[at]), 0.0, 1.0)
        ends.append(max(done + share * first[at], rest + (1.0 - share) * second[at]))
    return min(ends)


@pytest.mark.parametrize("seed", range(20))
def test_prices_divide_the_work_almost_as_the_linear_program(seed):
    dice = np.random.default_rng(seed)
    jobs = 60
    best_s = dice.uniform(600.0, 6000.0, jobs)
    rest_s = np.stack([best_s, best_s / dice.uniform(0.1, 0.9, jobs)], axis=1)
    gpus = dice.choice([1.0, 2.0, 4.0], jobs)
    capacity = np.array([8.0, 24.0])
    prices = DevicePrices(2)
    both = np.stack([gpus, gpus], axis=1)
    balance = [prices.balance(list(range(jobs)), rest_s, both, capacity) for _ in range(3)][-1]
    least_s = max(least_end_s(rest_s, gpus, capacity), best_s.max())
    assert least_s * 0.999 <= balance.end_s <= least_s * 1.015


def test_the_price_of_a_critical_job_draws_it_to_the_fast_kind():
    """Ten short jobs that lose more on the slow kind, and one that takes all the time even on the fast one."""
    rest_s = np.array([[1000.0, 10_000.0]] * 10 + [[5000.0, 10_000.0]])
    prices = DevicePrices(2)
    balances = [prices.balance(list(range(11)), rest_s, np.ones((11, 2)), np.array([3.0, 3.0])) for _ in range(3)]
    balance = balances[-1]
    assert balance.advantage[10].argmax() == 0
    assert balance.end_s <= 5000.0 * 1.02


@pytest.mark.slow
def test_the_last_job_of_a_batch_ends_earlier_than_with_the_default_policy():
    dice = random.Random(3)
    jobs = []
    for number in range(60):
        run_s = dice.uniform(0.5, 4.0) * HOUR_S
        on_slow_s = run_s / dice.uniform(0.15, 0.8)
        jobs.append(
            TraceJob(
                id=f"j{number}",
                submit_s=0.0,
                duration_s=run_s,
                gpus=dice.choice((1, 1, 2, 4)),
                models=("fast", "slow"),
                run_time_by_model=(("slow", on_slow_s),),
                line=number + 2,
            )
        )
    nodes = [TraceNode(name=f"{model}{n}", gpus=1, model=model) for model in ("fast", "slow") for n in range(8)]
    ends = {}
    for name in ("makespan", "default"):
        parts = simulate_lifecycle(
            Trace(jobs=tuple(jobs)), nodes, SimulationSettings(policy=name, run_times=RunTimeKnowledge.EXACT)
        )
        ends[name] = build_report(parts, wall_s=0.0).makespan_s
    gpus = np.array([float(job.gpus) for job in jobs])
    rest_s = np.array([[job.duration_s, job.run_time_on("slow")] for job in jobs])
    least_s = least_end_s(rest_s, gpus, np.array([8.0, 8.0]))
    assert ends["makespan"] <= 1.03 * least_s, (ends, least_s)
    assert ends["makespan"] < 0.95 * ends["default"]
