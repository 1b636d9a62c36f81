"""The state of every GPU, from records and the newest samples, by columns. Cheap enough to make each second for a large fleet.

Attempts and counts are those of the controller: a change that is not committed yet may be shown a moment early.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.accounting.usage_states import UNOBSERVED, PartState, UsageState
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.wire.api.cell_states import CellState
from phalanx.wire.api.fleet import FleetFrame

_ACTIVE_FROM: Final = 0.05  # share of sampled time in which a GPU computed; below it is idle
_OF_USAGE: Final = {
    UsageState.COMPUTING: CellState.ACTIVE,
    UsageState.LOW: CellState.LOW,
    UsageState.DATA_BOUND: CellState.WAITING,
    UsageState.COMMUNICATING: CellState.WAITING,
    UsageState.CHECKPOINTING: CellState.CHECKPOINTING,
    UsageState.STARTING: CellState.STARTING,
    UsageState.IDLE: CellState.IDLE,
    UsageState.UNOCCUPIED: CellState.UNOCCUPIED,
    UsageState.HUNG: CellState.HUNG,
    UsageState.LOST: CellState.LOST,
    UsageState.PREEMPTED: CellState.PREEMPTED,
}


def cell_state(
    node: Node,
    device: Device,
    *,
    held: bool,
    utilization: float | None,
    reserved: bool = False,
    usage: PartState | None = None,
) -> CellState:
    """Return the state of one GPU.

    Args:
        node: of the GPU.
        device: the GPU.
        held: whether a job holds it.
        utilization: of its newest sample; None if unknown.
        reserved: whether an active reservation keeps it.
        usage: of the ledger of states, for a held GPU; None if that does not know it.
    """
    if node.state is NodeState.DOWN:
        return CellState.DOWN
    if not device.healthy:
        return CellState.BROKEN
    if held:
        if usage is not None and usage.state in _OF_USAGE:
            return CellState.HELD if usage.note == UNOBSERVED else _OF_USAGE[usage.state]
        if utilization is None:
            return CellState.HELD
        return CellState.ACTIVE if utilization >= _ACTIVE_FROM else CellState.IDLE
    if device.index in node.foreign_usage.devices:
        return CellState.OUTSIDE
    if node.cordon is not None:
        return CellState.DRAINING if node.cordon.drain else CellState.CORDONED
    return CellState.RESERVED if reserved else CellState.FREE


def fleet_frame(services: HeadServices) -> FleetFrame:
    """Return the state of every GPU. Takes milliseconds in a large fleet: do not call it on the event loop."""
    attempts = services.controller.live_attempts()
    jobs_on = _jobs_by_node(attempts)
    reserved = {node for one in services.store.reservations() if one.begun for node in one.nodes}
    placed = sorted((_place(node), node.id, node) for node in services.controller.fleet_nodes())
    nodes = [node for _, _, node in placed]
    states = services.part_states(jobs_on)
    cells, jobs = [], []
    for node in nodes:
        held = jobs_on.get(node.id, {})
        letters = _letters(services, node, held, states.get(node.id, ()), reserved=node.id in reserved)
        cells.append(letters)
        here = [held.get(device.index, JobId("")) for device in node.devices]
        jobs.append([] if not held else here[:1] if len(set(here)) == 1 else here)
    return FleetFrame(
        now_s=services.clock.now_s(),
        nodes=[node.id for node in nodes],
        places=[", ".join(f"{level} {value}" for level, value in place) for place, _, _ in placed],
        states=[node_condition(node) for node in nodes],
        cells=cells,
        jobs=jobs,
        counts={
            JobState.RUNNING.value: sum(job.state is JobState.RUNNING for job, _ in attempts),
            JobState.PENDING.value: len(services.controller.pending_jobs()),
        },
    )


def _jobs_by_node(attempts: Iterable[tuple[Job, Attempt]]) -> dict[NodeId, dict[int, JobId]]:
    """Return which job holds each device, by node and index; of several that share one, the first."""
    found: dict[NodeId, dict[int, JobId]] = {}
    for _, attempt in sorted(attempts, key=lambda pair: pair[0].seq):
        if not attempt.holds_allocation:
            continue
        for grant in attempt.allocation.grants:
            held = found.setdefault(grant.node_id, {})
            for index in grant.devices:
                held.setdefault(index, attempt.job_id)
    return found


def _letters(
    services: HeadServices,
    node: Node,
    held: Mapping[int, JobId],
    states: Iterable[tuple[int, str, PartState]],
    *,
    reserved: bool,
) -> str:
    if not held and not node.foreign_usage.devices and all(device.healthy for device in node.devices):
        one = (
            cell_state(node, node.devices[0], held=False, utilization=None, reserved=reserved).letter
            if node.devices
            else ""
        )
        return one * len(node.devices)
    used = services.telemetry.utilizations(node.id) if held else {}
    usage = {index: state for index, job, state in states if job and job == held.get(index)}
    return "".join(
        cell_state(
            node,
            device,
            held=device.index in held,
            utilization=used.get(device.index),
            reserved=reserved,
            usage=usage.get(device.index),
        ).letter
        for device in node.devices
    )


def _place(node: Node) -> Sequence[tuple[str, str]]:
    return [(level, node.labels[level]) for level in LEVELS if level in node.labels]


def node_condition(node: Node) -> str:
    """Return the state of a node in one word: "up", "provisioning", "down", "cordoned" or "draining"."""
    if node.state is NodeState.DOWN:
        return "down"
    if node.cordon is None:
        return "provisioning" if node.provisioning_reason else "up"
    return "draining" if node.cordon.drain else "cordoned"
