"""Names of pods as the DNS of a cluster answers them, written into the `hosts` files of the stand-in kubelet's pods.

A pod with `hostname` and `subdomain` has the name `HOSTNAME.SUBDOMAIN.NAMESPACE.svc.cluster.local` if a headless Service is called as its
subdomain; a StatefulSet sets both. Its address may change with each pod of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

DOMAIN: Final = "svc.cluster.local"
PODS: Final = "/api/v1/pods"
SERVICES: Final = "/api/v1/services"
Json = dict[str, Any]


def own_name(pod: Json) -> str:
    """The full name of a pod; empty if it has none."""
    spec = pod["spec"]
    if not (spec.get("hostname") and spec.get("subdomain")):
        return ""
    return f"{spec['hostname']}.{spec['subdomain']}.{pod['metadata']['namespace']}.{DOMAIN}"


def named_pods(pods: Iterable[Json], services: Iterable[Json]) -> list[str]:
    """Lines of a `hosts` file: the address and the name of each pod that a headless Service names."""
    headless = {
        (one["metadata"]["namespace"], one["metadata"]["name"])
        for one in services
        if one["spec"].get("clusterIP") == "None"
    }
    return sorted(
        f"{pod['status']['podIP']} {own_name(pod)}"
        for pod in pods
        if own_name(pod)
        and (pod["metadata"]["namespace"], pod["spec"]["subdomain"]) in headless
        and pod.get("status", {}).get("podIP")
        and pod["status"].get("phase") not in ("Succeeded", "Failed")
    )


def hosts_text(address: str, pod: Json, hostname: str, others: Sequence[str]) -> str:
    """The `hosts` file of a pod. Its own name comes first, as a kubelet writes it."""
    own = own_name(pod)
    lines = ["127.0.0.1 localhost", " ".join(filter(None, (address, own, hostname)))]
    return "\n".join([*lines, *(line for line in others if line.split()[1] != own)]) + "\n"


def rewrite(path: str, text: str) -> None:
    """Replace the content of a file that is mounted elsewhere, so that the mount shows it."""
    with contextlib.suppress(OSError), open(path, "r+", encoding="ascii") as file:
        file.write(text)
        file.truncate()
