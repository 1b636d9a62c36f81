"""Parse the options of `phalanx plan` into a planner request: model, machine, task. Every error is one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import PRECISIONS, Layout, parse_layout
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.machine import Machine, Price
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.plans.amounts import format_tokens, parse_count, parse_switch, parse_tokens
from phalanx.plans.machine import PlannedFleet, machine_from_head, machine_from_options
from phalanx.plans.method import WrittenAnswers, method_word, parse_answers, parse_method
from phalanx.plans.sample_lengths import parse_samples

SEQ_DEFAULT: Final = 4096  # positions: as Llama 2, H. Touvron et al., 2023
BATCH_DEFAULT_TOKENS: Final = 4_194_304  # per step in full training: as Llama 1 and 2
ADAPTER_BATCH_DEFAULT: Final = 64  # sequences per step for adapters: published recipes use 16 to 128
SAMPLES_DEFAULT: Final = {
    Objective.DPO: (128, "pairs of answers per step"),  # recipes use 32 to 256
    Objective.GRPO: (512, "answers per step"),  # 64 prompts with the usual eight answers
}
_FLAGS: Final = {
    "prompt_tokens": "in",
    "answer_tokens": "out",
    "cuda_graphs": "cuda-graphs",
    "host_memory": "host-memory",
    "mean_length": "mean-length",
}
# without fp8, which does not preserve the loss of every training and is used on request only
_PRECISION_ORDER: Final = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """A planner request. `notes`: assumptions; `model_argument` and `arguments`: the model, and model with GPUs, as typed;
    `stated`: the other options that decide what fits, each after a space, without method, layout and `stated_batch`, the global batch.
    """

    model: ModelShape
    machine: Machine
    seq: int
    global_batch: int
    tokens: float | None
    method: TrainingMethod
    precision: str
    stack: Stack
    layout: Layout | None
    model_argument: str
    arguments: str
    notes: tuple[str, ...] = ()
    stated: str = ""
    stated_batch: str = ""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    offload: Offload = Offload.NONE
    objective: Objective = Objective.CROSS_ENTROPY
    answers: WrittenAnswers | None = None
    samples: SampleBatches | None = None
    cuda_graphs: bool | None = None

    @property
    def method_word(self) -> str:
        """The value of `--method`."""
        return method_word(self.objective, self.method)

    @property
    def summary(self) -> str:
        """The request in one line."""
        from phalanx.plans.formulas import describe_model

        machine = self.machine
        whole = f"{machine.nodes} {'node' if machine.nodes == 1 else 'nodes'} x {machine.gpus_per_node} = {machine.gpus} {machine.gpu.name}"
        method = {TrainingMethod.FULL: "full training", TrainingMethod.LORA: "LoRA", TrainingMethod.QLORA: "QLoRA"}[
            self.method
        ]
        if self.objective is not Objective.CROSS_ENTROPY:
            method = f"{self.objective.value.upper()} ({method})"
        method += "" if self.optimizer is OptimizerKind.ADAMW else f" with {self.optimizer.value}"
        method += {
            Offload.NONE: "",
            Offload.OPTIMIZER: " with its optimizer on the host",
            Offload.PARAMETERS: " with parameters and optimizer on the host",
        }[self.offload]
        written = ""
        if self.answers is not None:
            written = f" (prompts of {self.answers.prompt}, {self.answers.group} answers of {self.answers.answer} each)"
        if self.samples is not None:
            written = f" ({self.samples.batching.value} samples of {self.samples.mean} tokens)"
        on = "" if self.tokens is None else f" on {format_tokens(self.tokens)} tokens"
        return f"{describe_model(self.model)}, {method}{on}: {whole}, sequence {self.seq}{written}, global batch {self.global_batch}, {self.precision}"


def parse_plan_inputs(
    options: Mapping[str, Any], *, home: str = "", fleet: Callable[[], PlannedFleet] | None = None, files: bool = True
) -> PlanInputs:
    """Parse the options.

    Args:
        options: the command's options, as typed.
        home: the state folder with the user's own facts; empty for none.
        fleet: returns the fleet for `--fleet here`.
        files: whether the model may be the path of a file. False for requests that come from another machine.

    Raises:
        BadRequest: unknown names, impossible sizes, or contradictions.
        BadFile: a config or price list cannot be read.
        PhalanxError: the head does not answer.
    """
    from phalanx.planner.facts.coefficient_table import find_stack
    from phalanx.planner.facts.machines import read_fact_tables
    from phalanx.planner.facts.model_argument import parse_model_argument

    notes: list[str] = []
    tables = read_fact_tables(home, tuple(options["prices"]))
    objective, method = parse_method(options["method"])
    optimizer, offload = _optimizer(options["optimizer"]), _offload(options["offload"])
    model = parse_model_argument(options["model"], home=home, notes=notes, files=files)
    seq = _seq(options["seq"], model)
    answers = parse_answers(options, objective, seq)
    samples = parse_samples(options, objective, seq)
    if options["fleet"] == "here":
        if fleet is None:
            raise BadRequest("fleet: no fleet is known here", hint="name the GPUs")
        machine = machine_from_head(fleet(), options, tables, notes)
    else:
        machine = machine_from_options(options, tables, notes)
    layout = None if options["layout"] is None else parse_layout(options["layout"])
    named = None if not options["stack"] else find_stack(options["stack"])
    precision = _precision(options["precision"], layout, options["layout"], machine, named)
    counted = seq if samples is None else max(1, round(samples.tokens))
    grain = batch_grain(machine.gpus, answers)
    batch = _batch(options["global_batch"], counted, objective, method, layout, grain, notes)
    if answers is not None and batch % answers.group:
        raise BadRequest(
            f"global batch {batch} is not divisible by groups of {answers.group} answers",
            hint=f"use a multiple of {answers.group}",
        )
    if answers is not None and batch % answers.updates:
        raise BadRequest(
            f"global batch {batch} is not divisible by {answers.updates} updates", hint="use a divisor for --updates"
        )
    stack = _stack(options["stack"], model, precision, objective, method, offload, notes)
    inputs = PlanInputs(
        model=model,
        machine=machine,
        seq=seq,
        global_batch=batch,
        tokens=None if options["tokens"] is None else parse_tokens(options["tokens"]),
        method=method,
        precision=precision,
        stack=stack,
        cuda_graphs=parse_graphs(options.get("cuda_graphs"), stack, objective),
        optimizer=optimizer,
        offload=offload,
        objective=objective,
        answers=answers,
        samples=samples,
        layout=layout,
        model_argument=options["model"],
        stated_batch="" if options["global_batch"] is None else f" --global-batch {batch}",
        arguments=" ".join(
            [
                options["model"],
                *(["--gpus", options["gpus"]] if options["gpus"] else []),
                *(["--fleet", "here"] if options["fleet"] else []),
            ]
        ),
        notes=tuple(notes),
    )
    return replace(inputs, stated=_stated(options, inputs))


def _stack(
    text: Any,
    model: ModelShape,
    precision: str,
    objective: Objective,
    method: TrainingMethod,
    offload: Offload,
    notes: list[str],
) -> Stack:
    """Return the given stack, else the default."""
    from phalanx.planner.facts.coefficient_table import default_stack, find_stack

    if text:
        stack = find_stack(text)
        if objective is not Objective.CROSS_ENTROPY and not stack.compares:
            raise BadRequest(
                f"stack: {stack.name} trains on text only, not on answers that are compared ({objective.value})",
                hint="use --stack transformers, verl or nemo-rl",
            )
        return stack
    return default_stack(
        model,
        precision,
        notes,
        adapters=method is not TrainingMethod.FULL,
        preferences=objective is not Objective.CROSS_ENTROPY,
        writes=objective is Objective.GRPO,
        offload=offload is not Offload.NONE,
    )


def _stated(options: Mapping[str, Any], inputs: PlanInputs) -> str:
    """Return the stated options of `PlanInputs.stated`, as they were read."""
    read: dict[str, object] = {
        "seq": inputs.seq,
        "optimizer": inputs.optimizer.value,
        "offload": inputs.offload.value,
        "host_memory": options.get("host_memory"),
        "precision": inputs.precision,
        "stack": inputs.stack.name,
        "cuda_graphs": "on" if inputs.cuda_graphs else "off",
    }
    if inputs.samples is not None:
        read |= {"mean_length": inputs.samples.mean, "packing": inputs.samples.batching.value}
    if inputs.answers is not None:
        answers = inputs.answers
        read |= {"prompt_tokens": answers.prompt, "answer_tokens": answers.answer, "group": answers.group}
        read |= {"updates": answers.updates}
    return "".join(
        f" --{_FLAGS.get(name, name)} {value}"
        for name, value in read.items()
        if options.get(name) is not None and value not in {OptimizerKind.ADAMW, Offload.NONE}
    )


def format_price(price: Price | None) -> str:
    """Format `$2.69 a GPU-hour (RunPod, on-demand, 2026-11-09)`."""
    if price is None:
        return ""
    region = f", {price.region}" if price.region else ""
    return f"${price.usd_per_gpu_hour:.2f} a GPU-hour ({price.offer}, {price.kind}{region}, {price.fact.date})"


def parse_graphs(text: object, stack: Stack, objective: Objective) -> bool | None:
    """Return whether kernels are replayed from CUDA graphs; None for the default of each program: engines do, trainings do not.

    Raises:
        BadRequest: not on or off, or the training program cannot.
    """
    graphs = parse_switch(text, what="cuda-graphs")
    if graphs and not stack.graphs:
        raise BadRequest(
            f"cuda-graphs: {stack.name} captures no training step",
            hint="leave the option out: its rollouts have CUDA graphs"
            if objective is Objective.GRPO
            else "--stack megatron-core, or leave the option out",
        )
    return graphs


def _optimizer(text: object) -> OptimizerKind:
    """Return the optimizer; names of transformers and bitsandbytes (`paged_adamw_8bit`, `adamw_bnb_8bit`, `adamw_torch_4bit`) are read too."""
    word = (
        "".join(one for one in str(text).strip().lower() if one.isalnum())
        .replace("bnb", "")
        .replace("torch", "")
        .removesuffix("32bit")
    )
    for kind in OptimizerKind:
        if word == kind.value.replace("-", ""):
            return kind
    hint = suggestion(str(text), list(OptimizerKind))
    raise BadRequest(f"optimizer: {str(text)[:60]!r} must be one of {', '.join(OptimizerKind)}", hint=hint)


def _offload(text: object) -> Offload:
    word = str(text).strip().lower()
    if word not in set(Offload):
        hint = suggestion(word, list(Offload))
        raise BadRequest(f"offload: {str(text)[:60]!r} must be one of {', '.join(Offload)}", hint=hint)
    return Offload(word)


def _seq(text: object, model: ModelShape) -> int:
    """Return the given sequence length, else the default, at most the model's number of position vectors."""
    if text is None:
        return min(SEQ_DEFAULT, model.positions or SEQ_DEFAULT)
    seq = parse_count(text, what="seq")
    if model.positions and seq > model.positions:
        raise BadRequest(
            f"seq: {model.name} has position vectors for {model.positions} positions, not {seq}",
            hint=f"--seq {model.positions}",
        )
    return seq


