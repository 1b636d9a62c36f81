"""The environment of a rank: where it is in the gang, where it may write, and nothing it must not see (DESIGN 2).

Pure: the node's own environment is given, a new mapping comes out. A torch.distributed script that reads the environment runs unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.work.allocation import Grant
from phalanx.core.work.layout import layout_to_json
from phalanx.core.work.planned import layout_of
from phalanx.core.work.spec import Launch
from phalanx.core.work.surroundings import surroundings_to_json
from phalanx.node.logic import kept
from phalanx.wire.rank import (
    APART_VARIABLE,
    EPOCH_VARIABLE,
    GENERATION_VARIABLE,
    LEASE_PAGE_VARIABLE,
    REPORT_PIPE_VARIABLE,
    STACKS_VARIABLE,
)

# What another launcher or scheduler left in the supervisor's own environment would mislead libraries that look for it.
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
)
_NOT_INHERITED_NAMES: Final = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG",
    "CUDA_VISIBLE_DEVICES", "INVOCATION_ID", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID",
})  # fmt: skip
OF_THE_HEAD: Final = frozenset({
    "PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE", "PGSSLKEY", "PGSSLPASSWORD", "CREDENTIALS_DIRECTORY",
})  # fmt: skip
"""By what the head opens its database, and a service manager hands it secrets. A job that needs such a one names its own.
Source: PostgreSQL's manual, libpq, "Environment Variables"; systemd.exec(5)."""
OF_CLIENTS: Final = frozenset(
    {"PHALANX_URL", "PHALANX_TOKEN", "PHALANX_HOME"}
)  # a job may speak to a head of its own choice
_RESERVED: Final = "PHALANX_"  # a job's own variables may not begin so: they would pass for ours
_LOOPBACK: Final = ("127.", "localhost", "::1")
_TENSORFLOW_PORTS: Final = 1  # the first TensorFlow worker listens right above the rendezvous port


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where a member's files are. `hostfile`, `page` and `reports` are files in its scratch folder, `stacks` is the folder itself.

    `checkpoints`, `outputs`: the node's own of the job, for a gang whose nodes do not share the head's (`Prepare.kept`).
    """

    hostfile: str
    page: str
    reports: str
    checkpoints: str = ""
    outputs: str = ""
    stacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What this node adds. `devices`: UUIDs of the grant's devices, by local rank; `base`: the supervisor's own environment."""

    base: Mapping[str, str]
    devices: tuple[str, ...]
    virtual: bool
    folders: Folders


def inherited(base: Mapping[str, str]) -> dict[str, str]:
    """What a rank may take over from the supervisor: not its secrets, and nothing that names another gang."""
    return {
        name: value
        for name, value in base.items()
        if not (name.startswith(_NOT_INHERITED) or name in _NOT_INHERITED_NAMES or name in OF_THE_HEAD)
    }


def rank_environment(
    prepare: Prepare, start: StartTasks, grant: Grant, local_rank: int, node: NodeView
) -> tuple[dict[str, str], list[str]]:
    """The environment of one task, and a sentence for each variable of the job's own that had to yield."""
    ours = _fixed(prepare, start, grant, local_rank, node)
    defaults = _defaults(prepare, start, grant)
    asked = dict(prepare.spec.env)
    notes = [
        f"env: {name} is set by Phalanx; the job's value is not used" for name in sorted(asked) if _yields(name, ours)
    ]
    kept = {name: value for name, value in asked.items() if not _yields(name, ours)}
    return {**inherited(node.base), **defaults, **kept, **ours}, notes


def setup_environment(prepare: Prepare, grant: Grant, node: NodeView) -> dict[str, str]:
    """The environment of the setup text: the job's own, the node's place in it, and no rendezvous yet."""
    asked = {name: value for name, value in prepare.spec.env if not _yields(name, {})}
    return {**inherited(node.base), **_defaults_of_python(), **asked, **_place(prepare, grant, node)}


def hostfile(prepare: Prepare) -> str:
    """One line for each node as Open MPI and DeepSpeed read it: address and slots."""
    slots = [max(1, grant.tasks if grant.tasks > 1 else len(grant.devices)) for grant in prepare.allocation.grants]
    return "".join(f"{address} slots={count}\n" for address, count in zip(prepare.addresses, slots, strict=True))


def _yields(name: str, ours: Mapping[str, str]) -> bool:
    return name in ours or (name.startswith(_RESERVED) and name not in OF_CLIENTS)


