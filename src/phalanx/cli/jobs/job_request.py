"""Converts a command line (job file, options, words after `--`) into the mapping that is sent to the head."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from phalanx.cli.command_groups import split_options
from phalanx.cli.option_types import (
    DURATION,
    GPUS,
    LABEL,
    MEMORY,
    NODES,
    PAIR,
)
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.job_file.data_sources import DataMode
from phalanx.core.work.job_file.keys import KEY_KINDS, InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.sbatch_scripts.het_components import ROLE_KEYS, slurm_settings
from phalanx.core.work.secret import parse_secret_names
from phalanx.core.work.spec import JobSpec

if TYPE_CHECKING:
    from phalanx.cli.jobs.job_file import JobFile
    from phalanx.cli.jobs.sbatch_script import SlurmNames
    from phalanx.cli.plan.plan_option import PlanRequest

F = TypeVar("F", bound=Callable[..., Any])
_ADDED: Final = frozenset(
    {"env", "secrets", "ports", "data", "labels", "notify"}
)  # options that add to a key of the job file
SOFTWARE_OPTIONS: Final = ("conda", "venv", "uv", "modules")  # forms of the key `software`
_AFTER_DASHES: Final = "phalanx.command"
_FILE_ENDINGS: Final = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job to submit, validated with the same rules as on the head.

    Attributes:
        copy: whether the working directory is uploaded with the job.
        slurm_names: partition and account of an `#SBATCH` script, which only the head can resolve.
        again: the keys are those of an earlier job, whose files are where they were: no copy is made of its own accord.
        plan_request: planning request of a file whose `plan:` is a mapping. `resolve_plan` plans it before submission; `mapping` has no `plan` then.
    """

    mapping: dict[str, object]
    spec: JobSpec
    copy: bool
    plan_request: PlanRequest | None = None
    slurm_names: SlurmNames | None = None
    again: bool = False


class DoubleDashCommand(click.Command):
    """A command that passes everything after `--` to the job, so that options of the job are not parsed here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first `--`, then parse the first part."""
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[cut + 1 :]
            args = args[:cut]
        else:
            args = _end_options_at_script(self, ctx, args)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return `[OPTIONS] [FILE] [-- COMMAND...]`."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _end_options_at_script(command: click.Command, ctx: click.Context, args: list[str]) -> list[str]:
    """Return the arguments with `--` before an `#SBATCH` script: what follows it are its own arguments, as for sbatch."""
    options, rest = split_options(command, ctx, args)
    if not rest or not os.path.isfile(rest[0]) or rest[0].lower().endswith(_FILE_ENDINGS):
        return args
    from phalanx.cli.jobs.sbatch_script import is_batch_script

    return [*options, "--", *rest] if is_batch_script(rest[0]) else args


