"""Coefficients of the formulas: the share of a peak that is reached, the share of communication that is hidden, the time of the host.

They are data (`phalanx.planner.facts`, each with its origin), in two layers: `Physics` holds for every program on a machine, `Stack` for one
software stack. Both were fitted to published runs, with a prior for each coefficient. `benchmarks.planner` repeats the fit and tests it
on sources that the fit did not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """Coefficients that hold for every stack. Shares refer to the rates in `Gpu` and `Machine`.

    Attributes:
        matmul_share: share of the best measured matrix rate that is sustained over a whole step (heat, clocks, unlucky shapes).
        untuned_share: share of the peak that is assumed where no best measured rate is published.
        untuned_at_tflop_per_watt: the same for a GPU of NVIDIA that has bf16, and a peak of one TFLOP/s for each watt.
        untuned_fall: by how much that share is lower with e times as many TFLOP/s for each watt.
        matmul_bytes: share of a product's memory traffic that its arithmetic does not hide.
        fp8_share: share of the best measured fp8 rate, in addition to `matmul_share`.
        fp8_cast: passes over the operands to convert them to fp8, relative to three per activation and one per weight.
        memory_share: share of the memory bandwidth that simple kernels reach.
        elementwise: passes over activations by norms, activations and residuals, relative to the count in `layer.py`.
        unfused_attention: passes over the score matrix where attention is not fused, relative to the count in `layer.py`.
        link_share, network_share: share of link and network bandwidth that large collectives reach.
        latency_s: latency of one step of a collective within a node; between nodes it is twice that.
        interference: share of the hidden communication time by which the computation beside it slows down.
        pipeline_exposed: share of the time to send activations between stages that is not hidden.
        context_exposed: the same for keys and values in the ring of context parallel ranks.
        expert_imbalance: load of the busiest expert rank, relative to the mean.
        expert_product_s: time of one product of one expert beyond that of its arithmetic and bytes: its start and its last, partly filled tiles.
        expert_moves: passes to sort, copy and sum the tokens of experts, relative to the count in `layer_time.py`.
        expert_host_s: time that one core needs to issue one pass through one expert in 16 bits.
        loss: passes over logits and embeddings, relative to the count in `step.py`.
        optimizer: bytes moved per state, relative to the count in `step.py`.
        unpack: bytes moved to unpack 4-bit weights, relative to reading them and writing 16 bits.
        adapter_s: time that one core needs to issue what an adapter adds to one pass through its matrix.
        host_sharpness: exponent with which host and device time combine; a large one takes the larger of the two.
        step_s: constant time per step.
        spreads: standard deviation of the logarithm of each item of a step, by item name.
        fitted_gpus: name prefixes of the GPUs in the fitted runs.
    """

    matmul_share: float
    untuned_share: float
    untuned_at_tflop_per_watt: float
    untuned_fall: float
    matmul_bytes: float
    fp8_share: float
    fp8_cast: float
    memory_share: float
    elementwise: float
    unfused_attention: float
    link_share: float
    network_share: float
    latency_s: float
    interference: float
    pipeline_exposed: float
    context_exposed: float
    expert_imbalance: float
    expert_product_s: float
    expert_moves: float
    expert_host_s: float
    loss: float
    optimizer: float
    unpack: float
    adapter_s: float
    host_sharpness: float
    step_s: float
    spreads: Mapping[str, float] = field(default_factory=dict)
    fitted_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training program: framework, kernels and their settings.

    Attributes:
        elementwise: factor on `Physics.elementwise`; below 1 where kernels are fused or compiled.
        host_s: time that one core needs to issue one layer's forward pass; the step cannot be faster.
        shard_host_s: the same for the hooks of one layer that gather and release sharded parameters (ZeRO 3).
        tensor_exposed: share of tensor parallel communication that is not hidden.
        data_exposed: share of the gradient and parameter exchange at the end of a step that is never hidden.
        expert_exposed: share of the time to send tokens to their experts and back that is not hidden.
        expert_processors: share of a device's processors that send tokens to experts all the time, while the others compute.
        dispatch_once: a token is sent once to each node of its experts, instead of once to each expert.
        attention: name of the flash attention kernel: a scope of `coefficients.csv`.
        flash_shares: share of the best matrix rate that the kernel reaches forward for long sequences, by GPU name prefix; "" for all other GPUs.
        flash_backward: its rate backward, relative to forward.
        flash_ramp: tokens of a sequence with which it reaches half of those.
        parameter_bytes, gradient_bytes, state_bytes: stored per parameter: the copy that is multiplied, the gradient, and the
            optimizer states with the master copy.
        moment_bytes: of the states, what the moments take.
        shard_copy_bytes: with sharded parameters (ZeRO 3), stored per parameter beside the master copy of the optimizer.
        live_parameters: parameters that ZeRO 3 keeps gathered beside those in use, which with the output can be more than two layers.
        keeps_ends_gathered: embeddings and output are one sharded unit, which stays gathered from the forward to the end of the backward pass.
        step_bytes: allocated per updated parameter while the optimizer runs: flat and 32-bit copies of gradients, intermediate results.
        step_parameters: parameters that the optimizer updates at once; all where 0.
        reduce_buffers: under ZeRO 1 and 2, buffers of `bucket_parameters` gradients while a backward pass runs.
        gather_bytes, reduce_bytes: sent per parameter to gather it, and to reduce its gradient.
        loss_bytes: allocated at once in the loss, per token and word of the vocabulary.
        packing: the format of 4-bit weights (`PACKED_FORMATS`).
        packed_ends_bytes: stored per parameter of the embeddings and the output of a model with 4-bit weights.
        keeps_packed_inputs: the input of every product with 4-bit weights is kept for the backward pass.
        casts_adapters: adapters have 32 bits, and their inputs are cast.
        fragmentation: share of what torch has reserved that is in no tensor, while the device has room; where it has none, cached blocks are freed.
        score_bytes: stored per score of attention that is not fused.
        score_gradient_bytes: allocated per score while the gradients of one layer's scores are computed.
        memory_error: least factor to either end of the 80 % interval of its memory.
        activations: stored activations relative to the count in `memory.py`; below 1 where a compiler recomputes some of them.
        stored: bytes per token that autograd keeps of one layer, by training method: per feature of the hidden state, per feature of the MLP, and
            per feature of the block's input alone, without the inputs of adapters; without the method, the count in `memory.py`.
        offloads: what the stack can keep in the memory of the host (`Offload`).
        offloads_gradients: with the optimizer on the host, no whole gradients stay on the device under ZeRO 2 and 3, or on a single device.
        bucket_parameters: parameters whose gradients are on the device at once: in a buffer, or with the optimizer on the host.
        host_copy_bytes: fetched per parameter where the parameters are on the host.
        scoring_passes: forward passes over written answers before the update: by the reference, and by the model itself, whose probabilities
            several updates need.
        answers: how written answers of unequal length are computed together: "padded" to the longest, "packed" or "unpadded".
        graphs: can replay its step from CUDA graphs.
        sleeps: states and weights leave the device while the model writes answers.
        reference_on_host: the reference lies in the memory of the host, and is exchanged with the model to score.
        methods: what it trains (`TrainingMethod`); all where empty.
        optimizers: supported ones (`OptimizerKind`); all where empty.
        whole_gradients: under ZeRO 2, all micro-batches but the last add to unsharded gradients (FSDP) instead of reducing each time.
        accumulates_whole: under ZeRO 3 too, all micro-batches but the last add to whole gradients, in the width in which they are reduced.
        replicates_embedding: with tensor parallel, every rank has the whole input embedding.
        zeros, recomputations, precisions: supported values of each.
        experts: supports expert parallelism.
        splits: supports tensor, context and pipeline parallelism.
        splits_tied: supports tensor and pipeline parallelism for a model whose output shares the input embedding.
        interleaves: supports several runs of layers per pipeline stage.
        compares: trains on answers that are compared or rewarded too (DPO, GRPO), not only on text.
        whole_logits: with tensor parallel, every rank computes the loss over the whole vocabulary.
        spread: standard deviation of the logarithm of its step times, in addition to the spreads of the items.
    """

    name: str
    elementwise: float
    host_s: float
    tensor_exposed: float
    data_exposed: float
    expert_exposed: float = 1.0
    shard_host_s: float = 0.0
    expert_processors: float = 0.0
    dispatch_once: bool = False
    attention: str = "flash2"
    flash_shares: Mapping[str, float] = field(default_factory=dict)
    flash_backward: float = 0.75
    flash_ramp: float = 0.0
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    state_bytes: float = 12.0
    moment_bytes: float = 8.0
    shard_copy_bytes: float = 0.0
    live_parameters: float = 0.0
    keeps_ends_gathered: bool = False
    step_bytes: float = 0.0
    step_parameters: float = 0.0
    reduce_buffers: int = 0
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    loss_bytes: float = 10.0
    packing: str = "nf4-dq"
    packed_ends_bytes: float = 2.0
    keeps_packed_inputs: bool = False
    casts_adapters: bool = True
    fragmentation: float = 0.04
    score_bytes: float = 5.0
    score_gradient_bytes: float = 0.0
    memory_error: float = 1.0
    activations: float = 1.0
    stored: Mapping[str, Sequence[float]] = field(default_factory=dict)
    offloads: tuple[str, ...] = ()
    offloads_gradients: bool = True
    bucket_parameters: float = 0.0
    host_copy_bytes: float = 4.0
    scoring_passes: int = 2
    answers: str = "unpadded"
    graphs: bool = False
    sleeps: bool = False
    reference_on_host: bool = False
    methods: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    whole_gradients: bool = False
    accumulates_whole: bool = False
    replicates_embedding: bool = False
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputations: tuple[str, ...] = ("none", "selective", "full")
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp8", "fp32")
    experts: bool = True
    splits: bool = True
    splits_tied: bool = True
    interleaves: bool = True
    compares: bool = True
    whole_logits: bool = False
    spread: float = 0.1
    source: str = ""

    def flash_share(self, gpu_name: str) -> float:
        """Return the share for this GPU: the entry with the longest key that is a prefix of its name."""
        key = max((key for key in self.flash_shares if gpu_name.startswith(key)), key=len)
        return self.flash_shares[key]


def replayed_physics(physics: Physics) -> Physics:
    """Return the physics of a training whose kernels are replayed from CUDA graphs, so that the host issues no kernel."""
    return replace(physics, adapter_s=0.0, expert_host_s=0.0)


def replayed_stack(stack: Stack) -> Stack:
    """Do the same for the stack."""
    return replace(stack, host_s=0.0, shard_host_s=0.0)
