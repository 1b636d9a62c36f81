"""Simulated users of MIG slices, and a fleet with devices that MIG divides, beside users of whole devices and shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.core.fleet.mig import DeviceMig, MigSlice
from phalanx.core.fleet.node import Node
from phalanx.core.work.gpus import GpuRequest, parse_gpus, with_share_kind
from phalanx.planner.facts.mig import find_mig_gpu
from phalanx.simulator.drill.workload import UserSimulator

SLICE_SHARE: Final = 0.6  # of all jobs; the others want whole devices, shares or none
SLICES: Final = (
    "1g.10gb",
    "1g.10gb:3",
    "1g.20gb",
    "2g.20gb",
    "3g.40gb",
    "3g.40gb:2",
    "4g.40gb",
    "7g.80gb",
    "2x1g.20gb:2",
    "1g.10gb+me",
)
PARTS: Final = ("1/4", "1/2", "20GiB", "2x10GiB")


def divide(fleet: list[Node]) -> list[Node]:
    """Give the last two nodes two more devices each, with MIG mode on; others have a slice on one. Of all nodes, device 1 has MIG mode off."""
    gpu = find_mig_gpu("h100")
    assert gpu is not None
    foreign = (MigSlice(profile="1g.10gb", start=6, memory_slices=1, uuid="MIG-other"),)
    found = []
    for number, node in enumerate(fleet):
        devices = list(node.devices)
        devices[1] = replace(devices[1], mig=DeviceMig(on=False, profiles=gpu.profiles))
        for more in range(2 if number else 0):
            slices = foreign if (number, more) == (2, 1) else ()
            index = len(devices)
            devices.append(
                replace(
                    devices[0],
                    index=index,
                    uuid=f"{node.id}-{index}",
                    memory_bytes=gpu.memory_bytes,
                    mig=DeviceMig(on=True, profiles=gpu.profiles, slices=slices),
                )
            )
        found.append(replace(node, devices=tuple(devices)))
    return found


class MigUserSimulator(UserSimulator):
    """Sends random requests; most jobs want slices."""

    def draw_gpus(self) -> GpuRequest:
        """The request of a job."""
        if self._dice.random() > SLICE_SHARE:
            return super().draw_gpus()
        if self._dice.random() < 0.25:
            return with_share_kind(parse_gpus(self._dice.choice(PARTS)), "mig")
        return parse_gpus(self._dice.choice(SLICES))