def job_options(command: F) -> F:
    """Add the job file argument and every option that describes a job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def override_options(command: F) -> F:
    """Add every option that describes a job, for a command that changes an earlier one."""
    for option in reversed(_OPTIONS[1:]):
        command = option(command)
    return command


def set_command(context: click.Context, words: Sequence[str], *, unless_given: bool = False) -> None:
    """Set the command of the job, as if it stood after `--`; with `unless_given` not if one stands there."""
    if not unless_given or not context.meta.get(_AFTER_DASHES):
        context.meta[_AFTER_DASHES] = list(words)


def words_after_dashes(context: click.Context) -> list[str]:
    """Return the words after `--`; none without it."""
    return list(context.meta.get(_AFTER_DASHES) or ())


def job_request(
    context: click.Context, given: Mapping[str, Any], *, beside: str = "", file: JobFile | None = None
) -> JobRequest:
    """Return the job that a command line describes.

    Args:
        context: of the command; has the words after `--`.
        given: values of `job_options`.
        beside: a key of the file that is not one of the job's.
        file: the job file, if it was read already.

    Raises:
        BadFile: the job file is missing or wrong.
        BadRequest: options are wrong or contradict each other.
    """
    words = context.meta.get(_AFTER_DASHES)
    script = _batch_script(given["file"], words)
    path = None if script is not None else _job_file(given["file"], words, context.command_path)
    # Options have the names of the keys of a job file, except FILE, --copy and those that add to a key of the file.
    options = _option_keys(given)
    here = os.getcwd()
    named = None
    where: Callable[[str], str]
    if script is not None:
        from phalanx.cli.jobs.sbatch_script import batch_mapping

        mapping, named = batch_mapping(script, given["file"][1:], lower=bool(given.get("scale_down")))
        _check_component_options(mapping, options)
        where = lambda key: _flag(key) if key in options else script or key  # noqa: E731  # shorter than a function
    elif path is None:
        mapping, where = {}, _flag
    else:
        from phalanx.cli.jobs.job_file import read_job_file

        file = file or read_job_file(path, beside=beside)
        mapping = dict(file.mapping)
        here = os.path.dirname(os.path.abspath(path)) if mapping.get("workdir") and path != "-" else here
        where = lambda key: _flag(key) if key in options else file.location(key)  # noqa: E731  # shorter than a function
    mapping = changed_mapping(mapping, given)
    if words is not None:
        mapping["run"] = list(words)
    mapping["workdir"] = _workdir(mapping.get("workdir"), here, typed="workdir" in options)
    plans = os.getcwd() if "plan" in options or path in {None, "-"} else _folder_of(path)
    try:
        return replace(_validated(mapping, here, plans, copy=bool(given["copy"])), slurm_names=named)
    except InvalidKey as error:
        raise _with_location(error, where(error.key), from_file=path is not None and error.key not in options) from None


def job_request_again(mapping: Mapping[str, object], given: Mapping[str, Any]) -> JobRequest:
    """Return the job of an earlier job's keys, with the values of `override_options`.

    Raises:
        BadRequest: options are wrong or contradict the keys.
    """
    found = changed_mapping(mapping, given)
    if given.get("workdir") is not None:
        found["workdir"] = _workdir(given["workdir"], os.getcwd(), typed=True)
    if given["copy"]:
        found.pop("upload", None)
    try:
        return replace(_validated(found, "/", os.getcwd(), copy=bool(given["copy"])), again=True)
    except InvalidKey as error:
        raise _with_location(error, _flag(error.key), from_file=False) from None


def changed_mapping(mapping: Mapping[str, object], given: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of a job with those that options give; variables, labels, secrets, ports and datasets are added."""
    found = {**mapping, **_option_keys(given)}
    if given["env"]:
        found["env"] = {**_pairs_mapping(found.get("env")), **dict(given["env"])}
    if given.get("labels"):
        found["labels"] = {**_pairs_mapping(found.get("labels")), **dict(given["labels"])}
    if given.get("secrets"):
        found["secrets"] = [*parse_secret_names(found.get("secrets") or ()), *given["secrets"]]
    if given.get("ports"):
        found["ports"] = [*_listed_ports(found.get("ports")), *given["ports"]]
    if given.get("data") or given.get("data_mode"):
        mode = {"mode": given["data_mode"]} if given.get("data_mode") else {}
        found["data"] = {**_pairs_mapping(found.get("data")), **_pairs_mapping(given.get("data") or ()), **mode}
    if given.get("notify") or given.get("notify_on"):
        found["notify"] = _notify_mapping(found.get("notify"), given.get("notify") or (), given.get("notify_on"))
    return found


def _option_keys(given: Mapping[str, Any]) -> dict[str, object]:
    found = {key: value for key, value in given.items() if key in KEY_KINDS and key not in _ADDED and value is not None}
    if software := {form: given[form] for form in SOFTWARE_OPTIONS if given.get(form) is not None}:
        found["software"] = software
    return found


def _validated(mapping: dict[str, object], here: str, plans: str, *, copy: bool) -> JobRequest:
    """Return the job of a mapping. `here`: its default working directory; `plans`: the folder of its plan file."""
    now_s = time.time()
    to_plan = None
    if mapping.get("plan") is not None:
        to_plan = _take_plan(mapping, plans)
    if mapping.get("begin") is not None:
        mapping["begin"] = _begin_time(mapping["begin"], now_s)
    spec = spec_from_mapping(mapping, workdir=here, now_s=now_s)
    kept = {key: value for key, value in mapping.items() if value is not None}
    return JobRequest(mapping=kept, spec=spec, copy=copy, plan_request=to_plan)


