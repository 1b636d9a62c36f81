"""The kernel's log as it grows, on a file that stands for /dev/kmsg: whose XID it was, and when."""

import pytest

from phalanx.node.probes.devices import DeviceFacts
from phalanx.node.probes.kernel_log import KernelLog
from phalanx.wire.rank import boottime_ns

LOST = "NVRM: Xid (PCI:0000:c6:00): 79, pid=11, name=python, GPU has fallen off the bus.\n"
FAULT = "NVRM: Xid (PCI:0000:c7:00): 31, pid=12, name=python, Ch 00000008\n"


def gpu(index, bus):
    return DeviceFacts(index=index, uuid=f"GPU-{index}", model="H100", memory_bytes=1, pci_bus=bus)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text(f"before we came: {LOST}")
    kernel = KernelLog([gpu(0, "00000000:C6:00.0"), gpu(1, "00000000:C7:00.0")], str(path))
    yield kernel, lambda text: path.open("a").write(text)
    kernel.close()


def test_xid_is_laid_to_its_own_device_and_time(log):
    kernel, says = log
    began_ns = boottime_ns()
    says(LOST + "unrelated\n" + FAULT + LOST)
    kernel.poll()
    assert kernel.xids(began_ns, [0]) == (79,)
    assert kernel.xids(began_ns, [1]) == (31,)
    assert kernel.xids(began_ns, [0, 1]) == (79, 31)
    assert kernel.xids(began_ns, []) == ()
    assert kernel.xids(boottime_ns(), [0]) == ()


def test_what_stood_there_before_is_nobodys(log):
    kernel, _ = log
    kernel.poll()
    assert kernel.xids(0, [0, 1]) == ()


def test_nvml_and_kernel_telling_the_same_is_one(log):
    kernel, says = log
    says(LOST)
    kernel.poll()
    kernel.add_xids(0, (79, 48))
    assert kernel.xids(0, [0]) == (79, 48)


def test_kill_for_want_of_memory_is_known_by_its_pid(log):
    kernel, says = log
    says("Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB\n")
    kernel.poll()
    assert kernel.oom_killed(0, [1, 4242])
    assert not kernel.oom_killed(0, [1])
    assert not kernel.oom_killed(boottime_ns(), [4242])


def test_log_that_may_not_be_read_tells_nothing(tmp_path):
    kernel = KernelLog([], str(tmp_path / "none"))
    kernel.poll()
    assert kernel.xids(0, [0]) == ()
    kernel.close()
