"""Policies that never stop a job: one line of waiting jobs in some order, served strictly or with skipping.

`fifo` serves by submit time and nobody overtakes the head. `skip` lets whoever fits start. `sjf` is strict by known run time. `fair` serves
the queue that has used the least, with skipping inside. `backfill` is EASY: the head gets a reservation by known run times, and later jobs
start now if they do not delay it.
"""

from __future__ import annotations

import bisect
import heapq

from phalanx.core.scheduling.board import Board, Entry, Listener


class Strict(Listener):
    """Serve the head of one line until it does not fit. Order: submit time, or known run time."""

    def __init__(self, board: Board, *, shortest: bool = False) -> None:
        self.board = board
        self.shortest = shortest
        self.line: list[tuple[float, float, int, Entry]] = []
        self.gone: set[int] = set()

    def arrived(self, entry: Entry) -> None:
        """Join the line."""
        first = entry.size_s if self.shortest else entry.submit_s
        heapq.heappush(self.line, (first, entry.submit_s, entry.seq, entry))

    def left(self, entry: Entry) -> None:
        """Leave the line; its place is dropped when it comes up."""
        self.gone.add(entry.seq)

    def decide(self, now_s: float) -> float | None:
        """Start heads while they fit. No later call is needed but at the next change."""
        line, pool = self.line, self.board.pool
        while line:
            entry = line[0][3]
            if entry.seq in self.gone:
                self.gone.discard(entry.seq)
                heapq.heappop(line)
                continue
            places = pool.find(entry.gpus)
            if places is None:
                return None
            heapq.heappop(line)
            self.board.start(entry, places, now_s)
        return None


class Skip(Listener):
    """Start whoever fits, in submit order. Waiting jobs of equal size are one class: once one has not fitted, its likes are not tried."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.classes: dict[int, list[tuple[float, int, Entry]]] = {}

    def arrived(self, entry: Entry) -> None:
        """Join its class."""
        heapq.heappush(self.classes.setdefault(entry.gpus, []), (entry.submit_s, entry.seq, entry))

    def left(self, entry: Entry) -> None:
        """Leave its class."""
        line = self.classes[entry.gpus]
        line.remove((entry.submit_s, entry.seq, entry))
        heapq.heapify(line)

    def decide(self, now_s: float) -> float | None:
        """One sweep over the classes' heads in submit order."""
        pool = self.board.pool
        heads = [(line[0][0], line[0][1], gpus) for gpus, line in self.classes.items() if line]
        heapq.heapify(heads)
        while heads and pool.free_total:
            _, _, gpus = heads[0]
            places = pool.find(gpus)
            if places is None:
                heapq.heappop(heads)  # room only shrinks within a sweep
                continue
            line = self.classes[gpus]
            _, _, entry = heapq.heappop(line)
            self.board.start(entry, places, now_s)
            if line:
                heapq.heapreplace(heads, (line[0][0], line[0][1], gpus))
            else:
                heapq.heappop(heads)
        return None


class Fair(Listener):
    """The queue with the least decayed GPU-seconds first; inside a queue by submit time, skipping what does not fit.

    Usage halves every `half_life_s` (a day: a week-end's burst is forgotten by mid-week).
    """

    def __init__(self, board: Board, *, half_life_s: float = 86_400.0) -> None:
        self.board = board
        self.half_life_s = half_life_s
        self.lines: dict[int, dict[int, list[tuple[float, int, Entry]]]] = {}
        self.used: dict[int, float] = {}
        self.rate: dict[int, int] = {}
        self.told_s = 0.0

    def arrived(self, entry: Entry) -> None:
        """Join the queue."""
        lines = self.lines.setdefault(entry.label, {})
        heapq.heappush(lines.setdefault(entry.gpus, []), (entry.submit_s, entry.seq, entry))
        self.used.setdefault(entry.label, 0.0)
        self.rate.setdefault(entry.label, 0)

    def left(self, entry: Entry) -> None:
        """Leave the queue."""
        line = self.lines[entry.label][entry.gpus]
        line.remove((entry.submit_s, entry.seq, entry))
        heapq.heapify(line)

    def ended(self, entry: Entry, now_s: float) -> None:
        """Its queue uses less from now on."""
        self._age(now_s)
        self.rate[entry.label] -= entry.gpus

    def decide(self, now_s: float) -> float | None:
        """Serve the least-served queue that has something that fits, again and again."""
        self._age(now_s)
        pool = self.board.pool
        shut: set[tuple[int, int]] = set()
        while pool.free_total:
            best: tuple[float, int, float, int, int] | None = None
            chosen = (0, 0)
            for label, lines in self.lines.items():
                for gpus, line in lines.items():
                    if line and (label, gpus) not in shut:
                        rank = (self.used[label], self.rate[label], line[0][0], line[0][1], gpus)
                        if best is None or rank < best:
                            best, chosen = rank, (label, gpus)
            if best is None:
                return None
            label, gpus = chosen
            places = pool.find(gpus)
            if places is None:
                shut.update((other, gpus) for other in self.lines)
                continue
            _, _, entry = heapq.heappop(self.lines[label][gpus])
            self.board.start(entry, places, now_s)
            self.rate[label] += gpus
        return None

    def _age(self, now_s: float) -> None:
        span = now_s - self.told_s
        if span <= 0.0:
            return
        keep = 0.5 ** (span / self.half_life_s)
        gain = (1.0 - keep) * self.half_life_s / 0.6931471805599453
        for label, used in self.used.items():
            self.used[label] = used * keep + self.rate[label] * gain
        self.told_s = now_s


class Backfill(Listener):
    """EASY: a reservation for the head by known run times; later jobs start now if they end before it or use what it leaves over."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.line: list[tuple[float, int, Entry]] = []

    def arrived(self, entry: Entry) -> None:
        """Join the line."""
        bisect.insort(self.line, (entry.submit_s, entry.seq, entry))

    def left(self, entry: Entry) -> None:
        """Leave the line."""
        self.line.remove((entry.submit_s, entry.seq, entry))

    def decide(self, now_s: float) -> float | None:
        """Heads while they fit, then whoever does not delay the head."""
        line, pool = self.line, self.board.pool
        done = 0
        while done < len(line):
            entry = line[done][2]
            places = pool.find(entry.gpus)
            if places is None:
                break
            self.board.start(entry, places, now_s)
            done += 1
        del line[:done]
        if len(line) < 2 or not pool.free_total:
            return None
        head = line[0][2]
        shadow_s, spare = self._reserve(head)
        kept = [line[0]]
        failed: set[int] = set()
        for item in line[1:]:
            entry = item[2]
            gpus = entry.gpus
            short = now_s + entry.size_s <= shadow_s
            if gpus in failed or not (short or gpus <= spare):
                kept.append(item)
                continue
            places = pool.find(gpus)
            if places is None:
                failed.add(gpus)
                kept.append(item)
                continue
            self.board.start(entry, places, now_s)
            if not short:
                spare -= gpus
        self.line = kept
        return None

    def _reserve(self, head: Entry) -> tuple[float, int]:
        """When the head can start if all run as known, and how many devices it then leaves over."""
        pool = self.board.pool
        ends = sorted((entry.since_s + entry.size_s, entry.seq, entry) for entry in self.board.running.values())
        given: list[Entry] = []
        found, spare = float("inf"), 0
        for end_s, _, entry in ends:
            pool.give(entry.places)
            given.append(entry)
            if pool.find(head.gpus) is not None:
                found, spare = end_s, pool.free_total - head.gpus
                break
        for entry in given:
            pool.take(entry.places)
        return found, spare
