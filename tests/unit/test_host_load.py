"""The load of a machine, read from files that stand in for /proc and /sys."""

from pathlib import Path

from phalanx.node.probes.host_load import HostLoad, HostReading

MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    400 kB\n"


class Machine:
    """A machine of files; `at_s` is its clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at_s = folder, 0.0
        self.load = HostLoad(lambda: self.at_s, str(folder))
        self.write("proc/meminfo", MEMINFO)

    def write(self, path: str, text: str) -> None:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def cpu(self, busy: int, idle: int) -> None:
        self.write("proc/stat", f"cpu  {busy} 0 0 {idle} 0 0 0 0 77 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    def port(self, name: str, received: int, sent: int, *, hardware: bool = True) -> None:
        self.write(f"sys/class/net/{name}/type", "1\n")
        self.write(f"sys/class/net/{name}/statistics/rx_bytes", f"{received}\n")
        self.write(f"sys/class/net/{name}/statistics/tx_bytes", f"{sent}\n")
        if hardware:
            self.write(f"sys/class/net/{name}/device/numa_node", "0\n")

    def rdma(self, words_received: int, words_sent: int) -> None:
        self.write("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", f"{words_received}\n")
        self.write("sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", f"{words_sent}\n")


def test_the_second_reading_has_the_means_since_the_first(tmp_path):
    machine = Machine(tmp_path)
    machine.cpu(100, 900)
    machine.port("eth0", 1000, 50)
    machine.port("docker0", 10**9, 10**9, hardware=False)
    machine.rdma(0, 0)
    first = machine.load.read()
    assert first == HostReading(memory_total_bytes=1_024_000, memory_available_bytes=409_600)
    machine.at_s = 10.0
    machine.cpu(175, 925)
    machine.port("eth0", 3000, 150)
    machine.port("docker0", 10**12, 10**12, hardware=False)
    machine.rdma(1000, 500)
    second = machine.load.read()
    assert second.cpu_utilization == 0.75
    assert (second.network_received_bytes_per_s, second.network_sent_bytes_per_s) == (600.0, 210.0)


def test_a_counter_that_began_again_is_unknown_and_not_zero(tmp_path):
    machine = Machine(tmp_path)
    machine.port("eth0", 5000, 100)
    machine.load.read()
    machine.at_s = 1.0
    machine.port("eth0", 10, 200)
    second = machine.load.read()
    assert (second.network_received_bytes_per_s, second.network_sent_bytes_per_s) == (None, 100.0)


def test_a_machine_that_reports_nothing_has_no_value(tmp_path):
    load = HostLoad(lambda: 1.0, str(tmp_path))
    assert [load.read(), load.read()] == [HostReading(), HostReading()]


def test_this_machine_reports_cpu_and_memory():
    load = HostLoad(iter([1.0, 2.0]).__next__)
    load.read()
    reading = load.read()
    assert reading.memory_total_bytes is not None
    assert reading.memory_available_bytes is not None
    assert 0 < reading.memory_available_bytes < reading.memory_total_bytes
