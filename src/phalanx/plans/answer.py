"""Run the planner: from the command's options to the records for page, JSON and picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from phalanx.core.units import format_bytes
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.planner.cost.host_memory import one_thread_s
from phalanx.planner.cost.memory import exceeds_memory
from phalanx.planner.cost.optimizers import Offload
from phalanx.planner.cost.sequence_lengths import SequenceBatching
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.facts.coefficient_table import DEFAULT_STACK
from phalanx.planner.search.evaluation import evaluate_layout, training_task
from phalanx.planner.search.layout_search import plan_layouts
from phalanx.planner.search.option_effects import OptionEffect, option_effects
from phalanx.planner.search.request import (
    CheckpointEstimate,
    EvaluatedLayout,
    FittingChange,
    LayoutAnswer,
    LayoutRequest,
    next_batch,
)
from phalanx.planner.search.simple_layout import simple_layout
from phalanx.planner.serving.rollout import RolloutRequest
from phalanx.plans.amounts import format_seconds
from phalanx.plans.formulas import ExplainedLayout, explain_layout
from phalanx.plans.global_batch import grain_of
from phalanx.plans.machine import PlannedFleet
from phalanx.plans.method import WrittenAnswers, method_word
from phalanx.plans.records import (
    CheckpointCost,
    Estimate,
    LayoutFigures,
    PlanAnswer,
    ShownEffect,
    ShownRollout,
    ShownSamples,
)
from phalanx.plans.request import PlanInputs, format_price, parse_plan_inputs

GB: Final = 1e9


def compute_plan(
    options: Mapping[str, Any], *, home: str = "", fleet: Callable[[], PlannedFleet] | None = None, files: bool = True
) -> PlanAnswer:
    """Run the planner with these options. The other arguments are those of `parse_plan_inputs`.

    Raises:
        PhalanxError: as `parse_plan_inputs`, or the layout cannot split the model or the batch.
    """
    from phalanx.planner.cost.coefficients import replayed_physics, replayed_stack
    from phalanx.planner.facts.coefficient_table import physics

    question = parse_plan_inputs(options, home=home, fleet=fleet, files=files)
    asked = LayoutRequest(
        model=question.model,
        machine=question.machine,
        physics=replayed_physics(physics()) if question.cuda_graphs else physics(),
        stack=replayed_stack(question.stack) if question.cuda_graphs else question.stack,
        seq=question.seq,
        global_batch=question.global_batch,
        tokens=question.tokens,
        method=question.method,
        precision=question.precision,
        layout=question.layout,
        optimizer=question.optimizer,
        offload=question.offload,
        objective=question.objective,
        samples=question.samples,
        rollout=None if question.answers is None else _rollout(question.answers, question.cuda_graphs is not False),
    )
    answer = plan_layouts(asked, top=options["top"])
    best = answer.layouts[0] if answer.layouts else None
    simple = None if question.layout is not None else simple_layout(asked, best)
    effects = option_effects(asked, best) if best is not None else ()
    return build_answer(question, asked, answer, simple, effects)


def _rollout(answers: WrittenAnswers, graphs: bool) -> RolloutRequest:
    from phalanx.planner.facts.serving_facts import DEFAULT_ENGINE, find_serving_speed

    speed = find_serving_speed(DEFAULT_ENGINE)
    return RolloutRequest(
        prompt=answers.prompt,
        answer=answers.answer,
        longest=answers.longest,
        group=answers.group,
        updates=answers.updates,
        speed=replace(speed, graphs=float(graphs)),
    )


def build_answer(
    question: PlanInputs,
    asked: LayoutRequest,
    answer: LayoutAnswer,
    simple: EvaluatedLayout | None = None,
    effects: Sequence[OptionEffect] = (),
) -> PlanAnswer:
    """Convert the planner's answer to plain records. `simple`: the layout `fsdp=N`, to compare with; `effects`: of the options of the request."""
    layouts = tuple(_figures(one) for one in answer.layouts)
    losers = tuple(_figures(one) for one in answer.rejected)
    shown = (*layouts, *losers)
    machine = question.machine
    notes = [*question.notes, *_host_notes(asked, shown)]
    if machine.price is None and question.tokens is not None:
        notes.append("no cost: no dated price of these GPUs is known; set one with --price USD")
    if answer.evaluated > 1:
        notes.append(f"Compared {answer.evaluated:,} layouts for the {question.stack.name} stack.")
    return PlanAnswer(
        request=question.summary,
        model=question.model.name,
        layers=question.model.layers,
        nodes=machine.nodes,
        gpus_per_node=machine.gpus_per_node,
        gpu=machine.gpu.name,
        seq=question.seq,
        global_batch=question.global_batch,
        tokens=question.tokens,
        method=question.method_word,
        step_tokens=asked.mean_seq * question.global_batch * training_task(asked).sequences,
        rollout=None
        if question.answers is None
        else ShownRollout(prompt=question.answers.prompt, answer=question.answers.answer, group=question.answers.group),
        samples=None if not shown else _samples(asked, (*answer.layouts, *answer.rejected)[0]),
        stack=question.stack.name,
        price=format_price(machine.price),
        fits=answer.fits,
        single_layout=question.layout is not None,
        reason=answer.reason,
        layouts=layouts,
        losers=losers,
        simple=None if simple is None else _figures(simple),
        simple_fits=simple is not None and simple.fits,
        effects=tuple(_effect(one, shown[0]) for one in effects),
        optimizer=question.optimizer.value,
        offload=question.offload.value,
        alternatives=(*(_smaller(one, question) for one in answer.fitting_changes), *_larger_hosts(answer)),
        notes=tuple(notes),
        formulas=explain_layout(_case(asked, shown[0])) if shown else (),
        next_command=_next(question, answer),
    )


