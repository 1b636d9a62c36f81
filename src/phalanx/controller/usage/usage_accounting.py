"""Accounts for every GPU-second of the fleet: follows committed records, samples and step reports, and keeps the ledger of states.

Time is an argument, in Unix milliseconds. Nothing here is stored or sent; `usage_recorder` runs it on a thread of its own. A change costs the
devices of its node; a step without changes looks at one heap.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from phalanx.controller.device_activities import DeviceActivities
from phalanx.controller.free_device_demand import FreeDeviceDemand
from phalanx.controller.telemetry import ReportedSteps, silence_s
from phalanx.controller.usage.energy_accounting import count_energy
from phalanx.core.accounting.energy_ledger import EnergyLedger
from phalanx.core.accounting.state_changes import ANY_STATE, BY_ACTIVITY, StateBegin, state_begin
from phalanx.core.accounting.state_ledger import Account, Part, StateLedger
from phalanx.core.accounting.usage_states import (
    FIRST_SAMPLE_S,
    STARTING_MAX_S,
    UNOBSERVED,
    FreeCapacity,
    NodeCondition,
    NodeRequest,
    PartState,
    StepActivity,
    UsageState,
    attempt_phase,
    free_state,
    held_state,
    hung_after_s,
    node_condition,
)
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.node_pool import NodePool, PoolNode
from phalanx.core.ids import JobId, NodeId, PoolId, ReservationId
from phalanx.core.resources import NO_RESOURCES
from phalanx.core.state.records import NODES, POOL_NODES, RecordKind
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.usage.usage_hour import CountedNode
from phalanx.wire.supervisor import SamplesRequest

DEMAND_EVERY_MS: Final = 5000  # between two comparisons of free devices with the jobs that wait
DEMAND_CHANGED_MS: Final = 1000  # the same after jobs came or went
_NO_STEPS: Final[Mapping[NodeRequest, str]] = {}


@dataclass(slots=True)
class _Steps:
    reported: int
    arrived_ms: int
    found: StepActivity


class UsageAccountant:
    """See the module.

    Args:
        wait_reason: why a job waits, as a word.
    """

    def __init__(self, wait_reason: Callable[[JobId], str]) -> None:
        self.ledger = StateLedger()
        self.energy = EnergyLedger()
        self.unobserved = False  # a time is replayed in which no head ran
        self._demand = FreeDeviceDemand(wait_reason)
        self._nodes: dict[NodeId, Node] = {}
        self._members: dict[NodeId, PoolNode] = {}
        self._pools: dict[PoolId, NodePool] = {}
        self._jobs: dict[JobId, Job] = {}  # those that have not ended
        self._attempts: dict[JobId, Attempt] = {}
        self._on_node: dict[NodeId, dict[JobId, None]] = {}
        self._reservations: dict[ReservationId, Reservation] = {}
        self._activities = DeviceActivities()
        self._steps: dict[JobId, _Steps] = {}
        self._heard_ms: dict[NodeId, int] = {}  # when its newest samples came
        self._found_running: set[JobId] = set()  # since before this ledger began
        self._changed: dict[NodeId, None] = {}
        self._due: list[tuple[int, NodeId]] = []  # nodes to look at again
        self._waiting: Mapping[NodeRequest, str] = _NO_STEPS
        self._usual: frozenset[NodeRequest] = frozenset()
        self._demand_at_ms = 0
        self._demand_changed = False

    # ---- what happened ------------------------------------------------------------------------------------------------

    def apply(self, records: Iterable[Any], removed: Iterable[tuple[RecordKind[Any, Any], Any]], now_ms: int) -> None:
        """Apply committed records, in their order. The devices that they concern are accounted for by the next `update`."""
        for record in records:
            match record:
                case Attempt():
                    self._put_attempt(record)
                case Job():
                    self._put_job(record, now_ms)
                case Node():
                    self._put_node(record, now_ms)
                case PoolNode():
                    self._members[record.id] = record
                    self._changed[record.id] = None
                case NodePool():
                    self._pools[record.id] = record
                case Reservation():
                    self._reservations.pop(record.id, None)
                    if not record.ended:
                        self._reservations[record.id] = record
                        times_ms = [int(at_s * 1000) + 1 for at_s in (record.start_s, record.end_s)]
                        for one in itertools.product(times_ms, record.nodes):
                            heapq.heappush(self._due, one)
                    self._changed.update(dict.fromkeys(record.nodes))
                case _:
                    pass
        for kind, key in removed:
            if kind in (NODES, POOL_NODES):
                table: dict[NodeId, Any] = self._nodes if kind is NODES else self._members
                table.pop(key, None)
                self._heard_ms.pop(key, None)
                self._changed[key] = None

    def add_samples(self, request: SamplesRequest, now_ms: int) -> None:
        """Take samples of a supervisor, which have just arrived."""
        silent_at_ms = now_ms + int(silence_s(request) * 1000)
        self._heard_ms[request.node_id] = now_ms
        for sample in request.devices:
            attempt = None if sample.job_id is None else self._attempts.get(sample.job_id)
            self._activities.add(request.node_id, sample, attempt, now_ms, silent_at_ms)
        count_energy(self.energy, self.ledger, request, now_ms)
        self._changed[request.node_id] = None
        heapq.heappush(self._due, (silent_at_ms + 1, request.node_id))

    def steps_reported(self, job_id: JobId, steps: ReportedSteps, now_ms: int) -> None:
        """Take the reports of a job's ranks, which arrived at that time."""
        attempt = self._attempts.get(job_id)
        if attempt is None or (steps.epoch, steps.generation) != (attempt.epoch, attempt.generation):
            return
        reported, activity = steps.reported, steps.activity
        known = self._steps.get(job_id)
        fresh = known is None or known.reported != reported
        arrived_ms = now_ms if fresh or known is None else known.arrived_ms
        if activity.stepped and (known is None or not known.found.stepped):
            self._started(attempt, now_ms)
        self._steps[job_id] = _Steps(reported, arrived_ms, activity)
        hung_at_ms = arrived_ms + int(hung_after_s(activity.gap_s) * 1000) + 1
        for grant in attempt.allocation.grants:
            self._changed[grant.node_id] = None
            if activity.stepped and fresh:
                heapq.heappush(self._due, (hung_at_ms, grant.node_id))
        if known is not None and known.found.saving and not activity.saving:
            self._activities.restart(attempt)
        if known is None or _mode(known.found) != _mode(activity):
            self.update(now_ms)  # at its own time, however late the thread comes to it

    def live_attempt(self, job_id: JobId) -> Attempt | None:
        """The attempt of a job that holds its allocation now."""
        return self._attempts.get(job_id)

    def job(self, job_id: JobId) -> Job | None:
        """A job that has not ended."""
        return self._jobs.get(job_id)

    def node(self, node_id: NodeId) -> Node | None:
        """The record of a node; None if it is not registered."""
        return self._nodes.get(node_id)

    def _started(self, attempt: Attempt, now_ms: int) -> None:
        """Its first step has come: up to now it started, also if it was active, for it loaded or compiled."""
        if attempt.running_s is None or attempt.job_id in self._found_running:
            return
        starting = PartState(UsageState.STARTING)
        span = (int(attempt.running_s * 1000), BY_ACTIVITY)
        for grant in attempt.allocation.grants:
            for index in grant.devices:
                self.ledger.restate(grant.node_id, index, attempt.job_id, starting, span, now_ms)

    def counted_node(self, node_id: NodeId) -> CountedNode:
        """What the ledger must know again of a node that counts now, if the node is gone by then."""
        devices = self._devices(node_id)
        account = self._account(node_id, devices[0]) if devices else Account()
        indices = tuple(self.ledger.device_indices(node_id))
        meters = self.energy.meters(node_id)
        return CountedNode(id=node_id, devices=indices, model=account.model, pool=account.pool, meters=meters)

    def _put_attempt(self, attempt: Attempt) -> None:
        known = self._attempts.get(attempt.job_id)
        if known is not None and known.epoch > attempt.epoch:
            return
        for grant in (*(known.allocation.grants if known is not None else ()), *attempt.allocation.grants):
            self._changed[grant.node_id] = None
            self._on_node.get(grant.node_id, {}).pop(attempt.job_id, None)
        if known is None and attempt.running_s is not None:
            self._found_running.add(attempt.job_id)  # its first steps may have been reported to another head
        if known is None or (known.epoch, known.generation) != (attempt.epoch, attempt.generation):
            self._steps.pop(attempt.job_id, None)
        if known is not None and known.generation != attempt.generation:
            self._found_running.discard(attempt.job_id)
        if not attempt.holds_allocation:
            self._attempts.pop(attempt.job_id, None)
            self._steps.pop(attempt.job_id, None)
            self._found_running.discard(attempt.job_id)
            return
        if (known is None or known.epoch != attempt.epoch) and attempt.job_id in self._jobs:
            self._demand.placed(self._jobs[attempt.job_id])
        self._attempts[attempt.job_id] = attempt
        for grant in attempt.allocation.grants:
            self._on_node.setdefault(grant.node_id, {})[attempt.job_id] = None
            if attempt.running_s is not None:
                for limit_s in (FIRST_SAMPLE_S, STARTING_MAX_S):
                    heapq.heappush(self._due, (int((attempt.running_s + limit_s) * 1000) + 1, grant.node_id))

    def _put_job(self, job: Job, now_ms: int) -> None:
        self._demand.put(job, now_ms / 1000)
        self._demand_changed = True
        if job.state.terminal:
            self._jobs.pop(job.id, None)
        else:
            self._jobs[job.id] = job

    # ---- what it means ------------------------------------------------------------------------------------------------

    def update(self, now_ms: int) -> None:
        """Account for everything that changed, and for what the time alone changes."""
        while self._due and self._due[0][0] <= now_ms:
            self._changed[heapq.heappop(self._due)[1]] = None
        if now_ms - self._demand_at_ms >= (DEMAND_CHANGED_MS if self._demand_changed else DEMAND_EVERY_MS):
            self._demand_at_ms, self._demand_changed = now_ms, False
            self._update_demand(now_ms)
        changed, self._changed = self._changed, {}
        for node_id in changed:
            self._update_node(node_id, now_ms)

    def _update_demand(self, now_ms: int) -> None:
        waiting, usual = self._demand.waiting(now_ms / 1000), self._demand.usual()
        if waiting == self._waiting and usual == self._usual:
            return
        self._waiting, self._usual = waiting, usual
        for node_id in self._nodes:
            if any(key == "" for _, key, _ in self.ledger.parts(node_id)):
                self._changed[node_id] = None

    def _put_node(self, node: Node, now_ms: int) -> None:
        known = self._nodes.get(node.id)
        if node.state is NodeState.DOWN and known is not None and known.state is not NodeState.DOWN:
            self._went_down(node.id, now_ms)
        self._nodes[node.id] = node
        self._changed[node.id] = None

    def _went_down(self, node_id: NodeId, now_ms: int) -> None:
        """A node is found to be down only some time after its last report: it has been broken since then."""
        heard_ms = self._heard_ms.pop(node_id, None)
        if heard_ms is not None and not self.unobserved:
            broken = PartState(UsageState.BROKEN)
            for index, key, _ in list(self.ledger.parts(node_id)):
                self.ledger.restate(node_id, index, key, broken, (heard_ms, ANY_STATE), now_ms)

    def _update_node(self, node_id: NodeId, now_ms: int) -> None:
        devices = self._devices(node_id)
        counted = self.ledger.device_indices(node_id)
        if counted != [device.index for device in devices]:
            if counted:
                self.ledger.close_node(node_id, now_ms)
            if devices:
                whole = Part(self._account(node_id, devices[0]), MILLI_PER_DEVICE, PartState(UsageState.PROVISIONING))
                self.ledger.open_node(node_id, {device.index: whole for device in devices}, now_ms)
            self.energy.keep(node_id, [device.index for device in devices])
            self._activities.drop_node(node_id)
        if not devices:
            return
        condition = node_condition(self._nodes.get(node_id), self._members.get(node_id))
        grants = [
            (self._attempts[job_id], grant)
            for job_id in self._on_node.get(node_id, ())
            if (grant := self._attempts[job_id].allocation.grant_on(node_id)) is not None
            and not self._attempts[job_id].queued_why
        ]
        capacity = self._free_capacity(node_id, devices, [grant for _, grant in grants])
        for device in devices:
            parts = self._held_parts(node_id, device, condition, grants, now_ms)
            left = MILLI_PER_DEVICE - sum(part.milli for part in parts.values())
            if left:
                parts[""] = self._free_part(node_id, device, condition, capacity, left, now_ms)
            self.ledger.set_device(node_id, device.index, parts, now_ms)
            holders = tuple((part.milli, part.account) for part in parts.values())
            self.energy.hold(node_id, device.index, holders, now_ms)

    def _devices(self, node_id: NodeId) -> Sequence[Device]:
        node = self._nodes.get(node_id)
        if node is not None:
            return node.devices
        member = self._members.get(node_id)
        pool = None if member is None else self._pools.get(member.pool)
        return () if pool is None else pool.template.devices

    def _held_parts(
        self,
        node_id: NodeId,
        device: Device,
        condition: NodeCondition,
        grants: Sequence[tuple[Attempt, NodeGrant]],
        now_ms: int,
    ) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        left = MILLI_PER_DEVICE
        for attempt, grant in grants:
            if device.index not in grant.devices:
                continue
            milli = min(left, MILLI_PER_DEVICE if grant.share is None else grant.share.milli_on(device.index))
            if milli <= 0:
                continue
            left -= milli
            account = self._account(node_id, device, self._jobs.get(attempt.job_id), attempt.job_id)
            state, since = self._held_state(node_id, device, condition, attempt, grant, now_ms)
            parts[attempt.job_id] = Part(account, milli, state, *since)
        return parts

    def _held_state(
        self,
        node_id: NodeId,
        device: Device,
        condition: NodeCondition,
        attempt: Attempt,
        grant: NodeGrant,
        now_ms: int,
    ) -> tuple[PartState, StateBegin]:
        """The state of what an attempt holds of a device, and when it began."""
        activity = self._activities.find(node_id, device.index, attempt, now_ms, shared=grant.share is not None)
        steps, arrived_ms = self._step_activity(attempt, now_ms)
        running_s = 0.0 if attempt.running_s is None else max(0.0, now_ms / 1000 - attempt.running_s)
        if self.unobserved:  # nothing says when it had started
            running_s = inf
        state = held_state(
            condition,
            attempt_phase(attempt),
            activity,
            steps,
            running_s=running_s,
            healthy=device.healthy,
        )
        if self.unobserved:
            return replace(state, note=UNOBSERVED), StateBegin()
        before = self.ledger.state(node_id, device.index, attempt.job_id)
        return state, state_begin(before, state, activity, steps, arrived_ms)

    def _step_activity(self, attempt: Attempt, now_ms: int) -> tuple[StepActivity | None, int]:
        """What its steps show, and when the newest was reported."""
        known = self._steps.get(attempt.job_id)
        if known is None:
            return None, now_ms
        return replace(known.found, silent_s=max(0, now_ms - known.arrived_ms) / 1000), known.arrived_ms

    def _free_part(
        self,
        node_id: NodeId,
        device: Device,
        condition: NodeCondition,
        capacity: FreeCapacity,
        milli: int,
        now_ms: int,
    ) -> Part:
        node = self._nodes.get(node_id)
        state = free_state(
            condition,
            capacity,
            milli,
            waiting=self._waiting,
            usual=self._usual,
            reserved=any(node_id in one.nodes and one.is_active(now_ms / 1000) for one in self._reservations.values()),
            foreign=node is not None and device.index in node.foreign_usage.devices,
            healthy=device.healthy,
        )
        return Part(
            self._account(node_id, device), milli, replace(state, note=UNOBSERVED) if self.unobserved else state
        )

    def _free_capacity(self, node_id: NodeId, devices: Sequence[Device], grants: Sequence[NodeGrant]) -> FreeCapacity:
        node = self._nodes.get(node_id)
        if node is None:
            return FreeCapacity(
                model="", size=len(devices), whole=len(devices), cpus=0, memory_bytes=0, node_id=node_id
            )
        held = sum((grant.host for grant in grants), node.foreign_usage.host or NO_RESOURCES)
        used = {index for grant in grants for index in grant.devices} | set(node.foreign_usage.devices)
        return FreeCapacity(
            model=devices[0].model.lower(),
            size=len(devices),
            whole=sum(device.index not in used and device.healthy for device in devices),
            cpus=node.cpus - held.cpus,
            memory_bytes=node.memory_bytes - held.memory_bytes,
            node_id=node_id,
        )

    def _account(self, node_id: NodeId, device: Device, job: Job | None = None, job_id: str = "") -> Account:
        member = self._members.get(node_id)
        pool = "" if member is None else member.pool
        if job is None:
            return Account(model=device.model, pool=pool, job=job_id)
        return Account(device.model, pool, job.project, job.user, job.queue, job.id)


def _mode(steps: StepActivity) -> tuple[bool, bool, bool]:
    return steps.saving, steps.announced, steps.stepped
