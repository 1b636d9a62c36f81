"""The answer of a plan in one sentence, and one about each of its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.plans.amounts import (
    format_decimal_bytes,
    format_rounded,
    format_seconds,
    format_span,
    format_tokens,
    format_usd,
)
from phalanx.plans.records import Estimate, LayoutFigures, PlanAnswer, ShownEffect, ShownSamples

_SAME_BYTES: Final = 1e6  # less is not shown
_SAME_SHARE: Final = 5e-4  # of a step: less would not change three digits
_SEEN_SHARE: Final = 0.005  # less is 0 %
_WORTH: Final = 1.05  # speeds within 5 % are the same


def headline(answer: PlanAnswer) -> str:
    """Summarise the answer in one sentence."""
    if not answer.fits:
        return answer.reason if "not fit" in answer.reason else f"does not fit: {answer.reason}"
    best = answer.layouts[0]
    text = layout_text(best.layout)
    parts = [
        f"{text} {'fits' if best.free_bytes >= 0 else 'may fit'}" if answer.single_layout else f"fits; best is {text}",
        f"{format_seconds(best.step_s.mid)} per step ({interval_text(best.step_s, format_seconds)})",
        f"{best.mfu:.0%} MFU",
        f"{format_rounded(best.tokens_per_s)} tokens/s",
    ]
    if answer.tokens is not None and best.train_s is not None:
        mid_s = best.train_s.mid
        ends = interval_text(best.train_s, lambda seconds: format_span(seconds, mid_s))
        parts.append(f"{format_tokens(answer.tokens)} tokens in {format_span(mid_s)} ({ends})")
    if best.gpu_hours is not None:
        parts.append(
            f"{format_rounded(best.gpu_hours.mid)} GPU-hours ({interval_text(best.gpu_hours, format_rounded)})"
        )
    if best.usd is not None:
        parts.append(f"{format_usd(best.usd.mid)} ({interval_text(best.usd, format_usd)}) at {answer.price}")
    return f"{parts[0]}: {', '.join(parts[1:])}"


def effect_text(one: ShownEffect) -> str:
    """Return what an option saves and costs, in one line."""
    saved, added = one.saved_bytes, one.added_s
    no_memory = abs(saved) < _SAME_BYTES
    no_time = abs(added) < _SAME_SHARE * one.without.step_s.mid
    if no_memory and no_time:
        return f"{one.option}: changes neither memory nor time of this layout"
    memory = f"{'saves' if saved >= 0 else 'takes'} {format_decimal_bytes(abs(saved))} a GPU"
    time = f"{'costs' if added >= 0 else 'saves'} {format_seconds(abs(added))} a step"
    figures = f"{format_decimal_bytes(one.without.used_bytes)}, {format_seconds(one.without.step_s.mid)}"
    fits = "" if one.without_fits else ", does not fit"
    what = f"{'takes no memory' if no_memory else memory} and {'takes no time' if no_time else time}"
    return f"{one.option}: {what} (without it {figures}{fits})"


def host_text(answer: PlanAnswer, one: LayoutFigures) -> str:
    """Return what a layout keeps in the memory of each host, in one line; empty for nothing."""
    if not one.host_bytes:
        return ""
    limit = "" if one.host_limit_bytes is None else f" of {format_decimal_bytes(one.host_limit_bytes)}"
    buffers = "" if answer.offload == "none" else ", and up to half more for buffers"
    tight = "; tight: the buffers may have no room" if one.is_tight_on_host else ""
    return f"memory of each host: {format_decimal_bytes(one.host_bytes)}{limit}{buffers}{tight}"


def samples_text(one: ShownSamples) -> str:
    """Return what is computed for the samples, and how much faster packing would be, in one line."""
    if one.packing == "packed":
        where = f"packed into sequences of {one.longest:,}, of which {one.tokens / one.positions:.0%} are tokens"
    elif one.packing == "unpadded":
        waits = f"; waiting for the fullest micro-batch costs {one.wasted:.0%}" if one.wasted >= _SEEN_SHARE else ""
        where = f"computed without pads{waits}"
    else:
        where = f"padded to {one.positions:,.0f} on average: {one.wasted:.0%} of what is computed are pads"
    faster = ""
    if one.packed_speed is not None and one.packed_speed > _WORTH:
        faster = f"; --packing packed would train {one.packed_speed:.1f} times as many tokens per second"
    return f"samples of {one.mean:,} tokens, at most {one.longest:,}, {where}{faster}"


def interval_text(one: Estimate, formatted: Callable[[float], str]) -> str:
    """Format an interval as `1.7 to 2.2 s`, with the unit once if both ends share it."""
    low, high = formatted(one.low), formatted(one.high)
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if number and high.endswith(f" {unit}") else f"{low} to {high}"
