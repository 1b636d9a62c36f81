"""Select the nodes for a calibration: equal, schedulable, idle. Pure, from the head's views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cli.cells import count
from phalanx.core.errors import BadRequest, NotFound, TryLater
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import NodeState
from phalanx.wire.api.nodes import NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNodes:
    """Equal nodes to measure, and why others are excluded."""

    nodes: tuple[NodeView, ...]
    excluded: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Sorted node names."""
        return sorted(node.id for node in self.nodes)

    @property
    def devices(self) -> int:
        """Devices per node."""
        return len(self.nodes[0].devices)

    @property
    def gpu(self) -> str:
        """Device model."""
        return gpu_of(self.nodes[0])


def select_nodes(
    nodes: Sequence[NodeView], wanted: Sequence[str] | None, now_s: float, *, links: bool = False
) -> CalibrationNodes:
    """Select schedulable nodes among `wanted`. With `links`, nodes may differ in their number of devices.

    Raises:
        NotFound: a wanted node does not exist or is not schedulable, or no node is.
        BadRequest: the nodes are of several kinds, which one job cannot measure together.
    """
    known = {str(node.id): node for node in nodes}
    for name in wanted or ():
        if name not in known:
            raise NotFound(f"no node {name!r}", hint="list nodes with phalanx nodes")
    left_out: list[str] = []
    taken: list[NodeView] = []
    for name in sorted(known if wanted is None else wanted):
        why = _why_unusable(known[name], now_s)
        if why and wanted is not None:
            raise NotFound(f"{name} cannot be measured: {why}", hint="remove it from --nodes")
        if why:
            left_out.append(f"{name} is excluded: {why}")
        else:
            taken.append(known[name])
    if not taken:
        raise NotFound("no node is up and schedulable", hint="; ".join(left_out) or "start a cluster with phalanx up")
    kinds: dict[tuple[str, int], list[str]] = {}
    for node in taken:
        kinds.setdefault((gpu_of(node), 1 if links else len(node.devices)), []).append(node.id)
    if len(kinds) > 1:
        groups = "; ".join(
            f"{fold_hostlist(sorted(names))}: {gpus} x {gpu}" for (gpu, gpus), names in sorted(kinds.items())
        )
        first = fold_hostlist(sorted(min(kinds.items())[1]))
        command = "phalanx topology --measure" if links else "phalanx calibrate"
        raise BadRequest(
            f"the nodes are of {len(kinds)} kinds: {groups}",
            hint=f"measure one kind at a time: {command} --nodes {first}",
        )
    return CalibrationNodes(nodes=tuple(taken), excluded=tuple(left_out))


def check_idle(chosen: CalibrationNodes, *, wait: bool, links: bool = False) -> None:
    """Refuse busy nodes unless `wait` is set; the command for `links` alone has no `--wait`.

    Raises:
        TryLater: some nodes run jobs.
    """
    busy = [node for node in chosen.nodes if node.jobs]
    if not busy or wait:
        return
    jobs = sorted({str(job) for node in busy for job in node.jobs})
    shown = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    raise TryLater(
        f"{len(busy)} of {count(len(chosen.nodes), 'node')} {'is' if len(busy) == 1 else 'are'} busy with job {shown}",
        hint="measure the others with --nodes" if links else "wait with --wait, or measure the others with --nodes",
    )


def gpu_of(node: NodeView) -> str:
    """Return the model of the node's devices."""
    return node.devices[0].model


def _why_unusable(node: NodeView, now_s: float) -> str:
    """Return why the calibration job could not get the whole node; "" if it could."""
    if node.state is not NodeState.UP:
        return f"it is {node.state}"
    if not node.devices:
        return "it has no devices"
    if node.cordon is not None:
        return f"it is {'drained' if node.cordon.drain else 'cordoned'}: {node.cordon.why}"
    if any(one.start_s <= now_s for one in node.reserved):
        return f"it is reserved for {node.reserved[0].holders}"
    unhealthy = [device.index for device in node.devices if not device.healthy]
    return f"device {unhealthy[0]} is unhealthy" if unhealthy else ""
