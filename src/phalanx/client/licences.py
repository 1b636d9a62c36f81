"""API calls for licences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, id_path_segment

if TYPE_CHECKING:
    from phalanx.wire.api import licences as api
else:
    api = LazyModule("phalanx.wire.api.licences")


class LicencesApi(ApiCalls):
    """List, set and remove licences."""

    def licences(self) -> list[api.LicenceView]:
        """Return all licences, by name."""
        return [view for page in self._pages("/v1/licences", api.LicenceList) for view in page.licences]

    def put_licence(self, name: str, seats: int) -> api.LicenceChanged:
        """Add a licence, or change its number of seats."""
        path = f"/v1/licences/{id_path_segment('licence', name)}"
        return decode_record(self._put(path, {"seats": seats}), api.LicenceChanged)

    def remove_licence(self, name: str) -> api.LicenceChanged:
        """Remove a licence that no job holds."""
        path = f"/v1/licences/{id_path_segment('licence', name)}"
        return decode_record(self.transport.json("DELETE", path), api.LicenceChanged)
