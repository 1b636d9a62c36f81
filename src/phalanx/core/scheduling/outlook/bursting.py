"""Whether a waiting job rents nodes: the wait here against the price there, by the rule of its queue or project. And when such a job comes home.

One side is the expected start on the fleet as it is (`Forecast`, with medians). The other is the start on nodes of pools: they boot, and the
job's data is copied. The price there is

    nodes x price x (boot + copy + rest of the run) + egress x (data + the checkpoint, there and back)

with the median run time of similar jobs, or the time limit if too few have ended. Node-hours that a provider bills as a whole are rounded up.

Nodes that are there keep off jobs whose run would cost too much by the rule, and those that never rent.

A job that runs there comes home if its whole gang fits on free nodes of the own fleet that no waiting job could take, and if the rest of its
run there costs more than the restart: the work that it repeats, at the price of the nodes, and the egress of its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from phalanx.core.fleet.node_pool import HOUR_S, NodePool, node_price_per_h, priced_nodes
from phalanx.core.ids import JobId, NodeId, PoolId, ProjectId, QueueId
from phalanx.core.months import month_of
from phalanx.core.scheduling.board_builder import ClusterSnapshot
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.estimates.run_time_prediction import RunTimePredictor, traits_of
from phalanx.core.scheduling.node_bitsets import bitset_of
from phalanx.core.scheduling.outlook.forecast import NEVER, Forecast
from phalanx.core.scheduling.outlook.what_if import Trial
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.plan import Plan
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.units import format_duration
from phalanx.core.work.burst_rule import BurstRule
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.data_sources import staged_keys
from phalanx.core.work.queue import Project, Queue, burst_rule
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.states import AttemptState

FORECAST_EVERY_S: Final = 10.0  # between two forecasts of the line, at least
NEW_JOB_SHARE: Final = 0.1  # of that time, for a job that the newest forecast does not have
NODES_PER_S: Final = 500  # a larger fleet is forecast less often: 12,500 nodes every 25 s
HOME_MAX: Final = 4  # jobs that come home at once: each frees nodes for the next look
BUDGET_SPENT_PERCENT: Final = 100
_GB: Final = 1e9
_REST_MIN_S: Final = 60.0  # of a job that has run longer than expected


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstChoice:
    """Both sides for one waiting job, and what its rule chose. Times in seconds from now, prices in US dollars.

    Attributes:
        pools: of the nodes that it would order, with their number.
        here_s: expected start on the fleet as it is; infinite if it cannot run there, None if unknown.
        waited_s: how long it has waited.
        there_s: its start there; `boot_known`: the boot time is in it.
        run_s: rest of its run; None if unknown.
        price: of its run there; None if the run time is unknown. `per_h`: of the nodes.
        refusal: the condition that refuses it; empty if it rents.
    """

    pools: tuple[tuple[str, int], ...]
    rule: BurstRule
    here_s: float | None
    waited_s: float
    there_s: float
    boot_known: bool
    run_s: float | None
    price: float | None
    per_h: float
    refusal: str

    @property
    def rents(self) -> bool:
        """Whether it orders the nodes."""
        return not self.refusal

    @property
    def here_text(self) -> str:
        """The side of the own fleet."""
        if self.here_s is None:
            return f"here at an unknown time (it has waited {format_duration(self.waited_s)}), free"
        if self.here_s == NEVER:
            return "here never"
        return f"here in about {format_duration(self.here_s)}, free"

    @property
    def there_text(self) -> str:
        """The side of the pools."""
        names = ", ".join(f"{count} x {name}" for name, count in self.pools)
        when = f"in about {format_duration(self.there_s)}" if self.boot_known else "once it has booted"
        cost = f"${self.per_h:,.2f} an hour, its run time unknown" if self.price is None else f"${self.price:,.2f}"
        return f"there ({names}) {when}, {cost}"

    @property
    def text(self) -> str:
        """Both sides and the choice."""
        failed = "" if self.rents else f"; {self.refusal} does not hold"
        where = "there" if self.rents else "here"
        return f"{self.here_text}; {self.there_text}: chosen {where} (burst {self.rule}{failed})"


class BurstRules:
    """The rules of a head's queues and projects, with the newest forecast and the newest choice for each waiting job.

    Args:
        predictor: of run times, with all that is known by now.
        projects: by id, with their rules; one that has spent its budget of the month rents nothing.
    """

    def __init__(
        self, predictor: Callable[[], RunTimePredictor], projects: Callable[[], Mapping[ProjectId, Project]] = dict
    ) -> None:
        self._predictor, self.projects = predictor, projects
        self._starts_s: dict[JobId, float] = {}
        self._forecast_s = -NEVER
        self.choices: dict[JobId, BurstChoice] = {}

    def judge(self, scheduler: Scheduler, cluster: ClusterSnapshot, now_s: float, wall_s: float) -> BurstJudge | None:
        """As in `OrderRules`."""
        ruled = any(queue.burst is not None for queue in cluster.queues.values())
        if not ruled and all(one.budget is None and one.burst is None for one in self.projects().values()):
            self.choices = {}
            return None
        self.choices = {job_id: one for job_id, one in self.choices.items() if _waits(scheduler, job_id)}
        return BurstJudge(self, scheduler, cluster, now_s, wall_s)

    def start_s(
        self, job_id: JobId, scheduler: Scheduler, cluster: ClusterSnapshot, now_s: float, wall_s: float
    ) -> float | None:
        """Expected start of a job in line, by the scheduler's clock; NEVER if unknown, None if it came after the newest forecast."""
        period_s = max(FORECAST_EVERY_S, len(cluster.nodes) / NODES_PER_S)
        if job_id not in self._starts_s:
            period_s *= NEW_JOB_SHARE
        if not self._forecast_s <= now_s < self._forecast_s + period_s:
            forecast = Forecast(_trial(scheduler, cluster, wall_s), self.predictor(), expected=True)
            self._starts_s = {one: now_s + start_s for one, start_s in forecast.line_starts_s().items()}
            self._forecast_s = now_s
        return self._starts_s.get(job_id)

    def predictor(self) -> RunTimePredictor:
        """Of run times."""
        return self._predictor()

    def rule_of(self, job: Job, queues: Mapping[QueueId, Queue]) -> BurstRule | None:
        """The rule of the job's queue, or of one above it; else of its project; None for none."""
        rule = burst_rule(queues, job.queue)
        project = self.projects().get(job.project) if rule is None else None
        return rule if project is None else project.burst

    def keeps_off(self, job: Job, pool: NodePool, queues: Mapping[QueueId, Queue]) -> bool:
        """As in `OrderRules`: the rule is `never`, or the price of its run there is not below the one in the rule. The wait does not count."""
        rule = self.rule_of(job, queues)
        if rule is None or pool.price_per_h <= 0.0 or not (rule.never or rule.price is not None):
            return False
        rest_s = _rest_s(self.predictor(), job, max(0.0, job.attained_s))
        if rest_s is None:
            return True
        devices = max(1, len(pool.template.devices))
        gpus = job.spec.role.milli / MILLI_PER_DEVICE
        nodes = max(1, math.ceil(gpus / devices))
        price = nodes * pool.price_per_h * pool.paid_s(rest_s) / HOUR_S
        price += pool.egress_per_gb * 2 * _checkpoint_bytes(job) / _GB
        return bool(rule.refusal(NEVER, price, nodes * devices * rest_s / HOUR_S))

    def send_home(
        self, scheduler: Scheduler, cluster: ClusterSnapshot, now_s: float, wall_s: float
    ) -> dict[JobId, str]:
        """As in `OrderRules`."""
        board = scheduler.board
        rented = bitset_of(
            number
            for name in priced_nodes(cluster.node_pools, cluster.pool_nodes)
            for number in scheduler.fleet_index.numbers_of_node.get(name, ())
        )
        moved: dict[JobId, str] = {}
        found = [entry for entry in board.running.values() if any(rented >> number & 1 for number, _ in entry.places)]
        for entry in sorted(found, key=lambda entry: entry.seq):
            job_id = scheduler.job_id_by_seq[entry.seq]
            attempt = cluster.attempts.get(job_id)
            settled = attempt is not None and attempt.state is AttemptState.RUNNING and entry.started_s >= 0.0
            if not settled or entry.never_stopped or job_id in scheduler.pending_placements:
                continue
            if now_s < scheduler.policy.movable_from_s(entry):
                continue
            own = board.find(entry, rented)
            if own is None or _is_awaited(scheduler, own[0].kinds) or not board.admits_moves([(entry, own[0])]):
                continue
            why = self._saving(scheduler, cluster, entry, now_s, wall_s)
            if why:
                board.move(entry, *own, now_s, None, StopReason.HOME)
                entry.placed_s = now_s
                moved[job_id] = why
            if len(moved) >= HOME_MAX:
                break
        return moved

    def _saving(
        self, scheduler: Scheduler, cluster: ClusterSnapshot, entry: JobEntry, now_s: float, wall_s: float
    ) -> str:
        """What leaving its rented nodes saves beyond the restart; empty if it saves nothing."""
        job = cluster.jobs[scheduler.job_id_by_seq[entry.seq]]
        ran_s = max(0.0, job.attained_s) + max(0.0, now_s - entry.started_s)
        rest_s = _rest_s(self.predictor(), job, ran_s)
        rest_s = ran_s if rest_s is None else rest_s  # unknown: as long again as it has run
        lost_s = scheduler.board.restart_cost_s + entry.unsaved_s(now_s)
        saved = cost = egress_per_gb = 0.0
        for node in {scheduler.fleet_index.nodes[number].id for number, _ in entry.places}:
            member = cluster.pool_nodes.get(node)
            pool = None if member is None else cluster.node_pools.get(member.pool)
            if member is None or pool is None:
                continue
            used_s = max(0.0, wall_s - (member.machine_since_s or member.requested_s))
            price_per_h = node_price_per_h(member, pool)
            saved += price_per_h * (pool.paid_s(used_s + rest_s) - pool.paid_s(used_s)) / HOUR_S
            cost += price_per_h * lost_s / HOUR_S
            egress_per_gb = max(egress_per_gb, pool.egress_per_gb)
        cost += egress_per_gb * _checkpoint_bytes(job) / _GB
        if saved <= cost:
            return ""
        return f"own nodes are free: the rest of its run would cost ${saved:,.2f}, the restart ${cost:,.2f}"


