"""Time of one iteration of an inference engine: one token of every running request, and a part of the prompts that wait (continuous batching).

Legend: D running requests, P prompt tokens in this iteration, T = D + P, c mean context, t tensor parallel ranks, L layers, d hidden,
R sustained FLOP/s, B bytes/s of memory, W bytes of the weights that T tokens visit.
    products      smooth maximum of 2 N' T / (t R) and W / (t B), with N' the parameters that a token visits
    cache         keys and values of all running requests, read once: D c kv / B, or the FLOPs of their scores where those take longer; engines
                  without split reads give each key-value head of a request to one of about 128 processors, which takes c kv' 128 / B
    prompts       4 h k L sum(tokens x context) / (t R_flash)
    small kernels passes over the activations, and a fixed time per layer (launch, synchronisation)
    all-reduce    two per layer of T d numbers: latency and bytes over the links
    host          a fixed time per iteration of the engine, and one per running request (sampling, scheduler); without CUDA graphs the host also
                  issues the kernels of each layer one by one, and the iteration takes at least as long as that
Of a mixture, T tokens visit E (1 - (1 - k/E)^T) of E experts if the router spreads them evenly.
With p pipeline stages the running requests form p groups: an iteration takes p times a stage with 1/p of them.
Sources: roofline after S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009; continuous batching: G. Yu et al., "Orca", OSDI 2022;
chunked prompts: A. Agrawal et al., "Sarathi-Serve", OSDI 2024; ring all-reduce: R. Thakur et al., 2005, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phalanx.planner.cost.machine import Gpu, peak_of, rate_of
from phalanx.planner.serving.replica import PRODUCT_PRECISION, WEIGHT_BYTES, ReplicaLayout, ServedModel

_HIDDEN_PASSES = 10.0  # over T d numbers in one layer, as in cost.layer_time
_WIDE_PASSES = 3.0  # over T f / t
_PROCESSORS = 128.0  # of a GPU: 108 in A100, 132 in H100, 142 in L40S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpeed:
    """Coefficients of an engine, fitted to published rows (`benchmarks.serving_plan`); times in seconds.

    Attributes:
        matmul_share, expert_share: sustained share of the best measured matrix rate; a further factor for routed experts.
        memory_share, cache_share: share of the memory's bandwidth for weights, and for keys and values.
        flash_share: share of the matrix rate in attention over prompts.
        untuned_share: share of the peak where no best rate was published.
        elementwise: factor on the passes of small kernels.
        layer_s, prompt_layer_s: fixed time of one layer; added where the iteration has prompts (no CUDA graph).
        reduce_s: latency of one all-reduce between two GPUs over NVLink; it grows with the logarithm of their number.
        bridge_factor: the same over PCIe, as a factor.
        link_share: share of the links' rate in an all-reduce.
        iteration_s: of the host, for each iteration.
        sequence_s: of the host, for each running request and iteration.
        request_s: before the first iteration: network, tokenizer.
        eager_layer_s: of the host, to issue the kernels of one layer without a CUDA graph; 0 where the engine is not written in Python.
        graphs: 1 if iterations replay CUDA graphs, else 0.
        chunk: the most tokens in one iteration.
        requests_max: the most running requests.
        unsplit: 1 if one processor reads the whole context of a head, 0 if many share it (flash decoding).
        memory_taken, overhead_bytes: share of the GPU's memory that the engine takes, and what it needs of it beside weights and cache.
        spreads: of the logarithm of measured over predicted, for "throughput", "tpot" and "ttft".
    """

    matmul_share: float
    expert_share: float
    memory_share: float
    cache_share: float
    flash_share: float
    untuned_share: float
    elementwise: float
    layer_s: float
    prompt_layer_s: float
    reduce_s: float
    bridge_factor: float
    link_share: float
    iteration_s: float
    sequence_s: float
    request_s: float
    eager_layer_s: float = 0.0
    graphs: float = 1.0
    chunk: float = 8192.0
    requests_max: float = 2048.0
    unsplit: float = 0.0
    memory_taken: float = 0.9
    overhead_bytes: float = 2 << 30
    spreads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationParts:
    """Seconds of one iteration by part."""

    products: float
    cache: float
    prompts: float
    small_kernels: float
    communication: float
    host: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.products + self.cache + self.prompts + self.small_kernels + self.communication + self.host


class IterationTimer:
    """Times the iterations of one replica. Everything that does not depend on the batch is computed once."""

    def __init__(
        self,
        model: ServedModel,
        gpu: Gpu,
        layout: ReplicaLayout,
        speed: ServingSpeed,
        *,
        network_bytes_per_s: float = 25e9,
    ) -> None:
        self.model, self.gpu, self.layout, self.speed = model, gpu, layout, speed
        shape, ranks = model.shape, layout.tensor
        self._layers = shape.layers / layout.stages
        rate = matrix_rate(gpu, speed, PRODUCT_PRECISION[model.weights])
        wide = matrix_rate(gpu, speed, "bf16")
        always, routed = (count / layout.stages for count in model.layer_weights)
        mixture = shape.mixture
        self._hit = 0.0 if mixture is None else mixture.per_token / mixture.experts
        self._token_s = 2.0 * (always / rate + routed * self._hit / (rate * speed.expert_share)) / ranks
        band = gpu.memory_bytes_per_s * speed.memory_share
        self._always_s = always * WEIGHT_BYTES[model.weights] / ranks / band
        self._routed_s = routed * WEIGHT_BYTES[model.weights] / ranks / band
        self._head_s = 2.0 * model.head_parameters / ranks / band
        self._logit_s = 2.0 * model.head_parameters / ranks / wide
        self._cache_s = 1.0 / (gpu.memory_bytes_per_s * speed.cache_share)
        self._head_bytes = model.token_bytes(shape.kv_heads) / layout.stages
        score = shape.heads * (_score_width(model)) / ranks * self._layers
        self._score_s = 2.0 * score / (wide * speed.flash_share)
        self._prompt_s = 2.0 * shape.heads * _prompt_width(model) / ranks * self._layers / (wide * speed.flash_share)
        ffn = shape.ffn if mixture is None else mixture.visited_ffn
        passes = _HIDDEN_PASSES * shape.hidden + _WIDE_PASSES * (ffn + shape.heads * shape.head_dim) / ranks
        self._small_s = 2.0 * passes * self._layers * speed.elementwise / gpu.memory_bytes_per_s
        self._reduce_s, self._reduce_token_s = _reduce(gpu, ranks, shape.hidden, speed)
        self._hop_token_s = 2.0 * shape.hidden / network_bytes_per_s

    def parts(self, running: float, context: float, prompt: float = 0.0, pairs: float = 0.0) -> IterationParts:
        """Return the time of one iteration.

        Args:
            running: requests that get one token.
            context: mean tokens of these requests.
            prompt: prompt tokens that are read.
            pairs: for these, the sum of tokens times the mean context that they attend to.
        """
        speed, stages = self.speed, self.layout.stages
        group = running / stages
        tokens = group + prompt
        weights = self._always_s
        if self._routed_s:
            weights += self._routed_s * (1.0 - (1.0 - self._hit) ** tokens)
        products = _smooth_max(self._token_s * tokens, weights)
        products += (self._head_s + self._logit_s * group) / stages
        cache = 0.0
        if running:
            held = self.model.context_bytes(context, self.layout.tensor) / stages * group
            alone = self._head_bytes * context * speed.unsplit * _PROCESSORS
            cache = max(held * self._cache_s, alone * self._cache_s, self._score_s * group * context)
        fixed = self._layers * (speed.layer_s + (speed.prompt_layer_s if prompt else 0.0))
        reduced = 2.0 * self._layers * (self._reduce_s + self._reduce_token_s * tokens)
        sent = 0.0 if stages == 1 else self._hop_token_s * tokens + 2.0 * speed.reduce_s
        device = IterationParts(
            products=products * stages,
            cache=cache * stages,
            prompts=self._prompt_s * pairs * stages,
            small_kernels=(fixed + self._small_s * tokens) * stages,
            communication=(reduced + sent) * stages,
            host=speed.iteration_s + speed.sequence_s * running,
        )
        if speed.graphs:
            return device
        issued_s = self._layers * stages * speed.eager_layer_s
        return replace(device, host=device.host + max(0.0, issued_s - (device.total_s - device.host)))

    def seconds(self, running: float, context: float, prompt: float = 0.0, pairs: float = 0.0) -> float:
        """Return the time of one iteration; arguments as for `parts`."""
        return self.parts(running, context, prompt, pairs).total_s


def matrix_rate(gpu: Gpu, speed: ServingSpeed, precision: str) -> float:
    """Return the sustained FLOP/s of large products; bf16 and fp16 replace each other where one is missing.

    Raises:
        KeyError: the GPU does not have the precision.
    """
    best = rate_of(gpu.best_flops, precision)
    return (best if best is not None else peak_of(gpu, precision) * speed.untuned_share) * speed.matmul_share


def _score_width(model: ServedModel) -> float:
    """Return the numbers per head and context token in scores and values of one new token."""
    latent = model.shape.latent
    return 2.0 * model.shape.head_dim if latent is None else 2.0 * latent.kv_rank + latent.rope_dim


def _prompt_width(model: ServedModel) -> float:
    """Return the same for prompts, where latent keys and values are expanded."""
    latent, width = model.shape.latent, model.shape.head_dim
    return 2.0 * width if latent is None else width + latent.rope_dim + latent.value_dim


def _reduce(gpu: Gpu, ranks: int, hidden: int, speed: ServingSpeed) -> tuple[float, float]:
    """Return the latency of one all-reduce of activations, and its time per token."""
    if ranks == 1:
        return 0.0, 0.0
    linked = gpu.link_domain >= ranks
    rate = (gpu.link_bytes_per_s if linked else gpu.pcie_bytes_per_s) * speed.link_share
    latency = speed.reduce_s * math.log2(ranks) * (1.0 if linked else speed.bridge_factor)
    return latency, 2.0 * (ranks - 1) / ranks * 2.0 * hidden / rate


def _smooth_max(left: float, right: float) -> float:
    """Return the cubic mean sum: a little above the larger one where both are near."""
    return math.cbrt(left**3 + right**3)
