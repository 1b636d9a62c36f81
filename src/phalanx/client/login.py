"""API calls of the login of a command line. They need no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record

if TYPE_CHECKING:
    from phalanx.wire.api import login as api
else:
    api = LazyModule("phalanx.wire.api.login")


class LoginApi(ApiCalls):
    """Get a token by signing in."""

    def start_device_login(self, note: str = "") -> api.DeviceLogin:
        """Return a code to type in at the provider, or at the head if the URLs are paths. `note`: what the head's page shows.

        Raises:
            TryLater: too many logins wait.
            NotFound: the head has no page for codes, and no provider that offers them.
        """
        return decode_record(self._post("/v1/login/device", {"note": note}), api.DeviceLogin)

    def finish_device_login(self, handle: str, note: str = "") -> api.LoginReply:
        """Return the token, or `pending`."""
        return decode_record(self._post("/v1/login/device/token", {"handle": handle, "note": note}), api.LoginReply)

    def finish_browser_login(self, code: str, verifier: str, note: str = "") -> api.LoginReply:
        """Return the token for the code that a browser brought."""
        body = {"code": code, "verifier": verifier, "note": note}
        return decode_record(self._post("/v1/login/token", body), api.LoginReply)
