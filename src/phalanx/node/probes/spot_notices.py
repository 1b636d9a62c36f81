"""Reads from inside a rented machine whether its cloud is about to take it back.

Each cloud has a metadata service at a link-local address, which only the machine itself reaches:

- EC2: `spot/instance-action`, two minutes before; 404 before that. With a token of version 2 of the service.
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- Compute Engine: `instance/preempted` and `instance/maintenance-event`, 30 s before a preemption.
  https://cloud.google.com/compute/docs/instances/spot
- Azure: Scheduled Events, at least 30 s before an eviction.
  https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

ADDRESS: Final = "http://169.254.169.254"
LOOK_S: Final = 5.0  # as EC2 advises
SILENT_LOOK_S: Final = 60.0  # of a service that does not answer
ANSWER_S: Final = 2.0
_TOKEN_S: Final = 21_600
_TEXT_MAX: Final = 200
_AZURE_ENDS: Final = ("Preempt", "Terminate", "Redeploy")


class MetadataSilent(OSError):
    """The metadata service did not answer, or not as documented."""


Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, str]]
"""Method, path and headers -> status and body; raises MetadataSilent."""


def read_ec2(fetch: Fetch) -> str:
    """Return the notice of an EC2 instance; empty for none."""
    status, token = fetch("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
    if status != http.client.OK:
        raise MetadataSilent(f"no token of the metadata service: status {status}")
    status, body = fetch("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    if status == http.client.NOT_FOUND:
        return ""
    if status != http.client.OK:
        raise MetadataSilent(f"status {status}")
    found = _object(body)
    return f"EC2 takes the spot instance back: {found.get('action', 'terminate')} at {found.get('time', 'once')}"


def read_compute_engine(fetch: Fetch) -> str:
    """Return the notice of a virtual machine of Compute Engine; empty for none."""
    flavor = {"Metadata-Flavor": "Google"}
    status, preempted = fetch("GET", "/computeMetadata/v1/instance/preempted", flavor)
    if status != http.client.OK:
        raise MetadataSilent(f"status {status}")
    if preempted.strip().upper() == "TRUE":
        return "Compute Engine takes the spot machine back within 30 s"
    status, event = fetch("GET", "/computeMetadata/v1/instance/maintenance-event", flavor)
    if status == http.client.OK and event.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        return "Compute Engine ends the machine for maintenance of its host"
    return ""


def read_azure(fetch: Fetch) -> str:
    """Return the notice of a virtual machine of Azure; empty for none."""
    status, body = fetch("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    if status != http.client.OK:
        raise MetadataSilent(f"status {status}")
    events = _object(body).get("Events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("EventType") in _AZURE_ENDS:
            when = event.get("NotBefore") or "once"
            return f"Azure announces the end of the machine: {event['EventType']} not before {when}"
    return ""


READERS: Final[Mapping[str, Callable[[Fetch], str]]] = {
    "aws": read_ec2,
    "google": read_compute_engine,
    "azure": read_azure,
}
"""By the name of the provider of the machine's pool."""


@dataclass(slots=True, kw_only=True)
class SpotNotices:
    """Looks for a notice every few seconds. Times are seconds of one monotonic clock.

    Attributes:
        read: of this cloud.
        fetch: asks its metadata service.
        found: the notice; empty before one was read.
    """

    read: Callable[[Fetch], str]
    fetch: Fetch
    found: str = ""
    _next_s: float = 0.0

    def look(self, now_s: float) -> str:
        """Return the notice, after a look if one is due; empty for none. It stays once it was seen."""
        if not self.found and now_s >= self._next_s:
            try:
                self.found = self.read(self.fetch)[:_TEXT_MAX]
                self._next_s = now_s + LOOK_S
            except MetadataSilent:
                self._next_s = now_s + SILENT_LOOK_S
        return self.found


def fetch_from(address: str = ADDRESS) -> Fetch:
    """Return what asks the metadata service at this address. No proxy is used: the address is the machine's own."""
    where = urlsplit(address)

    def fetch(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=ANSWER_S)
        try:
            connection.request(method, path, headers=dict(headers))
            reply = connection.getresponse()
            return reply.status, reply.read(1 << 16).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise MetadataSilent(str(error)) from error
        finally:
            connection.close()

    return fetch


def notices_of(cloud: str, address: str = ADDRESS) -> SpotNotices | None:
    """Return what looks for notices of this cloud; None if it has none that can be read."""
    read = READERS.get(cloud)
    return None if read is None else SpotNotices(read=read, fetch=fetch_from(address))


def _object(body: str) -> dict[str, object]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise MetadataSilent("the answer is no JSON") from error
    if not isinstance(found, dict):
        raise MetadataSilent("the answer is no object")
    return found
