"""The GPUs of a replica of a model: as asked, or the fewest of the fleet that hold its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.cli.serve.inference_engines import InferenceEngine
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.fleet.node import NodeState
from phalanx.core.units import GIB, format_bytes
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.model_memory import ModelNeeds, divides_heads, fewest_gpus, fits

if TYPE_CHECKING:
    from phalanx.wire.api.nodes import NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A model of GPU of the fleet. `memory_bytes`: of its smallest; 0 for virtual ones, which have none."""

    name: str
    memory_bytes: int
    nodes: tuple[str, ...]


def gpu_models(nodes: Sequence[NodeView]) -> list[GpuModel]:
    """Return the models of GPUs of the nodes that are up, those with the most memory first."""
    memory: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for node in nodes:
        for device in node.devices if node.state is NodeState.UP else ():
            size = 0 if device.virtual else device.memory_bytes
            memory[device.model] = min(size, memory.get(device.model, size))
            if node.id not in names.setdefault(device.model, []):
                names[device.model].append(node.id)
    found = [GpuModel(name=one, memory_bytes=memory[one], nodes=tuple(names[one])) for one in memory]
    return sorted(found, key=lambda one: (-one.memory_bytes, one.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """The GPUs of a replica: on each of its nodes, as `text` for the job file. `models`: only these; empty for any."""

    gpus: int
    nodes: int = 1
    text: str = ""
    whole: bool = True
    models: tuple[str, ...] = ()


def fitting_shape(
    row: InferenceEngine, needs: ModelNeeds, gpus: GpuRequest | None, fleet: Sequence[GpuModel]
) -> ReplicaShape:
    """Return the GPUs that a replica gets: as asked, narrowed to the models whose memory is enough; without a request, the fewest that fit.

    Raises:
        NeverFits: the weights fit into no such GPUs; the hint has the smallest number that would do.
        BadRequest: the heads cannot be divided, or the request has several shapes.
    """
    if gpus is not None and gpus.alternatives:
        raise BadRequest(f"--gpus {gpus}: a model needs one shape", hint="--gpus 2, or --gpus h100,h200:2")
    if gpus is not None and (gpus.share is not None or gpus.total == 0):
        return ReplicaShape(gpus=0 if gpus.share is None else 1, nodes=gpus.nodes or 1, text=str(gpus), whole=False)
    candidates = [one for one in fleet if gpus is None or _accepts(gpus, one)]
    if gpus is None and not candidates:
        return ReplicaShape(gpus=0, text="0", whole=False)
    nodes = 1 if gpus is None else gpus.nodes or 1
    share, splits = row.memory_share, row.splits_heads
    known = {one.name: one for one in candidates if one.memory_bytes}
    fewest = {
        name: fewest_gpus(needs, one.memory_bytes, share, splits_heads=splits, nodes=nodes)
        for name, one in known.items()
    }
    if gpus is None:
        able = {name: count for name, count in fewest.items() if count}
        if fewest and not able:
            raise NeverFits(f"{_needs_text(needs)} fit no number of the fleet's GPUs", hint="quantise the model")
        if not able:  # virtual GPUs have no memory
            return ReplicaShape(gpus=1, text="1")
        count = min(able.values())
        models = tuple(name for name in able if able[name] <= count)
        return _shape(count, 1, models, narrowed=len(models) < len(candidates))
    on_each = gpus.total // nodes
    if splits and not divides_heads(needs, on_each):
        near = next(count for count in range(on_each, 0, -1) if divides_heads(needs, count))
        raise BadRequest(
            f"{needs.heads} attention heads cannot be divided among {on_each} GPUs",
            hint=f"--gpus {near}, or another divisor",
        )
    able_models = tuple(
        name for name, one in known.items() if fits(needs, on_each, one.memory_bytes, share, nodes=nodes)
    )
    if known and not able_models and len(known) == len(candidates):
        best = min((count, name) for name, count in fewest.items() if count) if any(fewest.values()) else None
        largest = max(known.values(), key=lambda one: one.memory_bytes)
        raise NeverFits(
            f"{_needs_text(needs)} do not fit {on_each * nodes} x {largest.name} with {format_bytes(largest.memory_bytes)} each",
            hint="quantise the model"
            if best is None
            else f"--gpus {_text(best[0], nodes, (best[1],))} is the smallest number that fits",
        )
    narrowed = bool(able_models) and len(able_models) < len(candidates)
    return _shape(on_each, nodes, able_models if narrowed else (), narrowed=narrowed, asked=gpus)


def _shape(
    count: int, nodes: int, models: tuple[str, ...], *, narrowed: bool, asked: GpuRequest | None = None
) -> ReplicaShape:
    kinds = models if narrowed else (asked.kinds_text,) if asked is not None and asked.kinds_text else ()
    return ReplicaShape(gpus=count, nodes=nodes, text=_text(count, nodes, kinds), models=models if narrowed else ())


def _text(count: int, nodes: int, kinds: Sequence[str]) -> str:
    """Return GPUs in the grammar of a job file."""
    return f"{f'{nodes}x' if nodes > 1 else ''}{','.join(kinds)}{':' if kinds else ''}{count}"


def _needs_text(needs: ModelNeeds) -> str:
    cache = (
        f" and {format_bytes(needs.cache_bytes)} of cache for {needs.floor_tokens:,} tokens" if needs.kv_bytes else ""
    )
    return f"{format_bytes(needs.weights_bytes)} of weights{cache}"


def _accepts(gpus: GpuRequest, one: GpuModel) -> bool:
    if not gpus.kinds_text:
        return True
    gib = one.memory_bytes / GIB
    return any((model is None or model == one.name) and (least is None or gib >= least) for model, least in gpus.kinds)


def candidate_nodes(fleet: Sequence[GpuModel], gpus: GpuRequest | None) -> list[str]:
    """Return the nodes that a replica may run on; none for any."""
    if gpus is not None and gpus.total == 0 and gpus.share is None:
        return []
    return sorted({node for one in fleet if gpus is None or _accepts(gpus, one) for node in one.nodes})


def asked_gpus(keys: Mapping[str, object]) -> GpuRequest | None:
    """Return the GPUs of the options; None without any."""
    asked = {key: keys[key] for key in ("gpus", "nodes", "share") if keys.get(key) is not None}
    return spec_from_mapping({"run": "model", **asked}, workdir="/").role.gpus if asked else None
