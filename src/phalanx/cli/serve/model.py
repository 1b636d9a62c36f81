"""`phalanx serve model`: serves a model without a job file: finds an engine for its weights, checks that they fit, and composes the file."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.connection import connect, shares_file_system
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_options import override_options
from phalanx.cli.jobs.request.job_request import (
    DoubleDashCommand,
    changed_mapping,
    job_request_again,
    words_after_dashes,
)
from phalanx.cli.serve.inference_engines import (
    COMMAND,
    ENGINE_NAMES,
    ENGINES,
    InferenceEngine,
    engine_command,
    engines_for,
    own_command,
)
from phalanx.cli.serve.model_files import ModelFiles, read_model_files
from phalanx.cli.serve.model_gpus import GpuModel, asked_gpus, candidate_nodes, fitting_shape, gpu_models
from phalanx.cli.serve.model_source import find_job_model
from phalanx.cli.serve.node_probe import NodeAnswer, ask_node
from phalanx.cli.serve.rollout_options import apply_service, rollout_options
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.units import format_duration
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.services.service_terms import (
    READY_TCP,
    READY_WITHIN_DEFAULT_S,
    READY_WITHIN_MAX_S,
    SERVICE_NAME_MAX,
)

if TYPE_CHECKING:
    from phalanx.client import Client

_LOAD_BYTES_PER_S: Final = 100e6  # slowest network disk that a start is not stopped for
# Options of jobs that end, or of how a job's own program starts and saves.
_NOT_OF_SERVICES: Final = frozenset(
    [
        "array",
        "begin",
        "hold",
        "depends_on",
        "time",
        "idle",
        "retry",
        "warm",
        "plan",
        "scale_down",
        "terminal",
        "checkpoint",
        "saves_on_stop",
        "collective_timeout",
        "data",
        "data_mode",
        "ports",
        "copy",
        "workdir",
        "tasks_per_node",
        "requirements",
        "uv",
        "allow_never",
        "slice",
        "slice_within",
        "gpus_per_node",
        "notify",
        "notify_on",
        "on_end",
        "outputs",
        "preemptible",  # services are not, unless a file says so
    ]
)
# What options mean for a service, where the words of a job would mislead.
_HELP: Final = {
    "name": "Name of the service, and of the model for clients; default: from the folder.",
    "gpus": "GPUs of each replica: 2, h200:8, a100-80gb:8, 2x8 for two nodes; h200,h100:8 accepts either. Default: the fewest that fit.",
    "nodes": "Nodes of each replica.",
    "cpus": "CPUs on each node of a replica.",
    "memory": "Memory on each node of a replica: 64 (GiB), 512M.",
    "env": "Environment variable of every replica; K alone copies its value from here.",
    "labels": "Label of the service, also in reports; repeatable.",
    "secrets": "Secret that every replica gets as a variable of this name (phalanx secrets); repeatable.",
    "queue": "Queue of the service.",
    "image": "Container image to run the engine in, with podman or apptainer.",
    "conda": "Conda environment of the nodes that has the engine: its name or folder.",
    "venv": "Virtual environment of the nodes that has the engine.",
    "setup": "Shell command to run once on each node before the engine.",
    "within": "All nodes of a replica inside one domain of this level: spine, leaf, rack, nvlink or node.",
    "grace": "Time for requests under way, from SIGTERM to SIGKILL; default 30s.",
    "nodelist": "Place replicas only on these nodes: n0, gpu[001-004,007].",
    "exclude": "Never place replicas on these nodes.",
    "reservation": "Run only on the nodes of this reservation.",
}


class ModelCommand(DoubleDashCommand):
    """A command with the options of a job that a service has too."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options without those of jobs alone."""
        return [_of_service(one) for one in super().get_params(ctx) if one.name not in _NOT_OF_SERVICES]


def _of_service(option: click.Parameter) -> click.Parameter:
    if option.name not in _HELP or not isinstance(option, click.Option):
        return option
    found = copy.copy(option)
    found.help = _HELP[option.name]
    return found


