"""Build the environment and the host files of a job whose command is an MPI launcher. Pure.

Sources: Open MPI 4.1 `ompi_info --all` (OMPI_MCA_*), PRRTE 3.0 `prte_info --all` (PRTE_MCA_*), MPICH 5.0 `mpiexec -help` and its Hydra
process manager (HYDRA_*), Intel MPI 2021 developer reference, "Hydra Environment Variables" (I_MPI_HYDRA_*).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.job_file.launchers import slots_on_node
from phalanx.core.work.spec import LaunchMode

_LOOPBACK: Final = "127."
_OWN_OF_A_PROCESS: Final = ("PMIX_", "PMI_", "PRTE_LAUNCHED", "OMPI_COMM_WORLD_")
"""Prefixes of variables that identify one MPI process: another one must not inherit them."""


def reachable_names(node_ids: tuple[str, ...], addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name for each node, by node rank, that its peers can resolve, and that no other node of the gang has.

    The node's address; of a single node, `localhost`. Virtual nodes all have 127.0.0.1: each gets an address of its own in the loopback network, where all of 127.0.0.0/8
    reaches this machine. Elsewhere, two nodes with one address get their ids.
    """
    if len(addresses) == 1:
        return ("localhost",)
    if all(address.startswith(_LOOPBACK) for address in addresses):
        return tuple(f"127.0.{(rank + 1) >> 8}.{(rank + 1) & 255}" for rank in range(len(addresses)))
    return tuple(
        address if addresses.count(address) == 1 else name for name, address in zip(node_ids, addresses, strict=True)
    )


def node_names(prepare: PrepareTasks) -> tuple[str, ...]:
    """Return the names of the gang's nodes as launchers use them; see `reachable_names`."""
    return reachable_names(tuple(grant.node_id for grant in prepare.allocation.grants), prepare.addresses)


def needs_agent(prepare: PrepareTasks) -> bool:
    """Return whether the command is an MPI launcher that starts tasks on several nodes."""
    return prepare.spec.role.launch is LaunchMode.ONCE and len(prepare.allocation.grants) > 1


def slots_by_node(prepare: PrepareTasks) -> tuple[int, ...]:
    """Return the number of tasks that a launcher shall start on each node: as given for an MPI launcher, else of the job, or of its devices."""
    role, grants = prepare.spec.role, prepare.allocation.grants
    if role.launch is LaunchMode.ONCE:
        return tuple(slots_on_node(role, grant.visible_devices) for grant in grants)
    asked = dict(prepare.spec.slurm).get("tasks_per_node", "")
    each = int(asked) if asked.isdecimal() else 0
    return tuple(each or max(1, grant.tasks if grant.tasks > 1 else grant.visible_devices) for grant in grants)


def slots_hostfile(prepare: PrepareTasks) -> str:
    """Return a host file as Open MPI, DeepSpeed and Horovod read it: `NAME slots=N`."""
    return _lines(prepare, "{} slots={}\n")


def colon_hostfile(prepare: PrepareTasks) -> str:
    """Return a host file as MPICH and Intel MPI read it: `NAME:N`."""
    return _lines(prepare, "{}:{}\n")


def _lines(prepare: PrepareTasks, line: str) -> str:
    pairs = zip(node_names(prepare), slots_by_node(prepare), strict=True)
    return "".join(line.format(name, slots) for name, slots in pairs)


def mpi_defaults(prepare: PrepareTasks, *, agent: str, slots_file: str, colon_file: str, root: bool) -> dict[str, str]:
    """Return the defaults of the launcher's environment, which the job may override.

    Args:
        prepare: the job on this node.
        agent: path of our launch agent; "" on a single node, which needs none.
        slots_file: path of the host file for Open MPI.
        colon_file: path of the host file for MPICH.
        root: whether the job runs as root, which Open MPI refuses without these variables.
    """
    variables = {
        "OMPI_MCA_orte_default_hostfile": slots_file,
        "PRTE_MCA_prte_default_hostfile": slots_file,
        "HYDRA_HOST_FILE": colon_file,
        "I_MPI_HYDRA_HOST_FILE": colon_file,
        # Jobs share nodes: each launcher would bind its first rank to core 0.
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if root:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if agent:
        variables |= _agent_variables(agent)
        if all(address.startswith(_LOOPBACK) for address in prepare.addresses):
            variables |= _VIRTUAL_NODES
    return variables


def script_defaults(addresses: Sequence[str]) -> dict[str, str]:
    """Return the defaults of an `#SBATCH` script's environment, whose launchers start their daemons by `srun`; a job may override them."""
    if len(addresses) == 1:
        return {}
    return _OWN_VARIABLES | (_VIRTUAL_NODES if all(address.startswith(_LOOPBACK) for address in addresses) else {})


# Else Hydra gives all ranks the variables of the first node, also its devices. The agent, or srun, passes on what the job exports.
_OWN_VARIABLES: Final = {"HYDRA_ENV": "none", "I_MPI_HYDRA_ENV": "none"}
_VIRTUAL_NODES: Final = {
    # Virtual nodes have one host name, from which Open MPI derives the names of shared memory: ranks of two nodes would use the same.
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_coll": "^sm,han,acoll",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "HYDRA_IFACE": "lo",
}


IN_PID_NAMESPACES: Final = {"OMPI_MCA_btl": "^vader,sm", "OMPI_MCA_coll": "^sm,han,acoll"}
"""Defaults of ranks in containers of podman, which number their processes from 1 again: Open MPI takes the shared memory of another rank with the same
process id for its own, and crashes. Source: Open MPI 4.1, opal/mca/shmem/mmap, `segment_attach`."""


def _agent_variables(agent: str) -> dict[str, str]:
    """Return the variables by which each implementation starts its daemons through the agent."""
    return {
        "OMPI_MCA_plm_rsh_agent": agent,
        # The daemon stays a child of ours: its messages reach the job's log, and its exit code the launcher.
        "OMPI_MCA_orte_leave_session_attached": "1",
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_prte_leave_session_attached": "1",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent,
        **_OWN_VARIABLES,
    }


def changed_variables(given: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the job's command added to those that it was `given`, or changed: what its script exported."""
    return {
        name: value
        for name, value in now.items()
        if given.get(name) != value and not name.startswith(_OWN_OF_A_PROCESS) and name != "_"
    }
