"""Starts a head on Kubernetes: the check of its options, and its engine with what it may read of the cluster."""

from __future__ import annotations

import io
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from phalanx.core.errors import BadRequest, Conflict, NotPermitted, PhalanxError
from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes.device_claims import GROUP as CLAIM_GROUP
from phalanx.engines.kubernetes.device_claims import claim_templates
from phalanx.engines.kubernetes.engine import FIRST_ANSWER_S, ClusterScope, KubernetesEngine
from phalanx.engines.kubernetes.errors import KubernetesError
from phalanx.engines.kubernetes.head_manifests import head_objects
from phalanx.engines.kubernetes.kubeconfig import ClusterAccess, find_access
from phalanx.engines.kubernetes.kueue import GROUP as KUEUE_GROUP
from phalanx.engines.kubernetes.kueue import parse_queues
from phalanx.engines.kubernetes.kueue_jobs import VERSION_DEFAULT, served_version
from phalanx.engines.kubernetes.pod_template import read_template
from phalanx.engines.kubernetes.render import PodSettings
from phalanx.engines.kubernetes.resident_options import parse_node_wait_s, resident_pools
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from phalanx.engines.kubernetes.rights import (
    AUTOSCALER_RIGHTS,
    KUEUE_RIGHTS,
    NAME,
    RIGHTS,
    AccessRight,
    cluster_role_objects,
    review,
    role_objects,
)
from phalanx.ports.engine import EngineCheck, EngineContext, HeadSetup

IMAGE_DEFAULT: Final = "phalanx"
TAG_PURPOSE: Final = "kubernetes tag"
_SHAPE: Final = re.compile(r"([1-9][0-9]{0,4})x([0-9]{1,2})")
_REVIEWS: Final = ResourcePath("selfsubjectaccessreviews", "authorization.k8s.io")
_CHECK_S: Final = 5.0