@click.command("model", cls=ModelCommand)
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--engine", type=click.Choice(ENGINE_NAMES), help="Inference engine; default: one that the nodes have.")
@click.option("--replicas", metavar="N[..M]", help="Number of replicas, or its range; default: 1.")
@click.option(
    "--ready", metavar="PATH", help="Path that answers once it is ready, or tcp; default: that of the engine."
)
@click.option("--no-sleep", is_flag=True, help="Without the routes that let replicas sleep and free their GPUs.")
@click.option(
    "--from-job", metavar="JOB[:STEP]", help="Serve the model that a job wrote to its outputs; DIR is a folder in them."
)
@click.option("--print", "as_file", is_flag=True, help="Print the job file, and start nothing.")
@override_options
@rollout_options
@click.pass_context
def model(
    context: click.Context,
    /,
    folder: str | None,
    engine: str | None,
    replicas: str | None,
    ready: str | None,
    no_sleep: bool,
    from_job: str | None,
    as_file: bool,
    detach: bool,
    timeout: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Serve the model in a folder: without a job file, by the engine that the nodes have for it.

    What follows -- is added to the engine's command line. With --engine command it is the whole command of your own server, in which {model},
    {port} and {name} are filled in.

    \b
    phalanx serve model /models/llama-8b --gpus 2
    phalanx serve model /models/llama-8b --gpus 2 -- --max-model-len 8192
    phalanx serve model /models/qwen.gguf --engine llama.cpp --print
    phalanx serve model --from-job 17 --gpus 1
    phalanx serve model /models/mine --engine command --ready /ping -- ./server --weights {model} --port {port}
    """  # noqa: D301 - click reads the backspace character itself
    words = words_after_dashes(context)
    if engine == COMMAND and not words:
        raise BadRequest("--engine command: there is no command after --", hint="-- ./server --port {port}")
    if folder is None and from_job is None:
        raise BadRequest("there is no folder with a model", hint="phalanx serve model DIR --gpus 1")
    head = connect()
    keys = changed_mapping({}, {**_NOTHING, **given})
    _make_venv_absolute(keys)
    source = None if from_job is None else find_job_model(head, from_job, folder)
    path, local = _locate(folder or "" if source is None else source.path)
    if local is not None and engine != COMMAND:
        local.formats()  # before a node is asked
    fleet = gpu_models(head.nodes())
    gpus = asked_gpus(keys)
    found, digest = local, ""
    if engine is None or local is None or source is not None or not shares_file_system(head):
        digest_bytes = 0 if source is None else max(1, source.size_bytes)
        answer, found = _ask_node(head, keys, path, candidate_nodes(fleet, gpus), digest_bytes)
        digest = answer.digest
        if engine is None:
            engine = choose_engine(found, answer).name
            warn(f"{engine} is installed on node {answer.node}")
    assert found is not None  # here, or on the node
    name = str(keys.get("name") or service_name(path if source is None else source.job.name))
    own: dict[str, object] = {"name": name, "type": "service", "workdir": "/", "replicas": replicas or "1"}
    if engine == COMMAND:
        own |= {"run": own_command(words, path), "ready": ready or READY_TCP}
        own |= {} if gpus is None else {"gpus": str(gpus)}
    else:
        row = next(one for one in ENGINES if one.name == engine)
        own |= _engine_keys(row, found, gpus, fleet, words, sleeps=not no_sleep)
        own |= {"ready": ready} if ready else {}
    if source is not None:
        own["labels"] = {**dict(keys.get("labels", {})), **source.labels(digest)}  # type: ignore[call-overload]
    wanted = job_request_again(_joined(keys, own), {**_NOTHING})
    if as_file:
        from phalanx.user_files.yaml_text import yaml_text

        print(yaml_text(wanted.mapping), end="")
        return 0
    return apply_service(head, wanted, detach=detach, timeout=timeout, as_json=as_json)


_NOTHING: Final[Mapping[str, Any]] = {**dict.fromkeys(KEY_KINDS), "env": (), "copy": False}


def _ask_node(
    head: Client, keys: Mapping[str, object], path: str, nodes: Sequence[str], digest_bytes: int
) -> tuple[NodeAnswer, ModelFiles]:
    """Return what a node says of itself, and the files of the model that it has.

    Raises:
        BadFile: it has none.
    """
    answer = ask_node(head, keys, path, nodes, digest_bytes=digest_bytes)
    if answer.files is None:
        raise BadFile(
            f"node {answer.node} has nothing at {path}",
            hint="the folder must be on the nodes, or on a disk that they share",
        )
    return answer, answer.files


def _joined(keys: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of the service's file: those of options, with ours over them, in the order of a job file."""
    env = {**dict(own.get("env", {})), **dict(keys.get("env", {}))}  # type: ignore[call-overload]
    whole = {**keys, **own, "env": env}
    return {key: whole[key] for key in KEY_KINDS if key in whole and whole[key] not in (None, {}, [], "")}


def choose_engine(files: ModelFiles, answer: NodeAnswer) -> InferenceEngine:
    """Return the first engine for the weights that the node has.

    Raises:
        BadRequest: it has none.
        BadFile: there are no weights.
    """
    able = [one for kind in files.formats() for one in engines_for(kind)]
    for one in able:
        if one.name in answer.engines:
            return one
    names = " nor ".join(one.name for one in able)
    neither = "neither " if len(able) > 1 else "no "
    raise BadRequest(
        f"node {answer.node} has no engine for {files.formats()[0].value} weights: {neither}{names}",
        hint="--venv, --conda, --modules or --image name an environment that has it; --engine command runs your own server",
    )


def service_name(path: str) -> str:
    """Return a name for the service of a model's path: lower-case letters, digits and dashes."""
    base = os.path.basename(path.rstrip("/")).removesuffix(".gguf").lower()
    name = re.sub(r"[^a-z0-9]+", "-", base).strip("-")[:SERVICE_NAME_MAX].strip("-")
    return name if name[:1].isalpha() else f"model-{name}"[:SERVICE_NAME_MAX].strip("-")


def _engine_keys(
    row: InferenceEngine,
    files: ModelFiles,
    gpus: GpuRequest | None,
    fleet: Sequence[GpuModel],
    words: Sequence[str],
    *,
    sleeps: bool,
) -> dict[str, object]:
    """Return the keys that an engine gives a service.

    Raises:
        BadRequest: it cannot load these weights, or not on so many nodes.
        NeverFits: the weights do not fit.
    """
    kind = next((one for one in files.formats() if one in row.formats), None)
    if kind is None:
        able = " or ".join(one.name for one in engines_for(files.formats()[0]))
        raise BadRequest(f"{row.name} does not load {files.formats()[0].value} weights", hint=f"--engine {able}")
    needs = files.needs(kind)
    if gpus is not None and gpus.share is not None and row.splits_heads and not words:
        raise BadRequest(
            f"--gpus {gpus}: {row.name} takes the memory of whole GPUs",
            hint="limit it: -- --gpu-memory-utilization 0.45, or as it names this",
        )
    shape = fitting_shape(row, needs, gpus, fleet)
    if shape.nodes > 1 and not row.nodes_words:
        raise BadRequest(f"{row.name} uses one node, not {shape.nodes}", hint="--nodes 1")
    real = [one for one in fleet if one.memory_bytes and one.name in (shape.models or (one.name,))]
    sleeps = sleeps and bool(row.sleep) and shape.whole and bool(real)
    load_s = needs.weights_bytes / _LOAD_BYTES_PER_S
    env = [*row.env, *(row.sleep_env if sleeps else ())]
    return {
        "run": engine_command(
            row, files.weights(kind)[0], gpus=shape.gpus, nodes=shape.nodes, sleeps=sleeps, extra=words
        ),
        "gpus": shape.text,
        "nodes": 1 if shape.gpus and shape.whole and shape.nodes == 1 else None,
        "env": dict(env),
        "ready": row.ready,
        "ready_within": None if load_s <= READY_WITHIN_DEFAULT_S else format_duration(min(READY_WITHIN_MAX_S, load_s)),
        **({"sleep": row.sleep, "wake": row.wake} if sleeps else {}),
    }


def _locate(folder: str) -> tuple[str, ModelFiles | None]:
    """Return the absolute path, and what lies there on this machine.

    Raises:
        BadFile: nothing does, and the path is relative.
    """
    here = read_model_files(folder)
    if here is None and not os.path.isabs(os.path.expanduser(folder)):
        raise BadFile(
            f"{folder}: no such folder",
            hint="download the model first, and give its folder; of the nodes' disks the whole path",
        )
    return os.path.abspath(os.path.expanduser(folder)), here


def _make_venv_absolute(keys: dict[str, object]) -> None:
    """A relative --venv is in this folder, not in the one of the service."""
    software = keys.get("software")
    if isinstance(software, dict) and software.get("venv"):
        keys["software"] = {**software, "venv": os.path.abspath(os.path.expanduser(str(software["venv"])))}
