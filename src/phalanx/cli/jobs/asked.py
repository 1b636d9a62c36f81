"""From a command line (a job file, options, words after `--`) to the mapping that the head gets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from phalanx.cli.words import DURATION, GPUS, MEMORY, NODES, PAIR
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.keys import BadKey
from phalanx.core.work.request import spec_from_mapping
from phalanx.core.work.requirements import NONE
from phalanx.core.work.spec import JobSpec

if TYPE_CHECKING:
    from phalanx.cli.jobs.batch import Named
    from phalanx.cli.plan.given import PlanWish

F = TypeVar("F", bound=Callable[..., Any])
_AFTER_DASHES: Final = "phalanx.command"
_FILE_ENDINGS: Final = (".yaml", ".yml", ".json")
# Options that are keys of the job file under the same name.
_KEYS: Final = (
    "name", "gpus", "nodes", "gpus_per_node", "cpus", "memory", "workdir", "time", "priority", "queue", "project", "retry",
    "warm", "checkpoint", "tasks_per_node", "hold", "depends_on", "array", "begin", "grace", "collective_timeout", "setup", "within", "prefer", "slice", "slice_within",
    "preemptible", "reservation", "saves_on_stop", "plan", "requirements", "image",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job as it goes to the head, checked here with the head's own rules.

    Attributes:
        copy: the working directory travels with it.
        named: of an `#SBATCH` script, what only the head can say of its words.
        to_plan: of a file whose `plan:` is a mapping: planned by `plan_now` before the job is handed in; the mapping is without it.
    """

    mapping: dict[str, object]
    spec: JobSpec
    copy: bool
    to_plan: PlanWish | None = None
    named: Named | None = None


class CommandAfterDashes(click.Command):
    """Keeps what stands after `--` for the job, so that no option of the job is taken for one of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first `--`, then parse what is ours."""
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[cut + 1 :]
            args = args[:cut]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """`[OPTIONS] [FILE] [-- COMMAND...]`."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def job_options(command: F) -> F:
    """Add every option that asks for something, and the job file as an argument."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked(context: click.Context, given: Mapping[str, Any]) -> Asked:
    """The job that the command line asks for.

    Args:
        context: of the command; holds the words after `--`.
        given: the values of `job_options`.

    Raises:
        BadFile: the job file, or a script it plainly names, is missing or wrong.
        BadRequest: options are wrong, or contradict each other.
    """
    words = context.meta.get(_AFTER_DASHES)
    script = _batch_script(given["file"], words)
    path = None if script is not None else _job_file(given["file"], words, context.command_path)
    options = {key: given[key] for key in _KEYS if given[key] is not None}
    here = os.getcwd()
    named = None
    where: Callable[[str], str]
    if script is not None:
        from phalanx.cli.jobs.batch import batch_mapping

        mapping, named = batch_mapping(script, given["file"][1:])
        where = lambda key: _flag(key) if key in options else script or key  # noqa: E731  # one line says it best
    elif path is None:
        mapping, where = {}, _flag
    else:
        from phalanx.cli.jobs.jobfile import read_job_file

        file = read_job_file(path)
        mapping = dict(file.mapping)
        here = os.path.dirname(os.path.abspath(path)) if mapping.get("workdir") and path != "-" else here
        where = lambda key: _flag(key) if key in options else file.at(key)  # noqa: E731  # one line says it best
    mapping.update(options)
    if words is not None:
        mapping["run"] = list(words)
    if given["env"]:
        mapping["env"] = {**_table(mapping.get("env")), **dict(given["env"])}
    mapping["workdir"] = _workdir(mapping.get("workdir"), here, typed="workdir" in options)
    now_s = time.time()
    to_plan = None
    try:
        if mapping.get("plan") is not None:
            to_plan = _planned(mapping, os.getcwd() if "plan" in options or path in {None, "-"} else _folder_of(path))
        if mapping.get("begin") is not None:
            mapping["begin"] = _begin(mapping["begin"], now_s)
        spec = spec_from_mapping(mapping, workdir=here, now_s=now_s)
    except BadKey as error:
        raise _placed(error, where(error.key), from_file=path is not None and error.key not in options) from None
    mapping = {key: value for key, value in mapping.items() if value is not None}
    return Asked(mapping=mapping, spec=spec, copy=bool(given["copy"]), to_plan=to_plan, named=named)


