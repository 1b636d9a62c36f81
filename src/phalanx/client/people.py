"""API calls for users, projects and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    decode_record,
    id_path_segment,
)

if TYPE_CHECKING:
    from phalanx.wire.api import people as api
else:
    api = LazyModule("phalanx.wire.api.people")


class AccountsApi(ApiCalls):
    """Read and change users, projects and tokens."""

    def users(self) -> list[api.UserView]:
        """Return all users."""
        return [view for page in self._pages("/v1/users", api.UserList) for view in page.users]

    def put_user(
        self, user_id: str, *, role: str | None = None, disabled: bool | None = None, linked: bool | None = None
    ) -> api.UserView:
        """Create or change a user. `linked`: whether it signs in at the provider."""
        body = {"role": role, "disabled": disabled, "linked": linked}
        return decode_record(self._put(f"/v1/users/{id_path_segment('user', user_id)}", body), api.UserReply).user

    def projects(self) -> list[api.ProjectView]:
        """Return all projects."""
        return [view for page in self._pages("/v1/projects", api.ProjectList) for view in page.projects]

    def project(self, project_id: str) -> api.ProjectReply:
        """Return a project, and what its outputs at the head occupy."""
        return self._get(f"/v1/projects/{id_path_segment('project', project_id)}", api.ProjectReply)

    def put_project(
        self,
        project_id: str,
        *,
        members: Sequence[str] | None = None,
        admins: Sequence[str] | None = None,
        budget: str | None = None,
        outputs: str | None = None,
        requests_per_minute: str | None = None,
        tokens_per_minute: str | None = None,
        request_weight: str | None = None,
        burst: str | None = None,
    ) -> api.ProjectView:
        """Create or change a project. `budget`: "5000 EUR/month", or "none"; `outputs`: the limit on outputs at the head, "500G" or "none";
        `requests_per_minute`, `tokens_per_minute`: limits on requests to services, "600", "200k" or "none"; `request_weight`: the part of a busy
        service, relative to other projects; `burst`: when its jobs order nodes that cost money, as in a queue file, or "none".
        """
        body = {
            "members": members,
            "admins": admins,
            "budget": budget,
            "outputs": outputs,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "request_weight": request_weight,
            "burst": burst,
        }
        return decode_record(
            self._put(f"/v1/projects/{id_path_segment('project', project_id)}", body), api.ProjectReply
        ).project

    def tokens(self) -> list[api.TokenView]:
        """Return the caller's tokens; for an admin all tokens."""
        return [view for page in self._pages("/v1/tokens", api.TokenList) for view in page.tokens]

    def make_token(
        self,
        *,
        user: str | None = None,
        expires: str | None = None,
        scope: Sequence[str] = (),
        note: str = "",
        requests_per_minute: str | None = None,
        tokens_per_minute: str | None = None,
    ) -> api.TokenCreated:
        """Create a token. Only this reply contains its secret. `requests_per_minute`, `tokens_per_minute`: as for projects."""
        body = {
            "user": user,
            "expires": expires,
            "scope": list(scope),
            "note": note,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        return decode_record(self._post("/v1/tokens", body), api.TokenCreated)

    def revoke_token(self, token_id: str, *, made_too: bool = False) -> None:
        """Revoke a token; with `with_derived` also all tokens created with it."""
        suffix = "?made_too=true" if made_too else ""
        self.transport.json("DELETE", f"/v1/tokens/{id_path_segment('token', token_id)}{suffix}")
