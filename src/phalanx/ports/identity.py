"""Signs people in at a provider of OpenID Connect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from phalanx.core.work.sign_in import SignInSettings

RETURN_PATH: Final = "/sign-in/return"
"""Below the head's URL: where the provider leads browsers back to. Operators register it at the provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFacts:
    """What a provider says about itself. `endpoints`: by their names in its metadata; `scopes`: that this head requests."""

    endpoints: Mapping[str, str]
    scopes: tuple[str, ...]
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswer:
    """What the provider says about a person, verified.

    Attributes:
        subject: who it is there, for ever.
        claims: of the ID token, and of the userinfo endpoint where the token lacks the groups.
        refresh_token: with which the provider can be asked again; "" if it gave none.
    """

    subject: str
    claims: Mapping[str, Any]
    refresh_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCode:
    """A code that a person types in at the provider (RFC 8628). `interval_s`: between two questions whether they have."""

    device_code: str = field(repr=False)
    user_code: str
    verification_url: str
    complete_url: str
    expires_in_s: float
    interval_s: float


class IdentityProvider(Protocol):
    """Speaks with a provider. Thread-safe; blocks on the network, for some seconds at most.

    Every function raises TryLater if the provider does not answer or is not set up as the settings say.
    """

    def check(self, settings: SignInSettings) -> ProviderFacts:
        """Read the metadata and keys of the provider, and the client's secret."""
        ...

    def authorization_url(self, settings: SignInSettings, *, url: str, state: str, nonce: str, verifier: str) -> str:
        """Return where a browser signs in: with PKCE by `verifier`. `url`: of the head to which it comes back."""
        ...

    def redeem(
        self, settings: SignInSettings, *, url: str, code: str, nonce: str, verifier: str, issuer: str
    ) -> ProviderAnswer:
        """Exchange the code that a browser brought. `issuer`: that came with it, "" for none; `url`: as above.

        Raises:
            NotSignedIn: the provider refuses the code, or its ID token is not valid for this sign-in.
        """
        ...

    def refresh(self, settings: SignInSettings, *, refresh_token: str, subject: str) -> ProviderAnswer:
        """Ask again about a person.

        Raises:
            NotSignedIn: the provider refuses: the person has left, or the sign-in there has ended.
        """
        ...

    def start_device(self, settings: SignInSettings) -> DeviceCode | None:
        """Return a code for a device without a browser; None if the provider does not offer that."""
        ...

    def poll_device(self, settings: SignInSettings, device_code: str) -> ProviderAnswer | None:
        """Return who has typed in the code; None until then.

        Raises:
            NotSignedIn: it has expired, or the person declined.
        """
        ...