class BurstJudge:
    """Judges the orders of one state."""

    def __init__(
        self, rules: BurstRules, scheduler: Scheduler, cluster: ClusterSnapshot, now_s: float, wall_s: float
    ) -> None:
        self._rules, self._scheduler, self._cluster = rules, scheduler, cluster
        self._now_s, self._wall_s = now_s, wall_s
        self._refusals: dict[JobId, str] = {}
        self._with_nodes: dict[PoolId, set[NodeId]] = {}
        for member in cluster.pool_nodes.values():
            if member.pool in cluster.node_pools:
                self._with_nodes.setdefault(member.pool, set()).add(member.id)

    def admits(self, job: Job, pools: Sequence[NodePool]) -> bool:
        """As in `OrderJudge`. Nodes without a price, and jobs without a rule, need no leave."""
        rule = self._rules.rule_of(job, self._cluster.queues)
        priced = [pool for pool in pools if pool.price_per_h > 0.0]
        if not priced:
            return True
        project = self._rules.projects().get(job.project)
        if project is not None and project.budget is not None and _has_spent(project, self._wall_s):
            self._refusals[job.id] = f"project {project.id} has spent its budget of {project.budget}: it rents no node"
            return False
        if rule is None:
            return True
        if rule.never:
            self._refusals[job.id] = f"its queue or project rents nothing (burst {rule})"
            return False
        entry = self._scheduler.entries.get(job.id)
        here_s: float | None = NEVER  # no own node can hold it
        if entry is not None:
            start_s = self._rules.start_s(job.id, self._scheduler, self._cluster, self._now_s, self._wall_s)
            if start_s is None:
                return False  # it came after the newest forecast
            here_s = None if start_s == NEVER else max(0.0, start_s - self._now_s)
        waits_from_s = self._now_s if entry is None else entry.waiting_since_s
        choice = burst_choice(
            self._cluster,
            job,
            rule,
            priced,
            here_s=here_s,
            waited_s=max(0.0, self._now_s - waits_from_s),
            predictor=self._rules.predictor(),
            now_s=self._wall_s,
        )
        self._rules.choices[job.id] = choice
        return choice.rents

    def keeps_off(self, job: Job) -> frozenset[NodeId]:
        """As in `OrderJudge`."""
        closed = [
            names
            for pool, names in self._with_nodes.items()
            if self._rules.keeps_off(job, self._cluster.node_pools[pool], self._cluster.queues)
        ]
        return frozenset().union(*closed)

    def text_of(self, job_id: JobId) -> str:
        """As in `OrderJudge`."""
        choice = self._rules.choices.get(job_id)
        return self._refusals.get(job_id) or ("" if choice is None else choice.text)


