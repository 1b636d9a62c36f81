"""The settings of the sign-in at a provider."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, no_content, read_record
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.http.security import host_name
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.errors import BadRequest
from phalanx.core.ids import UserId
from phalanx.core.state.events import PutSignIn, RemoveSignIn
from phalanx.core.units import format_duration
from phalanx.core.work.names import is_name
from phalanx.core.work.sign_in import EVERYONE, OUTAGE_S, RECHECK_S, GroupGrant, SignInSettings
from phalanx.core.work.users import Action, UserRole
from phalanx.ports.identity import RETURN_PATH
from phalanx.wire.api.sign_in import GroupGrantBody, ProviderCheck, SignInBody, SignInView
from phalanx.wire.head_url import is_secure_url, split_url, split_urls

GROUPS_MAX: Final = 1000  # that give something
URLS_MAX: Final = 10  # of heads that share a store
TEXT_MAX: Final = 255  # characters of a name at the provider
PERIOD_MIN_S, PERIOD_MAX_S = 60.0, 30 * 86400.0

routes = RouteTable()


@routes.get("/v1/sign-in", Action.ADMINISTER, reply=SignInView)
async def show_sign_in(request: Request) -> Response:
    """Show the sign-in provider, and what its groups give."""
    return json_response(_view(runtime_of(request).provider_sign_in.settings()))


@routes.put("/v1/sign-in", Action.ADMINISTER, body=SignInBody, reply=SignInView)
async def put_sign_in(request: Request) -> Response:
    """Set the sign-in provider. Absent fields stay unchanged. The provider is not asked: see the check."""
    runtime = runtime_of(request)
    body = await read_record(request, SignInBody, runtime.services.limits.body_bytes)
    settings = _changed(
        runtime.provider_sign_in.settings(), body, caller_of(request).user, runtime.services.clock.now_s()
    )
    known = {split_url(url)[1] for url in runtime.head_urls} | runtime.services.hosts_allowed
    for url in settings.urls:
        if host_name(url.partition("://")[2].encode()) not in known:
            raise BadRequest(
                f"url: {url} is not an address of this head or its standbys",
                hint=f"their names are {', '.join(sorted(known))}",
            )
    await runtime.request(PutSignIn(settings=settings))
    return json_response(_view(settings))


@routes.delete("/v1/sign-in", Action.ADMINISTER)
async def remove_sign_in(request: Request) -> Response:
    """Remove the sign-in provider. All who signed in there lose access."""
    await runtime_of(request).request(RemoveSignIn(by=caller_of(request).user))
    return no_content()


@routes.post("/v1/sign-in/check", Action.ADMINISTER, body=MediaType.NOTHING, reply=ProviderCheck, transient=True)
async def check_sign_in(request: Request) -> Response:
    """Read the provider's metadata and keys, and the client's secret. Nothing is changed."""
    sign_in = runtime_of(request).provider_sign_in
    settings = sign_in.require_settings()
    facts = await sign_in.ask(lambda provider: provider.check(settings))
    return json_response(
        ProviderCheck(
            issuer=settings.issuer, endpoints=dict(facts.endpoints), scopes=list(facts.scopes), keys=facts.keys
        )
    )


def _changed(before: SignInSettings | None, body: SignInBody, by: UserId, at_s: float) -> SignInSettings:
    """Return the settings with the fields of the body.

    Raises:
        BadRequest: a field is missing or not valid.
    """
    old = before or SignInSettings(issuer="", client_id="", urls=(), by=by, at_s=at_s)
    issuer = _secure("issuer", old.issuer if body.issuer is None else body.issuer)
    urls = old.urls if body.url is None else tuple(_head_url(url) for url in split_urls(body.url)[:URLS_MAX])
    if not urls:
        raise BadRequest("url is missing", hint="give the head's own URL, such as https://gpu-head:7600")
    secret_file = old.secret_file if body.secret_file is None else body.secret_file
    if secret_file and not is_name(secret_file):
        raise BadRequest(
            f"secret_file: {secret_file[:80]!r} is no name of a file",
            hint="put the secret into the folder `secrets` of the head, and give the file's name there",
        )
    recheck_s, outage_s = (
        _period(name, given, kept)
        for name, given, kept in (
            ("recheck_s", body.recheck_s, old.recheck_s if before else RECHECK_S),
            ("outage_s", body.outage_s, old.outage_s if before else OUTAGE_S),
        )
    )
    if outage_s < 2 * recheck_s:  # else a single check that fails would end the access of all
        raise BadRequest(
            f"outage_s: {format_duration(outage_s)} is less than two checks, one each {format_duration(recheck_s)}"
        )
    return SignInSettings(
        issuer=issuer,
        client_id=_text("client_id", old.client_id if body.client_id is None else body.client_id),
        urls=urls,
        by=by,
        at_s=max(at_s, old.at_s + 0.001 if before else at_s),
        secret_file=secret_file,
        user_claim=_text("user_claim", old.user_claim if body.user_claim is None else body.user_claim),
        groups_claim=_text("groups_claim", old.groups_claim if body.groups_claim is None else body.groups_claim),
        scopes=old.scopes if body.scopes is None else _scopes(body.scopes),
        recheck_s=recheck_s,
        outage_s=outage_s,
        grants=old.grants if body.groups is None else _grants(body.groups),
    )


def _grants(groups: list[GroupGrantBody]) -> tuple[GroupGrant, ...]:
    if len(groups) > GROUPS_MAX:
        raise BadRequest(f"groups: {len(groups)} are given; at most {GROUPS_MAX} can be")
    found: dict[str, GroupGrant] = {}
    for one in groups:
        group = _text("group", one.group)
        if group in found:
            raise BadRequest(f"groups: {group!r} is given twice")
        if one.role is UserRole.NODE:
            raise BadRequest("role node is for supervisors, not for users", hint="use viewer, user, operator or admin")
        if group == EVERYONE and one.role in (UserRole.OPERATOR, UserRole.ADMIN):
            raise BadRequest(
                f"group *: all people of the provider cannot be {one.role}", hint="give that role to a group"
            )
        if one.role is None and not one.projects and not one.admin_of:
            raise BadRequest(f"group {group!r} gives nothing", hint="give a role, projects or admin_of")
        found[group] = GroupGrant(
            group=group, role=one.role, projects=frozenset(one.projects), admin_of=frozenset(one.admin_of)
        )
    return tuple(found[group] for group in sorted(found))


def _scopes(scopes: list[str]) -> tuple[str, ...]:
    for scope in scopes:
        if not scope.isascii() or not scope.isprintable() or not 0 < len(scope) <= TEXT_MAX or set(scope) & set(' "\\'):
            raise BadRequest(f"scopes: {scope[:80]!r} is not one")
    if len(scopes) > 50:
        raise BadRequest(f"scopes: {len(scopes)} are given; at most 50 can be")
    if scopes and "openid" not in scopes:
        raise BadRequest(
            "scopes: openid is missing", hint="give openid, and those for names, groups and refresh tokens"
        )
    return tuple(dict.fromkeys(scopes))


def _secure(what: str, url: str) -> str:
    if not url:
        raise BadRequest(f"{what} is missing")
    if not is_secure_url(url) or len(url) > TEXT_MAX or "#" in url:
        raise BadRequest(
            f"{what}: {url[:100]!r} is not usable",
            hint="use https://..., or http://127.0.0.1:... on the head's own machine",
        )
    return url


def _head_url(text: str) -> str:
    url = _secure("url", text)
    if "/" in url.partition("://")[2] or "?" in url:
        raise BadRequest("url: it has a path", hint="give the head's own URL, such as https://gpu-head:7600")
    return url


def _text(what: str, text: str) -> str:
    if not text:
        raise BadRequest(f"{what} is missing")
    if not text.isprintable() or len(text) > TEXT_MAX:
        raise BadRequest(f"{what}: {text[:80]!r} is not usable", hint=f"use at most {TEXT_MAX} printable characters")
    return text


def _period(what: str, given: float | None, kept: float) -> float:
    period_s = kept if given is None else given
    if not PERIOD_MIN_S <= period_s <= PERIOD_MAX_S:
        raise BadRequest(
            f"{what}: {period_s:g} s is not possible",
            hint=f"give {format_duration(PERIOD_MIN_S)} to {format_duration(PERIOD_MAX_S)}",
        )
    return period_s


def _view(settings: SignInSettings | None) -> SignInView:
    if settings is None:
        return SignInView(issuer="")
    return SignInView(
        issuer=settings.issuer,
        client_id=settings.client_id,
        secret_file=settings.secret_file,
        url=",".join(settings.urls),
        return_urls=[url + RETURN_PATH for url in settings.urls],
        user_claim=settings.user_claim,
        groups_claim=settings.groups_claim,
        scopes=list(settings.scopes),
        recheck_s=settings.recheck_s,
        outage_s=settings.outage_s,
        groups=[
            GroupGrantBody(group=one.group, role=one.role, projects=sorted(one.projects), admin_of=sorted(one.admin_of))
            for one in settings.grants
        ],
        by=settings.by,
        at_s=settings.at_s,
    )
