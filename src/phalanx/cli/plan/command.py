"""`phalanx plan`: will it fit, how is it split, how long does it take, what does it cost, and how to run exactly that. Needs no head,
but for `--fleet here`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, Final

import click

from phalanx.cli.plan.amounts import BATCH, SEQ, TOKENS, USD
from phalanx.cli.terminal import terminal
from phalanx.cli.words import GPUS
from phalanx.core.errors import BadRequest

METHODS: Final = ("full", "lora", "qlora")
TOP_DEFAULT: Final = 5


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-g",
    "--gpus",
    type=GPUS,
    metavar="GPUS",
    help="4xh100:8, a100-80gb:8, h200:64; with --fleet here which part of it.",
)
@click.option(
    "--fleet",
    type=click.Choice(["here"]),
    help="On the fleet of your head, as it was calibrated, instead of on GPUs by name.",
)
@click.option("--seq", type=SEQ, metavar="N", help="Positions of a sequence; 4096 otherwise.")
@click.option(
    "--global-batch",
    type=BATCH,
    metavar="N",
    help="Sequences per step over all ranks; otherwise about 4M tokens, 64 with adapters.",
)
@click.option("--tokens", type=TOKENS, metavar="N", help="To train on, 300B: then days, GPU-hours and cost are said.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="full",
    show_default=True,
    help="All weights, adapters, or adapters beside 4-bit weights.",
)
@click.option(
    "--precision",
    metavar="NAME",
    help="Of the products: bf16, fp16, fp8 or fp32; the best that the GPU has otherwise, but fp8.",
)
@click.option(
    "--stack", metavar="NAME", help="Training program whose habits count: fsdp2-compile, megatron-core, deepspeed, ..."
)
@click.option(
    "--instance",
    metavar="NAME",
    help="A rented server: p5.48xlarge, a3-highgpu-8g; GPU, network, storage and price are its own.",
)
@click.option(
    "--network", metavar="RATE", help="Between nodes, for each GPU and direction: 400gbit, or a name as ib-ndr."
)
@click.option("--price", type=USD, metavar="USD", help="Of one GPU-hour, as of today or --price-date.")
@click.option("--price-date", metavar="DATE", help="As of when --price was true: 2026-11.")
@click.option("--price-kind", metavar="KIND", help="Of listed prices: on-demand, spot, capacity block.")
@click.option(
    "--prices", multiple=True, metavar="FILE", help="A price list of your own (docs/facts.md); its rows go before ours."
)
@click.option("--layout", metavar="LAYOUT", help="Judge this one alone: tp=8,pp=2,fsdp=2,mbs=1,recompute=full.")
@click.option(
    "--top",
    type=click.IntRange(min=1, max=100),
    default=TOP_DEFAULT,
    show_default=True,
    metavar="N",
    help="Layouts to show.",
)
@click.option("--explain", is_flag=True, help="Every formula, with this plan's numbers and its source.")
@click.option(
    "--plot", "plot_path", metavar="FILE", help="Draw who holds what, and the step in time: FILE.html, .svg or .png."
)
@click.option("--save", "save_path", metavar="FILE.json", help="Keep the answer for `phalanx run --plan FILE.json`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(**given: Any) -> int:
    """Say whether MODEL fits, how it is best split, how long that takes and what it costs.

    MODEL is a name (llama-3-70b, mixtral-8x7b), a config.json, or sizes (layers=32,hidden=4096,heads=32,vocab=32000).
    Gives exit code 1 where it does not fit.

    \b
    phalanx plan llama-3-70b --gpus 4xh100:8 --tokens 300B
    phalanx plan llama-3-70b --gpus a100-80gb:8 --method lora --explain
    phalanx plan config.json --fleet here --save best.json
    """  # noqa: D301  # \b is click's
    from phalanx.cli.lists import encoded
    from phalanx.cli.plan.figures import as_json
    from phalanx.cli.plan.told import told_of

    _check_outputs(given)
    told = told_of(given)
    text = encoded(as_json(told), indent=2) if given["as_json"] or given["save_path"] else ""
    if given["save_path"]:
        Path(given["save_path"]).write_text(text + "\n", encoding="utf-8")
    if given["plot_path"]:
        from phalanx.cli.plan.picture import draw

        draw(given["plot_path"], told, command=shlex.join(["phalanx", *sys.argv[1:]]))
    if given["as_json"]:
        print(text)
    else:
        from phalanx.cli.plan.page import plan_page

        print("\n".join(plan_page(told, terminal(), explain=given["explain"])))
    return 0 if told.fits else 1


def _check_outputs(given: dict[str, Any]) -> None:
    """Refuse now what could not be written after the search."""
    if given["plot_path"]:
        from phalanx.cli.plan.picture import check_picture

        check_picture(given["plot_path"])
    path = given["save_path"]
    if path and not path.lower().endswith(".json"):
        raise BadRequest(f"--save {path}: --plan reads files that end in .json", hint=f"--save {path}.json")
    if path and not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"--save {path}: there is no folder {Path(path).parent}", hint="make it first")
    if given["fleet"] and given["instance"]:
        raise BadRequest("--fleet here and --instance at once", hint="the first is your fleet, the second a rented one")
