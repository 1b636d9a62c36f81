"""Where a replica of a service is reached: from its attempt, and as the history line that gateways read from the event stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionContext, history_line
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.attempt import Attempt

ENDPOINT: Final = "endpoint"  # kind of the history line of each change of an endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one replica serves. `address`: of node rank 0's node; `ready`: it may get requests."""

    node_id: NodeId
    address: str
    port: int
    ready: bool


def endpoint_of(attempt: Attempt | None, address: str) -> Endpoint | None:
    """The endpoint of a replica's live attempt, given the address of its first node; None before a port is chosen."""
    if attempt is None or not attempt.holds_allocation or not attempt.service_port:
        return None
    return Endpoint(
        node_id=attempt.allocation.grants[0].node_id,
        address=attempt.members[0].address or address,
        port=attempt.service_port,
        ready=attempt.serving,
    )


def endpoint_line(case: AttemptCase, attempt: Attempt, facts: TransitionContext, why: str) -> HistoryLine:
    """The line that a replica became ready, or why it is not; its facts are the endpoint."""
    node_id = attempt.allocation.grants[0].node_id
    endpoint = endpoint_of(attempt, facts.addresses.get(node_id, "127.0.0.1"))
    assert endpoint is not None  # a probe runs only on a chosen port
    assert case.job.replica is not None
    place = f"{node_id} ({endpoint.address}:{endpoint.port})"
    text = f"ready on {place}" if endpoint.ready else f"no longer ready on {place}: {why}"
    known: dict[str, str | int | float | None] = {
        "service": case.job.replica.service,
        "revision": case.job.replica.revision,
        "address": endpoint.address,
        "port": endpoint.port,
        "ready": int(endpoint.ready),
    }
    return replace(history_line(case, facts, ENDPOINT, text, node_id=node_id), facts=known)