def check_script(spec: JobSpec) -> None:
    """Refuse a script that is plainly missing: named by a path, looked for in a folder that is here.

    Raises:
        BadFile: there is no such folder or file.
    """
    if not os.path.isdir(spec.workdir):
        raise BadFile(f"{spec.workdir}: no such folder", hint="--workdir names the folder the job runs in")
    if spec.requirements not in {"", NONE} and not os.path.exists(os.path.join(spec.workdir, spec.requirements)):
        raise BadFile(f"{spec.requirements}: no such file in {spec.workdir}", hint="--requirements names a file in it")
    for word in _scripts(spec.role.argv):
        path = os.path.join(spec.workdir, os.path.expanduser(word))
        if not os.path.exists(path):
            raise BadFile(f"{word}: no such file in {spec.workdir}", hint="--workdir names the folder the job runs in")


def _scripts(argv: Sequence[str]) -> list[str]:
    """Words of a command that must be files: the program if it has a slash, and the first `*.py` or `*.sh` after an interpreter."""
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
    """The first word, where it is a script with `#SBATCH` lines."""
    if words is not None or not files or files[0].lower().endswith(_FILE_ENDINGS) or not os.path.isfile(files[0]):
        return None
    from phalanx.cli.jobs.batch import is_batch_script

    return files[0] if is_batch_script(files[0]) else None


def _job_file(files: Sequence[str], words: Sequence[str] | None, command: str) -> str | None:
    if words is not None and files:
        raise BadRequest(f"a job file ({files[0]}) and a command after -- at once", hint="give one of the two")
    if words is not None:
        if not words:
            raise BadRequest("there is no command after --", hint=f"{command} -- python train.py")
        return None
    if not files:
        raise BadRequest(
            "there is nothing to run", hint=f"{command} --gpus 1 -- python train.py, or {command} job.yaml"
        )
    first = files[0]
    looks_like_one = first == "-" or first.lower().endswith(_FILE_ENDINGS) or os.path.isdir(first)
    if len(files) > 1 or not (
        looks_like_one
        or (os.path.isfile(first) and not first.endswith((".py", ".sh")) and not os.access(first, os.X_OK))
    ):
        shown = " ".join(["python", *files] if first.endswith(".py") else files)
        raise BadRequest(f"{first!r} is no job file (*.yaml)", hint=f"a command goes after --: {command} -- {shown}")
    return first


def _workdir(named: object, here: str, *, typed: bool) -> str:
    """Absolute. From a job file it is meant from that file's folder, from an option from where the user stands."""
    text = os.path.expanduser(str(named)) if named else ""
    return os.path.normpath(os.path.join(os.getcwd() if typed else here, text)) if text else here


def _folder_of(path: str | None) -> str:
    return os.path.dirname(os.path.abspath(path or ""))


def _planned(mapping: dict[str, object], folder: str) -> PlanWish | None:
    """Put the words for the head into the mapping; take a wish to plan first out of it."""
    from phalanx.cli.plan.given import plan_given  # most jobs have no plan

    found = plan_given(mapping.pop("plan"), folder)
    if not isinstance(found, str):
        return found
    mapping["plan"] = found
    return None


def _begin(value: object, now_s: float) -> str:
    from phalanx.cli.jobs.begin import with_zone  # datetime is not needed on the way of most jobs

    try:
        return with_zone(str(value), now_s)
    except BadRequest as error:
        raise BadKey(error.message, key="begin", hint=error.hint) from None


