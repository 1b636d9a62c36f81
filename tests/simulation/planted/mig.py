"""Bugs of MIG slices: where they are granted, and of which devices."""

from dataclasses import replace

from phalanx.core.lifecycle import verify
from phalanx.core.scheduling import board_synchronizer
from phalanx.core.scheduling.fleet_index import FleetIndex, index_fleet
from phalanx.core.scheduling.sharing.mig_devices import DivisibleDevice, MigDeviceIndex
from phalanx.core.state.snapshot import Usage
from tests.simulation.planted.bug import planted


@planted(1, seed=0, mig=True)
def slice_is_made_where_another_is(patch):
    """Memory slices in use count as free for further slices, and the final check of a placement ignores it too."""
    patch.setattr(MigDeviceIndex, "_change", lambda self, node, held, *, taken: setattr(held, "taken", taken))
    patch.setattr(
        FleetIndex, "allocation", _ignoring_slices(FleetIndex.allocation, lambda held: dict.fromkeys(held.shares, 0))
    )
    patch.setattr(Usage, "conflict", lambda self, grant: "")


@planted(1, seed=0, mig=True)
def slice_is_made_on_a_busy_device(patch):
    """Devices with MIG mode off count as divided ones, also while a job has them as a whole: only a mode switch could make such a slice."""
    patch.setattr(board_synchronizer, "index_fleet", _with_devices_that_are_off)
    patch.setattr(FleetIndex, "allocation", _ignoring_slices(FleetIndex.allocation, lambda held: {1: 0} | held.slices))
    patch.setattr(Usage, "conflict", lambda self, grant: "")
    patch.setattr(verify, "_mig_conflict", lambda node, grant: "")


def _ignoring_slices(allocation, slices_of):
    """Devices with the index of a slice count as divided, so a whole job on one does not keep a slice off it."""

    class Lax:
        def __init__(self, taken):
            self._taken = taken

        def usage_of(self, node_id):
            held = self._taken.usage_of(node_id)
            return replace(held, slices=slices_of(held))

    def lax(self, need, places, role, taken, shared=()):
        return allocation(self, need, places, role, Lax(taken) if need.mig_profile else taken, shared)

    return lax


def _with_devices_that_are_off(nodes):
    found = index_fleet(nodes)
    for number, own in found.divisible.items():
        off = next(device for device in found.nodes[number].devices if device.index == 1)
        if off.healthy and off.mig is not None:
            found.divisible[number] = (DivisibleDevice(1, replace(off.mig, on=True)), *own)
    return found
