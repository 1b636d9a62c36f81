"""Why no node of a fleet can ever give a request its MIG slices, or its whole GPUs because of MIG mode; and what to do next."""

from __future__ import annotations

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.summary import FleetSummary
from phalanx.core.hints import Hint, HintCode
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.mig_request import unknown_profile_hint
from phalanx.core.work.share import ShareKind


def mig_refusal(request: GpuRequest, summary: FleetSummary, of_fleet: str) -> NeverFits | None:
    """The refusal of a request that no node can serve, if MIG is the reason; else None.

    Args:
        request: that no node can serve.
        summary: of the nodes.
        of_fleet: which nodes these are, for the message; "" for all.
    """
    found = [one for model, memory_gib in request.kinds for one in summary.mig_like(model, (memory_gib or 0) * GIB)]
    on = [(model, profiles) for model, profiles in found if profiles]
    closed = [why for model, memory_gib in request.kinds for why in summary.closed_like(model, (memory_gib or 0) * GIB)]
    if closed and not on and (request.total or request.share is not None):
        return NeverFits(
            f"GPUs{_of_model(request)}{of_fleet} have MIG mode on, but no slices can be made there: {closed[0]}",
            hint=Hint(HintCode.LIST_NODES),
        )
    if request.share is None or request.share.kind is not ShareKind.MIG:
        if not on or not (request.total or request.share):
            return None
        model, profiles = on[0]
        whole = max(profiles, key=lambda one: (one.memory_slices, one.compute_slices))
        return NeverFits(
            f"every GPU{_of_model(request)}{of_fleet} has MIG mode on, so it is granted in slices only",
            hint=Hint(
                HintCode.GIVE_VALUE,
                key="gpus",
                value=f"{whole.name} for a whole {model}, or {profiles[0].name} for a small part of it",
            ),
        )
    if not found:
        return NeverFits(
            f"no node{of_fleet} has a GPU{_of_model(request)} that MIG can divide",
            hint=f"this fleet has: {', '.join(summary.models) or 'no GPUs'}",
        )
    if not on:
        models = " or ".join(dict.fromkeys(model for model, _ in found))
        return NeverFits(f"no node{of_fleet} has MIG mode on for its {models}", hint=Hint(HintCode.SWITCH_MIG_ON))
    share = request.share
    names = [one.name for _, profiles in on for one in profiles]
    models = " or ".join(dict.fromkeys(model for model, _ in on))
    if share.profile and share.profile not in names:
        return NeverFits(
            f"{models} has no MIG profile {share.profile}", hint=unknown_profile_hint(share.profile, names)
        )
    return NeverFits(f"no MIG profile of {models} holds {share} of a GPU", hint=unknown_profile_hint("", names))


def _of_model(request: GpuRequest) -> str:
    return f" of model {request.kinds_text}" if request.kinds_text else ""
