"""Steps over the components of a heterogeneous job: which `srun` starts what on which component, and the variables of it all. Pure.

Source: srun(1) of Slurm 22.05, and what its daemons set. The tasks of one `srun` are one world: ranks and nodes count on from component to
component, in the order of the components, whatever the order on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.sbatch_scripts.sbatch import split_components
from phalanx.node.logic.srun_options import SrunRequest, parse_srun, plan_step
from phalanx.node.logic.variables.slurm_variables import (
    OPTION_VARIABLES,
    SlurmBatchJob,
    SlurmStep,
    batch_variables,
    compress_counts,
    node_list,
    step_variables,
)

_GROUP: Final = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
# Variables that the script and the tasks of a heterogeneous job have for each component only.
_OF_COMPONENTS: Final = frozenset(OPTION_VARIABLES) - {
    *("SLURM_JOB_ACCOUNT", "SLURM_JOB_DEPENDENCY", "SLURM_JOB_RESERVATION", "SLURM_EXPORT_ENV", "SLURM_HINT"),
    *("SLURM_THREADS_PER_CORE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
}
# srun sets them for one component after the other, so that those of the last stay. (It does so while it starts tasks: at times a task
# of an earlier component sees its own.)
_OF_LAST: Final = ("SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT")
_MEMORY: Final = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU")
_OF_SCRIPT: Final = (*_MEMORY, "SLURM_JOB_GPUS")  # the tasks of all components see those of the script
_OF_EACH: Final = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_CPUS_PER_NODE"),
    *("SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS", *_OF_LAST, *_MEMORY),
    *sorted(_OF_COMPONENTS),
)
"""Variables of a component, which end in `_HET_GROUP_n`, and in `_PACK_GROUP_n` as older versions of Slurm called it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """The tasks that one `srun` starts on one component; of a job without components its only part.

    Attributes:
        group: number of the component.
        batch: the component as a job; the job itself without components.
        step: with ranks of nodes within the component.
        srun: its options and command.
        first_task, first_place: tasks and nodes of the parts before it.
    """

    group: int
    batch: SlurmBatchJob
    step: SlurmStep
    srun: SrunRequest
    first_task: int = 0
    first_place: int = 0

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of its nodes in the job."""
        return tuple(self.batch.first_rank + rank for rank in self.step.nodes)


def parse_sruns(words: Sequence[str], components: int) -> list[tuple[int, SrunRequest]]:
    """Parse an srun line: what it starts on each component that it names, in the order of the components.

    Args:
        words: of the line, after `srun`.
        components: of the job; 0 for a job without.

    Raises:
        BadRequest: as in `parse_srun`; or a component that does not exist, or is named twice.
    """
    parts = split_components(words)
    if len(parts) > 1 and not components:
        raise BadRequest(
            "srun A : B starts something on each component of a heterogeneous job, and this job has none",
            hint="write #SBATCH hetjob between the options of two components",
        )
    sruns: list[SrunRequest] = []
    for part in reversed(parts):  # one without a command runs that of the next
        sruns.insert(0, parse_srun(part, sruns[0].command if sruns else ()))
    found: dict[int, SrunRequest] = {}
    for place, srun in enumerate(sruns):
        text = srun.options.get("het-group", "")
        if text and not components:
            raise BadRequest(
                f"--het-group={text}: this job has no components",
                hint="leave it out, or write #SBATCH hetjob between the options of two components",
            )
        for group in _groups(text) if text else [place]:
            if components and group >= components:
                raise BadRequest(f"--het-group={group}: the components of this job are 0 to {components - 1}")
            if group in found:
                raise BadRequest(f"--het-group={group} is given twice", hint="start two steps")
            found[group] = srun
    return sorted(found.items(), key=lambda pair: pair[0])


def plan_parts(sruns: Sequence[tuple[int, SrunRequest]], batch: SlurmBatchJob, number: int) -> list[StepPart]:
    """Choose nodes and numbers of tasks for each component of a step.

    Raises:
        BadRequest: as in `plan_step`.
    """
    found: list[StepPart] = []
    tasks = places = 0
    for group, srun in sruns:
        component = batch.components[group] if batch.components else batch
        step = plan_step(srun, component, number)
        found.append(StepPart(group=group, batch=component, step=step, srun=srun, first_task=tasks, first_place=places))
        tasks, places = tasks + step.tasks, places + len(step.nodes)
    return found


def script_variables(batch: SlurmBatchJob) -> dict[str, str]:
    """Return the variables of the script: of a heterogeneous job those of component 0, and of each component."""
    if not batch.components:
        return batch_variables(batch)
    own = batch_variables(batch.components[0])
    return {name: value for name, value in own.items() if name not in _OF_COMPONENTS} | het_variables(batch)


def het_variables(batch: SlurmBatchJob) -> dict[str, str]:
    """Return the variables that describe each component of a heterogeneous job."""
    size = str(len(batch.components))
    found = {"SLURM_HET_SIZE": size, "SLURM_PACK_SIZE": size}
    for number, component in enumerate(batch.components):
        seen = batch_variables(component)
        for name in _OF_EACH:
            if name in seen:
                found |= {f"{name}_{word}_GROUP_{number}": seen[name] for word in ("HET", "PACK")}
    return found


def part_variables(
    batch: SlurmBatchJob, parts: Sequence[StepPart], part: StepPart, task: int, *, host: str, label: bool, umask: int
) -> dict[str, str]:
    """Return the variables of one task of a part, by its number within the part; the rest as in `step_variables`."""
    alone = step_variables(part.batch, part.step, task, host=host, label=label, umask=umask)
    if not batch.components:
        return alone
    place, _ = part.step.node_of(task)
    last = parts[-1]
    names = _names(parts, whole=False)
    nodes = [node for one in parts for node in one.batch.nodes]
    counts = compress_counts([count for one in parts for count in one.step.counts])
    tasks, places = str(last.first_task + last.step.tasks), str(last.first_place + len(last.step.nodes))
    of_script, of_last = batch_variables(batch.components[0]), batch_variables(last.batch)
    found = {name: value for name, value in alone.items() if name not in {*_OF_COMPONENTS, *_OF_SCRIPT}}
    found |= het_variables(batch)
    found |= {name: of_script[name] for name in _OF_SCRIPT if name in of_script}
    found |= {name: of_last[name] for name in _OF_LAST if name in of_last}
    found |= {
        "SLURM_JOB_ID": batch.job_number,
        "SLURM_JOBID": batch.job_number,
        "SLURM_JOB_NODELIST": _names(parts, whole=True),
        "SLURM_NODELIST": _names(parts, whole=True),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts([node.cpus for node in nodes]),
        "SLURM_NNODES": places,
        "SLURM_NODEID": str(part.first_place + place),
        "SLURM_PROCID": str(part.first_task + task),
        "SLURM_GTIDS": ",".join(str(part.first_task + one) for one in part.step.tasks_on(place)),
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": places,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_DISTRIBUTION": last.step.distribution,
    }
    if "cpus-per-task" in part.srun.options:
        found["SLURM_CPUS_PER_TASK"] = part.srun.options["cpus-per-task"]
    for one in parts:
        per_node = one.srun.options.get("ntasks-per-node") or one.batch.options.get("ntasks_per_node", "")
        if per_node and one.step.tasks >= int(per_node) * len(one.step.nodes):
            found["SLURM_NTASKS_PER_NODE"] = per_node
    return found


def joined_step(parts: Sequence[StepPart]) -> tuple[list[int], list[list[int]]]:
    """Return the ranks of the nodes of a step in the job, and the numbers of the tasks on each."""
    nodes = [rank for part in parts for rank in part.node_ranks]
    tasks = [
        [part.first_task + task for task in part.step.tasks_on(place)]
        for part in parts
        for place in range(len(part.step.nodes))
    ]
    return nodes, tasks


def components_of(batch: SlurmBatchJob, roles: Sequence[int], others: Sequence[Mapping[str, str]]) -> SlurmBatchJob:
    """Return the job with its components: the nodes of each are those whose grant has its number as role.

    Args:
        batch: the whole job, with the settings of component 0.
        roles: of the grants, by node rank.
        others: the settings of the further components.
    """
    found = []
    for number, settings in enumerate([batch.options, *others]):
        ranks = [rank for rank, role in enumerate(roles) if role == number]
        found.append(
            replace(
                batch,
                job_number=str(int(batch.job_number) + number),
                name=settings.get("name") or batch.name,
                nodes=tuple(batch.nodes[rank] for rank in ranks),
                first_rank=ranks[0],
                options={**_of_job(batch.options), **settings} if number else batch.options,
            )
        )
    return replace(batch, components=tuple(found))


def _of_job(options: Mapping[str, str]) -> dict[str, str]:
    """The settings that hold for the whole job."""
    names = ("submit_dir", "submit_host", "dependency", "reservation", "export", "hint", "threads_per_core", "signal")
    return {name: options[name] for name in names if name in options}


def _names(parts: Sequence[StepPart], *, whole: bool) -> str:
    """The nodes of the components of a step, or only those on which it starts tasks, as a Slurm host list."""
    names = [
        part.batch.nodes[rank]
        for part in parts
        for rank in (range(len(part.batch.nodes)) if whole else part.step.nodes)
    ]
    return node_list(replace(parts[0].batch, nodes=tuple(names)), range(len(names)))


def _groups(text: str) -> list[int]:
    """The components that `--het-group` names, such as `0,2-3`."""
    found: list[int] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise BadRequest(f"--het-group={text} is not a list of components", hint="write --het-group=0,1 or 0-2")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
