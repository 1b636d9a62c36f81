"""Converts a command line (job file, options, words after `--`) into the mapping that is sent to the head."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import click

from phalanx.core.errors import BadFile, BadRequest, PhalanxError
from phalanx.core.work.job_file.keys import KEY_KINDS, InvalidKey

if TYPE_CHECKING:
    from phalanx.cli.jobs.request.job_file import JobFile
    from phalanx.cli.jobs.request.sbatch_script import SlurmNames
    from phalanx.cli.plan.plan_option import PlanRequest
    from phalanx.core.work.spec import JobSpec

_ADDED: Final = frozenset(
    {"env", "secrets", "ports", "data", "labels", "notify"}
)  # options that add to a key of the job file
_CHECKED_ALONE: Final = frozenset({"run", "workdir", "gpus", "memory", "time", "project", "queue"})
"""Keys whose options check their own value, that do not contradict each other, and on which the command line does not act."""
SOFTWARE_OPTIONS: Final = ("conda", "venv", "uv", "modules")  # forms of the key `software`
_AFTER_DASHES: Final = "phalanx.command"
_FILE_ENDINGS: Final = (".yaml", ".yml", ".json")


class JobRequest(NamedTuple):
    """A job to submit.

    Attributes:
        judge: returns the job's spec by the same rules as on the head, or raises the fault of the key or option that is wrong.
        copy: whether the working directory is uploaded with the job.
        plain: a command after `--` with keys of `_CHECKED_ALONE` only. Such a job is sent without `judge`, whose modules take longer to import than
            the head needs to answer; if it is refused, `own_faults_first` names the option.
        slurm_names: partition and account of an `#SBATCH` script, which only the head can resolve.
        again: the keys are those of an earlier job, whose files are where they were: no copy is made of its own accord.
        plan_request: planning request of a file whose `plan:` is a mapping. `resolve_plan` plans it before submission; `mapping` has no `plan` then.
    """

    mapping: dict[str, object]
    judge: Callable[[], JobSpec]
    copy: bool
    plain: bool = False
    plan_request: PlanRequest | None = None
    slurm_names: SlurmNames | None = None
    again: bool = False

    @property
    def spec(self) -> JobSpec:
        """The job's spec; raises as `judge` does."""
        return self.judge()

    @property
    def is_service(self) -> bool:
        """Whether it is a service, which has no end."""
        return not self.plain and self.spec.service is not None

    @property
    def is_array(self) -> bool:
        """Whether it is an array."""
        return not self.plain and bool(self.spec.array)

    @property
    def idles(self) -> bool:
        """Whether it is parked when it idles."""
        return not self.plain and self.spec.idle_s is not None

    @contextlib.contextmanager
    def own_faults_first(self) -> Iterator[None]:
        """Raise a fault of the request itself rather than one of the head, which may not have been reached and names no option."""
        try:
            yield
        except PhalanxError:
            self.judge()
            raise


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
    from phalanx.cli.command_groups import split_options

    options, rest = split_options(command, ctx, args)
    if not rest or not os.path.isfile(rest[0]) or rest[0].lower().endswith(_FILE_ENDINGS):
        return args
    from phalanx.cli.jobs.request.sbatch_script import is_batch_script

    return [*options, "--", *rest] if is_batch_script(rest[0]) else args


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
        from phalanx.cli.jobs.request.sbatch_script import batch_mapping

        mapping, named = batch_mapping(script, given["file"][1:], lower=bool(given.get("scale_down")))
        _check_component_options(mapping, options)
        where = lambda key: _flag(key) if key in options else script or key  # noqa: E731  # shorter than a function
    elif path is None:
        mapping, where = {}, _flag
    else:
        from phalanx.cli.jobs.request.job_file import read_job_file

        file = file or read_job_file(path, beside=beside)
        mapping = dict(file.mapping)
        here = os.path.dirname(os.path.abspath(path)) if mapping.get("workdir") and path != "-" else here
        where = lambda key: _flag(key) if key in options else file.location(key)  # noqa: E731  # shorter than a function
    mapping = changed_mapping(mapping, given)
    if words is not None:
        mapping["run"] = list(words)
    mapping["workdir"] = _workdir(mapping.get("workdir"), here, typed="workdir" in options)
    plans = os.getcwd() if "plan" in options or path in {None, "-"} else _folder_of(path)
    located = lambda error: _with_location(  # noqa: E731  # shorter than a function
        error, where(error.key), from_file=path is not None and error.key not in options
    )
    plain = bool(words) and _CHECKED_ALONE.issuperset(mapping)
    return _request(mapping, here, plans, located, copy=bool(given["copy"]), plain=plain, slurm_names=named)


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
    located = lambda error: _with_location(error, _flag(error.key), from_file=False)  # noqa: E731  # shorter than a function
    return _request(found, "/", os.getcwd(), located, copy=bool(given["copy"]), again=True)


