"""Baseline policies: simple, known orders to compare the default policy with.

The first four never stop a job. `fifo` serves by submit time without overtaking; `sjf` is the same by known run time. `skip` starts every job
that fits. `fair` serves the queue with the least usage, with skipping inside. `backfill` is EASY: the head gets a reservation by known run
times, and later jobs start now if they do not delay it. `las` (Tiresias, two queues by attained GPU-seconds) and `srtf` (shortest known
remaining time) may stop jobs at every round. In all of them a higher priority goes first, and a job blocked by a quota or limit blocks no
other.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import Self

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import (
    JobClass,
    JobEntry,
    StopReason,
    sorted_by_submit,
)
from phalanx.core.scheduling.node_bitsets import bitset_of
from phalanx.core.scheduling.policy import Policy
from phalanx.core.work.share import MILLI_PER_DEVICE

# Jobs that lost their place first, then descending priority, the policy's own key, submit time, seq.
Key = tuple[bool, int, float, float, int]


def sort_key(entry: JobEntry, first: float) -> Key:
    """The sort key of the job in a line ordered by `first`."""
    return (not entry.lost_nodes, -entry.job_class.rank, first, entry.submit_s, entry.seq)


def _take_out(lines: dict[JobClass, list[tuple[Key, JobEntry]]], entries: Iterable[JobEntry]) -> None:
    leaving: dict[JobClass, set[int]] = {}
    for entry in entries:
        leaving.setdefault(entry.job_class, set()).add(entry.seq)
    for klass, seqs in leaving.items():
        line = _without(lines[klass], seqs)
        heapq.heapify(line)
        lines[klass] = line


def _without(line: list[tuple[Key, JobEntry]], seqs: set[int]) -> list[tuple[Key, JobEntry]]:
    return [item for item in line if item[1].seq not in seqs]


class StrictPolicy(Policy):
    """Serve one line from its head until the head does not fit. Order: submit time, or known run time."""

    overtakes = False

    def __init__(self, *, shortest: bool = False) -> None:
        self.shortest = self.uses_run_times = shortest

    def attach(self, board: Board) -> None:
        """Begin with an empty line."""
        super().attach(board)
        self.line: list[tuple[Key, JobEntry]] = []
        self.blocked: dict[JobClass, list[tuple[Key, JobEntry]]] = {}

    def copy_for_trial(self) -> Self:
        """Return one with the same order."""
        return type(self)(shortest=self.shortest)

    def on_waiting(self, entry: JobEntry) -> None:
        """Join the line."""
        heapq.heappush(self.line, (sort_key(entry, entry.size_s if self.shortest else entry.submit_s), entry))

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """Leave the line, or the blocked jobs. Both are scanned once, however many jobs leave."""
        seqs = {entry.seq for entry in entries}
        self.line = _without(self.line, seqs)
        heapq.heapify(self.line)
        for klass in {entry.job_class for entry in entries} & self.blocked.keys():
            self.blocked[klass] = _without(self.blocked[klass], seqs)

    def decide(self, now_s: float) -> float | None:
        """Start heads while they fit. No later call is needed before the next change."""
        board = self.board
        for klass in [klass for klass in self.blocked if board.admits(klass)]:
            for item in self.blocked.pop(klass):
                heapq.heappush(self.line, item)
        line = self.line
        while line:
            entry = line[0][1]
            if not board.admits(entry.job_class):
                self.blocked.setdefault(entry.job_class, []).append(heapq.heappop(line))
                continue
            found = board.find(entry)
            if found is None:
                return None
            heapq.heappop(line)
            board.start(entry, *found, now_s)
        return None


class SkipPolicy(Policy):
    """Start every job that fits, in submit order. If one job of a class does not fit, the rest of the class is not tried."""

    def attach(self, board: Board) -> None:
        """Begin with empty classes."""
        super().attach(board)
        self.classes: dict[JobClass, list[tuple[Key, JobEntry]]] = {}

    def on_waiting(self, entry: JobEntry) -> None:
        """Join its class."""
        heapq.heappush(self.classes.setdefault(entry.job_class, []), (sort_key(entry, entry.submit_s), entry))

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """Leave the lines of the classes. Each is scanned once, however many jobs leave it."""
        _take_out(self.classes, entries)

    def decide(self, now_s: float) -> float | None:
        """One sweep over the classes' heads in order."""
        board = self.board
        heads = [(line[0][0], klass.number, klass) for klass, line in self.classes.items() if line]
        heapq.heapify(heads)
        failed: set[tuple[object, ...]] = set()
        while heads:
            klass = heads[0][2]
            line = self.classes[klass]
            entry = line[0][1]
            request = (klass.needs, klass.excluded, entry.avoided_nodes)
            found = None
            if request not in failed and board.admits(klass):
                found = board.find(entry)
                if found is None:
                    failed.add(request)  # free capacity only shrinks within a sweep
            if found is None:
                heapq.heappop(heads)
                continue
            heapq.heappop(line)
            board.start(entry, *found, now_s)
            if line:
                heapq.heapreplace(heads, (line[0][0], klass.number, klass))
            else:
                heapq.heappop(heads)
        return None


