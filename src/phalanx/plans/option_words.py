"""The options of a plan: names, flags, defaults and values, once for command line, job files, API and forms.

Plain words only: a command shows its help without loading the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from phalanx.core.errors import BadRequest

METHODS: Final = ("full", "lora", "qlora", "dpo", "dpo-lora", "dpo-qlora", "grpo", "grpo-lora", "grpo-qlora")
OPTIMIZERS: Final = ("adamw", "adamw8bit", "adamw4bit", "paged-adamw", "paged-adamw8bit")
OFFLOADS: Final = ("none", "optimizer", "parameters")
PACKINGS: Final = ("padded", "packed", "unpadded")
GRAPHS: Final = ("on", "off")

TRAINING_DEFAULTS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "seq": None,
        "mean_length": None,
        "packing": None,
        "global_batch": None,
        "tokens": None,
        "method": "full",
        "prompt_tokens": None,
        "answer_tokens": None,
        "group": None,
        "updates": None,
        "optimizer": "adamw",
        "offload": "none",
        "precision": None,
        "stack": None,
        "cuda_graphs": None,
    }
)
"""What is trained, and how. These are the keys of a job file's `plan:`, beside `model`."""
MACHINE_DEFAULTS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "gpus": None,
        "fleet": None,
        "host_memory": None,
        "instance": None,
        "network": None,
        "price": None,
        "price_date": None,
        "price_kind": None,
    }
)
"""What it is trained on. A job's plan takes these from its GPUs and from what their nodes report."""
PLAN_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {**TRAINING_DEFAULTS, **MACHINE_DEFAULTS, "prices": (), "layout": None, "top": 5, "explain": False}
)
"""All options of a plan for the training of a language model but `model`."""
TRAINING_ONLY: Final = (
    "seq",
    "mean_length",
    "packing",
    "tokens",
    "method",
    "group",
    "updates",
    "optimizer",
    "offload",
    "stack",
    "host_memory",
    "layout",
    "plot_path",
)
"""Options that no other kind of plan has. Others that such a plan does not read are refused there as well."""
_FLAGS: Final = MappingProxyType(
    {"prompt_tokens": "in", "answer_tokens": "out", "plot_path": "plot", "save_path": "save", "inputs": "input"}
)


def flag_of(name: str) -> str:
    """Return the word of an option on the command line, without its dashes."""
    return _FLAGS.get(name, name.replace("_", "-"))


def refuse_options(options: Mapping[str, Any], names: Iterable[str], kind: str, hint: str) -> None:
    """Refuse options that a plan of another kind would ignore.

    Args:
        options: as typed; those at their default are not refused.
        names: of the options to refuse.
        kind: the option that asks for this kind of plan: "serve".
        hint: what that kind is for.

    Raises:
        BadRequest: one was given.
    """
    for name in names:
        if options.get(name) not in {None, PLAN_DEFAULTS.get(name)}:
            raise BadRequest(f"--{flag_of(name)} and --{kind} exclude each other", hint=hint)
