"""Starts a head on Slurm: the check of its options, and its engine with the address at which supervisors reach the head."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Mapping
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest, Conflict
from phalanx.engines.slurm import commands, render
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.engines.slurm.options import RESIDENT
from phalanx.engines.slurm.parse import parse_nodes, parse_partitions
from phalanx.engines.slurm.resident_jobs import ResidentJobs
from phalanx.engines.slurm.resident_options import resident_pools, resident_time
from phalanx.engines.slurm.sbatch_request import SlurmSettings
from phalanx.ports.engine import EngineContext, HeadSetup

_CHECKED: Final = ("partition", "account", "qos")  # what Slurm itself knows


def check_options(options: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> None:
    """Check Slurm and the options, and that Slurm's nodes can reach a head that listens off loopback.

    Options of the head before were checked then and are not checked again: running jobs need a head even if Slurm is silent.

    Raises:
        Conflict: Slurm is not installed or too old; or it has nodes on other machines, and the head listens only on loopback; or virtual
            nodes are wanted.
        BadRequest: Slurm has no such partition, or accepts no jobs with the account.
        TryLater: Slurm does not answer.
    """
    patterns = [name for name in ("account", "qos") if render.is_pattern(options[name])]
    if resident_pools(options) and patterns:
        raise Conflict(
            f"--{RESIDENT} and --{patterns[0]} {options[patterns[0]]} exclude each other: jobs of all projects and queues share resident Slurm jobs",
            hint=f"one {patterns[0]} for all jobs, or --{RESIDENT} none",
        )
    commands.check_installed()
    changed = previous is None or any(previous.get(name) != options[name] for name in _CHECKED)
    if changed or setup.listened_before != setup.listens:
        _check_partition(options["partition"])
        _check_account(options)
        _check_head_reachable(listens=setup.listens)
    if setup.virtual:
        raise Conflict(
            "--virtual cannot be used with --engine slurm", hint="remove --virtual: the nodes come from Slurm"
        )


def create_engine(options: Mapping[str, str], head: EngineContext) -> SlurmEngine:
    """Create the engine."""
    return SlurmEngine(
        settings=_settings(options, head),
        key_of=head.attempt_key,
        memory_of=_memory_of,
        lists_nodes=not options[RESIDENT],
    )


def create_resident_jobs(options: Mapping[str, str], head: EngineContext) -> ResidentJobs:
    """Create the provider of resident Slurm jobs.

    Raises:
        BadRequest: the head does not run on Slurm.
    """
    if not options:
        raise BadRequest("this head does not run on Slurm", hint="phalanx up --engine slurm")
    return ResidentJobs(
        settings=_settings(options, head),
        token_of=head.node_token,
        memory_of=_memory_of,
        time=resident_time(options),
    )


def _settings(options: Mapping[str, str], head: EngineContext) -> SlurmSettings:
    return SlurmSettings(
        tag=head.derive_id("slurm tag")[:8],
        supervisor=(sys.executable, "-P", "-m", "phalanx.app.seat_supervisor"),
        head_url=head.url,
        ca_pem=head.ca_pem,
        partition=options["partition"],
        account=options["account"],
        qos=options["qos"],
    )


def _check_partition(partition: str) -> None:
    commands.check_supported()
    known = [one.name for one in parse_partitions(commands.output_of(render.SHOW_PARTITIONS))]
    if partition and partition not in known:
        raise BadRequest(
            f"--partition {partition}: Slurm has no such partition",
            hint=f"its partitions are: {', '.join(known) or 'none'}",
        )


def _check_head_reachable(*, listens: bool) -> None:
    here = socket.gethostname().split(".")[0]
    away = [
        node.name for node in parse_nodes(commands.output_of(render.SHOW_NODES)) if node.hostname.split(".")[0] != here
    ]
    if away and not listens:
        raise Conflict(
            f"Slurm's nodes ({away[0]}, ...) must reach this head, but it listens only on loopback",
            hint="phalanx up --engine slurm --listen ADDRESS, with this machine's address on the cluster's network",
        )


def _check_account(options: Mapping[str, str]) -> None:
    """Check that Slurm accepts jobs with these options; names with `{project}` are checked at each job.

    Raises:
        BadRequest: Slurm does not accept them.
    """
    given = {name: options[name] for name in _CHECKED}
    words = [f"--{name}={value}" for name, value in given.items() if value and "{" not in value]
    reply = commands.run(("sbatch", "--test-only", "--chdir=/", *words, "--wrap=true"))
    if reply.code != 0 and any(word in reply.why.lower() for word in ("account", "qos", "association")):
        raise BadRequest(
            f"Slurm accepts no jobs of {getpass.getuser()} with {' '.join(words) or 'its default account'}: {reply.why}",
            hint="sacctmgr show associations user=$USER lists the accounts and qualities of service",
        )


@cache
def _memory_of(kind: str) -> int:
    """Return the memory in bytes of a device of that GRES type from the table of GPUs; 0 if it is not listed."""
    from phalanx.planner.facts.gpus import find_gpu

    try:
        return find_gpu(kind).gpu.memory_bytes if kind else 0
    except BadRequest:
        return 0
