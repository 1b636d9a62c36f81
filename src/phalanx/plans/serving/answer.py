"""Run the inference planner: from the command's options to the records for page and JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.uncertainty import Z_80
from phalanx.planner.serving.iteration_time import ServingSpeed
from phalanx.planner.serving.replica import PRODUCT_PRECISION, WEIGHT_BYTES, ServedModel
from phalanx.planner.serving.sizing import ReplicaFigures, ServiceSizer, SizedService, candidate_layouts
from phalanx.plans.amounts import format_rounded, format_seconds
from phalanx.plans.machine import PlannedFleet
from phalanx.plans.records import Estimate
from phalanx.plans.request import format_price
from phalanx.plans.serving.formulas import explain_service
from phalanx.plans.serving.records import ServedLayout, ServiceEstimates, ServingAnswer
from phalanx.plans.serving.request import ServingInputs, parse_serving_inputs

_REJECTED_MAX: Final = 40


def compute_serving_plan(
    options: Mapping[str, Any], *, home: str = "", fleet: Callable[[], PlannedFleet] | None = None
) -> ServingAnswer:
    """Run the planner with these options. The other arguments are those of `parse_serving_inputs`.

    Raises:
        PhalanxError: as `parse_serving_inputs`.
    """
    from phalanx.planner.facts.serving_facts import DEFAULT_ENGINE, find_serving_speed

    asked = parse_serving_inputs(options, home=home, fleet=fleet)
    speed = replace(find_serving_speed(DEFAULT_ENGINE), graphs=float(asked.graphs))
    sizers: dict[str, list[ServiceSizer]] = {}
    for precision in asked.precisions:
        model = ServedModel(
            shape=asked.shape,
            weights=precision,
            cache=asked.cache,
        )
        sizers[precision] = [
            ServiceSizer(_served_as(model, machine), machine, layout, speed, asked.target)
            for machine in asked.machines
            if _supports(machine, precision)
            for layout in candidate_layouts(model, machine)
        ]
    return _answer(asked, speed, sizers, top=options["top"])


def _served_as(model: ServedModel, machine: Machine) -> ServedModel:
    """Return the model as this machine can serve it: GPUs without bf16 serve 16-bit weights as fp16."""
    if "bf16" in machine.gpu.flops:
        return model
    weights, cache = ("fp16" if name == "bf16" else name for name in (model.weights, model.cache))
    return replace(model, weights=weights, cache=cache)


def _supports(machine: Machine, precision: str) -> bool:
    product = PRODUCT_PRECISION[precision]
    return product in ("bf16", "fp16") or product in machine.gpu.flops


def _answer(
    asked: ServingInputs, speed: ServingSpeed, sizers: Mapping[str, Sequence[ServiceSizer]], *, top: int
) -> ServingAnswer:
    sized = {precision: _short_first([one.size() for one in several]) for precision, several in sizers.items()}
    good = {precision: _ranked(several, asked.gpus_max) for precision, several in sized.items()}
    first = asked.precisions[0]
    split = _split(sizers[first], good[first][0] if good[first] else None, asked.gpus_max)
    chosen = next((name for name in asked.precisions if good[name]), first)
    services = good[first] or ([] if split is not None else good[chosen])
    layouts = tuple(_record(one, asked, speed) for one in _one_of_each(services)[:top])
    bad = tuple(_record(one, asked, speed) for one in sized[first] if one.why_not or one not in good[first])
    others = [
        _record(good[name][0], asked, speed) for name in asked.precisions if good[name] and good[name] is not services
    ]
    notes = list(asked.notes)
    if services:
        notes += _served_notes(services[0], asked)
    if good[first] and split is not None:
        notes.append("the prefill/decode split is not started by one command: docs/services.md, Prompts read elsewhere")
    best = layouts[0] if layouts else None
    shown = services[0] if services else None
    same = [one for one in sizers[chosen] if shown is not None and _is(one, shown)]
    record = None if split is None else _record(split, asked, speed)
    return ServingAnswer(
        fits=best is not None or split is not None,
        reason=_reason(best, record, bad),
        request=_request(asked),
        model=asked.shape.name,
        target=_target(asked),
        layouts=layouts,
        rejected=bad[:_REJECTED_MAX],
        split=record,
        other_precisions=tuple(_other(one) for one in others),
        notes=tuple(notes),
        formulas=explain_service(same[0], shown, speed) if same and shown is not None else (),
        next_command=_next(best, asked, services[0].machine if services else None),
    )


def _is(sizer: ServiceSizer, one: SizedService) -> bool:
    return sizer.model == one.model and sizer.machine is one.machine and sizer.layout == one.layout


def _ranked(several: Sequence[SizedService], gpus_max: int | None) -> list[SizedService]:
    """Return the services that meet the target on the GPUs that there are: the cheapest first, then those with the fewest GPUs."""
    able = [one for one in several if not one.why_not and (gpus_max is None or one.gpus <= gpus_max)]

    def price(one: SizedService) -> float:
        return math.inf if one.machine.price is None else one.machine.price.usd_per_gpu_hour * one.gpus

    def least_sure(one: SizedService) -> float:
        return math.inf if one.replicas_high is None else one.replicas_high * one.layout.gpus

    return sorted(able, key=lambda one: (price(one), one.gpus, least_sure(one), one.layout.gpus, one.machine.gpu.name))


def _short_first(several: Sequence[SizedService]) -> list[SizedService]:
    """Return the services without pipelines of nodes where the same machine does without."""
    flat = {id(one.machine) for one in several if one.layout.stages == 1 and not one.why_not}
    return [one for one in several if one.layout.stages == 1 or id(one.machine) not in flat]


def _one_of_each(services: Sequence[SizedService]) -> list[SizedService]:
    """Return the best of each kind of GPU if there are several kinds."""
    if len({one.machine.gpu.name for one in services}) == 1:
        return list(services)
    return list({one.machine.gpu.name: one for one in reversed(services)}.values())[::-1]


def _split(sizers: Sequence[ServiceSizer], best: SizedService | None, gpus_max: int | None) -> SizedService | None:
    """Return the best split, if it needs fewer GPUs than the best without one, or is the only way."""
    if best is not None:
        sizers = [one for one in sizers if one.machine is best.machine]
    found = [one for one in (sizer.size_split() for sizer in sizers) if one is not None]
    ranked = _ranked(found, gpus_max)
    if not ranked or (best is not None and ranked[0].gpus >= best.gpus):
        return None
    return ranked[0]


def _record(one: SizedService, asked: ServingInputs, speed: ServingSpeed) -> ServedLayout:
    figures, target = one.figures, asked.target
    price = one.usd_per_million
    why_not = one.why_not
    if not why_not and asked.gpus_max is not None and one.gpus > asked.gpus_max:
        why_not = f"needs {one.gpus} GPUs, more than the {asked.gpus_max} that were named"
    return ServedLayout(
        gpu=one.machine.gpu.name,
        weights=one.model.weights,
        cache=one.model.cache,
        tensor=one.layout.tensor,
        stages=one.layout.stages,
        replicas=one.replicas,
        readers=one.readers,
        gpus=one.gpus,
        gpus_low=(one.replicas_low + one.readers) * one.layout.gpus,
        gpus_high=None if one.replicas_high is None else (one.replicas_high + one.readers) * one.layout.gpus,
        estimates=None if one.why_not or figures is None else _estimates(figures, one.tokens_per_s, speed),
        running=0.0 if one.why_not or figures is None else figures.running,
        batch_max=one.batch_max,
        usd_per_million_output=price,
        usd_per_million_tokens=None if price is None else price * target.answer / (target.answer + target.prompt),
        price=format_price(one.machine.price),
        weight_bytes=one.model.weight_bytes,
        cache_bytes_per_token=one.model.context_bytes(1.0),
        why_not=why_not,
    )


def _estimates(figures: ReplicaFigures, tokens_per_s: float, speed: ServingSpeed) -> ServiceEstimates:
    wide = {name: math.exp(Z_80 * speed.spreads[name]) for name in ("throughput", "tpot", "ttft")}
    return ServiceEstimates(
        ttft_p50_s=_estimate(figures.ttft_p50_s, wide["ttft"]),
        ttft_p95_s=_estimate(figures.ttft_p95_s, wide["ttft"]),
        tpot_p50_s=_estimate(figures.tpot_p50_s, wide["tpot"]),
        tpot_p95_s=_estimate(figures.tpot_p95_s, wide["tpot"]),
        tokens_per_s=_estimate(tokens_per_s, wide["throughput"]),
    )


def _estimate(value: float, wide: float) -> Estimate:
    return Estimate(mid=value, low=value / wide, high=value * wide)


def _request(asked: ServingInputs) -> str:
    target = asked.target
    bounds = f"first token within {format_seconds(target.ttft_s)}"
    if math.isfinite(target.tpot_s):
        bounds += f", {format_seconds(target.tpot_s)} per token"
    think = f" who think {format_seconds(target.think_s)}" if target.think_s else " at the same time"
    names = ", ".join(one.gpu.name for one in asked.machines[:3]) + (
        f" and {len(asked.machines) - 3} more" if len(asked.machines) > 3 else ""
    )
    return (
        f"{asked.shape.name} ({asked.shape.parameters / 1e9:,.3g}B parameters), inference: {target.users:,} users{think}, "
        f"{target.prompt:,} tokens in, {target.answer:,} out, {bounds} (95 % of requests), on {names}"
    )


def _target(asked: ServingInputs) -> dict[str, float]:
    target = asked.target
    found: dict[str, float] = {
        "users": target.users,
        "in": target.prompt,
        "out": target.answer,
        "ttft_s": target.ttft_s,
    }
    if math.isfinite(target.tpot_s):
        found["tpot_s"] = target.tpot_s
    return found | ({"think_s": target.think_s} if target.think_s else {})


def _reason(best: ServedLayout | None, split: ServedLayout | None, bad: Sequence[ServedLayout]) -> str:
    if best is not None:
        return _sentence(best)
    if split is not None:
        return f"only with prompts read in replicas of their own: {_sentence(split)}"
    if not bad:
        return "no layout divides the attention heads"
    over = [one for one in bad if "were named" in one.why_not]
    near = min(over, key=lambda one: one.gpus) if over else bad[-1]
    text = f"{near.gpu}, {near.weights}, {near.replica_text}"
    return f"no layout meets the target; the nearest, {text}: {near.why_not}"


def _sentence(one: ServedLayout) -> str:
    found = one.estimates
    assert found is not None  # of a layout that meets the target
    count = f"{one.replicas} {'replica' if one.replicas == 1 else 'replicas'} of {one.replica_text}"
    if one.readers:
        count += f" and {one.readers} that read prompts"
    parts = [
        f"{one.gpus} x {one.gpu}{_gpus_interval(one)}: {count}, {one.weights} weights",
        f"first token in {format_seconds(found.ttft_p50_s.mid)} (95 %: {format_seconds(found.ttft_p95_s.mid)})",
        f"{format_seconds(found.tpot_p50_s.mid)} per token",
        f"{format_rounded(found.tokens_per_s.mid)} tokens/s",
    ]
    if one.usd_per_million_output is not None:
        parts.append(f"${one.usd_per_million_output:.2f} per million output tokens at {one.price}")
    return ", ".join(parts)


def _gpus_interval(one: ServedLayout) -> str:
    if one.readers or (one.gpus_low == one.gpus == one.gpus_high):
        return ""
    high = "no number is sure" if one.gpus_high is None else f"{one.gpus_high}"
    return f" ({one.gpus_low} to {high})" if one.gpus_high is not None else f" (at least {one.gpus_low}; {high})"


def _other(one: ServedLayout) -> str:
    price = (
        "" if one.usd_per_million_output is None else f", ${one.usd_per_million_output:.2f} per million output tokens"
    )
    return f"with {one.weights} weights: {one.gpus} x {one.gpu}, {one.replicas} x {one.replica_text}{price}"


def _served_notes(one: SizedService, asked: ServingInputs) -> list[str]:
    notes = []
    if not asked.asked_precision and "bf16" not in one.machine.gpu.flops:
        notes.append(f"{one.machine.gpu.name} has no bf16: the engine needs --dtype half for weights in bf16")
    if WEIGHT_BYTES[one.model.weights] < 1.0:
        notes.append("no published row has 4-bit weights: their speed is computed, not compared")
    if one.model.shape.window is None and one.model.shape.latent is None and asked.target.prompt > 32_000:
        notes.append("the longest published prompts have 20,000 tokens")
    if one.model.shape.mixture is not None:
        notes.append(
            "experts are divided as matrices are (tensor parallel); expert parallelism over more GPUs is not planned"
        )
    if one.replicas_high is None:
        notes.append(
            "a replica may be slower than predicted by more than the bounds leave: measure one before you order the others"
        )
    return notes


def _next(best: ServedLayout | None, asked: ServingInputs, machine: Machine | None) -> str:
    if best is None or machine is None:
        return _wider(asked)
    word = _word(machine)
    gpus = f"{word}:{best.tensor}" if best.stages == 1 else f"{best.stages}x{word}:{best.tensor}"
    folder = asked.model_argument if os.path.isdir(asked.model_argument) else ""
    command = f"phalanx serve model {folder or 'DIR'} --gpus {gpus} --replicas {best.replicas}"
    precision = {"bf16": "16-bit", "fp16": "16-bit", "int4": "4-bit"}.get(best.weights, best.weights)
    return command if folder else f"{command}, with DIR the folder of the {precision} weights"


def _wider(asked: ServingInputs) -> str:
    """Return the command without what the request failed at: the number of GPUs, or else half of the speed."""
    target = asked.target
    words = ["phalanx", "plan", asked.model_argument, "--serve", "--users", f"{target.users}"]
    words += ["--in", f"{target.prompt}", "--out", f"{target.answer}"]
    times = 1.0 if asked.gpus_max is not None else 2.0
    words += ["--ttft", format_latency(target.ttft_s * times)]
    words += ["--tpot", format_latency(target.tpot_s * times)] if math.isfinite(target.tpot_s) else []
    words += ["--think", format_latency(target.think_s)] if target.think_s else []
    words += ["--precision", asked.precisions[0]] if asked.asked_precision else []
    if asked.gpus_max is not None or len(asked.machines) == 1:
        words += ["--gpus", _word(asked.machines[0])]
    return " ".join(words)


def _word(machine: Machine) -> str:
    """Return the name of the GPU in requests."""
    return machine.gpu.aliases[0] if machine.gpu.aliases else machine.gpu.name


def format_latency(seconds: float) -> str:
    """Format a time as the options take it: `500ms`, `1.5s`."""
    return f"{seconds * 1e3:g}ms" if seconds < 1 else f"{seconds:g}s"
