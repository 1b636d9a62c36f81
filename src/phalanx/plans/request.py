"""Parse the options of `phalanx plan` into a planner request: model, machine, task. Every error is one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import PRECISIONS, Layout, parse_layout
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.machine import Machine, Price
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.plans.amounts import format_tokens, parse_switch, parse_tokens
from phalanx.plans.global_batch import parse_global_batch
from phalanx.plans.machine import PlannedFleet, machine_from_head, machine_from_options
from phalanx.plans.method import WrittenAnswers, method_word
from phalanx.plans.option_words import flag_of
from phalanx.plans.training import TrainingInputs, parse_training

if TYPE_CHECKING:
    from phalanx.planner.facts.machines import FactTables

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

    notes: list[str] = []
    tables = read_fact_tables(home, tuple(options["prices"]))
    training = parse_training(options, home=home, files=files, notes=notes)
    machine = _machine(options, fleet, tables, notes)
    layout = None if options["layout"] is None else parse_layout(options["layout"])
    named = find_stack(options["stack"]) if options["stack"] else None
    precision = _precision(options["precision"], layout, options["layout"], machine, named)
    batch = parse_global_batch(options["global_batch"], training, layout=layout, gpus=machine.gpus, notes=notes)
    stack = _stack(named, training, precision, notes)
    inputs = PlanInputs(
        model=training.model,
        machine=machine,
        seq=training.seq,
        global_batch=batch,
        tokens=None if options["tokens"] is None else parse_tokens(options["tokens"]),
        method=training.method,
        precision=precision,
        stack=stack,
        cuda_graphs=parse_graphs(options["cuda_graphs"], stack, training.objective),
        optimizer=training.optimizer,
        offload=training.offload,
        objective=training.objective,
        answers=training.answers,
        samples=training.samples,
        layout=layout,
        model_argument=options["model"],
        stated_batch="" if options["global_batch"] is None else f" --global-batch {batch}",
        arguments=_arguments(options),
        notes=tuple(notes),
    )
    return replace(inputs, stated=_stated(options, inputs))


def _machine(
    options: Mapping[str, Any], fleet: Callable[[], PlannedFleet] | None, tables: FactTables, notes: list[str]
) -> Machine:
    """Return the GPUs of the fleet, or those that the options name."""
    if options["fleet"] != "here":
        return machine_from_options(options, tables, notes)
    if fleet is None:
        raise BadRequest("fleet: no fleet is known here", hint="name the GPUs")
    return machine_from_head(fleet(), options, tables, notes)


def _stack(named: Stack | None, training: TrainingInputs, precision: str, notes: list[str]) -> Stack:
    """Return the named stack, else the default."""
    from phalanx.planner.facts.coefficient_table import default_stack

    return named or default_stack(
        training.model,
        precision,
        notes,
        adapters=training.method is not TrainingMethod.FULL,
        preferences=training.objective is not Objective.CROSS_ENTROPY,
        writes=training.objective is Objective.GRPO,
        offload=training.offload is not Offload.NONE,
    )


def _arguments(options: Mapping[str, Any]) -> str:
    """Return the model with its GPUs, as typed."""
    gpus = f" --gpus {options['gpus']}" if options["gpus"] else ""
    return f"{options['model']}{gpus}" + (" --fleet here" if options["fleet"] else "")


def _stated(options: Mapping[str, Any], inputs: PlanInputs) -> str:
    """Return the stated options of `PlanInputs.stated`, as they were read."""
    read: dict[str, object] = {
        "seq": inputs.seq,
        "optimizer": inputs.optimizer.value,
        "offload": inputs.offload.value,
        "host_memory": options["host_memory"],
        "precision": inputs.precision,
        "stack": inputs.stack.name,
        "cuda_graphs": "on" if inputs.cuda_graphs else "off",
    }
    if inputs.samples is not None:
        read |= {"mean_length": inputs.samples.mean, "packing": inputs.samples.batching.value}
    if inputs.answers is not None:
        answers = inputs.answers
        read |= {"prompt_tokens": answers.prompt, "answer_tokens": answers.answer}
        read |= {"group": answers.group, "updates": answers.updates}
    return "".join(
        f" --{flag_of(name)} {value}"
        for name, value in read.items()
        if options[name] is not None and value not in {OptimizerKind.ADAMW, Offload.NONE}
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
