"""Prepares the task of an MPI job on one node: writes the launch agent and what it reads, and builds the command that replaces the rank's."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Final

from phalanx.node.files.job_accounts import open_for_writing
from phalanx.node.logic.variables.mpi_variables import node_names
from phalanx.node.logic.variables.rendezvous import side_port
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.mpi.launch_order import LAUNCH_STEP, LAUNCH_VARIABLE, LaunchOrder, order_to_json

_PYTHON: Final = (sys.executable, "-I", "-m")


def agent_path(scratch_path: str) -> str:
    """Return the path of the launch agent of an attempt."""
    return os.path.join(scratch_path, LAUNCH_STEP)


def mpi_command(member: MemberRuntime, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return command and extra variables of this node's single task. `port`: of the gang's rendezvous.

    Raises:
        OSError: the scratch folder cannot be written.
    """
    prepare = member.prepare
    grants = prepare.allocation.grants
    order = LaunchOrder(
        node_rank=member.grant.node_rank,
        names=node_names(prepare),
        aliases=tuple((grant.node_id, address) for grant, address in zip(grants, prepare.addresses, strict=True)),
        master=prepare.addresses[0],
        port=side_port(port),
        key=prepare.spec.gang_key,
        argv=prepare.spec.role.argv,
        script=prepare.spec.role.script,
        workdir=member.workdir,
    )
    path = os.path.join(member.scratch.path, "launch.json")
    _write(path, order_to_json(order), 0o600)
    agent = shlex.join((*_PYTHON, "phalanx.node.mpi.agent_main"))
    _write(agent_path(member.scratch.path), f'#!/bin/sh\nexec {agent} "$@"\n', 0o700)
    return (*_PYTHON, "phalanx.node.mpi.launch_main"), {LAUNCH_VARIABLE: path}


def _write(path: str, text: str, mode: int) -> None:
    with open(open_for_writing(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
