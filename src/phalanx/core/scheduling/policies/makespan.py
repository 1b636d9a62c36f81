"""The makespan policy: the last of the known jobs shall end as early as possible. It needs run times: time limits, on a live head.

Every pass divides all known work among the kinds of devices (`device_prices.py`). Jobs run on the kind for which they have the comparative
advantage, the longest rest first. A job is *critical* once its rest takes all the time that is left: run later, it would extend the end for
certain, so that it goes before others and stops them. Other jobs keep their devices, since a stop costs a restart.

Cost: each pass sorts all jobs, and prices up to `JOBS_MAX` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.policies.device_prices import Balance, DevicePrices, Rows
from phalanx.core.scheduling.policy import Policy
from phalanx.core.work.share import MILLI_PER_DEVICE

ROUND_S: Final = 300.0  # without other changes, places are chosen again this often: five restarts of 60 s
STAY_S: Final = 240.0  # guaranteed run after a start or a move; less than a round, so that the next round may move it
CRITICAL_S: Final = ROUND_S  # a job with less slack is critical: at the next round it would be late
JOBS_MAX: Final = 2_048  # jobs that are divided in one pass, those with the longest rest: 30 ms
UNKNOWN_S: Final = 86_400.0  # run time of a job if none is known of any
GOOD_PLACE: Final = 0.95  # of the best advantage: a job stays there unless a critical one comes
KEEP, STAY, LONGEST, CRITICAL = 1.0, 0.05, 0.3, 5.0  # see `_scores`


@dataclass(slots=True)
class _Progress:
    """Work of a job in seconds on its fastest kind: done before `since_s`, and since then at `speed`."""

    done_s: float = 0.0
    since_s: float = 0.0
    speed: float = 0.0

    def at(self, now_s: float) -> float:
        return self.done_s + max(0.0, now_s - self.since_s) * self.speed


class MakespanPolicy(Policy):
    """See the module."""

    uses_run_times = True

    def attach(self, board: Board) -> None:
        """Begin with no prices; what jobs have done is kept from the board before."""
        super().attach(board)
        self._prices = DevicePrices(len(board.pools))
        self._next_s = 0.0
        self._changed = True
        self._progress: dict[int, _Progress] = {}

    def copy_for_trial(self) -> Self:
        """Return a new one."""
        return type(self)()

    # ---------------------------------------------------------------- events

    def on_waiting(self, entry: JobEntry) -> None:
        """What it saved counts as done, at full speed."""
        self._changed = True
        self._progress[entry.seq] = _Progress(done_s=max(0.0, entry.attained_s))

    def on_adopted(self, entry: JobEntry) -> None:
        """It has run since its start."""
        self._progress[entry.seq] = _Progress(done_s=max(0.0, entry.attained_s))
        self._began(entry, entry.placed_s)

    def on_placed(self, entry: JobEntry, now_s: float) -> None:
        """It begins only now."""
        self._began(entry, now_s)

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """They are gone."""
        for entry in entries:
            self._progress.pop(entry.seq, None)

    def on_ended(self, entry: JobEntry, now_s: float) -> None:
        """It is gone."""
        self._changed = True
        del now_s
        self._progress.pop(entry.seq, None)

    def on_stopped(self, entry: JobEntry, now_s: float) -> None:
        """It is gone, or waits again."""
        self.on_ended(entry, now_s)

    def _began(self, entry: JobEntry, now_s: float) -> None:
        entry.protected_until_s = now_s + STAY_S
        known = self._progress[entry.seq]
        known.since_s, known.speed = now_s, entry.speed_on(self.board.kind_of(entry))

    def _paused(self, entry: JobEntry, now_s: float) -> None:
        """It stops or moves: it repeats the restart, and what it has not saved."""
        known = self._progress[entry.seq]
        lost_s = self.board.restart_cost_s + entry.unsaved_s(now_s)
        known.done_s = max(0.0, known.at(now_s) - lost_s * known.speed)
        known.since_s, known.speed = now_s, 0.0

    # ---------------------------------------------------------------- decisions

    def decide(self, now_s: float) -> float | None:
        """At a round choose the places of all jobs again; in between, start what fits."""
        board = self.board
        due_s = now_s if self._changed else self._next_s
        if now_s >= due_s and (board.waiting or board.uneven_speeds):
            self._choose(now_s)
            self._changed = False
            due_s = self._next_s = now_s + ROUND_S
        self._fill(now_s)
        return max(due_s, now_s + 1.0) if board.waiting or board.uneven_speeds else None

    def _fill(self, now_s: float) -> None:
        """Start waiting jobs on free devices, the longest rest first."""
        board = self.board
        failed: set[tuple[object, ...]] = set()
        longest_s = self._longest_s()
        for entry in sorted(board.waiting.values(), key=lambda entry: self._key(entry, longest_s, now_s)):
            klass = entry.job_class
            request = (klass.needs, klass.excluded, entry.avoided_nodes)
            if request in failed or not board.admits(klass):
                continue
            found = board.find(entry)
            if found is None:
                failed.add(request)
                continue
            board.start(entry, *found, now_s)
            entry.placed_s = now_s
            self._began(entry, now_s)

    def _key(self, entry: JobEntry, longest_s: float, now_s: float) -> tuple[bool, int, float, int]:
        return (not entry.lost_nodes, -entry.job_class.rank, -self._rest_s(entry, longest_s, now_s), entry.seq)

    def _longest_s(self) -> float:
        """The longest run time that is known: that of jobs of which none is known."""
        known = [entry.size_s for group in (self.board.waiting, self.board.running) for entry in group.values()]
        return max((size_s for size_s in known if 0.0 <= size_s < float("inf")), default=UNKNOWN_S)

    def _rest_s(self, entry: JobEntry, longest_s: float, now_s: float) -> float:
        """What is left of it, on its fastest kind; never nothing, since a run time may be wrong."""
        known = 0.0 <= entry.size_s < float("inf")
        return max(
            (entry.size_s if known else longest_s) - self._progress[entry.seq].at(now_s), self.board.restart_cost_s, 1.0
        )

    def _choose(self, now_s: float) -> None:
        board = self.board
        longest_s = self._longest_s()
        running = [entry for entry in board.running.values() if entry.places]
        waiting = [entry for entry in board.waiting.values() if board.admits(entry.job_class)]
        entries = sorted([*running, *waiting], key=lambda entry: self._key(entry, longest_s, now_s))[:JOBS_MAX]
        if not entries:
            return
        speeds, gpus = self._speeds_and_gpus(entries)
        rest = np.array([self._rest_s(entry, longest_s, now_s) for entry in entries])
        with np.errstate(divide="ignore"):
            rest_s = rest[:, None] / speeds
        capacity = np.array([self._capacity(kind) for kind in range(len(board.pools))])
        balance = self._prices.balance([entry.seq for entry in entries], rest_s, gpus, capacity)
        self._rearrange(self._targets(entries, balance, gpus, capacity, now_s), now_s)

    def _capacity(self, kind: int) -> float:
        pool, board = self.board.pools[kind], self.board
        return float(
            sum(size for node, size in enumerate(pool.devices_of_node) if size > 0 and node not in board.closed_nodes)
        )

    def _speeds_and_gpus(self, entries: Sequence[JobEntry]) -> tuple[Rows, Rows]:
        """[job, kind] speed, 0 where it cannot run, and devices; a running job can at least run where it is."""
        kinds = len(self.board.pools)
        speeds, gpus = np.zeros((len(entries), kinds)), np.ones((len(entries), kinds))
        for row, entry in enumerate(entries):
            for need in reversed(entry.job_class.needs):  # the preferred one counts
                for kind in need.kinds:
                    speeds[row, kind] = entry.speed_on(kind)
                    gpus[row, kind] = need.milli / MILLI_PER_DEVICE
            if entry.places:
                speeds[row, self.board.kind_of(entry)] = entry.speed_on(self.board.kind_of(entry))
        return speeds, gpus

    def _targets(
        self, entries: Sequence[JobEntry], balance: Balance, gpus: Rows, capacity: Rows, now_s: float
    ) -> list[tuple[JobEntry, int]]:
        """The kind on which each job shall run, the most important first; -1 for none."""
        scores = self._scores(entries, balance, now_s)
        offers = sorted(
            (not entry.lost_nodes, -entry.job_class.rank, -float(scores[row, kind]), entry.seq, kind, row)
            for row, entry in enumerate(entries)
            for kind in np.nonzero(balance.advantage[row])[0].tolist()
        )
        room = capacity.copy()
        chosen: dict[int, int] = {}
        for *_, kind, row in offers:
            if row not in chosen and gpus[row, kind] <= room[kind] + 1e-9:
                chosen[row] = kind
                room[kind] -= gpus[row, kind]
        rest = [row for row in range(len(entries)) if row not in chosen]
        return [(entries[row], chosen.get(row, -1)) for row in (*chosen, *rest)]

    def _scores(self, entries: Sequence[JobEntry], balance: Balance, now_s: float) -> Rows:
        """[job, kind] how well the job uses the kind, from 0 to 1, plus its urgency, plus what a restart is worth."""
        scores = balance.advantage + LONGEST * (balance.time_s / balance.end_s)[:, None]
        critical = balance.end_s - balance.time_s <= CRITICAL_S
        scores[critical] += CRITICAL * balance.advantage[critical]
        for row, entry in enumerate(entries):
            if entry.places:
                here = self.board.kind_of(entry)
                keeps = balance.advantage[row, here] >= GOOD_PLACE and not critical[row]
                scores[row, here] += KEEP if keeps else STAY
                if not self._displaceable(entry, now_s):
                    scores[row, here] += 2.0 * CRITICAL
        return scores

    def _displaceable(self, entry: JobEntry, now_s: float) -> bool:
        return (
            not entry.never_stopped
            and not entry.shared_devices
            and not (entry.need is not None and (entry.need.nodes_max or entry.need.others))
            and entry.protected_until_s <= now_s
            and entry.placed_s < now_s
        )

    # ---------------------------------------------------------------- carrying out

    def _rearrange(self, targets: Sequence[tuple[JobEntry, int]], now_s: float) -> None:
        """Move, stop and start jobs so that each runs where it shall, as far as they fit; a job whose devices remain unused keeps them."""
        board = self.board
        leaving = [
            entry
            for entry, kind in targets
            if entry.places and kind != board.kind_of(entry) and self._displaceable(entry, now_s)
        ]
        going = {entry.seq for entry in leaving}
        # Of alternatives with different amounts, quotas may admit only some: then what is planned counts while the rest is planned.
        quotas = board.quotas if any(entry.job_class.uneven_needs for entry, _ in targets) else None
        for entry in leaving:
            board.free_devices(entry)
            if quotas is not None:
                quotas.remove_running(entry.job_class.queue, entry.job_class.user, entry.held)
        found: list[tuple[JobEntry, Need, Places]] = []
        held = []
        for entry, kind in targets:
            if kind >= 0 and (not entry.places or entry.seq in going):
                place = self._find(entry, kind)
                if place is not None:
                    found.append((entry, *place))
                    held.append(board.occupy(*place))
                    if quotas is not None:
                        quotas.add_running(entry.job_class.queue, entry.job_class.user, place[0].resources)
        if quotas is not None:
            for entry, need, _ in found:
                quotas.remove_running(entry.job_class.queue, entry.job_class.user, need.resources)
            for entry in leaving:
                quotas.add_running(entry.job_class.queue, entry.job_class.user, entry.held)
        placed = {entry.seq for entry, _, _ in found}
        stopped = []
        for entry in leaving:
            if entry.seq in placed:
                continue
            if board.can_retake(entry):
                board.retake_devices(entry)
                going.discard(entry.seq)
            else:
                stopped.append(entry)
        for (_, need, places), shared in zip(found, held, strict=True):
            board.vacate(need, places, shared)
        for entry in leaving:
            if entry.seq in going:
                board.retake_devices(entry)
        self._carry_out(stopped, found, now_s)

    def _find(self, entry: JobEntry, kind: int) -> tuple[Need, Places] | None:
        board, klass = self.board, entry.job_class
        for need in klass.needs:
            if kind not in need.kinds or not board.admits_need(klass, need):
                continue
            here = replace(need, kinds=(kind,))
            for avoided in (entry.avoided_nodes | board.last_choice_nodes, 0):
                places = board.find_need(here, klass.excluded | avoided)
                if places is not None:
                    return here, places
        return None

    def _carry_out(
        self, stopped: Sequence[JobEntry], found: Sequence[tuple[JobEntry, Need, Places]], now_s: float
    ) -> None:
        board = self.board
        first = next((entry for entry, _, _ in found if not entry.places), None)
        for entry in stopped:
            self._paused(entry, now_s)
            board.stop(entry, now_s, first, StopReason.MAKESPAN)
        for entry, need, places in found:
            if entry.places and not board.admits_moves(
                [(entry, need)]
            ):  # one that keeps its place after all has the quota
                self._paused(entry, now_s)
                board.stop(entry, now_s, first, StopReason.MAKESPAN)
            elif entry.places:
                faster = entry.speed_on(need.kinds[0]) >= entry.speed_on(board.kind_of(entry))
                self._paused(entry, now_s)
                board.move(entry, need, places, now_s, None, StopReason.FASTER if faster else StopReason.MAKESPAN)
                entry.placed_s = now_s
                self._began(entry, now_s)
        for entry, need, places in found:
            klass = entry.job_class
            if entry.started_s < 0.0 and not entry.places and board.admits(klass) and board.admits_need(klass, need):
                board.start(entry, need, places, now_s)
                entry.placed_s = now_s
                self._began(entry, now_s)
