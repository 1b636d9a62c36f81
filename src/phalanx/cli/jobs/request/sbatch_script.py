"""`phalanx submit script.sh`: an unchanged `#SBATCH` script, with the environment that Slurm's sbatch would export."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.errors import warn
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest, TooLarge
from phalanx.core.work.job_file.request import VALUE_BYTES_MAX
from phalanx.core.work.sbatch_scripts.exported_variables import select_variables
from phalanx.core.work.sbatch_scripts.fleet_fit import (
    NodeShape,
    numbers_too_large,
    scale_down,
    spread_tasks,
    take_whole_nodes,
)
from phalanx.core.work.sbatch_scripts.het_components import read_components, slurm_settings
from phalanx.core.work.sbatch_scripts.sbatch import is_sbatch_script
from phalanx.core.work.sbatch_scripts.sbatch_job import SHARDS_PER_GPU, convert_script

if TYPE_CHECKING:
    from phalanx.client import Client

_SCRIPT_BYTES_MAX: Final = VALUE_BYTES_MAX
_SHARDS_MAX: Final = 1000  # a share is counted in thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNames:
    """What a script asks for that only the head can resolve.

    Attributes:
        script: the name of its file, for messages.
        partition, account: Slurm names.
        exclusive: the components that want whole nodes, by number; 0 for a job of one.
        scale_down: its numbers may be lowered to what the cluster has.
    """

    script: str
    partition: str
    account: str
    exclusive: tuple[int, ...] = ()
    scale_down: bool = False


def is_batch_script(path: str) -> bool:
    """Return whether the file is a script with `#SBATCH` lines."""
    try:
        head = read_file_bytes(path, _SCRIPT_BYTES_MAX, "batch script")
    except (BadFile, TooLarge):  # reported when it is read as a job file
        return False
    try:
        return is_sbatch_script(head.decode("utf-8", "replace"))
    except BadFile as error:
        return isinstance(error, BadFile)  # malformed #SBATCH lines: reported later with the line


def batch_mapping(path: str, args: Sequence[str], *, lower: bool = False) -> tuple[dict[str, object], SlurmNames]:
    """Return the job of a script as the mapping of a job file; warn about ignored options.

    Args:
        path: of the script.
        args: its arguments.
        lower: its numbers may be lowered to what the cluster has.

    Raises:
        BadFile: the script cannot be read, or an option is wrong; the message names the line.
    """
    data = read_file_bytes(path, _SCRIPT_BYTES_MAX, "batch script")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: byte {error.start} is not UTF-8") from error
    return script_mapping(text, path, args, lower=lower)


def script_mapping(
    text: str,
    path: str,
    args: Sequence[str],
    given: Sequence[str] = (),
    *,
    lower: bool = False,
    by_sbatch: bool = False,
) -> tuple[dict[str, object], SlurmNames]:
    """Return the job of a script's text, as `batch_mapping` does.

    Args:
        text: of the script.
        path: the name of its file, for the job's name and for messages.
        args: its arguments.
        given: options of sbatch's command line, which replace those of the script.
        lower: its numbers may be lowered.
        by_sbatch: the caller is our `sbatch`, which honours `--parsable` and `--wait` itself, and exports the variables of the job that it runs in.

    Raises:
        BadFile: an option is wrong; the message names the line.
    """
    try:
        found = convert_script(
            text,
            name=os.path.basename(path),
            args=args,
            folder=os.getcwd(),
            shards_per_gpu=_shards_per_gpu(),
            given=given,
            honoured=("parsable", "wait") if by_sbatch else (),
        )
    except BadFile as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from None
    for note in found.notes:
        warn(f"{os.path.basename(path)}: {note}")
    slurm = slurm_settings(found.mapping)
    slurm |= {"key": secrets.token_hex(16), "submit_host": socket.gethostname(), "home": _head_of_views()}
    if os.path.isfile(path):
        slurm["script"] = " ".join((os.path.abspath(path), *args)).replace("\n", " ")
    mapping = {**found.mapping, "slurm": slurm, "env": exported_environment(found.export, os.environ, nested=by_sbatch)}
    named = SlurmNames(
        script=os.path.basename(path),
        partition=found.partition,
        account=found.account,
        exclusive=found.exclusive,
        scale_down=lower,
    )
    return mapping, named


def _head_of_views() -> str:
    """Return where the commands of Slurm find the head in the job: as the submitter does, by a folder or a URL, without a token."""
    from phalanx.client.connection.discovery import state_folder

    return os.environ.get("PHALANX_URL") or state_folder()


def _shards_per_gpu() -> int:
    text = os.environ.get("PHALANX_SHARDS_PER_GPU", "").strip()
    if not text:
        return SHARDS_PER_GPU
    if not text.isdecimal() or not 1 <= int(text) <= _SHARDS_MAX:
        raise BadFile(f"PHALANX_SHARDS_PER_GPU={text[:20]!r} is not a number from 1 to {_SHARDS_MAX}")
    return int(text)


def exported_environment(words: str, here: Mapping[str, str], *, nested: bool = False) -> dict[str, str]:
    """Return the environment to send, as `--export` selects it; warn about variables that are too long.

    With `nested`, ALL includes `SLURM_*` of the job in which sbatch runs. As on Slurm, the new job keeps those that it does not set itself.
    """
    kept, dropped = select_variables(words, here, nested=nested)
    for name in dropped:
        warn(f"variable {name} is not exported: it is too long, or not UTF-8")
    return kept


def resolve_slurm_names(head: Client, mapping: dict[str, object], named: SlurmNames) -> dict[str, object]:
    """Add the queue named like the partition and the project named like the account; warn if they do not exist.

    Raises:
        BadRequest: `--exclusive`, and no node fits.
    """
    found = _fitted(head, mapping, named)
    if named.partition and "queue" not in found:
        if any(queue.id == named.partition for queue in head.queues()):
            found["queue"] = named.partition
        else:
            warn(f"--partition={named.partition} is ignored: there is no queue of that name (see phalanx queues)")
    if named.account and "project" not in found:
        if any(project.id == named.account for project in head.projects()):
            found["project"] = named.account
        else:
            warn(f"--account={named.account} is ignored: there is no project of that name (see phalanx projects)")
    return found


def _fitted(head: Client, mapping: Mapping[str, object], named: SlurmNames) -> dict[str, object]:
    """Return the job with whole nodes, and with numbers that the cluster has, as the script asks."""
    nodes = node_shapes(head)
    others = read_components(slurm_settings(mapping).get("components", ""))
    found = _fitted_component(mapping, nodes, named, 0)
    if others:
        fitted = [_fitted_component(one, nodes, named, number) for number, one in enumerate(others, start=1)]
        found["slurm"] = slurm_settings(found) | {"components": json.dumps(fitted)}
    return found


def _fitted_component(
    mapping: Mapping[str, object], nodes: Sequence[NodeShape], named: SlurmNames, number: int
) -> dict[str, object]:
    found = spread_tasks(mapping, nodes)
    if named.scale_down and (large := numbers_too_large(found, nodes)):
        warn(f"{named.script}: --scale-down lowers {', '.join(large)}")
        found = scale_down(found, nodes)
    if number in named.exclusive and nodes:
        try:
            found, line = take_whole_nodes(found, nodes)
        except BadRequest as error:
            raise too_large(found, nodes, named) or error from None
        warn(f"{named.script}: {line}")
    return found


def node_shapes(head: Client) -> list[NodeShape]:
    """Return what each node of the cluster has."""
    return [
        NodeShape(
            id=node.id,
            gpus=len(node.devices),
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
            model=node.devices[0].model if len({device.model for device in node.devices}) == 1 else "",
        )
        for node in head.nodes()
    ]


def too_large(mapping: Mapping[str, object], nodes: Sequence[NodeShape], named: SlurmNames) -> BadRequest | None:
    """Return the error that names the numbers of a script that are too large for the cluster; None if none is."""
    components = [mapping, *read_components(slurm_settings(mapping).get("components", ""))]
    large = list(dict.fromkeys(line for one in components for line in numbers_too_large(one, nodes)))
    if not large:
        return None
    return BadRequest(
        f"{named.script} is written for a larger cluster: it requests {', '.join(large)}",
        hint="lower them, or give --scale-down to lower them for a trial here",
    )
