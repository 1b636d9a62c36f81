"""The persistent index that a policy decides on: running jobs, waiting jobs, free capacity. Changes in, decisions out.

The controller and the simulator keep one board each and report changes to it (arrived, ended, node left, node back); a policy's `decide`
calls `start`, `stop` and `move`, which change the board at once and record the decision. The board is the *planned* state: a job that is
being stopped is no longer on it, though its processes may still be saving. The owner of the board carries the decisions out, or reverts
the ones that the newest state rejects (`undo_start`). Nothing is rebuilt per cycle: the cost of a pass is proportional to the changes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from phalanx.core.fleet.topology import TopologyTree
from phalanx.core.resources import NO_RESOURCES
from phalanx.core.scheduling.board_records import (
    NEVER_S,
    ArrayThrottle,
    BoardListener,
    Decision,
    DecisionKind,
    JobClass,
    JobEntry,
    StopReason,
)
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_capacity import NodeCapacity, demand_of
from phalanx.core.scheduling.pool import DevicePool, SharePosition
from phalanx.core.scheduling.quota import FairShareTree
from phalanx.core.scheduling.sharing.fragmentation import FragmentationIndex
from phalanx.core.work.quotas.quota_dimension import QuotaRefusal

_NO_LISTENER: Final = BoardListener()


class Board(NodeCapacity):
    """Jobs and capacity of one fleet.

    Attributes:
        restart_cost_s: work that a preemption or a move costs the job: its restart and unsaved progress.
        waiting, running: by seq.
        jobs_on_node: entries with devices on each node.
        ranks: number of running entries of each rank.
        running_by_queue: running entries by queue and rank, then by seq: all of a group are preemptible by the same jobs.
        elastic: number of running jobs that may have more nodes than their minimum.
        uneven_speeds: running jobs whose speed depends on the kind of device, by seq.
        data_nodes: bitset of the nodes that have a copy of a dataset, by its key.
        last_choice_nodes: bitset of nodes that are slow or fail gangs: used only if nothing else fits.
        has_lendable_quota: some queue has a quota that others may borrow.
    """

    __slots__ = (
        "_classes",
        "_listener",
        "data_nodes",
        "decisions",
        "elastic",
        "has_lendable_quota",
        "jobs_on_node",
        "last_choice_nodes",
        "quotas",
        "ranks",
        "restart_cost_s",
        "running",
        "running_by_queue",
        "uneven_speeds",
        "waiting",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        restart_cost_s: float = 60.0,
        pools: Sequence[DevicePool] = (),
        pool_of_node: Sequence[int] = (),
        quotas: FairShareTree | None = None,
        cpus: list[int] | None = None,
        memory: list[int] | None = None,
        extras: Mapping[str, list[int]] | None = None,
        licences: Mapping[str, int] | None = None,
        twins: dict[int, tuple[int, ...]] | None = None,
        tree: TopologyTree | None = None,
        has_lendable_quota: bool = False,
    ) -> None:
        super().__init__(
            sizes,
            pools=pools,
            pool_of_node=pool_of_node,
            cpus=cpus,
            memory=memory,
            extras=extras,
            licences=licences,
            twins=twins,
            tree=tree,
        )
        self.quotas = quotas
        self.has_lendable_quota = has_lendable_quota
        self.restart_cost_s = restart_cost_s
        self.waiting: dict[int, JobEntry] = {}
        self.running: dict[int, JobEntry] = {}
        self.jobs_on_node: list[list[JobEntry]] = [[] for _ in sizes]
        self.ranks: Counter[int] = Counter()
        self.running_by_queue: dict[tuple[int, int], dict[int, JobEntry]] = {}
        self.elastic = 0
        self.uneven_speeds: dict[int, JobEntry] = {}
        self.decisions: list[Decision] = []
        self.last_choice_nodes = 0
        self.data_nodes: Mapping[str, int] = {}
        self._listener: BoardListener = _NO_LISTENER
        self._classes: dict[tuple[object, ...], JobClass] = {}

    def attach_listener(self, listener: BoardListener) -> None:
        """Report every later change to `listener`. The caller owns it; a strong reference here would make the boards of trials reference cycles."""
        self._listener = weakref.proxy(listener)

    def job_class(
        self,
        needs: tuple[Need, ...],
        *,
        label: int = 0,
        rank: int = 0,
        queue: int = 0,
        user: str = "",
        excluded: int = 0,
        throttle: ArrayThrottle | None = None,
        speeds: tuple[float, ...] = (),
        guessed_kinds: frozenset[int] = frozenset(),
        min_stay_s: float | None = None,
    ) -> JobClass:
        """The class of such jobs; the same object for equal arguments."""
        key = (needs, label, rank, queue, user, excluded, id(throttle), speeds, guessed_kinds, min_stay_s)
        found = self._classes.get(key)
        if found is None:
            found = JobClass(
                number=len(self._classes),
                needs=needs,
                gpus=_gpus_of(needs[0]),
                asked=min(need.resources for need in needs),
                label=label,
                rank=rank,
                queue=queue,
                user=user,
                excluded=excluded,
                throttle=throttle,
                speeds=speeds,
                guessed_kinds=guessed_kinds,
                may_move=len({speeds[kind] for kind in _kinds_of(needs) - guessed_kinds}) > 1 if speeds else False,
                uneven_needs=self._are_uneven(needs),
                licences=needs[0].licences,
                min_stay_s=min_stay_s,
            )
            self._classes[key] = found
            if self.fragmentation is None and any(need.share_milli and not need.mig_profile for need in needs):
                self._begin_scoring()
        return found

    def _are_uneven(self, needs: tuple[Need, ...]) -> bool:
        """Whether quotas may admit only some of the needs."""
        if self.quotas is not None and self.quotas.others:
            return any(need.resources != needs[0].resources for need in needs)
        return any(need.milli != needs[0].milli for need in needs)

    # ---------------------------------------------------------------- queries

    def kind_of(self, entry: JobEntry) -> int:
        """The kind of device that a running job has; 0 if its nodes are gone."""
        return self.pool_of_node[entry.places[0][0]] if entry.places else 0

    def admits(self, job_class: JobClass) -> bool:
        """Whether quotas, limits and licences allow one more job of the class to start now."""
        if job_class.licences and self.lacking_licence(job_class.licences):
            return False
        return self.limits_admit(job_class)

    def limits_admit(self, job_class: JobClass) -> bool:
        """Whether quotas and limits allow one more job of the class to start now, whatever the licences."""
        throttle = job_class.throttle
        if throttle is not None and throttle.running >= throttle.running_max:
            return False
        return self.refusal_of(job_class) is None

    def refusal_of(self, job_class: JobClass) -> QuotaRefusal | None:
        """Why quotas refuse every need of the class; None if they admit one. Of several, one that may pass comes first."""
        if self.quotas is None:
            return None
        if not job_class.uneven_needs:
            return self.quotas.check_admission(job_class.queue, job_class.user, job_class.asked)
        found: list[QuotaRefusal] = []
        for need in job_class.needs:
            refusal = self.quotas.check_admission(job_class.queue, job_class.user, need.resources)
            if refusal is None:
                return None
            found.append(refusal)
        return next((one for one in found if one.may_pass), found[0])

    def admits_moves(self, moves: Sequence[tuple[JobEntry, Need]]) -> bool:
        """Whether quotas allow these running jobs to hold what these needs take instead, all at once."""
        quotas = self.quotas
        if quotas is None or not any(entry.job_class.uneven_needs for entry, _ in moves):
            return True
        for entry, _ in moves:
            quotas.remove_running(entry.job_class.queue, entry.job_class.user, entry.held)
        taken: list[tuple[JobClass, Need]] = []
        for entry, need in moves:
            klass = entry.job_class
            if quotas.check_admission(klass.queue, klass.user, need.resources) is not None:
                break
            quotas.add_running(klass.queue, klass.user, need.resources)
            taken.append((klass, need))
        for klass, need in taken:
            quotas.remove_running(klass.queue, klass.user, need.resources)
        for entry, _ in moves:
            quotas.add_running(entry.job_class.queue, entry.job_class.user, entry.held)
        return len(taken) == len(moves)

    def admits_need(self, job_class: JobClass, need: Need) -> bool:
        """Whether quotas allow this need of a class that `admits` allows to start: a larger alternative may exceed them."""
        if self.quotas is None or not job_class.uneven_needs:
            return True
        return self.quotas.check_admission(job_class.queue, job_class.user, need.resources) is None

    def whole_holders(self, node: int) -> list[tuple[tuple[JobEntry, ...], int]]:
        """The jobs on the node that free whole devices by leaving, with the number: each alone, or all that share one device together."""
        if node not in self.pools[self.pool_of_node[node]].shared.on_node:
            return [((entry,), entry.devices_on(node)) for entry in self.jobs_on_node[node]]
        found: list[tuple[tuple[JobEntry, ...], int]] = []
        sharing: dict[int, list[JobEntry]] = {}
        for entry in self.jobs_on_node[node]:
            if not entry.shared_devices:
                found.append(((entry,), entry.devices_on(node)))
                continue
            device = next(one for (at, _), one in zip(entry.places, entry.shared_devices, strict=True) if at == node)
            sharing.setdefault(id(device), []).append(entry)
        return [*found, *((tuple(entries), 1) for entries in sharing.values())]

    # ---------------------------------------------------------------- search

    def find(self, entry: JobEntry, excluded: int = 0) -> tuple[Need, Places] | None:
        """The placement of the first need that fits now and that quotas allow; nodes to avoid are used only if nothing else fits."""
        klass = entry.job_class
        best: tuple[Need, Places] | None = None
        for need in klass.needs:
            if klass.uneven_needs and not self.admits_need(klass, need):
                continue
            avoided = entry.avoided_nodes | self.last_choice_nodes
            if entry.data and (places := self._find_beside_data(entry, need, klass.excluded | excluded | avoided)):
                return best or (need, places)
            for closed in (klass.excluded | excluded | avoided, klass.excluded | excluded):
                places = self.find_need(need, closed)
                if places is not None:
                    if need.nodes_max <= need.nodes:
                        return best or (need, places)
                    wide = self._widest(klass, need, places, closed)
                    if not klass.speeds:
                        return wide
                    if best is None or self.work_rate(entry, *wide) > self.work_rate(entry, *best):
                        best = wide  # another model may be slower, but have room for more nodes
                    break
                if not avoided:
                    break
        return best

    def _find_beside_data(self, entry: JobEntry, need: Need, excluded: int) -> Places | None:
        """Where the need fits on nodes that all have a copy of the job's data; None if nowhere, or if something else matters more.

        A gang in a fleet with a topology is placed close together instead: its data is copied once, and its steps cross the network always.
        """
        if need.nodes_max > need.nodes or need.others or (need.nodes > 1 and self.tree is not None):
            return None
        holders = -1
        for key in entry.data:
            holders &= self.data_nodes.get(key, 0)
        if not holders:
            return None
        return self.find_need(need, excluded | (((1 << len(self.pool_of_node)) - 1) & ~holders))

    def work_rate(self, entry: JobEntry, need: Need, places: Places) -> float:
        """The speed of the whole job on these places: devices, times its speed on their model where that is known."""
        return need.devices * len(places) * entry.speed_on(self.pool_of_node[places[0][0]])

    def _widest(self, job_class: JobClass, need: Need, places: Places, excluded: int) -> tuple[Need, Places]:
        """Widen an elastic job to as many nodes as are free, up to its maximum and its queue's limits."""
        best = (need, places)
        for nodes in range(need.nodes + 1, need.nodes_max + 1):
            wider = replace(need, nodes=nodes)
            if (
                self.quotas is not None
                and self.quotas.check_admission(job_class.queue, job_class.user, wider.resources) is not None
            ):
                break
            found = self.find_need(wider, excluded)
            if found is None:
                break
            best = (wider, found)
        return best

    # ---------------------------------------------------------------- events

    def add_waiting(self, entry: JobEntry) -> None:
        """A job waits since its submit."""
        entry.waiting_since_s = entry.submit_s
        self.waiting[entry.seq] = entry
        self._observe(entry)
        self._listener.on_waiting(entry)

    def add_running(
        self,
        entry: JobEntry,
        need: Need,
        places: Places,
        since_s: float,
        indices: Sequence[SharePosition] = (),
    ) -> None:
        """A job was already running when this board was built. `indices`: of the devices that it shares, or its slices, by place."""
        entry.started_s = entry.placed_s = since_s
        self.running[entry.seq] = entry
        self._hold(entry, need, places, indices)
        self._observe(entry)
        self._listener.on_adopted(entry)

    def withdraw(self, entries: Sequence[JobEntry]) -> None:
        """Remove these waiting jobs."""
        for entry in entries:
            del self.waiting[entry.seq]
        self._listener.on_withdrawn(entries)

    def change_classes(self, changed: Sequence[tuple[JobEntry, JobClass]]) -> None:
        """Move these waiting jobs to other classes; their waiting times are kept."""
        self.withdraw([entry for entry, _ in changed])
        for entry, klass in changed:
            entry.job_class, entry.gpus, entry.similar_jobs = klass, klass.gpus, None
            waits_from_s = entry.waiting_since_s
            self.add_waiting(entry)
            entry.waiting_since_s = waits_from_s

    def change_speeds(self, entry: JobEntry, other: JobClass) -> None:
        """The running job has the needs and speeds of this class from now on; the rest of its class stays."""
        own = entry.job_class
        klass = self.job_class(
            other.needs,
            label=own.label,
            rank=own.rank,
            queue=own.queue,
            user=own.user,
            excluded=own.excluded,
            throttle=own.throttle,
            speeds=other.speeds,
            guessed_kinds=other.guessed_kinds,
        )
        entry.job_class = klass
        self.uneven_speeds.pop(entry.seq, None)
        if klass.may_move:
            self.uneven_speeds[entry.seq] = entry

    def finish(self, entry: JobEntry, now_s: float, *, learn: bool = True) -> None:
        """A running job ended; with `learn` by itself, so that its run time says something of the next."""
        del self.running[entry.seq]
        if learn:
            self._listener.on_ended(entry, now_s)
        else:
            self._listener.on_stopped(entry, now_s)
        self._release(entry)

    def requeue_lost(self, entry: JobEntry, now_s: float, attained_s: float) -> None:
        """A running job stopped without a decision of the policy (a node died, a user requeued it): it waits again."""
        del self.running[entry.seq]
        self._listener.on_stopped(entry, now_s)
        self._release(entry)
        entry.service_max_s = max(entry.service_max_s, entry.service_s(now_s))
        entry.attained_s = attained_s
        entry.started_s = NEVER_S
        entry.waiting_since_s = now_s
        self.waiting[entry.seq] = entry
        self._listener.on_waiting(entry)

    def undo_start(self, entry: JobEntry, now_s: float) -> None:
        """The start cannot be carried out: the job waits as before."""
        del self.running[entry.seq]
        self._listener.on_stopped(entry, now_s)
        self._release(entry)
        entry.started_s = NEVER_S
        self.waiting[entry.seq] = entry
        self._listener.on_waiting(entry)

    # ---------------------------------------------------------------- decisions

    def start(self, entry: JobEntry, need: Need, places: Places, now_s: float) -> None:
        """Decide a start. The policy removes the entry from its own order."""
        del self.waiting[entry.seq]
        self.running[entry.seq] = entry
        entry.started_s = now_s
        entry.lost_nodes = False
        self._hold(entry, need, places)
        self.decisions.append(Decision(DecisionKind.START, entry, places))

    def stop(
        self, entry: JobEntry, now_s: float, other: JobEntry | None = None, reason: StopReason | None = None
    ) -> None:
        """Decide a preemption: the job loses its devices and the restart cost, and waits again."""
        del self.running[entry.seq]
        entry.attained_s += now_s - entry.started_s - self.restart_cost_s
        entry.service_max_s = max(entry.service_max_s, entry.attained_s)
        entry.attained_s -= entry.unsaved_s(now_s)
        entry.started_s = NEVER_S
        entry.waiting_since_s = now_s
        entry.stops += 1
        self._release(entry)
        self.waiting[entry.seq] = entry
        self.decisions.append(Decision(DecisionKind.STOP, entry, (), other, reason))

    def move(
        self,
        entry: JobEntry,
        need: Need,
        places: Places,
        now_s: float,
        other: JobEntry | None = None,
        reason: StopReason | None = None,
    ) -> None:
        """Decide a move: the job continues elsewhere and loses the restart cost."""
        entry.attained_s -= self.restart_cost_s
        entry.service_max_s = max(entry.service_max_s, entry.service_s(now_s))
        entry.attained_s -= entry.unsaved_s(now_s)
        entry.moves += 1
        before = entry.speed_on(self.kind_of(entry))
        self._release(entry)
        self._hold(entry, need, places)
        speedup = entry.speed_on(self.kind_of(entry)) / before
        self.decisions.append(Decision(DecisionKind.MOVE, entry, places, other, reason, speedup))

    def take_decisions(self) -> list[Decision]:
        """Return the decisions since the last call."""
        taken = self.decisions
        self.decisions = []
        return taken

    # ---------------------------------------------------------------- trials

    def free_devices(self, entry: JobEntry) -> None:
        """Free the entry's devices for a trial; `retake_devices` reverts it."""
        self.vacate(entry.need, entry.places, entry.shared_devices)

    def retake_devices(self, entry: JobEntry) -> None:
        """Revert `free_devices`."""
        self.occupy(entry.need, entry.places, entry.shared_devices)

    def can_retake(self, entry: JobEntry) -> bool:
        """Whether the devices that `free_devices` freed are still free."""
        need = entry.need
        if entry.shared_devices and need is not None:
            pool = self.pools[self.pool_of_node[entry.places[0][0]]]
            held = zip(entry.places, entry.shared_devices, strict=True)
            return all(pool.can_hold(need, node, one) for (node, _), one in held)
        return all(self.pools[self.pool_of_node[node]].free[node] >= count for node, count in entry.places)

    # ---------------------------------------------------------------- use

    def _hold(
        self,
        entry: JobEntry,
        need: Need,
        places: Places,
        indices: Sequence[SharePosition] = (),
    ) -> None:
        entry.places = places
        entry.need = need
        entry.held = entry.resources_on(need, places)
        if entry.job_class.uneven_needs:
            entry.gpus = _gpus_of(need)
        entry.shared_devices = self.occupy(need, places, indices=indices)
        for node, _ in places:
            self.jobs_on_node[node].append(entry)
        klass = entry.job_class
        if self.quotas is not None:
            self.quotas.add_running(klass.queue, klass.user, entry.held)
        if klass.throttle is not None:
            klass.throttle.running += 1
        self.ranks[klass.rank] += 1
        self.running_by_queue.setdefault((klass.queue, klass.rank), {})[entry.seq] = entry
        self.elastic += need.nodes_max > 0
        if klass.may_move:
            self.uneven_speeds[entry.seq] = entry

    def _release(self, entry: JobEntry) -> None:
        self.vacate(entry.need, entry.places, entry.shared_devices)
        for node, _ in entry.places:
            self.jobs_on_node[node].remove(entry)
        klass = entry.job_class
        if self.quotas is not None:
            self.quotas.remove_running(klass.queue, klass.user, entry.held)
        if klass.throttle is not None:
            klass.throttle.running -= 1
        del self.running_by_queue[klass.queue, klass.rank][entry.seq]
        self.ranks[klass.rank] -= 1
        if not self.ranks[klass.rank]:
            del self.ranks[klass.rank]
        self.elastic -= entry.need is not None and entry.need.nodes_max > 0
        if klass.may_move:
            del self.uneven_speeds[entry.seq]
        entry.places = ()
        entry.need = None
        entry.held = NO_RESOURCES
        entry.gpus = klass.gpus
        entry.shared_devices = ()

    def _begin_scoring(self) -> None:
        """The first class with shares: from now on parts of nodes are placed by fragmentation, which starts with the known jobs."""
        nodes = range(len(self.devices_of_node))
        self.fragmentation = FragmentationIndex(
            self.cpus or [0] * len(nodes), self.memory or [0] * len(nodes), self.devices_of_node, self.pool_of_node
        )
        for entry in (*self.running.values(), *self.waiting.values()):
            self._observe(entry)
        self._rescored = (1 << len(nodes)) - 1

    def _observe(self, entry: JobEntry) -> None:
        if self.fragmentation is not None and not entry.job_class.needs[0].mig_profile:
            self.fragmentation.observe(demand_of(entry.job_class.needs[0]))


def _kinds_of(needs: Iterable[Need]) -> set[int]:
    return {kind for need in needs for kind in need.kinds}


def _gpus_of(need: Need) -> int:
    """Devices of the need, at least; a share counts as one."""
    return need.gpus or (need.nodes if need.share_milli else 0)
