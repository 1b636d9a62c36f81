"""The job as submitted. Immutable: `update` creates a new one."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.resources import Extras, Resources
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.dependency import Dependency
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import local_path
from phalanx.core.work.job_file.notify import NotifyTerms
from phalanx.core.work.job_file.on_end import OnEnd
from phalanx.core.work.job_file.requirements import NO_REQUIREMENTS
from phalanx.core.work.job_file.software import NO_SOFTWARE, Software
from phalanx.core.work.job_file.web_ports import WebPort
from phalanx.core.work.services.service_terms import ServiceTerms

GRACE_DEFAULT_S: Final = 30.0  # SIGTERM to SIGKILL; the default of Slurm's KillWait and Kubernetes' grace period
COLLECTIVE_TIMEOUT_DEFAULT_S: Final = 600.0  # torch.distributed's own default for NCCL


class LaunchMode(enum.StrEnum):
    """How often the command starts on a node."""

    PER_DEVICE = "per_device"
    PER_NODE = "per_node"  # the command is itself a launcher, and starts the tasks of its node
    ONCE = "once"  # the command is an MPI launcher: it starts on node rank 0, and starts the tasks of all nodes
    FIXED = "fixed"  # tasks_per_node was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Tasks of one job with the same command and shape.

    Attributes:
        argv: the command as words; empty when `script` is given.
        script: a shell text, run by `bash -c`; empty when `argv` is given.
        tasks_per_node: None for the default of `launch`: one per device, or one per node. With `ONCE`: slots for the launcher's tasks.
        cpus, memory_bytes: per node; 0 requests only the node's default share.
        extras: named amounts that each node must offer.
        licences: seats of licences for the whole job.
        others: further roles of the same gang, each on nodes of its own: the other components of a heterogeneous `#SBATCH` script. They have none
            themselves, and no command: the script runs once, on node rank 0.
    """

    name: str = "main"
    argv: tuple[str, ...] = ()
    script: str = ""
    gpus: GpuRequest = field(default_factory=lambda: GpuRequest(total=0))
    cpus: int = 0
    memory_bytes: int = 0
    launch: LaunchMode = LaunchMode.PER_DEVICE
    tasks_per_node: int | None = None
    extras: Extras = ()
    licences: Extras = ()
    others: tuple[Role, ...] = ()

    @property
    def each(self) -> tuple[Role, ...]:
        """Every role of the gang alone, this one first."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def milli(self) -> int:
        """Thousandths of devices of all roles, as `GpuRequest.milli` counts them."""
        return self.gpus.milli + sum(role.gpus.milli for role in self.others)

    @property
    def gpus_text(self) -> str:
        """The GPUs in the grammar; those of several roles with a + between them."""
        return " + ".join(str(role.gpus) for role in self.each)

    @property
    def asked(self) -> Resources:
        """Everything that all roles take at least, on as few nodes as they may lie on."""
        nodes = self.gpus.nodes or 1
        per_node = Resources(0, self.cpus, self.memory_bytes, self.extras)
        alone = per_node * nodes + Resources(self.gpus.milli, extras=self.licences)
        return sum((role.asked for role in self.others), alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyConstraint:
    """Where a gang's nodes may lie in the topology. Levels are the fleet's ("rack", "leaf", ...).

    Attributes:
        within: all nodes inside one domain of this level; "" for anywhere (the smallest domain is still preferred).
        required: wait rather than spread wider; else `within` is a preference.
        slice_nodes: the gang is divided into slices of this many nodes, in rank order; 0 for none.
        slice_within: every slice must lie inside one domain of this level.
    """

    within: str = ""
    required: bool = False
    slice_nodes: int = 0
    slice_within: str = ""

    @property
    def binding(self) -> bool:
        """Whether a gang waits rather than break it; a preference is not binding."""
        return self.required or self.slice_nodes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as submitted.

    Attributes:
        workdir: absolute folder on the nodes; with `upload` the unpacked copy is used instead.
        upload: SHA-256 of the uploaded archive of the working directory, or "".
        env: variables for every task, as pairs in the order written.
        secrets: names of secrets, whose values the tasks get as variables of these names (`core.work.secret`).
        ports: on which its programs serve web pages.
        notify: the targets and events of its messages; None for no messages.
        on_end: the command that runs, without GPUs, after it has ended; None for none.
        setup: shell text run once per node before the tasks.
        requirements: file of the working directory that lists Python packages, "none", or "" for the default of a copy.
        software: the environment of its nodes that its processes run in.
        data: its datasets, as pairs of name and source in the order written; `data_mode`: how they reach its nodes.
        image: of the container that the command runs in, as the runtime names it; "" for the node itself.
        time_limit_s: None for no limit.
        terminal: its first rank runs on a terminal that clients can attach to.
        idle_s: parked after so long without work and without a client; None for never.
        retry: restarts granted for user errors (non-zero exits); crashes and lost nodes have their own budget.
        checkpoint: folder or URL for checkpoints; "" for the default under the head's state.
        outputs: URL of an object store below which its outputs are stored; "" for the head's folder.
        warm: fork Python ranks from a parent that has imported torch.
        dependencies: all must hold before the start.
        array: element numbers as written ("0-99"), for the submit only: each element is a job of its own; "" for one job.
        array_max: elements that may run at once; None for all.
        begin_s: not started before this Unix time; None for at once.
        reservation: started only inside this reservation; "" for none.
        plan: how its model is split: "" if not given, "auto" if the ranks choose, or a layout as `core.work.job_file.plan_key` writes it.
        nodelist: placed only on these nodes; empty for any. exclude: never on these.
        slurm: settings of an `#SBATCH` script that its nodes need (`core.work.sbatch_job`); empty for any other job.
        saves_on_stop: the command saves when it is asked to stop (phalanx.torch does), so that a stop loses no work.
        speeds: its speed on GPU models relative to each other, as the user gives it; empty if unknown.
        planned_speeds: the same from plans of its model, one for each GPU model; empty if it was not planned so.
        allow_never: accepted even if it can never start.
        service: the terms of a service, of which the job is one replica; None for any other job.
        gang_key: secret by which the processes of a job with `LaunchMode.ONCE` recognize each other; "" for any other job. Never shown.
        preemptible: False exempts it from stops for other jobs (reclaims of its quota and drains still stop it).
    """

    name: str
    role: Role
    workdir: str
    upload: str = ""
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    ports: tuple[WebPort, ...] = ()
    notify: NotifyTerms | None = None
    on_end: OnEnd | None = None
    setup: str = ""
    requirements: str = ""
    software: Software = NO_SOFTWARE
    data: tuple[tuple[str, str], ...] = ()
    data_mode: DataMode = DataMode.STAGE
    image: str = ""
    project: str = ""
    queue: str = ""
    priority: int = 0
    time_limit_s: float | None = None
    terminal: bool = False
    idle_s: float | None = None
    retry: int = 0
    checkpoint: str = ""
    outputs: str = ""
    warm: bool = False
    hold: bool = False
    grace_s: float = GRACE_DEFAULT_S
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_DEFAULT_S
    labels: tuple[tuple[str, str], ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    array: str = ""
    array_max: int | None = None
    begin_s: float | None = None
    topology: TopologyConstraint = field(default_factory=TopologyConstraint)
    reservation: str = ""
    preemptible: bool = True
    saves_on_stop: bool = False
    plan: str = ""
    nodelist: tuple[NodeId, ...] = ()
    exclude: tuple[NodeId, ...] = ()
    slurm: tuple[tuple[str, str], ...] = ()
    speeds: tuple[tuple[str, float], ...] = ()
    planned_speeds: tuple[tuple[str, float], ...] = ()
    allow_never: bool = False
    service: ServiceTerms | None = None
    gang_key: str = field(default="", repr=False)

    def role_of(self, grant: NodeGrant) -> Role:
        """The role that a node of the job has."""
        return self.role.others[grant.role - 1] if grant.role else self.role

    @property
    def packages_file(self) -> str:
        """The file of the working directory from which its nodes install packages, as far as the job itself names one; "" for none."""
        return self.software.uv or ("" if self.requirements == NO_REQUIREMENTS else self.requirements)

    @property
    def has_long_preparation(self) -> bool:
        """Whether its nodes may need long to prepare: they run a setup, install packages, pull an image, or stage data."""
        # A copy may contain its own list.
        packages = self.requirements != NO_REQUIREMENTS if self.requirements else bool(self.upload)
        return bool(self.setup or self.image or self.software) or packages or self.stages_data

    @property
    def stages_data(self) -> bool:
        """Whether its nodes copy datasets before the start."""
        return bool(self.data) and self.data_mode is DataMode.STAGE

    @property
    def mounts_stores(self) -> bool:
        """Whether its nodes mount object stores before the start."""
        return self.data_mode is DataMode.MOUNT and any(local_path(source) is None for _, source in self.data)

    @property
    def is_batch_script(self) -> bool:
        """Whether it was written for `sbatch`, with its settings as `#SBATCH` lines."""
        return bool(self.slurm)

    @property
    def command_line(self) -> str:
        """The command for display; of an `#SBATCH` script its path and arguments."""
        if script := dict(self.slurm).get("script"):
            return script
        return self.role.script.strip().splitlines()[0] if self.role.script.strip() else " ".join(self.role.argv)
