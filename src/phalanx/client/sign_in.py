"""API calls for the sign-in at a provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record

if TYPE_CHECKING:
    from phalanx.wire.api import sign_in as api
else:
    api = LazyModule("phalanx.wire.api.sign_in")


class SignInApi(ApiCalls):
    """Read and change the sign-in provider."""

    def sign_in(self) -> api.SignInView:
        """Return the settings; an empty issuer means that there is no provider."""
        return self._get("/v1/sign-in", api.SignInView)

    def put_sign_in(self, changes: Mapping[str, Any]) -> api.SignInView:
        """Change settings, by the names of the API's fields."""
        return decode_record(self._put("/v1/sign-in", dict(changes)), api.SignInView)

    def remove_sign_in(self) -> None:
        """Remove the provider."""
        self.transport.json("DELETE", "/v1/sign-in")

    def check_sign_in(self) -> api.ProviderCheck:
        """Let the head read what the provider says about itself."""
        return decode_record(self._post("/v1/sign-in/check", {}), api.ProviderCheck)
