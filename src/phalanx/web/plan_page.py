"""The page of plans: a form over the planner, and its answer with pictures, the layouts and the command to run the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.core.work.layouts.layout_split import layers_per_chunk
from phalanx.plans.amounts import (
    format_decimal_bytes,
    format_rounded,
    format_seconds,
    format_span,
    format_tokens,
    format_usd,
)
from phalanx.plans.headline import effect_text, headline, host_text, interval_text, samples_text
from phalanx.plans.option_words import GRAPHS, METHODS, OFFLOADS, OPTIMIZERS, PACKINGS
from phalanx.plans.records import LayoutFigures, NamedAmounts, PlanAnswer
from phalanx.web.charts import ChartPart, key, stacked_bar, strip
from phalanx.web.document import Viewer, document
from phalanx.web.fields import choice, text_field
from phalanx.web.html import Child, Html, element, join, table


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of the form: a line of text like `example`, or a choice of words, of which the first is the default."""

    title: str
    example: str = ""
    words: tuple[str, ...] = ()


_USUAL: Final[Mapping[str, FormField]] = {
    "gpus": FormField("GPUs (none: this fleet)", "4xh100:8"),
    "seq": FormField("Sequence length", "4096"),
    "global_batch": FormField("Global batch", "1024"),
    "tokens": FormField("Training tokens", "300B"),
    "method": FormField("Method", words=METHODS),
    "optimizer": FormField("Optimizer", words=OPTIMIZERS),
    "offload": FormField("On the host", words=OFFLOADS),
    "precision": FormField("Precision", "bf16"),
    "stack": FormField("Stack", "fsdp2-compile"),
}
_MORE: Final[Mapping[str, FormField]] = {
    "mean_length": FormField("Mean length of a sample", "600"),
    "packing": FormField("Packing of samples", words=("", *PACKINGS)),
    "prompt_tokens": FormField("GRPO: tokens of a prompt", "512"),
    "answer_tokens": FormField("GRPO: tokens of an answer", "1024"),
    "group": FormField("GRPO: answers to a prompt", "8"),
    "updates": FormField("GRPO: updates in one step", "1"),
    "host_memory": FormField("Memory of each host", "512GiB"),
    "cuda_graphs": FormField("CUDA graphs", words=("", *GRAPHS)),
    "layout": FormField("Only this layout", "tp=2,fsdp=8"),
}
PLAN_FIELDS: Final = ("model", *_USUAL, *_MORE)
"""The names of all fields of the form. Each is an option of `phalanx plan`."""
_NODES_DRAWN: Final = 8
_LETTERS: Final = {Axis.TENSOR: "T", Axis.CONTEXT: "C", Axis.SHARD: "F", Axis.REPLICATE: "D", Axis.PIPELINE: "P"}
_SERIES: Final = 8  # colours; further parts repeat them


def plan_page(
    asked: Mapping[str, str],
    answer: PlanAnswer | PhalanxError | None,
    fleet: str,
    models: Sequence[str],
    viewer: Viewer,
) -> Html:
    """Return the form as it was filled in, and the answer. `fleet`: whether these GPUs are free here now, in a sentence."""
    content: list[Child] = [_form(asked, models)]
    if isinstance(answer, PhalanxError):
        hint = f" ({answer.hint})" if answer.hint else ""
        content.append(element("p", join(answer.message, hint), class_="problem", role="alert"))
    elif answer is not None:
        content += _answer(answer, fleet)
    return document("plan", "Plan", *content, viewer=viewer)


def _form(asked: Mapping[str, str], models: Sequence[str]) -> Html:
    def fields(several: Mapping[str, FormField]) -> list[Html]:
        return [_field(name, one, asked) for name, one in several.items()]

    known = element("datalist", [element("option", value=name) for name in models], id="models")
    more = element(
        "details",
        element("summary", "More options"),
        element("div", fields(_MORE), class_="filter"),
        open=any(name in asked for name in _MORE),
    )
    return element(
        "form",
        text_field(
            "Model",
            "model",
            value=asked.get("model", ""),
            placeholder="llama-3-8b",
            list="models",
            required=True,
            maxlength="4096",
        ),
        known,
        fields(_USUAL),
        more,
        element("button", "Plan", type="submit", class_="primary"),
        method="get",
        action="/plan",
        class_="filter",
        aria_label="What to plan",
    )


