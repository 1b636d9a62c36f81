"""Plan a counted network: from the command's options and the counts to the records for page and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.planner.cost.machine import Machine
from phalanx.planner.counted.data_parallel import CountedNetwork, DataParallelPlan, plan_counted
from phalanx.plans.amounts import format_decimal_bytes, format_parameters, format_rounded, format_seconds, parse_count
from phalanx.plans.machine import PlannedFleet, machine_from_head, machine_from_options
from phalanx.plans.option_words import TRAINING_ONLY, refuse_options

PRECISIONS: Final = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAnswer:
    """The whole answer. `plans`: those that fit first, by step time; `next_command` can be run with a script of the user's."""

    fits: bool
    reason: str
    request: str
    network: CountedNetwork
    gpu: str
    gpus: int
    global_batch: int
    plans: tuple[DataParallelPlan, ...]
    usd_per_million: float | None
    notes: tuple[str, ...]
    next_command: str


def counted_precision(options: Mapping[str, Any]) -> str:
    """Return the precision to count in, after refusing options that do not apply.

    Raises:
        BadRequest: an option of language models, or an unknown precision.
    """
    if options["model"] is not None:
        raise BadRequest("MODEL and --module exclude each other", hint="give one of the two")
    hint = "--module plans data parallel training of the module as it is: freeze parameters, and choose lengths, in its code"
    refuse_options(options, (*TRAINING_ONLY, "cuda_graphs", "save_path"), "module", hint)
    word = str(options["precision"] or "bf16").strip().lower()
    if word not in PRECISIONS:
        raise BadRequest(f"precision: {word[:40]!r} must be one of {', '.join(PRECISIONS)}")
    return word


def compute_counted_plan(
    options: Mapping[str, Any],
    network: CountedNetwork,
    *,
    home: str = "",
    fleet: Callable[[], PlannedFleet] | None = None,
) -> CountedAnswer:
    """Plan the network on the GPUs of the options.

    Raises:
        BadRequest: unknown GPUs, or a batch that cannot be divided.
        PhalanxError: the head does not answer.
    """
    from phalanx.planner.facts.coefficient_table import physics
    from phalanx.planner.facts.machines import read_fact_tables

    notes: list[str] = []
    precision = counted_precision(options)
    tables = read_fact_tables(home, tuple(options["prices"]))
    if options["fleet"] == "here":
        assert fleet is not None  # of the command
        machine = machine_from_head(fleet(), options, tables, notes)
    else:
        machine = machine_from_options(options, tables, notes)
    steps = _micro_batches(options["global_batch"], network.batch, machine.gpus)
    try:
        plans = plan_counted(network, machine, physics(), micro_batches=steps, precision=precision)
    except KeyError:
        raise BadRequest(f"precision: {machine.gpu.name} does not support {precision}") from None
    notes += [
        "counted in eager torch: torch.compile fuses the other kernels and takes less time and memory",
        "only data parallel layouts; step times of such networks were compared with few published rows (docs/planner.md)",
    ]
    return _answer(network, machine, plans, precision, steps, notes)


def _micro_batches(text: object, batch: int, gpus: int) -> int:
    if text is None:
        return 1
    total = parse_count(text, what="global-batch")
    if total % (batch * gpus):
        raise BadRequest(
            f"global batch {total} is not divisible by {gpus} GPUs x {batch} samples of --input",
            hint=f"--global-batch {-(-total // (batch * gpus)) * batch * gpus}",
        )
    return total // (batch * gpus)


def _answer(
    network: CountedNetwork,
    machine: Machine,
    plans: list[DataParallelPlan],
    precision: str,
    steps: int,
    notes: list[str],
) -> CountedAnswer:
    best = plans[0]
    total = network.batch * steps * machine.gpus
    price = machine.price
    usd = None if price is None else price.usd_per_gpu_hour * machine.gpus / 3600.0 / best.samples_per_s * 1e6
    request = (
        f"{network.name} ({format_parameters(network.parameters)} parameters, {network.flops / network.batch / 1e9:,.3g} GFLOP a sample), "
        f"{machine.nodes} x {machine.gpus_per_node} {machine.gpu.name}, {network.batch} samples per GPU, global batch {total}, {precision}"
    )
    command = f"phalanx run --plan {best.text} -- python train.py"
    if not best.fits:
        command = f"phalanx plan --help, or a smaller batch in --input: {network.batch} samples per GPU do not fit"
    return CountedAnswer(
        fits=best.fits,
        reason=_reason(best, network),
        request=request,
        network=network,
        gpu=machine.gpu.name,
        gpus=machine.gpus,
        global_batch=total,
        plans=tuple(plans),
        usd_per_million=usd if best.fits else None,
        notes=tuple(notes),
        next_command=command,
    )


def _reason(best: DataParallelPlan, network: CountedNetwork) -> str:
    held = f"{format_decimal_bytes(best.used_bytes)} of {format_decimal_bytes(best.usable_bytes)}"
    if not best.fits:
        largest = max(best.memory_bytes, key=lambda name: best.memory_bytes[name])
        return (
            f"{network.name} does not fit: {best.text} needs {held}; {largest} alone take "
            f"{format_decimal_bytes(best.memory_bytes[largest])}"
        )
    return (
        f"{best.text} {'may fit' if best.is_tight else 'fits'}: {format_seconds(best.step_s)} per step ({format_seconds(best.low_s)} to "
        f"{format_seconds(best.high_s)}), {format_rounded(best.samples_per_s)} samples/s, {best.mfu:.0%} MFU, {held}"
    )


def counted_as_json(answer: CountedAnswer) -> dict[str, Any]:
    """Build the document of `--json`."""
    return {
        "fits": answer.fits,
        "reason": answer.reason,
        "layouts": [
            {
                "text": one.text,
                "fits": one.fits,
                "tight": one.is_tight,
                "ranks": one.shard * one.replicate,
                "memory": {
                    "total_bytes": one.used_bytes,
                    "usable_bytes": one.usable_bytes,
                    "items": dict(one.memory_bytes),
                },
                "step": {
                    "mid_s": one.step_s,
                    "low_s": one.low_s,
                    "high_s": one.high_s,
                    "items": dict(one.step_items_s),
                },
                "samples_per_s": one.samples_per_s,
                "mfu": one.mfu,
            }
            for one in answer.plans
        ],
        "counts": asdict(answer.network),
        "machine": {"gpu": answer.gpu, "gpus": answer.gpus},
        "asked": {"global_batch": answer.global_batch, "text": answer.request},
        "usd_per_million_samples": answer.usd_per_million,
        "notes": list(answer.notes),
        "next": answer.next_command,
    }
