"""Makes a rank of a batch script: writes what its processes read, and gives the command that stands in the place of a rank's."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from typing import Final

from phalanx.core.state.commands import Prepare
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import ArrayPlace
from phalanx.node.logic.slurm_variables import Batch, BatchNode
from phalanx.node.shell.accounts import open_to_write
from phalanx.node.shell.batch_link import BATCH_VARIABLE
from phalanx.node.shell.present import Present

_TOOLS: Final = ("srun", "scontrol")
_PYTHON: Final = (sys.executable, "-I", "-m")


def batch_command(member: Present, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command and further variables of this node's one task.

    Raises:
        OSError: the scratch folder cannot be written.
    """
    order = member.prepare
    folder = os.path.join(member.scratch.path, "batch")
    os.makedirs(os.path.join(folder, "bin"), mode=0o700, exist_ok=True)
    asked = dict(order.spec.slurm)
    name = os.path.basename(asked.get("script_name", "")) or "script"
    script = os.path.join(folder, name if name not in {"bin", "batch.json"} else "script")
    _write(script, order.spec.role.script, 0o700)
    for tool in _TOOLS:
        words = shlex.join((*_PYTHON, "phalanx.node.shell.srun_main", tool))
        _write(os.path.join(folder, "bin", tool), f'#!/bin/sh\nexec {words} "$@"\n', 0o700)
    what = {
        "node_rank": member.grant.node_rank,
        "key": asked.get("key", ""),
        "port": port,
        "master": order.addresses[0],
        "script": script,
        "workdir": member.workdir,
        "args": json.loads(asked.get("args", "[]")),
        "bin": os.path.join(folder, "bin"),
        "batch": asdict(_batch(order, asked, *_who(member))),
    }
    path = os.path.join(folder, "batch.json")
    _write(path, json.dumps(what), 0o600)
    return (*_PYTHON, "phalanx.node.shell.batch_main"), {BATCH_VARIABLE: path}


def _who(member: Present) -> tuple[int, str]:
    """Number and name of whom its ranks run as."""
    account = member.account
    return (os.getuid(), getpass.getuser()) if account is None else (account.uid, account.name)


def _batch(order: Prepare, asked: dict[str, str], uid: int, user: str) -> Batch:
    grants = order.allocation.grants
    tasks = int(asked.get("tasks_per_node") or 1)
    nodes = tuple(
        BatchNode(
            name=grant.node_id,
            address=address,
            devices=len(grant.devices),
            cpus=grant.cpus or tasks * int(asked.get("cpus_per_task") or 1),
        )
        for grant, address in zip(grants, order.addresses, strict=True)
    )
    return Batch(
        number=_number(order, asked),
        name=order.spec.name,
        nodes=nodes,
        uid=uid,
        user=user,
        restarts=order.restarts,
        asked={name: value for name, value in asked.items() if name not in {"key", "args"}},
        end_s=order.deadline_s,
        start_s=time.time(),
        array=_array(order.array),
    )


def _number(order: Prepare, asked: dict[str, str]) -> str:
    """Slurm's job ids are numbers: an element's own is that of its place in the submit, which our numbers leave room for."""
    place = order.array
    if place is None:
        return order.job_id
    indices = parse_array(asked["array"]).indices if asked.get("array") else ()
    return str(
        int(place.array_id) + (indices.index(place.index) if place.index in indices else place.index - place.lowest)
    )


def _array(place: ArrayPlace | None) -> dict[str, str]:
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
    with open(open_to_write(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