def check_options(options: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> None:
    """Check the cluster, our rights in it, and that pods can reach the head.

    Options of the head before were checked then: running jobs need a head even if the cluster is silent.

    Raises:
        BadFile: the kubeconfig or the pod template is malformed.
        BadRequest: no such context, or an option is wrong.
        Conflict: the head listens on loopback only, or virtual nodes are wanted.
        NotPermitted: a needed right is missing.
        KubernetesError: the server refuses to tell.
        KubernetesUnreachable: the cluster does not answer.
    """
    if setup.virtual:
        raise Conflict(
            "--virtual cannot be used with --engine kubernetes", hint="remove --virtual: the nodes come from Kubernetes"
        )
    parse_shape(options[names.SHAPE])
    resident = resident_pools(options)
    if parse_node_wait_s(options) and not options[names.SHAPE] and not resident:
        raise BadRequest(
            f"with --{names.NODE_WAIT}, Phalanx must know how much may be started: pods are bound to the nodes that exist",
            hint=f"--{names.SHAPE} 4x8, for pods on at most 4 nodes of 8 GPUs",
        )
    queues = parse_queues(options[names.QUEUE])
    if queues and not options[names.SHAPE]:
        raise BadRequest(
            f"with --{names.QUEUE}, Kueue and Kubernetes choose the nodes, so Phalanx must know how much it may hand to Kueue at once",
            hint=f"--{names.SHAPE} 4x8, for pods on 4 nodes of 8 GPUs",
        )
    if claim_templates(options[names.GPU_RESOURCE]) and (resident or not options[names.SHAPE]):
        raise BadRequest(
            f"with --{names.GPU_RESOURCE} {options[names.GPU_RESOURCE]}, GPUs of nodes cannot be counted, and pods are for one attempt each",
            hint=f"--{names.SHAPE} 4x8, for pods on 4 nodes of 8 GPUs"
            + (f", and --{names.RESIDENT} none" if resident else ""),
        )
    if queues and resident:
        raise Conflict(
            f"--{names.QUEUE} and --{names.RESIDENT} exclude each other: Kueue counts each attempt, and resident pods stay",
            hint=f"--{names.RESIDENT} none, or --{names.QUEUE} none",
        )
    read_template(options[names.TEMPLATE])
    access = find_access(options[names.CONTEXT], os.environ)
    if previous == options and setup.listened_before == setup.listens:
        return
    if not setup.listens and not is_loopback(access.server):
        raise Conflict(
            "pods must reach this head, but it listens only on loopback",
            hint="phalanx up --engine kubernetes --listen ADDRESS, with an address of this machine that pods can reach",
        )
    api = KubernetesApi(access, answer_s=_CHECK_S, retry_for_s=_CHECK_S)
    namespace = options[names.NAMESPACE] or access.namespace
    if queues:
        _check_served(api, KUEUE_GROUP, "Kueue", names.QUEUE)
    if claim_templates(options[names.GPU_RESOURCE]):
        _check_served(api, CLAIM_GROUP, "dynamic resource allocation", names.GPU_RESOURCE)
    check_needed_rights(api, namespace, wanted_rights(options), hint=print_command(options, namespace))
    check_namespace(api, namespace)
    if not options[names.SHAPE] and not options[names.RESIDENT] and not follows_all(api, "nodes", namespace):
        raise BadRequest(
            "you may not list the nodes of this cluster, so their number and GPUs are needed",
            hint="phalanx up --engine kubernetes --kubernetes-nodes 4x8, for pods on 4 nodes of 8 GPUs",
        )


def check_needed_rights(api: KubernetesApi, namespace: str, rights: Sequence[AccessRight], *, hint: str) -> None:
    """Check that we have all rights but the optional ones. `hint`: the command that prints what grants them.

    Raises:
        NotPermitted: one is missing.
        KubernetesError: the server refuses to tell.
        KubernetesUnreachable: it does not answer.
    """
    missing = [right for right in rights if not right.optional and not is_allowed(api, right, namespace)]
    if missing:
        first, others = missing[0], ", ".join(f"{right.verb} {right.resource}" for right in missing[1:])
        raise NotPermitted(
            f"you may not {first.verb} {first.resource} in the namespace {namespace}: {first.lost}"
            + (f"; nor {others}" if others else ""),
            hint=f"an administrator grants it: {hint}",
        )


def create_engine(options: Mapping[str, str], head: EngineContext) -> KubernetesEngine:
    """Create the engine."""
    access = find_access(options[names.CONTEXT], os.environ)
    settings = pod_settings(options, head, access)
    places, gpus = parse_shape(options[names.SHAPE])
    resident = bool(options.get(names.RESIDENT))  # jobs run in the pods of a node pool, and nowhere else
    queues = parse_queues(options[names.QUEUE])
    reads_all = not places and not resident and _reads_all_pods(access, settings.namespace)
    scope = ClusterScope(
        lists_nodes=not places and not resident,
        reads_all_pods=reads_all,
        places=0 if resident else places,
        gpus_per_place=gpus,
        queues=queues,
        workload_version=_workload_version(access, settings.namespace) if queues else "",
    )
    return KubernetesEngine(api=KubernetesApi(access), settings=settings, scope=scope, key_of=head.attempt_key)


def pod_settings(
    options: Mapping[str, str], head: EngineContext, access: ClusterAccess, purpose: str = TAG_PURPOSE
) -> PodSettings:
    """Return how a head with these options uses its namespace. `purpose`: from which the tag of its objects is derived."""
    return PodSettings(
        tag=head.derive_id(purpose)[:8],
        namespace=options[names.NAMESPACE] or access.namespace,
        image=options[names.IMAGE] or IMAGE_DEFAULT,
        head_url=head.url,
        ca_pem=head.ca_pem,
        gpu_resource=options[names.GPU_RESOURCE] or names.GPU_RESOURCE_DEFAULT,
        template=read_template(options[names.TEMPLATE]),
        supervisor_image=options[names.SUPERVISOR_IMAGE],
        node_wait_s=parse_node_wait_s(options),
    )


def is_allowed(api: KubernetesApi, right: AccessRight, namespace: str) -> bool:
    """Ask the server whether we have a right.

    Raises:
        KubernetesError: it does not tell.
        KubernetesUnreachable: it does not answer.
    """
    answer = api.create(_REVIEWS, review(right, namespace))
    return bool((answer.get("status") or {}).get("allowed"))


def parse_shape(text: str) -> tuple[int, int]:
    """Return number and GPUs of the declared places; 0 and 0 if nodes are listed.

    Raises:
        BadRequest: it is not of the form NxG.
    """
    if not text:
        return 0, 0
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise BadRequest(
            f"--{names.SHAPE} {text}: not of the form NxG", hint=f"--{names.SHAPE} 4x8, for 4 nodes of 8 GPUs"
        )
    return int(match[1]), int(match[2])


def check_namespace(api: KubernetesApi, namespace: str) -> None:
    """Let the server check a creation: the answer about rights says nothing about a namespace that does not exist.

    Raises:
        BadRequest: it does not exist.
        KubernetesError: the server refuses objects there.
    """
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "phalanx-probe"}}
    try:
        api.would_create(ResourcePath("configmaps", namespace=namespace), probe)
    except KubernetesError as error:
        if not error.is_absent:
            raise
        raise BadRequest(
            f"the cluster has no namespace {namespace}", hint="choose another with --namespace, or ask for it"
        ) from error


