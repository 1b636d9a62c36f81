"""The IdentityProvider port on Authlib: OpenID Connect with the authorization code flow, PKCE, and the device flow.

Nothing that the provider sends is used before it is verified: metadata by its issuer, ID tokens by signature, issuer, audience, times and
nonce. Answers are limited in size and time, and redirects are not followed.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import NotSignedIn, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.sign_in import SignInSettings, claim_at
from phalanx.ports.identity import RETURN_PATH, DeviceCode, ProviderAnswer, ProviderFacts
from phalanx.providers.identity.bounded_session import ProviderHttpError, provider_session
from phalanx.wire.head_url import is_secure_url

if TYPE_CHECKING:
    from authlib.integrations.requests_client import OAuth2Session
    from joserfc.jwk import KeySet

SCOPES: Final = ("openid", "profile", "email", "groups", "offline_access")
# Signatures by a key that only the provider has: never `none`, and no HMAC, whose key each client has.
ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
)
LEEWAY_S: Final = 60  # between the clocks of provider and head
METADATA_S: Final = 3600.0  # for which metadata and keys are used before they are read again
KEYS_AGAIN_S: Final = 30.0  # between two readings because of an unknown key
RETRY_S: Final = 3.0  # after a reading that failed
SECRET_BYTES: Final = 4096
DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
_HINT: Final = Hint(HintCode.CHECK_SIGN_IN)
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Of the token endpoint: what they mean for the person. Others are faults of the settings or of the provider.
_ABOUT_THE_PERSON: Final = frozenset(
    {"invalid_grant", "access_denied", "expired_token", "interaction_required", "login_required"}
)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a provider said about itself at `read_s` of the clock."""

    metadata: Mapping[str, Any]
    keys: KeySet
    read_s: float


