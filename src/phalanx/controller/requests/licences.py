"""Requests that set or remove licences, and the split of a job's extras into what nodes offer and licences."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.impossible_jobs import record_impossible_jobs
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.fleet.node import Node
from phalanx.core.hints import Hint, HintCode
from phalanx.core.resources import add_extras
from phalanx.core.state.events import ImpossibleJob, PutLicence, RemoveLicence
from phalanx.core.state.records import LICENCES
from phalanx.core.work.extras import COUNT_MAX, Licence, split_licences
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.users import Action

LICENCES_MAX: Final = 1000  # each is counted at every start of its jobs; no known site has a tenth of that
handlers: Final = RequestHandlers()


@handlers.add(
    PutLicence, Action.OPERATE, audit=lambda request, _: f"licence {request.licence.id} seats={request.licence.total}"
)
def put_licence(context: StepContext, request: PutLicence) -> tuple[ImpossibleJob, ...]:
    """Add a licence, or change its number of seats; jobs that hold seats keep them. Waiting jobs that ask for a new one wait for it."""
    world, licence = context.world, request.licence
    known = world.licences.get(licence.id)
    if not 0 <= licence.total <= COUNT_MAX:
        raise BadRequest(f"licence {licence.id}: {licence.total} seats are not between 0 and {COUNT_MAX}")
    if known is None:
        _check_new(context, licence)
    if licence == known:
        return ()
    before = context.feasibility
    context.change.put(licence)
    context.add_history("licence_set", f"licence {licence.id} has {licence.total} seats", by=request.by)
    if known is None:
        for job in [
            job for job in world.pending.values() if any(licence.id in dict(role.extras) for role in job.spec.role.each)
        ]:
            context.change.put(replace(job, spec=with_known_licences(context, job.spec)))
    return record_impossible_jobs(context, before, f"licence {licence.id} has {licence.total} seats")


@handlers.add(RemoveLicence, Action.OPERATE, audit=lambda request, _: f"licence {request.name}")
def remove_licence(context: StepContext, request: RemoveLicence) -> tuple[ImpossibleJob, ...]:
    """Remove a licence that no job holds."""
    world, name = context.world, request.name
    if name not in world.licences:
        raise NotFound(f"no licence {name!r}", hint=Hint(HintCode.LIST_LICENCES))
    used = world.licence_usage.get(name, 0)
    if used:
        raise Conflict(
            f"running jobs hold {used} seat{'' if used == 1 else 's'} of licence {name}",
            hint=Hint(HintCode.SET_LICENCE, licence=name, seats=0),
        )
    before = context.feasibility
    context.change.remove(LICENCES, name)
    context.add_history("licence_removed", f"licence {name} was removed", by=request.by)
    return record_impossible_jobs(context, before, f"licence {name} was removed")


def with_known_licences(context: StepContext, spec: JobSpec) -> JobSpec:
    """The spec whose extras with the name of a licence are seats of it."""
    first, *others = spec.role.each
    seats, found = first.licences, []
    for role in (first, *others):
        extras, licences = split_licences(role.extras, context.world.licences) if role.extras else ((), ())
        seats = add_extras(seats, licences)
        found.append(replace(role, extras=extras) if licences else role)
    if seats == first.licences:
        return spec
    return replace(spec, role=replace(found[0], licences=seats, others=tuple(found[1:])))


def without_licences(context: StepContext, node: Node) -> Node:
    """The registering node without offers that have the name of a licence: such a name means the licence."""
    extras, licences = split_licences(node.extras, context.world.licences)
    if not licences:
        return node
    names = ", ".join(name for name, _ in licences)
    context.add_history("offer_ignored", f"{node.id} offers {names}, which is a licence: ignored", node_id=node.id)
    return replace(node, extras=extras)


def _check_new(context: StepContext, licence: Licence) -> None:
    world = context.world
    if len(world.licences) >= LICENCES_MAX:
        raise Conflict(f"there are {LICENCES_MAX} licences; no more are allowed")
    offering = sorted(node.id for node in world.nodes.values() if licence.id in dict(node.extras))
    if offering:
        raise Conflict(
            f"node {offering[0]} offers {licence.id}: a licence cannot have that name", hint="choose another name"
        )
