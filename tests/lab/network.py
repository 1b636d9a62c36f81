"""The lab's network as lines for `ip -batch` and rules for `iptables`: pure, so that what a verb does can be read in one place."""

from __future__ import annotations

from collections.abc import Mapping

NETWORK = "10.77.0"
"""The first three bytes of every address. The network has no way out, so it can be the same in every lab."""

HOSTS_MAX = 250
"""What one /24 holds besides the network's own addresses, rounded down."""

BURST = "128kb"
"""Of the token bucket: above the 64 KiB that the kernel hands over as one segment (GSO), or large segments are cut up in software."""

QUEUE = "25ms"
"""How long a packet may wait in the bucket before it is dropped: a switch with some 3 MB of buffer at 1 Gbit/s."""


def address(index: int) -> str:
    """Of the host with this index."""
    return f"{NETWORK}.{index + 1}"


def switch_lines() -> list[str]:
    """The switch: one bridge, in a namespace of its own."""
    return ["link set lo up", "link add switch type bridge", "link set switch up"]


def hardware_address(index: int) -> str:
    """Of the host's port: the same after a restart, as a real card's, or its peers would talk to a port that is gone until ARP forgets it.

    02 says "locally administered" (IEEE 802), so it is nobody's card.
    """
    return f"02:00:00:00:00:{index + 1:02x}"


def cable_lines(name: str, index: int, pid: int) -> list[str]:
    """In the switch's namespace: a new cable to the host whose process 1 is `pid`. Its end on the switch is named as the host."""
    port = f"peer name eth0 address {hardware_address(index)} netns {pid}"
    return [f"link add {name} type veth {port}", f"link set {name} master switch up"]


def port_lines(index: int) -> list[str]:
    """In the host's namespace: its end of the cable, and its loopback."""
    return ["link set lo up", f"addr add {address(index)}/24 dev eth0", "link set eth0 up"]


def shape_command(device: str, rate_mbit: float) -> list[str]:
    """Bound what leaves by this end of a cable. Both ends are bound, so a link carries the rate each way at once."""
    rate = f"{round(rate_mbit * 1000)}kbit"
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE]


def drop_rules(index: int, losses: Mapping[int, float]) -> list[list[str]]:
    """In the namespace of host `index`: drop its share of what arrives, given the share (0 to 1) that each host's link loses.

    Loss is on arrival only, for a drop on the way out is reported to the sender (EPERM) and would be no loss. A link loses both what its
    host is sent and what its host sends, so every other host drops by the sender's address.
    """
    rules = [["iptables", "-F", "INPUT"]]
    for other, share in sorted(losses.items()):
        if share <= 0.0:
            continue
        source = ["!", "-i", "lo"] if other == index else ["-s", address(other)]
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{min(share, 1.0):.6f}"]
        rules.append(["iptables", "-A", "INPUT", *source, *chance, "-j", "DROP"])
    return rules
