"""The file that the processes of an MPI job on one node read: who is in the gang, and how to reach and recognize the launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from phalanx.node.gang.job_link import NotInJob
from phalanx.node.logic.variables.secret_variables import without_secrets

LAUNCH_VARIABLE: Final = "PHALANX_LAUNCH"
LAUNCH_STEP: Final = "phalanx-launch"
_START_ENVIRONMENT: Final = ".environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """One node's part of the launch.

    Attributes:
        node_rank: this node's.
        names: of the nodes, by node rank, as in the host files. aliases: other names of the same nodes.
        master, port, key: where node rank 0 listens, and the gang's secret.
        argv: the launcher with its arguments; or script: the shell text that calls it.
        workdir: the job's folder on this node.
    """

    node_rank: int
    names: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    master: str
    port: int
    key: str
    argv: tuple[str, ...]
    script: str
    workdir: str

    def node_of(self, host: str) -> int | None:
        """Return the node rank of a host name, or None."""
        wanted = host.rpartition("@")[2]
        for rank, (name, others) in enumerate(zip(self.names, self.aliases, strict=True)):
            if wanted == name or wanted in others:
                return rank
        return None


def order_to_json(order: LaunchOrder) -> str:
    """Return the file's text."""
    return json.dumps(asdict(order))


def write_start_environment(environment: Mapping[str, str]) -> None:
    """Store the environment with which this node's part of the job started, beside its order, for the agents that start on this node.

    Secrets are not stored: each node has its own copy in the environment.

    Raises:
        OSError: the folder cannot be written.
    """
    path = os.environ[LAUNCH_VARIABLE] + _START_ENVIRONMENT
    kept = without_secrets(environment)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(kept, file)


def read_start_environment() -> dict[str, str]:
    """Return what `write_start_environment` stored on this node.

    Raises:
        NotInJob: it is missing or damaged.
    """
    try:
        with open(os.environ.get(LAUNCH_VARIABLE, "") + _START_ENVIRONMENT, encoding="utf-8") as file:
            return {str(name): str(value) for name, value in json.load(file).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise NotInJob(f"not in an MPI job of Phalanx ({error})") from error


def launch_folder() -> str:
    """Return the attempt's folder on this node, which holds the launch agent and the host files."""
    return os.path.dirname(os.environ[LAUNCH_VARIABLE])


def read_launch_order() -> LaunchOrder:
    """Return this node's order.

    Raises:
        NotInJob: the order is missing or damaged.
    """
    try:
        with open(os.environ.get(LAUNCH_VARIABLE, ""), encoding="utf-8") as file:
            found = json.load(file)
        names, aliases = tuple(found.pop("names")), tuple(tuple(each) for each in found.pop("aliases"))
        return LaunchOrder(names=names, aliases=aliases, argv=tuple(found.pop("argv")), **found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotInJob(f"not in an MPI job of Phalanx ({error})") from error
