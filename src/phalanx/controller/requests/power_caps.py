"""Caps on the power of a node's GPUs: set one, restore the limits of before, and apply what the supervisor reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.power_limits import PowerCap, common_range_mw, watts_text
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import LimitPower
from phalanx.core.state.events import CapPower, RestorePower
from phalanx.core.state.reports import PowerLimited
from phalanx.core.work.users import Action

handlers: Final = RequestHandlers()


@handlers.add(
    CapPower,
    Action.OPERATE,
    audit=lambda request, _: f"node {request.node_id}: at most {watts_text(request.milliwatts)} for each GPU",
)
def cap_power(context: StepContext, request: CapPower) -> Node:
    """Cap the power of each GPU of a node. A later cap replaces an earlier one; the limits of before stay those of the first.

    Raises:
        NotFound: no such node.
        Conflict: it is down, or its devices have no power limits.
        BadRequest: a device cannot have this limit.
    """
    node = _known(context, request.node_id)
    if node.state is NodeState.DOWN:
        raise Conflict(f"{node.id} is down: only its supervisor can set power limits")
    if not node.power_limits:
        why = "its devices are virtual" if node.virtual else "its supervisor reports none"
        if node.per_attempt:
            why = f"{node.engine} starts a supervisor for each job only"
        raise Conflict(f"{node.id} has no power limits to set: {why}")
    low, high = common_range_mw(node.power_limits)
    if not low <= request.milliwatts <= high:
        raise BadRequest(
            f"{node.id}: a limit of {watts_text(request.milliwatts)} is out of range; "
            f"its GPUs allow {watts_text(low)} to {watts_text(high)}"
        )
    cap = PowerCap(milliwatts=request.milliwatts, by=request.by, since_s=context.now.wall_s, until_s=request.until_s)
    node = replace(node, power_cap=cap, power_error="")
    context.change.put(node)
    text = f"{node.id}: {request.by} caps each GPU at {watts_text(request.milliwatts)}"
    context.add_history("power_cap", text, node_id=node.id, by=request.by)
    send_cap(context, node)
    return node


@handlers.add(RestorePower, Action.OPERATE, audit=lambda request, _: f"node {request.node_id}")
def restore_power(context: StepContext, request: RestorePower) -> Node:
    """Restore the power limits of before the cap. Idempotent. A node that is down does so when it is back."""
    node = _known(context, request.node_id)
    if node.power_cap is not None or node.power_error:
        node = replace(node, power_cap=None, power_error="")
        context.change.put(node)
        text = f"{node.id}: {request.by} ends the cap on the power of its GPUs"
        context.add_history("power_cap_ended", text, node_id=node.id, by=request.by)
    if node.power_limits:
        context.commands.append(LimitPower(node_id=node.id, milliwatts=None, until_s=None))
    return node


def send_cap(context: StepContext, node: Node) -> None:
    """Send the supervisor the cap that holds, or the end of the last one. It may have missed the last command."""
    cap = node.power_cap
    if cap is not None and not cap.is_over(context.now.wall_s):
        context.commands.append(LimitPower(node_id=node.id, milliwatts=cap.milliwatts, until_s=cap.until_s))
    elif any(one.original_mw is not None for one in node.power_limits):
        context.commands.append(LimitPower(node_id=node.id, milliwatts=None, until_s=None))


def apply_limits(context: StepContext, report: PowerLimited) -> None:
    """Apply what a supervisor did to the power limits of its GPUs."""
    node = context.world.nodes.get(report.node_id)
    if node is None or not all(one.valid for one in report.limits):
        return
    cap, error = node.power_cap, ""
    if report.why:
        cap = None if cap is not None and cap.milliwatts == report.milliwatts else cap
        error = report.why
    elif report.milliwatts is None:
        cap = None if cap is None or cap.is_over(context.now.wall_s) else cap
    elif cap is not None and cap.milliwatts == report.milliwatts:
        cap = replace(cap, applied=True)
    fresh = replace(node, power_limits=report.limits, power_cap=cap, power_error=error)
    if fresh != node:
        context.change.put(fresh)
    if (fresh.power_limits, fresh.power_error) != (node.power_limits, node.power_error):
        context.add_history(*_line(report), node_id=node.id)
    if not report.why and report.milliwatts is not None and (cap is None or cap.milliwatts != report.milliwatts):
        send_cap(context, fresh)  # a command that was under way as the cap ended


def _line(report: PowerLimited) -> tuple[str, str]:
    if report.why:
        return "power_limit_failed", f"{report.node_id}: {report.why}"
    if report.milliwatts is None:
        return "power_limit_restored", f"{report.node_id}: the power limits of before the cap hold again"
    return "power_limit_set", f"{report.node_id}: each GPU is limited to {watts_text(report.milliwatts)}"


def _known(context: StepContext, node_id: NodeId) -> Node:
    node = context.world.nodes.get(node_id)
    if node is None:
        raise NotFound(f"no node {node_id!r}", hint=Hint(HintCode.LIST_NODES))
    return node