def _field(name: str, one: FormField, asked: Mapping[str, str]) -> Html:
    if one.words:
        return choice(one.title, name, one.words, chosen=asked.get(name, one.words[0]))
    return text_field(one.title, name, value=asked.get(name, ""), placeholder=one.example, maxlength="200")


def _answer(answer: PlanAnswer, fleet: str) -> list[Child]:
    shown = (*answer.layouts, *answer.losers)
    content: list[Child] = [
        element("p", answer.request, class_="note"),
        element("p", element("strong", headline(answer)), class_="answer" if answer.fits else "problem"),
    ]
    if fleet:
        content.append(element("p", element("strong", "This fleet now: "), fleet))
    if answer.fits:
        content.append(element("p", "Run it: ", element("code", answer.next_command)))
    if not answer.fits and answer.alternatives:
        content += [element("h2", "What fits"), element("ul", [element("li", one) for one in answer.alternatives])]
    options = [effect_text(one) for one in answer.effects]
    if answer.samples is not None:
        options.insert(0, samples_text(answer.samples))
    if options:
        content += [element("h2", "Options"), element("ul", [element("li", one) for one in options])]
    if shown:
        content += _best(answer, shown[0])
    if answer.layouts:
        content += [element("h2", "Layouts"), _layouts(answer.layouts)]
    others = [*answer.layouts[1:], *answer.losers] if answer.layouts else list(answer.losers)
    if others:
        rows = [(_layout_code(one.layout), one.why) for one in others]
        content += [
            element("h2", "Why the others are worse"),
            table(("Layout", "Why"), rows, caption="Others", empty=""),
        ]
    if answer.notes:
        content += [element("h2", "Notes"), element("ul", [element("li", note) for note in answer.notes])]
    return content


def _best(answer: PlanAnswer, best: LayoutFigures) -> list[Child]:
    """Return the pictures of one layout: placement, memory and step."""
    left = best.free_bytes
    room = f"{format_decimal_bytes(abs(left))} {'left' if left >= 0 else 'too much'}"
    used = f"{format_decimal_bytes(best.used_bytes)} of {format_decimal_bytes(best.usable_bytes)}, {room}"
    content: list[Child] = [
        element("h2", f"Placement of {layout_text(best.layout)}"),
        _placement(answer, best.layout),
        element("h2", f"Memory of the fullest GPU: {used}"),
        _parts("Memory", best.memory_bytes, best.usable_bytes, format_decimal_bytes),
    ]
    if host := host_text(answer, best):
        content.append(element("p", f"{host[0].upper()}{host[1:]}.", class_="note"))
    if answer.fits:
        tokens = format_tokens(answer.step_tokens)
        content += [
            element("h2", f"Step: {format_seconds(best.step_s.mid)} for {tokens} tokens"),
            _parts("Step", best.step_items_s, best.step_s.mid, format_seconds),
        ]
        saving = best.checkpoint_cost
        if saving is not None:
            written = f"{format_decimal_bytes(saving.bytes)}, written in {format_seconds(saving.write_s)}"
            kept = f"best interval {format_span(saving.interval_s)}, which keeps {saving.goodput:.2%} of the time"
            content.append(element("p", f"Checkpoint: {written}; {kept}.", class_="note"))
    return content


def _parts(name: str, items: NamedAmounts, whole: float, formatted: Callable[[float], str]) -> Html:
    """Return a bar of the parts, the largest first, and the same as a table."""
    total = max(whole, sum(value for _, value in items)) or 1.0
    ordered = sorted((one for one in items if one[1] > 0.0005 * total), key=lambda one: (-one[1], one[0]))
    kinds = [(f"s{number % _SERIES}", part, value) for number, (part, value) in enumerate(ordered)]
    bar = stacked_bar([(kind, value, f"{part}: {formatted(value)}") for kind, part, value in kinds], whole, name=name)
    rows = [(key(kind, part), formatted(value), f"{value / total:.0%}") for kind, part, value in kinds]
    return join(bar, table(("Part", "Amount", "Share"), rows, caption=f"Parts of {name.lower()}", empty="Nothing."))