def setup_yaml(options: Mapping[str, str]) -> str:
    """Return the YAML that grants the rights in the namespace, and as comments what only an administrator of the cluster can grant.

    Raises:
        BadFile: the kubeconfig is malformed.
        BadRequest: no such context.
    """
    namespace = options[names.NAMESPACE] or find_access(options[names.CONTEXT], os.environ).namespace
    needed = [yaml_text(item) for item in role_objects(namespace, wanted_rights(options))]
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    useful = "---\n".join(yaml_text(item) for item in cluster_role_objects(subject))
    lost = "".join(f"# {right.verb} {right.resource}: else {right.lost}\n" for right in RIGHTS if right.cluster)
    return (
        "---\n".join(needed)
        + "# For your own account instead of the service account: replace the entry of subjects by kind User and your name.\n"
        + f"# Useful, but no namespace can grant it:\n{lost}"
        + "".join(f"# {line}\n" for line in useful.splitlines())
    )


def head_yaml(options: Mapping[str, str]) -> str:
    """Return the YAML of a head that runs in the cluster, with these options.

    Raises:
        BadFile: the kubeconfig is malformed.
        BadRequest: no such context, no image, or an option that names a file of this machine.
    """
    if not options[names.IMAGE] and not options[names.SUPERVISOR_IMAGE]:
        raise BadRequest("the head in the cluster needs an image with Phalanx", hint=f"--{names.IMAGE} IMAGE")
    if options[names.TEMPLATE]:
        raise BadRequest(
            f"--{names.TEMPLATE} names a file of this machine, which a head in the cluster does not have",
            hint=f"mount it into the pod of the head from a ConfigMap, and add --{names.TEMPLATE} to its command",
        )
    namespace = options[names.NAMESPACE] or find_access(options[names.CONTEXT], os.environ).namespace
    image = options[names.SUPERVISOR_IMAGE] or options[names.IMAGE]
    return "---\n".join(yaml_text(item) for item in head_objects(namespace, image, options))


