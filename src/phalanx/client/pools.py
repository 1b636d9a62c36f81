"""API calls for node pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, encode_body, id_path_segment

if TYPE_CHECKING:
    from phalanx.wire.api import pools as api
else:
    api = LazyModule("phalanx.wire.api.pools")


CLOUD_ANSWER_S: Final = 300.0  # the head waits for some ten calls of a cloud, each for 30 s at most


class NodePoolsApi(ApiCalls):
    """List, add, change and remove node pools."""

    def pools(self) -> list[api.PoolView]:
        """Return all node pools, by name."""
        return [view for page in self._pages("/v1/pools", api.PoolList) for view in page.pools]

    def pool(self, pool_id: str) -> api.PoolView:
        """Return one node pool."""
        return self._get(f"/v1/pools/{id_path_segment('pool', pool_id)}", api.PoolReply).pool

    def put_pool(
        self,
        pool_id: str,
        *,
        max_nodes: int,
        provider: str = "",
        node: str = "",
        min_nodes: int = 0,
        price_per_h: float | None = None,
        cap_per_h: float | None = None,
        cap_per_month: float | None = None,
        egress_per_gb: float = 0.0,
        billed: str = "second",
        idle: str = "5m",
        start_limit: str = "10m",
        zone: str = "",
        zones: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> api.PoolView:
        """Add a node pool, or change its limits, price and times.

        Args:
            pool_id: its name.
            provider: starts its nodes; empty for a pool that exists.
            node: what each node has, for the provider; empty for a pool that exists.
            max_nodes: at most so many.
            min_nodes: at least so many.
            price_per_h: of one node, in US dollars an hour; None for the prices that the provider knows, or 0; for the price of a pool that exists.
            cap_per_h: of all its nodes together, in US dollars an hour; None for no cap.
            cap_per_month: of all its nodes together in a month (UTC), in US dollars; None for no cap, 0 to order none.
            egress_per_gb: US dollars for each 10^9 bytes that a job copies to its nodes, or back home.
            billed: by the `second`, or by the `hour` that has begun.
            idle: duration after which a node without a job is released.
            start_limit: duration after which a node that is not up is given up.
            zone: where the nodes are, for their label `zone`.
            zones: where the provider looks for them, in order.
            settings: of the provider.
        """
        body = {
            "provider": provider,
            "node": node,
            "max_nodes": max_nodes,
            "min_nodes": min_nodes,
            "price_per_h": price_per_h,
            "cap_per_h": cap_per_h,
            "cap_per_month": cap_per_month,
            "egress_per_gb": egress_per_gb,
            "billed": billed,
            "idle": idle,
            "start_limit": start_limit,
            "zone": zone,
            "zones": list(zones),
            "settings": dict(settings or {}),
        }
        path = f"/v1/pools/{id_path_segment('pool', pool_id)}"
        return decode_record(self._put(path, body, timeout_s=CLOUD_ANSWER_S), api.PoolReply).pool

    def check_cloud(self, provider: str, settings: Mapping[str, str]) -> api.CloudChecked:
        """Return what the head's credentials for a provider may do. Nothing is started."""
        body = encode_body({"provider": provider, "settings": dict(settings)})
        reply = self.transport.json("POST", "/v1/clouds/check", body, timeout_s=CLOUD_ANSWER_S)
        return decode_record(reply, api.CloudChecked)

    def node_console(self, node_id: str) -> api.NodeConsoleReply:
        """Return what the machine of a node printed that never joined. `node_id`: as a pool has named it, such as `spot-0`."""
        pool_id = node_id.rpartition("-")[0]
        path = f"/v1/pools/{id_path_segment('pool', pool_id)}/consoles/{id_path_segment('node', node_id)}"
        return self._get(path, api.NodeConsoleReply)

    def remove_pool(self, pool_id: str) -> api.PoolRemoved:
        """Release all nodes of a pool, and then remove it."""
        path = f"/v1/pools/{id_path_segment('pool', pool_id)}"
        return decode_record(self.transport.json("DELETE", path), api.PoolRemoved)
