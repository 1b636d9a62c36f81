"""Parse what a plan trains: the model, its samples or answers, the method and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.plans.amounts import parse_count
from phalanx.plans.method import WrittenAnswers, parse_answers, parse_method
from phalanx.plans.sample_lengths import parse_samples

SEQ_DEFAULT: Final = 4096  # positions: as Llama 2, H. Touvron et al., 2023


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """What is trained, on any GPUs and by any program.

    Attributes:
        seq: positions of one sequence.
        answers: what the model writes for GRPO; None for other objectives.
        samples: lengths of the samples; None if every sequence is full, or the model writes them.
    """

    model: ModelShape
    seq: int
    objective: Objective
    method: TrainingMethod
    optimizer: OptimizerKind
    offload: Offload
    answers: WrittenAnswers | None
    samples: SampleBatches | None

    @property
    def sequence_tokens(self) -> int:
        """Mean tokens that count of one sequence of the batch."""
        return self.seq if self.samples is None else max(1, round(self.samples.tokens))


def parse_training(options: Mapping[str, Any], *, home: str, files: bool, notes: list[str]) -> TrainingInputs:
    """Parse the options; `home`, `files` and `notes` as for `parse_plan_inputs`.

    Raises:
        BadRequest: unknown names, impossible sizes, or contradictions.
        BadFile: a config cannot be read.
    """
    from phalanx.planner.facts.model_argument import parse_model_argument

    objective, method = parse_method(options["method"])
    optimizer, offload = _optimizer(options["optimizer"]), _offload(options["offload"])
    model = parse_model_argument(options["model"], home=home, notes=notes, files=files)
    seq = _seq(options["seq"], model)
    return TrainingInputs(
        model=model,
        seq=seq,
        objective=objective,
        method=method,
        optimizer=optimizer,
        offload=offload,
        answers=parse_answers(options, objective, seq),
        samples=parse_samples(options, objective, seq),
    )


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
