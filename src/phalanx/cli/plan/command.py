"""`phalanx plan`: memory fit, best layout, training time, cost, and the command to run it. Only `--fleet here` needs a head."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from phalanx.cli.plan.amount_types import BATCH, LENGTH, PLANNED_GPUS, SEQ, TOKENS, USD
from phalanx.cli.plan.counted_page import counted_options, print_counted_plan
from phalanx.cli.plan.serving_options import print_serving_plan, refuse_without_serve, serving_options
from phalanx.cli.terminal import terminal
from phalanx.core.errors import BadRequest
from phalanx.plans.option_words import GRAPHS, METHODS, OFFLOADS, PACKINGS, PLAN_DEFAULTS, flag_of


@click.command()
@click.argument("model", metavar="MODEL", required=False)
@click.option(
    "-g",
    "--gpus",
    type=PLANNED_GPUS,
    metavar="GPUS",
    help="4xh100:8, a100-80gb:8, h200:64; with --fleet here the part of it to use; with --serve also h100 for any number.",
)
@click.option(
    "--fleet",
    type=click.Choice(["here"]),
    help="Plan on the calibrated fleet of your head instead of named GPUs.",
)
@click.option("--seq", type=SEQ, metavar="N", help="Sequence length. [default: 4096]")
@click.option(
    "--mean-length",
    type=LENGTH,
    metavar="N",
    help="Mean tokens of a training sample; the longest has as many as --seq. [default: every sequence is full]",
)
@click.option(
    "--packing",
    type=click.Choice(PACKINGS),
    help="With --mean-length: pad samples to the longest that is computed with them, pack several into one sequence, or do neither. "
    "[default: padded]",
)
@click.option(
    "--global-batch",
    type=BATCH,
    metavar="N",
    help="Sequences per step over all ranks. [default: about 4M tokens, 64 with adapters]",
)
@click.option("--tokens", type=TOKENS, metavar="N", help="Training tokens (300B), to compute days, GPU-hours and cost.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=PLAN_DEFAULTS["method"],
    show_default=True,
    help="Train all weights, adapters, or adapters on 4-bit weights; dpo and grpo the same by preferences and by rewards.",
)
@click.option("--group", metavar="N", help="With --method grpo: answers to each prompt. [default: 8]")
@click.option(
    "--updates",
    metavar="N",
    help="With --method grpo: optimizer steps in one step, each on an equal part of its answers. [default: 1]",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    default=PLAN_DEFAULTS["optimizer"],
    show_default=True,
    help="Optimizer: adamw, adamw8bit, adamw4bit, paged-adamw or paged-adamw8bit.",
)
@click.option(
    "--offload",
    type=click.Choice(OFFLOADS),
    default=PLAN_DEFAULTS["offload"],
    show_default=True,
    help="Keep the optimizer, or parameters and optimizer, in the memory of the host.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="Memory of each host for --offload and paged optimizers: 512GiB. [default: as the nodes report, or of the usual server]",
)
@click.option(
    "--precision",
    metavar="NAME",
    help="Precision of matrix products: bf16, fp16, fp8, nvfp4 or fp32; with --serve of weights, also int4. "
    "[default: the fastest of the GPU except fp8 and nvfp4]",
)
@click.option(
    "--stack", metavar="NAME", help="Training program to plan for: fsdp2-compile, megatron-core, deepspeed, ..."
)
@click.option(
    "--cuda-graphs",
    type=click.Choice(GRAPHS),
    help="Whether kernels are replayed from CUDA graphs. [default: on in inference and rollouts, off in training]",
)
@click.option(
    "--instance",
    metavar="NAME",
    help="Cloud instance with its GPU, network, storage and price: p5.48xlarge, a3-highgpu-8g.",
)
@click.option(
    "--network", metavar="RATE", help="Rate between nodes per GPU and direction: 400gbit, or a name such as ib-ndr."
)
@click.option(
    "--price", type=USD, metavar="USD", help="Price of one GPU-hour, dated today unless --price-date is given."
)
@click.option("--price-date", metavar="DATE", help="Date of --price: 2026-11.")
@click.option("--price-kind", metavar="KIND", help="Kind of listed price: on-demand, spot, capacity block.")
@click.option(
    "--prices",
    multiple=True,
    metavar="FILE",
    help="Your own price list (docs/facts.md); it overrides the built-in prices.",
)
@click.option("--layout", metavar="LAYOUT", help="Evaluate only this layout: tp=8,pp=2,fsdp=2,mbs=1,recompute=full.")
@click.option(
    "--top",
    type=click.IntRange(min=1, max=100),
    default=PLAN_DEFAULTS["top"],
    show_default=True,
    metavar="N",
    help="Layouts to show.",
)
@click.option("--explain", is_flag=True, help="Print every formula with this plan's numbers and its source.")
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    help="Draw the placement and the timeline of a step: FILE.html, .svg or .png.",
)
@click.option("--save", "save_path", metavar="FILE.json", help="Save the plan for `phalanx run --plan FILE.json`.")
@serving_options
@counted_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(**options: Any) -> int:
    """Compute whether MODEL fits, its best layout, the training time and the cost; with --serve, the GPUs that answer users in time.

    MODEL is a name (llama-3-70b, mixtral-8x7b), a config.json, or sizes (layers=32,hidden=4096,heads=32,vocab=32000).
    Exits with code 1 if the model does not fit.

    \b
    phalanx plan llama-3-70b --gpus 4xh100:8 --tokens 300B
    phalanx plan llama-3-70b --gpus a100-80gb:8 --method lora --explain
    phalanx plan config.json --fleet here --save best.json
    phalanx plan --module my_models:build --input 64x3x224x224 --gpus h100:8
    phalanx plan llama-3-70b --serve --users 200 --in 2000 --out 500 --ttft 500ms
    """  # noqa: D301  # \b is a click marker
    from phalanx.cli.list_output import to_json
    from phalanx.cli.plan.answer import plan_answer
    from phalanx.plans.records import as_json

    _check_outputs(options)
    if options["module"] is None:
        _refuse_without_module(options)
    if options["serve"]:
        return print_serving_plan(options)
    refuse_without_serve(options)
    if options["module"] is not None:
        return print_counted_plan(options)
    answer = plan_answer(options)
    text = to_json(as_json(answer), indent=2) if options["as_json"] or options["save_path"] else ""
    if options["save_path"]:
        Path(options["save_path"]).write_text(text + "\n", encoding="utf-8")
    if options["plot_path"]:
        from phalanx.cli.plan.picture import write_plan_picture

        write_plan_picture(options["plot_path"], answer, command=shlex.join(["phalanx", *sys.argv[1:]]))
    if options["as_json"]:
        print(text)
    else:
        from phalanx.cli.plan.page import plan_page

        print("\n".join(plan_page(answer, terminal(), explain=options["explain"])))
    return 0 if answer.fits else 1


def _refuse_without_module(options: dict[str, Any]) -> None:
    if options["model"] is None:
        raise BadRequest("there is no MODEL", hint="phalanx plan llama-3-8b --gpus h100:8")
    for name in ("inputs", "python"):
        if options[name]:
            raise BadRequest(
                f"--{flag_of(name)} needs --module", hint="phalanx plan --module my_models:build --input 8x3x224x224"
            )


def _check_outputs(options: dict[str, Any]) -> None:
    """Check the output paths before the search."""
    if options["plot_path"]:
        from phalanx.cli.figure_files import picture_format
        from phalanx.cli.figure_page import FORMATS

        picture_format(options["plot_path"], FORMATS)
    path = options["save_path"]
    if path and not path.lower().endswith(".json"):
        raise BadRequest(f"--save {path}: the name must end in .json", hint=f"--save {path}.json")
    if path and not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"--save {path}: folder {Path(path).parent} does not exist", hint="create it first")
    if options["fleet"] and options["instance"]:
        raise BadRequest(
            "--fleet here and --instance exclude each other",
            hint="use --fleet here for your fleet, --instance for a rented one",
        )