def burst_choice(
    cluster: ClusterSnapshot,
    job: Job,
    rule: BurstRule,
    pools: Sequence[NodePool],
    *,
    here_s: float | None,
    waited_s: float,
    predictor: RunTimePredictor,
    now_s: float,
) -> BurstChoice:
    """Both sides for a job that needs one node of each of these pools, which may repeat, and the choice of the rule.

    An unknown start here counts as one that is as far ahead as the job has waited already. Arguments as in `BurstChoice`.
    """
    size_bytes, copy_s = _staging(cluster, job)
    boot_s = max(pool.boot_s for pool in pools)
    there_s = boot_s + copy_s
    rest_s = _rest_s(predictor, job, max(0.0, job.attained_s))
    egress = max(pool.egress_per_gb for pool in pools) * (size_bytes + 2 * _checkpoint_bytes(job)) / _GB
    prices = {pool.id: offer_price_per_h(pool, now_s) for pool in pools}
    price, gpu_h = None, 0.0
    if rest_s is not None:
        paid_s = [pool.paid_s(pool.boot_s + copy_s + rest_s) for pool in pools]
        price = egress + sum(prices[pool.id] * each_s / HOUR_S for pool, each_s in zip(pools, paid_s, strict=True))
        gpu_h = sum(len(pool.template.devices) for pool in pools) * rest_s / HOUR_S
    return BurstChoice(
        pools=tuple(sorted({str(pool.id): sum(one is pool for one in pools) for pool in pools}.items())),
        rule=rule,
        here_s=here_s,
        waited_s=waited_s,
        there_s=there_s,
        boot_known=all(pool.boot_s > 0.0 for pool in pools),
        run_s=rest_s,
        price=price,
        per_h=sum(prices[pool.id] for pool in pools),
        refusal=rule.refusal((waited_s if here_s is None else here_s) - there_s, price, gpu_h),
    )


