"""Build the variables that `jax.distributed.initialize()` without arguments reads. Pure.

Source: JAX 0.10.2, jax/_src/distributed.py (JAX_*), jax/_src/clusters/ompi_cluster.py (OMPI_*). JAX takes its rank and the number of
processes only from a cluster that it detects; Open MPI's variables are the ones that name nothing but rank, size and address.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.work.allocation import NodeGrant
from phalanx.node.logic.variables.rank_variables import address_with_port
from phalanx.node.logic.variables.rendezvous import side_port

_JOB_NUMBER: Final = (
    1 << 12
)  # JAX divides the number in the address by it; it is used only without JAX_COORDINATOR_ADDRESS


def jax_rank_variables(prepare: PrepareTasks, start: StartTasks, rank: int) -> dict[str, str]:
    """Return the variables of every rank: JAX's own names. Another port than torch's, because a script may use both."""
    return {
        "JAX_COORDINATOR_ADDRESS": _coordinator(prepare, start),
        "JAX_NUM_PROCESSES": str(prepare.allocation.world_size),
        "JAX_PROCESS_ID": str(rank),
    }


def jax_detected_variables(
    prepare: PrepareTasks, start: StartTasks, grant: NodeGrant, local_rank: int, *, devices: int, ipv6: bool
) -> dict[str, str]:
    """Return the variables of a rank whose script imports JAX, by which JAX detects rank, size and devices.

    Args:
        prepare: the job on this node.
        start: the start of this generation.
        grant: this node's part.
        local_rank: of the rank.
        devices: how many the rank sees.
        ipv6: whether this node can bind all IPv6 addresses, as JAX's coordinator does by default.
    """
    address = prepare.addresses[0]
    place = f"tcp6://[{address}]" if ":" in address else f"tcp://{address}"
    variables = {
        "OMPI_MCA_orte_hnp_uri": f"{_JOB_NUMBER}.0;{place}:{side_port(start.port)}",
        "OMPI_COMM_WORLD_SIZE": str(prepare.allocation.world_size),
        "OMPI_COMM_WORLD_RANK": str(grant.first_rank + local_rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, _devices_of(devices, grant.tasks, local_rank))),
    }
    if not ipv6:
        variables["JAX_COORDINATOR_BIND_ADDRESS"] = f"0.0.0.0:{side_port(start.port)}"
    return variables


def _coordinator(prepare: PrepareTasks, start: StartTasks) -> str:
    return address_with_port(prepare.addresses[0], side_port(start.port))


def _devices_of(devices: int, tasks: int, local_rank: int) -> range:
    """Return the devices of one rank: an equal part of those that it sees. With more ranks than devices, ranks share them in turn."""
    if devices < tasks:
        first = local_rank % devices if devices else local_rank
        return range(first, first + 1)
    each = devices // tasks
    return range(local_rank * each, (local_rank + 1) * each)