def _check_component_options(mapping: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Reject options that say what nodes are, for a script whose components each say so.

    Raises:
        BadRequest: such an option is given.
    """
    several = "components" in slurm_settings(mapping)
    wrong = next((key for key in (*ROLE_KEYS, "share", "tasks_per_node") if several and key in options), None)
    if wrong is not None:
        raise BadRequest(
            f"{_flag(wrong)}: the script has several components, and the option does not say for which it is",
            hint="change the lines of the component in the script",
        )


def job_request_of_sbatch(text: str, path: str, args: Sequence[str], given: Sequence[str]) -> JobRequest:
    """Return the job of an `#SBATCH` script's text, with the options of sbatch's command line.

    Raises:
        BadFile: an option is wrong; the message names its line.
    """
    from phalanx.cli.jobs.sbatch_script import script_mapping

    mapping, named = script_mapping(text, path, args, given, by_sbatch=True)
    now_s = time.time()
    try:
        if mapping.get("begin") is not None:
            mapping["begin"] = _begin_time(mapping["begin"], now_s)
        spec = spec_from_mapping(mapping, workdir=os.getcwd(), now_s=now_s)
    except InvalidKey as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from None
    return JobRequest(mapping=mapping, spec=spec, copy=False, slurm_names=named)


def job_request_of_file(path: str, *, copy: bool, file: JobFile | None = None) -> JobRequest:
    """Return the job or service that a job file describes, without options. `file`: its content, if it was read already.

    Raises:
        BadFile: the job file is missing or wrong.
    """
    nothing = dict.fromkeys((*KEY_KINDS, "env"))
    return job_request(click.Context(click.Command("update")), {**nothing, "file": (path,), "copy": copy}, file=file)


def check_local_files(spec: JobSpec) -> None:
    """Check that the working directory and the files named in the command exist on this machine.

    Raises:
        BadFile: the folder or a file is missing.
    """
    if not os.path.isdir(spec.workdir):
        raise BadFile(f"{spec.workdir}: no such folder", hint="--workdir sets the folder in which the job runs")
    listed = spec.packages_file
    if listed and not os.path.exists(os.path.join(spec.workdir, listed)):
        raise BadFile(
            f"{listed}: no such file in {spec.workdir}",
            hint=f"{'--uv' if spec.software.uv else '--requirements'} must name a file in that folder",
        )
    for word in _scripts(spec.role.argv):
        path = os.path.join(spec.workdir, os.path.expanduser(word))
        if not os.path.exists(path):
            raise BadFile(
                f"{word}: no such file in {spec.workdir}", hint="--workdir sets the folder in which the job runs"
            )


def _scripts(argv: Sequence[str]) -> list[str]:
    """Return the words of a command that must be files: a program with a slash, and the first `*.py` or `*.sh` after an interpreter."""
    if not argv:
        return []
    found = [argv[0]] if "/" in argv[0] else []
    if not os.path.basename(argv[0]).startswith(
        ("python", "pypy", "bash", "sh", "torchrun", "deepspeed", "accelerate")
    ):
        return found
    for word in argv[1:]:
        if word in {"-c", "-m"}:  # what follows is code or a module, not a file
            break
        if not word.startswith("-") and word.endswith((".py", ".sh")):
            return [*found, word]
    return found


def _batch_script(files: Sequence[str], words: Sequence[str] | None) -> str | None:
    """Return the first word if it is a script with `#SBATCH` lines, else None."""
    if words is not None or not files or files[0].lower().endswith(_FILE_ENDINGS) or not os.path.isfile(files[0]):
        return None
    from phalanx.cli.jobs.sbatch_script import is_batch_script

    return files[0] if is_batch_script(files[0]) else None


def _job_file(files: Sequence[str], words: Sequence[str] | None, command: str) -> str | None:
    if words is not None and files:
        raise BadRequest(f"both a job file ({files[0]}) and a command after --", hint="give one of the two")
    if words is not None:
        if not words:
            raise BadRequest("there is no command after --", hint=f"{command} -- python train.py")
        return None
    if not files:
        raise BadRequest("nothing to run", hint=f"{command} --gpus 1 -- python train.py, or {command} job.yaml")
    first = files[0]
    looks_like_one = first == "-" or first.lower().endswith(_FILE_ENDINGS) or os.path.isdir(first)
    if len(files) > 1 or not (
        looks_like_one
        or (os.path.isfile(first) and not first.endswith((".py", ".sh")) and not os.access(first, os.X_OK))
    ):
        shown = " ".join(["python", *files] if first.endswith(".py") else files)
        raise BadRequest(f"{first!r} is not a job file (*.yaml)", hint=f"a command goes after --: {command} -- {shown}")
    return first


def _workdir(named: object, here: str, *, typed: bool) -> str:
    """Return the absolute path. It is relative to the job file, or to the current folder if `typed` as an option."""
    text = os.path.expanduser(str(named)) if named else ""
    return os.path.normpath(os.path.join(os.getcwd() if typed else here, text)) if text else here


def _folder_of(path: str | None) -> str:
    return os.path.dirname(os.path.abspath(path or ""))


def _take_plan(mapping: dict[str, object], folder: str) -> PlanRequest | None:
    """Resolve the key `plan` of the mapping. A planning request is removed from the mapping and returned."""
    from phalanx.cli.plan.plan_option import parse_plan_option  # most jobs have no plan

    found = parse_plan_option(mapping.pop("plan"), folder)
    if not isinstance(found, str):
        return found
    mapping["plan"] = found
    return None


def _begin_time(value: object, now_s: float) -> str:
    from phalanx.cli.jobs.begin_time import with_zone  # most jobs have no begin time

    try:
        return with_zone(str(value), now_s)
    except BadRequest as error:
        raise InvalidKey(error.message, key="begin", hint=error.hint) from None


def _pairs_mapping(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return dict(str(item).partition("=")[::2] for item in value)
    return {}


def _listed_ports(value: object) -> list[object]:
    """Return the ports of a job file as a list, to which options can be added."""
    if isinstance(value, Mapping):
        return [f"{name}={port}" for name, port in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return [*str(value).split(",")] if value is not None else []


def _notify_mapping(value: object, to: Sequence[str], on: str | None) -> dict[str, object]:
    """Return whom a job file notifies, with the targets of options added; events of an option replace those of the file."""
    table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"to": value}
    listed = table.get("to") or []
    table["to"] = [*(listed.split(",") if isinstance(listed, str) else listed), *to]
    return table if on is None else {**table, "on": on}


def _flag(key: str) -> str:
    return "" if key in {"run", "software"} else "--" + key.replace("_", "-")


def _with_location(error: InvalidKey, where: str, *, from_file: bool) -> BadFile | BadRequest:
    if from_file:
        return BadFile(f"{where}: {error.message}", hint=error.hint)
    words = error.message.removeprefix(f"{error.key}: ")
    return BadRequest(f"{where}: {words}" if where else words, hint=error.hint)


_OPTIONS: Final = (
    click.argument("file", nargs=-1, metavar="[FILE]"),
    click.option("--name", metavar="NAME", help="Name of the job; default: the first word of the command."),
    click.option(
        "-g",
        "--gpus",
        type=GPUS,
        metavar="GPUS",
        help="GPUs of the whole job: 8, 2x8, h200:8, a100-80gb:8, 4xh200:8; h200,h100:8 accepts either, any-60gb:8 all of 60 GB. Part of one: 1/4, 20GiB. MIG slice: h100.1g.10gb.",
    ),
    click.option("-N", "--nodes", type=NODES, metavar="N", help="Number of nodes; 2..8 for an elastic job."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs on each node."),
    click.option(
        "--share", type=click.Choice(["mig", "mps", "time"]), help="How a part of a GPU is shared; default: mps."
    ),
    click.option("--tasks-per-node", type=int, metavar="N", help="Tasks on each node; default: one per GPU."),
    click.option("--cpus", type=int, metavar="N", help="CPUs on each node."),
    click.option(
        "--resources",
        metavar="NAME:N,...",
        help="Other resources: those that nodes offer, per node, and licences of the whole job: scratch:100GiB,matlab:2.",
    ),
    click.option("--memory", type=MEMORY, metavar="MEM", help="Memory on each node: 64 (GiB), 512M."),
    click.option(
        "-e",
        "--env",
        multiple=True,
        type=PAIR,
        metavar="K=V",
        help="Environment variable of every task; K alone copies its value from here.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        type=LABEL,
        metavar="K=V",
        help="Label of the job, to list jobs by it (ps -l) and in reports; repeatable.",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME",
        help="Secret that every task gets as a variable of this name (phalanx secrets); repeatable.",
    ),
    click.option(
        "--data",
        multiple=True,
        metavar="NAME=SOURCE",
        help="Dataset that each node copies before the ranks start: train=s3://bucket/folder, tok=/nfs/tok; repeatable.",
    ),
    click.option(
        "--data-mode",
        type=click.Choice([mode.value for mode in DataMode]),
        help="How the datasets reach the ranks: a copy on the node (stage), the address (stream), or a folder that is read on demand (mount).",
    ),
    click.option(
        "--port",
        "ports",
        multiple=True,
        metavar="[NAME=]PORT",
        help="Port of a web program of the job, which a browser reaches at the head; repeatable.",
    ),
    click.option(
        "--notify",
        "notify",
        multiple=True,
        metavar="TO",
        help="Mail address, channel, or '$NAME' of a secret with a URL, that gets messages about the job; repeatable.",
    ),
    click.option(
        "--notify-on",
        metavar="EVENTS",
        help="Of which events: start,end,failure,stall,idle,requeue; all but requeue by default.",
    ),
    click.option(
        "--on-end",
        metavar="COMMAND",
        help="Shell command that runs after the job has ended, in a job without GPUs; PHALANX_ENDED_STATE says how.",
    ),
    click.option("-t", "--time", type=DURATION, metavar="TIME", help="Time limit: 90m, 2h, HH:MM:SS, D-HH:MM:SS."),
    click.option(
        "--idle", type=DURATION, metavar="TIME", help="Park it after so long without work and without a client: 1h."
    ),
    click.option("--priority", type=int, metavar="N", help="Higher starts first."),
    click.option("-q", "--queue", metavar="QUEUE", help="Queue of the job."),
    click.option("-p", "--project", metavar="PROJECT", help="Project to charge."),
    click.option(
        "--retry", type=int, metavar="N", help="Restarts after a non-zero exit; lost nodes have their own budget."
    ),
    click.option(
        "--warm", is_flag=True, default=None, help="Fork Python ranks from a process that has imported torch."
    ),
    click.option(
        "--checkpoint",
        metavar="FOLDER",
        help="Place of checkpoints: a folder, or s3://bucket/folder; default: in the head's state folder.",
    ),
    click.option(
        "--outputs",
        metavar="URL",
        help="Object store for PHALANX_OUTPUT_DIR: s3://bucket/folder; default: the head's state folder.",
    ),
    click.option("--setup", metavar="SHELL", help="Shell command to run once on each node before the tasks."),
    click.option(
        "--requirements",
        metavar="FILE",
        help="Packages to install once on each node: requirements.txt or pyproject.toml; or none.",
    ),
    click.option("--conda", metavar="NAME", help="Conda environment of the nodes to run in: its name or folder."),
    click.option("--venv", metavar="FOLDER", help="Virtual environment of the nodes to run in."),
    click.option("--uv", metavar="FILE", help="uv.lock from which each node makes the environment once."),
    click.option("--modules", metavar="NAMES", help="Modules to load on each node: cuda/12,gcc."),
    click.option("--image", metavar="IMAGE", help="Container image to run in, with podman or apptainer."),
    click.option("-C", "--workdir", metavar="FOLDER", help="Working directory; default: the current one."),
    click.option(
        "--within",
        metavar="LEVEL",
        help="All nodes inside one domain of this level: spine, leaf, rack, nvlink or node.",
    ),
    click.option("--prefer", metavar="LEVEL", help="The same if possible; a wider placement rather than wait."),
    click.option(
        "--slice", type=int, metavar="N", help="Every N nodes, in rank order, inside one domain of --slice-within."
    ),
    click.option("--slice-within", metavar="LEVEL", help="Level of the slices."),
    click.option(
        "--no-preempt", "preemptible", is_flag=True, flag_value=False, default=None, help="Never preempt this job."
    ),
    click.option(
        "--saves-on-stop",
        is_flag=True,
        default=None,
        help="The job saves a checkpoint when asked to stop, so that stopping it is cheap.",
    ),
    click.option("--reservation", metavar="NAME", help="Run only on the nodes of this reservation."),
    click.option("-w", "--nodelist", metavar="NODES", help="Place it only on these nodes: n0, gpu[001-004,007]."),
    click.option("-x", "--exclude", metavar="NODES", help="Never place it on these nodes."),
    click.option(
        "--plan",
        metavar="PLAN",
        help="Layout of the model: auto, tp=2,pp=2,fsdp=2, or FILE.json of `phalanx plan --save`.",
    ),
    click.option(
        "--copy", is_flag=True, help="Upload a copy of the working directory (honours .gitignore, at most 100 MB)."
    ),
    click.option(
        "--depends-on",
        "--dependency",
        "depends_on",
        metavar="JOBS",
        help="Start after other jobs: 17, afterok:17:18, afterany:17, singleton.",
    ),
    click.option(
        "-a",
        "--array",
        metavar="NUMBERS",
        help="One job for each number: 0-99, 1,3,7-20:2; 0-99%8 for at most 8 at once.",
    ),
    click.option("-b", "--begin", metavar="WHEN", help="Earliest start: 2h (from now), 16:00, 2026-12-01T08:00."),
    click.option("--hold", is_flag=True, default=None, help="Hold until `phalanx release`."),
    click.option("--allow-never", is_flag=True, default=None, help="Submit the job even if it can never start here."),
    click.option(
        "--scale-down",
        is_flag=True,
        help="Lower the numbers of an #SBATCH script to what the cluster has, for a trial.",
    ),
    click.option("--grace", type=DURATION, metavar="TIME", help="Time from SIGTERM to SIGKILL; default 30s."),
    click.option("--collective-timeout", type=DURATION, metavar="TIME", help="Timeout of collectives; default 10m."),
)  # a table: one option a line
