"""MIG instances of this node's devices: what an implementation offers. `nvml_instances` works on GPUs, `virtual_instances` on virtual devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from phalanx.core.fleet.mig import DeviceMig, MigSlice
from phalanx.node.probes.devices import DeviceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A GPU instance that exists, with its compute instance.

    Attributes:
        device: key of its device.
        id: of the GPU instance on the device; used again after it is removed.
        slice: its profile, its place and its name. Without a name it has no compute instance, so that nothing can use it.
    """

    device: str
    id: int
    slice: MigSlice


class MigInstances(Protocol):
    """Reads, makes and removes MIG instances. Calls come from one thread at a time."""

    def key(self, facts: DeviceFacts) -> str:
        """The name of a device that stays the same when the supervisor restarts."""
        ...

    def describe(self, device: str) -> DeviceMig | None:
        """What the device can be divided into, with all slices on it; None if it cannot be divided. Never raises."""
        ...

    def find(self, device: str) -> tuple[MigInstance, ...]:
        """The instances on the device.

        Raises:
            PhalanxError: they cannot be listed.
        """
        ...

    def make(self, device: str, profile: str, start: int) -> MigInstance:
        """Make an instance from this memory slice on, with one compute instance over all of it. Other instances keep running.

        Raises:
            PhalanxError: it cannot be made, and nothing is left of it; or the message says what is.
        """
        ...

    def remove(self, instance: MigInstance) -> None:
        """Remove an instance. Idempotent: another instance that has its place or id by now is left alone.

        Raises:
            Conflict: something uses it.
            PhalanxError: it cannot be removed.
        """
        ...

    def close(self) -> None:
        """Release the library; instances stay."""
        ...