def batch_grain(gpus: int, answers: WrittenAnswers | None) -> int:
    """Return what a batch must be a multiple of, so that it divides among the GPUs in each update, and into the answers to a prompt."""
    return gpus if answers is None else math.lcm(gpus * answers.updates, answers.group)


def _batch_default(default: int, grain: int) -> int:
    """Return the next multiple of `grain`; the default itself where answers to a prompt or updates make the step much larger."""
    batch = -(-default // grain) * grain
    return batch if batch <= 2 * default else default


def _batch(
    text: object,
    seq: int,
    objective: Objective,
    method: TrainingMethod,
    layout: Layout | None,
    grain: int,
    notes: list[str],
) -> int:
    """Return the given sequences per step, else those of the given layout, else the next multiple of `grain` from the default on."""
    if text is not None:
        return parse_count(text, what="global-batch")
    if layout is not None and (layout.micro_batches > 1 or layout.micro_batch > 1):
        return layout.global_batch
    if objective is not Objective.CROSS_ENTROPY:
        default, what = SAMPLES_DEFAULT[objective]
        batch = _batch_default(default, grain)
        notes.append(f"global batch not stated: {batch} {what}")
        return batch
    default = ADAPTER_BATCH_DEFAULT if method is not TrainingMethod.FULL else max(1, BATCH_DEFAULT_TOKENS // seq)
    batch = -(-default // grain) * grain
    notes.append(f"global batch not stated: {batch} sequences = {format_tokens(batch * seq)} tokens per step")
    return batch


def _precision(text: object, layout: Layout | None, layout_words: object, machine: Machine, stack: Stack | None) -> str:
    """Return the given precision, else the best one without fp8 that the GPU and the named stack have."""
    has = machine.gpu.flops
    stated = layout.precision if layout is not None and "precision" in str(layout_words).lower() else None
    if text is None and stated is None:
        trained = _PRECISION_ORDER if stack is None else stack.precisions
        return next((name for name in _PRECISION_ORDER if name in has and name in trained), "bf16")
    word = str(stated if text is None else text).strip().lower()
    if stated not in (None, word):
        raise BadRequest(f"precision: {word} contradicts {stated} in the layout", hint="give one of the two")
    if word not in PRECISIONS:
        hint = suggestion(word, PRECISIONS)
        raise BadRequest(f"precision: {text!r} must be one of {', '.join(PRECISIONS)}", hint=hint)
    if word not in has:
        raise BadRequest(f"precision: {machine.gpu.name} does not support {word}", hint=f"supported: {', '.join(has)}")
    return word
