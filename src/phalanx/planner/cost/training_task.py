"""The training task that a layout is evaluated for, and the parameters that one rank holds under a layout."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind


class TrainingMethod(enum.StrEnum):
    """Training method: which parameters are trained."""

    FULL = "full"
    LORA = "lora"  # low-rank adapters and frozen 16-bit weights
    QLORA = "qlora"  # low-rank adapters and frozen 4-bit weights


class Objective(enum.StrEnum):
    """What the loss compares.

    DPO has pairs of a chosen and a rejected answer, and GRPO answers that the model itself writes; both also ask a frozen reference model how
    likely each answer is. With adapters, the reference is the model without them. Sources: R. Rafailov et al., "Direct Preference
    Optimization", 2023, section 4; Z. Shao et al., "DeepSeekMath", 2024, section 4.1.
    """

    CROSS_ENTROPY = "cross-entropy"
    DPO = "dpo"
    GRPO = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """The training task, independent of its layout.

    Attributes:
        adapter_share: parameters of the LoRA adapters as a share of all parameters.
        adapters: names of the matrices with an adapter (`ModelShape.layer_matrices`); all of them where empty.
        flash: attention is fused.
        optimizer: the optimizer of what is trained.
        offload: what lies in the memory of the host.
        objective: what the loss compares.
        attended: share of the scores of a whole sequence that is computed: less than 1 where it holds several samples.
        engine_bytes: least memory that an inference engine on the same devices needs while the model writes answers.
    """

    model: ModelShape
    seq: int
    method: TrainingMethod = TrainingMethod.FULL
    adapter_share: float = 0.005
    adapters: tuple[str, ...] = ()
    flash: bool = True
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    offload: Offload = Offload.NONE
    objective: Objective = Objective.CROSS_ENTROPY
    attended: float = 1.0
    engine_bytes: float = 0.0

    @property
    def sequences(self) -> int:
        """Sequences of one sample: chosen and rejected answer of a pair."""
        return 2 if self.objective is Objective.DPO else 1

    @property
    def has_reference(self) -> bool:
        """Whether a reference model computes each sample too."""
        return self.objective is not Objective.CROSS_ENTROPY

    def with_lengths(self, *, seq: int, attended: float) -> TrainingTask:
        """Return the task with sequences of so many positions."""
        return replace(self, seq=max(1, seq), attended=attended)

    def computed(self, layout: Layout) -> Layout:
        """Return the layout with micro-batches counted in sequences instead of samples."""
        return layout if self.sequences == 1 else replace(layout, micro_batch=self.sequences * layout.micro_batch)

    @property
    def adapted(self) -> Sequence[tuple[int, int]]:
        """Inputs and outputs of each matrix of a layer that has an adapter."""
        if self.method is TrainingMethod.FULL:
            return ()
        return [size for name, size in self.model.layer_matrices.items() if not self.adapters or name in self.adapters]


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank: those common to all data parallel ranks, and its share of the routed experts."""

    common: float
    routed: float

    @property
    def total(self) -> float:
        """Number of parameters."""
        return self.common + self.routed

    def sharded(self, layout: Layout) -> float:
        """Return the parameters per rank after sharding over data parallel ranks. Copies of one expert lie on fewer ranks."""
        shards = layout.shard * layout.context
        return self.common / shards + self.routed / max(1.0, shards / layout.expert)


def layer_parameters(model: ModelShape, layout: Layout) -> RankParameters:
    """Return the parameters of the mean layer, before sharding over data parallel ranks."""
    dense, mixed = model.dense_layers, model.layers - model.dense_layers
    count = model.layers * model.attention_parameters + dense * model.dense_mlp_parameters
    routed = 0.0
    if model.mixture is not None:
        mixture = model.mixture
        count += mixed * (model.hidden * mixture.experts + model.mlp_matrices * model.hidden * mixture.shared_ffn)
        routed = mixed * model.expert_parameters / layout.expert
    return RankParameters(count / layout.tensor / model.layers, routed / layout.tensor / model.layers)


def rank_parameters(model: ModelShape, layout: Layout) -> RankParameters:
    """Return the parameters of the largest stage, before sharding over data parallel ranks: its layers and one end of the model."""
    ends = model.vocab * model.hidden * (1 if model.tied or layout.pipeline > 1 else 2)
    layer, layers = layer_parameters(model, layout), -(-model.layers // layout.pipeline)
    return RankParameters(layer.common * layers + ends / layout.tensor, layer.routed * layers)


def gathers_parameters(task: TrainingTask, layout: Layout) -> bool:
    """Return whether a rank has only the layers in use whole: parameters are sharded, or on the host."""
    return layout.zero == 3 or task.offload is Offload.PARAMETERS


def updated_parameters(task: TrainingTask, layout: Layout) -> float:
    """Return the trained parameters that the optimizer of one rank updates: those of its shard where states are sharded."""
    held = rank_parameters(task.model, layout)
    share = 1.0 if task.method is TrainingMethod.FULL else task.adapter_share
    return share * (held.sharded(layout) if layout.zero else held.total)