def _table(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return dict(str(item).partition("=")[::2] for item in value)
    return {}


def _flag(key: str) -> str:
    return "" if key == "run" else "--" + key.replace("_", "-")


def _placed(error: BadKey, where: str, *, from_file: bool) -> BadFile | BadRequest:
    if from_file:
        return BadFile(f"{where}: {error.message}", hint=error.hint)
    words = error.message.removeprefix(f"{error.key}: ")
    return BadRequest(f"{where}: {words}" if where else words, hint=error.hint)


_OPTIONS: Final = (
    click.argument("file", nargs=-1, metavar="[FILE]"),
    click.option("--name", metavar="NAME", help="What to call it; the command's first word otherwise."),
    click.option("-g", "--gpus", type=GPUS, metavar="GPUS", help="GPUs of the whole job: 8, 2x8, h200:8, a100-80gb:8, 4xh200:8; h200,h100:8 takes either."),
    click.option("-N", "--nodes", type=NODES, metavar="N", help="Number of nodes; 2..8 for an elastic job."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs on each node."),
    click.option("--tasks-per-node", type=int, metavar="N", help="Starts of the command on each node; otherwise one per GPU."),
    click.option("--cpus", type=int, metavar="N", help="CPUs on each node."),
    click.option("--memory", type=MEMORY, metavar="MEM", help="Memory on each node: 64 (GiB), 512M."),
    click.option("-e", "--env", multiple=True, type=PAIR, metavar="K=V", help="A variable for every task; K alone takes its value here."),
    click.option("-t", "--time", type=DURATION, metavar="TIME", help="Time limit: 90m, 2h, HH:MM:SS, D-HH:MM:SS."),
    click.option("--priority", type=int, metavar="N", help="Higher goes first."),
    click.option("-q", "--queue", metavar="QUEUE", help="Where it waits."),
    click.option("-p", "--project", metavar="PROJECT", help="Who pays."),
    click.option("--retry", type=int, metavar="N", help="Restarts after a non-zero exit; lost nodes have their own budget."),
    click.option("--warm", is_flag=True, default=None, help="Start Python ranks from a process that has imported torch."),
    click.option("--checkpoint", metavar="FOLDER", help="Where checkpoints go; under the head's state otherwise."),
    click.option("--setup", metavar="SHELL", help="Run once on each node before the tasks."),
    click.option("--requirements", metavar="FILE", help="Install the packages that it names once on each node: requirements.txt or pyproject.toml; none."),
    click.option("--image", metavar="IMAGE", help="Run it in this image, by podman or apptainer as the node has it."),
    click.option("-C", "--workdir", metavar="FOLDER", help="Where the job runs; here otherwise."),
    click.option("--within", metavar="LEVEL", help="All nodes inside one domain: spine, leaf, rack, nvlink or node."),
    click.option("--prefer", metavar="LEVEL", help="The same as a wish: wider rather than wait."),
    click.option("--slice", type=int, metavar="N", help="Every N nodes, in rank order, inside one domain of --slice-within."),
    click.option("--slice-within", metavar="LEVEL", help="The level of the slices."),
    click.option("--no-preempt", "preemptible", is_flag=True, flag_value=False, default=None, help="Never stopped for another job's sake."),
    click.option("--saves-on-stop", is_flag=True, default=None, help="It saves when asked to stop, so that stopping it costs little."),
    click.option("--reservation", metavar="NAME", help="Start inside this reservation only."),
    click.option("--plan", metavar="PLAN", help="How the model is split: auto, tp=2,pp=2,fsdp=2, or FILE.json of `phalanx plan --save`."),
    click.option("--copy", is_flag=True, help="Send a copy of the working directory (.gitignore obeyed, at most 100 MB)."),
    click.option("--depends-on", "--dependency", "depends_on", metavar="JOBS", help="Wait for others: 17, afterok:17:18, afterany:17, singleton."),
    click.option("-a", "--array", metavar="NUMBERS", help="One job for each number: 0-99, 1,3,7-20:2; 0-99%8 for at most 8 at once."),
    click.option("-b", "--begin", metavar="WHEN", help="Not before: 2h from now, 16:00, 2026-12-01T08:00."),
    click.option("--hold", is_flag=True, default=None, help="Wait until `phalanx release`."),
    click.option("--grace", type=DURATION, metavar="TIME", help="From SIGTERM to SIGKILL; 30s otherwise."),
    click.option("--collective-timeout", type=DURATION, metavar="TIME", help="How long its collectives wait; 10m otherwise."),
)  # fmt: skip
