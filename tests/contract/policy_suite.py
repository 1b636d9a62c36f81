"""What every scheduling policy must do: the invariants of `phalanx.core.scheduling.policy`, on drawn days of a small fleet."""

from __future__ import annotations

import random
from collections.abc import Callable

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import Decision, JobEntry, StopReason
from phalanx.core.scheduling.policy import Policy

SIZES = (8, 8, 8, 4, 4)
SEEDS = range(12)
STEPS = 120
SOON_CALLS = 3  # of `decide`, at the times it asks for


class CheckedBoard(Board):
    """A board that accepts only decisions that the contract allows."""

    def start(self, entry, need, places, now_s):
        assert entry.seq in self.waiting
        assert self.waiting[entry.seq] is entry, "it does not wait on this board"
        assert self.admits(entry.job_class)
        assert need in entry.job_class.needs
        self._check_places(places, need)
        super().start(entry, need, places, now_s)

    def stop(self, entry, now_s, other=None, reason=None):
        self._check_running(entry)
        assert reason is not StopReason.VALUE or entry.protected_until_s <= now_s
        super().stop(entry, now_s, other, reason)

    def move(self, entry, need, places, now_s, other=None, reason=None):
        self._check_running(entry)
        super().move(entry, need, places, now_s, other, reason)

    def _check_places(self, places, need):
        assert sum(count for _, count in places) == need.gpus
        for node, count in places:
            assert node not in self.closed_nodes
            assert 0 < count <= self.pools[0].free[node]

    def _check_running(self, entry):
        assert entry.seq in self.running
        assert self.running[entry.seq] is entry, "it does not run on this board"
        assert not entry.never_stopped


class Day:
    """Jobs that come, end, are cancelled and lose their nodes, drawn from a seed; and what the policy decides."""

    def __init__(self, policy: Policy, seed: int, *, trials: bool = False) -> None:
        self.policy, self.chance, self.trials = policy, random.Random(seed), trials
        self.now_s, self.seq = 0.0, 0
        self.log: list[tuple] = []
        self.board = CheckedBoard(SIZES)
        policy.attach(self.board)

    def run(self) -> list:
        for _ in range(STEPS):
            self.now_s += self.chance.choice((0.5, 7.0, 60.0, 900.0))
            for _ in range(self.chance.randrange(4)):
                self.chance.choice((self._arrive, self._arrive, self._end, self._cancel, self._lose, self._close))()
            self.decide()
            if self.trials:
                self._try()
        return self.log

    def decide(self) -> float | None:
        again_s = self.policy.decide(self.now_s)
        assert again_s is None or again_s > self.now_s
        self.log += [_line(decision) for decision in self.board.take_decisions()]
        return again_s

    def _arrive(self) -> None:
        gpus = self.chance.choice((1, 1, 2, 4, 8, 12))
        board, self.seq = self.board, self.seq + 1
        klass = board.job_class((board.need_of(gpus),), label=self.chance.randrange(3), rank=self.chance.randrange(2))
        size_s = self.chance.choice((-1.0, 60.0, 4000.0))
        never = self.chance.random() < 0.1
        entry = JobEntry(seq=self.seq, job_class=klass, submit_s=self.now_s, size_s=size_s, never_stopped=never)
        board.add_waiting(entry)

    def _end(self) -> None:
        if self.board.running:
            self.board.finish(self._draw(self.board.running), self.now_s, learn=self.chance.random() < 0.8)

    def _cancel(self) -> None:
        if self.board.waiting:
            self.board.withdraw([self._draw(self.board.waiting)])

    def _lose(self) -> None:
        if self.board.running:
            entry = self._draw(self.board.running)
            entry.lost_nodes = True
            self.board.requeue_lost(entry, self.now_s, 0.0)

    def _close(self) -> None:
        if self.board.closed_nodes:
            self.board.restore_node(min(self.board.closed_nodes))
        else:
            self.board.remove_node(self.chance.randrange(len(SIZES)))

    def _draw(self, entries: dict[int, JobEntry]) -> JobEntry:
        return entries[self.chance.choice(sorted(entries))]

    def _try(self) -> None:
        trial = self.policy.copy_for_trial()
        alone = Board(SIZES)
        trial.attach(alone)
        alone.add_waiting(JobEntry(seq=1, job_class=alone.job_class((alone.need_of(4),)), submit_s=self.now_s))
        trial.decide(self.now_s)
        alone.finish(alone.running[1], self.now_s + 5.0) if alone.running else None
        trial.release()


def _line(decision: Decision) -> tuple:
    return (decision.kind, decision.entry.seq, decision.places, decision.reason)


def check_policy(make: Callable[[], Policy]) -> None:
    """Check all invariants."""
    for seed in SEEDS:
        first = Day(make(), seed).run()
        assert first, "nothing was decided"
        assert Day(make(), seed).run() == first, "equal days give unequal decisions"
        assert Day(make(), seed, trials=True).run() == first, "a trial changes what is decided"
    check_second_board(make())
    for gpus in (1, 4, 8, 20):
        check_job_alone(make(), gpus)


def check_second_board(policy: Policy) -> None:
    """Nothing of the first board is decided on the second."""
    Day(policy, 1).run()
    Day(policy, 2).run()


def check_job_alone(policy: Policy, gpus: int) -> None:
    """A job alone on an idle fleet starts soon."""
    day = Day(policy, 0)
    day.now_s = 61.0
    klass = day.board.job_class((day.board.need_of(gpus),))
    day.board.add_waiting(JobEntry(seq=1, job_class=klass, submit_s=day.now_s))
    for _ in range(SOON_CALLS):
        again_s = day.decide()
        if day.board.running:
            return
        assert again_s is not None, "it waits for a change that will not come"
        day.now_s = again_s
    raise AssertionError(f"a job of {gpus} devices does not start on an idle fleet")
