"""Probes: NVML with a stand-in library in every mood, virtual devices with real processes, the node's facts."""

import os
import subprocess
import sys
import time
import types

import pytest

from phalanx.node.probes.devices import node_facts
from phalanx.node.probes.nvml import open_nvml
from phalanx.node.probes.virtual_devices import SlotTenant, VirtualProbe
from phalanx.node.processes.proctable import descendants, read_table


class NvmlError(Exception):
    pass


def refuse(*_):
    raise NvmlError


def fake_nvml(count=2, **changes):
    """A stand-in for pynvml: `count` GPUs joined by one NVLink, all features there."""
    record = types.SimpleNamespace
    waiting = changes.pop("xids", [])

    def wait(*_):
        if not waiting:
            raise NvmlError
        device, code = waiting.pop(0)
        return record(device=device, eventData=code)

    class Metrics:
        def __init__(self):
            self.metrics = [record(metricId=0, nvmlReturn=0, value=0.0)]

    def gpm(metrics):
        assert (metrics.sample1, metrics.sample2) != (None, None)
        metrics.metrics[0].value = 62.5
        return metrics

    functions = {
        "NVMLError": NvmlError,
        "NVML_SUCCESS": 0,
        "NVML_NVLINK_MAX_LINKS": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_GPM_METRICS_GET_VERSION": 1,
        "NVML_GPM_METRIC_SM_UTIL": 2,
        "nvmlEventTypeXidCriticalError": 8,
        "nvmlClocksThrottleReasonGpuIdle": 1,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "c_nvmlGpmMetricsGet_t": Metrics,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMigMode": lambda handle: refuse(),
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: record(total=80 << 30, used=1 << 30),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            record(pid=4711, usedGpuMemory=5 << 30),
            record(pid=4712, usedGpuMemory=None),
        ],
        "nvmlDeviceGetPciInfo": lambda handle: record(busId=f"00000000:0{handle}:00.0".encode()),
        "nvmlDeviceGetNvLinkState": lambda handle, link: 1 if link == 0 else refuse(),
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: record(busId=f"0000:0{1 - handle}:00.0"),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 7_000_123 + handle,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 1 | 4 | 64,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
        "nvmlDeviceGetUtilizationRates": lambda handle: record(gpu=80, memory=10),
        "nvmlGpmQueryDeviceSupport": lambda handle: record(isSupportedDevice=1),
        "nvmlGpmSampleAlloc": object,
        "nvmlGpmSampleGet": lambda handle, sample: sample,
        "nvmlGpmSampleFree": lambda sample: None,
        "nvmlGpmMetricsGet": gpm,
        "nvmlEventSetCreate": lambda: "events",
        "nvmlDeviceRegisterEvents": lambda *_: None,
        "nvmlEventSetWait_v2": wait,
        "nvmlEventSetFree": lambda events: None,
    }
    return types.SimpleNamespace(**{**functions, **changes})


def opened(nvml):
    probe = open_nvml(nvml)
    assert probe is not None
    return probe


def test_gpus_are_listed_with_their_links():
    first, second = opened(fake_nvml()).devices()
    assert (first.index, first.uuid, first.model, first.memory_bytes) == (0, "GPU-0", "NVIDIA H100", 80 << 30)
    assert (first.nvlink_peers, second.nvlink_peers) == (("GPU-1",), ("GPU-0",))
    assert not first.virtual


def lost_gpu(index):
    return refuse() if index == 1 else index


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, [0, 1, 2]),
        ({"nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"0000:{9 - handle}0:00.0")}, [2, 1, 0]),
        ({"nvmlDeviceGetMigMode": lambda handle: [handle == 2, 0]}, [None, None, None]),
        ({"nvmlDeviceGetMigMode": lambda handle: [0, 0]}, [0, 1, 2]),
        ({"nvmlDeviceGetPciInfo": lambda handle: refuse()}, [None, None, None]),
        ({"nvmlDeviceGetHandleByIndex": lost_gpu}, [None, None]),
    ],
    ids=["by-bus", "bus-in-reverse", "mig", "mig-off", "no-bus", "lost"],
)
def test_cudas_numbers_are_known_only_where_they_are_certain(changes, numbers):
    assert [facts.cuda_number for facts in opened(fake_nvml(3, **changes)).devices()] == numbers


def test_gpus_behind_a_switch_are_peers_of_each_other():
    nvml = fake_nvml(3, nvmlDeviceGetNvLinkRemotePciInfo=lambda *_: types.SimpleNamespace(busId="0000:c4:00.0"))
    assert [facts.nvlink_peers for facts in opened(nvml).devices()] == [
        ("GPU-1", "GPU-2"),
        ("GPU-0", "GPU-2"),
        ("GPU-0", "GPU-1"),
    ]


def test_a_sample_tells_all_that_the_gpu_tells():
    sample = opened(fake_nvml(xids=[(1, 79), (0, 31), (1, 48)])).sample()[1]
    assert (sample.utilization, sample.counter) == (0.625, "gpm_sm")
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (1 << 30, 80 << 30)
    assert (sample.power_w, sample.energy_mj, sample.temperature_c) == (350.5, 7_000_124, 61.0)
    assert sample.throttle == ("hw_thermal_slowdown", "sw_power_cap")
    assert (sample.xids, sample.ecc_uncorrected) == ((79, 48), 2)
    assert sample.process_bytes == {4711: 5 << 30}


