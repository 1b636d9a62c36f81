"""MIG instances of NVIDIA GPUs through NVML (package nvidia-ml-py). Makes no call that switches MIG mode or resets a GPU.

NVML gives instances to privileged callers only; without the privilege, profiles are still read, and their starts come from the table.
Source of the calls and their errors: NVML API reference, "Multi Instance GPU Management" (docs.nvidia.com/deploy/nvml-api), read
November 2026.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import Conflict, NotFound, NotPermitted, PhalanxError
from phalanx.core.fleet.mig import MEMORY_SLICES_MAX, DeviceMig, MigProfile, MigSlice, PlacementSource
from phalanx.core.units import MIB
from phalanx.node.mig.instances import MigInstance
from phalanx.node.probes.devices import DeviceFacts
from phalanx.node.probes.nvml import load_nvml

_PERMISSION_HINT: Final = (
    "run the supervisor as root, or let it read /proc/driver/nvidia/capabilities/mig/config and monitor"
)
_ALL_ENGINES: Final = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED: the only one that NVML has
_PROCESSES_SHOWN_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _DriverProfile:
    """A profile as the driver reports it. `count`: instances that can exist at once."""

    name: str
    id: int
    compute_slices: int
    memory_bytes: int
    count: int


def open_nvml_instances(module: Any = None) -> NvmlInstances | None:
    """The instances of this node's GPUs; None without library or driver, or if no GPU can be divided. `module`: as in `load_nvml`."""
    module = load_nvml(module)
    if module is None:
        return None
    opened = NvmlInstances(module)
    if opened.any_supported():
        return opened
    opened.close()
    return None


