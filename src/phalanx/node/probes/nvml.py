"""NVIDIA GPUs through NVML: inventory and samples. The library is imported on demand; a node without it has no such devices.

Every value is queried separately: one that the board, driver or virtual machine does not provide becomes None, and a device that fell off
the bus has no sample. Counters are explained in the NVML API reference (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from phalanx.node.probes.devices import DeviceFacts, DeviceReading

T = TypeVar("T")

# NVML's bits, by the suffix of their constant's name; GpuIdle and application clocks are not throttling.
_THROTTLE: Final = {
    "SwPowerCap": "sw_power_cap",
    "HwSlowdown": "hw_slowdown",
    "SyncBoost": "sync_boost",
    "SwThermalSlowdown": "sw_thermal_slowdown",
    "HwThermalSlowdown": "hw_thermal_slowdown",
    "HwPowerBrakeSlowdown": "hw_power_brake_slowdown",
}
_EVENTS_PER_SAMPLE_MAX: Final = 64  # an XID storm must not hold up sampling; the rest comes with the next sample


@dataclass(slots=True)
class _Device:
    facts: DeviceFacts
    handle: Any
    gpm: Any = None  # the GPM sample before this one; None where the chip (before Hopper) or MIG has none


def load_nvml(module: Any = None) -> Any:
    """The initialised library; None without library or driver.

    Args:
        module: replaces `pynvml`; by default the module of the package nvidia-ml-py.
    """
    if module is None:
        try:
            import pynvml
        except ImportError:
            return None
        module = pynvml
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return module


def open_nvml(module: Any = None) -> NvmlProbe | None:
    """A probe of this node's GPUs, or None without library, driver or device. `module`: as in `load_nvml`."""
    module = load_nvml(module)
    if module is None:
        return None
    probe = NvmlProbe(module)
    if not probe.devices():
        probe.close()
        return None
    return probe


