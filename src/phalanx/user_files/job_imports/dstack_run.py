"""Converts a run of dstack (a task, a service or a dev environment) to the keys of our job file. Its commands start once on each node, as there.

Source: dstack's reference of `.dstack.yml` and its configuration models, version 0.20, read in November 2026.
"""

from __future__ import annotations

import re
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

DSTACK_TYPES: Final = ("task", "service", "dev-environment")
OTHER_TYPES: Final = ("fleet", "gateway", "volume")
_PREFIX: Final = "DSTACK_"
_VARIABLES: Final = {
    "DSTACK_NODE_RANK": "$PHALANX_NODE_RANK",
    "DSTACK_NODES_NUM": "$PHALANX_NNODES",
    "DSTACK_NODES_IPS": "$PHALANX_NODE_IPS",
    "DSTACK_MASTER_NODE_IP": "$MASTER_ADDR",
    "DSTACK_GPUS_PER_NODE": "$PHALANX_GPUS_PER_NODE",
    "DSTACK_GPUS_NUM": "$PHALANX_NUM_GPUS",
    "DSTACK_MPI_HOSTFILE": "$PHALANX_HOSTFILE",
    "DSTACK_RUN_NAME": "$PHALANX_JOB_ID",
    "DSTACK_RUN_ID": "$PHALANX_JOB_ID",
    "DSTACK_WORKING_DIR": "$PWD",
    "DSTACK_REPO_DIR": "$PWD",
}
_VENDORS: Final = frozenset({"nvidia", "amd", "intel", "tenstorrent", "google", "tpu"})
_SECRET: Final = re.compile(r"\$\{\{\s*secrets\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_SHELL: Final = 'exec "${SHELL:-bash}" -l'
_RETRY_MAX: Final = 100
_CLOUD: Final = "Phalanx places jobs on the nodes that it has"
_CONTAINER: Final = "processes in an image have your own account, and no further privileges"
_GATEWAY: Final = "the gateway of the cluster serves all services, with tokens of Phalanx"
_FILES: Final = "submit with --copy from the folder that has these files"
_REASONS: Final = {
    **dict.fromkeys(
        [
            "backends",
            "regions",
            "availability_zones",
            "instance_types",
            "fleets",
            "instance_name",
            "pool_name",
            "creation_policy",
            "max_price",
        ],
        _CLOUD,
    ),
    "idle_duration": "nodes stay up",
    "termination_policy": "nodes stay up",
    "termination_idle_time": "nodes stay up",
    "user": _CONTAINER,
    "privileged": _CONTAINER,
    "docker": _CONTAINER,
    "home_dir": _CONTAINER,
    "registry_auth": "a node pulls images with the login of the account that runs jobs",
    "entrypoint": "the entrypoint of an image does not run; run has the whole command",
    "python": "jobs use the Python of the node, of an image, or of software: {uv: uv.lock}",
    "nvcc": "use software: {modules: [cuda/12]}, or an image",
    "working_dir": "it is a folder of dstack's container; workdir is a folder that nodes see",
    "repos": _FILES,
    "repo": _FILES,
    "single_branch": _FILES,
    "files": _FILES,
    "resources.shm_size": "jobs have the shared memory of the node",
    "resources.disk": "nodes have their disks; resources: {scratch: 100GiB} counts scratch space where nodes offer it",
    "resources.gpu.total_memory": "write the memory of one GPU: gpus: any-24gb:2",
    "resources.gpu.compute_capability": "name the models: gpus: h100,a100:8",
    "scaling": "phalanx scale sets the number of replicas, within the range",
    "gateway": _GATEWAY,
    "auth": _GATEWAY,
    "https": _GATEWAY,
    "strip_prefix": _GATEWAY,
    "rate_limits": _GATEWAY,
    "router": _GATEWAY,
    "probes": "ready is one path, which answers with status 200 to 399",
    "model": "the gateway's name of the model is that of the service: start the engine with --served-model-name $PHALANX_SERVICE",
    "ide": "phalanx dev --ide code opens VS Code in a browser; phalanx config ssh lets an editor of your machine connect",
    "version": "the editor is the one that is installed",
    "utilization_policy": "queues have idle policies: phalanx queues",
    "schedule": "begin: 16:00 starts it later, once",
    "startup_order": "all nodes of a job start together",
    "stop_criteria": "a job ends when all its nodes have ended, or one has failed",
    "retry_policy": "write retry: and the number of restarts",
}


def import_dstack_run(source: YamlValue) -> ImportedJob:
    """Return the job or service of a run.

    Raises:
        BadFile: it runs nothing, or is not a mapping.
    """
    source.mapping("run")
    draft = JobDraft(source, _REASONS)
    kind = draft.text("type")
    _command(draft, kind)
    put_name(draft, service_key="type" if kind == "service" else "")
    if kind == "service":
        _service(draft)
    _resources(draft)
    _variables(draft)
    _times(draft, kind)
    if image := draft.text("image"):
        draft.put("image", image, ("image",))
    for path, value in draft.items("ports"):
        _web_port(draft, path, value)
    for path, value in draft.named_items("volumes"):
        _volume(draft, path, value)
    return draft.finish()


def _command(draft: JobDraft, kind: str) -> None:
    key = "init" if kind == "dev-environment" else "commands"
    lines = []
    for path, value in draft.items(key):
        if isinstance(value.content, str):
            draft.take(path)
            lines.append(value.content)
    if kind == "dev-environment":
        draft.put("terminal", True, ("type",))
        draft.put("preemptible", False, ("type",))
        draft.note(
            ("type",), "it is a job with a terminal: phalanx shell JOB; phalanx dev starts such sessions by one command"
        )
        lines.append(_SHELL)
    if not lines:
        raise draft.error("the run has no commands; the entrypoint of an image does not run here", "write commands:")
    script = "\n".join(lines)
    if len(lines) > 1:
        script = f"set -e\n{script}"  # each command runs only if the one before it succeeded, as there
    draft.put("run", with_variables(draft, script, (key,), _PREFIX, _VARIABLES), ("type",))
    draft.put("tasks_per_node", 1, ("type",))
    if (shell := draft.text("shell")) and shell not in ("bash", "/bin/bash"):
        draft.leave(("shell",), "scripts run in bash; name another shell in the command")


def _resources(draft: JobDraft) -> None:
    nodes = node_count(draft, "nodes")
    request = _gpus(draft, nodes)
    if request:
        draft.put("gpus", request, ("resources", "gpu"), also=[("nodes",)] if nodes > 1 else [])
    elif nodes > 1:
        draft.put("nodes", nodes, ("nodes",))
    if cpu := draft.text("resources", "cpu"):
        words = [word for word in cpu.split(":") if word.strip()[:1].isdigit()]
        number = whole_number(_lower(draft, ("resources", "cpu"), words[0] if words else ""))
        if number is not None:
            draft.put("cpus", number, ("resources", "cpu"))
        else:
            draft.leave(("resources", "cpu"), "write the number of CPUs of a node: cpus: 16")
    if memory := draft.text("resources", "memory"):
        size = size_text(_lower(draft, ("resources", "memory"), memory))
        if size is not None:
            draft.put("memory", size, ("resources", "memory"))
        else:
            draft.leave(("resources", "memory"), "write the memory of a node: memory: 64G")
    if priority := draft.text("priority"):
        number = whole_number(priority)
        draft.put("priority", priority if number is None else number, ("priority",))
    match draft.text("spot_policy"):
        case "spot":
            draft.put("preemptible", True, ("spot_policy",))
        case "on-demand":
            draft.put("preemptible", False, ("spot_policy",))
        case "":
            pass
        case _:
            draft.leave(("spot_policy",), "write preemptible: true or false")


def _gpus(draft: JobDraft, nodes: int) -> str:
    """The request of `resources.gpu`: `H100`, `24GB..:2`, `A100:80GB:8`, a number, or a mapping; empty for none."""
    where: SourcePath = ("resources", "gpu")
    found = draft.get(*where)
    if found is None:
        return ""
    names: list[str] = []
    memory = count = ""
    if isinstance(found.content, str):
        for word in draft.text(*where).replace(" ", "").split(":"):
            if word.lower() in _VENDORS:
                _vendor(draft, where, word)
            elif word[:1].isalpha():
                names = word.split(",")
            elif re.search(r"[a-zA-Z]", word):
                memory = word
            else:
                count = word
    else:
        names = [value.text("name") for path, value in draft.items(*where, "name")]
        for path, _ in draft.items(*where, "name"):
            draft.take(path)
        memory, count = draft.text(*where, "memory"), draft.text(*where, "count")
        if vendor := draft.text(*where, "vendor"):
            _vendor(draft, (*where, "vendor"), vendor)
    if any(name.lower().startswith("tpu") for name in names):
        draft.leave(where, "TPUs are not supported")
        return ""
    least = size_text(_lower(draft, where, memory)) if memory else None
    number = _lower(draft, where, count) if count else "1"
    if count and not number.isdecimal():
        draft.leave(where, f"{count[:20]} is not a number of GPUs")
        return ""
    if number == "0":
        draft.note(where, "no GPU")
        return ""
    suffix = (
        f"-{least.removesuffix('G')}gb" if least is not None and least.endswith("G") and least[:-1].isdecimal() else ""
    )
    if memory and not suffix:
        draft.note(where, "the memory of a GPU is a whole number of GB, such as any-24gb:2")
    kinds = [f"{gpu_kind(name)}{suffix}" for name in names] or ([f"any{suffix}"] if suffix else [""])
    return gpus_of_nodes(nodes, [(kind, number) for kind in kinds])


def _vendor(draft: JobDraft, where: SourcePath, vendor: str) -> None:
    draft.note(where, f"the vendor {vendor[:20]} is not taken over: GPUs are named by their model, h100 or mi300x")


def _lower(draft: JobDraft, where: SourcePath, text: str) -> str:
    """The lower end of a range, `4..8`, which is what a job asks for; notes the upper one."""
    low, dots, high = text.replace(" ", "").partition("..")
    if dots and high:
        draft.note(where, f"{(low or high)[:40]} is taken of the range {text[:40]}")
    return low or high


def _variables(draft: JobDraft) -> None:
    for path, value in draft.named_items("env"):
        if not isinstance(value.content, str):
            continue
        name, equals, text = (
            value.content.partition("=") if isinstance(path[-1], int) else (str(path[-1]), "=", value.content)
        )
        if secret := _SECRET.fullmatch(text.strip()):
            draft.put("secrets", name, path, item="")
            draft.note(path, f"it is the secret {secret[1]}: phalanx secrets set {name}")
        elif equals and not (value.is_null and isinstance(path[-1], str)):
            draft.put("env", text, path, item=name)
        else:
            draft.leave(path, without_value(name))


def _times(draft: JobDraft, kind: str) -> None:
    for key, ours in (("max_duration", "time"), ("stop_duration", "grace"), ("inactivity_duration", "idle")):
        limit = draft.text(key)
        if not limit:
            continue
        if limit in FLAG_WORDS or limit == "off":
            if FLAG_WORDS.get(limit):
                draft.leave((key,), f"write {ours}: 2h")
            else:
                draft.note((key,), f"off: {ours} is left out")
            continue
        draft.put(ours, f"{limit}s" if limit.isdecimal() else limit, (key,))
        if ours == "time":
            draft.note((key,), "time limits one attempt, counted from its start")
    retry = draft.get("retry")
    if retry is None:
        return
    if isinstance(retry.content, str):
        if FLAG_WORDS.get(word := draft.text("retry")):
            _retry(draft, ("retry",), kind)
        elif word not in FLAG_WORDS:
            draft.leave(("retry",), "write retry: and the number of restarts")
        return
    for path, value in draft.items("retry", "on_events"):
        if value.content == "error":
            _retry(draft, path, kind)
        else:
            draft.note(path, "jobs always wait for free nodes, and are placed again after a failure of one")


def _retry(draft: JobDraft, where: SourcePath, kind: str) -> None:
    if kind == "service":
        draft.leave(where, "a service replaces each replica that fails")
        return
    draft.put("retry", _RETRY_MAX, where)
    draft.note(where, f"it is started again at most {_RETRY_MAX} times after an error")


def _web_port(draft: JobDraft, path: SourcePath, value: YamlValue) -> None:
    local, colon, port = value.text("ports").rpartition(":")
    draft.put("ports", port, path, item="")
    if colon and local not in ("*", port):
        draft.note(path, f"the head has a page for it; phalanx port-forward JOB {local}:{port} opens port {local} here")


def _service(draft: JobDraft) -> None:
    if port := draft.text("port"):
        draft.put("port", port.rpartition(":")[2], ("port",))
    if replicas := draft.text("replicas"):
        draft.put("replicas", f"0{replicas}" if replicas.startswith("..") else replicas, ("replicas",))
    for path, value in draft.named_items("probes"):
        content = value.content
        if path[-1] == 0 and isinstance(content, dict):
            draft.text(*path, "type")
            draft.put("ready", draft.text(*path, "url") or "/", (*path, "url" if "url" in content else "type"))


def _volume(draft: JobDraft, path: SourcePath, value: YamlValue) -> None:
    """A folder of the node is a dataset; a network volume of dstack is not here."""
    if isinstance(value.content, dict):
        source, target = draft.text(*path, "instance_path"), draft.text(*path, "path")
    else:
        source, _, target = value.text("volumes").partition(":")
    if source.startswith("/"):
        put_dataset(draft, target, source, path)
    else:
        draft.leave(
            path, "volumes of dstack are not here; datasets are the key data, results go to $PHALANX_OUTPUT_DIR"
        )