def changed_mapping(mapping: Mapping[str, object], given: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of a job with those that options give; variables, labels, secrets, ports and datasets are added."""
    found = {**mapping, **_option_keys(given)}
    if given["env"]:
        found["env"] = {**_pairs_mapping(found.get("env")), **dict(given["env"])}
    if given.get("labels"):
        found["labels"] = {**_pairs_mapping(found.get("labels")), **dict(given["labels"])}
    if given.get("secrets"):
        from phalanx.core.work.secret import parse_secret_names

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


def _request(
    mapping: dict[str, object],
    here: str,
    plans: str,
    located: Callable[[InvalidKey], PhalanxError],
    *,
    copy: bool,
    plain: bool = False,
    slurm_names: SlurmNames | None = None,
    again: bool = False,
) -> JobRequest:
    """Return the job of a mapping, judged now unless it is `plain`.

    Args:
        mapping: its keys; `plan` and `begin` are resolved in place.
        here: its default working directory.
        plans: the folder of its plan file.
        located: returns the error for a wrong key, with the place where the key was written.
        copy: see `JobRequest`.
        plain: see there.
        slurm_names: see there.
        again: see there.
    """
    now_s = time.time()
    try:
        to_plan = None if mapping.get("plan") is None else _take_plan(mapping, plans)
        if mapping.get("begin") is not None:
            mapping["begin"] = _begin_time(mapping["begin"], now_s)
    except InvalidKey as error:
        raise located(error) from None

    @functools.cache
    def judge() -> JobSpec:
        from phalanx.core.work.job_file.request import spec_from_mapping

        try:
            return spec_from_mapping(mapping, workdir=here, now_s=now_s)
        except InvalidKey as error:
            raise located(error) from None

    if not plain:
        judge()
    kept = {key: value for key, value in mapping.items() if value is not None}
    return JobRequest(kept, judge, copy, plain, to_plan, slurm_names, again)


def _check_component_options(mapping: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Reject options that say what nodes are, for a script whose components each say so.

    Raises:
        BadRequest: such an option is given.
    """
    from phalanx.core.work.sbatch_scripts.het_components import ROLE_KEYS, slurm_settings

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
    from phalanx.cli.jobs.request.sbatch_script import script_mapping
    from phalanx.core.work.job_file.request import spec_from_mapping

    mapping, named = script_mapping(text, path, args, given, by_sbatch=True)
    now_s = time.time()
    try:
        if mapping.get("begin") is not None:
            mapping["begin"] = _begin_time(mapping["begin"], now_s)
        spec = spec_from_mapping(mapping, workdir=os.getcwd(), now_s=now_s)
    except InvalidKey as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from None
    return JobRequest(mapping=mapping, judge=lambda: spec, copy=False, slurm_names=named)


def job_request_of_file(path: str, *, copy: bool, file: JobFile | None = None) -> JobRequest:
    """Return the job or service that a job file describes, without options. `file`: its content, if it was read already.

    Raises:
        BadFile: the job file is missing or wrong.
    """
    nothing = dict.fromkeys((*KEY_KINDS, "env"))
    return job_request(click.Context(click.Command("update")), {**nothing, "file": (path,), "copy": copy}, file=file)


def check_local_files(wanted: JobRequest) -> None:
    """Check that the working directory of a job and the files named in its command exist on this machine.

    Raises:
        BadFile: the folder or a file is missing.
    """
    mapping = wanted.mapping
    workdir = str(mapping["workdir"]).strip() if wanted.plain else wanted.spec.workdir
    if not os.path.isdir(workdir):
        raise BadFile(f"{workdir}: no such folder", hint="--workdir sets the folder in which the job runs")
    listed = "" if wanted.plain else wanted.spec.packages_file
    if listed and not os.path.exists(os.path.join(workdir, listed)):
        raise BadFile(
            f"{listed}: no such file in {workdir}",
            hint=f"{'--uv' if wanted.spec.software.uv else '--requirements'} must name a file in that folder",
        )
    for word in _scripts(cast("list[str]", mapping["run"]) if wanted.plain else wanted.spec.role.argv):
        path = os.path.join(workdir, os.path.expanduser(word))
        if not os.path.exists(path):
            raise BadFile(f"{word}: no such file in {workdir}", hint="--workdir sets the folder in which the job runs")


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
    from phalanx.cli.jobs.request.sbatch_script import is_batch_script

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
    from phalanx.cli.jobs.request.begin_time import with_zone  # most jobs have no begin time

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