class NvmlProbe:
    """The GPUs of this node; a DeviceProbe."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._devices: list[_Device] = []
        self._events: Any = None
        for index in range(self._ask(module.nvmlDeviceGetCount) or 0):
            with contextlib.suppress(module.NVMLError):
                handle = module.nvmlDeviceGetHandleByIndex(index)
                self._devices.append(_Device(self._facts(index, handle), handle))
        self._number_as_cuda()
        self._link_peers()
        self._watch_xids()
        for device in self._devices:
            device.gpm = self._gpm_sample(device.handle)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The GPUs by index."""
        return tuple(device.facts for device in self._devices)

    def sample(self) -> tuple[DeviceReading, ...]:
        """Current samples of all GPUs; GPM utilisation covers the time since the previous sample."""
        xids = self._xids()
        return tuple(
            sample for device in self._devices if (sample := self._sample(device, xids.get(device.facts.uuid, ())))
        )

    def close(self) -> None:
        """Free the samples and the library."""
        for device in self._devices:
            if device.gpm is not None:
                self._ask(self._nvml.nvmlGpmSampleFree, device.gpm)
                device.gpm = None
        if self._events is not None:
            self._ask(self._nvml.nvmlEventSetFree, self._events)
            self._events = None
        self._ask(self._nvml.nvmlShutdown)

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """One NVML call; None on an NVML error (not supported, no permission, GPU lost, function not in this driver)."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _facts(self, index: int, handle: Any) -> DeviceFacts:
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = self._ask(self._nvml.nvmlDeviceGetPciInfo, handle)
        return DeviceFacts(
            index=index,
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            model=_text(self._nvml.nvmlDeviceGetName(handle)),
            memory_bytes=0 if memory is None else int(memory.total),
            pci_bus="" if pci is None else _text(pci.busId),
            pcie=self._pcie(handle),
        )

    def _number_as_cuda(self) -> None:
        """Fill in CUDA's numbers, if they are certain: CUDA numbers GPUs with MIG in its own way, and may leave out one that does not answer."""
        handles = [device.handle for device in self._devices]
        modes = [self._ask(self._nvml.nvmlDeviceGetMigMode, handle) for handle in handles]
        buses = sorted(_bus(device.facts.pci_bus) for device in self._devices)
        whole = len(handles) == self._ask(self._nvml.nvmlDeviceGetCount) and all(buses) and len({*buses}) == len(buses)
        if whole and not any(mode and mode[0] for mode in modes):
            for device in self._devices:
                device.facts = replace(device.facts, cuda_number=buses.index(_bus(device.facts.pci_bus)))

    def _pcie(self, handle: Any) -> str:
        """Maximum generation (an idle link slows down) and current lanes: fewer lanes than possible mean a bad slot or riser."""
        generation = self._ask(self._nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        lanes = self._ask(self._nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
        most = self._ask(self._nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        if generation is None or lanes is None:
            return ""
        return f"gen{generation} x{lanes}" + (f" of x{most}" if most is not None and lanes < most else "")

    def _link_peers(self) -> None:
        """Fill in the NVLink peers: direct ones by PCI bus; behind an NVSwitch all GPUs with live links reach each other."""
        by_bus = {_bus(device.facts.pci_bus): device.facts.uuid for device in self._devices}
        direct: dict[str, dict[str, int]] = {device.facts.uuid: {} for device in self._devices}
        switched: dict[str, int] = {}
        for device in self._devices:
            for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
                if self._ask(self._nvml.nvmlDeviceGetNvLinkState, device.handle, link) != 1:
                    continue
                remote = self._ask(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, device.handle, link)
                peer = None if remote is None else by_bus.get(_bus(_text(remote.busId)))
                if peer is None:
                    switched[device.facts.uuid] = switched.get(device.facts.uuid, 0) + 1
                else:
                    direct[device.facts.uuid][peer] = direct[device.facts.uuid].get(peer, 0) + 1
        for device in self._devices:
            uuid = device.facts.uuid
            links = {**dict.fromkeys(switched, switched[uuid]), **direct[uuid]} if uuid in switched else direct[uuid]
            peers = tuple(sorted(links.keys() - {uuid}))
            device.facts = replace(device.facts, nvlink_peers=peers, nvlinks=tuple(links[peer] for peer in peers))

    def _sample(self, device: _Device, xids: tuple[int, ...]) -> DeviceReading | None:
        nvml, handle = self._nvml, device.handle
        try:
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:  # GPU is lost: an invented sample would hide it
            return None
        utilization, counter = self._utilization(device)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        energy_mj = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        running = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return DeviceReading(
            index=device.facts.index,
            uuid=device.facts.uuid,
            utilization=utilization,
            counter=counter,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=None if temperature is None else float(temperature),
            throttle=self._throttle(handle),
            xids=xids,
            process_bytes=_process_bytes(running or []),
            processes=None if running is None else len(running),
            energy_mj=None if energy_mj is None else int(energy_mj),
            ecc_uncorrected=self._ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
        )

    def _utilization(self, device: _Device) -> tuple[float | None, str]:
        """GPM's share of busy SM-cycles where the chip has it, else NVML's share of time with any kernel."""
        before, device.gpm = device.gpm, self._gpm_sample(device.handle)
        try:
            if before is not None and device.gpm is not None:
                metrics = self._nvml.c_nvmlGpmMetricsGet_t()
                metrics.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
                metrics.numMetrics = 1
                metrics.sample1, metrics.sample2 = before, device.gpm
                metrics.metrics[0].metricId = self._nvml.NVML_GPM_METRIC_SM_UTIL
                found = self._ask(self._nvml.nvmlGpmMetricsGet, metrics)
                if found is not None and found.metrics[0].nvmlReturn == self._nvml.NVML_SUCCESS:
                    return min(1.0, max(0.0, found.metrics[0].value / 100)), "gpm_sm"
        finally:
            if before is not None:
                self._ask(self._nvml.nvmlGpmSampleFree, before)
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, device.handle)
        return (None if rates is None else rates.gpu / 100), "nvml_gpu"

    def _gpm_sample(self, handle: Any) -> Any:
        """A GPM sample; None without GPM."""
        support = self._ask(self._nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is None or not support.isSupportedDevice:
            return None
        sample = self._ask(self._nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return None
        try:
            self._nvml.nvmlGpmSampleGet(handle, sample)
        except self._nvml.NVMLError:  # MIG mode, or a profiler holds the counters
            self._ask(self._nvml.nvmlGpmSampleFree, sample)
            return None
        return sample

    def _throttle(self, handle: Any) -> tuple[str, ...] | None:
        bits = self._ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        if bits is None:
            return None
        names = {
            name for tail, name in _THROTTLE.items() if bits & getattr(self._nvml, f"nvmlClocksThrottleReason{tail}", 0)
        }
        return tuple(sorted(names))

    def _watch_xids(self) -> None:
        self._events = self._ask(self._nvml.nvmlEventSetCreate)
        if self._events is not None:
            for device in self._devices:
                self._ask(
                    self._nvml.nvmlDeviceRegisterEvents,
                    device.handle,
                    self._nvml.nvmlEventTypeXidCriticalError,
                    self._events,
                )

    def _xids(self) -> dict[str, tuple[int, ...]]:
        """The XIDs since the last call, by UUID."""
        found: dict[str, tuple[int, ...]] = {}
        if self._events is None:
            return found
        for _ in range(_EVENTS_PER_SAMPLE_MAX):
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)  # NVMLError_Timeout: none is waiting
            if event is None:
                break
            uuid = self._ask(self._nvml.nvmlDeviceGetUUID, event.device)
            if uuid is not None:
                found[_text(uuid)] = (*found.get(_text(uuid), ()), int(event.eventData))
        return found


def _text(value: Any) -> str:
    """Decode: NVML's strings were bytes before nvidia-ml-py 12."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _bus(bus_id: str) -> str:
    """A PCI bus id, normalised in the number of digits of its domain."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain or '0', 16):x}:{rest}"


def _process_bytes(running: Iterable[Any]) -> dict[int, int]:
    """The driver reports no figure, or one above all memory, where it does not know (in some containers)."""
    return {int(one.pid): int(one.usedGpuMemory) for one in running if one.usedGpuMemory is not None}
