"""Parse the options of `phalanx plan --serve`: model, target, and the machines to compare. Every error is one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.serving.replica import CACHE_BYTES, PRODUCT_PRECISION, WEIGHT_BYTES
from phalanx.planner.serving.sizing import ServingTarget
from phalanx.plans.amounts import parse_count, parse_switch
from phalanx.plans.gpu_words import gpu_models
from phalanx.plans.machine import PlannedFleet, machine_from_head, machine_from_options, node_of_kind
from phalanx.plans.option_words import TRAINING_ONLY, refuse_options

USERS_MAX: Final = 100_000  # bounds a typo; a service of more is planned in parts
TOKENS_MAX: Final = 1_000_000  # the longest published context
PROMPT_DEFAULT, ANSWER_DEFAULT = 1000, 300
TTFT_DEFAULT: Final = "1s"
_TIME: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|s|m)")
_UNIT_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInputs:
    """A parsed request.

    Attributes:
        machines: one whole node of each kind of GPU; the number of nodes does not count.
        gpus_max: GPUs that there are; None for any number.
        precisions: of the weights, each to be planned; the first is that of the checkpoint.
        cache: precision of keys and values.
        asked_precision: the user named one.
        graphs: the engine replays CUDA graphs.
    """

    shape: ModelShape
    model_argument: str
    target: ServingTarget
    machines: tuple[Machine, ...]
    gpus_max: int | None
    precisions: tuple[str, ...]
    cache: str
    asked_precision: bool
    notes: tuple[str, ...]
    graphs: bool = True


def parse_serving_inputs(
    options: Mapping[str, Any], *, home: str = "", fleet: Callable[[], PlannedFleet] | None = None
) -> ServingInputs:
    """Parse the options of `phalanx plan --serve`.

    Args:
        options: the command's options, as typed.
        home: the state folder with the user's own facts; empty for none.
        fleet: returns the fleet for `--fleet here`.

    Raises:
        BadRequest: unknown names, impossible numbers, or options of trainings.
        BadFile: a config or price list cannot be read.
        PhalanxError: the head does not answer.
    """
    from phalanx.planner.facts.model_argument import parse_model_argument

    _refuse_training(options)
    notes: list[str] = []
    target = _target(options, notes)
    shape = parse_model_argument(options["model"], home=home, notes=notes)
    if shape.positions and target.prompt + target.answer > shape.positions:
        raise BadRequest(f"in: {shape.name} has position vectors for {shape.positions} positions")
    precisions, cache = _precisions(options)
    machines, gpus_max = _machines(options, home, fleet, notes)
    asked_precision = options["precision"] is not None
    able = tuple(one for one in machines if _has(one, precisions[0], exact=asked_precision))
    if not able:
        names = ", ".join(one.gpu.name for one in machines)
        other = "fp16" if precisions[0] == "bf16" else "int4"
        raise BadRequest(
            f"precision: {names} does not support {precisions[0]}", hint=f"--precision {other}, or other GPUs"
        )
    graphs = parse_switch(options.get("cuda_graphs"), what="cuda-graphs") is not False
    if not graphs:
        notes.append("without CUDA graphs: start the engine with --enforce-eager")
    return ServingInputs(
        shape=shape,
        model_argument=options["model"],
        target=target,
        machines=able,
        gpus_max=gpus_max,
        precisions=precisions,
        cache=cache,
        asked_precision=asked_precision,
        notes=tuple(dict.fromkeys(notes)),
        graphs=graphs,
    )


def parse_latency_s(text: object, *, what: str) -> float:
    """Parse a time with its unit: `500ms`, `0.5s`.

    Raises:
        BadRequest: not a time, or 0.
    """
    found = _TIME.fullmatch(str(text).strip().lower())
    if found is None:
        raise BadRequest(f"{what}: {str(text)[:40]!r} is not a time", hint="write 500ms or 1.5s")
    seconds = float(found[1]) * _UNIT_S[found[2]]
    if seconds <= 0:
        raise BadRequest(f"{what}: it must be above 0")
    return seconds


def _refuse_training(options: Mapping[str, Any]) -> None:
    if options.get("module") is not None:
        raise BadRequest("--module and --serve exclude each other", hint="--serve plans language models")
    refuse_options(options, (*TRAINING_ONLY, "global_batch"), "serve", "--serve plans inference only")


def _target(options: Mapping[str, Any], notes: list[str]) -> ServingTarget:
    if options["users"] is None:
        raise BadRequest("--serve needs the number of users", hint="--users 200: requests at the same time")
    users = _bounded(options["users"], "users", USERS_MAX)
    if options["ttft"] is None:
        notes.append(f"no bound for the first token was stated: took --ttft {TTFT_DEFAULT}")
    prompt, answer = options["prompt_tokens"], options["answer_tokens"]
    if prompt is None or answer is None:
        notes.append(
            f"lengths not stated: took --in {prompt or PROMPT_DEFAULT} --out {answer or ANSWER_DEFAULT} tokens"
        )
    think = options["think"]
    return ServingTarget(
        users=users,
        prompt=PROMPT_DEFAULT if prompt is None else _bounded(prompt, "in", TOKENS_MAX),
        answer=ANSWER_DEFAULT if answer is None else _bounded(answer, "out", TOKENS_MAX),
        ttft_s=parse_latency_s(options["ttft"] or TTFT_DEFAULT, what="ttft"),
        tpot_s=math.inf if options["tpot"] is None else parse_latency_s(options["tpot"], what="tpot"),
        think_s=0.0 if think is None else parse_latency_s(think, what="think"),
    )


def _bounded(text: object, what: str, most: int) -> int:
    count = parse_count(text, what=what)
    if count > most:
        raise BadRequest(f"{what}: {count} is more than {most:,}")
    return count


def _precisions(options: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    text = options["precision"]
    if text is None:
        return ("bf16", "fp8", "int4"), "bf16"
    word = str(text).strip().lower()
    if word not in WEIGHT_BYTES:
        raise BadRequest(
            f"precision: {str(text)[:40]!r} must be one of {', '.join(WEIGHT_BYTES)}",
            hint=suggestion(word, WEIGHT_BYTES),
        )
    return (word,), word if word in CACHE_BYTES and word != "fp8" else "bf16"


def _has(machine: Machine, precision: str, *, exact: bool) -> bool:
    """Whether the GPU computes with this precision. Without `exact`, fp16 does for bf16; bf16 GPUs all have fp16."""
    product = PRODUCT_PRECISION[precision]
    known = machine.gpu.flops
    if precision == "bf16" and exact:
        return "bf16" in known
    return product in known or (product in ("bf16", "fp16") and ("bf16" in known or "fp16" in known))


def _machines(
    options: Mapping[str, Any], home: str, fleet: Callable[[], PlannedFleet] | None, notes: list[str]
) -> tuple[list[Machine], int | None]:
    """Return a node of each kind of GPU, and the number of GPUs there is, if it is limited."""
    from phalanx.planner.facts.gpus import find_gpu
    from phalanx.planner.facts.machines import read_fact_tables

    tables = read_fact_tables(home, tuple(options["prices"]))
    if options["fleet"] == "here":
        if fleet is None:
            raise BadRequest("fleet: no fleet is known here", hint="name the GPUs")
        machine = machine_from_head(fleet(), options, tables, notes)
        return [_with_measured_rates(machine, notes)], machine.gpus
    if options["gpus"] is None and options["instance"] is not None:
        raise BadRequest("instance: --serve needs the number of GPUs too", hint="--gpus 8")
    if options["gpus"] is None:
        known = [one for one in tables.gpus if not one.gpu.virtual]
        found = [node_of_kind(one.gpu.name, one.gpus_per_node, options, tables, []) for one in known]
        priced = [one for one in found if one.price is not None]
        notes.append(
            f"no GPUs were named: compared the {len(priced)} kinds with a listed price; --gpus h100 plans for one"
        )
        return priced, None
    models = gpu_models(options["gpus"])
    if models:
        entries = [find_gpu(word, gpus=tables.gpus, notes=notes) for word in models]
        return [node_of_kind(one.gpu.name, one.gpus_per_node, options, tables, notes) for one in entries], None
    request = parse_gpus(options["gpus"])
    if len(request.kinds) > 1 or request.alternatives:
        raise BadRequest(
            f"gpus: --serve plans one shape, not {request}", hint="--gpus h100, --gpus h100,h200 or h100:8"
        )
    machine = machine_from_options(options, tables, notes)
    return [machine], machine.gpus


def _with_measured_rates(machine: Machine, notes: list[str]) -> Machine:
    """Return the machine whose best matrix rates are those of the calibration, if there is one."""
    if machine.measured is None or not machine.measured.flops:
        return machine
    notes.append("of the calibration, inference uses the matrix rates only")
    rates = {**machine.gpu.best_flops, **machine.measured.flops}
    return replace(machine, gpu=replace(machine.gpu, best_flops=rates))
