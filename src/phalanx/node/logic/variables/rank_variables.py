"""Variables that make a process a rank of a gang, and addresses as they are written in them."""

from __future__ import annotations

from typing import Final

RANK_VARIABLES: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TF_CONFIG",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
    }
)
"""Libraries take a process that has them for a rank."""


def address_with_port(address: str, port: int) -> str:
    """`10.0.0.1:29500`, `node7:29500` or `[fd00::1]:29500`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
