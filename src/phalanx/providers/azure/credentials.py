"""Access tokens of Microsoft Entra for Azure, by the client credentials grant over REST.

azure-identity would bring azure-core, msal and msal-extensions for what is one request here: a head signs in as a service principal, with a secret
or a federated token, or as the identity of its machine. Certificates and sign-in by a person are not supported.
The variables are those of azure-identity's EnvironmentCredential and WorkloadIdentityCredential.
Source: learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow, read 2026-11.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CallUnanswered
from phalanx.providers.clouds.rest_calls import CloudReply, RestCalls, one_line

AUTHORITY_URL: Final = "https://login.microsoftonline.com"
AUTHORITY_VARIABLE: Final = "AZURE_AUTHORITY_HOST"
METADATA_URL: Final = "http://169.254.169.254"
RENEW_S: Final = 120.0  # before a token runs out
_ASSERTION: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_WRONG: Final = frozenset({400, 401, 403})


@dataclass(slots=True)
class AzureTokens:
    """The access token of the head's account for one service, renewed before it runs out. Thread-safe."""

    audience: str
    from_instance: bool
    guard: threading.Lock = field(default_factory=threading.Lock)
    token: str = ""
    until_s: float = 0.0

    def header(self) -> dict[str, str]:
        """Return the header of a call.

        Raises:
            BadRequest: there are no credentials, or Azure does not accept them.
            CallUnanswered: the sign-in does not answer.
        """
        with self.guard:
            if time.monotonic() >= self.until_s - RENEW_S:
                reply = self._of_machine() if self.from_instance else self._of_environment(os.environ)
                if reply.status in _WRONG:
                    why = one_line(str(reply.body.get("error_description") or reply.body.get("error") or reply.text))
                    raise wrong_credentials(why)
                if reply.status >= 300 or not reply.body.get("access_token"):
                    raise CallUnanswered(f"no access token: HTTP {reply.status}")
                self.token = str(reply.body["access_token"])
                self.until_s = time.monotonic() + float(reply.body.get("expires_in", 0))
            return {"Authorization": f"Bearer {self.token}"}

    def drop(self, header: Mapping[str, str]) -> None:
        """Sign in again with the next call: Azure does not accept this header any more."""
        with self.guard:
            if header == {"Authorization": f"Bearer {self.token}"}:
                self.until_s = 0.0

    def _of_environment(self, environment: Mapping[str, str]) -> CloudReply:
        tenant, client = environment.get("AZURE_TENANT_ID", ""), environment.get("AZURE_CLIENT_ID", "")
        words = {"grant_type": "client_credentials", "client_id": client, "scope": f"{self.audience}/.default"}
        if path := environment.get("AZURE_FEDERATED_TOKEN_FILE", ""):
            try:
                with open(path, encoding="utf-8") as file:  # its writer renews it
                    words |= {"client_assertion_type": _ASSERTION, "client_assertion": file.read().strip()}
            except OSError as error:
                raise BadRequest(f"the federated token {path} cannot be read: {error.strerror}") from error
        elif secret := environment.get("AZURE_CLIENT_SECRET", ""):
            words["client_secret"] = secret
        if not tenant or not client or len(words) == 3:
            raise BadRequest(
                "no Azure credentials: the environment of the head's account has none",
                hint="set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET where the head starts",
            )
        service = RestCalls(url=environment.get(AUTHORITY_VARIABLE) or AUTHORITY_URL)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return service.send("POST", f"/{tenant}/oauth2/v2.0/token", body=urlencode(words).encode(), headers=headers)

    def _of_machine(self) -> CloudReply:
        service = RestCalls(url=METADATA_URL, metadata=True)
        query = {"api-version": "2018-02-01", "resource": self.audience}
        return service.send("GET", "/metadata/identity/oauth2/token", query=query, headers={"Metadata": "true"})


def wrong_credentials(why: str) -> BadRequest:
    """Return the error of credentials that Azure does not accept."""
    return BadRequest(
        f"Azure does not accept the credentials: {one_line(why)}", hint="set others where the head starts"
    )
