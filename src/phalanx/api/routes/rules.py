"""Failure rules: lists the active rules, and replaces the operators' own. All users may read them, as they decide on failed jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import decode_body, json_response, read_body
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.controller.rulebook import parse_own_rules
from phalanx.core.fleet.custom_failure_rules import OPERATORS, FailureRules
from phalanx.core.recovery.failure_rules import (
    FailureRule,
    merge_rules,
    parse_rules,
    rule_to_plain,
)
from phalanx.core.state.events import PutFailureRules
from phalanx.core.state.records import FAILURE_RULES
from phalanx.core.work.users import Action
from phalanx.planner.facts.failure_rules import shipped_rules
from phalanx.wire.api.rules import RulesReply, RulesRequest, RuleView

routes = RouteTable()


@routes.get("/v1/rules", Action.VIEW, reply=RulesReply)
async def show_rules(request: Request) -> Response:
    """List the active failure rules, in the order in which they are applied."""
    return json_response(await run_in_thread(_active_rules, runtime_of(request).services))


@routes.put("/v1/rules", Action.OPERATE, body=RulesRequest, reply=RulesReply)
async def put_rules(request: Request) -> Response:
    """Replace the operators' own rules; an empty list leaves only the shipped ones. With `dry_run` they are only checked."""
    runtime = runtime_of(request)
    body = decode_body(await read_body(request, runtime.services.limits.body_bytes), RulesRequest)
    own = parse_rules(body.rules)
    if body.dry_run:
        return json_response(_reply(own, by="", stored_s=None))
    document = FailureRules(
        rules=json.dumps([rule_to_plain(rule) for rule in own], separators=(",", ":")),
        by=caller_of(request).user,
        at_s=runtime.services.clock.now_s(),
    )
    await runtime.request(PutFailureRules(rules=document))
    return json_response(await run_in_thread(_active_rules, runtime.services))


def _active_rules(services: HeadServices) -> RulesReply:
    stored = services.store.record(FAILURE_RULES, OPERATORS)
    return _reply(
        parse_own_rules(stored)[0],
        by="" if stored is None else stored.by,
        stored_s=None if stored is None else stored.at_s,
    )


def _reply(own: Sequence[FailureRule], *, by: str, stored_s: float | None) -> RulesReply:
    names = {rule.name for rule in own}
    return RulesReply(
        rules=[_view(rule, own=rule.name in names) for rule in merge_rules(own, shipped_rules())],
        by=by,
        stored_s=stored_s,
    )


def _view(rule: FailureRule, *, own: bool) -> RuleView:
    return RuleView(
        name=rule.name,
        attribution=rule.attribution,
        remedy=rule.remedy,
        charge=rule.charge,
        codes=list(rule.codes),
        signals=list(rule.signals),
        xids=list(rule.xids),
        pattern=rule.pattern,
        oom=rule.oom,
        cause=rule.cause,
        weight=rule.weight,
        says=rule.says,
        source=rule.source,
        own=own,
    )
