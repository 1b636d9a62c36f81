"""Build Slurm's command lines. Pure; the engine runs them.

Secrets are never arguments: every user who can see the queue sees arguments, comments and scripts.
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
from phalanx.core.work.allocation import NodeGrant
from phalanx.wire.resident import ADDRESS_VARIABLE

JOB_FIELDS: Final = ("JobID", "UserName", "State", "NodeList", "Reason", "exit_code", "Comment")
"""Fields of `squeue --Format`."""
RESIDENT_FIELDS: Final = ("JobID", "State", "Reason", "NodeList", "TimeLeft", "TimeLimit", "Comment")
"""The same for resident jobs."""

SHOW_NODES: Final = ("scontrol", "--oneliner", "--details", "show", "node")
SHOW_PARTITIONS: Final = ("scontrol", "--oneliner", "--all", "show", "partition")
SHOW_TOPOLOGY: Final = ("scontrol", "--oneliner", "show", "topology")
SHOW_VERSION: Final = ("sinfo", "--version")
_LEAVE: Final = 'scancel --quiet "$SLURM_JOB_ID"'
EXIT_COMMANDS: Final = {
    "cancelled": _LEAVE,
    "preempted": _LEAVE,
    "drain": _LEAVE,
    "deadline": 'scontrol update "JobId=$SLURM_JOB_ID" EndTime=now && sleep 1.1',
}
"""Shell lines that a supervisor runs last, so that Slurm's accounting shows CANCELLED or TIMEOUT. A job that ends with code 0 after its end
time counts as timed out; its owner may move that time forward once, and Slurm compares whole seconds (tested on 22.05)."""
_COMMENT: Final = re.compile(r"phalanx:([0-9a-f]+):([0-9]{1,18}(?:_[0-9]{1,9})?)\.([0-9]{1,18})")
_LIMIT: Final = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)")
_NAME: Final = re.compile(r"[^A-Za-z0-9_.+-]+")
_NAME_MAX: Final = 60
SLURM_LIMIT_MARGIN_S: Final = (
    60  # Slurm's limit comes this long after our limit and grace, in case no head enforces ours
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRequest:
    """A Slurm job that stays between attempts.

    Attributes:
        name: of the node, for people.
        comment: by which the head finds it.
        gpus, kind: its devices and their GRES type; "" if untyped.
        cpus, memory_bytes: what it asks for beside them.
        time: Slurm's time limit as Slurm writes it; "" for that of the partition.
        command: what runs in it.
    """

    name: str
    comment: str
    gpus: int
    kind: str
    cpus: int
    memory_bytes: int
    time: str
    command: tuple[str, ...]
    partition: str = ""
    account: str = ""
    qos: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobRequest:
    """One attempt as a Slurm job.

    Attributes:
        name: of the Phalanx job, for people.
        tag: of this head; jobs with another tag are not ours.
        grants: one for each node, with the CPUs and memory to request.
        kind: GRES type of the devices; "" if untyped, or without devices.
        limit_s: the job's time limit with its grace; None for none.
        time_max: the partition's limit, for a job without one; "" leaves Slurm's default.
        supervisor: the command that starts the supervisor.
    """

    name: str
    tag: str
    job_id: JobId
    epoch: Epoch
    grants: tuple[NodeGrant, ...]
    supervisor: tuple[str, ...]
    kind: str = ""
    limit_s: float | None = None
    time_max: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""


def job_comment(tag: str, job_id: JobId, epoch: Epoch) -> str:
    """Return the comment that squeue and sacct show; a head finds its own jobs by it."""
    return f"phalanx:{tag}:{job_id}.{epoch}"


def parse_comment(text: str) -> tuple[str, JobId, Epoch] | None:
    """Parse tag, job and epoch from a comment of ours; None for any other."""
    match = _COMMENT.fullmatch(text)
    return None if match is None else (match[1], JobId(match[2]), Epoch(int(match[3])))


def list_jobs_command(mark: str) -> tuple[str, ...]:
    """Return the command that lists the whole queue with `mark` after each field.

    The mark is random each time, because users choose their comments, which may hold anything, even line ends.
    """
    return (
        "squeue",
        "--noheader",
        "--all",
        "--states=all",
        "--Format=" + ",".join(f"{name}:{mark}" for name in JOB_FIELDS),
    )


def list_resident_command(mark: str, account: int) -> tuple[str, ...]:
    """Return the command that lists the jobs of an account on this machine, among them the head's own, as `list_jobs_command` does."""
    return (
        "squeue",
        "--noheader",
        "--all",
        "--states=all",
        f"--user={account}",
        "--Format=" + ",".join(f"{name}:{mark}" for name in RESIDENT_FIELDS),
    )


