"""Judge from measurements whether this node can run a gang: each check returns one sentence of evidence, or an empty text if it passes.

Pure: `node.probes.preflight_checks` measures, this module holds the limits. Each limit marks where work is sure to fail, not where it is slow:
`phalanx calibrate` finds slow nodes, and the scheduler uses them last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from phalanx.core.units import format_bytes

SHM_FREE_BYTES: Final = 9_637_888
"""Free space needed in /dev/shm of a node with GPUs: one shared-memory segment of NCCL. Source: NCCL issues that quote "Error while creating
shared memory segment /dev/shm/nccl-... (size 9637888)"."""
# Written and synced to test the disk; enough for several of its pages and a journal commit.
WRITE_BYTES: Final = 4 << 20
WRITE_S: Final = 30.0
"""A longer synced write means that the device is being reset: Linux times out one SCSI command after 30 s."""
LINK_PROBE_S: Final = 5.0
"""Time for a peer to connect and return the first piece: covers TCP's first two retransmissions of a lost SYN (1 s and 3 s)."""
PIECE_BYTES: Final = 64 << 10  # fills dozens of packets of any MTU, so that packets too large for the path are lost
BULK_BYTES, BULK_S = 4 << 20, 0.5
"""Most bytes and seconds sent each way to check that a stream keeps flowing. The rate is not judged: when a large gang starts, all its
probes share the trunks (101 KiB/s on a 30 Mbit/s trunk between two switches of three hosts, in the lab)."""
PROBED_NODES_MAX: Final = 16
"""Most nodes that one node probes. Of 12,500 nodes (the scale target) each probes 14, at distances 1, 2, 4 and so on, and 14 probe it."""
MATMUL_SIBLING_SHARE: Final = 0.5
"""A device slower than this share of its node's median is broken: healthy devices of one model differ by 8 % on average, bad ones
take up to 1.5 times as long (P. Sinha et al., "Not All GPUs Are Created Equal", 2022, arXiv 2208.11035)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Free space of a file system, and how much is needed."""

    path: str
    free_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteProbe:
    """A synced write of WRITE_BYTES: its duration, or the system's error text."""

    path: str
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulProbe:
    """Matrix products on one device: FLOP/s, or the error. `least_flops` is the least that a sound device of this model gives."""

    device: int
    flops: float = 0.0
    least_flops: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """The result of probing one peer.

    Attributes:
        connected: the peer accepted the connection.
        answered: the node name that answered at the peer's address.
        returned_bytes: how many of the sent bytes came back.
        return_error: why the peer could not connect back to this node; empty if it could, or was not asked to.
        broken: the connection broke, or a piece did not come back in time.
        error: the system's error text; empty for a time-out.
    """

    peer: str
    connected: bool = False
    answered: str = ""
    return_error: str = ""
    returned_bytes: int = 0
    broken: bool = False
    error: str = ""


def storage_problem(places: Sequence[DiskSpace], written: WriteProbe | None) -> str:
    """Return why the disk fails the check; empty if it passes."""
    for place in places:
        if place.free_bytes < place.need_bytes:
            return f"{place.path}: {format_bytes(place.free_bytes)} free, {format_bytes(place.need_bytes)} needed"
    if written is None:
        return ""
    if written.error:
        return f"{written.path}: a write of {format_bytes(WRITE_BYTES)} failed: {written.error}"
    if written.seconds > WRITE_S:
        return f"{written.path}: a synced write of {format_bytes(WRITE_BYTES)} took {written.seconds:.0f} s"
    return ""


def device_problem(products: Sequence[MatmulProbe]) -> str:
    """Return why a device fails the check; empty if all pass. A single device is compared only with the least of its model."""
    rates = [product.flops for product in products if not product.error]
    usual = median(rates) if rates else 0.0
    for product in products:
        if product.error:
            return f"GPU {product.device}: a matrix product failed: {product.error}"
        tflops = f"{product.flops / 1e12:.1f} TFLOP/s"
        if product.flops < MATMUL_SIBLING_SHARE * usual:
            return f"GPU {product.device}: matrix products at {tflops}; the node's median is {usual / 1e12:.1f}"
        if product.flops < product.least_flops:
            return f"GPU {product.device}: matrix products at {tflops}; a sound device of this model gives at least {product.least_flops / 1e12:.1f}"
    return ""


def link_problem(exchange: LinkProbe) -> str:
    """Return why the link to the peer fails the check; empty if it passes."""
    if not exchange.connected:
        return exchange.error or f"no connection in {LINK_PROBE_S:g} s"
    if exchange.answered and exchange.answered != exchange.peer:
        return f"{exchange.answered} answers at its address"
    if exchange.return_error:
        return f"it accepts connections, but cannot connect back: {exchange.return_error}"
    why, piece = exchange.error or f"not in {LINK_PROBE_S:g} s", format_bytes(PIECE_BYTES)
    if exchange.returned_bytes < PIECE_BYTES:
        return f"it connects, but {piece} do not come back ({why}): is the MTU too large for the path?"
    if exchange.broken:
        return f"it connects, but nothing comes back after {format_bytes(exchange.returned_bytes)} ({why})"
    return ""


def probed_node_ranks(node_rank: int, nodes: int) -> tuple[int, ...]:
    """Return the node ranks that this one probes: all others of a small gang, else those at distances 1, 2, 4 and so on around a ring."""
    if nodes <= PROBED_NODES_MAX + 1:
        return tuple(other for other in range(nodes) if other != node_rank)
    distances = [1 << power for power in range(PROBED_NODES_MAX) if 1 << power < nodes]
    return tuple((node_rank + distance) % nodes for distance in distances)
