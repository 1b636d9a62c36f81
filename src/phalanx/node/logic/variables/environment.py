"""Build the environment of a rank: its place in the gang, its folders, and none of the supervisor's secrets (DESIGN 2).

Pure: takes the node's environment and returns a new mapping. A torch.distributed script that reads the environment runs unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.resources import add_extras
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.units import MIB
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.gang_topology import gang_topology_to_json
from phalanx.core.work.job_file.data_sources import data_variable
from phalanx.core.work.job_file.launchers import slots_on_node
from phalanx.core.work.job_file.on_end import ENDED_VARIABLES
from phalanx.core.work.job_file.trackers import TrackedJob, tracked_job, tracker_variables
from phalanx.core.work.secret import SECRETS_VARIABLE
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.spec import LaunchMode
from phalanx.node.logic import local_copies
from phalanx.node.logic.variables.jax_variables import jax_detected_variables, jax_rank_variables
from phalanx.node.logic.variables.mpi_variables import mpi_defaults, script_defaults
from phalanx.node.logic.variables.rank_variables import RANK_VARIABLES, address_with_port
from phalanx.node.logic.variables.tf_config import tf_config
from phalanx.wire.rank import (
    EPOCH_VARIABLE,
    GENERATION_VARIABLE,
    LEASE_PAGE_VARIABLE,
    LOCAL_CHECKPOINTS_VARIABLE,
    MIG_PROFILE_VARIABLE,
    REPORT_PIPE_VARIABLE,
    STACKS_VARIABLE,
)

# Variables of another launcher or scheduler in the supervisor's environment would mislead libraries that read them.
_NOT_INHERITED: Final = (
    "PHALANX_",
    "SLURM_",
    "SLURMD_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "PET_",
    "TORCHELASTIC_",
    "JAX_COORDINATOR_",
    "I_MPI_",
    # Those of MPICH's launcher; HYDRA_FULL_ERROR and others are of a library of the same name.
    "HYDRA_HOST_FILE",
    "HYDRA_LAUNCHER",
    "HYDRA_BOOTSTRAP",
    "HYDRA_RMK",
)
_NOT_INHERITED_NAMES: Final = RANK_VARIABLES | {
    "CUDA_VISIBLE_DEVICES",
    "INVOCATION_ID",
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
}
HEAD_ONLY_VARIABLES: Final = frozenset(
    {
        "PGPASSWORD",
        "PGPASSFILE",
        "PGSERVICE",
        "PGSERVICEFILE",
        "PGSSLKEY",
        "PGSSLPASSWORD",
        "CREDENTIALS_DIRECTORY",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    }
)
"""Variables with which the head opens its database or its collector of traces, or gets secrets from a service manager. A job that needs one sets its own value.
Source: PostgreSQL's manual, libpq, "Environment Variables"; systemd.exec(5)."""
CLIENT_VARIABLES: Final = frozenset(
    {"PHALANX_URL", "PHALANX_TOKEN", "PHALANX_HOME"}
)  # a job may use a head of its choice
_RESERVED: Final = "PHALANX_"  # prefix that a job's own variables may not have, so that they are not mistaken for ours
_LOOPBACK: Final = ("127.", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFolders:
    """Paths of a member. `hostfile`, `page` and `reports` are files in its scratch folder, `stacks` is the folder itself.

    `colon_hostfile`: the host file for MPICH; `agent`: the launch agent of an MPI launcher, "" where none is needed.

    `checkpoints`, `outputs`: the node's own folders of the job, for a gang whose nodes do not share the head's (`PrepareTasks.kept`).
    """

    hostfile: str
    page: str
    reports: str
    checkpoints: str = ""
    outputs: str = ""
    stacks: str = ""
    colon_hostfile: str = ""
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The node's part of the environment.

    `devices`: UUIDs of the grant's devices or MIG slices, by local rank; `base`: the supervisor's environment; `mps`: pipe folder of its MPS daemon, or "".
    `cuda_numbers`: CUDA's numbers of these devices in the order of the PCI bus; empty if they are not certain.
    `data`: path or address of each dataset, by name.
    `root`: whether its processes run as root; `jax`: whether the job's script imports JAX; `ipv6`: whether this node can bind `[::]`.
    `secrets`: the values of the job's secrets, by variable.
    """

    base: Mapping[str, str]
    devices: tuple[str, ...]
    virtual: bool
    folders: MemberFolders
    cuda_numbers: tuple[int, ...] = ()
    mps: str = ""
    data: tuple[tuple[str, str], ...] = ()
    root: bool = False
    jax: bool = False
    ipv6: bool = True
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def inheritable_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the supervisor's variables without its secrets and without those of another gang."""
    return {
        name: value
        for name, value in base.items()
        if not (name.startswith(_NOT_INHERITED) or name in _NOT_INHERITED_NAMES or name in HEAD_ONLY_VARIABLES)
    }


def rank_environment(
    prepare: PrepareTasks, start: StartTasks, grant: NodeGrant, local_rank: int, node: NodeContext
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of one task, and a note for each of the job's variables that Phalanx overrides."""
    ours = _fixed(prepare, start, grant, local_rank, node)
    defaults = _defaults(prepare, start, grant, node)
    asked = {**dict(prepare.spec.env), **node.secrets}
    notes = [
        f"env: {name} is set by Phalanx; the job's value is not used"
        for name in sorted(asked)
        if _is_overridden(name, ours)
    ]
    kept = {name: value for name, value in asked.items() if not _is_overridden(name, ours)}
    found = {**inheritable_environment(node.base), **defaults, **kept, **ours}
    if prepare.replica is None:
        found |= tracker_variables(_tracked(prepare), grant.first_rank + local_rank, found)
    return found, notes


def _tracked(prepare: PrepareTasks) -> TrackedJob:
    folder = os.path.basename(prepare.output_dir.rstrip("/"))
    return tracked_job(prepare.spec, prepare.job_id, folder, None if prepare.array is None else prepare.array.array_id)


def setup_environment(prepare: PrepareTasks, grant: NodeGrant, node: NodeContext) -> dict[str, str]:
    """Return the environment of the setup script: the job's variables and the node's place, without a rendezvous."""
    asked = {name: value for name, value in prepare.spec.env if not _is_overridden(name, {})} | dict(node.secrets)
    return {**inheritable_environment(node.base), **_defaults_of_python(), **asked, **_place(prepare, grant, node)}


def is_set_by_phalanx(name: str) -> bool:
    """Whether an environment of the node must leave this variable alone: its value is the task's own."""
    return name.startswith(_RESERVED) or name in _NOT_INHERITED_NAMES


def _is_overridden(name: str, ours: Mapping[str, str]) -> bool:
    given = name in CLIENT_VARIABLES or name.startswith(ENDED_VARIABLES)
    return name in ours or (name.startswith(_RESERVED) and not given)


def _fixed(
    prepare: PrepareTasks, start: StartTasks, grant: NodeGrant, local_rank: int, node: NodeContext
) -> dict[str, str]:
    """Return the variables that no job may override: a wrong rank or device would break the whole gang."""
    variables = {
        "MASTER_ADDR": prepare.addresses[0],
        "MASTER_PORT": str(start.port),
        **_rank(prepare, start, grant, local_rank, node),
        **_place(prepare, grant, node),
        **_own_slice(grant, local_rank, node),
        LEASE_PAGE_VARIABLE: node.folders.page,
        REPORT_PIPE_VARIABLE: node.folders.reports,
    }
    if node.folders.stacks:
        variables[STACKS_VARIABLE] = node.folders.stacks
    if start.service_port and prepare.replica is not None:
        variables |= {
            "PORT": str(start.service_port),
            "PHALANX_PORT": str(start.service_port),
            "PHALANX_SERVICE": prepare.replica.service,
            "PHALANX_REVISION": str(prepare.replica.revision),
        }
    if start.resume is not None:
        own = local_copies.local_checkpoint_path(prepare, start.resume, node.folders.checkpoints)
        variables["PHALANX_RESUME_FROM"] = start.resume.path if own is None else own
    return variables


def _rank(
    prepare: PrepareTasks, start: StartTasks, grant: NodeGrant, local_rank: int, node: NodeContext
) -> dict[str, str]:
    """Return the variables of one rank; none for an MPI launcher, whose tasks would all take them for their own."""
    if prepare.spec.role.launch is LaunchMode.ONCE:
        return {}
    rank, world_size = grant.first_rank + local_rank, prepare.allocation.world_size
    detected: dict[str, str] = {}
    if node.jax:
        devices = 1 if _own_slice(grant, local_rank, node) else grant.visible_devices
        detected = jax_detected_variables(prepare, start, grant, local_rank, devices=devices, ipv6=node.ipv6)
    return {
        **detected,
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(grant.tasks),
        "NODE_RANK": str(grant.node_rank),
        "GROUP_RANK": str(grant.node_rank),
        "TF_CONFIG": tf_config(prepare, start.port, rank),
        **jax_rank_variables(prepare, start, rank),
    }


def _place(prepare: PrepareTasks, grant: NodeGrant, node: NodeContext) -> dict[str, str]:
    """Return the variables that all processes of the job on this node share."""
    spec = prepare.spec
    return {
        "PHALANX_JOB_ID": prepare.job_id,
        "PHALANX_NODE_RANK": str(grant.node_rank),
        "PHALANX_NNODES": str(len(prepare.allocation.grants)),
        "PHALANX_NODE_IPS": "\n".join(prepare.addresses),
        "PHALANX_GPUS_PER_NODE": str(grant.visible_devices),
        "PHALANX_NUM_GPUS": str(prepare.allocation.gpus),
        **_share(grant, node.mps),
        **_resources(prepare, grant),
        "PHALANX_HOSTFILE": node.folders.hostfile,
        **_folders(prepare, node.folders),
        "PHALANX_RESTART_COUNT": str(prepare.restarts),
        "PHALANX_DEADLINE": "" if prepare.deadline_s is None else f"{prepare.deadline_s:.3f}",
        EPOCH_VARIABLE: str(prepare.epoch),
        GENERATION_VARIABLE: str(prepare.generation),
        "PHALANX_MTBF_S": f"{prepare.mtbf_s:.0f}",
        "PHALANX_COLLECTIVE_TIMEOUT_S": f"{spec.collective_timeout_s:g}",
        "PHALANX_VIRTUAL": "1" if node.virtual else "0",
        "PHALANX_DEVICES": ",".join(node.devices),
        **_cuda_devices(grant, node),
        **{data_variable(name): place for name, place in node.data},
        **_array(prepare),
        **_plan(prepare),
        **_secret_names(node),
    }


def _secret_names(node: NodeContext) -> dict[str, str]:
    """Return the variable with the names of the secrets, whose values our own programs keep out of files and messages."""
    return {SECRETS_VARIABLE: ",".join(node.secrets)} if node.secrets else {}


def _cuda_devices(grant: NodeGrant, node: NodeContext) -> dict[str, str]:
    """Return the variables by which CUDA finds the devices.

    Numbers where they are certain, because many programs read nothing else (vllm#20939), and UUIDs for slices and shares.
    """
    if node.virtual and not _slices(grant):
        return {"CUDA_VISIBLE_DEVICES": ""}
    if node.cuda_numbers:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.cuda_numbers)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(node.devices)}


