"""From what shall be done to Slurm's command lines. Pure; the engine runs them.

Nothing secret is ever an argument: whoever sees the queue sees arguments, comments and scripts.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.core.units import MIB
from phalanx.core.work.allocation import Grant

JOB_FIELDS: Final = ("JobID", "UserName", "State", "NodeList", "Reason", "exit_code", "Comment")
"""Of `squeue --Format`."""

NODES: Final = ("scontrol", "--oneliner", "--details", "show", "node")
PARTITIONS: Final = ("scontrol", "--oneliner", "--all", "show", "partition")
TOPOLOGY: Final = ("scontrol", "--oneliner", "show", "topology")
VERSION: Final = ("sinfo", "--version")
_LEAVE: Final = 'scancel --quiet "$SLURM_JOB_ID"'
PARTING: Final = {
    "cancelled": _LEAVE, "preempted": _LEAVE, "drain": _LEAVE,
    "deadline": 'scontrol update "JobId=$SLURM_JOB_ID" EndTime=now && sleep 1.1',
}  # fmt: skip
"""What a supervisor says last, so that Slurm's books have CANCELLED and TIMEOUT. A job that ends well, but after its end time, is one that
timed out; its owner may bring that time forward, once, and Slurm compares whole seconds (tried on 22.05)."""
_COMMENT: Final = re.compile(r"phalanx:([0-9a-f]+):([0-9]{1,18}(?:_[0-9]{1,9})?)\.([0-9]{1,18})")
_LIMIT: Final = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)")
_NAME: Final = re.compile(r"[^A-Za-z0-9_.+-]+")
_NAME_MAX: Final = 60
OUR_LIMIT_FIRST_S: Final = (
    60  # so long after our own limit and grace Slurm's comes, for when no head is there to keep ours
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One attempt as a Slurm job.

    Attributes:
        name: of the Phalanx job, for people.
        tag: of this head; jobs of another are not ours.
        grants: one for each node, with the CPUs and memory that are asked of Slurm.
        kind: GRES type of the devices; "" for one without, or for no devices.
        limit_s: what is left of the job's own limit, with its grace; None for none.
        time_max: what the partition allows, for a job without a limit; "" leaves Slurm's default.
        supervisor: the command that becomes the supervisor, as words.
    """

    name: str
    tag: str
    job_id: JobId
    epoch: Epoch
    grants: tuple[Grant, ...]
    supervisor: tuple[str, ...]
    kind: str = ""
    limit_s: float | None = None
    time_max: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""


def comment(tag: str, job_id: JobId, epoch: Epoch) -> str:
    """What squeue and sacct show of where a job came from; by it a head finds its own again."""
    return f"phalanx:{tag}:{job_id}.{epoch}"


def read_comment(text: str) -> tuple[str, JobId, Epoch] | None:
    """Tag, job and epoch of a comment of ours; None for any other."""
    match = _COMMENT.fullmatch(text)
    return None if match is None else (match[1], JobId(match[2]), Epoch(int(match[3])))


def jobs(mark: str) -> tuple[str, ...]:
    """The whole queue, `mark` after each field: one that is new each time, for a comment holds what anybody likes, line ends too."""
    return (
        "squeue",
        "--noheader",
        "--all",
        "--states=all",
        "--Format=" + ",".join(f"{name}:{mark}" for name in JOB_FIELDS),
    )


