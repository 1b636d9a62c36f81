"""Checks of a request for MIG slices at submit: the profile exists on the model, the model is clear, and each task gets one slice.

Whether nodes can ever hold the slices is for `core.scheduling.feasibility`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import device_fits, model_fits
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest, ShareRequest, map_choices
from phalanx.core.work.mig_request import profile_milli, unknown_profile_hint
from phalanx.core.work.spec import LaunchMode, Role
from phalanx.planner.facts.mig import find_mig_gpu, read_mig_gpus


def checked_slices(role: Role, nodes: Collection[Node], *, has_steps: bool) -> Role:
    """Check a role that asks for MIG slices, and record what a slice takes of a device; others are unchanged.

    Args:
        role: of a job.
        nodes: of the fleet.
        has_steps: it is a batch script, whose steps divide its slices themselves.

    Raises:
        BadRequest: no such profile, several models of the fleet have it, or a task would get several slices.
    """

    def checked(gpus: GpuRequest) -> GpuRequest:
        share = gpus.share
        if share is None or not gpus.is_mig:
            return gpus
        if not has_steps:
            _check_tasks(role, gpus, share)
        if share.profile and gpus.model is None:
            _check_without_model(share.profile, nodes)
        elif share.profile:
            _check_models(gpus, share.profile, nodes)
        return replace(gpus, share=replace(share, slice_milli=_slice_milli(gpus, share, nodes)))

    gpus = map_choices(role.gpus, checked)
    return role if gpus == role.gpus else replace(role, gpus=gpus)


def _slice_milli(gpus: GpuRequest, share: ShareRequest, nodes: Collection[Node]) -> int:
    """Thousandths of a device that a slice takes: the least of the fleet's models, else of those in the fact table; 0 if unknown."""
    kinds = [(model, (memory_gib or 0) * GIB) for model, memory_gib in gpus.kinds]
    here = {
        device.mig.profiles
        for node in nodes
        for device in node.devices
        if device.mig is not None and device.mig.on and any(device_fits(device, *kind) for kind in kinds)
    }
    known = here or {
        one.profiles for one in read_mig_gpus() for kind in kinds if model_fits(one.name, one.memory_bytes, *kind)
    }
    found = [(share.mig_profile(profiles), profiles) for profiles in known]
    return min((profile_milli(profile, profiles) for profile, profiles in found if profile is not None), default=0)


def _check_tasks(role: Role, gpus: GpuRequest, share: ShareRequest) -> None:
    tasks = role.tasks_per_node or 1
    alone = role.launch is LaunchMode.PER_NODE or (role.launch is LaunchMode.FIXED and tasks % share.count)
    if share.count > 1 and alone:
        raise BadRequest(
            f"gpus {gpus}: {tasks} task{'' if tasks == 1 else 's'} on a node would get {share.count} MIG slices, "
            "but a process can use only one",
            hint=f"start one task for each slice (tasks_per_node: {share.count}), or ask for one larger slice",
        )


def _check_without_model(profile: str, nodes: Collection[Node]) -> None:
    offers = {
        device.model
        for node in nodes
        for device in node.devices
        if device.mig is not None and device.mig.on and device.mig.profile(profile) is not None
    }
    if len(offers) > 1:
        named = sorted(
            "-".join(model.lower().split()).removeprefix("virtual-").removeprefix("nvidia-") for model in offers
        )
        raise BadRequest(
            f"gpus: {profile} is ambiguous: {' and '.join(named)} have it",
            hint=f"name the model: {named[0]}.{profile}",
        )
    if not offers and not any(profile == one.name for entry in read_mig_gpus() for one in entry.profiles):
        known = _fleet_profiles(None, 0, nodes) or [one.name for entry in read_mig_gpus() for one in entry.profiles]
        raise BadRequest(f"gpus: no GPU has a MIG profile {profile}", hint=unknown_profile_hint(profile, known))


def _check_models(gpus: GpuRequest, profile: str, nodes: Collection[Node]) -> None:
    here: list[str] = []
    by_table: list[str] = []
    for model, memory_gib in gpus.kinds:
        here += _fleet_profiles(model, (memory_gib or 0) * GIB, nodes)
        by_table += _table_profiles(model or "", memory_gib)
    if (here or by_table) and profile not in (*here, *by_table):
        raise BadRequest(
            f"gpus: {gpus.kinds_text} has no MIG profile {profile}",
            hint=unknown_profile_hint(profile, here or by_table),
        )


def _fleet_profiles(model: str | None, memory_bytes: int, nodes: Collection[Node]) -> list[str]:
    """The profiles of the fleet's devices of this model that have MIG mode on."""
    return [
        profile.name
        for node in nodes
        for device in node.devices
        if device.mig is not None and device_fits(device, model, memory_bytes)
        for profile in device.mig.profiles
    ]


def _table_profiles(model: str, memory_gib: int | None) -> list[str]:
    """The profiles of the model by the fact table; empty if that does not have it."""
    entries = [one for one in read_mig_gpus() if model_fits(one.name, one.memory_bytes, model, (memory_gib or 0) * GIB)]
    if not entries:
        entry = find_mig_gpu(model if memory_gib is None else f"{model}-{memory_gib}gb")
        entries = [] if entry is None else [entry]
    return [profile.name for entry in entries for profile in entry.profiles]