def _placement(answer: PlanAnswer, layout: Layout) -> Html:
    """Return the nodes in rank order, each rank a cell with its coordinates, in the colour of its pipeline stage."""
    rows = []
    for node in range(min(answer.nodes, _NODES_DRAWN)):
        cells = []
        for rank in range(node * answer.gpus_per_node, (node + 1) * answer.gpus_per_node):
            if rank < layout.ranks:
                at = layout.coordinates(rank)
                named = " ".join(f"{_LETTERS[axis]}{at[axis]}" for axis in _LETTERS if layout.size(axis) > 1)
                kind = f"b-s{at[Axis.PIPELINE] % _SERIES}"
                cells.append(element("li", element("span", f"rank {rank}"), f" {named or 'all'}", class_=kind))
        rows.append((f"node {node}", element("ol", cells, class_="ranks")))
    more = answer.nodes - len(rows)
    shown = table(("Node", "Ranks"), rows, caption="Placement of ranks", empty="")
    rest = element("p", f"and {more} more nodes in the same pattern", class_="note") if more > 0 else None
    return join(shown, rest, element("ul", [element("li", line) for line in _meanings(answer, layout)], class_="note"))


def _meanings(answer: PlanAnswer, layout: Layout) -> list[str]:
    """Return what the letters of ranks stand for."""
    lines = []
    if layout.pipeline > 1:
        chunks = layers_per_chunk(answer.layers, layout.pipeline * layout.interleave)
        most = max(sum(chunks[stage :: layout.pipeline]) for stage in range(layout.pipeline))
        lines.append(f"P: stage of the pipeline, of {layout.pipeline}; at most {most} of {answer.layers} layers each")
    if layout.tensor > 1:
        lines.append(f"T: 1/{layout.tensor} of the heads and columns of every matrix")
    if layout.context > 1:
        lines.append(f"C: 1/{layout.context} of every sequence")
    if layout.expert > 1:
        lines.append(f"experts: 1/{layout.expert} of them on each of {layout.expert} neighbouring ranks")
    if layout.shard > 1:
        lines.append("F: other samples" + ("; states are sharded between them" if layout.zero else ""))
    if layout.replicate > 1:
        lines.append("D: other samples, a full replica")
    return lines or ["every rank holds the whole model"]


def _layouts(layouts: Sequence[LayoutFigures]) -> Html:
    slowest = max(one.step_s.high for one in layouts)
    rows = []
    for number, one in enumerate(layouts, 1):
        interval = interval_text(one.step_s, format_seconds)
        parts = (
            ChartPart(start=0.0, size=one.step_s.low, kind="s0"),
            ChartPart(start=one.step_s.low, size=one.step_s.high - one.step_s.low, kind="range"),
        )
        rows.append(
            (
                str(number),
                _layout_code(one.layout),
                _unbroken(format_seconds(one.step_s.mid)),
                join(_unbroken(interval), strip(parts, slowest, name=f"step {interval}")),
                format_rounded(one.tokens_per_s),
                f"{one.mfu:.0%}",
                _unbroken(format_decimal_bytes(one.used_bytes)),
                _unbroken(format_decimal_bytes(one.free_bytes)),
                "" if one.train_s is None else _unbroken(format_span(one.train_s.mid)),
                "" if one.usd is None else format_usd(one.usd.mid),
            )
        )
    titles = ("No.", "Layout", "Step", "80 % interval", "Tokens/s", "MFU", "Memory", "Room", "Trains", "Cost")
    return table(titles, rows, caption="Layouts that fit, best first", empty="None fits.")


def _layout_code(layout: Layout) -> Html:
    """Return a layout that breaks behind its commas only."""
    parts = layout_text(layout).split(",")
    return element("code", [part if not at else join(",", element("wbr"), part) for at, part in enumerate(parts)])


def _unbroken(text: str) -> str:
    """Return a number and its unit on one line."""
    return text.replace(" ", "\u00a0")
