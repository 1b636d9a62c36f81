"""Requests about the fleet as a whole: its profile, its failure rules, a planned stop of the head."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.state.events import PreparePlannedStop, PutCalibration, PutFailureRules
from phalanx.core.work.users import Action
from phalanx.planner.calibration.profile import parse_profile, slow_parts

handlers: Final = RequestHandlers()


@handlers.add(PutCalibration, Action.OPERATE, audit=lambda *_: "the fleet's profile")
def put_calibration(context: StepContext, request: PutCalibration) -> None:
    """Replace the fleet's profile, and mark the nodes that it found slow."""
    calibration = request.calibration
    context.change.put(calibration)
    context.add_history("calibrated", f"{calibration.by} stored the fleet's profile", by=calibration.by)
    _mark_slow(context, calibration)


@handlers.add(PutFailureRules, Action.OPERATE, audit=lambda *_: "the operators' failure rules")
def put_failure_rules(context: StepContext, request: PutFailureRules) -> None:
    """Replace the operators' failure rules."""
    context.change.put(request.rules)
    context.add_history("rules", f"{request.rules.by} stored the operators' failure rules", by=request.rules.by)


@handlers.add(PreparePlannedStop, Action.OPERATE, audit=lambda request, _: f"leases of {request.lease_s:g} s")
def prepare_planned_stop(context: StepContext, request: PreparePlannedStop) -> None:  # as all handlers
    """Change no record: the controller grants the long leases."""


def _mark_slow(context: StepContext, calibration: FleetDocument) -> None:
    """Mark the nodes that the profile found slow, which are then used last, and unmark the others that it measured.

    Virtual nodes are skipped: they share one machine's cores, so slowness there is caused by their neighbours.
    """
    profile = parse_profile(json.loads(calibration.text))
    slowness: dict[str, list[str]] = {}
    for slow in slow_parts(profile):
        slowness.setdefault(slow.part, []).append(f"{slow.what} {slow.share:.0%} under the fleet's median")
    measured = {node.node for node in profile.nodes}
    for node in list(context.world.nodes.values()):
        if node.id in measured and not node.virtual:
            text = "; ".join(slowness.get(node.id, ()))
            if text != node.slow_reason:
                context.change.put(replace(node, slow_reason=text))
                what = f"is slow: {text}" if text else "is no longer slow"
                context.add_history("calibrated", f"node {node.id} {what}", node_id=node.id)