class OidcProvider:
    """See the port. `secrets_folder`: of the head, with the client's secret. Importing Authlib waits for the first use."""

    def __init__(self, secrets_folder: str, now_s: Callable[[], float]) -> None:
        self._folder, self._now_s = secrets_folder, now_s
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._failed: tuple[float, str, TryLater] | None = None  # when, of which issuer, and how

    def check(self, settings: SignInSettings) -> ProviderFacts:
        """Read the metadata and keys of the provider, and the client's secret."""
        self._known, self._failed = {}, None
        known = self._provider(settings)
        self._session(settings, known).close()
        endpoints = {key: str(value) for key, value in known.metadata.items() if key.endswith(("_endpoint", "_uri"))}
        return ProviderFacts(endpoints=endpoints, scopes=_scopes(settings, known), keys=len(known.keys.keys))

    def authorization_url(self, settings: SignInSettings, *, url: str, state: str, nonce: str, verifier: str) -> str:
        """Return where a browser signs in."""
        known = self._provider(settings)
        with self._session(settings, known) as session:
            found, _ = session.create_authorization_url(
                _endpoint(known, "authorization_endpoint"),
                redirect_uri=url + RETURN_PATH,
                state=state,
                nonce=nonce,
                code_verifier=verifier,
            )
        return str(found)

    def redeem(
        self, settings: SignInSettings, *, url: str, code: str, nonce: str, verifier: str, issuer: str
    ) -> ProviderAnswer:
        """Exchange the code that a browser brought."""
        known = self._provider(settings)
        if issuer != settings.issuer and (
            issuer or known.metadata.get("authorization_response_iss_parameter_supported") is True
        ):  # RFC 9207: the answer of another provider must not be taken for this one's
            raise NotSignedIn("the answer comes from another sign-in provider", hint=Hint(HintCode.SIGN_IN_AGAIN))
        asked = {"code": code, "code_verifier": verifier, "redirect_uri": url + RETURN_PATH}
        return self._answer(settings, known, {"grant_type": "authorization_code", **asked}, nonce=nonce)

    def refresh(self, settings: SignInSettings, *, refresh_token: str, subject: str) -> ProviderAnswer:
        """Ask again about a person."""
        asked = {"grant_type": "refresh_token", "refresh_token": refresh_token}
        try:
            return self._answer(settings, self._provider(settings), asked, subject=subject)
        except _InvalidToken as error:  # of a wrong clock or new keys: it says nothing about the person
            raise TryLater(error.message, hint=error.hint) from error

    def start_device(self, settings: SignInSettings) -> DeviceCode | None:
        """Return a code for a device without a browser."""
        known = self._provider(settings)
        if not known.metadata.get("device_authorization_endpoint"):
            return None
        with self._session(settings, known) as session, _provider_errors(settings):
            reply = session.post(
                _endpoint(known, "device_authorization_endpoint"),
                data={"client_id": settings.client_id, "scope": session.scope},
                auth=session.client_auth(session.token_endpoint_auth_method),
                withhold_token=True,
            )
            reply.raise_for_status()
            said = reply.json()
            return DeviceCode(
                device_code=str(said["device_code"]),
                user_code=str(said["user_code"]),
                verification_url=_web_url(said.get("verification_uri") or said["verification_url"]),
                complete_url=_web_url(said.get("verification_uri_complete") or ""),
                expires_in_s=min(float(said["expires_in"]), 1800.0),
                interval_s=max(float(said.get("interval") or 5), 1.0),
            )

    def poll_device(self, settings: SignInSettings, device_code: str) -> ProviderAnswer | None:
        """Return who has typed in the code."""
        asked = {"grant_type": DEVICE_GRANT, "device_code": device_code}
        try:
            return self._answer(settings, self._provider(settings), asked)
        except _Pending:
            return None

    def _answer(
        self, settings: SignInSettings, known: _Known, asked: Mapping[str, str], *, nonce: str = "", subject: str = ""
    ) -> ProviderAnswer:
        """Send a request to the token endpoint, and verify what it returns. `nonce`, `subject`: as they must be; "" for any."""
        with self._session(settings, known) as session, _provider_errors(settings, again=bool(subject)):
            tokens = session.fetch_token(_endpoint(known, "token_endpoint"), **asked)
            claims: dict[str, Any] = {}
            id_token = tokens.get("id_token")
            if isinstance(id_token, str):
                claims = self._verified(settings, id_token, nonce, str(tokens.get("access_token") or ""))
            elif not subject:
                raise NotSignedIn("the sign-in provider sent no ID token", hint=_HINT)
            found = str(claims.get("sub") or subject)
            missing = any(claim_at(claims, name) is None for name in (settings.groups_claim, settings.user_claim))
            if missing and known.metadata.get("userinfo_endpoint"):
                more = session.get(_endpoint(known, "userinfo_endpoint"))
                if more.status_code in (401, 403) and subject:
                    raise NotSignedIn(f"the sign-in provider no longer shows them (status {more.status_code})")
                more.raise_for_status()
                said = more.json()
                if not isinstance(said, dict) or said.get("sub") != found:  # OpenID Connect Core, 5.3.2
                    raise NotSignedIn(
                        "the userinfo endpoint of the sign-in provider speaks of another person", hint=_HINT
                    )
                claims = {**said, **claims}
            if subject and found != subject:
                raise NotSignedIn("the sign-in provider speaks of another person", hint=_HINT)
            return ProviderAnswer(subject=found, claims=claims, refresh_token=str(tokens.get("refresh_token") or ""))

    def _verified(self, settings: SignInSettings, id_token: str, nonce: str, access_token: str) -> dict[str, Any]:
        """Return the claims of an ID token.

        Raises:
            NotSignedIn: it is not one of this provider, for this head and this sign-in, and for now.
        """
        from authlib.oidc.core import CodeIDToken
        from joserfc import jwt
        from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError

        try:
            try:
                token = jwt.decode(id_token, self._provider(settings).keys, algorithms=ALGORITHMS)
            except (InvalidKeyIdError, BadSignatureError):  # the provider may have changed its keys
                token = jwt.decode(id_token, self._provider(settings, KEYS_AGAIN_S).keys, algorithms=ALGORITHMS)
            claims = CodeIDToken(
                token.claims,
                token.header,
                options={
                    "iss": {"essential": True, "value": settings.issuer},
                    "aud": {"essential": True, "value": settings.client_id},
                    "sub": {"essential": True},
                },
                params={"nonce": nonce, "client_id": settings.client_id, "access_token": access_token},
            )
            claims.validate(now=int(self._now_s()), leeway=LEEWAY_S)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise _InvalidToken(
                f"the ID token of the sign-in provider is not valid: {_short(error)}", hint=_HINT
            ) from error
        return dict(claims)

    def _provider(self, settings: SignInSettings, max_age_s: float = METADATA_S) -> _Known:
        """Return metadata and keys of the provider, at most that old. Threads that need them at once read them once."""
        with self._lock:
            known, failed = self._known.get(settings.issuer), self._failed
            if known is not None and self._now_s() - known.read_s < max_age_s:
                return known
            if failed is not None and failed[1] == settings.issuer and self._now_s() - failed[0] < RETRY_S:
                raise failed[2]
            try:
                known = self._read(settings)
            except TryLater as error:  # those who wait for the lock do not each wait for the provider
                self._failed = (self._now_s(), settings.issuer, error)
                raise
            self._known = {settings.issuer: known}
            return known

    def _read(self, settings: SignInSettings) -> _Known:
        if any(find_spec(package) is None for package in ("authlib", "joserfc")):
            raise TryLater(
                "this head cannot sign people in: authlib or joserfc is not installed",
                hint="pip install '.[oidc]' in the checkout",
            )
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        with provider_session() as session, _provider_errors(settings):
            metadata = _json(session, settings.issuer.rstrip("/") + "/.well-known/openid-configuration")
            if metadata.get("issuer") != settings.issuer:
                raise TryLater(
                    f"the sign-in provider calls itself {str(metadata.get('issuer'))[:200]!r}, and the settings call it {settings.issuer!r}",
                    hint=_HINT,
                )
            try:
                keys = KeySet.import_key_set(_json(session, _endpoint_of(metadata, "jwks_uri")))  # type: ignore[arg-type]
            except (JoseError, ValueError, TypeError, KeyError) as error:
                raise TryLater(
                    f"the keys of the sign-in provider are not readable: {_short(error)}", hint=_HINT
                ) from error
        return _Known(metadata, keys, self._now_s())

    def _session(self, settings: SignInSettings, known: _Known) -> OAuth2Session:
        secret = self._secret(settings)
        methods = known.metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        method = "client_secret_basic" if "client_secret_basic" in methods else "client_secret_post"
        return provider_session(
            client_id=settings.client_id,
            client_secret=secret,
            token_endpoint_auth_method=method if secret else "none",
            scope=" ".join(_scopes(settings, known)),
            code_challenge_method="S256",
        )

    def _secret(self, settings: SignInSettings) -> str | None:
        """Return the client's secret; None for a client without one."""
        if not settings.secret_file:
            return None
        path = os.path.join(self._folder, settings.secret_file)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode) or mode & 0o077:
                    raise TryLater(f"{path} must be a file that only the head's account can read (chmod 600)")
                secret = file.read(SECRET_BYTES).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise TryLater(f"the secret of the sign-in client cannot be read: {path}: {error}") from error
        if not secret:
            raise TryLater(f"the secret of the sign-in client is missing: {path} is empty")
        return secret