def _slices(grant: NodeGrant) -> int:
    """Return the number of MIG slices of the grant."""
    return 0 if grant.share is None else len(grant.share.slices)


def _own_slice(grant: NodeGrant, local_rank: int, node: NodeContext) -> dict[str, str]:
    """Return the MIG slice of one task, which CUDA then numbers 0; nothing for other grants. A process can use only one slice."""
    count = _slices(grant)
    if not count or grant.tasks < count:  # a batch script: its steps divide the slices
        return {}
    own = node.devices[local_rank * count // grant.tasks]
    return {"PHALANX_DEVICES": own, "CUDA_VISIBLE_DEVICES": own}


def _resources(prepare: PrepareTasks, grant: NodeGrant) -> dict[str, str]:
    """Return the variable with the granted extras and licences, sizes in bytes; none without any."""
    granted = add_extras(grant.extras, prepare.allocation.licences)
    return {"PHALANX_RESOURCES": ",".join(f"{name}={amount}" for name, amount in granted)} if granted else {}


def _share(grant: NodeGrant, mps: str) -> dict[str, str]:
    """Return the variables of a job that has a part of a device; none for whole devices."""
    share = grant.share
    if share is None:
        return {}
    variables = {
        "PHALANX_GPU_SHARE": f"{share.milli / MILLI_PER_DEVICE:g}",
        "PHALANX_GPU_MEMORY": str(share.memory_bytes),
    }
    if share.slices:
        variables[MIG_PROFILE_VARIABLE] = share.slices[0].profile
    if mps:
        variables |= {
            "CUDA_MPS_PIPE_DIRECTORY": mps,
            "CUDA_MPS_LOG_DIRECTORY": mps,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, share.milli * 100 // MILLI_PER_DEVICE)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.memory_bytes // MIB}M",
        }
    return variables


def _folders(prepare: PrepareTasks, folders: MemberFolders) -> dict[str, str]:
    """Return the variables of the checkpoint and output folders."""
    apart = local_copies.has_local_checkpoints(prepare)
    checkpoints = local_copies.epoch_folder(folders.checkpoints, prepare) if apart else prepare.checkpoint_dir
    variables = {
        "PHALANX_CHECKPOINT_DIR": checkpoints,
        "PHALANX_OUTPUT_DIR": folders.outputs if local_copies.has_local_outputs(prepare) else prepare.output_dir,
    }
    return {**variables, LOCAL_CHECKPOINTS_VARIABLE: "1"} if apart else variables


def _plan(prepare: PrepareTasks) -> dict[str, str]:
    """Return the layout of the job's model and the topology of its gang, for `phalanx.torch`. Empty for a job without a plan."""
    if not prepare.spec.plan:
        return {}
    from phalanx.core.work.job_file.plan_key import planned_layout  # these jobs alone
    from phalanx.core.work.layouts.layout import layout_to_json

    layout = planned_layout(prepare.spec.plan)
    variables = {"PHALANX_LAYOUT": prepare.spec.plan if layout is None else json.dumps(layout_to_json(layout))}
    if prepare.surroundings is not None:
        variables["PHALANX_MACHINE"] = json.dumps(gang_topology_to_json(prepare.surroundings))
    return variables


def _array(prepare: PrepareTasks) -> dict[str, str]:
    """Return the job's place in its array: Slurm's variables under our names."""
    place = prepare.array
    if place is None:
        return {}
    return {
        "PHALANX_ARRAY_JOB_ID": place.array_id,
        "PHALANX_ARRAY_TASK_ID": str(place.index),
        "PHALANX_ARRAY_TASK_COUNT": str(place.size),
        "PHALANX_ARRAY_TASK_MIN": str(place.lowest),
        "PHALANX_ARRAY_TASK_MAX": str(place.highest),
    }


def _defaults(prepare: PrepareTasks, start: StartTasks, grant: NodeGrant, node: NodeContext) -> dict[str, str]:
    """Return the defaults that a job may override."""
    variables, role = _defaults_of_python(), prepare.spec.role
    started = (
        grant.tasks if grant.tasks > 1 else slots_on_node(role, grant.visible_devices)
    )  # by a launcher, if not by us
    if started > 1:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun does: thread pools of several ranks would compete for cores
    if all(address.startswith(_LOOPBACK) for address in prepare.addresses):
        # Gloo resolves the host's own name, which often fails in sandboxes and on laptops.
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if role.launch is LaunchMode.PER_NODE:
        variables |= _launcher(prepare, start, grant)
    if role.launch is LaunchMode.ONCE:
        folders = node.folders
        variables |= mpi_defaults(
            prepare,
            agent=folders.agent,
            slots_file=folders.hostfile,
            colon_file=folders.colon_hostfile,
            root=node.root,
        )
    if prepare.spec.slurm:
        variables |= script_defaults(prepare.addresses)
    return variables


def _defaults_of_python() -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1"}


def _launcher(prepare: PrepareTasks, start: StartTasks, grant: NodeGrant) -> dict[str, str]:
    """Return the variables that make a bare `torchrun train.py` join the gang.

    Source: torch/distributed/argparse_util.py (PET_<option>).
    """
    master = prepare.addresses[0]
    return {
        "PET_NNODES": str(len(prepare.allocation.grants)),
        "PET_NPROC_PER_NODE": str(max(1, grant.visible_devices)),
        "PET_NODE_RANK": str(grant.node_rank),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": str(start.port),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": address_with_port(master, start.port),
        "PET_RDZV_ID": f"{prepare.job_id}.{prepare.epoch}.{prepare.generation}",
        "PET_MAX_RESTARTS": "0",  # Phalanx restarts the whole gang, with a new rendezvous
        "PET_LOCAL_ADDR": prepare.addresses[grant.node_rank],
    }


def task_command(argv: Sequence[str], script: str) -> tuple[str, ...] | str:
    """Return the command of a task: its words, or the shell text."""
    return script or tuple(argv)
