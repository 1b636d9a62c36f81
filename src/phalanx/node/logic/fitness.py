"""Whether this node does for a gang, judged from what was measured on it: one sentence of evidence, or nothing against it.

Pure: `node.shell.fitness` measures, this module knows the bounds. Each bound is where work is sure to fail, not where it is slow: a node
that is merely slow is found by `phalanx calibrate` and used last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from phalanx.core.units import format_bytes

DISK_FREE_BYTES: Final = 64 << 20
"""Free space on the disk of the node's folder: room for a hostfile, pages, and minutes of output while the head is away."""
SHM_FREE_BYTES: Final = 9_637_888
"""Free space in /dev/shm of a node with GPUs: one shared-memory segment of NCCL ("Error while creating shared memory segment
/dev/shm/nccl-... (size 9637888)", as its issues quote it)."""
WRITE_BYTES: Final = (
    4 << 20
)  # written and synced to prove the disk; enough for several of its pages and a journal commit
WRITE_S: Final = 30.0
"""A synced write that takes longer means a device that is being reset: Linux' own time-out of one SCSI command is 30 s."""
EXCHANGE_S: Final = 5.0
"""Within which a peer must be connected and have sent back a first piece: two of TCP's retransmissions of a lost SYN (1 s and 3 s)."""
PIECE_BYTES: Final = (
    64 << 10
)  # fills dozens of packets of any MTU, so that one too large for the way is seen not to arrive
BULK_BYTES, BULK_S = 4 << 20, 0.5
"""What is sent each way to see that a stream keeps flowing, at most this much and this long. How fast says nothing here: when a large gang
starts, all its probes share the trunks (101 KiB/s on one of 30 Mbit/s between two switches of three hosts, in the lab)."""
PARTNERS_MAX: Final = 16
"""Nodes that one node probes. Of 12,500 nodes (DESIGN.md 6) each probes 14, at distances 1, 2, 4 and so on, and is probed by 14."""
MATMUL_SIBLING_SHARE: Final = 0.5
"""A device that gives less than this of the median of its node's is broken: healthy ones of a kind differ by 8 % on average, bad ones
take up to 1.5 times as long (P. Sinha et al., "Not All GPUs Are Created Equal", 2022, arXiv 2208.11035)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A file system: where, and what is free of it. `need_bytes` of it must be."""

    path: str
    free_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A synced write of WRITE_BYTES: how long it took, or the system's words for why it failed."""

    path: str
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix products on one device: operations a second, or why there were none.

    `least_flops`: what any sound device of its make gives.
    """

    device: int
    flops: float = 0.0
    least_flops: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What became of probing one peer.

    Attributes:
        connected: the peer took the connection.
        answered: the name that answered there.
        back_bytes: how much came back of what was sent.
        deaf: why the peer did not reach us in turn, where it was asked to; empty where it did.
        broken: it broke off, or a piece did not come back in time.
        error: the system's words for that; empty for silence.
    """

    peer: str
    connected: bool = False
    answered: str = ""
    deaf: str = ""
    back_bytes: int = 0
    broken: bool = False
    error: str = ""


def storage_flaw(places: Sequence[Storage], written: Written | None) -> str:
    """Why the disk does not do; empty if it does."""
    for place in places:
        if place.free_bytes < place.need_bytes:
            return f"{place.path}: {format_bytes(place.free_bytes)} free, {format_bytes(place.need_bytes)} are needed"
    if written is None:
        return ""
    if written.error:
        return f"{written.path}: a write of {format_bytes(WRITE_BYTES)} failed: {written.error}"
    if written.seconds > WRITE_S:
        return f"{written.path}: a synced write of {format_bytes(WRITE_BYTES)} took {written.seconds:.0f} s"
    return ""


def product_flaw(products: Sequence[Product]) -> str:
    """Why the devices do not do; empty if they do. A device alone has no siblings to be measured by, only the least of its make."""
    rates = [product.flops for product in products if not product.error]
    usual = median(rates) if rates else 0.0
    for product in products:
        if product.error:
            return f"GPU {product.device}: a matrix product failed: {product.error}"
        tflops = f"{product.flops / 1e12:.1f} TFLOP/s"
        if product.flops < MATMUL_SIBLING_SHARE * usual:
            return f"GPU {product.device}: matrix products at {tflops}, where the node's others give {usual / 1e12:.1f}"
        if product.flops < product.least_flops:
            return f"GPU {product.device}: matrix products at {tflops}; any of its make gives {product.least_flops / 1e12:.1f}"
    return ""


def link_flaw(exchange: Exchange) -> str:
    """Why the link to the peer does not do; empty if it does."""
    if not exchange.connected:
        return exchange.error or f"no connection in {EXCHANGE_S:g} s"
    if exchange.answered and exchange.answered != exchange.peer:
        return f"{exchange.answered} answers at its address"
    if exchange.deaf:
        return f"it is reached, but does not reach back: {exchange.deaf}"
    why, piece = exchange.error or f"not in {EXCHANGE_S:g} s", format_bytes(PIECE_BYTES)
    if exchange.back_bytes < PIECE_BYTES:
        return f"it connects, but {piece} do not come back ({why}): is the MTU too large for the way?"
    if exchange.broken:
        return f"it connects, but after {format_bytes(exchange.back_bytes)} no more come back ({why})"
    return ""


def partners(node_rank: int, nodes: int) -> tuple[int, ...]:
    """Node ranks that this one probes: all others of a small gang, else those at distances 1, 2, 4 and so on around the ring."""
    if nodes <= PARTNERS_MAX + 1:
        return tuple(other for other in range(nodes) if other != node_rank)
    distances = [1 << power for power in range(PARTNERS_MAX) if 1 << power < nodes]
    return tuple((node_rank + distance) % nodes for distance in distances)