def _fixed(prepare: Prepare, start: StartTasks, grant: Grant, local_rank: int, node: NodeView) -> dict[str, str]:
    """What no job may override: a rank that believed another rank or device would break its whole gang."""
    rank, world_size = grant.first_rank + local_rank, prepare.allocation.world_size
    master = prepare.addresses[0]
    variables = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(start.port),
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(grant.tasks),
        "NODE_RANK": str(grant.node_rank),
        "GROUP_RANK": str(grant.node_rank),
        "TF_CONFIG": _tf_config(prepare, start.port, rank),
        "JAX_COORDINATOR_ADDRESS": f"{master}:{start.port}",
        "JAX_NUM_PROCESSES": str(world_size),
        "JAX_PROCESS_ID": str(rank),
        **_place(prepare, grant, node),
        LEASE_PAGE_VARIABLE: node.folders.page,
        REPORT_PIPE_VARIABLE: node.folders.reports,
    }
    if node.folders.stacks:
        variables[STACKS_VARIABLE] = node.folders.stacks
    if start.resume is not None:
        own = kept.own_copy(prepare, start.resume, node.folders.checkpoints)
        variables["PHALANX_RESUME_FROM"] = start.resume.path if own is None else own
    return variables


def _place(prepare: Prepare, grant: Grant, node: NodeView) -> dict[str, str]:
    """What holds for every process of the job on this node."""
    spec = prepare.spec
    return {
        "PHALANX_JOB_ID": prepare.job_id,
        "PHALANX_NODE_RANK": str(grant.node_rank),
        "PHALANX_NNODES": str(len(prepare.allocation.grants)),
        "PHALANX_NODE_IPS": "\n".join(prepare.addresses),
        "PHALANX_GPUS_PER_NODE": str(len(grant.devices)),
        "PHALANX_NUM_GPUS": str(prepare.allocation.gpus),
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
        "CUDA_VISIBLE_DEVICES": "" if node.virtual else ",".join(node.devices),
        **_array(prepare),
        **_plan(prepare),
    }


def _folders(prepare: Prepare, folders: Folders) -> dict[str, str]:
    """Where a rank may write what outlives it."""
    apart = kept.keeps_checkpoints(prepare)
    checkpoints = kept.epoch_folder(folders.checkpoints, prepare.epoch) if apart else prepare.checkpoint_dir
    variables = {
        "PHALANX_CHECKPOINT_DIR": checkpoints,
        "PHALANX_OUTPUT_DIR": folders.outputs if prepare.kept else prepare.output_dir,
    }
    return {**variables, APART_VARIABLE: "1"} if apart else variables


def _plan(prepare: Prepare) -> dict[str, str]:
    """How the job's model is split, and over what: for `phalanx.torch`. Nothing for a job without a plan."""
    if not prepare.spec.plan:
        return {}
    layout = layout_of(prepare.spec.plan)
    said = {"PHALANX_LAYOUT": prepare.spec.plan if layout is None else json.dumps(layout_to_json(layout))}
    if prepare.surroundings is not None:
        said["PHALANX_MACHINE"] = json.dumps(surroundings_to_json(prepare.surroundings))
    return said


def _array(prepare: Prepare) -> dict[str, str]:
    """Which element of its array the job is: Slurm's variables under our name."""
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


def _defaults(prepare: Prepare, start: StartTasks, grant: Grant) -> dict[str, str]:
    """What a job may set otherwise."""
    variables = _defaults_of_python()
    if grant.tasks > 1:
        variables["OMP_NUM_THREADS"] = (
            "1"  # as torchrun has it: several ranks with a pool each would fight over the cores
        )
    if all(address.startswith(_LOOPBACK) for address in prepare.addresses):
        # Gloo looks the host's own name up, which sandboxes and laptops often cannot resolve.
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if prepare.spec.role.launch is Launch.PER_NODE:
        variables |= _launcher(prepare, start, grant)
    return variables


def _defaults_of_python() -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1"}


def _launcher(prepare: Prepare, start: StartTasks, grant: Grant) -> dict[str, str]:
    """What makes bare `torchrun train.py`, and MPI's starters on one node, do the right thing.

    Source: torch/distributed/argparse_util.py (PET_<option>), Open MPI's and PRRTE's MCA parameters, MPICH's Hydra.
    """
    master = prepare.addresses[0]
    return {
        "PET_NNODES": str(len(prepare.allocation.grants)),
        "PET_NPROC_PER_NODE": str(max(1, len(grant.devices))),
        "PET_NODE_RANK": str(grant.node_rank),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": str(start.port),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"{master}:{start.port}",
        "PET_RDZV_ID": f"{prepare.job_id}.{prepare.epoch}.{prepare.generation}",
        "PET_MAX_RESTARTS": "0",  # restarts are ours: a gang restarts whole, with a new rendezvous
        "PET_LOCAL_ADDR": prepare.addresses[grant.node_rank],
    }


def _tf_config(prepare: Prepare, port: int, rank: int) -> str:
    """TensorFlow's cluster: every task at its node's address and a port of its own above the rendezvous port."""
    workers = [
        f"{address}:{port + _TENSORFLOW_PORTS + worker}"
        for address, grant in zip(prepare.addresses, prepare.allocation.grants, strict=True)
        for worker in range(grant.first_rank, grant.first_rank + grant.tasks)
    ]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


def command_of(argv: Sequence[str], script: str) -> tuple[str, ...] | str:
    """What a task runs: the words, or the shell text."""
    return script or tuple(argv)
