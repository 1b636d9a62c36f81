"""Build an attempt's Slurm job request and its supervisors' order, and interpret sbatch's refusals. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.engines.slurm import inventory, render
from phalanx.engines.slurm.options import ENGINE_NAME
from phalanx.engines.slurm.parse import SlurmNode
from phalanx.wire.seat import SeatAssignment, SeatNode

# Words of Slurm's error messages (as of 22.05), in lower case: of permanent refusals, and of an unreachable controller.
_PERMANENT: Final = ("invalid", "not permitted", "denied", "unable to determine", "unrecognized")
# A closed partition, or a limit that may pass. (sbatch has one message for a job that is too large and for one job too many.)
_LIMITED: Final = ("configuration not available now", "violates accounting/qos policy", "drained", "down partition")
_UNREACHABLE: Final = ("unable to contact", "connect failure", "timed out", "connection refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """How this head uses Slurm.

    Attributes:
        tag: identifies this head in the comments of its Slurm jobs.
        supervisor: the command that starts a supervisor on a node.
        partition: for jobs and nodes; "" is Slurm's default partition.
        account: Slurm account; "" is Slurm's default. In it and in `qos`, `{project}` and `{queue}` are replaced by the job's.
        head_url, ca_pem: URL and CA certificate with which supervisors connect to the head.
    """

    tag: str
    supervisor: tuple[str, ...]
    head_url: str
    ca_pem: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""


def build_sbatch_request(
    settings: SlurmSettings, job: Job, attempt: Attempt, nodes: Mapping[str, SlurmNode], time_max: str
) -> render.SlurmJobRequest:
    """Build the Slurm job request of an attempt. `time_max`: the partition's limit as Slurm prints it."""
    grants, limit_s = attempt.allocation.grants, job.spec.time_limit_s
    return render.SlurmJobRequest(
        name=job.name,
        tag=settings.tag,
        job_id=job.id,
        epoch=attempt.epoch,
        grants=inventory.request_shares(grants, nodes),
        kind=inventory.gres_type(grants[0], nodes[grants[0].node_id]),
        supervisor=settings.supervisor,
        limit_s=None if limit_s is None else limit_s + job.spec.grace_s,
        time_max=time_max,
        partition=settings.partition,
        account=render.fill_pattern(settings.account, job.project, job.queue),
        qos=render.fill_pattern(settings.qos, job.project, job.queue),
    )


def seat_assignment(
    settings: SlurmSettings, attempt: Attempt, nodes: Mapping[str, SlurmNode], key: str
) -> SeatAssignment:
    """Build the order for the attempt's supervisors; `key` is the attempt's."""
    return SeatAssignment(
        job_id=attempt.job_id,
        epoch=attempt.epoch,
        key=key,
        engine=ENGINE_NAME,
        head_url=settings.head_url,
        ca_pem=settings.ca_pem,
        nodes={
            grant.node_id: SeatNode(address=nodes[grant.node_id].address, devices=len(grant.devices))
            for grant in attempt.allocation.grants
        },
        exit_commands=render.EXIT_COMMANDS,
    )


def explain_refusal(ask: render.SlurmJobRequest, why: str) -> tuple[str, EndCause]:
    """Return message and cause of sbatch's refusal: FAILED if Slurm would refuse the same job again."""
    if is_unreachable(why):
        return f"Slurm's controller does not answer: {why}", EndCause.CONTENDED
    text = f"Slurm refused the job: {why}{render.describe_options(ask)}"
    if any(word in why.lower() for word in _LIMITED):
        return text, EndCause.LIMITED
    permanent = any(word in why.lower() for word in _PERMANENT)
    return text, EndCause.FAILED if permanent else EndCause.START_FAIL


def is_unreachable(why: str) -> bool:
    """Whether an error means that Slurm's controller was not reached."""
    return any(word in why.lower() for word in _UNREACHABLE)
