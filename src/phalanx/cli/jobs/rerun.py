"""`phalanx rerun`: submits a job again, with other values if asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_keys import LOST_COPY_HINT
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.jobs.request.job_options import override_options
from phalanx.cli.jobs.request.job_request import job_request_again
from phalanx.cli.jobs.submit import submit_and_wait, wait_options
from phalanx.cli.serve.services import find_service
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.work.array import format_indices, parse_array
from phalanx.core.work.job_file.command import command_of
from phalanx.core.work.job_file.command_parameters import parameter_names, with_parameter
from phalanx.core.work.job_file.keys import KEY_KINDS, ValueKind
from phalanx.core.work.sbatch_scripts.het_components import slurm_settings
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobKeysReply

_UNSUCCESSFUL: Final = (JobState.FAILED, JobState.TIMEOUT)
_LISTED_MAX: Final = 12  # names in one hint
# Keys that give the shape or the place of a job together: one that is given replaces the others.
_TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "gpus": ("nodes", "gpus_per_node", "share"),
    "within": ("prefer",),
    "prefer": ("within",),
    "image": ("requirements", "software"),
    "conda": ("requirements", "software", "image"),
    "venv": ("requirements", "software", "image"),
    "uv": ("requirements", "software", "image"),
}


@click.command()
@JOB_ARGUMENT
@click.option(
    "--with",
    "values",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another value of a parameter of its command (--NAME VALUE, --NAME=VALUE, NAME=VALUE), of a variable, or of a key of its job file; repeatable.",
)
@click.option("--failed", is_flag=True, help="Of an array: only the elements that failed or ran out of time.")
@override_options
@wait_options
def rerun(
    job: str,
    values: tuple[str, ...],
    failed: bool,
    wait: bool,
    timeout: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Submit a job or array again, as a new one.

    It has the command, variables, files and queue of the first, unless options change them.

    \b
    phalanx rerun 17
    phalanx rerun 17 --with lr=1e-4 --gpus 8
    phalanx rerun 18 --failed --time 4h
    """  # noqa: D301 - click reads the backspace character itself
    head = connect()
    if find_service(head, job) is not None:
        raise BadRequest(
            f"{job.strip()} is a service, which runs already",
            hint=f"phalanx show {job.strip()} --file prints its job file",
        )
    job_id = resolve_job(head, job)
    found = head.job_keys(job_id)
    if found.keys.get("type") == "service":
        raise BadRequest(f"job {job_id} is a replica of a service", hint="phalanx scale NAME N sets their number")
    mapping = dict(found.keys)
    if failed:
        mapping["array"] = _failed_elements(head, job_id, str(mapping.get("array", "")))
    for text in values:
        mapping = _with_value(mapping, text, said=not (quiet or as_json))
    overriding = {key for key, value in given.items() if value is not None and key in _TOGETHER}
    for key in overriding:
        for other in _TOGETHER[key]:
            mapping.pop(other, None)
    wanted = job_request_again(mapping, given)
    if (slurm := slurm_settings(wanted.mapping)).get("array"):
        wanted.mapping["slurm"] = {**slurm, "array": wanted.spec.array}
    _check_hidden(job_id, found, wanted.mapping)
    if found.copy_lost and not wanted.copy:
        raise NotFound(f"the head no longer has the copy of the working directory of job {job_id}", hint=LOST_COPY_HINT)
    return submit_and_wait(head, wanted, wait=wait, timeout=timeout, dry_run=dry_run, as_json=as_json, quiet=quiet)


def _failed_elements(head: Client, job_id: str, array: str) -> str:
    """Return the numbers of the elements of an array that failed, with its limit of running ones.

    Raises:
        BadRequest: it is not an array, or none has failed.
    """
    states = head.job(job_id).job.state_elements
    if not states:
        raise BadRequest(f"--failed: job {job_id} is not an array", hint=f"phalanx rerun {job_id} runs it again")
    numbers = [index for state in _UNSUCCESSFUL if state in states for index in parse_array(states[state]).indices]
    if not numbers:
        counts = ", ".join(f"{state} {text}" for state, text in states.items())
        raise BadRequest(f"--failed: no element of array {job_id} failed", hint=f"elements by state: {counts}")
    _, percent, most = array.partition("%")
    return format_indices(numbers) + percent + most


def _check_hidden(job_id: str, found: JobKeysReply, mapping: Mapping[str, object]) -> None:
    """Check that variables of another owner have values.

    Raises:
        BadRequest: one has none.
    """
    env = mapping.get("env")
    missing = [name for name in found.hidden_env if not isinstance(env, Mapping) or name not in env]
    if missing:
        raise BadRequest(
            f"job {job_id} has variables whose values only its owner sees: {', '.join(missing[:_LISTED_MAX])}",
            hint=f"give each of them: -e {missing[0]}=VALUE",
        )


def _with_value(mapping: dict[str, object], text: str, *, said: bool) -> dict[str, object]:
    """Return the keys with another value of a parameter of the command, else of a variable, else of a key.

    Raises:
        BadRequest: no parameter, variable or key has this name.
    """
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-")
    if not equals or not name:
        raise BadRequest(f"--with {text[:60]!r}: no {'value' if name else 'name'}", hint="write --with lr=1e-4")
    argv, script = command_of(mapping)
    slurm = slurm_settings(mapping)
    arguments: list[str] = json.loads(slurm.get("args", "[]"))
    command = with_parameter(argv, script, name, value)
    passed = with_parameter(arguments, "", name, value)
    env, key = mapping.get("env"), name.replace("-", "_")
    if command.changes or passed.changes:
        if said:
            for before, after in (*command.changes, *passed.changes):
                warn(f"{before} is now {after}")
        changed = {**mapping, "run": command.script or list(command.argv)}
        return {**changed, "slurm": {**slurm, "args": json.dumps(list(passed.argv))}} if passed.changes else changed
    if isinstance(env, Mapping) and name in env:
        return {**mapping, "env": {**env, name: value}}
    if key in KEY_KINDS and key not in ("run", "upload") and KEY_KINDS[key] is not ValueKind.TABLE:
        without = {one: item for one, item in mapping.items() if one not in _TOGETHER.get(key, ())}
        return {**without, key: value}
    raise BadRequest(
        f"--with {name}: neither the command nor the variables nor the keys of the job have {name}",
        hint=_replaceable(parameter_names([*argv, *arguments], script), env if isinstance(env, Mapping) else {}),
    )


def _replaceable(parameters: Sequence[str], env: Mapping[str, object]) -> str:
    listed = [
        f"{kind} {', '.join(names[:_LISTED_MAX])}"
        for kind, names in (("of the command:", parameters), ("variables:", list(env)))
        if names
    ]
    return "; ".join([*listed, "keys: name, time, queue and the others of a job file"])
