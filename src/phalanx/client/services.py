"""API calls for services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, encode_body, path_segment

if TYPE_CHECKING:
    from phalanx.wire.api import jobs as jobs_api
    from phalanx.wire.api import services as api
else:
    jobs_api = LazyModule("phalanx.wire.api.jobs")
    api = LazyModule("phalanx.wire.api.services")


class ServicesApi(ApiCalls):
    """Submit, read and change services."""

    def services(self, *, stopped: bool = False) -> list[api.ServiceView]:
        """Return all services by name; those that were stopped only with `stopped`."""
        path = "/v1/services" + ("?stopped=1" if stopped else "")
        return [view for page in self._pages(path, api.ServiceList) for view in page.services]

    def service(self, name: str) -> api.ServiceDetail:
        """Return one service with its revisions and replicas."""
        return self._get(f"/v1/services/{path_segment(name)}", api.ServiceDetail)

    def service_keys(self, name: str) -> jobs_api.JobKeysReply:
        """Return the keys of a job file that would submit the newest revision again."""
        return self._get(f"/v1/services/{path_segment(name)}/request", jobs_api.JobKeysReply)

    def submit_service(self, spec: Mapping[str, object]) -> api.ServiceView:
        """Submit a service, given as the keys of a job file with `type: service`. Repeating it is safe."""
        return decode_record(self._post("/v1/services", spec, idempotent=True), api.ServiceReply).service

    def update_service(self, name: str, spec: Mapping[str, object]) -> api.ServiceView:
        """Roll out a new revision, given as the keys of a job file."""
        return self._change_service(name, {"spec": dict(spec)})

    def roll_back_service(self, name: str, revision: int) -> api.ServiceView:
        """Roll out an existing revision."""
        return self._change_service(name, {"revision": revision})

    def scale_service(self, name: str, replicas: int | Literal["auto"]) -> api.ServiceView:
        """Set the number of replicas; 0 ends all. If the number follows load, this is the least; "auto" for none."""
        return self._change_service(name, {"replicas": replicas})

    def sleep_service(self, name: str, *, asleep: int | None = None, awake: int | None = None) -> api.ServiceView:
        """Set how many replicas sleep, or how many are awake: exactly one is given. Larger numbers mean all."""
        change = {"asleep": asleep, "awake": awake}
        return self._change_service(name, {key: value for key, value in change.items() if value is not None})

    def stop_service(self, name: str) -> api.ServiceView:
        """Stop a service and its replicas."""
        payload = self._post(f"/v1/services/{path_segment(name)}/stop", None, idempotent=True)
        return decode_record(payload, api.ServiceReply).service

    def _change_service(self, name: str, change: Mapping[str, object]) -> api.ServiceView:
        payload = self.transport.json("PATCH", f"/v1/services/{path_segment(name)}", encode_body(change))
        return decode_record(payload, api.ServiceReply).service
