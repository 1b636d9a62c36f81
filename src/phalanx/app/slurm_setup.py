"""Runs a head on Slurm: its options and checks, and its engine with the address at which supervisors reach the head."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from phalanx.core.access.node_tokens import attempt_key
from phalanx.core.errors import BadRequest, Conflict
from phalanx.engines.slurm import commands, render
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.engines.slurm.job_request import SlurmSettings
from phalanx.engines.slurm.parse import parse_nodes, parse_partitions

SLURM_ENGINE: str = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The options of `up --engine slurm`."""

    partition: str = ""
    account: str = ""
    qos: str = ""


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the head's arguments for Slurm."""
    parser.add_argument("--partition", default=None, help="Slurm partition; default: Slurm's default partition")
    parser.add_argument(
        "--account", default=None, help="Slurm account; {project} and {queue} are replaced by the job's"
    )
    parser.add_argument(
        "--qos", default=None, help="Slurm quality of service; {project} and {queue} are replaced likewise"
    )


def slurm_options(engine: str, given: argparse.Namespace, before: Mapping[str, Any]) -> SlurmOptions | None:
    """Return the given options, else the stored ones; None on another engine.

    Raises:
        BadRequest: options of Slurm on another engine.
    """
    names = ("partition", "account", "qos")
    if engine != SLURM_ENGINE:
        odd = [name for name in names if getattr(given, name)]
        if odd:
            raise BadRequest(f"--{odd[0]} needs the engine Slurm", hint="phalanx up --engine slurm")
        return None
    known = before.get("slurm") or {}
    return SlurmOptions(
        **{
            name: getattr(given, name) if getattr(given, name) is not None else str(known.get(name, ""))
            for name in names
        }
    )


def check_slurm(options: SlurmOptions, before: Mapping[str, Any], *, listens: bool) -> None:
    """Check Slurm and the options, and that Slurm's nodes can reach a head that `listen_url` off loopback, before anything is stored.

    Options that the head used `before` were checked then and are not checked again: running jobs need a head even if Slurm is silent.

    Raises:
        Conflict: Slurm is not installed or too old; or it has nodes on other machines, and the head listens only on loopback.
        BadRequest: Slurm has no such partition.
        TryLater: Slurm does not answer.
    """
    commands.check_installed()
    listened = (before.get("listen") or "off") != "off"
    if (
        before.get("engine") == SLURM_ENGINE
        and before.get("slurm") == stored_slurm_options(options)
        and listened == listens
    ):
        return
    commands.check_supported()
    known = [one.name for one in parse_partitions(commands.output_of(render.SHOW_PARTITIONS))]
    if options.partition and options.partition not in known:
        raise BadRequest(
            f"--partition {options.partition}: Slurm has no such partition",
            hint=f"its partitions are: {', '.join(known) or 'none'}",
        )
    _check_account(options)
    here = socket.gethostname().split(".")[0]
    away = [
        node.name for node in parse_nodes(commands.output_of(render.SHOW_NODES)) if node.hostname.split(".")[0] != here
    ]
    if away and not listens:
        raise Conflict(
            f"Slurm's nodes ({away[0]}, ...) must reach this head, but it listens only on loopback",
            hint="phalanx up --engine slurm --listen ADDRESS, with this machine's address on the cluster's network",
        )


def _check_account(options: SlurmOptions) -> None:
    """Check that Slurm accepts jobs with this account and quality of service; names with `{project}` are checked at each job.

    Raises:
        BadRequest: Slurm does not accept them.
    """
    given = [(name, getattr(options, name)) for name in ("partition", "account", "qos")]
    words = [f"--{name}={value}" for name, value in given if value and "{" not in value]
    reply = commands.run(("sbatch", "--test-only", "--chdir=/", *words, "--wrap=true"))
    if reply.code != 0 and any(word in reply.why.lower() for word in ("account", "qos", "association")):
        raise BadRequest(
            f"Slurm accepts no jobs of {getpass.getuser()} with {' '.join(words) or 'its default account'}: {reply.why}",
            hint="sacctmgr show associations user=$USER lists the accounts and qualities of service",
        )


def stored_slurm_options(options: SlurmOptions | None) -> dict[str, str] | None:
    """Return the options to store for the next head."""
    return None if options is None else asdict(options)


def slurm_engine(options: SlurmOptions, *, secret: bytes, head_url: str, ca_pem: str) -> SlurmEngine:
    """Return the engine of this head.

    Args:
        options: the options of Slurm.
        secret: the head's secret.
        head_url: the head's URL for supervisors on Slurm's nodes.
        ca_pem: the certificate of its CA; "" if that URL is on loopback.
    """
    settings = SlurmSettings(
        tag=hashlib.sha256(b"phalanx slurm tag " + secret).hexdigest()[:8],
        supervisor=(sys.executable, "-P", "-m", "phalanx.app.seat_supervisor"),
        head_url=head_url,
        ca_pem=ca_pem,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
    )
    return SlurmEngine(
        settings=settings, key_of=lambda job_id, epoch: attempt_key(secret, job_id, epoch), memory_of=_memory_of
    )


@cache
def _memory_of(kind: str) -> int:
    """Return the memory in bytes of a device of that GRES type from the table of GPUs; 0 if it is not listed."""
    from phalanx.planner.facts.gpus import find_gpu

    try:
        return find_gpu(kind).gpu.memory_bytes if kind else 0
    except BadRequest:
        return 0
