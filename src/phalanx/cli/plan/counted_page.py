"""`phalanx plan --module`: its options, and what it prints."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.plans.amounts import format_decimal_bytes, format_rounded, format_seconds, format_usd
from phalanx.plans.counted.answer import CountedAnswer

F = TypeVar("F", bound=Callable[..., Any])
_WIDTH_MAX: Final = 120  # of sentences


def counted_options(command: F) -> F:
    """Add the options of `--module` to the command."""
    for option in reversed(
        (
            click.option(
                "--module",
                metavar="FILE:NAME",
                help="Plan any torch.nn.Module instead of MODEL: my_models:build in this folder, counted without weights or GPU.",
            ),
            click.option(
                "--input",
                "inputs",
                multiple=True,
                metavar="SHAPE",
                help="With --module: an input of one GPU, 8x3x224x224, 8x128:int64 or timestep=8; repeatable, batch first.",
            ),
            click.option("--python", metavar="PATH", help="With --module: a Python with torch. [default: python]"),
        )
    ):
        command = option(command)
    return command


def print_counted_plan(options: Mapping[str, Any]) -> int:
    """Count the network, plan it, and print the answer; return the exit code."""
    from phalanx.cli.cluster.state_folder import home_folder
    from phalanx.cli.list_output import to_json
    from phalanx.cli.plan.module_counts import count_network
    from phalanx.plans.counted.answer import compute_counted_plan, counted_as_json, counted_precision

    precision = counted_precision(options)
    network = count_network(options["module"], options["inputs"], precision=precision, python=options["python"])
    answer = compute_counted_plan(options, network, home=home_folder(), fleet=_fleet)
    if options["as_json"]:
        print(to_json(counted_as_json(answer), indent=2))
    else:
        print("\n".join(counted_page(answer, terminal())))
    return 0 if answer.fits else 1


def counted_page(answer: CountedAnswer, screen: Terminal) -> list[str]:
    """Return the output lines. Pure."""
    lines = [screen.paint(line, "bold" if answer.fits else "red") for line in _wrapped(answer.reason, screen)]
    lines += ["", *_wrapped(answer.request, screen), "", screen.paint("layouts", "bold")]
    columns = (
        Column(title="LAYOUT"),
        Column(title="STEP", right=True),
        Column(title="SAMPLES/S", right=True),
        Column(title="MFU", right=True, drop_order=1),
        Column(title="MEMORY", right=True),
        Column(title="", drop_order=2, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            one.text,
            format_seconds(one.step_s),
            format_rounded(one.samples_per_s),
            f"{one.mfu:.0%}",
            format_decimal_bytes(one.used_bytes),
            "" if one.fits and not one.is_tight else "tight" if one.is_tight else "does not fit",
        ]
        for one in answer.plans
    ]
    lines += [f"  {line}" for line in table(columns, rows, screen._replace(width=screen.width - 2))]
    best = answer.plans[0]
    for title, items, formatted in (
        (f"memory of {best.text}", best.memory_bytes, format_decimal_bytes),
        (f"step of {best.text}", best.step_items_s, format_seconds),
    ):
        lines += ["", screen.paint(title, "bold")]
        wide = max(len(name) for name in items)
        lines += [f"  {name:<{wide}}  {formatted(value):>9}" for name, value in items.items() if value > 0]
    notes = list(answer.notes)
    if answer.usd_per_million is not None:
        notes.insert(0, f"{format_usd(answer.usd_per_million)} per million samples")
    lines += ["", screen.paint("notes", "bold")]
    lines += [f"  {line}" for note in notes for line in _wrapped(strip_control(note), screen, 2)]
    return [*lines, "", screen.paint(f"next: {answer.next_command}", "dim")]


def _wrapped(text: str, screen: Terminal, indent: int = 0) -> list[str]:
    width = max(20, min(screen.width, _WIDTH_MAX) - indent)
    return textwrap.wrap(text, width, subsequent_indent="  " if indent else "", break_on_hyphens=False) or [""]


def _fleet() -> Any:
    from phalanx.cli.connection import connect

    return connect()
