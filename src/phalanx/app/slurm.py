"""How a head is put onto Slurm: from its options to the engine, with the addresses that supervisors on the nodes call home by."""

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

from phalanx.core.access.node_keys import attempt_key
from phalanx.core.errors import BadRequest, Conflict
from phalanx.engines.slurm import commands, render
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.engines.slurm.handing import SlurmSettings
from phalanx.engines.slurm.parse import nodes_of, partitions_of

ENGINE: str = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What `up --engine slurm` was given."""

    partition: str = ""
    account: str = ""
    qos: str = ""


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    """The head's own arguments for Slurm."""
    parser.add_argument("--partition", default=None, help="Slurm's partition; its default one without")
    parser.add_argument("--account", default=None, help="who pays in Slurm; {project} and {queue} stand for the job's")
    parser.add_argument("--qos", default=None, help="Slurm's quality of service; {project} and {queue} likewise")


def slurm_options(engine: str, given: argparse.Namespace, before: Mapping[str, Any]) -> SlurmOptions | None:
    """The options, else those of the head before; None on another engine.

    Raises:
        BadRequest: options of Slurm without it.
    """
    names = ("partition", "account", "qos")
    if engine != ENGINE:
        odd = [name for name in names if getattr(given, name)]
        if odd:
            raise BadRequest(f"--{odd[0]} is of Slurm", hint="phalanx up --engine slurm")
        return None
    known = before.get("slurm") or {}
    return SlurmOptions(
        **{
            name: getattr(given, name) if getattr(given, name) is not None else str(known.get(name, ""))
            for name in names
        }
    )


def check_slurm(options: SlurmOptions, before: Mapping[str, Any], *, listens: bool) -> None:
    """Nothing, if there is such a Slurm, and its nodes can reach a head that `listens` off loopback: asked before a head remembers anything.

    What the head `before` ran with was asked then, and Slurm is not asked again: jobs that run need a head also while it is silent.

    Raises:
        Conflict: it is not here, or too old; or there are nodes on other machines.
        BadRequest: it has no such partition.
        TryLater: it does not answer.
    """
    commands.check_here()
    listened = (before.get("listen") or "off") != "off"
    if before.get("engine") == ENGINE and before.get("slurm") == remembered_slurm(options) and listened == listens:
        return
    commands.check()
    known = [one.name for one in partitions_of(commands.ask(render.PARTITIONS))]
    if options.partition and options.partition not in known:
        raise BadRequest(
            f"--partition {options.partition}: Slurm has no such partition",
            hint=f"there are: {', '.join(known) or 'none'}",
        )
    _check_payer(options)
    here = socket.gethostname().split(".")[0]
    away = [node.name for node in nodes_of(commands.ask(render.NODES)) if node.hostname.split(".")[0] != here]
    if away and not listens:
        raise Conflict(
            f"Slurm's nodes ({away[0]}, ...) must reach this head, and it listens on loopback alone",
            hint="phalanx up --engine slurm --listen ADDRESS, the address of this machine on the cluster's network",
        )


def _check_payer(options: SlurmOptions) -> None:
    """Nothing, if Slurm takes jobs of ours with this account and quality of service; those named by `{project}` are told with the job.

    Raises:
        BadRequest: it does not.
    """
    given = [(name, getattr(options, name)) for name in ("partition", "account", "qos")]
    words = [f"--{name}={value}" for name, value in given if value and "{" not in value]
    said = commands.run(("sbatch", "--test-only", "--chdir=/", *words, "--wrap=true"))
    if said.code != 0 and any(word in said.why.lower() for word in ("account", "qos", "association")):
        raise BadRequest(
            f"Slurm takes no job of {getpass.getuser()} with {' '.join(words) or 'its default account'}: {said.why}",
            hint="sacctmgr show associations user=$USER lists the accounts and qualities of service that are good",
        )


def remembered_slurm(options: SlurmOptions | None) -> dict[str, str] | None:
    """What the next head takes over."""
    return None if options is None else asdict(options)


def slurm_engine(options: SlurmOptions, *, secret: bytes, head_url: str, ca_pem: str) -> SlurmEngine:
    """The engine of this head.

    Args:
        options: as given.
        secret: the head's own.
        head_url: where supervisors on Slurm's nodes reach it.
        ca_pem: the certificate of its CA; "" where that URL is on loopback.
    """
    settings = SlurmSettings(
        tag=hashlib.sha256(b"phalanx slurm tag " + secret).hexdigest()[:8],
        supervisor=(sys.executable, "-P", "-m", "phalanx.app.seat"),
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
    """Memory of a device of that GRES type by the table of GPUs, in bytes; 0 for one that is not in it."""
    from phalanx.facts.gpus import gpu_named

    try:
        return gpu_named(kind).gpu.memory_bytes if kind else 0
    except BadRequest:
        return 0