def test_without_gpm_the_utilisation_is_nvmls():
    sample = opened(fake_nvml(nvmlGpmQueryDeviceSupport=refuse)).sample()[0]
    assert (sample.utilization, sample.counter) == (0.8, "nvml_gpu")


def test_every_sample_of_gpm_is_freed():
    held = []

    def take():
        held.append(object())
        return held[-1]

    probe = opened(fake_nvml(1, nvmlGpmSampleAlloc=take, nvmlGpmSampleFree=held.remove))
    for _ in range(5):
        probe.sample()
    assert len(held) == 1
    probe.close()
    assert held == []


def test_a_gpu_that_does_not_say_why_it_is_slow_has_unknown_throttle_reasons():
    probe = opened(fake_nvml(nvmlDeviceGetCurrentClocksThrottleReasons=refuse))
    assert [sample.throttle for sample in probe.sample()] == [None, None]


OPTIONAL = [
    name
    for name in vars(fake_nvml())
    if name.startswith("nvml")
    and callable(getattr(fake_nvml(), name))
    and name
    not in {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"}
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_whatever_nvml_refuses_the_rest_is_told(name):
    probe = opened(fake_nvml(**{name: refuse}))
    assert [sample.uuid for sample in probe.sample()] == ["GPU-0", "GPU-1"]
    probe.close()


def test_a_gpu_that_fell_off_the_bus_gives_no_sample():
    nvml = fake_nvml()
    probe = opened(nvml)
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-0" if handle == 0 else refuse()
    assert [sample.uuid for sample in probe.sample()] == ["GPU-0"]


@pytest.mark.parametrize("nvml", [fake_nvml(nvmlInit=refuse), fake_nvml(0), fake_nvml(nvmlDeviceGetCount=refuse)])
def test_without_driver_or_device_there_is_no_probe(nvml):
    assert open_nvml(nvml) is None


def test_a_slot_shows_the_cpu_and_memory_of_its_ranks():
    now = [0.0]
    probe = VirtualProbe("n0", 2, 1 << 30, clock=lambda: now[0])
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done & wait"], start_new_session=True)
    try:
        probe.bind(1, [SlotTenant(keeper=os.getpid(), ranks={0: busy.pid}, local_ranks=frozenset({0}))])
        assert [sample.utilization for sample in probe.sample()] == [0.0, 0.0]
        idle, loaded = probe.sample()
        while not loaded.utilization:  # virtual seconds pass; the child burns real ones
            now[0] += 0.05
            idle, loaded = probe.sample()
        assert 0 < loaded.utilization <= 1
        assert (idle.utilization, idle.memory_used_bytes) == (0.0, 0)
        assert loaded.memory_used_bytes
        assert (loaded.counter, loaded.virtual, loaded.memory_total_bytes) == ("rank_cpu", True, 1 << 30)
        probe.unbind(1)
        assert probe.sample()[1].memory_used_bytes == 0
    finally:
        os.killpg(busy.pid, 9)
        busy.wait()


KEEPER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
def rank(number, then):
    environment = {**os.environ, "LOCAL_RANK": number}
    return subprocess.Popen(["sh", "-c", "(setsid sleep 100 &); exec " + then], env=environment)
sleeping = rank("0", "sleep 100")
rank("1", "true").wait()
print(sleeping.pid, flush=True)
sleeping.wait()
print("ended", flush=True)
sys.stdin.read()
"""


def test_a_process_left_behind_by_a_double_fork_counts_for_the_slot_of_its_rank():
    probe = VirtualProbe("n0", 3, 1 << 30)
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert keeper.stdout is not None
    try:
        rank = int(keeper.stdout.readline())
        for slot in range(2):
            probe.bind(slot, [SlotTenant(keeper=keeper.pid, ranks={0: rank}, local_ranks=frozenset({slot}))])
        hangs_s = time.monotonic() + 60
        while (seen := [sample.processes for sample in probe.sample()]) != [2, 1, 0]:  # rank 1 has ended
            assert time.monotonic() < hangs_s, f"{seen}, also once the shells between have ended"
        os.kill(rank, 9)
        assert keeper.stdout.readline() == "ended\n"
        assert [sample.processes for sample in probe.sample()] == [1, 1, 0]
    finally:
        for pid in descendants(read_table(), [keeper.pid]):
            os.kill(pid, 9)
        keeper.kill()
        keeper.communicate()


@pytest.mark.parametrize("stated", ["9" * 5000, "-1", "x", ""])
def test_a_process_that_states_an_odd_rank_counts_for_every_slot_of_its_job(stated):
    probe = VirtualProbe("n0", 1, 1 << 30)
    process = subprocess.Popen(["sleep", "100"], env={**os.environ, "LOCAL_RANK": stated})
    try:
        probe.bind(0, [SlotTenant(keeper=os.getpid(), ranks={}, local_ranks=frozenset({0}))])
        (sample,) = probe.sample()
        assert sample.processes is not None
        assert sample.processes >= 1
    finally:
        process.kill()
        process.wait()


def test_virtual_devices_have_names_of_their_own():
    facts = VirtualProbe("n0", 2, 5).devices()
    assert [device.uuid for device in facts] == ["VIRTUAL-n0-0", "VIRTUAL-n0-1"]
    assert all(device.virtual for device in facts)


def test_the_facts_of_the_node(tmp_path):
    facts = node_facts(str(tmp_path))
    assert facts.hostname
    assert len(facts.boot_id) == 36
    assert facts.cpus >= 1
    assert facts.memory_bytes > 1 << 28
    assert facts.disk_free_bytes > 0
