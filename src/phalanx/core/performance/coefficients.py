"""The numbers between a formula and a real machine: how much of a peak is reached, what overlaps, how long a host takes.

They are data (`phalanx.facts`, each with its origin), in two layers: `Physics` holds for every program on a machine, `Stack` for one
software stack. Both were fitted to published runs with priors that say what was expected beforehand; `benchmarks.planner` fits them
again and shows how well they do on sources that the fit never saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """Of every stack. Shares are of the rates in `Gpu` and `Machine`.

    Attributes:
        matmul_share: of the best measured matrix rate, kept up over a whole step (heat, clocks, unlucky shapes).
        untuned_share: of the peak, where nobody published a best measured rate.
        matmul_bytes: of a product's memory traffic, how much its arithmetic does not hide.
        fp8_share: of the best measured fp8 rate, beside `matmul_share`.
        fp8_cast: passes over the operands to bring them to fp8, relative to three per activation and one per weight.
        memory_share: of the memory bandwidth, reached by simple kernels.
        elementwise: passes over activations by norms, activations and residuals, relative to the count in `layer.py`.
        flash_backward: rate of flash attention backward, relative to forward.
        unfused_attention: passes over the score matrix where attention is not fused, relative to the count in `layer.py`.
        link_share, network_share: of link and network bandwidth, reached by large collectives.
        latency_s: of one step of a collective within a node; between nodes twice that.
        interference: of hidden communication, how much slows the computation beside it.
        pipeline_exposed, context_exposed: of sending activations between stages, keys and values in the ring.
        expert_imbalance: of the busiest expert rank, relative to the mean.
        loss: passes over logits and embeddings, relative to the count in `step.py`.
        optimizer: bytes moved per state, relative to the count in `step.py`.
        host_sharpness: exponent by which host and device time combine; large for the larger of the two alone.
        step_s: per step, whatever the size.
        spreads: standard deviation of the logarithm of each item of a step, by its name.
        seen: beginnings of the names of GPUs that runs were fitted on.
    """

    matmul_share: float
    untuned_share: float
    matmul_bytes: float
    fp8_share: float
    fp8_cast: float
    memory_share: float
    elementwise: float
    flash_backward: float
    unfused_attention: float
    link_share: float
    network_share: float
    latency_s: float
    interference: float
    pipeline_exposed: float
    context_exposed: float
    expert_imbalance: float
    loss: float
    optimizer: float
    host_sharpness: float
    step_s: float
    spreads: Mapping[str, float] = field(default_factory=dict)
    seen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training program: framework, kernels and their settings.

    Attributes:
        elementwise: beside `Physics.elementwise`: below 1 where kernels are fused or compiled.
        host_s: time of one core to issue one layer's forward pass; the step cannot be faster.
        tensor_exposed: of tensor parallel communication, how much is not hidden.
        data_exposed: of gradient and parameter exchange once per step, how much is not hidden whatever the room.
        expert_exposed: of sending tokens to their experts and back, how much is not hidden.
        attention: which flash kernel: a key of `flash_shares`.
        flash_shares: of the sustained matrix rate, reached by that kernel forward, by the beginning of the GPU's name; "" for others.
        parameter_bytes, gradient_bytes, state_bytes: kept per parameter: the copy that is multiplied, the gradient, and optimizer
            states with master copy.
        gather_bytes, reduce_bytes: sent per parameter to gather it, and to reduce its gradient.
        loss_bytes: per token and word of the vocabulary, alive at once in the loss.
        activations: kept activations relative to the count in `memory.py`: below 1 where a compiler makes some of them again.
        whole_gradients: under ZeRO 2, micro-batches but the last add to unsharded gradients (FSDP) instead of reducing each time.
        zeros, recomputations, precisions: what it offers of each.
        experts: it spreads the experts of a mixture over ranks.
        splits_tied: it can split a model whose output shares the input embedding, by tensor or pipeline.
        whole_logits: with tensor parallel, every rank computes the loss over the whole vocabulary.
        spread: half of the 80 % interval of its step times beside what the formulas' items say, as a logarithm.
    """

    name: str
    elementwise: float
    host_s: float
    tensor_exposed: float
    data_exposed: float
    expert_exposed: float = 1.0
    attention: str = "flash2"
    flash_shares: Mapping[str, float] = field(default_factory=dict)
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    state_bytes: float = 12.0
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    loss_bytes: float = 10.0
    activations: float = 1.0
    whole_gradients: bool = False
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputations: tuple[str, ...] = ("none", "selective", "full")
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp8", "fp32")
    experts: bool = True
    splits_tied: bool = True
    whole_logits: bool = False
    spread: float = 0.1
    source: str = ""

    def flash_share(self, gpu_name: str) -> float:
        """Of this GPU: the longest key that its name begins with."""
        key = max((key for key in self.flash_shares if gpu_name.startswith(key)), key=len)
        return self.flash_shares[key]
