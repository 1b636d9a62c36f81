"""The inference engines that `serve model` knows: which weights each loads, how a node tells that it is installed, and its command line.

A table: an engine of your own is another row. Everything else that answers HTTP is `COMMAND`, whose words the user gives. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.job_file.command_parameters import quoted_word

COMMAND: Final = "command"  # the user's own server


class WeightsFormat(enum.Enum):
    """How the weights of a model are stored."""

    SAFETENSORS = "safetensors"  # a Hugging Face folder: config.json beside *.safetensors or pytorch_model*.bin
    GGUF = "GGUF"  # of llama.cpp: one file, or several numbered ones


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceEngine:
    """One engine. Words of its command line are shell text: {model}, {gpus} (on each node) and {nodes} are filled in.

    Attributes:
        installed: shell text that succeeds on a node that has it.
        words: the server on one node; it must listen on all addresses, since the node is probed and reached at its own.
        nodes_words: what a replica of several nodes adds on each of them; empty if the engine cannot.
        env: variables; first of all those that switch reports to its makers off.
        sleep_words, sleep_env: what lets it free its GPUs and keep its weights in memory. `sleep`, `wake`: the paths; empty if it cannot.
        splits_heads: each GPU takes a share of the attention heads, so that their number must be divisible by the number of GPUs.
        memory_share: of a GPU's memory that it uses by default.
    """

    name: str
    formats: frozenset[WeightsFormat]
    installed: str
    words: tuple[str, ...]
    nodes_words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    sleep_words: tuple[str, ...] = ()
    sleep_env: tuple[tuple[str, str], ...] = ()
    sleep: str = ""
    wake: str = ""
    ready: str = "/health"
    splits_heads: bool = True
    memory_share: float = 0.9


# Weights come from a folder: nothing is looked up or reported elsewhere.
_OFFLINE: Final = (("DO_NOT_TRACK", "1"), ("HF_HUB_OFFLINE", "1"), ("HF_HUB_DISABLE_TELEMETRY", "1"))
_LISTEN: Final = "--served-model-name $PHALANX_SERVICE --host 0.0.0.0 --port $PORT"
_SAFETENSORS: Final = frozenset({WeightsFormat.SAFETENSORS})
ENGINES: Final = (
    # Source: vLLM 0.32, engine/arg_utils.py, envs.py, entrypoints/serve/sleep/api_router.py.
    InferenceEngine(
        name="vllm",
        formats=_SAFETENSORS,
        installed="command -v vllm",
        words=("vllm serve {model}", _LISTEN, "--tensor-parallel-size {gpus}"),
        nodes_words=(
            "--pipeline-parallel-size {nodes} --nnodes {nodes} --node-rank $PHALANX_NODE_RANK",
            "--master-addr $MASTER_ADDR --master-port $MASTER_PORT --distributed-executor-backend mp",
            '$([ "$PHALANX_NODE_RANK" = 0 ] || echo --headless)',
        ),
        env=(("VLLM_NO_USAGE_STATS", "1"), *_OFFLINE),
        sleep_words=("--enable-sleep-mode",),
        sleep_env=(("VLLM_SERVER_DEV_MODE", "1"),),
        sleep="/sleep?level=1",
        wake="/wake_up",
    ),
    # Source: docs.sglang.io, advanced_features/server_arguments.
    InferenceEngine(
        name="sglang",
        formats=_SAFETENSORS,
        installed="python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec(\"sglang\") is None)'",
        words=("python3 -m sglang.launch_server --model-path {model}", _LISTEN, "--enable-metrics --tp-size {gpus}"),
        nodes_words=(
            "--pp-size {nodes} --nnodes {nodes} --node-rank $PHALANX_NODE_RANK",
            "--dist-init-addr $MASTER_ADDR:$MASTER_PORT",
        ),
        env=_OFFLINE,
    ),
    # Source: llama.cpp, tools/server/README.md.
    InferenceEngine(
        name="llama.cpp",
        formats=frozenset({WeightsFormat.GGUF}),
        installed="command -v llama-server",
        words=(
            "llama-server --model {model}",
            "--alias $PHALANX_SERVICE --host 0.0.0.0 --port $PORT --metrics",
        ),
        env=_OFFLINE,
        splits_heads=False,
        memory_share=0.95,
    ),
)
ENGINE_NAMES: Final = (*(one.name for one in ENGINES), COMMAND)


def engines_for(weights: WeightsFormat) -> tuple[InferenceEngine, ...]:
    """The engines that load such weights, the preferred one first."""
    return tuple(one for one in ENGINES if weights in one.formats)


def engine_command(
    engine: InferenceEngine, model: str, *, gpus: int, nodes: int = 1, sleeps: bool = False, extra: Sequence[str] = ()
) -> str:
    """The shell command of a replica, the same on each of its nodes.

    Args:
        engine: a row of the table; it must be able to use several nodes if `nodes` is above 1.
        model: folder or file of the weights.
        gpus: on each node; 0 for CPUs.
        nodes: of a replica.
        sleeps: with the words that let it sleep.
        extra: words that the user adds.
    """
    lines = [*engine.words, *(engine.nodes_words if nodes > 1 else ()), *(engine.sleep_words if sleeps else ())]
    filled = {"{model}": quoted_word(model), "{gpus}": str(max(1, gpus)), "{nodes}": str(nodes)}
    return "exec " + " ".join([*(_filled(line, filled) for line in lines), *map(quoted_word, extra)])


def own_command(words: Sequence[str], model: str) -> str:
    """The shell command of a server of the user: {model}, {port} and {name} in its words are filled in.

    A word with {port} or {name} may hold other text, but nothing else in it is read by the shell.
    """
    filled = {"{port}": '"$PORT"', "{name}": '"$PHALANX_SERVICE"', "{model}": quoted_word(model)}
    return "exec " + " ".join(_own_word(word, filled) for word in words)


def _own_word(word: str, filled: dict[str, str]) -> str:
    parts, rest = "", word
    while rest:
        places = [(at, mark) for mark in filled if (at := rest.find(mark)) >= 0]
        at, mark = min(places, default=(len(rest), ""))
        parts += (quoted_word(rest[:at]) if at else "") + filled.get(mark, "")
        rest = rest[at + len(mark) :]
    return parts or "''"


def _filled(text: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text