def _samples(asked: LayoutRequest, first: EvaluatedLayout) -> ShownSamples | None:
    """Return what the first layout computes for its samples, and how much faster it would train them packed."""
    samples = asked.samples
    if samples is None:
        return None
    computed = training_task(asked).computed(first.layout)
    faster = None
    if samples.batching is not SequenceBatching.PACKED and asked.objective is Objective.CROSS_ENTROPY:
        packed = replace(asked, samples=replace(samples, batching=SequenceBatching.PACKED))
        faster = evaluate_layout(packed, first.layout).tokens_per_s / first.tokens_per_s
    return ShownSamples(
        mean=samples.mean,
        longest=samples.longest,
        packing=samples.batching.value,
        positions=samples.positions(computed),
        tokens=samples.tokens,
        wasted=samples.wasted(computed),
        packed_speed=faster,
    )


def _host_notes(asked: LayoutRequest, shown: Sequence[LayoutFigures]) -> list[str]:
    """Return what is assumed of the host, and what makes its update slow."""
    machine, stores = asked.machine, any(one.host_bytes for one in shown)
    offloads = asked.offload is not Offload.NONE and bool(shown)
    notes = []
    assumed: dict[str, list[str]] = {}  # by source
    if stores and machine.host_memory_bytes is None:
        notes.append("the memory of a host is not known, so its size is not checked; give it with --host-memory")
    elif stores and machine.host_memory_fact.source:
        size = format_bytes(machine.host_memory_bytes or 0.0)
        assumed.setdefault(machine.host_memory_fact.source, []).append(f"{size} of memory")
    if offloads:
        rate = f"{machine.host_bytes_per_s / GB:,.0f} GB/s of memory bandwidth"
        assumed.setdefault(machine.host_fact.source, []).append(rate)
    notes += [f"each host is assumed to have {' and '.join(what)}: {source}" for source, what in assumed.items()]
    if offloads and machine.gpus_per_node > 1:
        slow_s = one_thread_s(training_task(asked), shown[0].layout)
        notes.append(
            f"planned for an Adam that uses all cores; with OMP_NUM_THREADS=1, as torchrun and Phalanx start several ranks of a node, "
            f"it takes about {format_seconds(slow_s)}: give each of the {machine.gpus_per_node} ranks its part of the cores"
        )
    return notes


def _case(asked: LayoutRequest, figures: LayoutFigures) -> ExplainedLayout:
    return ExplainedLayout(
        task=training_task(asked),
        layout=figures.layout,
        machine=asked.machine,
        physics=asked.physics,
        stack=asked.stack,
        global_batch=asked.global_batch,
        tokens=asked.tokens,
        figures=figures,
        mean_seq=asked.mean_seq,
    )


