"""Which nodes a calibration measures: equal ones that take work now and are idle. Pure, from the head's views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cli.cells import count
from phalanx.core.errors import BadRequest, NotFound, TryLater
from phalanx.core.fleet.hostlist import fold
from phalanx.core.fleet.node import NodeState
from phalanx.wire.api.nodes import NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Equal nodes to measure, and why others are left out."""

    nodes: tuple[NodeView, ...]
    left_out: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(node.id for node in self.nodes)

    @property
    def devices(self) -> int:
        """Of each."""
        return len(self.nodes[0].devices)

    @property
    def gpu(self) -> str:
        """Model of their devices."""
        return gpu_of(self.nodes[0])


def chosen_nodes(
    nodes: Sequence[NodeView], wanted: Sequence[str] | None, now_s: float, *, links: bool = False
) -> Chosen:
    """Nodes that take work now, of those wanted. For their `links` alone, one device of each will do, however many there are.

    Raises:
        NotFound: a wanted node is not there or takes no work, or none does.
        BadRequest: they are of several kinds, which one job cannot measure beside each other.
    """
    known = {str(node.id): node for node in nodes}
    for name in wanted or ():
        if name not in known:
            raise NotFound(f"no node {name!r}", hint="phalanx nodes lists them")
    left_out: list[str] = []
    taken: list[NodeView] = []
    for name in sorted(known if wanted is None else wanted):
        why = _unfit(known[name], now_s)
        if why and wanted is not None:
            raise NotFound(f"{name} cannot be measured: {why}", hint="leave it out of --nodes")
        if why:
            left_out.append(f"{name} is left out: {why}")
        else:
            taken.append(known[name])
    if not taken:
        raise NotFound("no node is up and takes work", hint="; ".join(left_out) or "phalanx up brings a cluster up")
    kinds: dict[tuple[str, int], list[str]] = {}
    for node in taken:
        kinds.setdefault((gpu_of(node), 1 if links else len(node.devices)), []).append(node.id)
    if len(kinds) > 1:
        said = "; ".join(f"{fold(sorted(names))}: {gpus} x {gpu}" for (gpu, gpus), names in sorted(kinds.items()))
        first = fold(sorted(min(kinds.items())[1]))
        command = "phalanx topology --measure" if links else "phalanx calibrate"
        raise BadRequest(f"nodes of {len(kinds)} kinds: {said}", hint=f"one kind at a time: {command} --nodes {first}")
    return Chosen(nodes=tuple(taken), left_out=tuple(left_out))


def check_idle(chosen: Chosen, *, wait: bool, links: bool = False) -> None:
    """Refuse while others compute there, unless they are waited for; who measures `links` alone cannot ask for that.

    Raises:
        TryLater: some nodes are busy.
    """
    busy = [node for node in chosen.nodes if node.jobs]
    if not busy or wait:
        return
    jobs = sorted({str(job) for node in busy for job in node.jobs})
    shown = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    raise TryLater(
        f"{len(busy)} of {count(len(chosen.nodes), 'node')} {'is' if len(busy) == 1 else 'are'} busy with job {shown}",
        hint="--nodes measures the others" if links else "--wait waits for them; --nodes measures the others",
    )


def gpu_of(node: NodeView) -> str:
    """Model of its devices."""
    return node.devices[0].model


def _unfit(node: NodeView, now_s: float) -> str:
    """Why no job of ours could have all of it; "" if it could."""
    if node.state is not NodeState.UP:
        return f"it is {node.state}"
    if not node.devices:
        return "it has no devices"
    if node.cordon is not None:
        return f"it is {'drained' if node.cordon.drain else 'cordoned'}: {node.cordon.why}"
    if any(one.start_s <= now_s for one in node.reserved):
        return f"it is reserved for {node.reserved[0].holders}"
    sick = [device.index for device in node.devices if not device.healthy]
    return f"device {sick[0]} is sick" if sick else ""
