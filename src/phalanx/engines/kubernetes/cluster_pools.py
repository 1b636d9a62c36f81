"""Node pools in Kubernetes clusters: the provider of resident pods of several clusters at once, one for each context and its settings.

A pool without settings is that of the head's own cluster, if the head runs on Kubernetes. A pool with settings names its cluster by a context of
the kubeconfig, so that a head on any engine can use further clusters.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import BadRequest, Conflict, PhalanxError
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeTemplate
from phalanx.engines.kubernetes import head_setup
from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes.device_claims import claim_templates
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.resident_options import parse_node_wait_s
from phalanx.engines.kubernetes.resident_pods import ResidentPods
from phalanx.engines.kubernetes.resident_setup import create_resident_pods
from phalanx.engines.kubernetes.rest import KubernetesApi
from phalanx.engines.kubernetes.rights import RIGHTS
from phalanx.ports.engine import EngineContext
from phalanx.ports.provider import (
    CloudRight,
    CloudRights,
    DelayedNode,
    EndedOrder,
    LeavingNode,
    LostNode,
    NodeOrder,
    PoolTerms,
)

TEMPLATE_FOLDER: Final = "pod-templates"  # of the state folder
OPEN_AGAIN_S: Final = 30.0
_SETTINGS: Final = {
    "context": names.CONTEXT,
    "namespace": names.NAMESPACE,
    "image": names.IMAGE,
    "supervisor-image": names.SUPERVISOR_IMAGE,
    "gpu-resource": names.GPU_RESOURCE,
    "node-wait": names.NODE_WAIT,
    "template": names.TEMPLATE,
}
_TEMPLATE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHECK_S: Final = 5.0
_Key = tuple[tuple[str, str], ...]
_log = logging.getLogger("phalanx.engines.kubernetes")


@dataclass(slots=True, kw_only=True)
class ClusterPools:
    """The provider of one head.

    Args:
        head: whose pods they are.
        own_options: of the head's engine, if that is Kubernetes: a pool without settings is in its cluster.
    """

    head: EngineContext
    own_options: Mapping[str, str] | None = None
    _clusters: dict[_Key, ResidentPods] = field(default_factory=dict)
    _unopened: dict[_Key, list[NodeOrder]] = field(default_factory=dict)
    _opened_s: float = -OPEN_AGAIN_S
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a pod with so many GPUs has, after a check of the cluster and of our rights in it.

        Raises:
            BadRequest: the template is no number of GPUs, or a setting is wrong.
            PhalanxError: the cluster does not answer, or we may not create pods there.
        """
        if terms.zones:
            raise BadRequest("a pool in Kubernetes has no zones", hint="use a nodeSelector of the pod template")
        if not terms.settings:
            return self._pods({}).offer(terms)
        options = self._options(terms.settings)
        parse_node_wait_s(options)
        access = find_access(options[names.CONTEXT], os.environ)
        if not self.head.address and not head_setup.is_loopback(access.server):
            raise Conflict(
                "pods must reach this head, but it listens only on loopback",
                hint="phalanx up --listen ADDRESS, with an address of this machine that pods can reach",
            )
        api = KubernetesApi(access, answer_s=_CHECK_S, retry_for_s=_CHECK_S)
        namespace = options[names.NAMESPACE] or access.namespace
        head_setup.check_needed_rights(api, namespace, RIGHTS, hint=head_setup.print_command(options, namespace))
        head_setup.check_namespace(api, namespace)
        return replace(self._pods(terms.settings).offer(replace(terms, settings={})), apart=True)

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Follow the pods of these orders; of a cluster that cannot be reached, as soon as it can be."""
        for order in orders:
            self._unopened.setdefault(_key(order.settings), []).append(order)
        self._open_rest()

    def start(self, order: NodeOrder) -> None:
        """Create the pod; raises as `ResidentPods.start`."""
        self._pods(order.settings).start(order)

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Delete the pod; raises as `ResidentPods.stop`."""
        return self._pods(order.settings).stop(order)

    def observe(self) -> Sequence[LostNode | LeavingNode | DelayedNode]:
        """Return the pods that ended, that Kubernetes takes, or that wait for a new reason."""
        if self._unopened:
            self._open_rest()
        with self._guard:
            clusters = list(self._clusters.values())
        return [seen for cluster in clusters for seen in cluster.observe()]

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return nothing: pods without an order are deleted by `open` and `observe`."""
        del settings
        return ()

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Ask the cluster of these settings for each right.

        Raises:
            BadRequest: no such context, or a setting is wrong.
            PhalanxError: the cluster does not answer.
        """
        options = self._options(settings)
        access = find_access(options[names.CONTEXT], os.environ)
        namespace = options[names.NAMESPACE] or access.namespace
        api = KubernetesApi(access, answer_s=_CHECK_S, retry_for_s=_CHECK_S)
        asked = [(right, head_setup.is_allowed(api, right, namespace)) for right in RIGHTS]
        rights = [
            CloudRight(
                name=f"{right.verb} {right.resource}{' (whole cluster)' if right.cluster else ''}",
                allowed=allowed,
                why="" if allowed else f"{'optional: ' if right.optional else ''}{right.lost}",
            )
            for right, allowed in asked
        ]
        return CloudRights(rights=rights, policy=head_setup.setup_yaml(options))

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Stop following; unless `keep_nodes`, delete all pods."""
        with self._guard:
            clusters = list(self._clusters.values())
        return [stray for cluster in clusters for stray in cluster.close(keep_nodes=keep_nodes)]

    def _open_rest(self) -> None:
        now_s = time.monotonic()
        if now_s - self._opened_s < OPEN_AGAIN_S:
            return
        self._opened_s = now_s
        for key in list(self._unopened):
            try:
                self._pods(dict(key))
            except PhalanxError as error:
                _log.warning("the pods of a pool cannot be followed yet: %s", error)

    def _pods(self, settings: Mapping[str, str]) -> ResidentPods:
        """The pods of these settings, which are followed from now on.

        Raises:
            PhalanxError: they name no cluster.
        """
        key = _key(settings)
        with self._guard:
            if key not in self._clusters:
                made = create_resident_pods(self._options(settings), self.head, purpose=_purpose(key))
                made.open(self._unopened.pop(key, []))
                self._clusters[key] = made
            return self._clusters[key]

    def _options(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the options that the settings stand for.

        Raises:
            BadRequest: an unknown setting, no settings where the head does not run on Kubernetes, or a template with another name.
        """
        if not settings:
            if self.own_options is None:
                raise BadRequest(
                    "this head does not run on Kubernetes, so a pool has to name its cluster",
                    hint="--set context=NAME --set image=IMAGE, and --set namespace=NAME",
                )
            return dict(self.own_options)
        if unknown := sorted(set(settings) - set(_SETTINGS)):
            raise BadRequest(
                f"the provider has no setting {unknown[0][:60]}", hint=f"its settings: {', '.join(_SETTINGS)}"
            )
        found = {option.name: "" for option in names.OPTIONS}
        found |= {_SETTINGS[name]: value for name, value in settings.items()}
        if claim_templates(found[names.GPU_RESOURCE]):
            raise BadRequest("pods of a pool cannot claim devices", hint="name a resource such as nvidia.com/gpu")
        if name := found[names.TEMPLATE]:
            if not _TEMPLATE_NAME.fullmatch(name):
                raise BadRequest(f"template={name[:60]}: the name of a file in {TEMPLATE_FOLDER} of the state folder")
            found[names.TEMPLATE] = os.path.join(self.head.state_folder, TEMPLATE_FOLDER, name)
        return found


def _key(settings: Mapping[str, str]) -> _Key:
    return tuple(sorted(settings.items()))


def _purpose(key: _Key) -> str:
    """What the tag of these pods is derived from: pools with other settings must not take each other's pods for strays."""
    return " ".join(["kubernetes tag", *(f"{name}={value}" for name, value in key)])
