"""Which of Slurm's reasons for a waiting job is a limit, whose limit it is, and what to change. Pure.

Source: the reasons that squeue(1) of Slurm 22.05 and 24.11 lists under "JOB REASON CODES". Newer releases add names of the same forms, so the
parts of a name decide, not a list of names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.attempt import EndCause


class LimitScope(enum.Enum):
    """JOB: Slurm never starts a job of this size. USAGE: other jobs count too. CLOSED: the partition starts nothing. HELD: held by hand."""

    JOB = "job"
    USAGE = "usage"
    CLOSED = "closed"
    HELD = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLimit:
    """A limit that keeps one of our Slurm jobs from starting. `remedy`: what to change."""

    reason: str
    scope: LimitScope
    remedy: str

    @property
    def may_change(self) -> bool:
        """Whether another look of Slurm's scheduler may end the limit, or name it: at first a partition's limits may all read PartitionConfig."""
        return self.scope is LimitScope.USAGE or self.reason == _ANY_OF_PARTITION

    @property
    def cause(self) -> EndCause:
        """How the attempt ends: for good if Slurm would never start this job; else the job waits, on a closed partition for its nodes."""
        match self.scope:
            case LimitScope.JOB:
                return EndCause.FAILED
            case LimitScope.CLOSED:
                return EndCause.CONTENDED
            case LimitScope.USAGE | LimitScope.HELD:
                return EndCause.LIMITED


_JOB_WIDE: Final = (
    *("PerJob", "PerNode", "QOSMin", "MemPerLimit", "TimeLimit", "NodeLimit"),
    *("NotAllowed", "Invalid", "BadConstraints", "PartitionConfig", "DeadLine"),
)
_ANY_OF_PARTITION: Final = "PartitionConfig"
_CLOSED: Final = ("PartitionDown", "PartitionInactive")
_HELD: Final = ("JobHeldAdmin", "JobHeldUser")
_LIMITS: Final = ("QOS", "Assoc", "Partition", "Account", "Invalid", "BadConstraints", "DeadLine", "Max")
_SHARED: Final = ("Grp", "PerUser", "PerAccount", "JobsLimit")
_REMEDIES: Final = (
    ("Invalid", "start the head with an account and a QOS that Slurm knows"),
    ("NotAllowed", "start the head with an account and a QOS that the partition admits"),
    ("BadConstraints", "ask for nodes and GPUs that the partition has"),
    ("PartitionConfig", "ask for nodes and GPUs that the partition has"),
    ("QOSMin", "ask for more, or start the head with another QOS"),
    ("Minutes", "set a shorter time limit, or ask for less"),
    ("Wall", "set a shorter time limit"),
    ("TimeLimit", "set a shorter time limit"),
    ("DeadLine", "set a shorter time limit"),
    ("GRES", "ask for fewer GPUs"),
    ("Gres", "ask for fewer GPUs"),
    ("Cpu", "ask for fewer CPUs"),
    ("CPU", "ask for fewer CPUs"),
    ("Mem", "ask for less memory"),
    ("Node", "ask for fewer nodes"),  # last: "PerNode" limits name what is limited
)
_OTHER_REMEDY: Final = "ask the cluster's administrator, or start the head with another account or QOS"


def limit_of(reason: str, partition: str = "") -> SlurmLimit | None:
    """Interpret the reason that squeue shows for a waiting job; None if it is no limit (nodes in use, priority, unknown).

    Args:
        reason: Slurm's word, such as "QOSMaxGRESPerUser"; text after a comma is ignored.
        partition: its name, for the remedy.
    """
    word = reason.partition(",")[0].strip()
    if word in _CLOSED:
        name = f"partition {partition}" if partition else "the partition"
        command = f"scontrol update PartitionName={partition or 'NAME'} State=UP"
        return SlurmLimit(
            reason=word, scope=LimitScope.CLOSED, remedy=f"an administrator of Slurm has closed {name}: {command}"
        )
    if word in _HELD:
        return SlurmLimit(reason=word, scope=LimitScope.HELD, remedy="the Slurm job was held by hand in Slurm")
    if not word.startswith(_LIMITS):
        return None
    shared = any(part in word for part in _SHARED)
    job_wide = not shared and any(part in word for part in _JOB_WIDE)
    remedy = next((text for part, text in _REMEDIES if part in word), _OTHER_REMEDY)
    if not job_wide:
        return SlurmLimit(
            reason=word, scope=LimitScope.USAGE, remedy=f"it starts when other jobs under this limit end; or {remedy}"
        )
    return SlurmLimit(reason=word, scope=LimitScope.JOB, remedy=remedy)