def check_rights(options: Mapping[str, str]) -> list[EngineCheck]:
    """Ask the server for each right; a server that does not answer is one failed check."""
    rights = wanted_rights(options)
    try:
        access = find_access(options[names.CONTEXT], os.environ)
        namespace = options[names.NAMESPACE] or access.namespace
        api = KubernetesApi(access, answer_s=_CHECK_S, retry_for_s=_CHECK_S)
        missing = [right for right in rights if not is_allowed(api, right, namespace)]
    except PhalanxError as error:
        return [EngineCheck(ok=False, says=error.message, mend=error.hint)]
    where = f"the namespace {namespace} of {access.server}"
    mend = f"kubectl apply -f - with the YAML of {print_command(options, namespace)}"
    found = [EngineCheck(ok=True, says=f"{len(rights) - len(missing)} of {len(rights)} rights in {where}")]
    for right in missing:
        scope = "the whole cluster" if right.cluster else where
        says = f"may not {right.verb} {right.resource} in {scope}: {right.lost}"
        found.append(EngineCheck(ok=False, optional=right.optional, says=says, mend="" if right.optional else mend))
    return found


def wanted_rights(options: Mapping[str, str]) -> tuple[AccessRight, ...]:
    """Return the rights that a head with these options uses."""
    waits = parse_node_wait_s(options) > 0
    return (*RIGHTS, *(KUEUE_RIGHTS if options[names.QUEUE] else ()), *(AUTOSCALER_RIGHTS if waits else ()))


def print_command(options: Mapping[str, str], namespace: str) -> str:
    """Return the command that prints what grants the rights in a namespace."""
    queue = f" --{names.QUEUE} {options[names.QUEUE]}" if options[names.QUEUE] else ""
    wait = f" --{names.NODE_WAIT} {options[names.NODE_WAIT]}" if options[names.NODE_WAIT] else ""
    return f"phalanx up --engine kubernetes --namespace {namespace}{queue}{wait} --print"


def _check_served(api: KubernetesApi, group: str, what: str, option: str) -> None:
    """Check that the cluster has what an option needs: without Kueue, a suspended Job waits for ever.

    Raises:
        BadRequest: it has none.
        KubernetesError: the server does not tell.
    """
    try:
        served_version(api, group)
    except KubernetesError as error:
        if not error.is_absent:
            raise
        raise BadRequest(
            f"this cluster has no {what}: it does not serve {group}", hint=f"leave out --{option}"
        ) from error


def _workload_version(access: ClusterAccess, namespace: str) -> str:
    """Return the version of Kueue's Workloads; empty if they may not be read. A silent server is asked again by their watch."""
    api = KubernetesApi(access, answer_s=FIRST_ANSWER_S, retry_for_s=FIRST_ANSWER_S)
    needed = [right for right in KUEUE_RIGHTS if right.plural == "workloads"]
    try:
        return served_version(api, KUEUE_GROUP) if all(is_allowed(api, right, namespace) for right in needed) else ""
    except PhalanxError:
        return VERSION_DEFAULT


def yaml_text(item: Mapping[str, Any]) -> str:
    """Return an object as YAML."""
    from ruamel.yaml import YAML

    text, yaml = io.StringIO(), YAML()
    yaml.indent(sequence=4, offset=2)
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.dump(dict(item), text)
    return text.getvalue()


def _reads_all_pods(access: ClusterAccess, namespace: str) -> bool:
    """Whether pods of all namespaces may be listed. A silent server must not stop a head whose jobs run: then only its own are read."""
    api = KubernetesApi(access, answer_s=FIRST_ANSWER_S, retry_for_s=FIRST_ANSWER_S)
    try:
        return follows_all(api, "pods", namespace)
    except PhalanxError:
        return False


def follows_all(api: KubernetesApi, plural: str, namespace: str) -> bool:
    """Whether all objects of a kind in the cluster may be listed and watched."""
    needed = [right for right in RIGHTS if right.cluster and right.plural == plural]
    return all(is_allowed(api, right, namespace) for right in needed)


def is_loopback(server: str) -> bool:
    """Whether the URL of an API server is on loopback."""
    host = urlsplit(server).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