class _InvalidToken(NotSignedIn):
    """The ID token is not valid."""


class _Pending(Exception):
    """The token endpoint asks for patience."""


class _provider_errors:  # noqa: N801  a context manager, used as a function
    """Turns errors of the libraries into those of the port."""

    def __init__(self, settings: SignInSettings, *, again: bool = False) -> None:
        """`again`: the provider was asked again about a person who signed in before."""
        self._issuer, self._again = settings.issuer, again

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise the error of the port in place of that of a library."""
        from authlib.common.errors import AuthlibBaseError

        if isinstance(error, AuthlibBaseError):
            word = str(error.error or "")
            if word in ("authorization_pending", "slow_down"):
                raise _Pending from error
            word = word if _WORD.fullmatch(word) else "an error without a name"
            if word in _ABOUT_THE_PERSON:
                refused = f"the sign-in provider refused: {word}"
                ended = f"the sign-in provider has ended their sign-in, or they have left ({word})"
                raise NotSignedIn(ended if self._again else refused, hint=Hint(HintCode.SIGN_IN_AGAIN)) from error
            raise TryLater(f"the sign-in provider {self._issuer} refused this head: {word}", hint=_HINT) from error
        if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
            raise TryLater(
                f"the sign-in provider {self._issuer} sent something unreadable: {_short(error)}", hint=_HINT
            ) from error
        if isinstance(error, ProviderHttpError | OSError):
            raise TryLater(
                f"the sign-in provider {self._issuer} does not answer: {_short(error)}", hint=_HINT
            ) from error


def _json(session: OAuth2Session, url: str) -> dict[str, Any]:
    reply = session.get(url, withhold_token=True)
    reply.raise_for_status()
    found = reply.json()
    if not isinstance(found, dict):
        raise TypeError(f"{url} is no JSON object")
    return found


def _scopes(settings: SignInSettings, known: _Known) -> tuple[str, ...]:
    """Return the scopes to request: some providers refuse those that they do not know."""
    offered = known.metadata.get("scopes_supported")
    if settings.scopes or not isinstance(offered, list):
        return settings.scopes or SCOPES[:3]
    return tuple(scope for scope in SCOPES if scope == "openid" or scope in offered)


def _endpoint(known: _Known, name: str) -> str:
    return _endpoint_of(known.metadata, name)


def _endpoint_of(metadata: Mapping[str, Any], name: str) -> str:
    """Return an address from the metadata.

    Raises:
        TryLater: it is missing, or neither TLS nor on this machine.
    """
    url = metadata.get(name)
    if not isinstance(url, str) or not is_secure_url(url):
        raise TryLater(f"the sign-in provider has no usable {name}: {str(url)[:200]!r} is not https", hint=_HINT)
    return url


def _web_url(text: object) -> str:
    """Return an address that people are sent to, or "" if it is not valid."""
    return text if isinstance(text, str) and is_secure_url(text) else ""


def _short(error: BaseException) -> str:
    """Return an error of a library in one line, without the names of its classes and addresses' queries."""
    cause = getattr(error.args[0], "reason", None) if error.args else None  # of urllib3, inside that of requests
    text = str(cause or error) or type(error).__name__
    text = re.sub(r"^(?:.*\): |\w+\()?(?:Failed to establish a new connection: )?(?:\[Errno -?\d+\] )?", "", text)
    text = re.sub(r"\?[^\s'\")]*", "?...", text)
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:300]
