"""One MIG slice of a GPU as a device to plan on.

A slice has its own memory, a share of the bandwidth by its memory slices, and of the rates by its compute slices. Slices exchange data neither
over NVLink nor over PCIe, and a process uses one of them, so that a plan has one slice on each node.
Source: NVIDIA MIG User Guide, Supported MIG Profiles (fractions of memory and SMs), and CUDA on MIG ("no GPU to GPU P2P").
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import GpuRequest
from phalanx.planner.facts.gpus import GpuEntry
from phalanx.planner.facts.mig import find_mig_gpu


def plan_slice(request: GpuRequest, entry: GpuEntry, notes: list[str]) -> tuple[GpuRequest, GpuEntry]:
    """Return a request for whole devices, each of which is the MIG slice that was requested; requests for whole GPUs are unchanged.

    Raises:
        BadRequest: a part that is not a MIG slice, a profile that the GPU does not have, or several slices of one GPU for one program.
    """
    share = request.share
    if share is None:
        return request, entry
    if not share.profile:
        raise BadRequest(
            f"gpus: a plan needs whole GPUs or a MIG slice, not {request}", hint=f"write {request.model or 'h100'}:1"
        )
    known = find_mig_gpu(entry.gpu.name)
    names = [] if known is None else [one.name for one in known.profiles]
    profile = None if known is None else share.mig_profile(known.profiles)
    if known is None or profile is None:
        raise BadRequest(
            f"gpus: {entry.gpu.name} has no MIG slice {share.profile}",
            hint=f"known: {', '.join(names)}" if names else "a plan needs whole GPUs of this model",
        )
    if share.count > 1:
        raise BadRequest(
            "gpus: slices of one GPU do not exchange data, and a process uses one of them",
            hint=f"plan one: {request.model}.{profile.name}",
        )
    compute = profile.compute_slices / known.compute_slices
    memory = profile.memory_slices / known.memory_slices
    gpu = entry.gpu
    notes.append(
        f"{profile.name}: {profile.compute_slices} of {known.compute_slices} compute slices and {profile.memory_slices} of "
        f"{known.memory_slices} memory slices of {gpu.name}; no published row has a slice"
    )
    sliced = replace(
        gpu,
        name=f"{gpu.name}.{profile.name}",
        aliases=tuple(f"{alias}.{profile.name}" for alias in gpu.aliases[:1]),
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=gpu.memory_bytes_per_s * memory,
        flops={name: rate * compute for name, rate in gpu.flops.items()},
        best_flops={name: rate * compute for name, rate in gpu.best_flops.items()},
        link_bytes_per_s=0.0,
        link_domain=1,
        link_kind="pcie",
        watts=gpu.watts * compute,
    )
    nodes = request.nodes or 1
    whole = GpuRequest(total=nodes, nodes=nodes, per_node=1, model=request.model)
    return whole, replace(entry, gpu=sliced, gpus_per_node=1)
