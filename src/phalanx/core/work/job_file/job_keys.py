"""The keys of a job file that give a spec: the inverse of `core.work.job_file.request.spec_from_mapping`.

What the head derives when it accepts a job (seats of licences, slices of a MIG profile, the key of a gang) is left to it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.ids import NodeId
from phalanx.core.resources import Extras
from phalanx.core.units import GIB, MIB, exact_duration
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.begin_time import begin_text
from phalanx.core.work.job_file.command import plain_command_words
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.job_file.notify import DEFAULT_EVENTS, NotifyTerms
from phalanx.core.work.job_file.on_end import ON_END_LIMIT_S, OnEnd
from phalanx.core.work.job_file.software import Software
from phalanx.core.work.job_file.web_ports import WebPort
from phalanx.core.work.services.service_terms import READY_TCP, READY_WITHIN_DEFAULT_S, ServiceTerms
from phalanx.core.work.share import ShareKind
from phalanx.core.work.spec import COLLECTIVE_TIMEOUT_DEFAULT_S, GRACE_DEFAULT_S, JobSpec, Role

_KIB: Final = 1 << 10


def job_keys(spec: JobSpec, *, now_s: float) -> dict[str, object]:
    """The keys that give this spec again, in the order of `KEY_KINDS`, without those that have their default.

    Args:
        spec: the spec; for an array with its elements.
        now_s: Unix time. A begin before it has no effect any more and is left out.
    """
    found = {key: value for key, value in _keys(spec, now_s) if value not in ("", None, False, (), [], {})}
    if spec.service is not None and spec.preemptible:
        found["preemptible"] = True
    elif spec.service is None and not spec.preemptible:
        found["preemptible"] = False
    return {key: found[key] for key in KEY_KINDS if key in found}


def _keys(spec: JobSpec, now_s: float) -> Iterator[tuple[str, object]]:
    role = spec.role
    yield "name", spec.name
    yield "run", _run(role)
    yield from _gpus(role.gpus)
    yield "tasks_per_node", None if spec.service is not None and role.tasks_per_node == 1 else role.tasks_per_node
    yield "cpus", role.cpus or None
    yield "memory", _memory_text(role.memory_bytes)
    yield "resources", _extras_texts((*role.extras, *role.licences))
    for key in (
        "workdir",
        "upload",
        "setup",
        "requirements",
        "image",
        "project",
        "queue",
        "checkpoint",
        "outputs",
        "plan",
    ):
        yield key, getattr(spec, key)
    for key in ("reservation", "warm", "hold", "terminal", "allow_never", "saves_on_stop"):
        yield key, getattr(spec, key)
    for key in ("env", "labels", "slurm"):
        yield key, dict(getattr(spec, key))
    yield "secrets", list(spec.secrets)
    yield "notify", _notify(spec.notify)
    yield "on_end", _on_end(spec.on_end)
    yield "ports", _ports(spec.ports)
    yield (
        "data",
        {**({"mode": spec.data_mode.value} if spec.data_mode is not DataMode.STAGE else {}), **dict(spec.data)},
    )
    yield "software", _software(spec.software)
    yield "priority", spec.priority or None
    yield "retry", spec.retry or None
    yield "time", None if spec.time_limit_s is None else exact_duration(spec.time_limit_s)
    yield "idle", None if spec.idle_s is None else exact_duration(spec.idle_s)
    yield "grace", _unless(GRACE_DEFAULT_S, spec.grace_s)
    yield "collective_timeout", _unless(COLLECTIVE_TIMEOUT_DEFAULT_S, spec.collective_timeout_s)
    yield "depends_on", [str(one) for one in spec.dependencies]
    yield "array", spec.array + (f"%{spec.array_max}" if spec.array and spec.array_max is not None else "")
    yield "begin", None if spec.begin_s is None or spec.begin_s <= now_s else begin_text(spec.begin_s)
    yield "within" if spec.topology.required else "prefer", spec.topology.within
    yield "slice", spec.topology.slice_nodes or None
    yield "slice_within", spec.topology.slice_within
    yield "nodelist", _hosts_text(spec.nodelist)
    yield "exclude", _hosts_text(spec.exclude)
    yield "speeds", {model: repr(speed) for model, speed in spec.speeds}
    yield "planned_speeds", {model: repr(speed) for model, speed in spec.planned_speeds}
    if spec.service is not None:
        yield from _service(spec.service)


def _run(role: Role) -> str | list[str]:
    """The command as one line if that line gives the same words, else as a list; a shell text as it is."""
    line = " ".join(role.argv)
    return role.script or (line if plain_command_words(line) == role.argv else list(role.argv))


def _gpus(gpus: GpuRequest) -> Iterator[tuple[str, object]]:
    """The grammar has no shape without devices: then the nodes have a key of their own."""
    if gpus.nodes is not None and not gpus.per_node and gpus.share is None:
        yield "gpus", gpus.kinds_text and f"{gpus.kinds_text}:0"
        yield "nodes", gpus.nodes
        return
    text = str(gpus)
    yield "gpus", None if text == "0" else int(text) if text.isdecimal() else text
    kinds = {one.share.kind for one in gpus.choices if one.share is not None and not one.share.profile}
    yield "share", next((kind.value for kind in kinds if kind is not ShareKind.MPS), None)


def _software(software: Software) -> dict[str, object]:
    named = {one.name: getattr(software, one.name) for one in fields(software)}
    return {form: list(value) if isinstance(value, tuple) else value for form, value in named.items() if value}


def _notify(terms: NotifyTerms | None) -> dict[str, list[str]]:
    if terms is None:
        return {}
    return {"to": list(terms.to)} | ({} if terms.on == DEFAULT_EVENTS else {"on": [event.value for event in terms.on]})


def _on_end(command: OnEnd | None) -> str | dict[str, str]:
    if command is None or command.time_limit_s == ON_END_LIMIT_S:
        return "" if command is None else command.script
    return {"run": command.script, "time": exact_duration(command.time_limit_s)}


def _memory_text(size: int) -> str:
    """The size in the largest unit that gives a whole number, else in KiB: half a byte more, as parsing rounds down."""
    for unit, letter in ((GIB, "G"), (MIB, "M"), (_KIB, "K")):
        if size and size % unit == 0:
            return f"{size // unit}{letter}"
    return f"{(size + 0.5) / _KIB:.9f}K" if size else ""


def _extras_texts(extras: Extras) -> dict[str, str]:
    """Counts as they are; sizes, which are whole MiB, with their unit."""
    return {name: str(amount) if amount < MIB else _memory_text(amount) for name, amount in extras}


def _ports(ports: tuple[WebPort, ...]) -> list[str] | dict[str, str]:
    texts = [f"{one.port}{':keep-path' if one.keep_path else ''}" for one in ports]
    if ports and all(one.name for one in ports):
        return {one.name: text for one, text in zip(ports, texts, strict=True)}
    return [f"{one.name}={text}" if one.name else text for one, text in zip(ports, texts, strict=True)]


def _unless(default_s: float, seconds: float) -> str | None:
    return None if seconds == default_s else exact_duration(seconds)


def _hosts_text(names: tuple[NodeId, ...]) -> str:
    folded = fold_hostlist(list(names)) if names else ""
    return folded if folded and expand_hostlist(folded) == names else ",".join(names)


def _service(terms: ServiceTerms) -> Iterator[tuple[str, object]]:
    yield "type", "service"
    yield "replicas", terms.range_text
    yield "port", terms.port or None
    yield "ready", "" if terms.ready == READY_TCP else terms.ready
    yield "ready_within", _unless(READY_WITHIN_DEFAULT_S, terms.ready_within_s)
    yield "sleep", terms.sleep
    yield "wake", terms.wake
    yield "scale", {} if terms.scale is None else terms.scale.keys()
    yield "update", {} if terms.rollout is None else terms.rollout.keys()
    yield "prefill_for", {} if terms.prefill is None else terms.prefill.keys()
