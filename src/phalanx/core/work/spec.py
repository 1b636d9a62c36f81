"""What a user asks for: the job as submitted. Never changed afterwards but by `update`, which makes a new one."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.work.gpus import GpuRequest

GRACE_DEFAULT_S: Final = 30.0  # SIGTERM to SIGKILL; what Slurm's KillWait and Kubernetes' grace period give
COLLECTIVE_TIMEOUT_DEFAULT_S: Final = 600.0  # torch.distributed's own default for NCCL


class Launch(enum.StrEnum):
    """How often the command starts on a node."""

    PER_DEVICE = "per_device"
    PER_NODE = "per_node"  # the command is a launcher itself
    FIXED = "fixed"  # tasks_per_node was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Tasks of one job with one command and shape.

    Attributes:
        argv: the command as words; empty when `script` is given.
        script: a shell text, run by `bash -c`; empty when `argv` is given.
        tasks_per_node: None takes `launch`'s meaning: one per device, or one per node.
        cpus, memory_bytes: per node; 0 asks for no more than the node's default share.
    """

    name: str = "main"
    argv: tuple[str, ...] = ()
    script: str = ""
    gpus: GpuRequest = field(default_factory=lambda: GpuRequest(total=0))
    cpus: int = 0
    memory_bytes: int = 0
    launch: Launch = Launch.PER_DEVICE
    tasks_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as submitted.

    Attributes:
        workdir: absolute folder on the nodes; with `upload` the copy is unpacked and used instead.
        upload: SHA-256 of the uploaded archive of the working directory, or "".
        env: variables for every task, as pairs in the order written.
        setup: shell text run once per node before the tasks.
        time_limit_s: None for no limit.
        retry: restarts granted for user errors (non-zero exits); crashes and lost nodes have their own budget.
        checkpoint: folder or URL for checkpoints; "" for the default under the head's state.
        warm: fork Python ranks from a parent that has imported torch.
        tasks_note: how many tasks start, in words, as told to the user before the start.
    """

    name: str
    role: Role
    workdir: str
    upload: str = ""
    env: tuple[tuple[str, str], ...] = ()
    setup: str = ""
    image: str = ""
    project: str = ""
    queue: str = ""
    priority: int = 0
    time_limit_s: float | None = None
    retry: int = 0
    checkpoint: str = ""
    warm: bool = False
    hold: bool = False
    grace_s: float = GRACE_DEFAULT_S
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_DEFAULT_S
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def command_line(self) -> str:
        """The command as people read it."""
        return self.role.script.strip().splitlines()[0] if self.role.script.strip() else " ".join(self.role.argv)
