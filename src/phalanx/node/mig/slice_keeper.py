"""Which MIG slices of this node belong to this supervisor, on disk, so that a restart finds them and leaves those of others alone.

NVML does not record who made an instance. So a slice is written down before it is made, and again with its name after. After a crash
between the two, an instance at the place that was free before is this supervisor's too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx.core.errors import Conflict, NotFound, PhalanxError
from phalanx.core.fleet.mig import DeviceMig, slice_bits
from phalanx.node.files.private_files import write_private
from phalanx.node.mig.instances import MigInstance, MigInstances
from phalanx.node.probes.devices import DeviceFacts

_FILE: Final = "slices.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlice:
    """A slice that this supervisor made.

    Attributes:
        device: key of the device (`MigInstances.key`).
        owner: what it was made for, as the caller names it.
        uuid: by which a process selects it; "" while it is being made.
    """

    device: str
    profile: str
    start: int
    owner: str
    uuid: str = ""

    def is_instance(self, instance: MigInstance) -> bool:
        """Whether this instance is the slice. One that was being made when the supervisor died has no name here yet."""
        place = (instance.device, instance.slice.profile, instance.slice.start)
        return place == (self.device, self.profile, self.start) and self.uuid in ("", instance.slice.uuid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredSlices:
    """What a restart found of its own.

    Attributes:
        kept: that go on.
        removed: that were left over.
        stuck: left over, but they cannot be removed; with the reason. The next restart tries again.
    """

    kept: tuple[OwnSlice, ...] = ()
    removed: tuple[OwnSlice, ...] = ()
    stuck: tuple[tuple[OwnSlice, str], ...] = ()


class SliceKeeper:
    """Makes and removes slices, and remembers its own. Calls may come from any thread.

    Args:
        instances: of the node's devices.
        folder: the node's, for the record.
        boot_id: of the node. No slice outlives a boot, so records of another boot are void.
    """

    def __init__(self, instances: MigInstances, folder: str, boot_id: str) -> None:
        self._instances = instances
        self._folder = folder
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._own = _read(os.path.join(folder, _FILE), boot_id)
        # Left over: their owners have ended, but they could not be removed, or not yet.
        self._left_over = {one.uuid for one in self._own}

    def own(self) -> tuple[OwnSlice, ...]:
        """The slices of this supervisor."""
        with self._lock:
            return tuple(self._own)

    def describe(self, facts: DeviceFacts) -> DeviceMig | None:
        """What the device can be divided into, with the slices of others on it; None if it cannot be divided."""
        with self._lock:
            device = self._instances.key(facts)
            found = self._instances.describe(device)
            if found is None:
                return None
            own = {one.uuid for one in self._own if one.device == device}
            return replace(found, slices=tuple(one for one in found.slices if one.uuid not in own or not one.uuid))

    def has_own_at(self, facts: DeviceFacts, profile: str, start: int) -> bool:
        """Whether a slice of this supervisor is where this one would be."""
        with self._lock:
            return bool(self._overlapping(self._instances.key(facts), profile, start))

    def make(self, facts: DeviceFacts, profile: str, start: int, owner: str) -> OwnSlice:
        """Make a slice for `owner` from this memory slice on, while others on the device are used.

        Raises:
            PhalanxError: it cannot be made; see `MigInstances.make`.
            OSError: it cannot be recorded; then it is not made, or it is removed by the next restart.
        """
        with self._lock:
            intent = OwnSlice(device=self._instances.key(facts), profile=profile, start=start, owner=owner)
            self._clear_place(intent)
            if any(intent.is_instance(one) for one in self._instances.find(intent.device)):
                raise Conflict(f"device {facts.index} has a {profile} at memory slice {start} already")
            self._write([*self._own, intent])
            try:
                made = self._instances.make(intent.device, profile, start)
            except PhalanxError:
                if not any(intent.is_instance(one) for one in self._found(intent.device)):
                    self._write([one for one in self._own if one is not intent])
                raise
            known = replace(intent, uuid=made.slice.uuid)
            self._write([known if one is intent else one for one in self._own])
            return known

    def remove(self, uuid: str) -> None:
        """Remove a slice of this supervisor. Idempotent.

        Raises:
            NotFound: it is not this supervisor's.
            PhalanxError: it is in use, or cannot be removed; see `MigInstances.remove`.
            OSError: the record cannot be written; the next restart does.
        """
        with self._lock:
            own = next((one for one in self._own if one.uuid == uuid and uuid), None)
            if own is None:
                raise NotFound(f"MIG slice {uuid} was not made by this supervisor")
            self._left_over.add(uuid)
            self._remove(own)

    def recover(self, devices: Iterable[DeviceFacts], keep: Callable[[str], bool] = lambda _: False) -> RecoveredSlices:
        """At start: find the slices that an earlier process of this supervisor made; keep those whose owner goes on, remove the rest.

        Args:
            devices: of the node; slices on others are left as they are.
            keep: whether the owner goes on. By default none does: ranks die with their supervisor.
        """
        with self._lock:
            kept, removed, stuck = [], [], []
            for device in {self._instances.key(one) for one in devices}:
                found = self._found(device)
                for own in [one for one in self._own if one.device == device]:
                    there = any(own.is_instance(one) for one in found)
                    if there and own.uuid and keep(own.owner):
                        self._left_over.discard(own.uuid)
                        kept.append(own)
                        continue
                    try:
                        self._remove(own)
                        if there:
                            removed.append(own)
                    except (PhalanxError, OSError) as error:
                        _log.warning("A MIG slice of an earlier start stays: %s", error)
                        stuck.append((own, str(error)))
            return RecoveredSlices(kept=tuple(kept), removed=tuple(removed), stuck=tuple(stuck))

    def close(self) -> None:
        """Release the library; slices stay until `recover` or `remove`."""
        self._instances.close()

    def _clear_place(self, intent: OwnSlice) -> None:
        """Remove what is left over of this supervisor's own where the slice is to be made: the head grants a place again only after its job ended.

        Raises:
            PhalanxError: it cannot be removed.
        """
        for own in self._overlapping(intent.device, intent.profile, intent.start):
            if self._is_left_over(own):
                self._remove(own)

    def _overlapping(self, device: str, profile: str, start: int) -> list[OwnSlice]:
        """The slices of this supervisor with memory slices of this one."""
        known = self._instances.describe(device)
        sizes = {} if known is None else {one.name: one.memory_slices for one in known.profiles}
        wanted = slice_bits(start, sizes.get(profile, 1))
        return [
            own
            for own in self._own
            if own.device == device and slice_bits(own.start, sizes.get(own.profile, 1)) & wanted
        ]

    def _is_left_over(self, own: OwnSlice) -> bool:
        return not own.uuid or own.uuid in self._left_over

    def _found(self, device: str) -> tuple[MigInstance, ...]:
        try:
            return self._instances.find(device)
        except PhalanxError as error:
            _log.warning("Cannot list MIG instances: %s", error.message)
            return ()

    def _remove(self, own: OwnSlice) -> None:
        for instance in self._instances.find(own.device):
            if own.is_instance(instance):
                self._instances.remove(instance)
        self._write([one for one in self._own if one is not own])
        self._left_over.discard(own.uuid)  # another slice may get this name

    def _write(self, own: list[OwnSlice]) -> None:
        record = {
            "boot_id": self._boot_id,
            "slices": [
                {"device": one.device, "profile": one.profile, "start": one.start, "owner": one.owner, "uuid": one.uuid}
                for one in own
            ],
        }
        write_private(self._folder, _FILE, json.dumps(record))
        self._own = own


def _read(path: str, boot_id: str) -> list[OwnSlice]:
    """Return the slices on record; none if the file is missing, damaged, or of another boot."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        return [_slice(one) for one in record["slices"]] if record["boot_id"] == boot_id else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _slice(record: Mapping[str, Any]) -> OwnSlice:
    return OwnSlice(
        device=str(record["device"]),
        profile=str(record["profile"]),
        start=int(record["start"]),
        owner=str(record["owner"]),
        uuid=str(record["uuid"]),
    )
