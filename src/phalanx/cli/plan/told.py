"""Run the planner: from the command's options to the records for page, JSON and picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.cli.plan.explained import Case, formulas_of
from phalanx.cli.plan.figures import Figures, Range, Saving, Told
from phalanx.cli.plan.question import Question, price_line, question_of
from phalanx.core.layouts.asked import Answer, Asked, Checkpoint, Judged, Smaller
from phalanx.core.layouts.judge import task_of
from phalanx.core.layouts.plan import plan
from phalanx.core.performance.step import Method
from phalanx.core.work.planned import layout_text
from phalanx.facts.coefficients import DEFAULT_STACK

if TYPE_CHECKING:
    from phalanx.client import Client


def told_of(options: Mapping[str, Any], head: Client | None = None) -> Told:
    """Run the planner with these options.

    Raises:
        PhalanxError: as `question_of`, or the layout cannot split the model or the batch.
    """
    from phalanx.facts.coefficients import physics

    question = question_of(options, head)
    asked = Asked(
        model=question.model,
        machine=question.machine,
        physics=physics(),
        stack=question.stack,
        seq=question.seq,
        global_batch=question.global_batch,
        tokens=question.tokens,
        method=question.method,
        precision=question.precision,
        layout=question.layout,
    )
    return told(question, asked, plan(asked, top=options["top"]))


def told(question: Question, asked: Asked, answer: Answer) -> Told:
    """Convert the planner's answer to plain records."""
    layouts = tuple(_figures(one) for one in answer.layouts)
    losers = tuple(_figures(one) for one in answer.losers)
    shown = (*layouts, *losers)
    machine = question.machine
    notes = list(question.notes)
    if machine.price is None and question.tokens is not None:
        notes.append("no cost: no dated price of these GPUs is known; set one with --price USD")
    if answer.judged > 1:
        notes.append(f"Compared {answer.judged:,} layouts for the {question.stack.name} stack.")
    return Told(
        asked=question.line,
        model=question.model.name,
        layers=question.model.layers,
        nodes=machine.nodes,
        gpus_per_node=machine.gpus_per_node,
        gpu=machine.gpu.name,
        seq=question.seq,
        global_batch=question.global_batch,
        tokens=question.tokens,
        method=question.method.value,
        stack=question.stack.name,
        price=price_line(machine.price),
        fits=answer.fits,
        judged_alone=question.layout is not None,
        reason=answer.reason,
        layouts=layouts,
        losers=losers,
        smallest=tuple(_smaller(one, question) for one in answer.smallest),
        notes=tuple(notes),
        formulas=formulas_of(_case(asked, shown[0])) if shown else (),
        next=_next(question, answer),
    )


def _case(asked: Asked, figures: Figures) -> Case:
    return Case(
        task=task_of(asked),
        layout=figures.layout,
        machine=asked.machine,
        physics=asked.physics,
        stack=asked.stack,
        global_batch=asked.global_batch,
        tokens=asked.tokens,
        figures=figures,
    )


def _figures(one: Judged) -> Figures:
    return Figures(
        layout=one.layout,
        memory_bytes=tuple((part.value, count) for part, count in one.memory.items.items() if count > 0),
        used_bytes=one.memory.total_bytes,
        usable_bytes=one.memory.usable_bytes,
        step_items_s=tuple((item.value, seconds) for item, seconds in one.step.items.items() if seconds > 0),
        step_s=Range(mid=one.step.total_s, low=one.low_s, high=one.high_s),
        tokens_per_s=one.tokens_per_s,
        mfu=one.mfu,
        train_s=_range(one.train_s),
        gpu_hours=_range(one.gpu_hours),
        usd=_range(one.cost_usd),
        saving=_saving(one.checkpoint),
        why=one.why,
    )


def _range(three: tuple[float, float, float] | None) -> Range | None:
    return None if three is None else Range(low=three[0], mid=three[1], high=three[2])


def _saving(one: Checkpoint) -> Saving:
    return Saving(bytes=one.bytes, write_s=one.write_s, interval_s=one.interval_s, goodput=one.goodput)


def _smaller(one: Smaller, question: Question) -> str:
    gpus = question.machine.gpus
    here = "this GPU" if gpus == 1 else f"these {gpus} GPUs"
    what = f"{one.gpus} of the same GPUs, --gpus {one.what}" if one.gpus != gpus else f"{one.what} on {here}"
    return f"{what}: {layout_text(one.layout)}"


def _next(question: Question, answer: Answer) -> str:
    """Return the suggested next command."""
    if answer.fits and question.stack.name != DEFAULT_STACK:
        # phalanx.torch may not support the layout; a script of that stack reads PHALANX_LAYOUT.
        layout = layout_text(answer.layouts[0].layout)
        return f"phalanx run --plan {layout} -- python train.py, with a {question.stack.name} script that reads PHALANX_LAYOUT"
    if answer.fits:
        return f"phalanx run --plan {layout_text(answer.layouts[0].layout)} -- python train.py"
    if not answer.smallest and answer.judged:
        return "phalanx plan --help"  # not even 4-bit adapters on hundreds of times the GPUs fit
    if not answer.smallest:
        return f"phalanx plan {question.words} --global-batch {_divisible(question)}"
    one = answer.smallest[0]
    if question.layout is not None and one.gpus == question.machine.gpus and one.method is question.method:
        return f"phalanx plan {question.words}{_method(question)}"
    if one.method is not question.method:
        return f"phalanx plan {question.words} --method {one.method.value}"
    return f"phalanx plan {question.name} --gpus {one.what}{_method(question)}"


def _method(question: Question) -> str:
    return "" if question.method is Method.FULL else f" --method {question.method.value}"


def _divisible(question: Question) -> int:
    """Return the next larger global batch that is divisible by the number of GPUs."""
    return -(-question.global_batch // question.machine.gpus) * question.machine.gpus
