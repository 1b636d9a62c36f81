"""API calls for the history of nodes, devices and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, path_segment, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import history as api
else:
    api = LazyModule("phalanx.wire.api.history")


class HistoryApi(ApiCalls):
    """Read how nodes, devices and jobs were."""

    def device_history(
        self,
        node: str = "",
        *,
        since_s: float,
        until_s: float | None = None,
        device: int | None = None,
        step_s: float | None = None,
    ) -> api.NodeHistory:
        """Return columns of a node's devices, or the mean of all devices without a node, over a span of Unix time."""
        asked = {"node": node, "device": device, "since_s": since_s, "until_s": until_s, "step_s": step_s}
        return self._get("/v1/history/devices" + query_string(asked), api.NodeHistory)

    def node_history(
        self, node: str = "", *, since_s: float, until_s: float | None = None, step_s: float | None = None
    ) -> api.NodeHistory:
        """Return CPU, memory and network of a node, or their mean over all nodes, over a span of Unix time."""
        asked = {"node": node, "since_s": since_s, "until_s": until_s, "step_s": step_s}
        return self._get("/v1/history/nodes" + query_string(asked), api.NodeHistory)

    def job_curves(self, job_id: str) -> api.JobCurves:
        """Return loss, step time and goodput of a job, in at most 256 points."""
        return self._get(f"/v1/jobs/{path_segment(job_id)}/history", api.JobCurves)

    def history_status(self) -> api.HistoryStatus:
        """Return whether history is stored, and the space that it takes."""
        return self._get("/v1/history", api.HistoryStatus)
