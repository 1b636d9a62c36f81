"""What a node says of its ports, links and memory nodes: a stand-in NVML and a /sys made by hand, for no GPU and no InfiniBand is here."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import os
import types

import pytest

from phalanx.app.node import _devices
from phalanx.cli.cluster.nodes import node_page, nvlink_lines
from phalanx.cli.terminal import Terminal
from phalanx.core.fleet.nic import Nic
from phalanx.core.fleet.node import NodeState
from phalanx.node.probes import sysfs
from phalanx.wire.api.nodes import DeviceView, NicView, NodeView
from tests.unit.test_node_probes import fake_nvml, opened, refuse

PLAIN = Terminal(width=160, height=40, interactive=False, colour=False, blocks=False)


@pytest.fixture
def sys_folder(tmp_path):
    """A /sys to fill: `put("class/net/eth0/speed", "1000")`, and `attach` a device to a port."""

    def put(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def attach(port, bus, numa):
        put(f"bus/pci/devices/{bus}/numa_node", numa)
        os.symlink(tmp_path / "bus/pci/devices" / bus, tmp_path / port / "device")

    return types.SimpleNamespace(put=put, attach=attach, root=str(tmp_path))


def port(made, name, *, kind="1", state="up", speed="1000"):
    for file, text in (("type", kind), ("operstate", state), ("speed", speed)):
        made.put(f"class/net/{name}/{file}", text)


def test_ports_are_told_with_rate_state_and_where_they_are_attached(sys_folder):
    port(sys_folder, "eth0", speed="100000")
    sys_folder.attach("class/net/eth0", "0000:17:00.0", "1")
    port(sys_folder, "eth1", state="down", speed="-1")
    sys_folder.attach("class/net/eth1", "0000:17:00.1", "1")
    port(sys_folder, "docker0")  # nothing behind it
    port(sys_folder, "ib0", kind="32")
    for file, text in (("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)"), ("state", "4: ACTIVE")):
        sys_folder.put(f"class/infiniband/mlx5_0/ports/1/{file}", text)
    sys_folder.attach("class/infiniband/mlx5_0", "0000:3b:00.0", "-1")
    sys_folder.put("class/infiniband/mlx5_1/ports/1/link_layer", "Ethernet")
    assert sysfs.nics(sys_folder.root) == (
        Nic(name="eth0", kind="ethernet", up=True, bits_per_s=100_000_000_000, numa=1, pci_bus="0000:17:00.0"),
        Nic(name="eth1", kind="ethernet", up=False, numa=1, pci_bus="0000:17:00.1"),
        Nic(name="mlx5_0/1", kind="infiniband", up=True, bits_per_s=400_000_000_000, pci_bus="0000:3b:00.0"),
    )


def test_where_no_port_has_hardware_all_but_the_loopback_count(sys_folder):
    port(sys_folder, "lo", kind="772")
    port(sys_folder, "eth0", speed="10000")
    assert [nic.name for nic in sysfs.nics(sys_folder.root)] == ["eth0"]


def test_a_node_without_sys_has_no_ports(tmp_path):
    assert sysfs.nics(str(tmp_path)) == ()


def test_the_ports_of_this_machine_are_read():
    assert all(nic.name and nic.name != "lo" for nic in sysfs.nics())


@pytest.mark.parametrize(
    ("bus", "expected"), [("00000000:17:00.0", 1), ("0000:17:00.0", 1), ("0000:18:00.0", None), ("", None), ("x", None)]
)
def test_the_memory_node_of_a_gpu_is_found_however_its_bus_is_written(sys_folder, bus, expected):
    sys_folder.put("bus/pci/devices/0000:17:00.0/numa_node", "1")
    sys_folder.put("bus/pci/devices/0000:18:00.0/numa_node", "-1")
    assert sysfs.numa_of(bus, sys_folder.root) == expected


def test_a_gpu_with_fewer_lanes_than_it_could_have_says_so():
    half = fake_nvml(nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16 - 8 * handle)
    assert [device.pcie for device in _devices(opened(half), None)] == ["gen5 x16", "gen5 x8 of x16"]
    silent = fake_nvml(nvmlDeviceGetCurrPcieLinkWidth=refuse)
    assert [device.pcie for device in _devices(opened(silent), None)] == ["", ""]


def test_nvlinks_are_counted_for_each_pair():
    first, second = _devices(opened(fake_nvml()), None)
    assert (first.nvlinks, second.nvlinks) == ((0, 1), (1, 0))
    behind_a_switch = fake_nvml(
        3,
        nvmlDeviceGetNvLinkState=lambda *_: 1,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda *_: types.SimpleNamespace(busId="0000:c4:00.0"),
    )
    assert [device.nvlinks for device in _devices(opened(behind_a_switch), None)] == [(0, 2, 2), (2, 0, 2), (2, 2, 0)]


def view(index, *nvlinks, **fields):
    return DeviceView(index=index, uuid=f"GPU-{index}", model="h100", memory_bytes=1, nvlinks=list(nvlinks), **fields)


def test_equal_nvlinks_are_one_line_and_others_a_matrix():
    assert nvlink_lines([view(0), view(1)]) == []
    assert nvlink_lines([view(0, 0, 18), view(1, 18, 0)]) == ["NVLink: 18 links from every GPU to every other"]
    assert nvlink_lines([view(0, 0, 4, 0), view(1, 4, 0, 0), view(2)]) == [
        "NVLinks of GPU 0: 4 to 1",
        "NVLinks of GPU 1: 4 to 0",
        "NVLinks of GPU 2: none",
    ]


def test_a_nodes_page_shows_ports_lanes_and_memory_nodes():
    nics = [
        NicView(name="eth0", kind="ethernet", up=True, bits_per_s=25_000_000_000, numa=0),
        NicView(name="mlx5_0/1", kind="infiniband", up=False),
    ]
    node = NodeView(
        id="n0",
        state=NodeState.UP,
        engine="local",
        devices=[view(0, pcie="gen5 x8 of x16", numa=1)],
        cpus=8,
        memory_bytes=1,
        nics=nics,
    )
    page = "\n".join(node_page(node, PLAIN, 0.0))
    assert "ports: eth0 25 Gbit/s NUMA 0, mlx5_0/1 down" in page
    assert "gen5 x8 of x16" in page