def offer_price_per_h(pool: NodePool, now_s: float) -> float:
    """What the next node of the pool costs an hour, in US dollars: by the first offer that was not refused of late."""
    offer = next((one for one in pool.offers if not pool.refused_until_s(one, now_s)), None)
    return pool.price_per_h if offer is None else offer.price_per_h


def _has_spent(project: Project, now_s: float) -> bool:
    """Whether the budget of this month is spent, as the head's watch of budgets has recorded it."""
    known = project.budget_warned
    return known is not None and known.month == month_of(now_s) and known.percent >= BUDGET_SPENT_PERCENT


def _waits(scheduler: Scheduler, job_id: JobId) -> bool:
    entry = scheduler.entries.get(job_id)
    return job_id in scheduler.ineligible if entry is None else entry.started_s < 0.0


def _trial(scheduler: Scheduler, cluster: ClusterSnapshot, wall_s: float) -> Trial:
    """The live scheduler, as a forecast reads a trial. Nothing of it is changed."""
    seen = Snapshot(
        version=cluster.version,
        now_s=wall_s,
        nodes=cluster.nodes,
        usage=cluster.usage,
        queues=cluster.queues,
        reservations=cluster.reservations,
        attempts=cluster.attempts,
        jobs=cluster.jobs,
    )
    return Trial(snapshot=seen, scheduler=scheduler, plan=Plan(version=cluster.version, placements=(), waits={}))


def _rest_s(predictor: RunTimePredictor, job: Job, ran_s: float) -> float | None:
    """How long the job still runs; None if unknown."""
    limit_s = job.spec.time_limit_s
    run_max_s = None if limit_s is None else max(ran_s, job.attained_s + limit_s)
    run_s = predictor.predict(traits_of(job), ran_s=ran_s, run_max_s=run_max_s).p50_s
    return None if run_s is None else max(_REST_MIN_S, run_s - ran_s)


def _staging(cluster: ClusterSnapshot, job: Job) -> tuple[int, float]:
    """The size of the job's datasets and how long a node copies them, as far as nodes have copies; in bytes and seconds."""
    keys = staged_keys(job.spec.data, job.spec.data_mode)
    size_bytes, copy_s = 0, 0.0
    for key in keys:
        copies = [one for node in cluster.nodes.values() for one in node.datasets if one.key == key]
        largest = max((one.size_bytes for one in copies), default=0)
        rates = [one.bytes_per_s for one in copies if one.bytes_per_s > 0.0]
        size_bytes += largest
        copy_s += largest / median(rates) if rates else 0.0
    return size_bytes, copy_s


def _checkpoint_bytes(job: Job) -> int:
    return job.checkpoints[-1].bytes if job.checkpoints else 0


def _is_awaited(scheduler: Scheduler, kinds: Iterable[int]) -> bool:
    """Whether a waiting job that quotas admit could use nodes of these kinds: it goes first."""
    board, wanted = scheduler.board, set(kinds)
    classes = {entry.job_class.number: entry.job_class for entry in board.waiting.values()}
    return any(
        not wanted.isdisjoint(kind for need in klass.needs for kind in need.kinds) and board.admits(klass)
        for klass in classes.values()
    )
