"""A stand-in for the module of nvidia-ml-py, for supervisors that are real processes: put this folder first on PYTHONPATH.

The GPUs are in the folder FAKE_NVML, one file `gpu-N.json` each. Their power is a timeline that the test or its jobs write, one line `nanoseconds
milliwatts` (CLOCK_BOOTTIME) for each change; the counter of energy is its exact integral. A call that it does not have raises, as on a driver
that does not support it; so nothing here can switch MIG mode or reset a GPU.
"""

# ruff: noqa: N802  # the names of NVML

import json
import os
import time
from types import SimpleNamespace

FOLDER = os.environ.get("FAKE_NVML", "")
NVML_NVLINK_MAX_LINKS = 0
NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816  # as above
nvmlClocksThrottleReasonSwPowerCap = 4  # noqa: N816  # as above


class NVMLError(Exception):
    """Any error of NVML. `value`: its code."""

    def __init__(self, value=3):
        super().__init__(value)
        self.value = value


class NVMLError_NoPermission(NVMLError):  # noqa: N801  # as above
    """The caller may not change the device."""


def __getattr__(name):
    if not name.startswith(("nvmlDevice", "nvmlEventSet", "nvmlGpm", "nvmlGpu", "nvmlSystem")):
        raise AttributeError(name)

    def unsupported(*_):
        raise NVMLError

    return unsupported


def add_gpu(index, *, idle_mw=90_000, uuid="", counter=True, folder=None):
    """Put a GPU into the machine that draws `idle_mw` from now on."""
    folder = folder or FOLDER
    facts = {
        "uuid": uuid or f"GPU-{index:08d}",
        "model": "NVIDIA H100 80GB HBM3",
        "counter": counter,
        "from_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "limits_mw": [200_000, 700_000, 700_000],
        "limit_mw": 700_000,
        "privileged": True,
    }
    _write(index, facts, folder)
    set_power(index, idle_mw, folder=folder)


def set_power(index, milliwatts, *, folder=None):
    """From now on the GPU draws this."""
    with open(os.path.join(folder or FOLDER, f"power-{index}"), "a", encoding="ascii") as timeline:
        timeline.write(f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)} {milliwatts}\n")


def energy_mj(index, until_ns, *, folder=None):
    """The exact energy of a GPU since it came, in millijoules, up to a time of CLOCK_BOOTTIME."""
    facts, points = _read(index, folder), _timeline(index, folder)
    total = 0  # picojoules: milliwatts times nanoseconds
    for (begin_ns, milliwatts), (end_ns, _) in zip(points, [*points[1:], (until_ns, 0)], strict=True):
        total += max(0, min(end_ns, until_ns) - max(begin_ns, facts["from_ns"])) * milliwatts
    return total // 10**9


def change(index, *, folder=None, **facts):
    """Change facts of a GPU."""
    _write(index, {**_read(index, folder), **facts}, folder or FOLDER)


def _timeline(index, folder=None):
    with open(os.path.join(folder or FOLDER, f"power-{index}"), encoding="ascii") as timeline:
        return [tuple(map(int, line.split())) for line in timeline if line.endswith("\n")]


def _read(index, folder=None):
    with open(os.path.join(folder or FOLDER, f"gpu-{index}.json"), encoding="ascii") as file:
        return json.load(file)


def _write(index, facts, folder):
    path = os.path.join(folder, f"gpu-{index}.json")
    with open(path + ".new", "w", encoding="ascii") as file:
        json.dump(facts, file)
    os.replace(path + ".new", path)


# ---- the calls of NVML; a handle is the index


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len([name for name in os.listdir(FOLDER) if name.startswith("gpu-") and name.endswith(".json")])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetHandleByUUID(uuid):
    for index in range(nvmlDeviceGetCount()):
        if _read(index)["uuid"] == uuid:
            return index
    raise NVMLError(6)


def nvmlDeviceGetUUID(index):
    return _read(index)["uuid"]


def nvmlDeviceGetName(index):
    return _read(index)["model"]


def nvmlDeviceGetMemoryInfo(_index):
    return SimpleNamespace(total=80 << 30, used=1 << 20)


def nvmlDeviceGetPciInfo(index):
    return SimpleNamespace(busId=f"00000000:{index + 16:02X}:00.0")


def nvmlDeviceGetTemperature(_index, _sensor):
    return 50


def nvmlDeviceGetUtilizationRates(index):
    return SimpleNamespace(gpu=90 if _timeline(index)[-1][1] > 200_000 else 0, memory=0)


def nvmlDeviceGetComputeRunningProcesses(_index):
    return []


def nvmlDeviceGetCurrentClocksThrottleReasons(index):
    return nvmlClocksThrottleReasonSwPowerCap if _timeline(index)[-1][1] > _read(index)["limit_mw"] else 0


def nvmlDeviceGetPowerUsage(index):
    return _timeline(index)[-1][1]


def nvmlDeviceGetTotalEnergyConsumption(index):
    if not _read(index)["counter"]:
        raise NVMLError
    return energy_mj(index, time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def nvmlDeviceGetPowerManagementLimitConstraints(index):
    return _read(index)["limits_mw"][:2]


def nvmlDeviceGetPowerManagementDefaultLimit(index):
    return _read(index)["limits_mw"][2]


def nvmlDeviceGetPowerManagementLimit(index):
    return _read(index)["limit_mw"]


def nvmlDeviceSetPowerManagementLimit(index, milliwatts):
    facts = _read(index)
    if not facts["privileged"]:
        raise NVMLError_NoPermission(4)
    if not facts["limits_mw"][0] <= milliwatts <= facts["limits_mw"][1]:
        raise NVMLError(2)
    change(index, limit_mw=milliwatts)
