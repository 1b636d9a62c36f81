"""API calls for nodes, reservations and the calibration profile of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    decode_record,
    encode_body,
    id_path_segment,
    path_segment,
)

if TYPE_CHECKING:
    from phalanx.wire.api import fleet as fleet_api
    from phalanx.wire.api import nodes as api
else:
    fleet_api = LazyModule("phalanx.wire.api.fleet")
    api = LazyModule("phalanx.wire.api.nodes")


class NodesApi(ApiCalls):
    """Read, drain, label and reserve nodes."""

    def nodes(self) -> list[api.NodeView]:
        """Return all nodes."""
        return [view for page in self._pages("/v1/nodes", api.NodeList) for view in page.nodes]

    def nodes_and_orders(self) -> api.NodeList:
        """Return all nodes, and those that pools have ordered and that are not there yet."""
        first, *others = self._pages("/v1/nodes", api.NodeList)
        return api.NodeList(nodes=[view for page in (first, *others) for view in page.nodes], ordered=first.ordered)

    def node(self, node_id: str) -> api.NodeView:
        """Return one node."""
        return self._get(f"/v1/nodes/{path_segment(node_id)}", api.NodeReply).node

    def drain(self, node_id: str, why: str = "", *, cordon_only: bool = False) -> api.NodeView:
        """Cordon a node, and move its jobs unless `cordon_only`."""
        body = {"why": why, "cordon_only": cordon_only}
        return decode_record(
            self._post(f"/v1/nodes/{path_segment(node_id)}/drain", body, idempotent=True), api.NodeReply
        ).node

    def undrain(self, node_id: str, *, planned: bool = False) -> api.NodeView:
        """Make a node schedulable again, and end its maintenance; with `planned` also cancel later maintenance windows."""
        path = f"/v1/nodes/{path_segment(node_id)}/undrain{'?planned=true' if planned else ''}"
        return decode_record(self._post(path, None, idempotent=True), api.NodeReply).node

    def cap_power(self, node_id: str, limit: str, lasting: str = "") -> api.NodeView:
        """Cap the power of each GPU of a node, as `300W`, for a time as `8h` or without an end. Its supervisor does so after the answer."""
        body = encode_body({"limit": limit, "time": lasting})
        return decode_record(
            self.transport.json("PUT", f"/v1/nodes/{path_segment(node_id)}/power", body), api.NodeReply
        ).node

    def restore_power(self, node_id: str) -> api.NodeView:
        """Restore the power limits of before the cap."""
        return decode_record(
            self.transport.json("DELETE", f"/v1/nodes/{path_segment(node_id)}/power"), api.NodeReply
        ).node

    def label_nodes(self, labels: Mapping[str, Mapping[str, str]]) -> list[api.NodeView]:
        """Label nodes, all or none; an empty value removes a label. Return the changed nodes."""
        return decode_record(
            self.transport.json("PATCH", "/v1/nodes", encode_body({"labels": labels})), api.NodeList
        ).nodes

    def forget_node(self, node_id: str) -> api.NodeRemoved:
        """Remove a node that is down and holds no allocation. Return the waiting jobs that can never start without it."""
        return decode_record(self.transport.json("DELETE", f"/v1/nodes/{path_segment(node_id)}"), api.NodeRemoved)

    def fleet(self) -> fleet_api.FleetFrame:
        """Return the state of every GPU as one letter each."""
        return self._get("/v1/fleet", fleet_api.FleetFrame)

    def reservations(self) -> list[api.ReservationView]:
        """Return all reservations that have not ended, by start time."""
        return [view for page in self._pages("/v1/reservations", api.ReservationList) for view in page.reservations]

    def reserve(
        self,
        reservation_id: str,
        nodes: Sequence[str],
        time: str,
        *,
        start_s: float | None = None,
        users: Sequence[str] = (),
        queues: Sequence[str] = (),
        maintenance: bool = False,
        why: str = "",
        open_cordoned: bool = False,
    ) -> api.ReservationView:
        """Reserve nodes for `time` ("4h") from `start_s` (Unix seconds; None is now), for users and queues or for maintenance.

        Maintenance with an empty `time` drains the nodes at the start, until they are returned. With `open_cordoned`, nodes that an
        operator cordoned are open to the users and queues until the end, and then cordoned again.
        """
        body = {
            "nodes": list(nodes),
            "time": time,
            "start_s": start_s,
            "users": list(users),
            "queues": list(queues),
            "maintenance": maintenance,
            "why": why,
            **({"open_cordoned": True} if open_cordoned else {}),
        }
        path = f"/v1/reservations/{id_path_segment('reservation', reservation_id)}"
        return decode_record(self._put(path, body), api.ReservationReply).reservation

    def unreserve(self, reservation_id: str) -> None:
        """End a reservation and release its nodes."""
        self.transport.json("DELETE", f"/v1/reservations/{id_path_segment('reservation', reservation_id)}")

    def profile(self) -> api.ProfileReply:
        """Return the profile that the last calibration measured; decode it with `core.performance.profile.parse_profile`."""
        return self._get("/v1/profile", api.ProfileReply)

    def node_tests(self, node_id: str) -> api.NodeTestsView:
        """Return the stored tests of a node."""
        return self._get(f"/v1/nodes/{path_segment(node_id)}/tests", api.NodeTestsReply).nodes[0]

    def put_node_tests(
        self, profile: Mapping[str, object], *, threshold: float | None, drain: bool
    ) -> list[api.NodeTestsView]:
        """Store the results of a test, and return the newest test of each node."""
        body = {"profile": profile, "threshold": threshold, "drain": drain}
        return decode_record(self._post("/v1/node-tests", body, idempotent=True), api.NodeTestsReply).nodes

    def put_profile(self, profile: Mapping[str, object]) -> api.ProfileReply:
        """Store a profile in place of the current one."""
        return decode_record(self._put("/v1/profile", profile), api.ProfileReply)
