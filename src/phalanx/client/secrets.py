"""API calls for secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, id_path_segment

if TYPE_CHECKING:
    from phalanx.wire.api import secrets as api
else:
    api = LazyModule("phalanx.wire.api.secrets")


class SecretsApi(ApiCalls):
    """List, set and remove secrets. No call returns a value. `project`: None for secrets of the caller alone."""

    def secrets(self) -> list[api.SecretView]:
        """Return the secrets that the caller may use or administer, by name."""
        return [view for page in self._pages("/v1/secrets", api.SecretList) for view in page.secrets]

    def put_secret(self, name: str, value: str, *, project: str | None) -> api.SecretView:
        """Set a secret of a project, or of the caller."""
        return decode_record(self._put(_path(name, project), {"value": value}), api.SecretReply).secret

    def remove_secret(self, name: str, *, project: str | None) -> api.SecretRemoved:
        """Remove a secret of a project, or of the caller."""
        return decode_record(self.transport.json("DELETE", _path(name, project)), api.SecretRemoved)

    def rotate_secrets_key(self) -> api.SecretsRotated:
        """Encrypt all secrets with a new key."""
        return decode_record(self._post("/v1/secrets/rotate-key", None), api.SecretsRotated)


def _path(name: str, project: str | None) -> str:
    base = "/v1/own-secrets" if project is None else f"/v1/projects/{id_path_segment('project', project)}/secrets"
    return f"{base}/{id_path_segment('secret', name)}"