def submit_command(ask: SlurmJobRequest) -> tuple[tuple[str, ...], str]:
    """Return the `sbatch` command line, and the script for its standard input.

    A Slurm job gets the same share on all its nodes, so the largest grant is requested everywhere. (A heterogeneous job would be exact, but
    only Slurm's backfill scheduler starts those, every 30 s.)
    """
    count, words = len(ask.grants), ["sbatch", "--parsable"]
    devices = max(len(grant.devices) for grant in ask.grants)
    cpus, memory_bytes = max(grant.cpus for grant in ask.grants), max(grant.memory_bytes for grant in ask.grants)
    words += [
        f"--job-name={_NAME.sub('-', ask.name).strip('-')[:_NAME_MAX] or 'job'}",
        f"--comment={job_comment(ask.tag, ask.job_id, ask.epoch)}",
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
        most_s = parse_time_limit(ask.time_max)
        words.append(f"--time={format_time_limit(min(ask.limit_s + SLURM_LIMIT_MARGIN_S, most_s or math.inf))}")
    elif ask.time_max:
        words.append(f"--time={ask.time_max}")
    for option, value in (("partition", ask.partition), ("account", ask.account), ("qos", ask.qos)):
        if value:
            words.append(f"--{option}={value}")
    return tuple(words), _script(ask)


def resident_comment(tag: str, node_id: str, token: str) -> str:
    """Return the comment of a resident job; that of an attempt never looks like it."""
    return f"{resident_prefix(tag)}{node_id}:{token}"


def resident_prefix(tag: str) -> str:
    """Return what the comments of all resident jobs of a head begin with."""
    return f"phalanx-resident:{tag}:"


def resident_command(ask: ResidentRequest) -> tuple[tuple[str, ...], str]:
    """Return the `sbatch` command line of a resident job, and the script for its standard input.

    The node that Slurm chooses is known only there, so the script asks Slurm for the address of its own node.
    """
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={_NAME.sub('-', ask.name).strip('-')[:_NAME_MAX] or 'resident'}",
        f"--comment={ask.comment}",
        "--nodes=1-1",
        "--ntasks=1",
        f"--cpus-per-task={max(1, ask.cpus)}",
        "--no-requeue",
        "--chdir=/",
        "--output=/dev/null",
        "--error=/dev/null",
        "--input=/dev/null",
        "--export=ALL",
    ]
    if ask.memory_bytes:
        words.append(f"--mem={max(1, ask.memory_bytes // MIB)}M")
    if ask.gpus:
        words.append(f"--gres=gpu:{ask.kind}:{ask.gpus}" if ask.kind else f"--gres=gpu:{ask.gpus}")
    for option, value in (("time", ask.time), ("partition", ask.partition), ("account", ask.account), ("qos", ask.qos)):
        if value:
            words.append(f"--{option}={value}")
    address = 'scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p"'
    script = (
        "#!/bin/sh\n# A supervisor that stays between jobs of Phalanx.\n"
        f"{ADDRESS_VARIABLE}=$({address})\n"
        f'export {ADDRESS_VARIABLE}="${{{ADDRESS_VARIABLE}:-$(hostname)}}"\n'
        f"exec {shlex.join(ask.command)}\n"
    )
    return tuple(words), script


def fill_pattern(pattern: str, project: str, queue: str) -> str:
    """Fill the job's project and queue into the pattern of an account or a quality of service."""
    return pattern.replace("{project}", project).replace("{queue}", queue)


def is_pattern(text: str) -> bool:
    """Whether an account or a quality of service differs from job to job."""
    return fill_pattern(text, "", "") != text


def describe_options(ask: SlurmJobRequest) -> str:
    """Describe the options of ours that Slurm may have refused; empty without any."""
    given = [(option, getattr(ask, option)) for option in ("partition", "account", "qos")]
    words = ", ".join(f"{option} {value}" for option, value in given if value)
    return f" ({words})" if words else ""


def time_limit_problem(ask: SlurmJobRequest, limit_s: float | None) -> str:
    """Return why a job with this time limit can never run in this partition; empty if it can. Its grace may be cut short."""
    most_s = parse_time_limit(ask.time_max)
    if limit_s is None or most_s is None or limit_s <= most_s:
        return ""
    where = f"partition {ask.partition}" if ask.partition else "Slurm's partition"
    return f"the job's time limit {format_time_limit(limit_s)} exceeds the {ask.time_max} of {where}; set a shorter one"


def parse_time_limit(text: str) -> float | None:
    """Parse a time limit as Slurm prints it (`7-00:00:00`, `01:30:00`) into seconds; None for no limit."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def nudge_command(slurm_id: str, comment: str) -> tuple[str, ...]:
    """Return the command that makes Slurm schedule a waiting job: any update of a job triggers it, even an unchanged one (tested on 22.05)."""
    return ("scontrol", "update", f"JobId={slurm_id}", f"Comment={comment}")


def kill_command(slurm_id: str) -> tuple[str, ...]:
    """Return the command that kills a job's batch step, our srun, at once: on SIGTERM it would wait KillWait (30 s) for a lost node."""
    return ("scancel", "--quiet", "--batch", "--signal=KILL", slurm_id)


def cancel_command(slurm_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the command that cancels jobs."""
    return ("scancel", "--quiet", *slurm_ids)


def format_time_limit(seconds: float) -> str:
    """Format seconds as `D-HH:MM:SS`, rounded up to a minute as Slurm itself does."""
    minutes = -(-int(seconds + 0.999) // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _script(ask: SlurmJobRequest) -> str:
    """Return the script that starts one supervisor on each node: by exec on a single node, else by an srun that survives a lost node."""
    words = list(ask.supervisor)
    if len(ask.grants) > 1:
        words = [
            "srun",
            "--ntasks-per-node=1",
            "--mem=0",
            "--mpi=none",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--no-kill",
            "--export=ALL",
            *words,
        ]
    return f"#!/bin/sh\n# Attempt {ask.epoch} of Phalanx job {ask.job_id}; starts one supervisor on each node.\nexec {shlex.join(words)}\n"
