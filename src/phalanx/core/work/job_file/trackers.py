"""Names of a job for experiment trackers, in their own variables.

W&B: `WANDB_NAME`, `WANDB_RUN_GROUP`, and for the first rank `WANDB_RUN_ID` with `WANDB_RESUME=allow`, so that each attempt continues the run of the
one before. Source: docs.wandb.ai, environment variables and resuming of runs, 2026-11.
MLflow: `MLFLOW_RUN_CONTEXT`, tags of each run that the program starts, `mlflow.runName` among them. Its server gives ids to runs.
Source: mlflow 3.17, tracking/context/system_environment_context.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.work.spec import JobSpec

RUN_TAG: Final = "phalanx.run"  # of MLflow: the same for all attempts of a job, and for no other job
_SWEEP_LABEL: Final = "sweep"
_EXECUTOR: Final = "phalanx.executor."  # begins the module that its jobs run
_RUN_VARIABLES: Final = ("WANDB_RUN_ID", "WANDB_RESUME")  # together or not at all
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedJob:
    """What the variables of trackers name. `folder`: its name and the cluster's in one, as that of its outputs; `array_id`: of an element; `labels`: of the job.

    `has_many_runs`: its program may well begin several runs: a session, a batch script with steps, an executor of functions.
    """

    id: JobId
    name: str
    folder: str
    array_id: JobId | None
    labels: Mapping[str, str]
    has_many_runs: bool = False

    @property
    def run_name(self) -> str:
        """The name of its run."""
        return f"{_UNPRINTABLE.sub('', self.name)}-{self.id}"

    @property
    def group(self) -> str:
        """What its run has in common with others: the sweep, the array, or all ranks of the job."""
        return self.labels.get(_SWEEP_LABEL) or (
            self.run_name if self.array_id is None else f"{_UNPRINTABLE.sub('', self.name)}-{self.array_id}"
        )


def tracked_job(spec: JobSpec, job_id: JobId, folder: str, array_id: JobId | None) -> TrackedJob:
    """Return what the variables of trackers name, of the job of a spec."""
    session = spec.terminal or bool(spec.ports) or spec.idle_s is not None
    executor = any(word.startswith(_EXECUTOR) for word in spec.role.argv[:3])
    return TrackedJob(
        id=job_id,
        name=spec.name,
        folder=folder,
        array_id=array_id,
        labels=dict(spec.labels),
        has_many_runs=session or executor or spec.is_batch_script,
    )


def tracker_variables(job: TrackedJob, rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """The variables for a rank, without those that are given already, by the job or the node."""
    if job.has_many_runs:
        return {} if "WANDB_RUN_GROUP" in given else {"WANDB_RUN_GROUP": job.group}
    tags = {"mlflow.runName": job.run_name, RUN_TAG: job.folder, "phalanx.job": job.id, "phalanx.group": job.group}
    wanted = {
        "WANDB_NAME": job.run_name if rank == 0 else f"{job.run_name}-rank{rank}",
        "WANDB_RUN_GROUP": job.group,
        "MLFLOW_RUN_CONTEXT": json.dumps(tags),
    }
    if rank == 0 and not any(name in given for name in _RUN_VARIABLES):
        wanted |= {"WANDB_RUN_ID": job.folder, "WANDB_RESUME": "allow"}
    return {name: value for name, value in wanted.items() if name not in given}
