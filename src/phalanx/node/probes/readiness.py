"""Probes the port of a replica of a service, and reports when it becomes ready and when it no longer answers."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from typing import Final

from phalanx.core.work.services.service_terms import READY_TCP
from phalanx.node.logic.events import ReadinessProbed
from phalanx.node.member.member_runtime import MemberRuntime

PROBE_EVERY_S: Final = (
    0.5  # until ready, and after a failure: a rollout of ten replicas loses at most five seconds to it
)
PROBE_READY_EVERY_S: Final = 5.0  # rarer, since most servers write each request to their log
PROBE_TIMEOUT_S: Final = 2.0  # a server that answers health checks later than this answers requests later still
FAILURES_MAX: Final = 3  # in a row, of a ready replica: a single slow answer is no failure
_STATUS_OK: Final = range(200, 400)
_STATUS_BYTES_MAX: Final = 1 << 16  # read of a body, so that the server sees no reset


def probe(address: str, port: int, ready: str) -> str:
    """Probe once. Return why it failed; "" if the replica is ready.

    Args:
        address: of the node, at which gateways reach the replica.
        port: that it was given.
        ready: a path, or READY_TCP.
    """
    try:
        if ready == READY_TCP:
            socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S).close()
            return ""
        connection = http.client.HTTPConnection(address, port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", ready, headers={"User-Agent": "phalanx-readiness", "Connection": "close"})
            answer = connection.getresponse()
            answer.read(_STATUS_BYTES_MAX)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"{address}:{port}: {str(error) or type(error).__name__}"
    return "" if answer.status in _STATUS_OK else f"GET {ready} answered {answer.status}"


def probe_until_closed(member: MemberRuntime, on_event: Callable[[ReadinessProbed], None]) -> None:
    """Probe a replica's port on a thread of its own until the member is closed, and report each change. Other members are not probed.

    Call it on the member's work lane, so that it comes before the member is closed.
    """
    start, terms = member.start, member.prepare.spec.service
    if terms is None or start is None or not start.service_port or member.grant.node_rank:
        return
    closed, address = threading.Event(), member.prepare.addresses[0]
    member.cleanup.callback(closed.set)

    def run() -> None:
        ready, failures = False, 0
        while not closed.is_set():
            why = probe(address, start.service_port, terms.ready)
            failures = failures + 1 if why else 0
            changed = not why if not ready else failures >= FAILURES_MAX
            if changed and not closed.is_set():
                ready = not ready
                on_event(ReadinessProbed(key=member.key, ready=ready, why=why))
            closed.wait(PROBE_READY_EVERY_S if ready and not failures else PROBE_EVERY_S)

    threading.Thread(target=run, name="readiness", daemon=True).start()
