"""Prepares the rank of a batch script: writes the files that its processes read, and builds the command that replaces the rank's."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.sbatch_scripts.het_components import read_components, slurm_settings
from phalanx.node.files.job_accounts import open_for_writing
from phalanx.node.gang.job_link import BATCH_VARIABLE
from phalanx.node.logic.het_steps import components_of
from phalanx.node.logic.step_containers import StepContainers
from phalanx.node.logic.variables.slurm_variables import SlurmBatchJob, SlurmBatchNode
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.slurm_compat.script_tools import TOOLS, with_tools_after_profile

SCRIPT_NAME: Final = "slurm_script"
"""The name under which Slurm runs a script, which some print or compare."""
_PYTHON: Final = (sys.executable, "-I", "-m")


def batch_command(
    member: MemberRuntime, port: int, containers: StepContainers
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command and extra variables of this node's single task. `containers`: what this node offers to its steps.

    Raises:
        OSError: the scratch folder cannot be written.
    """
    order = member.prepare
    folder = os.path.join(member.scratch.path, "batch")
    os.makedirs(os.path.join(folder, "bin"), mode=0o700, exist_ok=True)
    options = dict(order.spec.slurm)
    script = os.path.join(folder, SCRIPT_NAME)
    tools = os.path.join(folder, "bin")
    _write(script, with_tools_after_profile(order.spec.role.script, tools), 0o700)
    for tool, module in TOOLS.items():
        words = shlex.join((*_PYTHON, module, tool))
        _write(os.path.join(tools, tool), f'#!/bin/sh\nexec {words} "$@"\n', 0o700)
    config = {
        "node_rank": member.grant.node_rank,
        "key": options.get("key", ""),
        "port": port,
        "master": order.addresses[0],
        "script": script,
        "workdir": member.workdir,
        "args": json.loads(options.get("args", "[]")),
        "bin": tools,
        "devices": list(member.grant.devices),
        "containers": asdict(containers),
        "batch": asdict(_batch(order, options, member)),
    }
    path = os.path.join(folder, "batch.json")
    _write(path, json.dumps(config), 0o600)
    return (*_PYTHON, "phalanx.node.slurm_compat.batch_main"), {BATCH_VARIABLE: path}


def _batch(order: PrepareTasks, options: dict[str, str], member: MemberRuntime) -> SlurmBatchJob:
    grants, account = order.allocation.grants, member.account
    others = read_components(options.get("components", ""))
    settings = [options, *(slurm_settings(one) for one in others)]
    nodes = tuple(
        SlurmBatchNode(
            name=grant.node_id,
            address=address,
            devices=grant.visible_devices,
            indices=tuple(grant.devices) if len(grant.devices) == grant.visible_devices else (),
            cpus=grant.cpus or _cpus(settings[grant.role]),
        )
        for grant, address in zip(grants, order.addresses, strict=True)
    )
    whole = SlurmBatchJob(
        job_number=_number(order, options),
        name=order.spec.name,
        nodes=nodes,
        uid=os.getuid() if account is None else account.uid,
        gid=os.getgid() if account is None else account.gid,
        user=getpass.getuser() if account is None else account.name,
        restarts=order.restarts,
        options={name: value for name, value in options.items() if name not in {"key", "args", "components"}},
        end_s=order.deadline_s,
        start_s=time.time(),
        array=_array(order.array),
    )
    return components_of(whole, [grant.role for grant in grants], settings[1:]) if others else whole


def _cpus(settings: Mapping[str, str]) -> int:
    """The CPUs that the tasks of a node need."""
    return int(settings.get("tasks_per_node") or 1) * int(settings.get("cpus_per_task") or 1)


def _number(order: PrepareTasks, options: dict[str, str]) -> str:
    """Slurm job ids are numbers: an array element gets the array's id plus its position. Our numbering leaves room for these."""
    place = order.array
    if place is None:
        return order.job_id
    indices = parse_array(options["array"]).indices if options.get("array") else ()
    return str(
        int(place.array_id) + (indices.index(place.index) if place.index in indices else place.index - place.lowest)
    )


def _array(place: ArrayPosition | None) -> dict[str, str]:
    if place is None:
        return {}
    return {
        "SLURM_ARRAY_JOB_ID": place.array_id,
        "SLURM_ARRAY_TASK_ID": str(place.index),
        "SLURM_ARRAY_TASK_COUNT": str(place.size),
        "SLURM_ARRAY_TASK_MIN": str(place.lowest),
        "SLURM_ARRAY_TASK_MAX": str(place.highest),
        "SLURM_ARRAY_TASK_STEP": str((place.highest - place.lowest) // (place.size - 1) if place.size > 1 else 1),
    }


def _write(path: str, text: str, mode: int) -> None:
    with open(open_for_writing(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
