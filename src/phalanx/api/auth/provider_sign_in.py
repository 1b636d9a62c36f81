"""Signs people in at the provider, and asks it again about them: who leaves a group or the provider loses access.

What the provider says becomes the user's role and projects, in one request to the controller.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from phalanx.api.auth.browser_sessions import SESSION_LIFETIME_S
from phalanx.api.auth.login_tokens import browser_token_id
from phalanx.api.auth.sign_in_attempts import SignInAttempts
from phalanx.api.auth.token_seal import TokenSeal
from phalanx.api.services import HeadServices
from phalanx.core.access.audit import AuditCall
from phalanx.core.errors import NotFound, NotPermitted, NotSignedIn, PhalanxError, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import UserId
from phalanx.core.state.events import PutToken, SignInUser, UpdateIdentity
from phalanx.core.state.records import SIGN_IN
from phalanx.core.work.names import is_name
from phalanx.core.work.sign_in import PROVIDER, GrantedAccess, SignInSettings, claim_at, granted_access, groups_of
from phalanx.core.work.users import Identity, Token, User
from phalanx.ports.identity import IdentityProvider, ProviderAnswer

T = TypeVar("T")

CALLS_MAX: Final = 8  # to the provider at once; each holds a thread
WAITING_MAX: Final = 64  # callers that wait for one of them
_log: Final = logging.getLogger("phalanx.sign_in")


class ProviderSignIn:
    """See the module. Use it on the event loop only.

    `in_thread` runs a blocking function, `answer_of` waits for the controller.
    """

    def __init__(self, services: HeadServices, in_thread: Callable[..., Any], answer_of: Callable[..., Any]) -> None:
        self._services, self._in_thread, self._answer_of = services, in_thread, answer_of
        self.attempts = SignInAttempts(services.node_secret, services.clock)
        self.seal = TokenSeal(services.node_secret)
        self._calls = asyncio.Semaphore(CALLS_MAX)
        self._waiting = 0
        self._unanswered: frozenset[UserId] = (
            frozenset()
        )  # users about whom the provider said nothing in the last round

    def settings(self) -> SignInSettings | None:
        """Return the settings; None if this head has no provider."""
        return self._services.store.record(SIGN_IN, PROVIDER)

    def require_settings(self) -> SignInSettings:
        """Return the settings.

        Raises:
            NotFound: this head has no provider.
        """
        settings = self.settings()
        if settings is None:
            raise NotFound("this head has no sign-in provider", hint=Hint(HintCode.SET_SIGN_IN))
        return settings

    async def ask(self, question: Callable[[IdentityProvider], T]) -> T:
        """Ask the provider on a thread, with few others at once.

        Raises:
            TryLater: too many wait already, or this head cannot ask.
        """
        provider = self._services.identity
        if provider is None:
            raise TryLater("this head cannot reach sign-in providers")
        if self._waiting >= WAITING_MAX:
            raise TryLater("many people sign in at this moment", hint="try again in a moment")
        self._waiting += 1
        try:
            async with self._calls:
                answer: T = await self._in_thread(question, provider)
                return answer
        finally:
            self._waiting -= 1

    async def admit(self, settings: SignInSettings, answer: ProviderAnswer, call: AuditCall) -> User:
        """Let a person in: add or update the user. `call`: for the audit trail, without its user.

        Raises:
            NotPermitted: no group of the person gives a role, or the name is not free.
            NotSignedIn: the user is disabled.
        """
        name = claim_at(answer.claims, settings.user_claim)
        if not isinstance(name, str) or not is_name(name):
            raise NotPermitted(
                f"the claim {settings.user_claim} of the sign-in provider is no name for a user: {str(name)[:80]!r}",
                hint="ask an admin",
            )
        if settings.user_claim == "email" and answer.claims.get("email_verified") in (False, "false"):
            raise NotPermitted(f"the sign-in provider has not verified the address {name}", hint="verify it there")
        user_id = UserId(name)
        access = _access(settings, answer, name)
        request = SignInUser(
            user_id=user_id,
            role=access.role,
            identity=self._identity(user_id, settings, answer, access),
            settings_at_s=settings.at_s,
        )
        user: User = await self._answer_of(self._services.controller.request(request, replace(call, user=user_id)))
        if user.id != user_id:  # the provider renamed the person: the seal names the user
            identity = self._identity(user.id, settings, answer, access)
            update = UpdateIdentity(user_id=user.id, role=access.role, identity=identity, settings_at_s=settings.at_s)
            await self._answer_of(self._services.controller.request(update))
        return user

    async def browser_token(self, user: User) -> Token:
        """Return the token to which the user's sessions of browsers belong. No one knows its secret; it lasts as long as a session."""
        now_s = self._services.clock.now_s()
        token_id = browser_token_id(user.id)
        known = next((one for one in await self._in_thread(self._services.store.tokens) if one.id == token_id), None)
        fresh = Token(
            id=token_id,
            user=user.id,
            sha256=secrets.token_hex(32) if known is None or not known.is_valid(now_s) else known.sha256,
            created_s=now_s,
            expires_s=now_s + min(SESSION_LIFETIME_S, self._services.token_lifetime_max_s or math.inf),
            note="sessions of browsers that signed in at the provider",
        )
        token: Token = await self._answer_of(self._services.controller.request(PutToken(token=fresh)))
        return token

    async def recheck(self) -> None:
        """Ask the provider about all users who are due, several at once. An outage changes nothing until their access lapses."""
        settings = self.settings()
        if settings is None or self._services.identity is None:
            return
        now_s = self._services.clock.now_s()
        tokens = await self._in_thread(self._services.store.tokens)
        owners = {token.user for token in tokens if token.is_valid(now_s)}
        users = [
            user
            for user in await self._in_thread(self._services.store.users)
            if user.id in owners and _is_due(user, settings, now_s)
        ]
        users.sort(key=lambda user: user.id in self._unanswered)  # the provider may fail for one person only
        unanswered: dict[UserId, str] = {}
        for begin in range(0, len(users), CALLS_MAX):
            group = users[begin : begin + CALLS_MAX]
            outages = await asyncio.gather(*(self._recheck_one(user, settings) for user in group))
            unanswered |= {user.id: out.message for user, out in zip(group, outages, strict=True) if out is not None}
            if all(outages):
                break
        if unanswered:
            _log.warning(
                "%d users cannot be checked at the sign-in provider: %s", len(unanswered), max(unanswered.values())
            )
        self._unanswered = frozenset(unanswered)

    async def _recheck_one(self, user: User, settings: SignInSettings) -> TryLater | None:
        """Ask the provider about one user, and record what it says; return the outage if it says nothing."""
        before = user.identity
        assert before is not None
        token = self.seal.open(user.id, before.sealed)
        if not token:  # the head's secret was replaced: the user signs in again when access lapses
            return None
        role = None
        try:
            answer = await self.ask(
                lambda provider: provider.refresh(settings, refresh_token=token, subject=before.subject)
            )
            access = _access(settings, answer, user.id)
        except TryLater as error:
            return error
        except (NotSignedIn, NotPermitted) as error:
            identity = replace(before, ended=error.message)
        else:
            role, identity = access.role, self._identity(user.id, settings, answer, access, earlier=before.sealed)
        update = UpdateIdentity(user_id=user.id, role=role, identity=identity, settings_at_s=settings.at_s)
        try:
            await self._answer_of(self._services.controller.request(update))
        except PhalanxError as error:  # such as a full disk: the next round asks again
            return TryLater(error.message)
        return None

    def _identity(
        self,
        user_id: UserId,
        settings: SignInSettings,
        answer: ProviderAnswer,
        access: GrantedAccess,
        earlier: str = "",
    ) -> Identity:
        """Return the identity as confirmed now. `earlier`: the sealed refresh token that stays if the provider gave no new one."""
        now_s = self._services.clock.now_s()
        return Identity(
            issuer=settings.issuer,
            subject=answer.subject,
            confirmed_s=now_s,
            lapses_s=now_s + settings.outage_s,
            projects=access.projects,
            admin_of=access.admin_of,
            sealed=self.seal.seal(user_id, answer.refresh_token) or earlier,
        )


def _is_due(user: User, settings: SignInSettings, now_s: float) -> bool:
    """Whether the provider must be asked about the user now, and can be."""
    identity = user.identity
    return (
        identity is not None
        and identity.sealed != ""
        and not identity.ended
        and not user.disabled
        and identity.issuer == settings.issuer
        and now_s - identity.confirmed_s >= settings.recheck_s
    )


def _access(settings: SignInSettings, answer: ProviderAnswer, name: str) -> GrantedAccess:
    """Return what the person's groups give.

    Raises:
        NotPermitted: none gives a role.
    """
    groups = groups_of(settings, answer.claims)
    access = granted_access(settings, groups or ())
    if access is None:
        missing = f": the provider sends no claim {settings.groups_claim}" if groups is None else ""
        raise NotPermitted(
            f"no group of {name} at the sign-in provider gives access here{missing}", hint="ask an admin"
        )
    return access
