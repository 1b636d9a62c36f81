"""Power limits of a node's GPUs: all are set or none, and those of before come back, whoever dies in between."""

import importlib
import json

import pytest

from phalanx.core.errors import Conflict, NotPermitted
from phalanx.node.power.limit_keeper import PowerLimitKeeper
from phalanx.node.probes.devices import DeviceFacts

NOW_S = 1_700_000_000.0


def facts(index, uuid=""):
    return DeviceFacts(index=index, uuid=uuid or f"GPU-{index:08d}", model="H100", memory_bytes=80 << 30, pci_bus="")


class Machine:
    """Two stand-in GPUs, the second with a limit of 650 W of its own, and the node's folder."""

    def __init__(self, tmp_path, monkeypatch):
        self.nvml = importlib.import_module("tests.fake_nvml.pynvml")
        self.folder = tmp_path / "node"
        (tmp_path / "gpus").mkdir()
        monkeypatch.setattr(self.nvml, "FOLDER", str(tmp_path / "gpus"))
        for index in range(2):
            self.nvml.add_gpu(index)
        self.nvml.change(1, limit_mw=650_000)

    def start(self):
        """A supervisor starts."""
        return PowerLimitKeeper(self.nvml, str(self.folder), [facts(0), facts(1)])

    def limits(self):
        return [self.nvml.nvmlDeviceGetPowerManagementLimit(index) // 1000 for index in range(2)]

    def recorded(self):
        return json.loads((self.folder / "power_limits.json").read_text())["original_mw"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_each_gpu_gets_back_its_own_limit(machine):
    keeper = machine.start()
    keeper.cap(300_000, None)
    assert machine.limits() == [300, 300]
    assert [one.original_mw for one in keeper.limits()] == [700_000, 650_000]
    keeper.cap(400_000, None)
    assert machine.limits() == [400, 400]
    assert keeper.restore()
    assert machine.limits() == [700, 650]
    assert [one.original_mw for one in keeper.limits()] == [None, None]
    assert not keeper.restore()


def test_limit_of_before_is_on_disk_before_it_is_changed(machine, monkeypatch):
    def die(*_):
        assert machine.recorded() == {"GPU-00000000": 700_000, "GPU-00000001": 650_000}
        raise KeyboardInterrupt

    keeper = machine.start()
    monkeypatch.setattr(machine.nvml, "nvmlDeviceSetPowerManagementLimit", die)
    with pytest.raises(KeyboardInterrupt):
        keeper.cap(300_000, NOW_S)


def test_supervisor_that_died_restores_an_expired_cap_at_its_next_start(machine):
    machine.start().cap(300_000, NOW_S)
    later = machine.start()
    assert not later.is_over(NOW_S - 1)
    later.recover(NOW_S + 1)
    assert machine.limits() == [700, 650]
    assert not later.is_over(NOW_S + 1)


def test_cap_that_still_holds_is_set_again_after_a_reboot(machine):
    machine.start().cap(300_000, NOW_S)
    machine.nvml.change(0, limit_mw=700_000)
    machine.nvml.change(1, limit_mw=700_000)
    later = machine.start()
    later.recover(NOW_S - 10)
    assert machine.limits() == [300, 300]
    later.restore()
    assert machine.limits() == [700, 650], "and the limits of before are still those of before"


def test_without_root_no_limit_changes_and_the_error_says_so(machine):
    machine.nvml.change(1, privileged=False)
    keeper = machine.start()
    with pytest.raises(NotPermitted, match="only root may change the power limit of GPU 1; this supervisor is user"):
        keeper.cap(300_000, None)
    assert machine.limits() == [700, 650]
    assert not keeper.restore(), "nothing is recorded"


def test_limit_that_one_gpu_refuses_is_set_on_none(machine):
    machine.nvml.change(1, limits_mw=[500_000, 700_000, 700_000])
    keeper = machine.start()
    keeper.cap(600_000, NOW_S)
    with pytest.raises(Conflict, match="GPU 1"):
        keeper.cap(300_000, None)
    assert machine.limits() == [600, 600], "the cap of before still holds"
    assert keeper.is_over(NOW_S)


def test_gpu_that_was_replaced_keeps_the_limit_of_its_driver(machine):
    machine.start().cap(300_000, None)
    machine.nvml.change(1, uuid="GPU-new", limit_mw=500_000)
    later = PowerLimitKeeper(machine.nvml, str(machine.folder), [facts(0), facts(1, "GPU-new")])
    later.restore()
    assert machine.limits() == [700, 500]


@pytest.mark.parametrize("damaged", ["", "[]", '{"original_mw": 3}', "{"])
def test_damaged_record_ends_no_supervisor(machine, damaged):
    machine.folder.mkdir()
    (machine.folder / "power_limits.json").write_text(damaged)
    machine.start().recover(NOW_S)
    assert machine.limits() == [700, 650]
