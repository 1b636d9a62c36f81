"""Turns a mapping, from a job file or a request body, into a JobSpec. The command line and the head call the same function.

Pure: it reads no file and no clock. Callers that know the line of a key or the flag it came from catch `InvalidKey` and add it; `BadRequest`
is raised for readable values that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeVar

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.topology import NODE_LEVEL
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.units import parse_duration_s, parse_memory_bytes
from phalanx.core.work.array import ArrayRequest, parse_array
from phalanx.core.work.dependency import Dependency, DependencyKind, parse_dependencies
from phalanx.core.work.extras import parse_extras
from phalanx.core.work.gpus import (
    GpuRequest,
    combine_gpu_options,
    parse_gpus,
    parse_nodes,
    with_share_kind,
)
from phalanx.core.work.job_file.begin_time import parse_begin_s
from phalanx.core.work.job_file.data_sources import OBJECT_STORES, DataMode, parse_data
from phalanx.core.work.job_file.keys import InvalidKey, check_key
from phalanx.core.work.job_file.launchers import MPI_LAUNCHERS, count_logical_lines, find_launcher, split_commands
from phalanx.core.work.job_file.notify import parse_notify
from phalanx.core.work.job_file.on_end import ENDED_VARIABLES, parse_on_end
from phalanx.core.work.job_file.plan_key import parse_plan, with_gpus_for_plan
from phalanx.core.work.job_file.requirements import NO_REQUIREMENTS, parse_requirements
from phalanx.core.work.job_file.software import NO_SOFTWARE, Software, parse_software
from phalanx.core.work.job_file.web_ports import parse_web_ports
from phalanx.core.work.sbatch_scripts.het_components import read_components
from phalanx.core.work.sbatch_scripts.sbatch_job import SLURM_KEYS
from phalanx.core.work.secret import parse_secret_names
from phalanx.core.work.services.service_terms import ServiceTerms, parse_service_terms
from phalanx.core.work.spec import (
    COLLECTIVE_TIMEOUT_DEFAULT_S,
    GRACE_DEFAULT_S,
    JobSpec,
    LaunchMode,
    Role,
    TopologyConstraint,
)
from phalanx.core.work.speeds import parse_speeds
from phalanx.core.work.topology_constraint import fixed_to_one_node, parse_topology_constraint

SpecValue = TypeVar("SpecValue")

VALUE_BYTES_MAX: Final = 131_000  # Linux refuses one argument or variable of 128 KiB (MAX_ARG_STRLEN)
REQUEST_BYTES_MAX: Final = (
    1 << 20
)  # half of Linux' default for arguments and environment together; the rest is the node's own
JOB_NAME_MAX: Final = 128
_PRIORITY_MAX: Final = 10_000
_RETRY_MAX: Final = 100  # with more retries the command is broken, not unlucky
_TASKS_PER_NODE_MAX: Final = 4096
_CPUS_MAX: Final = 65_536
_NODES_MAX: Final = 1_000_000
_LABELS_MAX: Final = 64
_DURATION_MAX_S: Final = 366 * 86400.0

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
_PRINTABLE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_PLAIN_WORDS: Final = re.compile(r"[A-Za-z0-9_./:=,@%+\- ]+")
# Builtins and keywords of the shell. (One word per line would be 50 lines.)
_SHELL_FIRST: Final = frozenset(
    {
        ".",
        ":",
        "[",
        "alias",
        "bg",
        "break",
        "builtin",
        "case",
        "cd",
        "command",
        "continue",
        "coproc",
        "declare",
        "dirs",
        "do",
        "done",
        "elif",
        "else",
        "enable",
        "esac",
        "eval",
        "exec",
        "exit",
        "export",
        "fg",
        "fi",
        "for",
        "function",
        "getopts",
        "hash",
        "help",
        "history",
        "if",
        "jobs",
        "let",
        "local",
        "logout",
        "mapfile",
        "popd",
        "pushd",
        "read",
        "readarray",
        "readonly",
        "return",
        "select",
        "set",
        "shift",
        "shopt",
        "source",
        "suspend",
        "test",
        "then",
        "time",
        "times",
        "trap",
        "type",
        "typeset",
        "ulimit",
        "umask",
        "unalias",
        "unset",
        "until",
        "wait",
        "while",
    }
)
_SET_BY_PHALANX: Final = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"})
_OURS_TO_SET: Final = frozenset({"PHALANX_URL", "PHALANX_TOKEN", "PHALANX_HOME"})  # a job may call a head
_SECRET_KEYS: Final = frozenset(
    {"env"}
)  # their values may be passwords: error messages, which may be logged, must not repeat them
_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*|bash|sh|zsh|torchrun|deepspeed|accelerate|mpirun|mpiexec|uv|env")
_IMAGE: Final = re.compile(r"[A-Za-z0-9_./:@%+~-]{1,512}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def spec_from_mapping(mapping: Mapping[str, object], *, workdir: str, now_s: float | None = None) -> JobSpec:
    """The job that a mapping requests.

    Args:
        mapping: keys of `KEY_KINDS`; a null value counts as not given. Numbers may be given as digits in text.
        workdir: absolute folder, used if the mapping names none and as the base of a relative one.
        now_s: Unix time from which `begin: 2h` counts; None rejects such a begin.

    Raises:
        InvalidKey: an unknown key (with the nearest match), or an invalid value.
        BadRequest: valid values that contradict each other.
    """
    given = {key: value for key, value in mapping.items() if value is not None}
    for key in given:
        check_key(key)
    argv, script = command_of(given)
    array = _read(given, "array", parse_array, None)
    name = _name(given, argv, script)
    service = parse_service_terms(given, name)
    plan = parse_plan(given.get("plan", ""))
    data, mode = _data(given)
    software, listed = _software(given)
    role = _role(given, argv, script, service, plan)
    spec = JobSpec(
        name=name,
        role=role,
        workdir=_workdir(given, workdir),
        upload=_upload(given),
        env=_env(given),
        secrets=_secrets(given),
        ports=_read(given, "ports", parse_web_ports, ()),
        notify=_read(given, "notify", parse_notify, None),
        on_end=_read(given, "on_end", parse_on_end, None),
        setup=_text(given, "setup"),
        requirements=listed or _read(given, "requirements", parse_requirements, ""),
        software=software,
        data=data,
        data_mode=mode,
        image=_image(given),
        project=_text(given, "project"),
        queue=_text(given, "queue"),
        priority=_number(given, "priority", low=-_PRIORITY_MAX, high=_PRIORITY_MAX) or 0,
        time_limit_s=_duration(given, "time", None),
        terminal=_flag(given, "terminal"),
        idle_s=_duration(given, "idle", None),
        retry=_number(given, "retry", low=0, high=_RETRY_MAX) or 0,
        checkpoint=_checkpoint(given, workdir),
        outputs=_outputs(given),
        warm=_flag(given, "warm"),
        hold=_flag(given, "hold"),
        allow_never=_flag(given, "allow_never"),
        grace_s=_duration(given, "grace", GRACE_DEFAULT_S) or GRACE_DEFAULT_S,
        collective_timeout_s=_duration(given, "collective_timeout", COLLECTIVE_TIMEOUT_DEFAULT_S)
        or COLLECTIVE_TIMEOUT_DEFAULT_S,
        labels=_labels(given),
        dependencies=_dependencies(given, array),
        array="" if array is None else str(array),
        array_max=None if array is None else array.running_max,
        begin_s=_read(given, "begin", lambda value: parse_begin_s(value, now_s=now_s), None),
        topology=parse_topology_constraint(
            role.gpus,
            within=_text(given, "within"),
            prefer=_text(given, "prefer"),
            slice_nodes=_number(given, "slice", low=1, high=_NODES_MAX) or 0,
            slice_within=_text(given, "slice_within"),
        ),
        reservation=_text(given, "reservation").strip(),
        preemptible=_flag(given, "preemptible", default=service is None),
        saves_on_stop=_flag(given, "saves_on_stop"),
        plan=plan,
        nodelist=_hosts(given, "nodelist"),
        exclude=_hosts(given, "exclude"),
        slurm=_slurm(given),
        speeds=parse_speeds(_table(given, "speeds")),
        planned_speeds=parse_speeds(_table(given, "planned_speeds"), key="planned_speeds"),
        service=service,
    )
    if role.others:
        _check_roles(spec)
    for key in ("array", "image"):
        if spec.terminal and given.get(key):
            raise InvalidKey(
                f"terminal and {key} cannot be combined", key="terminal", hint=f"leave out {key}, or terminal"
            )
    _bounded(spec)
    return spec


def _role(
    given: Mapping[str, object], argv: tuple[str, ...], script: str, service: ServiceTerms | None, plan: str
) -> Role:
    """What each task runs, and on what.

    Raises:
        InvalidKey: an invalid value, or replicas that sleep though they have no whole GPUs.
    """
    tasks = _number(given, "tasks_per_node", low=1, high=_TASKS_PER_NODE_MAX)
    if service is not None and tasks is None:
        tasks = 1  # a server itself uses all devices of its node
    role = with_gpus_for_plan(
        Role(
            argv=argv,
            script=script,
            gpus=_gpus(given),
            cpus=_number(given, "cpus", low=0, high=_CPUS_MAX) or 0,
            memory_bytes=_read(given, "memory", parse_memory_bytes, 0),
            extras=_read(given, "resources", parse_extras, ()),
            launch=_launch(argv, script, tasks, starts_alone=bool(given.get("slurm")) or service is not None),
            tasks_per_node=tasks,
            others=_other_roles(given),
        ),
        plan,
    )
    if service is not None and service.sleep and (not role.gpus.milli or role.gpus.has_shares):
        raise InvalidKey(
            "sleep: only replicas on whole GPUs can sleep", key="sleep", hint="write gpus: 1, or remove sleep and wake"
        )
    return role


def _other_roles(given: Mapping[str, object]) -> tuple[Role, ...]:
    """The roles of the further components of a heterogeneous `#SBATCH` script; the script runs once, so that they start nothing themselves."""
    try:
        components = read_components(dict(_table(given, "slurm")).get("components", ""))
    except ValueError as error:
        raise InvalidKey(f"slurm: {error}", key="slurm") from None
    return tuple(
        Role(
            gpus=_gpus(one),
            cpus=_number(one, "cpus", low=0, high=_CPUS_MAX) or 0,
            memory_bytes=_read(one, "memory", parse_memory_bytes, 0),
            extras=_read(one, "resources", parse_extras, ()),
            launch=LaunchMode.FIXED,
            tasks_per_node=1,
        )
        for one in components
    )


def _check_roles(spec: JobSpec) -> None:
    """Reject what a gang of several roles cannot have.

    Raises:
        BadRequest: it has such a thing.
    """
    gpus = [role.gpus for role in spec.role.each]
    wrong = {
        "an array": bool(spec.array),
        "a topology level": spec.topology != TopologyConstraint(),
        "a list of nodes": bool(spec.nodelist),
        "a part of a GPU": any(one.has_shares for one in gpus),
        "alternatives": any(one.alternatives for one in gpus),
        "a range of nodes": any(one.nodes_max is not None for one in gpus),
        "a plan": bool(spec.plan),
    }
    for what, given in wrong.items():
        if given:
            raise BadRequest(
                f"a heterogeneous job of {len(gpus)} components cannot have {what}",
                hint="leave it out, or submit the components one by one",
            )


# ---- the command ----------------------------------------------------------------------------------------------------


def command_of(given: Mapping[str, object]) -> tuple[tuple[str, ...], str]:
    """The command as words, or as a shell text; exactly one of the two is not empty.

    A single line of plain words is split here: then no shell runs between the supervisor and the task, and Python ranks may start warm.

    Raises:
        InvalidKey: there is no command.
    """
    value = given.get("run")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        words = tuple(_word(item, "run") for item in value)
        if not words or not words[0].strip():
            _no_command()
        return words, ""
    text = _text(given, "run")
    if not text.strip():
        _no_command()
    words = plain_command_words(text)
    return (words, "") if words else ((), text)


def plain_command_words(text: str) -> tuple[str, ...]:
    """The words of a command that needs no shell; empty for any other text."""
    line = text.strip()
    words = tuple(line.split()) if _PLAIN_WORDS.fullmatch(line) else ()
    return words if words and words[0] not in _SHELL_FIRST and "=" not in words[0] else ()


def _no_command() -> NoReturn:
    raise InvalidKey(
        "run: the command is missing", key="run", hint="write run: python train.py, or put the command after --"
    )


def _launch(argv: tuple[str, ...], script: str, tasks_per_node: int | None, *, starts_alone: bool) -> LaunchMode:
    """How often the command starts. `starts_alone`: a batch script or a server, which starts once on a node whatever it calls."""
    launcher = find_launcher(argv, script)
    if launcher in MPI_LAUNCHERS and not starts_alone:
        return LaunchMode.ONCE
    if tasks_per_node is not None:
        return LaunchMode.FIXED
    if script and count_logical_lines(script) > 1:
        raise InvalidKey(
            "run: the script has several lines; state how often it starts on each node",
            key="run",
            hint="add tasks_per_node: 1 to start it once per node, or give the number of tasks per node",
        )
    return LaunchMode.PER_NODE if launcher else LaunchMode.PER_DEVICE


def _name(given: Mapping[str, object], argv: tuple[str, ...], script: str) -> str:
    name = _text(given, "name").strip()
    if name:
        if len(name) > JOB_NAME_MAX or not _PRINTABLE.fullmatch(name):
            raise InvalidKey(
                f"name: {name[:40]!r} is longer than {JOB_NAME_MAX} characters or contains unprintable ones", key="name"
            )
        return name
    words = argv or next(
        (words for command in split_commands(script) if (words := tuple(command.split()))[0] not in _SHELL_FIRST), ()
    )
    chosen = words[0] if words else "job"
    if _INTERPRETER.fullmatch(chosen.rsplit("/", 1)[-1]):
        chosen = next(
            (word for word in words[1:] if word.endswith((".py", ".sh")) and not word.startswith("-")), chosen
        )
    base = chosen.rstrip("/").rsplit("/", 1)[-1] or "job"
    return "".join(_PRINTABLE.findall(base))[:JOB_NAME_MAX].strip() or "job"


def _gpus(given: Mapping[str, object]) -> GpuRequest:
    nodes = given.get("nodes")
    fewest: int | None
    most: int | None = None
    if isinstance(nodes, str) and ".." in nodes:
        fewest, most = _read(given, "nodes", parse_nodes, (1, most))
    else:
        fewest = _number(given, "nodes", low=1, high=_NODES_MAX)
    gpus = combine_gpu_options(
        _read(given, "gpus", parse_gpus, None), fewest, _number(given, "gpus_per_node", low=0, high=_NODES_MAX), most
    )
    gpus = with_share_kind(gpus, _text(given, "share"))
    return fixed_to_one_node(gpus) if _text(given, "within").strip().lower() == NODE_LEVEL else gpus


# ---- where it runs, and with what -----------------------------------------------------------------------------------


def _workdir(given: Mapping[str, object], workdir: str) -> str:
    path = _text(given, "workdir").strip() or workdir
    full = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    if not full.startswith("/") or "\0" in full:
        raise InvalidKey(f"workdir: {path!r} is not an absolute folder", key="workdir")
    return full


def _upload(given: Mapping[str, object]) -> str:
    digest = _text(given, "upload").strip()
    if digest and not _SHA256.fullmatch(digest):
        raise InvalidKey(
            f"upload: {digest[:80]!r} is not a SHA-256 in hex",
            key="upload",
            hint=Hint(HintCode.UPLOAD_WORKDIR),
        )
    return digest


def _image(given: Mapping[str, object]) -> str:
    image = _text(given, "image").strip()
    if image and (image.startswith("-") or not _IMAGE.fullmatch(image)):
        raise InvalidKey(
            f"image: {image[:80]!r} is not an image name",
            key="image",
            hint="docker.io/library/python:3.11, or FILE.sif",
        )
    for other in ("requirements", "software", "slurm"):
        if image and given.get(other) and given[other] != NO_REQUIREMENTS:
            raise InvalidKey(
                f"image and {other} cannot be combined",
                key="image",
                hint="batch scripts run on the node itself"
                if other == "slurm"
                else "build the packages into the image",
            )
    return image


def _software(given: Mapping[str, object]) -> tuple[Software, str]:
    """The environment of the nodes, and the requirements file that `software` names."""
    none: tuple[Software, str] = (NO_SOFTWARE, "")
    found, listed = _read(given, "software", parse_software, none)
    if (found.has_python or listed) and given.get("requirements", NO_REQUIREMENTS) not in {"", NO_REQUIREMENTS}:
        raise InvalidKey(
            "requirements and software cannot be combined", key="software", hint="an environment is used as it is"
        )
    return found, listed


def _checkpoint(given: Mapping[str, object], workdir: str) -> str:
    place = _text(given, "checkpoint").strip()
    scheme, separator, rest = place.partition("://")
    if separator and scheme in OBJECT_STORES:
        return _in_bucket("checkpoint", place)
    if separator and scheme != "file":
        raise InvalidKey(
            f"checkpoint: {scheme}:// is not supported",
            key="checkpoint",
            hint="name a folder that every node sees, or s3://bucket/folder, gs:// or az://",
        )
    path = rest if separator else place
    return path if not path or path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def _outputs(given: Mapping[str, object]) -> str:
    place = _text(given, "outputs").strip()
    if place and place.partition("://")[0] not in OBJECT_STORES:
        raise InvalidKey(
            f"outputs: {place[:80]!r} is not in an object store",
            key="outputs",
            hint="write s3://bucket/folder, gs:// or az://; without this key the head keeps them",
        )
    return _in_bucket("outputs", place) if place else ""


def _in_bucket(key: str, place: str) -> str:
    scheme, _, rest = place.partition("://")
    words = rest.rstrip("/").split("/")
    if "" in words or ".." in words or not _PRINTABLE.fullmatch(rest) or "@" in words[0]:
        raise InvalidKey(f"{key}: {place[:80]!r} names no bucket and folder", key=key, hint=f"{scheme}://bucket/folder")
    return place.rstrip("/")


def _env(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = _table(given, "env")
    for name, value in pairs:
        if not _VARIABLE.fullmatch(name):
            raise InvalidKey(
                f"env: {name!r} is not a valid variable name",
                key="env",
                hint="letters, digits and _, not beginning with a digit",
            )
        ours = name.startswith("PHALANX_") and name not in _OURS_TO_SET and not name.startswith(ENDED_VARIABLES)
        if name in _SET_BY_PHALANX or ours:
            raise InvalidKey(
                f"env: {name} is set by Phalanx for every task", key="env", hint="remove it, or use another name"
            )
        if "\0" in value:
            raise InvalidKey(f"env: {name} contains a NUL byte", key="env")
    return pairs


def _data(given: Mapping[str, object]) -> tuple[tuple[tuple[str, str], ...], DataMode]:
    none: tuple[tuple[tuple[str, str], ...], DataMode] = ((), DataMode.STAGE)
    return (
        _read({**given, "data": dict(_table(given, "data"))}, "data", parse_data, none) if given.get("data") else none
    )


def _secrets(given: Mapping[str, object]) -> tuple[str, ...]:
    none: tuple[str, ...] = ()
    names = _read(given, "secrets", parse_secret_names, none)
    for name in names:
        if name in _SET_BY_PHALANX:
            raise InvalidKey(
                f"secrets: {name} is set by Phalanx for every task", key="secrets", hint="use another name"
            )
        if any(name == one for one, _ in _table(given, "env")):
            raise InvalidKey(f"{name} is in env and in secrets", key="secrets", hint="remove it from env")
    return names


def _dependencies(given: Mapping[str, object], array: ArrayRequest | None) -> tuple[Dependency, ...]:
    none: tuple[Dependency, ...] = ()
    found = _read(given, "depends_on", parse_dependencies, none)
    pairs = next((one for one in found if one.kind is DependencyKind.AFTER_CORR), None)
    if pairs is not None and array is None:
        raise InvalidKey(
            f"depends_on: {pairs} pairs the elements of two arrays, but this job is not an array",
            key="depends_on",
            hint=f"write afterok:{pairs.job_id}, or add array: with the same elements",
        )
    return found


def _hosts(given: Mapping[str, object], key: str) -> tuple[NodeId, ...]:
    none: tuple[str, ...] = ()
    names = _read(given, key, lambda value: expand_hostlist(str(value)), none) if given.get(key) else none
    return tuple(NodeId(name) for name in names)


def _slurm(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = _table(given, "slurm")
    for name, value in pairs:
        if name not in SLURM_KEYS:
            raise InvalidKey(
                f"slurm: unknown word {name!r}", key="slurm", hint=f"known: {' '.join(sorted(SLURM_KEYS))}"
            )
        if "\n" in value and name != "args":
            raise InvalidKey(f"slurm: {name} contains a line break", key="slurm")
    return pairs


def _labels(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = _table(given, "labels")
    if len(pairs) > _LABELS_MAX:
        raise InvalidKey(f"labels: {len(pairs)} labels; at most {_LABELS_MAX} are allowed", key="labels")
    for name, value in pairs:
        if not _LABEL.fullmatch(name) or len(value) > 256 or (value and not _PRINTABLE.fullmatch(value)):
            raise InvalidKey(
                f"labels: {name!r}: {value[:40]!r} is not a label",
                key="labels",
                hint="short names and printable values",
            )
    return pairs


# ---- readers of one key ---------------------------------------------------------------------------------------------


def _read(given: Mapping[str, object], key: str, parse: Callable[[object], SpecValue], default: SpecValue) -> SpecValue:
    if key not in given:
        return default
    try:
        return parse(given[key])
    except BadRequest as error:
        raise InvalidKey(error.message, key=key, hint=error.hint) from None


def _duration(given: Mapping[str, object], key: str, default: float | None) -> float | None:
    if key not in given:
        return default
    seconds = _read(given, key, lambda value: parse_duration_s(value, what=key), 0.0)
    if not 0 < seconds <= _DURATION_MAX_S:
        raise InvalidKey(
            f"{key}: {given[key]!r} is not between 0 and 366 days", key=key, hint="write 90m, 2h, 1-12:00:00"
        )
    return seconds


def _number(given: Mapping[str, object], key: str, *, low: int, high: int) -> int | None:
    if key not in given:
        return None
    value = given[key]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidKey(f"{key}: {value!r} is not a whole number", key=key)
    if not low <= value <= high:
        raise InvalidKey(f"{key}: {value} is not between {low} and {high}", key=key)
    return value


def _flag(given: Mapping[str, object], key: str, *, default: bool = False) -> bool:
    value = given.get(key, default)
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InvalidKey(f"{key}: {value!r} is neither true nor false", key=key)
    return value


def _text(given: Mapping[str, object], key: str) -> str:
    return _word(given[key], key) if key in given else ""


def _table(given: Mapping[str, object], key: str) -> tuple[tuple[str, str], ...]:
    value = given.get(key, {})
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(_pair(item, key) for item in value)
    if not isinstance(value, Mapping):
        raise InvalidKey(f"{key}: must contain names and values", key=key, hint=f"write {key}: {{NAME: value}}")
    return tuple((_word(name, key), "" if text is None else _word(text, key)) for name, text in value.items())


def _pair(item: object, key: str) -> tuple[str, str]:
    name, equals, text = _word(item, key).partition("=")
    if not equals:
        shown = "an entry" if key in _SECRET_KEYS else repr(name[:40])
        raise InvalidKey(f"{key}: {shown} has no '='", key=key, hint="write NAME=value")
    return name, text


def _word(value: object, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        shown = f"a value of kind {type(value).__name__}" if key in _SECRET_KEYS else repr(value)
        raise InvalidKey(f"{key}: {shown} is not text", key=key)
    if "\0" in value:
        raise InvalidKey(f"{key}: contains a NUL byte", key=key)
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidKey(f"{key}: {value[:40]!r} is not UTF-8", key=key)
    return value


def _bounded(spec: JobSpec) -> None:
    """Reject what `exec` on the nodes would reject.

    Raises:
        InvalidKey: one text, or all of them together, is too long.
    """
    texts = [
        *(("run", word) for word in spec.role.argv),
        ("run", spec.role.script),
        ("setup", spec.setup),
        ("on_end", "" if spec.on_end is None else spec.on_end.script),
        ("workdir", spec.workdir),
        *(("env", f"{name}={value}") for name, value in spec.env),
        ("checkpoint", spec.checkpoint),
        ("outputs", spec.outputs),
        *(("data", source) for _, source in spec.data),
    ]
    total = 0
    for key, text in texts:
        size = len(text.encode())
        total += size
        if size > VALUE_BYTES_MAX:
            raise InvalidKey(
                f"{key}: {size} bytes exceed Linux' limit for one argument ({VALUE_BYTES_MAX})",
                key=key,
                hint="put it into a script file",
            )
    if total > REQUEST_BYTES_MAX:
        raise InvalidKey(
            f"command and env together are {total} bytes, over {REQUEST_BYTES_MAX}",
            key="env",
            hint="put it into a file",
        )
