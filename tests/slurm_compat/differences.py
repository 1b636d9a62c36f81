"""What may differ between a script on Slurm and the same script here: each entry with its reason. Everything else must be equal."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final


class Kind(enum.Enum):
    """How a variable may differ."""

    VALUE = "both set it, to different values"
    ABSENT = "only Slurm sets it"
    EXTRA = "only Phalanx sets it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedDifference:
    """`names`: a pattern of whole names; `values`: of Slurm's whole value, "" for any."""

    names: str
    kind: Kind
    reason: str
    values: str = ""


def _allow(kind: Kind, reason: str, *names: str, values: str = "") -> AllowedDifference:
    return AllowedDifference(names="|".join(names), kind=kind, reason=reason, values=values)


ALLOWED: Final = (
    _allow(Kind.VALUE, "each cluster has a name of its own", "SLURM_CLUSTER_NAME"),
    _allow(Kind.VALUE, "so has its default partition", "SLURM_JOB_PARTITION", values="lab"),
    _allow(Kind.VALUE, "process ids", "SLURM_TASK_PID"),
    _allow(Kind.VALUE, "where a rank finds the PMIx server of its node", r"PMIX_SERVER_(URI\d+|TMPDIR)", "PMI_FD"),
    _allow(Kind.VALUE, "unique on a node, also beside jobs of another head with the same number", "PMIX_NAMESPACE"),
    _allow(Kind.VALUE, "munge signs nothing here: the server knows its ranks by their user", "PMIX_SECURITY_MODE"),
    _allow(
        Kind.VALUE,
        "ranks get the data of a job by messages, not by shared memory of one version of the library",
        "PMIX_GDS_MODULE",
    ),
    _allow(
        Kind.ABSENT,
        "files of the shared memory by which Slurm's PMIx passes on the data of a job; here it goes by messages",
        "PMIX_DSTORE_21_BASE_PATH",
        "PMIX_DSTORE_ESH_BASE_PATH",
    ),
    _allow(
        Kind.EXTRA,
        "each step can become an MPI world, of PMI-1 or PMIx, whatever --mpi says but none; Slurm serves the one of --mpi or MpiDefault",
        "PMI_PORT",
        "PMI_ID",
        r"PMIX_\w+",
    ),
    _allow(Kind.ABSENT, "ranks learn the version of their server from the server", "PMIX_VERSION"),
    _allow(Kind.ABSENT, "of Slurm's own plugin", "SLURM_PMIXP_ABORT_AGENT_PORT", "SLURM_PMIX_MAPPING_SERV"),
    _allow(
        Kind.VALUE,
        "Slurm numbers the elements of an array when they start; here they are numbered in order",
        r"SLURM_JOB_?ID of an element",
    ),
    _allow(
        Kind.ABSENT, "there is no slurm.conf, and no controller to connect to", "SLURM_CONF", "SLURM_WORKING_CLUSTER"
    ),
    _allow(Kind.ABSENT, "nodes have no aliases; newer versions of Slurm leave it out", "SLURM_NODE_ALIASES"),
    _allow(
        Kind.ABSENT,
        "ports of Slurm's own srun",
        "SLURM_SRUN_COMM_HOST",
        "SLURM_SRUN_COMM_PORT",
        "SLURM_STEP_LAUNCHER_PORT",
    ),
    _allow(
        Kind.ABSENT,
        "sbatch(1) and srun(1) do not document it: srun leaves it to itself",
        "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0",
    ),
    _allow(
        Kind.ABSENT,
        "default of the lab's Slurm for a script that requests no memory; here it has no limit",
        r"SLURM_MEM_PER_CPU(_(HET|PACK)_GROUP_\d+)?",
        values="10240",
    ),
    _allow(
        Kind.ABSENT,
        "names of devices that Phalanx does not have (OpenCL, Intel); ROCR_VISIBLE_DEVICES says the same",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
    ),
    _allow(
        Kind.ABSENT,
        "tasks are not bound to cores",
        "SLURM_CPU_BIND",
        "SLURM_CPU_BIND_LIST",
        "SLURM_CPU_BIND_TYPE",
        "SLURM_CPU_BIND_VERBOSE",
    ),
    _allow(
        Kind.EXTRA,
        "sbatch sets it since version 22.05.9; programs read it to save in time",
        "SLURM_JOB_(START|END)_TIME",
    ),
    _allow(
        Kind.EXTRA,
        "Phalanx always names the devices that a process may use, also none; Slurm only for a job that requested GPUs",
        "CUDA_VISIBLE_DEVICES",
    ),
    _allow(
        Kind.EXTRA,
        "virtual nodes share one host name, from which Open MPI derives the names of shared memory",
        "OMPI_MCA_(btl|coll|btl_tcp_if_include|oob_tcp_if_include)",
    ),
)


def allowed(variable: str, left: str | None, right: str | None) -> str:
    """Return why a variable may differ so; "" if it must not. None: not set."""
    kind = Kind.EXTRA if left is None else Kind.ABSENT if right is None else Kind.VALUE
    return next(
        (
            one.reason
            for one in ALLOWED
            if one.kind is kind
            and re.fullmatch(one.names, variable)
            and (not one.values or re.fullmatch(one.values, left or ""))
        ),
        "",
    )
