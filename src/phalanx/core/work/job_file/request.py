"""Turns a mapping, from a job file or a request body, into a JobSpec. The command line and the head call the same function.

Pure: it reads no file and no clock. Callers that know the line of a key or the flag it came from catch `InvalidKey` and add it; `BadRequest`
is raised for readable values that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.topology import NODE_LEVEL
from phalanx.core.ids import NodeId
from phalanx.core.units import parse_memory_bytes
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
from phalanx.core.work.job_file.command import command_of, job_name_of, launch_mode_of
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.data_sources import parse_data
from phalanx.core.work.job_file.key_values import (
    PRINTABLE,
    read_duration_s,
    read_flag,
    read_key,
    read_number,
    read_table,
    read_text,
)
from phalanx.core.work.job_file.keys import InvalidKey, check_key
from phalanx.core.work.job_file.notify import parse_notify
from phalanx.core.work.job_file.on_end import ENDED_VARIABLES, parse_on_end
from phalanx.core.work.job_file.places import (
    read_checkpoint,
    read_image,
    read_outputs,
    read_software,
    read_upload,
    read_workdir,
)
from phalanx.core.work.job_file.plan_key import parse_plan, with_gpus_for_plan
from phalanx.core.work.job_file.requirements import parse_requirements
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

VALUE_BYTES_MAX: Final = 131_000  # Linux refuses one argument or variable of 128 KiB (MAX_ARG_STRLEN)
REQUEST_BYTES_MAX: Final = (
    1 << 20
)  # half of Linux' default for arguments and environment together; the rest is the node's own
_PRIORITY_MAX: Final = 10_000
_RETRY_MAX: Final = 100  # with more retries the command is broken, not unlucky
_TASKS_PER_NODE_MAX: Final = 4096
_CPUS_MAX: Final = 65_536
_NODES_MAX: Final = 1_000_000
_LABELS_MAX: Final = 64

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
_SET_BY_PHALANX: Final = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"})
_OURS_TO_SET: Final = frozenset({"PHALANX_URL", "PHALANX_TOKEN", "PHALANX_HOME"})  # a job may call a head


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
    given = _given_keys(mapping)
    argv, script = command_of(given)
    array = read_key(given, "array", parse_array, None)
    name = job_name_of(given, argv, script)
    service = parse_service_terms(given, name)
    plan = parse_plan(given.get("plan", ""))
    data, mode = _data(given)
    software, listed = read_software(given)
    role = _role(given, argv, script, service, plan)
    spec = JobSpec(
        name=name,
        role=role,
        workdir=read_workdir(given, workdir),
        upload=read_upload(given),
        env=_env(given),
        secrets=_secrets(given),
        ports=read_key(given, "ports", parse_web_ports, ()),
        notify=read_key(given, "notify", parse_notify, None),
        on_end=read_key(given, "on_end", parse_on_end, None),
        setup=read_text(given, "setup"),
        requirements=listed or read_key(given, "requirements", parse_requirements, ""),
        software=software,
        data=data,
        data_mode=mode,
        image=read_image(given),
        project=read_text(given, "project"),
        queue=read_text(given, "queue"),
        priority=read_number(given, "priority", low=-_PRIORITY_MAX, high=_PRIORITY_MAX) or 0,
        time_limit_s=read_duration_s(given, "time", None),
        terminal=read_flag(given, "terminal"),
        idle_s=read_duration_s(given, "idle", None),
        retry=read_number(given, "retry", low=0, high=_RETRY_MAX) or 0,
        checkpoint=read_checkpoint(given, workdir),
        outputs=read_outputs(given),
        warm=read_flag(given, "warm"),
        hold=read_flag(given, "hold"),
        allow_never=read_flag(given, "allow_never"),
        grace_s=read_duration_s(given, "grace", GRACE_DEFAULT_S) or GRACE_DEFAULT_S,
        collective_timeout_s=read_duration_s(given, "collective_timeout", COLLECTIVE_TIMEOUT_DEFAULT_S)
        or COLLECTIVE_TIMEOUT_DEFAULT_S,
        labels=_labels(given),
        dependencies=_dependencies(given, array),
        array="" if array is None else str(array),
        array_max=None if array is None else array.running_max,
        begin_s=read_key(given, "begin", lambda value: parse_begin_s(value, now_s=now_s), None),
        topology=_topology(given, role),
        reservation=read_text(given, "reservation").strip(),
        preemptible=read_flag(given, "preemptible", default=service is None),
        saves_on_stop=read_flag(given, "saves_on_stop"),
        plan=plan,
        nodelist=_hosts(given, "nodelist"),
        exclude=_hosts(given, "exclude"),
        slurm=_slurm(given),
        speeds=parse_speeds(read_table(given, "speeds")),
        planned_speeds=parse_speeds(read_table(given, "planned_speeds"), key="planned_speeds"),
        service=service,
    )
    _check_combinations(spec, given)
    _bounded(spec)
    return spec


def _given_keys(mapping: Mapping[str, object]) -> dict[str, object]:
    """The keys with a value.

    Raises:
        InvalidKey: an unknown key.
    """
    given = {key: value for key, value in mapping.items() if value is not None}
    for key in given:
        check_key(key)
    return given


def _check_combinations(spec: JobSpec, given: Mapping[str, object]) -> None:
    """Reject what cannot be combined.

    Raises:
        InvalidKey: a terminal with an array or an image.
        BadRequest: what a gang of several roles cannot have.
    """
    if spec.role.others:
        _check_roles(spec)
    for key in ("array", "image"):
        if spec.terminal and given.get(key):
            raise InvalidKey(
                f"terminal and {key} cannot be combined", key="terminal", hint=f"leave out {key}, or terminal"
            )


def _role(
    given: Mapping[str, object], argv: tuple[str, ...], script: str, service: ServiceTerms | None, plan: str
) -> Role:
    """What each task runs, and on what.

    Raises:
        InvalidKey: an invalid value, or replicas that sleep though they have no whole GPUs.
    """
    tasks = read_number(given, "tasks_per_node", low=1, high=_TASKS_PER_NODE_MAX)
    if service is not None and tasks is None:
        tasks = 1  # a server itself uses all devices of its node
    role = with_gpus_for_plan(
        Role(
            argv=argv,
            script=script,
            gpus=_gpus(given),
            cpus=read_number(given, "cpus", low=0, high=_CPUS_MAX) or 0,
            memory_bytes=read_key(given, "memory", parse_memory_bytes, 0),
            extras=read_key(given, "resources", parse_extras, ()),
            launch=launch_mode_of(argv, script, tasks, starts_alone=bool(given.get("slurm")) or service is not None),
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
        components = read_components(dict(read_table(given, "slurm")).get("components", ""))
    except ValueError as error:
        raise InvalidKey(f"slurm: {error}", key="slurm") from None
    return tuple(
        Role(
            gpus=_gpus(one),
            cpus=read_number(one, "cpus", low=0, high=_CPUS_MAX) or 0,
            memory_bytes=read_key(one, "memory", parse_memory_bytes, 0),
            extras=read_key(one, "resources", parse_extras, ()),
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


def _gpus(given: Mapping[str, object]) -> GpuRequest:
    nodes = given.get("nodes")
    fewest: int | None
    most: int | None = None
    if isinstance(nodes, str) and ".." in nodes:
        fewest, most = read_key(given, "nodes", parse_nodes, (1, most))
    else:
        fewest = read_number(given, "nodes", low=1, high=_NODES_MAX)
    gpus = combine_gpu_options(
        read_key(given, "gpus", parse_gpus, None),
        fewest,
        read_number(given, "gpus_per_node", low=0, high=_NODES_MAX),
        most,
    )
    gpus = with_share_kind(gpus, read_text(given, "share"))
    return fixed_to_one_node(gpus) if read_text(given, "within").strip().lower() == NODE_LEVEL else gpus


# ---- where it runs, and with what -----------------------------------------------------------------------------------


def _env(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = read_table(given, "env")
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
        read_key({**given, "data": dict(read_table(given, "data"))}, "data", parse_data, none)
        if given.get("data")
        else none
    )


def _secrets(given: Mapping[str, object]) -> tuple[str, ...]:
    none: tuple[str, ...] = ()
    names = read_key(given, "secrets", parse_secret_names, none)
    for name in names:
        if name in _SET_BY_PHALANX:
            raise InvalidKey(
                f"secrets: {name} is set by Phalanx for every task", key="secrets", hint="use another name"
            )
        if any(name == one for one, _ in read_table(given, "env")):
            raise InvalidKey(f"{name} is in env and in secrets", key="secrets", hint="remove it from env")
    return names


def _dependencies(given: Mapping[str, object], array: ArrayRequest | None) -> tuple[Dependency, ...]:
    none: tuple[Dependency, ...] = ()
    found = read_key(given, "depends_on", parse_dependencies, none)
    pairs = next((one for one in found if one.kind is DependencyKind.AFTER_CORR), None)
    if pairs is not None and array is None:
        raise InvalidKey(
            f"depends_on: {pairs} pairs the elements of two arrays, but this job is not an array",
            key="depends_on",
            hint=f"write afterok:{pairs.job_id}, or add array: with the same elements",
        )
    return found


def _topology(given: Mapping[str, object], role: Role) -> TopologyConstraint:
    return parse_topology_constraint(
        role.gpus,
        within=read_text(given, "within"),
        prefer=read_text(given, "prefer"),
        slice_nodes=read_number(given, "slice", low=1, high=_NODES_MAX) or 0,
        slice_within=read_text(given, "slice_within"),
    )


def _hosts(given: Mapping[str, object], key: str) -> tuple[NodeId, ...]:
    none: tuple[str, ...] = ()
    names = read_key(given, key, lambda value: expand_hostlist(str(value)), none) if given.get(key) else none
    return tuple(NodeId(name) for name in names)


def _slurm(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = read_table(given, "slurm")
    for name, value in pairs:
        if name not in SLURM_KEYS:
            raise InvalidKey(
                f"slurm: unknown word {name!r}", key="slurm", hint=f"known: {' '.join(sorted(SLURM_KEYS))}"
            )
        if "\n" in value and name != "args":
            raise InvalidKey(f"slurm: {name} contains a line break", key="slurm")
    return pairs


def _labels(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    pairs = read_table(given, "labels")
    if len(pairs) > _LABELS_MAX:
        raise InvalidKey(f"labels: {len(pairs)} labels; at most {_LABELS_MAX} are allowed", key="labels")
    for name, value in pairs:
        if not _LABEL.fullmatch(name) or len(value) > 256 or (value and not PRINTABLE.fullmatch(value)):
            raise InvalidKey(
                f"labels: {name!r}: {value[:40]!r} is not a label",
                key="labels",
                hint="short names and printable values",
            )
    return pairs


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
