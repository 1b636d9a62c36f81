"""MIG instances of virtual devices: a record in a file, so that they outlive the supervisor as those of a GPU do, until the next boot.

The slices are simulated with the fact table's geometry. A rank on one runs on the CPU, as on any virtual device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.core.errors import Conflict, NotFound
from phalanx.core.fleet.mig import DeviceMig, MigProfile, MigSlice, PlacementSource
from phalanx.core.scheduling.sharing.mig_placement import mig_geometry
from phalanx.node.files.private_files import write_private
from phalanx.node.mig.instances import MigInstance
from phalanx.node.probes.devices import DeviceFacts

_FILE: Final = "virtual_mig.json"


class VirtualInstances:
    """The MIG instances of one virtual node; a MigInstances.

    Args:
        folder: of the node.
        boot_id: the machine's; instances of another boot are gone.
        profiles: of each device, by index.
        on: whether MIG mode is on.
    """

    def __init__(
        self, folder: str, boot_id: str, profiles: Sequence[tuple[MigProfile, ...]], *, on: bool = True
    ) -> None:
        self._folder = folder
        self._boot_id = boot_id
        self._on = on
        self._profiles = {_key(index): own for index, own in enumerate(profiles)}
        self._instances = _read(os.path.join(folder, _FILE), boot_id)

    def key(self, facts: DeviceFacts) -> str:
        """Its index: the UUID of a virtual device is a new one at each start."""
        return _key(facts.index)

    def describe(self, device: str) -> DeviceMig | None:
        """What the device can be divided into, with all slices on it; None for an unknown device."""
        profiles = self._profiles.get(device)
        if profiles is None:
            return None
        return DeviceMig(
            on=self._on,
            profiles=profiles,
            source=PlacementSource.TABLE,
            slices=tuple(one.slice for one in self.find(device)),
            closed_reason="" if self._on else "MIG mode is off",
        )

    def find(self, device: str) -> tuple[MigInstance, ...]:
        """The instances on the device, by start; none while MIG mode is off."""
        own = (one for one in self._instances if self._on and one.device == device)
        return tuple(sorted(own, key=lambda one: one.slice.start))

    def make(self, device: str, profile: str, start: int) -> MigInstance:
        """Make an instance from this memory slice on.

        Raises:
            NotFound: the device has no such profile, or the profile cannot start there.
            Conflict: MIG mode is off; or its memory slices, or the media extension, are in use.
            OSError: the file cannot be written.
        """
        if not self._on:
            raise Conflict(f"virtual device {device}: MIG mode is off", hint="phalanx up --virtual 1xh100:4+mig")
        wanted = next((one for one in self._profiles.get(device, ()) if one.name == profile), None)
        if wanted is None or start not in wanted.starts:
            raise NotFound(f"virtual device {device} has no profile {profile} that starts at memory slice {start}")
        geometry = mig_geometry(self._profiles[device])
        if start not in geometry.starts(profile, geometry.state(one.slice for one in self.find(device))):
            raise Conflict(f"cannot make a {profile} at memory slice {start} of {device}: it is in use")
        number = 1 + max((one.id for one in self.find(device)), default=0)
        uuid = f"MIG-{device}-{number}"
        made_slice = MigSlice(profile=profile, start=start, memory_slices=wanted.memory_slices, uuid=uuid)
        made = MigInstance(device=device, id=number, slice=made_slice)
        self._write((*self._instances, made))
        return made

    def remove(self, instance: MigInstance) -> None:
        """Remove an instance. Idempotent.

        Raises:
            OSError: the file cannot be written.
        """
        if instance in self._instances:
            self._write(tuple(one for one in self._instances if one != instance))

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _write(self, instances: tuple[MigInstance, ...]) -> None:
        record = {"boot_id": self._boot_id, "instances": [_record(one) for one in instances]}
        write_private(self._folder, _FILE, json.dumps(record))
        self._instances = instances


def _key(index: int) -> str:
    return f"virtual-{index}"


def _record(one: MigInstance) -> dict[str, object]:
    return {
        "device": one.device,
        "id": one.id,
        "profile": one.slice.profile,
        "start": one.slice.start,
        "memory_slices": one.slice.memory_slices,
        "uuid": one.slice.uuid,
    }


def _read(path: str, boot_id: str) -> tuple[MigInstance, ...]:
    """Return the instances in the file; none if it is missing, damaged, or of another boot."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        return tuple(map(_instance, record["instances"])) if record["boot_id"] == boot_id else ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def _instance(record: Mapping[str, Any]) -> MigInstance:
    return MigInstance(
        device=str(record["device"]),
        id=int(record["id"]),
        slice=MigSlice(
            profile=str(record["profile"]),
            start=int(record["start"]),
            memory_slices=int(record["memory_slices"]),
            uuid=str(record["uuid"]),
        ),
    )
