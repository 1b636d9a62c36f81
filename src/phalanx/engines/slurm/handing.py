"""What is handed to Slurm with an attempt: the job that is asked for, the order of its supervisors, and what a refusal means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.attempt import Attempt, Cause
from phalanx.core.work.job import Job
from phalanx.engines.slurm import inventory, render
from phalanx.engines.slurm.inventory import ENGINE_NAME
from phalanx.engines.slurm.parse import SlurmNode
from phalanx.wire.seat import SeatOrder, SeatPart

# Words of Slurm's complaints (as 22.05 prints them), in lower case: of a job, and of its own state.
_FOR_GOOD: Final = ("invalid", "not permitted", "denied", "unable to determine", "unrecognized")
_UNHEARD: Final = ("unable to contact", "connect failure", "timed out", "connection refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """How this head uses Slurm.

    Attributes:
        tag: of this head, in the comments of its jobs.
        supervisor: the command that becomes a supervisor on a node.
        partition: jobs go there and nodes come from there; "" is Slurm's default partition.
        account: who pays in Slurm; "" leaves it to Slurm's default. In it and in `qos`, `{project}` and `{queue}` stand for the job's.
        head_url, ca_pem: where supervisors call home.
    """

    tag: str
    supervisor: tuple[str, ...]
    head_url: str
    ca_pem: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""


def ask_of(
    settings: SlurmSettings, job: Job, attempt: Attempt, nodes: Mapping[str, SlurmNode], time_max: str
) -> render.Ask:
    """The attempt as a Slurm job. `time_max`: what the partition allows, in Slurm's words."""
    grants, limit_s = attempt.allocation.grants, job.spec.time_limit_s
    return render.Ask(
        name=job.name, tag=settings.tag, job_id=job.id, epoch=attempt.epoch, grants=inventory.shares(grants, nodes),
        kind=inventory.kind_of(grants[0], nodes[grants[0].node_id]), supervisor=settings.supervisor,
        limit_s=None if limit_s is None else limit_s + job.spec.grace_s, time_max=time_max, partition=settings.partition,
        account=render.named(settings.account, job.project, job.queue), qos=render.named(settings.qos, job.project, job.queue),
    )  # fmt: skip


def seats_of(settings: SlurmSettings, attempt: Attempt, nodes: Mapping[str, SlurmNode], key: str) -> SeatOrder:
    """What its supervisors are told; `key` is the attempt's."""
    return SeatOrder(
        job_id=attempt.job_id, epoch=attempt.epoch, key=key, engine=ENGINE_NAME, head_url=settings.head_url, ca_pem=settings.ca_pem,
        parts={
            grant.node_id: SeatPart(address=nodes[grant.node_id].address, devices=len(grant.devices))
            for grant in attempt.allocation.grants
        },
        parting=render.PARTING,
    )  # fmt: skip


def refusal_of(ask: render.Ask, why: str) -> tuple[str, Cause]:
    """What sbatch's refusal is to people, and to the job: FAILED where the same job would be refused again."""
    if unheard(why):
        return f"Slurm's controller does not answer: {why}", Cause.CONTENDED
    for_good = any(word in why.lower() for word in _FOR_GOOD)
    return f"Slurm refused the job: {why}{render.sent_with(ask)}", Cause.FAILED if for_good else Cause.START_FAIL


def unheard(why: str) -> bool:
    """Whether it is not Slurm's word on the job but its silence."""
    return any(word in why.lower() for word in _UNHEARD)