def submit(ask: Ask) -> tuple[tuple[str, ...], str]:
    """`sbatch` with its arguments, and the script for its standard input.

    One Slurm job holds alike on all its nodes: of unlike grants the largest is asked for everywhere. (A heterogeneous job would be exact,
    but Slurm starts those by its backfill scheduler alone, every 30 s.)
    """
    count, words = len(ask.grants), ["sbatch", "--parsable"]
    devices = max(len(grant.devices) for grant in ask.grants)
    cpus, memory_bytes = max(grant.cpus for grant in ask.grants), max(grant.memory_bytes for grant in ask.grants)
    words += [
        f"--job-name={_NAME.sub('-', ask.name).strip('-')[:_NAME_MAX] or 'job'}",
        f"--comment={comment(ask.tag, ask.job_id, ask.epoch)}",
        f"--nodes={count}-{count}",
        f"--nodelist={','.join(grant.node_id for grant in ask.grants)}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, cpus)}",
        "--no-requeue",
        "--no-kill",
        "--chdir=/",
        "--output=/dev/null",
        "--error=/dev/null",
        "--input=/dev/null",
        "--export=ALL",
    ]
    if memory_bytes:
        words.append(f"--mem={max(1, memory_bytes // MIB)}M")
    if devices:
        words.append(f"--gres=gpu:{ask.kind}:{devices}" if ask.kind else f"--gres=gpu:{devices}")
    if ask.limit_s is not None:
        most_s = limit_of(ask.time_max)
        words.append(f"--time={clock(min(ask.limit_s + OUR_LIMIT_FIRST_S, most_s or math.inf))}")
    elif ask.time_max:
        words.append(f"--time={ask.time_max}")
    for option, value in (("partition", ask.partition), ("account", ask.account), ("qos", ask.qos)):
        if value:
            words.append(f"--{option}={value}")
    return tuple(words), _script(ask)


def named(pattern: str, project: str, queue: str) -> str:
    """An account or a quality of service, with the job's project and queue where the pattern says so."""
    return pattern.replace("{project}", project).replace("{queue}", queue)


def sent_with(ask: Ask) -> str:
    """The words of ours that Slurm may have refused, for people; empty where there were none."""
    given = [(option, getattr(ask, option)) for option in ("partition", "account", "qos")]
    words = ", ".join(f"{option} {value}" for option, value in given if value)
    return f" ({words})" if words else ""


def too_long(ask: Ask, limit_s: float | None) -> str:
    """Why a job with this time limit can never be had in this partition; empty where it can. Its grace may be cut short there."""
    most_s = limit_of(ask.time_max)
    if limit_s is None or most_s is None or limit_s <= most_s:
        return ""
    where = f"partition {ask.partition}" if ask.partition else "Slurm's partition"
    return f"longer than {where} allows: its time limit is {clock(limit_s)}, the most there {ask.time_max}"


def limit_of(text: str) -> float | None:
    """Seconds of a time limit as Slurm prints it (`7-00:00:00`, `01:30:00`); None for none."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def nudge(slurm_id: str, comment: str) -> tuple[str, ...]:
    """Have Slurm look at a waiting job again. Any change of a job wakes its scheduler, also one to what it was (tried on 22.05)."""
    return ("scontrol", "update", f"JobId={slurm_id}", f"Comment={comment}")


def kill(slurm_id: str) -> tuple[str, ...]:
    """End the batch step of a job, our srun, at once: told politely it would wait for a lost node, for KillWait (30 s by default)."""
    return ("scancel", "--quiet", "--batch", "--signal=KILL", slurm_id)


def cancel(slurm_ids: Sequence[str]) -> tuple[str, ...]:
    """End these jobs, also from within their steps."""
    return ("scancel", "--quiet", *slurm_ids)


def clock(seconds: float) -> str:
    """`D-HH:MM:SS` for Slurm, rounded up to a minute as Slurm itself does."""
    minutes = -(-int(seconds + 0.999) // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _script(ask: Ask) -> str:
    """One supervisor on each node. On a single node the batch script becomes it; else srun starts them and outlives a lost one."""
    words = list(ask.supervisor)
    if len(ask.grants) > 1:
        words = [
            "srun", "--ntasks-per-node=1", "--mem=0", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--no-kill",
            "--export=ALL", *words,
        ]  # fmt: skip
    return f"#!/bin/sh\n# Attempt {ask.epoch} of Phalanx job {ask.job_id}; its supervisors call home.\nexec {shlex.join(words)}\n"