class FairSharePolicy(Policy):
    """The queue with the least decayed GPU-seconds first; inside a queue by submit time, skipping jobs that do not fit.

    Usage halves every `half_life_s` (a day: a week-end's burst no longer counts by mid-week).
    """

    def __init__(self, *, half_life_s: float = 86_400.0) -> None:
        self.half_life_s = half_life_s

    def attach(self, board: Board) -> None:
        """Begin with empty queues; their earlier usage is in the quota tree."""
        super().attach(board)
        self.lines: dict[JobClass, list[tuple[Key, JobEntry]]] = {}
        self.used: dict[tuple[int, int], float] = {}
        self.rate: dict[tuple[int, int], int] = {}
        self.aged_s = 0.0

    def on_waiting(self, entry: JobEntry) -> None:
        """Join the queue."""
        heapq.heappush(self.lines.setdefault(entry.job_class, []), (sort_key(entry, entry.submit_s), entry))
        self.used.setdefault(_usage_key(entry.job_class), 0.0)
        self.rate.setdefault(_usage_key(entry.job_class), 0)

    def on_adopted(self, entry: JobEntry) -> None:
        """Add its GPUs to the queue's rate of use; earlier usage is in the quota tree."""
        key = _usage_key(entry.job_class)
        self.used.setdefault(key, 0.0)
        self.rate[key] = self.rate.get(key, 0) + entry.milli_held

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """Leave the queues. Each line is scanned once, however many jobs leave it."""
        _take_out(self.lines, entries)

    def on_ended(self, entry: JobEntry, now_s: float) -> None:
        """Subtract its GPUs from the queue's rate of use."""
        self._age(now_s)
        self.rate[_usage_key(entry.job_class)] -= entry.milli_held

    def on_stopped(self, entry: JobEntry, now_s: float) -> None:
        """The same as an end."""
        self.on_ended(entry, now_s)

    def decide(self, now_s: float) -> float | None:
        """Serve the queue with the least usage that has a job that fits, repeatedly."""
        self._age(now_s)
        board, quotas = self.board, self.board.quotas
        unfit: set[JobClass] = set()
        if quotas is not None:
            quotas.set_waiting({(klass.queue, klass.user) for klass, line in self.lines.items() if line})
        while True:
            best: tuple[object, ...] | None = None
            chosen: JobClass | None = None
            for klass, line in self.lines.items():
                if line and klass not in unfit:
                    first = line[0][0]
                    factor = 0.0 if quotas is None else quotas.fair_share_factor(klass.queue, klass.user)
                    rank = (*first[:2], -factor, self.used[_usage_key(klass)], self.rate[_usage_key(klass)], *first[2:])
                    if best is None or rank < best:
                        best, chosen = rank, klass
            if chosen is None:
                return None
            line = self.lines[chosen]
            found = board.find(line[0][1]) if board.admits(chosen) else None
            if found is None:
                unfit.add(chosen)
                continue
            _, entry = heapq.heappop(line)
            board.start(entry, *found, now_s)
            self.rate[_usage_key(chosen)] += entry.milli_held

    def copy_for_trial(self) -> Self:
        """Return one with the same half-life."""
        return type(self)(half_life_s=self.half_life_s)

    def _age(self, now_s: float) -> None:
        span = now_s - self.aged_s
        if span <= 0.0:
            return
        keep = 0.5 ** (span / self.half_life_s)
        gain = (1.0 - keep) * self.half_life_s / 0.6931471805599453
        for key, used in self.used.items():
            self.used[key] = used * keep + self.rate[key] * gain
        self.aged_s = now_s


