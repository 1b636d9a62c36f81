"""Converts a SkyPilot task to the keys of our job file. Its `run` starts once on each node, as there.

Source: the SkyPilot YAML reference and the schema of tasks, version 0.10 and later, read in November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from typing import Final

from phalanx.user_files.job_imports.job_draft import ImportedJob, JobDraft, SourcePath
from phalanx.user_files.job_imports.shared_terms import (
    gpu_kind,
    gpus_of_nodes,
    node_count,
    put_dataset,
    put_name,
    size_text,
    whole_number,
    with_variables,
    without_value,
)
from phalanx.user_files.yaml_document import FLAG_WORDS, YamlValue

SKY_KEYS: Final = frozenset(
    [
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "setup",
        "run",
        "service",
        "pool",
        "volumes",
        "config",
        "event_callback",
        "execution",
    ]
)
_PREFIX: Final = "SKYPILOT_"
_VARIABLES: Final = {
    "SKYPILOT_NODE_RANK": "$PHALANX_NODE_RANK",
    "SKYPILOT_NODE_IPS": "$PHALANX_NODE_IPS",
    "SKYPILOT_NUM_NODES": "$PHALANX_NNODES",
    "SKYPILOT_NUM_GPUS_PER_NODE": "$PHALANX_GPUS_PER_NODE",
    "SKYPILOT_TASK_ID": "$PHALANX_JOB_ID",
    "SKYPILOT_SERVE_REPLICA_ID": "$PHALANX_JOB_ID",
}
_CLOUD: Final = "Phalanx places jobs on the nodes that it has"
_CHOICE: Final = "only GPUs may be one of several; Phalanx places jobs on the nodes that it has"
_DISK: Final = "nodes have their disks; resources: {scratch: 100GiB} counts scratch space where nodes offer it"
_VOLUME: Final = "nodes have their file systems; datasets are the key data, results go to $PHALANX_OUTPUT_DIR"
_SCALING: Final = "phalanx scale sets the number of replicas, within the range"
_REASONS: Final = {
    **{
        f"resources.{key}": _CLOUD
        for key in ["infra", "cloud", "region", "zone", "instance_type", "network_tier", "max_hourly_cost"]
    },
    "resources.any_of": _CHOICE,
    "resources.ordered": _CHOICE,
    "resources.disk_size": _DISK,
    "resources.disk_tier": _DISK,
    "resources.local_disk": _DISK,
    "resources.ephemeral_storage": _DISK,
    "resources.accelerator_args": "TPUs are not supported",
    "resources.job_recovery": "jobs are always placed again after a failure of a node, and resume from their checkpoint",
    "resources.autostop": "a job ends by itself and its GPUs are free then; idle: 1h parks a session",
    "resources.volumes": _VOLUME,
    "resources.priority_class": "write a number: priority",
    "volumes": _VOLUME,
    "volume_mounts": _VOLUME,
    "pool": "nodes stay up: jobs need no pool of workers",
    "service.pool": "nodes stay up: jobs need no pool of workers",
    "service.workers": "nodes stay up: jobs need no pool of workers",
    "service.replica_policy": _SCALING,
    "service.load_balancing_policy": "the gateway chooses the replica with the fewest requests",
    "service.tls": "the gateway has its own certificate",
    "event_callback": "write notify, or follow the events of the API",
    "config": "operators set how nodes and queues behave",
    "inputs": "the planner is a key of its own: plan",
    "outputs": "the planner is a key of its own: plan",
    "managed_secrets": "secrets are variables: phalanx secrets set NAME, and secrets: [NAME]",
}


def import_sky_task(source: YamlValue) -> ImportedJob:
    """Return the job or service of a task.

    Raises:
        BadFile: it runs nothing, or is not a mapping.
    """
    source.mapping("task")
    draft = JobDraft(source, _REASONS)
    if not draft.text("run"):
        raise source.error("the task has no run: it starts nothing", "write run: and the command")
    is_service = draft.get("service") is not None
    _command(draft)
    put_name(draft, service_key="run" if is_service else "")
    if is_service:
        _service(draft)
    _folder(draft)
    _resources(draft, is_service=is_service)
    _variables(draft)
    for path, value in draft.named_items("file_mounts"):
        _mount(draft, path, value)
    return draft.finish()


def _command(draft: JobDraft) -> None:
    for key in ("run", "setup"):
        script = draft.text(key)
        if script:
            draft.put(key, with_variables(draft, script, (key,), _PREFIX, _VARIABLES), (key,))
        if "~/sky_workdir" in script:
            draft.note((key,), "it names ~/sky_workdir, which is the working directory here")
    draft.put("tasks_per_node", 1, ("run",))


def _folder(draft: JobDraft) -> None:
    folder = draft.text("workdir")
    if folder:
        draft.put("workdir", folder, ("workdir",))
        draft.note(
            ("workdir",), "the nodes use this folder in place; submit with --copy to send them a copy, as SkyPilot does"
        )
    elif draft.get("workdir") is not None:
        draft.leave(("workdir",), "clone the repository, and submit from its folder with --copy")


def _resources(draft: JobDraft, *, is_service: bool) -> None:
    nodes = node_count(draft, "num_nodes")
    found = list(_accelerators(draft, ("resources", "accelerators")))
    for group in ("any_of", "ordered"):
        for path, _ in draft.items("resources", group):
            found += _accelerators(draft, (*path, "accelerators"))
    if found:
        sources = [where for where, _, _ in found] + ([("num_nodes",)] if nodes > 1 else [])
        request = gpus_of_nodes(nodes, [(kind, count) for _, kind, count in found])
        draft.put("gpus", request, sources[0], also=sources[1:])
    elif nodes > 1:
        draft.put("nodes", nodes, ("num_nodes",))
    cpus = draft.text("resources", "cpus")
    if cpus and (number := _number(cpus.rstrip("+"))) is not None:
        draft.put("cpus", ceil(number), ("resources", "cpus"))
        if cpus.endswith("+") or ceil(number) != number:
            draft.note(("resources", "cpus"), f"{ceil(number)} is what the job gets, and not more")
    elif cpus:
        draft.leave(("resources", "cpus"), "write the number of CPUs of a node")
    memory = draft.text("resources", "memory")
    if (
        memory.endswith("x")
        and cpus
        and (number := _number(memory[:-1])) is not None
        and (each := _number(cpus.rstrip("+"))) is not None
    ):
        memory = str(ceil(number * each))
    if memory and (size := size_text(memory)) is not None:
        draft.put("memory", size, ("resources", "memory"))
        if memory.endswith("+"):
            draft.note(("resources", "memory"), f"{size} is what the job gets, and not more")
    elif memory:
        draft.leave(("resources", "memory"), "write the memory of a node: 64 for 64 GiB")
    _image(draft)
    spot = draft.text("resources", "use_spot")
    if spot in FLAG_WORDS:
        draft.put("preemptible", FLAG_WORDS[spot], ("resources", "use_spot"))
    elif spot:
        draft.leave(("resources", "use_spot"), "write preemptible: true or false")
    if priority := draft.text("resources", "priority"):
        draft.put(
            "priority",
            int(priority) if re.fullmatch(r"-?[0-9]{1,6}", priority) else priority,
            ("resources", "priority"),
        )
    for path, value in draft.named_items("resources", "labels"):
        if isinstance(value.content, str):
            draft.put("labels", value.content, path, item=str(path[-1]))
    if restarts := draft.text("resources", "job_recovery", "max_restarts_on_errors"):
        where = ("resources", "job_recovery", "max_restarts_on_errors")
        if is_service:
            draft.leave(where, "a service replaces each replica that fails")
        else:
            count = whole_number(restarts)
            draft.put("retry", restarts if count is None else count, where)
    if not is_service:
        for path, value in draft.items("resources", "ports"):
            _web_port(draft, path, value)


def _accelerators(draft: JobDraft, path: SourcePath) -> Iterator[tuple[SourcePath, str, str]]:
    """Paths, models and numbers: of `H100:8`, a list of such, `{H100: 8}`, or a set `{H100:8, A100:8}`."""
    for where, value in draft.items(*path):
        text = str(where[-1]) if value.is_null and where != path else value.text(str(where[-1]))
        if not value.is_null and where[-1] != path[-1] and not isinstance(where[-1], int):
            text = f"{where[-1]}:{text}"
        name, _, count = text.partition(":")
        if name.lower().startswith("tpu"):
            draft.leave(where, "TPUs are not supported")
            continue
        draft.take(where)
        yield where, gpu_kind(name), count.strip().rstrip("+") or "1"


def _image(draft: JobDraft) -> None:
    where = ("resources", "image_id")
    image = draft.text(*where)
    if image.startswith("docker:"):
        draft.put("image", image.removeprefix("docker:"), where)
    elif image:
        draft.leave(where, "it is an image of a machine in a cloud; image names one of containers")


def _web_port(draft: JobDraft, path: SourcePath, value: YamlValue) -> None:
    port = value.text("ports").strip()
    if port.isdecimal():
        draft.put("ports", port, path, item="")
    else:
        draft.leave(path, "name each port")


def _service(draft: JobDraft) -> None:
    probe = ("service", "readiness_probe")
    for where in (probe, (*probe, "path")):
        if url := draft.text(*where):
            draft.put("ready", url, where)
    if delay := draft.text(*probe, "initial_delay_seconds"):
        draft.put("ready_within", f"{delay}s", (*probe, "initial_delay_seconds"))
    for port in (("service", "ports"), ("resources", "ports")):
        for path, value in draft.items(*port):
            draft.put("port", value.text("ports"), path)
    low, high = (draft.text("service", "replica_policy", key) for key in ("min_replicas", "max_replicas"))
    policy = ("service", "replica_policy")
    if high:
        draft.put(
            "replicas",
            f"{low or 1}..{high}",
            (*policy, "max_replicas"),
            also=[(*policy, "min_replicas")] if low else [],
        )
    elif low:
        draft.put("replicas", low, (*policy, "min_replicas"))
    elif replicas := draft.text("service", "replicas"):
        draft.put("replicas", replicas, ("service", "replicas"))


def _variables(draft: JobDraft) -> None:
    for path, value in draft.named_items("envs"):
        name = str(path[-1])
        if value.is_null or value.content == "":
            draft.leave(path, without_value(name))
        elif isinstance(value.content, str):
            draft.put("env", value.content, path, item=name)
    for path, value in draft.named_items("secrets"):
        name = str(value.content if isinstance(path[-1], int) else path[-1])
        draft.put("secrets", name, path, item="")
        draft.note(path, f"its value is not written here: phalanx secrets set {name}")


def _mount(draft: JobDraft, path: SourcePath, value: YamlValue) -> None:
    """A bucket or a folder that SkyPilot puts at a path."""
    where = (*path, "source") if isinstance(value.content, dict) else path
    address = draft.text(*where)
    for variable, one in draft.named_items("envs"):
        if isinstance(one.content, str):
            address = address.replace(f"${{{variable[-1]}}}", one.content)
    if not address:
        draft.leave(path, "results of a job go to $PHALANX_OUTPUT_DIR, which phalanx get fetches")
        return
    put_dataset(draft, str(path[-1]), address, where)
    mode = draft.text(*path, "mode")
    if mode:
        draft.note((*path, "mode"), f"{mode}: it is copied before the ranks start, and cannot be written to")


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,3})?", text) else None
