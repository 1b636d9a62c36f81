"""The default policy looks only at the classes that changed and skips closed ones; it must decide like one that looks at every waiting job's line.

The same random history goes to two boards. One has the policy; the other has `EveryLine`, which values and visits all lines in each sweep,
and whose index of fragmentation reads every node before each placement.
"""

from __future__ import annotations

import random

import pytest

from phalanx.core.resources import Resources
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import DecisionKind, JobEntry
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.policies.default import DefaultPolicy
from phalanx.core.scheduling.policies.parameters import PolicyParameters
from phalanx.core.scheduling.policies.waiting_lines import ClassOrder, ordered
from phalanx.core.scheduling.quota import FairShareTree
from tests.builders import queue

NODES, DEVICES, QUEUES, STEPS = 12, 4, 4, 60
PARAMETERS = PolicyParameters(run_min_s=60.0, hysteresis=0.5, overdue_s=1500.0, overdue_service_factor=1.0)


class EveryLine(DefaultPolicy):
    """The order with each line as a class of its own: no line is skipped, and nothing is kept from the pass before."""

    def _order(self, now_s):
        lines = [
            self._line_of(line[0][2], now_s) for own in self.lines.by_class.values() for line in own.by_group.values()
        ]
        lines += [self._line(entry, now_s) for entry in self.again.values()]
        return ordered(ClassOrder(line[-1].job_class, [line]) for line in lines)

    def _line_of(self, entry, now_s):
        rank, value, *rest = self._line(entry, now_s)
        if not (entry.overdue or entry.lost_nodes):  # it never ran, whatever it lost in a crash
            index = self.table.index_of(self.values.group(entry), now_s)[0]
            value = -(self.values.weight(entry.job_class) * index / (entry.job_class.gpus or 1))
        return (rank, value, *rest)

    def _remaining_order(self, before, now_s):
        lines, seen = [], set()
        for one in before:
            line, entry = one.first, one.first[-1]
            if entry.started_s >= 0.0:
                entry = self.lines.head(entry.job_class, self.values.group(entry))
            if entry is None or entry.seq in seen:
                continue
            seen.add(entry.seq)
            lines.append(line if entry is line[-1] and not entry.overdue else self._line(entry, now_s))
        lines += [self._line(entry, now_s) for seq, entry in self.again.items() if seq not in seen]
        return ordered(ClassOrder(line[-1].job_class, [line]) for line in lines)


class ReadsEveryNode(Board):
    """Reads every node, not only candidates that changed, before a placement by fragmentation."""

    def _find_by_fragmentation(self, index, need, excluded):
        self._rescored = 0
        for node in range(NODES):
            index.set_node(node, 0, 0, self.pools[0].rooms_on(node))
        return super()._find_by_fragmentation(index, need, excluded)


class World:
    """A board with its policy, and what it decided."""

    def __init__(self, board, policy, needs):
        self.board, self.policy, self.needs = board, policy, needs
        self.entries, self.decided = {}, []
        policy.attach(board)

    def submit(self, seq, now_s, need, rank, number, user):
        klass = self.board.job_class(
            (self.needs[need],), label=user, rank=rank, queue=self.board.quotas.job_node(f"q{number}"), user=f"u{user}"
        )
        self.entries[seq] = JobEntry(seq=seq, job_class=klass, submit_s=now_s)
        self.board.add_waiting(self.entries[seq])

    def decide(self, now_s):
        again_s = self.policy.decide(now_s)
        taken = self.board.take_decisions()
        self.decided.append(
            (again_s, [(one.kind, one.entry.seq, one.places, one.reason, one.entry.overdue) for one in taken])
        )


def make_worlds(dice):
    needs = [Need(nodes=1, devices=count) for count in (1, 1, 2, 3, DEVICES)]
    needs += [Need(nodes=2, devices=DEVICES), Need(nodes=1, devices=2, cpus=0, within=-1, nodes_max=0)]
    if dice.random() < 0.7:
        needs += [Need(nodes=1, devices=0, share_milli=milli, share_group="mps:p") for milli in (125, 250, 500)]
    quotas = [
        queue(f"q{number}", quota_gpus=dice.choice((None, 6, 12)), weight=1.0 + number) for number in range(QUEUES)
    ]
    return needs, [
        World(
            board(
                [DEVICES] * NODES,
                quotas=FairShareTree(quotas, Resources(1000 * NODES * DEVICES)),
                has_lendable_quota=True,
            ),
            policy(PARAMETERS),
            needs,
        )
        for board, policy in ((Board, DefaultPolicy), (ReadsEveryNode, EveryLine))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_skipping_closed_classes_changes_no_decision(seed):
    dice = random.Random(seed)
    needs, worlds = make_worlds(dice)
    now_s, seq = 1_000.0, 0
    kinds = set()
    for _ in range(STEPS):
        now_s += dice.choice((0.0, 5.0, 30.0, 60.0, 700.0))
        running = sorted(worlds[0].board.running)
        for number in dice.sample(running, min(len(running), dice.randrange(6))):
            fate = dice.random()
            for world in worlds:
                entry = world.entries[number]
                if fate < 0.8:
                    world.board.finish(entry, now_s)
                else:  # a crash, or a lost node
                    entry.lost_nodes, entry.avoided_nodes = fate > 0.9, 1 if fate > 0.95 else 0
                    world.board.requeue_lost(entry, now_s, 0.0 if fate < 0.85 else 40.0)
        if dice.random() < 0.2 and worlds[0].board.waiting:
            gone = dice.choice(sorted(worlds[0].board.waiting))
            for world in worlds:
                world.board.withdraw([world.entries[gone]])
        for _ in range(dice.randrange(12)):
            seq += 1
            drawn = (dice.randrange(len(needs)), dice.choice((0, 0, 0, 1)), dice.randrange(QUEUES), dice.randrange(5))
            for world in worlds:
                world.submit(seq, now_s, *drawn)
        for world in worlds:
            if world.board.quotas is not None:
                world.board.quotas.advance(now_s)
            world.decide(now_s)
        assert worlds[0].decided[-1] == worlds[1].decided[-1]
        kinds |= {one[0] for one in worlds[0].decided[-1][1]}
    assert DecisionKind.START in kinds
    assert DecisionKind.STOP in kinds