def _figures(one: EvaluatedLayout) -> LayoutFigures:
    return LayoutFigures(
        layout=one.layout,
        host_bytes=one.host_bytes,
        host_limit_bytes=one.host_limit_bytes,
        is_tight_on_host=one.tight_on_host,
        memory_bytes=tuple((part.value, count) for part, count in one.memory.items.items() if count > 0),
        used_bytes=one.memory.total_bytes,
        usable_bytes=one.memory.usable_bytes,
        used_low_bytes=one.memory.low_bytes,
        used_high_bytes=one.memory.high_bytes,
        step_items_s=tuple((item.value, seconds) for item, seconds in one.step.items.items() if seconds > 0),
        step_s=Estimate(mid=one.step.total_s, low=one.low_s, high=one.high_s),
        tokens_per_s=one.tokens_per_s,
        mfu=one.mfu,
        train_s=_range(one.train_s),
        gpu_hours=_range(one.gpu_hours),
        usd=_range(one.cost_usd),
        checkpoint_cost=_saving(one.checkpoint),
        why=one.why,
    )


def _effect(one: OptionEffect, shown: LayoutFigures) -> ShownEffect:
    without = _figures(one.without)
    return ShownEffect(
        option=one.option,
        without=without,
        without_fits=one.without.fits,
        saved_bytes=without.used_bytes - shown.used_bytes,
        added_s=shown.step_s.mid - without.step_s.mid,
    )


def _range(three: tuple[float, float, float] | None) -> Estimate | None:
    return None if three is None else Estimate(low=three[0], mid=three[1], high=three[2])


def _saving(one: CheckpointEstimate) -> CheckpointCost:
    return CheckpointCost(bytes=one.bytes, write_s=one.write_s, interval_s=one.interval_s, goodput=one.goodput)


def _smaller(one: FittingChange, question: PlanInputs) -> str:
    gpus = question.machine.gpus
    here = "this GPU" if gpus == 1 else f"these {gpus} GPUs"
    if one.gpus != gpus:
        what = f"{one.gpus} of the same GPUs, {_more_gpus(one, question)}"
    elif one.method is not question.method:
        what = f"--method {method_word(question.objective, one.method)} on {here}"
    else:
        what = f"another layout on {here}"
    return f"{what}: {layout_text(one.layout)}"


def _larger_hosts(answer: LayoutAnswer) -> list[str]:
    """Return the memory of a host that would be enough, if only that is missing."""
    lacking = [one for one in answer.rejected if one.exceeds_host and not exceeds_memory(one.memory)]
    if answer.fits or not lacking:
        return []
    least = min(lacking, key=lambda one: one.host_bytes)
    gib = math.ceil(least.host_bytes / 2**30)
    return [f"hosts with more memory, --host-memory {gib}GiB or more: {layout_text(least.layout)}"]


def _more_gpus(one: FittingChange, question: PlanInputs) -> str:
    batch = "" if one.layout.global_batch == question.global_batch else f" --global-batch {one.layout.global_batch}"
    return f"--gpus {one.gpu_request}{batch}"


def _next(question: PlanInputs, answer: LayoutAnswer) -> str:
    """Return the suggested next command."""
    if answer.fits and question.stack.name != DEFAULT_STACK:
        # phalanx.torch may not support the layout; a script of that stack reads PHALANX_LAYOUT.
        layout = layout_text(answer.layouts[0].layout)
        return f"phalanx run --plan {layout} -- python train.py, with a {question.stack.name} script that reads PHALANX_LAYOUT"
    if answer.fits:
        return f"phalanx run --plan {layout_text(answer.layouts[0].layout)} -- python train.py"
    if not answer.fitting_changes and answer.evaluated:
        return "phalanx plan --help"  # not even 4-bit adapters on hundreds of times the GPUs fit
    if not answer.fitting_changes:
        return f"phalanx plan {question.arguments}{question.stated}{_method(question)} --global-batch {_divisible(question)}"
    one = answer.fitting_changes[0]
    if question.layout is not None and one.gpus == question.machine.gpus and one.method is question.method:
        return f"phalanx plan {question.arguments}{question.stated}{question.stated_batch}{_method(question)}"
    if one.method is not question.method:
        method = f" --method {method_word(question.objective, one.method)}"
        return f"phalanx plan {question.arguments}{question.stated}{question.stated_batch}{method}"
    # Another batch is in `_more_gpus`.
    batch = question.stated_batch if one.layout.global_batch == question.global_batch else ""
    options = f"{_more_gpus(one, question)}{question.stated}{batch}{_method(question)}"
    return f"phalanx plan {question.model_argument} {options}"


def _method(question: PlanInputs) -> str:
    return "" if question.method_word == TrainingMethod.FULL else f" --method {question.method_word}"


def _divisible(question: PlanInputs) -> int:
    """Return the next larger global batch that is divisible by the number of GPUs, and by the answers to a prompt."""
    return next_batch(question.global_batch, grain_of(question.machine.gpus, question.answers))
