"""Failure rules: lists the active rules, and replaces the operators' own. All users may read them, as they decide on failed jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import decoded, read_body, reply
from phalanx.api.parts import HeadParts
from phalanx.api.routes import Routes
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.controller.rulebook import own_rules
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.recovery.rules import Rule, laid_over, plain, rules_from
from phalanx.core.state.events import PutRules
from phalanx.core.work.people import Action
from phalanx.facts.failures import shipped_rules
from phalanx.wire.api.rules import RulesReply, RulesRequest, RuleView

routes = Routes()


@routes.get("/v1/rules", Action.SEE, reply=RulesReply)
async def show_rules(request: Request) -> Response:
    """List the active failure rules, in the order in which they are applied."""
    return reply(await off_loop(_active_rules, runtime_of(request).parts))


@routes.put("/v1/rules", Action.OPERATE, body=RulesRequest, reply=RulesReply)
async def put_rules(request: Request) -> Response:
    """Replace the operators' own rules; an empty list leaves only the shipped ones. With `dry_run` they are only checked."""
    runtime = runtime_of(request)
    body = decoded(await read_body(request, runtime.parts.limits.body_bytes), RulesRequest)
    own = rules_from(body.rules)
    if body.dry_run:
        return reply(_reply(own, by="", stored_s=None))
    document = FailureRules(
        rules=json.dumps([plain(rule) for rule in own], separators=(",", ":")),
        by=caller_of(request).user,
        at_s=runtime.parts.clock.now_s(),
    )
    await runtime.ask(PutRules(document=document))
    return reply(await off_loop(_active_rules, runtime.parts))


def _active_rules(parts: HeadParts) -> RulesReply:
    stored = parts.store.failure_rules()
    return _reply(
        own_rules(stored)[0], by="" if stored is None else stored.by, stored_s=None if stored is None else stored.at_s
    )


def _reply(own: Sequence[Rule], *, by: str, stored_s: float | None) -> RulesReply:
    names = {rule.name for rule in own}
    return RulesReply(
        rules=[_view(rule, own=rule.name in names) for rule in laid_over(own, shipped_rules())],
        by=by,
        stored_s=stored_s,
    )


def _view(rule: Rule, *, own: bool) -> RuleView:
    return RuleView(
        name=rule.name,
        blame=rule.blame,
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
