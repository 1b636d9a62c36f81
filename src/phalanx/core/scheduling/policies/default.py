"""The default policy: knows no run times, learns how long jobs of a size run, and accounts for the cost of every stop and move.

Waiting jobs of one class that never ran form one line; lines are served by priority, then by value per GPU. For a job that does not fit,
running jobs may be displaced: at once if it has a right to their devices, at a round by its value; first by moving small jobs into free
gaps, else by stopping the cheapest set on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobClass, JobEntry, StopReason
from phalanx.core.scheduling.estimates.hazard_table import HazardTable, SimilarJobs
from phalanx.core.scheduling.estimates.move_times import MoveTimes
from phalanx.core.scheduling.estimates.run_time_prediction import JobTraits
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.policies.device_exchange import DeviceExchange
from phalanx.core.scheduling.policies.displacement_costs import DisplacementCosts
from phalanx.core.scheduling.policies.elastic_growth import ElasticGrowth
from phalanx.core.scheduling.policies.job_values import JobValues
from phalanx.core.scheduling.policies.node_reservation import ReservedNodes
from phalanx.core.scheduling.policies.observed_speeds import ObservedSpeeds
from phalanx.core.scheduling.policies.parameters import PolicyParameters
from phalanx.core.scheduling.policies.reserved_share import ReservedShare
from phalanx.core.scheduling.policies.sweep import SweepResults
from phalanx.core.scheduling.policies.victim_selector import Eviction, VictimSelector
from phalanx.core.scheduling.policies.waiting_lines import ClassOrder, Line, Order, OrderedLines, WaitingLines, ordered
from phalanx.core.scheduling.policy import NO_LATER_STOPS, LaterStops, Policy, SpeedSamples
from phalanx.core.scheduling.quota import FairShareTree
from phalanx.core.work.pace import MeasuredPace

INFINITE = float("inf")
URGENT_RANK = 1 << 30  # above any priority: for jobs that lost their place, and overdue ones
OVERDUE_CHECK_S = 3600.0  # without other events, overdue jobs are checked this often
ENTITLED_CLASSES_MAX = 8  # classes for which jobs are displaced by right in one pass; the others follow in the next
NEXT_PASS_S = 0.1  # delay of the next pass
PROTECTION_CHECK_S = 1.0  # ends of guaranteed runs are handled together: at most one more pass a second
ENTITLED_VICTIMS_MAX = 4_000  # victims examined for that, after which the pass ends: 10 ms
LATER_NODES_MAX = 2_000  # on a larger fleet an explanation does not search for later moves and stops
LATER_TRIES = 16  # ends of guaranteed runs at which an explanation looks for the jobs that are stopped then, the last of all among them


class DefaultPolicy(Policy):
    """The default policy; see the module.

    Attributes:
        again: waiting jobs that ran before, by seq.
        order: waiting jobs in the order of the pass in progress, as it was at the beginning.
        cleared: jobs were displaced by right in this pass, so that more may fit; leftovers of a round wait for the next change.
        reserved: nodes kept free of new work for the first urgent gang, if there is one.
    """

    def __init__(
        self,
        parameters: PolicyParameters | None = None,
        table: HazardTable | None = None,
        observed: ObservedSpeeds | None = None,
    ) -> None:
        self.parameters = parameters or PolicyParameters()
        self.table = table or HazardTable()
        self.observed = observed or ObservedSpeeds()

    def attach(self, board: Board) -> None:
        """Begin with empty lines; the statistics are kept, without the jobs that ran on the board before."""
        super().attach(board)
        parameters = self.parameters
        self.table.drop_running()
        self.fitted_s = -INFINITE
        self.fitted_events = self.table.events
        self.lines = WaitingLines()
        self.again: dict[int, JobEntry] = {}
        self.prices: dict[int, DisplacementCosts] = {}
        self.move_times = MoveTimes(board.restart_cost_s, parameters.move_min_s)
        self.victims = VictimSelector(
            board,
            allow_moves=parameters.allow_moves,
            move_times=self.move_times,
            run_min_by_right_s=parameters.run_min_by_right_s,
            stops_max=parameters.stops_max,
        )
        self.growth = ElasticGrowth(board, self.victims, self.move_times, parameters.grow_min_s)
        values = self.values = JobValues(board, self.table, parameters)
        self.exchange = DeviceExchange(
            board,
            weight=lambda entry: values.weight(entry.job_class),
            end_rate=values.end_rate,
            move_times=self.move_times,
        )
        self.exchange_next_s = 0.0
        self.round_next_s = 0.0
        self.order: Order = []
        self._changed_classes: set[JobClass] = set()  # classes whose lines differ from `order`
        self._stopped: list[JobEntry] = []  # in the pass in progress
        self.unfinished = False
        self.cleared = False
        self.reserved = ReservedNodes(board)
        self.overdue_share = ReservedShare(board, self.table, parameters)

    # ---------------------------------------------------------------- events

    def on_waiting(self, entry: JobEntry) -> None:
        """Join the line of its class and group."""
        self.values.group(entry)
        self._join(entry)

    def on_adopted(self, entry: JobEntry) -> None:
        """Count it as time at risk, like jobs started here, and protect it as long as they are."""
        entry.protected_until_s = entry.placed_s + self.parameters.run_min_s
        self.values.group(entry).add_running(entry.seq, entry)

    def on_withdrawn(self, entries: Sequence[JobEntry]) -> None:
        """Leave the lines. Each line is scanned once, however many jobs leave it."""
        leaving: dict[tuple[JobClass, SimilarJobs], set[int]] = {}
        for entry in entries:
            self._leave(entry)
            if self.again.pop(entry.seq, None) is None:
                leaving.setdefault((entry.job_class, self.values.group(entry)), set()).add(entry.seq)
        self.lines.remove(leaving)

    def on_ended(self, entry: JobEntry, now_s: float) -> None:
        """Learn from its run time."""
        group = self._leave(entry)
        self.table.record_end(group, max(entry.service_s(now_s), 0.0))
        for changed in (group, group.parent):
            if changed is not None:
                self.lines.invalidate_group(changed)

    def on_stopped(self, entry: JobEntry, now_s: float) -> None:
        """It did not end by itself: nothing to learn."""
        del now_s
        self._leave(entry)

    def on_placed(self, entry: JobEntry, now_s: float) -> None:
        """Protect it from its start, not from the decision."""
        entry.protected_until_s = now_s + self.parameters.run_min_s

    # ---------------------------------------------------------------- statistics

    def learn(self, label: int, gpus: int, submit_s: float, run_time_s: float) -> None:
        """Count it like a job that ended here. No job waits yet."""
        self.table.record_end(self.table.burst(label, gpus, submit_s), run_time_s)

    def learn_pace(self, job_id: JobId, traits: JobTraits, measured: MeasuredPace) -> bool:
        """Keep it with the runs of its name."""
        return self.observed.learn(job_id, traits, measured)

    def pace_samples(self, job_id: JobId, traits: JobTraits) -> SpeedSamples:
        """Compare its runs, or those of similar jobs."""
        return self.observed.samples(job_id, traits)

    def drop_label(self, label: int) -> None:
        """Drop the statistics of the label."""
        self.table.drop_label(label)

    def copy_for_trial(self) -> Self:
        """Return one with a copy of the statistics."""
        return type(self)(self.parameters, self.table.copy(), self.observed.copy())

    def release(self) -> None:
        """Break the cycles between jobs and their statistics."""
        for entry in (*self.board.waiting.values(), *self.board.running.values()):
            entry.similar_jobs = None
        for group in self.table.groups():
            group.active.clear()
            group.burst = None

    def _leave(self, entry: JobEntry) -> SimilarJobs:
        self.overdue_share.remove(entry)
        group = self.values.group(entry)
        group.remove_running(entry.seq)
        return group

    def _join(self, entry: JobEntry) -> None:
        if entry.stops or entry.attained_s or entry.lost_nodes:
            self.again[entry.seq] = entry
        else:
            self.lines.join(entry, self.values.group(entry))

    # ---------------------------------------------------------------- decisions

    def decide(self, now_s: float) -> float | None:
        """Start jobs that fit; displace jobs for those that do not, by right at once and by value at a round."""
        self.cleared = False
        again_s = self._decide(now_s)
        if self.cleared and self.board.waiting:
            self._fill(self._remaining_order(self.order, now_s), now_s)  # more may have been freed than was needed
        self.order = []
        self._changed_classes.clear()
        self._stopped.clear()
        if self.board.uneven_speeds and self.parameters.allow_moves:
            look_s = self._exchange_devices(now_s)
            return look_s if again_s is None else min(again_s, look_s)
        return again_s

    def _exchange_devices(self, now_s: float) -> float:
        """Once a round, move jobs to the models on which they gain the most; return the time of the next round."""
        if now_s >= self.exchange_next_s:
            self.exchange_next_s = (now_s // self.parameters.round_s + 1.0) * self.parameters.round_s
            for moves in self.exchange.exchanges(now_s):
                for one in moves:
                    if one.need is not None:
                        other = None if one is moves[0] else moves[0].entry
                        self.board.move(one.entry, one.need, one.places, now_s, other, one.reason)
                        one.entry.placed_s = now_s
        return self.exchange_next_s

    def _decide(self, now_s: float) -> float | None:
        board, knobs = self.board, self.parameters
        if not board.waiting:
            return self.growth.grow(now_s)
        new_events = self.table.events - self.fitted_events
        if new_events and (
            now_s - self.fitted_s >= knobs.refit_s
            or (self.fitted_events < 1000 and new_events > 0.1 * self.fitted_events)
        ):
            self._refit(now_s)
        self.values.begin_pass()
        if board.quotas is not None:
            classes = {*self.lines.by_class, *(one.job_class for one in self.again.values())}
            board.quotas.set_waiting({(klass.queue, klass.user) for klass in classes})
        if self.reserved.entry is not None and self.reserved.entry.lost_nodes:
            self.reserved.release()  # it may fit by now
        order = self.order = self._order(now_s)
        self._fill(order, now_s)
        if not board.waiting:
            return self.growth.grow(now_s)
        self.unfinished = False
        self._urgent(order, now_s)
        shield_s = max(self.victims.protection_ends_s, now_s + PROTECTION_CHECK_S)
        if now_s >= self.round_next_s:
            # Jobs in the lines never ran, so that they have waited at most since their submit.
            late = self.lines.heads_before(now_s - self.overdue_share.base_s())
            promoted = self.overdue_share.promote([*self.again.values(), *late], now_s)
            self._changed_classes.update(entry.job_class for entry in promoted)
            for entry in promoted:
                self.lines.invalidate_group(self.values.group(entry))
            due_s = now_s + OVERDUE_CHECK_S
            if knobs.allow_stops or knobs.allow_moves:
                self._round(order, now_s)
                due_s = min(due_s, self._prices_change_s(now_s))
                if self.table.events > self.fitted_events:
                    due_s = min(due_s, self.fitted_s + knobs.refit_s)
            if board.elastic and not board.decisions and self._all_blocked():
                due_s = min(due_s, self.growth.grow(now_s) or INFINITE)
            self.round_next_s = (now_s // knobs.round_s + 1.0) * knobs.round_s
            if not self.unfinished:
                return min(shield_s, max(self.round_next_s, -(-due_s // knobs.round_s) * knobs.round_s))
        return now_s + NEXT_PASS_S if self.unfinished else min(shield_s, self.round_next_s)

    def _all_blocked(self) -> bool:
        """Whether quotas and limits block all waiting jobs, so that they cannot use idle nodes."""
        waiting = [*self.lines.by_class, *dict.fromkeys(entry.job_class for entry in self.again.values())]
        return not any(self.board.admits(klass) for klass in waiting)

    def _prices_change_s(self, now_s: float) -> float:
        """When the prices that were used in this round change by time alone; unused prices need no wake-up."""
        asked = [prices for prices in self.prices.values() if prices.refreshed_s == now_s]
        if asked:
            self._refresh(now_s)
        return min((float(prices.expiry.min()) for prices in asked), default=INFINITE)

    def _order(self, now_s: float) -> Order:
        """Waiting jobs by priority, then value per GPU, best first; only the head of each line of jobs that never ran."""
        others: dict[JobClass, list[Line]] = {}  # jobs that ran before
        for entry in self.again.values():
            others.setdefault(entry.job_class, []).append(self._line(entry, now_s))
        order = []
        for klass, own in self.lines.by_class.items():
            own.sort(lambda group: self.table.index_of(group, now_s)[0])
            lines = others.pop(klass, [])
            lines += [self._line(entry, now_s) for entry in own.urgent]
            order.append(ClassOrder(klass, lines, own.heads, self.values.weight(klass)))
        return ordered([*order, *map(ClassOrder, others, others.values())])

    def _remaining_order(self, before: Order, now_s: float) -> Order:
        """The order of this pass without started jobs; only classes are looked at from which jobs started, or that they joined or moved up in."""
        changed: dict[JobClass, list[Line]] = {klass: [] for klass in self._changed_classes}
        order = []
        for one in before:
            if one.job_class in changed:
                changed[one.job_class] = one.lines()
            else:
                order.append(one)
        for klass, lines in changed.items():
            remaining = self._remaining_lines(klass, lines, now_s)
            if remaining:
                order.append(ClassOrder(klass, remaining))
        return ordered(order)

    def _remaining_lines(self, klass: JobClass, before: list[Line], now_s: float) -> list[Line]:
        lines: list[Line] = []
        seen: set[int] = set()
        for line in before:
            entry: JobEntry | None = line[-1]
            if entry is not None and entry.started_s >= 0.0:
                entry = self.lines.head(klass, self.values.group(entry))
            if entry is None or entry.seq in seen:
                continue
            seen.add(entry.seq)
            lines.append(line if entry is line[-1] and not entry.overdue else self._line(entry, now_s))
        for entry in self._stopped:
            if entry.job_class is klass and entry.seq in self.again and entry.seq not in seen:
                seen.add(entry.seq)
                lines.append(self._line(entry, now_s))
        lines.sort()
        return lines

    def _line(self, entry: JobEntry, now_s: float) -> Line:
        rank = URGENT_RANK + entry.lost_nodes if entry.overdue or entry.lost_nodes else entry.job_class.rank
        return (-rank, -self.values.value(entry, now_s) / max(1, entry.gpus), entry.submit_s, entry.seq, entry)

    def _fill(self, order: Order, now_s: float) -> None:
        """Start what fits, in order. Jobs within their quota come before jobs that would borrow: those would be stopped for them."""
        sweep = SweepResults(self.board)
        if self.board.quotas is not None and self.board.has_lendable_quota and self.board.free_total:
            self._start_fitting(order, sweep, now_s, by_right=self.board.quotas)
            order = self._remaining_order(order, now_s)
        self._start_fitting(order, sweep, now_s)

    def _start_fitting(
        self, order: Order, sweep: SweepResults, now_s: float, *, by_right: FairShareTree | None = None
    ) -> None:
        """Start what fits, in order. With `by_right` only jobs within their quota, and urgent ones."""
        lines = OrderedLines(order)
        for rank, _, _, _, entry in lines:
            klass = entry.job_class
            urgent = rank <= -URGENT_RANK
            while klass.number not in sweep.closed:
                if by_right is not None and not (urgent or by_right.is_entitled(klass.queue, klass.asked)):
                    lines.skip_class()
                    break
                if sweep.cannot_start(entry):
                    break
                found = self.board.find(entry)
                if found is None:
                    sweep.record_failure(entry)
                    if entry.lost_nodes and self.reserved.entry is None:
                        self.reserved.reserve(entry)  # before new jobs take the rest of its place
                    break
                ran_before = entry.seq in self.again
                self._start(entry, *found, now_s)
                following = None if ran_before else self.lines.head(klass, self.values.group(entry))
                if following is None:
                    break
                entry = following  # noqa: PLW2901  # the next of its class
            if klass.number in sweep.closed:
                lines.skip_class()

    def _start(self, entry: JobEntry, need: Need, places: tuple[tuple[int, int], ...], now_s: float) -> None:
        if self.again.pop(entry.seq, None) is None:
            self.lines.pop(entry.job_class, self.values.group(entry))
        self._changed_classes.add(entry.job_class)
        self.values.group(entry).add_running(entry.seq, entry)
        entry.protected_until_s = now_s + self.parameters.run_min_s
        entry.placed_s = now_s
        self.board.start(entry, need, places, now_s)

    def _refit(self, now_s: float) -> None:
        self.table.refit(
            (max(1, entry.gpus), entry.service_s(now_s))
            for group in (self.board.running, self.board.waiting)
            for entry in group.values()
        )
        self.fitted_s = now_s
        self.fitted_events = self.table.events
        self.lines.invalidate()
        for prices in self.prices.values():
            prices.invalidate()

    # ---------------------------------------------------------------- displacing jobs

    def _urgent(self, order: Order, now_s: float) -> None:
        """Handle what does not wait for a round: gangs that lost their place, and jobs with a right to devices in use."""
        board, quotas = self.board, self.board.quotas
        self.victims.protection_ends_s = INFINITE
        lowest = min(board.ranks, default=URGENT_RANK)
        borrowed = quotas is not None and board.has_lendable_quota
        if not borrowed and not board.elastic and -order[0].first[0] <= lowest:
            return
        tries = 0
        self.victims.examined = 0
        for _, _, _, _, entry in OrderedLines(order):
            klass = entry.job_class
            if entry.started_s >= 0.0:
                continue
            if tries >= ENTITLED_CLASSES_MAX or self.victims.examined > ENTITLED_VICTIMS_MAX:
                self.unfinished = True
                return
            had_reserve = entry is self.reserved.entry
            if had_reserve:
                self.reserved.release()  # its reserved nodes are free for it
            if board.elastic and board.admits(klass):
                tries += 1
                if self._apply(
                    self.victims.select_shrinks(entry, now_s), entry, StopReason.SHRINK, now_s
                ) and self._start_if_fits(entry, now_s):
                    continue
            if self._may_stop_by_right(entry, lowest):
                tries += 1
                found = self.victims.select_by_right(entry, now_s)
                if found is not None and self._apply(found, entry, StopReason.PRIORITY, now_s):
                    self._start_if_fits(entry, now_s)
                    self.unfinished = True  # of each line, a pass looks at the first job only
            if had_reserve and entry.started_s < 0.0:
                self.reserved.reserve(entry)

    def _start_if_fits(self, entry: JobEntry, now_s: float) -> bool:
        found = self.board.find(entry) if self.board.admits(entry.job_class) else None
        if found is None:
            return False
        self._start(entry, *found, now_s)
        return True

    def _round(self, before: Order, now_s: float) -> None:
        self.reserved.release()
        order = self._remaining_order(before, now_s)
        ranks = {one.job_class.rank for one in order}
        for rank in [rank for rank in self.prices if rank not in ranks]:
            del self.prices[rank]
        sweep = SweepResults(self.board)
        lines = OrderedLines(order)
        for line in lines:
            density, entry = line[1], line[-1]
            klass = entry.job_class
            while entry.started_s < 0.0 and klass.number not in sweep.closed and sweep.admits(klass):
                ran_before = entry.seq in self.again
                value = -density * max(1, entry.gpus)
                if not sweep.known_to_fail(entry) and self._start_if_fits(entry, now_s):
                    pass
                elif not sweep.known_to_displace_none(entry, value) and self._displace_by_value(entry, value, now_s):
                    sweep = SweepResults(self.board)
                    lines.resume_skipped(line)
                else:
                    sweep.record_failure(entry)
                    sweep.record_no_displacement(entry, value)
                    if (entry.overdue or entry.lost_nodes) and self.reserved.entry is None:
                        self.reserved.reserve(entry)
                    if not (entry.overdue or entry.lost_nodes or entry.avoided_nodes):
                        lines.skip_class()  # its other jobs fit nowhere either, and are worth less
                    break
                following = None if ran_before else self.lines.head(klass, self.values.group(entry))
                if following is None:
                    break
                entry = following
            if klass.number in sweep.closed:
                lines.skip_class()

    def _displace_by_value(self, entry: JobEntry, value: float, now_s: float) -> bool:
        if not any(need.gpus for need in entry.job_class.needs):
            return False  # jobs without whole devices displace others by right only
        prices = self._prices(entry.job_class.rank)
        self._refresh(now_s)
        knobs = self.parameters
        if knobs.allow_moves and self.board.free_total >= min(need.gpus for need in entry.job_class.needs):
            going = self.victims.select_moves(entry, prices, now_s)
            if self._apply(going, entry, StopReason.VALUE, now_s) and self._start_if_fits(entry, now_s):
                return True
        if knobs.allow_stops:
            because = (
                StopReason.REPAIR if entry.lost_nodes else StopReason.OVERDUE if entry.overdue else StopReason.VALUE
            )
            going = self.victims.select_by_value(entry, prices, now_s, value / knobs.hysteresis)
            if self._apply(going, entry, because, now_s) and self._start_if_fits(entry, now_s):
                return True
        return False

    def _apply(self, going: list[Eviction] | None, other: JobEntry, reason: StopReason, now_s: float) -> bool:
        if going is None:
            return False
        self.cleared = self.cleared or reason is not StopReason.VALUE
        for one in going:
            if one.need is not None:
                self.board.move(one.entry, one.need, one.places, now_s, other, one.reason or reason)
                one.entry.placed_s = now_s
            else:
                self.overdue_share.remove(one.entry)
                self.board.stop(one.entry, now_s, other, one.reason or reason)
                self._join(one.entry)
                self._changed_classes.add(one.entry.job_class)
                self._stopped.append(one.entry)
        return True

    def _prices(self, rank: int) -> DisplacementCosts:
        prices = self.prices.get(rank)
        if prices is None:
            prices = self.prices[rank] = DisplacementCosts(
                self.board,
                rank,
                self.values.price,
                move_times=self.move_times,
                stops_max=self.parameters.stops_max,
            )
        return prices

    def _refresh(self, now_s: float) -> None:
        for pool in self.board.pools:
            if pool.changed_nodes:
                for prices in self.prices.values():
                    prices.outdated_nodes |= pool.changed_nodes
                pool.changed_nodes.clear()
        for prices in self.prices.values():
            if prices.outdated_nodes or prices.refreshed_s != now_s:
                prices.refresh(now_s)

    # ---------------------------------------------------------------- explanations

    def movable_from_s(self, entry: JobEntry) -> float:
        """The time from which the scheduler itself may move the running job."""
        return self.move_times.from_s(entry)

    def later_moves(self, entry: JobEntry, now_s: float) -> list[tuple[JobEntry, float]]:
        """As in `Policy`: a search as in a round, but as if every job could move now. Cost: one row for each node; none on a large fleet."""
        board = self.board
        asked = min((need.gpus for need in entry.job_class.needs if need.gpus), default=0)
        if not asked or len(board.devices_of_node) > LATER_NODES_MAX:
            return []
        if board.elastic and board.admits(entry.job_class):
            shrinks = self.victims.select_shrinks(entry, INFINITE) or []
            waits = [(one.entry, at_s) for one in shrinks if (at_s := self.move_times.from_s(one.entry)) > now_s]
            if waits:
                return waits
        if not self.parameters.allow_moves or board.free_total < asked:
            return []
        rank = entry.job_class.rank
        prices = DisplacementCosts(
            board, rank, lambda *_: 0.0, move_times=MoveTimes(0.0, stays=False), stops_max=self.parameters.stops_max
        )
        prices.refresh(now_s)
        going = self.victims.select_moves(entry, prices, now_s) or []
        return [(one.entry, at_s) for one in going if (at_s := self.move_times.from_s(one.entry)) > now_s]

    def later_stops(self, entry: JobEntry, now_s: float) -> LaterStops:
        """As in `Policy`: the search by right at the ends of guaranteed runs. Cost: LATER_TRIES searches; none on a large fleet."""
        protected_s, victims = self.parameters.run_min_by_right_s, self.victims
        lowest = min(self.board.ranks, default=URGENT_RANK)
        if not self._may_stop_by_right(entry, lowest) or len(self.board.devices_of_node) > LATER_NODES_MAX:
            return NO_LATER_STOPS
        counted = victims.examined, victims.protection_ends_s
        due_s, found = now_s, None
        if entry is self.reserved.entry:  # its reserved nodes are free for it
            self.reserved.open()
        for tried in range(LATER_TRIES):
            victims.protection_ends_s = INFINITE
            found = victims.select_by_right(entry, due_s)
            if found is not None or victims.protection_ends_s == INFINITE:
                break
            due_s = victims.protection_ends_s if tried < LATER_TRIES - 2 else now_s + protected_s
        victims.examined, victims.protection_ends_s = counted
        if entry is self.reserved.entry:
            self.reserved.close()
        if not found or due_s == now_s:  # no room, or room in this pass
            return NO_LATER_STOPS
        return LaterStops(
            jobs=[one.entry for one in found], after_s=protected_s, reason=found[0].reason or StopReason.PRIORITY
        )

    def _may_stop_by_right(self, entry: JobEntry, lowest: int) -> bool:
        """Whether the waiting job may have a right to devices in use: it lost its place, is above the lowest rank, or owns lent quota."""
        board, klass = self.board, entry.job_class
        if not self.parameters.allow_stops:
            return False
        if entry.lost_nodes or klass.rank > lowest:
            return True
        quotas = board.quotas
        return quotas is not None and board.has_lendable_quota and quotas.is_entitled(klass.queue, klass.asked)
