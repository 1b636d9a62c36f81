"""The state of every GPU, from the committed store and the newest samples, by columns. Cheap enough to make each second for a large fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.api.views.live import live_attempts
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.topology import LEVELS
from phalanx.core.ids import JobId, NodeId
from phalanx.web.states import CellState
from phalanx.wire.api.fleet import FleetFrame

_ACTIVE_FROM: Final = 0.05  # share of sampled time in which a GPU computed; below it is idle


def cell_state(
    node: Node, device: Device, *, held: bool, utilization: float | None, reserved: bool = False
) -> CellState:
    """Return the state of one GPU. `held`: a job holds it; `utilization`: of its newest sample, None if unknown."""
    if node.state is NodeState.DOWN:
        return CellState.DOWN
    if not device.healthy:
        return CellState.BROKEN
    if held:
        if utilization is None:
            return CellState.HELD
        return CellState.ACTIVE if utilization >= _ACTIVE_FROM else CellState.IDLE
    if device.index in node.foreign_usage.devices:
        return CellState.OUTSIDE
    if node.cordon is not None:
        return CellState.DRAINING if node.cordon.drain else CellState.CORDONED
    return CellState.RESERVED if reserved else CellState.FREE


def fleet_frame(services: HeadServices) -> FleetFrame:
    """Return the state of every GPU. Reads the store: do not call it on the event loop."""
    jobs_on = _jobs_by_node(services)
    reserved = {node for one in services.store.reservations() if one.begun for node in one.nodes}
    nodes = sorted(services.store.nodes(), key=lambda node: (_place(node), node.id))
    cells, jobs = [], []
    for node in nodes:
        held = jobs_on.get(node.id, {})
        letters = _letters(services, node, held, reserved=node.id in reserved)
        cells.append(letters)
        here = [held.get(device.index, JobId("")) for device in node.devices]
        jobs.append([] if not held else here[:1] if len(set(here)) == 1 else here)
    return FleetFrame(
        now_s=services.clock.now_s(),
        nodes=[node.id for node in nodes],
        places=[", ".join(f"{level} {value}" for level, value in _place(node)) for node in nodes],
        states=[_node_state(node) for node in nodes],
        cells=cells,
        jobs=jobs,
        counts={state.value: count for state, count in services.store.job_counts().items()},
    )


def _jobs_by_node(services: HeadServices) -> dict[NodeId, dict[int, JobId]]:
    """Return which job holds each device, by node and index; of several that share one, the first."""
    found: dict[NodeId, dict[int, JobId]] = {}
    for attempt in live_attempts(services):
        for grant in attempt.allocation.grants:
            held = found.setdefault(grant.node_id, {})
            for index in grant.devices:
                held.setdefault(index, attempt.job_id)
    return found


def _letters(services: HeadServices, node: Node, held: Mapping[int, JobId], *, reserved: bool) -> str:
    samples = services.telemetry.node_samples(node.id) if held else None
    used = {} if samples is None else {sample.index: sample.utilization for sample in samples.devices}
    return "".join(
        cell_state(
            node, device, held=device.index in held, utilization=used.get(device.index), reserved=reserved
        ).letter
        for device in node.devices
    )


def _place(node: Node) -> Sequence[tuple[str, str]]:
    return [(level, node.labels[level]) for level in LEVELS if level in node.labels]


def _node_state(node: Node) -> str:
    if node.state is NodeState.DOWN:
        return "down"
    if node.cordon is None:
        return "up"
    return "draining" if node.cordon.drain else "cordoned"