class NvmlInstances:
    """The MIG instances of this node's GPUs, which are named by UUID; a MigInstances."""

    def __init__(self, module: Any) -> None:
        self._nvml = module

    def any_supported(self) -> bool:
        """Whether a GPU of this node can be divided."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(index))
                    return True
        return False

    def key(self, facts: DeviceFacts) -> str:
        """The GPU's UUID."""
        return facts.uuid

    def describe(self, device: str) -> DeviceMig | None:
        """What the GPU can be divided into, with all slices on it; None if it cannot be divided or does not answer."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
            now, pending = nvml.nvmlDeviceGetMigMode(handle)
            profiles, source = self._profiles(handle)
        except nvml.NVMLError:
            return None
        if now != nvml.NVML_DEVICE_MIG_ENABLE:
            after = "; it is set to be on after the next reset" if pending == nvml.NVML_DEVICE_MIG_ENABLE else ""
            return DeviceMig(on=False, profiles=profiles, source=source, closed_reason=f"MIG mode is off{after}")
        try:
            slices, closed = tuple(one.slice for one in self.find(device)), ""
        except PhalanxError as error:
            slices, closed = (), error.message
        return DeviceMig(on=True, profiles=profiles, source=source, slices=slices, closed_reason=closed)

    def find(self, device: str) -> tuple[MigInstance, ...]:
        """The instances on the GPU, by start.

        Raises:
            NotPermitted: this account may not list them.
            Conflict: NVML reports another error.
        """
        nvml = self._nvml
        with self._errors(f"list the MIG instances of {device}"):
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
            names = self._slice_uuids(handle)
            found = []
            for profile in self._driver_profiles(handle):
                for one in self._instances_of(handle, profile):
                    known = nvml.nvmlGpuInstanceGetInfo(one)
                    made = MigSlice(
                        profile=profile.name,
                        start=int(known.placement.start),
                        memory_slices=int(known.placement.size),
                        uuid=names.get(int(known.id), ""),
                    )
                    found.append(MigInstance(device=device, id=int(known.id), slice=made))
        return tuple(sorted(found, key=lambda one: one.slice.start))

    def make(self, device: str, profile: str, start: int) -> MigInstance:
        """Make an instance from this memory slice on, with one compute instance over all of it.

        Raises:
            NotFound: the GPU has no such profile, or the profile cannot start there.
            Conflict: MIG mode is off, the memory slices are in use, or NVML refuses otherwise. Nothing is left, or the message says what is.
            NotPermitted: this account may not.
        """
        nvml = self._nvml
        known = self.describe(device)
        if known is None:
            raise NotFound(f"GPU {device} cannot be divided by MIG, or does not answer")
        if not known.on:
            raise Conflict(
                f"GPU {device}: {known.closed_reason}",
                hint="an operator switches it on while the GPU is idle: nvidia-smi -i GPU -mig 1",
            )
        wanted = known.profile(profile)
        if wanted is None or start not in wanted.starts:
            raise NotFound(f"GPU {device} has no profile {profile} that starts at memory slice {start}")
        with self._errors(f"make a {profile} at memory slice {start} of GPU {device}"):
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
            where = nvml.c_nvmlGpuInstancePlacement_t(start, wanted.memory_slices)
            made = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, wanted.id, ctypes.byref(where))
            try:
                number = int(nvml.nvmlGpuInstanceGetInfo(made).id)
                nvml.nvmlGpuInstanceCreateComputeInstance(made, self._whole_compute_profile(made))
                uuid = self._slice_uuids(handle)[number]
            except (nvml.NVMLError, KeyError) as error:
                self._take_away(made, device, profile, start, error)
                raise
        made_slice = MigSlice(profile=profile, start=start, memory_slices=wanted.memory_slices, uuid=uuid)
        return MigInstance(device=device, id=number, slice=made_slice)

    def remove(self, instance: MigInstance) -> None:
        """Remove an instance. Idempotent.

        Raises:
            Conflict: processes use it, or NVML refuses otherwise.
            NotPermitted: this account may not.
        """
        nvml, label = self._nvml, instance.slice.uuid or f"{instance.slice.profile} at {instance.slice.start}"
        with self._errors(f"remove MIG slice {label} of GPU {instance.device}"):
            handle = nvml.nvmlDeviceGetHandleByUUID(instance.device)
            try:
                found = nvml.nvmlDeviceGetGpuInstanceById(handle, instance.id)
                known = nvml.nvmlGpuInstanceGetInfo(found)
            except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                return
            if (int(known.placement.start), int(known.placement.size)) != (
                instance.slice.start,
                instance.slice.memory_slices,
            ):
                return  # another instance has this id by now
            users = self._users(handle, instance.id)
            if users:
                shown = ", ".join(map(str, users[:_PROCESSES_SHOWN_MAX]))
                raise Conflict(f"MIG slice {label} of GPU {instance.device} is in use by processes {shown}")
            self._destroy(found)

    def close(self) -> None:
        """Release the library."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    # ---- profiles -----------------------------------------------------------------------------------------------------

    def _profiles(self, handle: Any) -> tuple[tuple[MigProfile, ...], PlacementSource]:
        """The profiles whose starts are known, from the driver or else from the table, and where these come from."""
        found, source = [], PlacementSource.DRIVER
        for one in self._driver_profiles(handle):
            place = self._starts(handle, one.id)
            if place is None and one.name:
                place = self._starts_in_table(handle, one.name)
                source = source if place is None else PlacementSource.TABLE
            if one.name and place is not None and place[1][-1] + place[0] <= MEMORY_SLICES_MAX:
                found.append(
                    MigProfile(
                        name=one.name,
                        id=one.id,
                        compute_slices=one.compute_slices,
                        memory_slices=place[0],
                        memory_bytes=one.memory_bytes,
                        starts=place[1],
                        max_instances=one.count,
                    )
                )
        return tuple(found), source

    def _driver_profiles(self, handle: Any) -> Iterator[_DriverProfile]:
        """The profiles that the driver has for this GPU; without a name if neither the driver nor the table knows one."""
        nvml = self._nvml
        for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            name = ""
            try:
                known = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=2)
                name = _text(known.name).removeprefix("MIG ").strip()
            except nvml.NVMLError_FunctionNotFound:  # the driver is older than 510: without names
                try:
                    known = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=1)
                except nvml.NVMLError:
                    continue
                name = self._name_in_table(handle, int(known.id))
            except nvml.NVMLError:  # not a profile of this GPU
                continue
            yield _DriverProfile(
                name=name,
                id=int(known.id),
                compute_slices=int(known.sliceCount),
                memory_bytes=int(known.memorySizeMB) * MIB,
                count=int(known.instanceCount),
            )

    def _starts(self, handle: Any, profile_id: int) -> tuple[int, tuple[int, ...]] | None:
        """The size and the starts of a profile from the driver; None if it does not report them, or reports several sizes."""
        nvml = self._nvml
        try:
            count = ctypes.c_uint(0)
            nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
            places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
            nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, places, ctypes.byref(count))
        except nvml.NVMLError:
            return None
        sizes = {int(one.size) for one in places[: count.value]}
        starts = tuple(sorted({int(one.start) for one in places[: count.value]}))
        return (sizes.pop(), starts) if len(sizes) == 1 else None

    def _table(self, handle: Any) -> Sequence[MigProfile]:
        from phalanx.planner.facts.mig import find_mig_gpu

        found = find_mig_gpu(_text(self._nvml.nvmlDeviceGetName(handle)))
        return () if found is None else found.profiles

    def _starts_in_table(self, handle: Any, name: str) -> tuple[int, tuple[int, ...]] | None:
        return next(((one.memory_slices, one.starts) for one in self._table(handle) if one.name == name), None)

    def _name_in_table(self, handle: Any, profile_id: int) -> str:
        return next((one.name for one in self._table(handle) if one.id == profile_id), "")

    # ---- instances ----------------------------------------------------------------------------------------------------

    def _instances_of(self, handle: Any, profile: _DriverProfile) -> list[Any]:
        nvml = self._nvml
        count, found = ctypes.c_uint(profile.count), (nvml.c_nvmlGpuInstance_t * profile.count)()
        nvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
        return list(found[: count.value])

    def _mig_devices(self, handle: Any) -> Iterator[tuple[int, Any]]:
        """The id of each GPU instance that has a compute instance, and the handle that stands for the pair."""
        nvml = self._nvml
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                one = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                yield int(nvml.nvmlDeviceGetGpuInstanceId(one)), one

    def _slice_uuids(self, handle: Any) -> dict[int, str]:
        return {number: _text(self._nvml.nvmlDeviceGetUUID(one)) for number, one in self._mig_devices(handle)}

    def _users(self, handle: Any, instance_id: int) -> list[int]:
        return [
            int(process.pid)
            for number, one in self._mig_devices(handle)
            if number == instance_id
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(one)
        ]

    def _whole_compute_profile(self, instance: Any) -> int:
        """The id of the compute profile with the most processors: over all of the instance, also where it has more than its slices say."""
        nvml, best = self._nvml, (-1, -1)
        for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                known = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _ALL_ENGINES, version=1)
                best = max(best, (int(known.multiprocessorCount), int(known.id)))
        return best[1]

    def _destroy(self, instance: Any) -> None:
        """Destroy a GPU instance with its compute instances. NVML refuses what is in use."""
        nvml = self._nvml
        for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                known = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _ALL_ENGINES, version=1)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                continue
            most = int(known.instanceCount)
            count, found = ctypes.c_uint(most), (nvml.c_nvmlComputeInstance_t * most)()
            nvml.nvmlGpuInstanceGetComputeInstances(instance, known.id, found, ctypes.byref(count))
            for one in found[: count.value]:
                nvml.nvmlComputeInstanceDestroy(one)
        nvml.nvmlGpuInstanceDestroy(instance)

    def _take_away(self, instance: Any, device: str, profile: str, start: int, cause: Exception) -> None:
        """Destroy an instance that was made in part.

        Raises:
            Conflict: it stays.
        """
        try:
            self._destroy(instance)
        except self._nvml.NVMLError as error:
            raise Conflict(
                f"a {profile} at memory slice {start} of GPU {device} was made in part ({cause}) and stays: {error}",
                hint="the supervisor removes it when it starts again",
            ) from error

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise NVML's errors as ours; `what` completes "cannot"."""
        nvml = self._nvml
        try:
            yield
        except nvml.NVMLError_NoPermission as error:
            raise NotPermitted(f"cannot {what}: no permission", hint=_PERMISSION_HINT) from error
        except nvml.NVMLError_InsufficientResources as error:
            raise Conflict(f"cannot {what}: the memory slices, processors or media extension are in use") from error
        except nvml.NVMLError_InUse as error:
            raise Conflict(
                f"cannot {what}: another program uses it", hint="profilers and monitors such as nsys and dcgm do"
            ) from error
        except nvml.NVMLError as error:
            raise Conflict(f"cannot {what}: {error}") from error
        except KeyError as error:
            raise Conflict(f"cannot {what}: the driver made it, but lists no device for it") from error


def _text(value: Any) -> str:
    """Decode: NVML's strings are bytes in structures."""
    return value.decode() if isinstance(value, bytes) else str(value)
