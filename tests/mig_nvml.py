"""A stand-in for NVML's MIG calls: GPUs with the geometry of the fact table, real structures and error classes, no library.

It has the names of `pynvml`. A call that it does not have fails the test: so nothing here can switch MIG mode or reset a GPU.
"""

# ruff: noqa: N802  # the names of NVML

import ctypes
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

from phalanx.planner.facts.mig import find_mig_gpu

CALLS = ("NVML_", "NVMLError", "c_nvml")  # what is taken from the real module


@dataclass
class FakeInstance:
    """A GPU instance. `compute`: id of its compute profile, or None; `pids`: processes on it."""

    id: int
    profile: object
    start: int
    compute: int | None = None
    pids: list = field(default_factory=list)


@dataclass
class FakeGpu:
    """One GPU. `broken`: functions that fail, with their error code."""

    uuid: str
    model: str = "NVIDIA H100 80GB HBM3"
    mode: tuple = (1, 1)
    privileged: bool = True
    names: bool = True
    broken: dict = field(default_factory=dict)
    instances: list = field(default_factory=list)

    @property
    def profiles(self):
        found = find_mig_gpu(self.model)
        return () if found is None else found.profiles

    def add(self, name, start, pids=(), *, whole=True):
        """Make an instance as an operator with nvidia-smi would."""
        profile = next(one for one in self.profiles if one.name == name)
        made = FakeInstance(self.free_id(), profile, start, 0 if whole else None, list(pids))
        self.instances.append(made)
        return made

    def free_id(self):
        return next(number for number in range(1, 20) if number not in {one.id for one in self.instances})

    def places(self):
        return sorted((one.profile.name, one.start) for one in self.instances)


def address(handle):
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def private(call):
    """A call that NVML gives to privileged callers only, or that a test lets fail."""

    @functools.wraps(call)
    def checked(self, handle, *rest):
        gpu = self.gpu_of(handle)
        if not gpu.privileged:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        self.fail(gpu, call.__name__)
        return call(self, handle, *rest)

    return checked


class FakeNvml:
    """The module. Handles are addresses of nothing: of a GPU its number, of its instance that and the instance's id."""

    def __init__(self, *gpus):
        self.gpus = list(gpus)

    def __getattr__(self, name):
        if name.startswith(CALLS):
            return getattr(pynvml, name)
        raise AssertionError(f"{name} must not be called")

    @staticmethod
    def fail(gpu, name):
        if name in gpu.broken:
            raise pynvml.NVMLError(gpu.broken[name])

    def gpu_of(self, handle):
        return handle if isinstance(handle, FakeGpu) else self.gpus[address(handle) // 1000]

    def instance_of(self, handle):
        number = address(handle) % 1000
        for one in self.gpu_of(handle).instances:
            if one.id == number:
                return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def handle(self, gpu, number, kind):
        return ctypes.cast(self.gpus.index(gpu) * 1000 + number, kind)

    # ---- devices

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetName(self, gpu):
        return gpu.model

    def nvmlDeviceGetMigMode(self, gpu):
        if not gpu.profiles:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return list(gpu.mode)

    # ---- profiles of a GPU: NVML counts them by their kind, and gives each the id that nvidia-smi shows

    def nvmlDeviceGetGpuInstanceProfileInfo(self, gpu, number, version=2):
        if number >= len(gpu.profiles):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if version == 2 and not gpu.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        one = gpu.profiles[number]
        found = SimpleNamespace(
            id=one.id,
            sliceCount=one.compute_slices,
            instanceCount=one.max_instances,
            memorySizeMB=one.memory_bytes >> 20,
        )
        if version == 2:
            found.name = f"MIG {one.name}".encode()
        return found

    @private
    def nvmlDeviceGetGpuInstancePossiblePlacements(self, gpu, profile_id, places, count):
        one = next(own for own in gpu.profiles if own.id == profile_id)
        count._obj.value = len(one.starts)
        for at, start in enumerate(one.starts if places is not None else ()):
            places[at].start, places[at].size = start, one.memory_slices

    # ---- GPU instances

    @private
    def nvmlDeviceGetGpuInstances(self, gpu, profile_id, found, count):
        own = [one for one in gpu.instances if one.profile.id == profile_id]
        assert count._obj.value >= len(own)
        count._obj.value = len(own)
        for at, one in enumerate(own):
            found[at] = self.handle(gpu, one.id, pynvml.c_nvmlGpuInstance_t)

    @private
    def nvmlDeviceGetGpuInstanceById(self, gpu, number):
        if all(one.id != number for one in gpu.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.handle(gpu, number, pynvml.c_nvmlGpuInstance_t)

    def nvmlGpuInstanceGetInfo(self, instance):
        one = self.instance_of(instance)
        placement = SimpleNamespace(start=one.start, size=one.profile.memory_slices)
        return SimpleNamespace(id=one.id, profileId=one.profile.id, placement=placement)

    @private
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, gpu, profile_id, placement):
        one = next(own for own in gpu.profiles if own.id == profile_id)
        start, size = placement._obj.start, placement._obj.size
        if gpu.mode[0] != 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if start not in one.starts or size != one.memory_slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        new = set(range(start, start + size))
        taken = {bit for own in gpu.instances for bit in range(own.start, own.start + own.profile.memory_slices)}
        media = one.has_media and any(own.profile.has_media for own in gpu.instances)
        if new & taken or media:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        made = FakeInstance(gpu.free_id(), one, start)
        gpu.instances.append(made)
        return self.handle(gpu, made.id, pynvml.c_nvmlGpuInstance_t)

    @private
    def nvmlGpuInstanceDestroy(self, instance):
        one = self.instance_of(instance)
        if one.compute is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        self.gpu_of(instance).instances.remove(one)

    # ---- compute instances: profile 0 has a slice's processors, profile 7 all that a 1g with twice the memory has

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(self, instance, number, engines, version=2):
        one = self.instance_of(instance).profile
        whole = 7 if one.compute_slices < one.memory_slices and one.compute_slices == 1 else one.compute_slices - 1
        if number not in {0, whole}:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        processors = 26 if number == 7 else 16 * (number + 1)
        return SimpleNamespace(id=number, multiprocessorCount=processors, instanceCount=1 if number == whole else 7)

    @private
    def nvmlGpuInstanceCreateComputeInstance(self, instance, profile_id):
        self.instance_of(instance).compute = profile_id

    @private
    def nvmlGpuInstanceGetComputeInstances(self, instance, profile_id, found, count):
        one = self.instance_of(instance)
        count._obj.value = int(one.compute == profile_id)
        if one.compute == profile_id:
            found[0] = self.handle(self.gpu_of(instance), one.id, pynvml.c_nvmlComputeInstance_t)

    @private
    def nvmlComputeInstanceDestroy(self, compute):
        one = self.instance_of(compute)
        if one.pids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        one.compute = None

    # ---- MIG devices: the pair of both

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, number):
        own = [one for one in gpu.instances if one.compute is not None]
        if number >= len(own):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu, own[number]

    def nvmlDeviceGetGpuInstanceId(self, device):
        return device[1].id

    def nvmlDeviceGetUUID(self, device):
        return f"MIG-{device[0].uuid}-{device[1].id}"

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        self.fail(device[0], "nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in device[1].pids]