def _usage_key(job_class: JobClass) -> tuple[int, int]:
    """Whose usage counts: the queue's; in a trace replayed on one pool the virtual cluster's, which is only a label there."""
    return (job_class.queue, job_class.label)


class BackfillPolicy(Policy):
    """EASY: a reservation for the head by known run times; later jobs start now if they end before it or use capacity that it leaves over."""

    overtakes = False
    uses_run_times = True

    def attach(self, board: Board) -> None:
        """Begin with an empty line."""
        super().attach(board)
        self.line: list[tuple[Key, JobEntry]] = []

    def on_waiting(self, entry: JobEntry) -> None:
        """Join the line."""
        bisect.insort(self.line, (sort_key(entry, entry.submit_s), entry))

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """Leave the line, which is scanned once, however many jobs leave it."""
        self.line = _without(self.line, {entry.seq for entry in entries})

    def decide(self, now_s: float) -> float | None:
        """Start heads while they fit, then every job that does not delay the first one that did not."""
        board = self.board
        head: JobEntry | None = None
        head_start_s = 0.0
        spare: dict[int, int] = {}  # free devices that the head leaves over on its nodes
        kept: list[tuple[Key, JobEntry]] = []
        failed: set[tuple[object, ...]] = set()
        for item in self.line:
            entry = item[1]
            if not board.admits(entry.job_class):
                kept.append(item)
                continue
            short = head is None or now_s + _run_s(entry) <= head_start_s
            request = (entry.job_class.needs, entry.job_class.excluded, entry.avoided_nodes, short)
            found = None if request in failed else board.find(entry, 0 if short else _too_small(entry, spare))
            if found is None:
                failed.add(request)
                kept.append(item)
                if head is None:
                    head = entry
                    head_start_s, spare = self._reserve(head)
                continue
            board.start(entry, *found, now_s)
            if not short:
                for node, count in entry.places:
                    if node in spare:
                        spare[node] -= count
        self.line = kept
        return None

    def _reserve(self, head: JobEntry) -> tuple[float, dict[int, int]]:
        """When the head can start if all run times are as known, and how many devices it then leaves over on each of its nodes."""
        board = self.board
        ends = sorted((entry.started_s + _run_s(entry), entry.seq, entry) for entry in board.running.values())
        given: list[JobEntry] = []
        found: tuple[float, dict[int, int]] = (float("inf"), {})
        for end_s, _, entry in ends:
            board.free_devices(entry)
            given.append(entry)
            place = board.find(head)
            if place is not None:
                found = (
                    end_s,
                    {node: board.pools[board.pool_of_node[node]].free[node] - count for node, count in place[1]},
                )
                break
        for entry in given:
            board.retake_devices(entry)
        return found


def _too_small(entry: JobEntry, spare: dict[int, int]) -> int:
    """The head's nodes that have too few devices left for a part of the entry, as a bitset. CPUs and memory there belong to the head."""
    needs = entry.job_class.needs
    needs_host = any(need.cpus or need.memory_bytes for need in needs)
    largest = max(need.devices for need in needs)
    return bitset_of(node for node, left in spare.items() if needs_host or left < largest)


def _run_s(entry: JobEntry) -> float:
    """Its known run time; infinite if unknown."""
    return entry.size_s if entry.size_s >= 0.0 else float("inf")


INFINITE = float("inf")
ROUND_S = 60.0
LAS_THRESHOLD_GPU_S = 18_000.0  # shared/data/README.md; 5 GPU-hours


class RoundBasedPolicy(Policy):
    """At every round the best jobs by rank that fit together run; the rest waits. Nothing starts between rounds."""

    def __init__(
        self,
        *,
        exact: bool = False,
        round_s: float = ROUND_S,
        thresholds: tuple[float, ...] = (LAS_THRESHOLD_GPU_S,),
    ) -> None:
        self.exact = self.uses_run_times = exact
        self.round_s = round_s
        self.thresholds = thresholds

    def attach(self, board: Board) -> None:
        """Begin with no round scheduled."""
        super().attach(board)
        self.next_s = INFINITE  # time of the next scheduled round

    def copy_for_trial(self) -> Self:
        """Return one with the same order and rounds."""
        return type(self)(exact=self.exact, round_s=self.round_s, thresholds=self.thresholds)

    def _rank(self, entry: JobEntry, now_s: float) -> tuple[float, float, int]:
        if self.exact:
            return (entry.size_s - entry.service_s(now_s), entry.submit_s, entry.seq)
        # Repeated work counts: otherwise a stop would lift the job back into the first queue, and the two jobs would alternate forever.
        used = (entry.service_s(now_s) + self.board.restart_cost_s * entry.stops) * entry.gpus
        return (float(sum(used >= threshold for threshold in self.thresholds)), entry.submit_s, entry.seq)

    def decide(self, now_s: float) -> float | None:
        """At a round, choose again; returns the time of the next round."""
        board = self.board
        # A live clock never hits the round exactly: the first call past the scheduled time is the round.
        if board.waiting and (now_s % self.round_s == 0.0 or now_s >= self.next_s):
            self._choose(now_s)
        self.next_s = (now_s // self.round_s + 1.0) * self.round_s if board.waiting else INFINITE
        return self.next_s if board.waiting else None

    def _choose(self, now_s: float) -> None:
        board = self.board
        devices = sum(
            board.devices_on_node(node) for node in range(len(board.devices_of_node)) if node not in board.closed_nodes
        )
        room = devices * MILLI_PER_DEVICE
        candidates = sorted(
            [*board.waiting.values(), *board.running.values()],
            key=lambda entry: (not entry.lost_nodes, -entry.job_class.rank, *self._rank(entry, now_s)),
        )
        chosen: list[JobEntry] = []
        losers: list[JobEntry] = []
        for entry in candidates:
            held = entry.milli_held or entry.job_class.milli
            if held <= room and (entry.started_s >= 0.0 or board.admits(entry.job_class)):
                room -= held
                if entry.started_s < 0.0:
                    chosen.append(entry)
            elif entry.started_s >= 0.0 and not entry.never_stopped:
                losers.append(entry)
        self._place(chosen, losers, now_s)

    def _place(self, chosen: list[JobEntry], losers: list[JobEntry], now_s: float) -> None:
        """Start the chosen jobs on the devices that the losers would free; a loser whose devices remain unused keeps them."""
        board = self.board
        for entry in losers:
            board.free_devices(entry)
        placed = []
        for entry in chosen:
            found = board.find(entry)
            if found is not None:
                placed.append((entry, *found, board.occupy(*found)))
        stopped = []
        for entry in losers:
            if board.can_retake(entry):
                board.retake_devices(entry)
            else:
                stopped.append(entry)
        for _, need, places, shared in placed:
            board.vacate(need, places, shared)
        for entry in stopped:
            board.retake_devices(entry)
            board.stop(entry, now_s, reason=StopReason.VALUE)
        for entry, need, places, _ in placed:
            # As wide as it was found: the other starts were not counted then.
            width_admitted = (
                board.quotas is None
                or board.quotas.check_admission(entry.job_class.queue, entry.job_class.user, need.resources) is None
            )
            if width_admitted and board.admits(entry.job_class):
                board.start(entry, need, places, now_s)
        for entry in sorted_by_submit(board.waiting.values()):
            if not board.free_total and not any(need.mig_profile for need in entry.job_class.needs):
                continue
            found = board.find(entry) if board.admits(entry.job_class) else None
            if found is not None:
                board.start(entry, *found, now_s)
