"""Build the objects of a head that runs in the cluster: its state, its name in DNS, and its pod. Pure.

The head's pod uses the service account of `rights`. Supervisors reach it by its DNS name, since its address changes with each pod. Its
command names its namespace and the image of pods by variables, so that tools such as kustomize can change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes.render import USER
from phalanx.engines.kubernetes.rights import NAME

HEAD: Final = f"{NAME}-head"
PORT: Final = 7600
VOLUME: Final = "/srv/phalanx"
STATE_FOLDER: Final = f"{VOLUME}/state"  # the root of a volume belongs to root
STORAGE: Final = "10Gi"
CLUSTER_DOMAIN: Final = "cluster.local"  # of the names of services, unless an administrator changed it
GRACE_S: Final = 60
NAMESPACE_VARIABLE: Final = "POD_NAMESPACE"
IMAGE_VARIABLE: Final = "PODS_IMAGE"
_ABOUT: Final = ("app.kubernetes.io/name", "app.kubernetes.io/component")
Manifest = dict[str, Any]


def head_objects(namespace: str, image: str, options: Mapping[str, str], *, storage: str = STORAGE) -> list[Manifest]:
    """Return the Service and the StatefulSet of a head.

    Args:
        namespace: of all objects.
        image: with Phalanx; of the head, and of its pods unless the options say otherwise.
        options: of the engine, which the head gets.
        storage: of its state.
    """
    pods_image = options.get(names.IMAGE) or image
    return [_service(namespace), _stateful_set(namespace, image, pods_image, head_arguments(options), storage)]


def head_arguments(options: Mapping[str, str]) -> list[str]:
    """Return the command line of the head, with variables of its container. Its kubeconfig is the service account, so it has no context."""
    words = ["phalanx", "up", "--foreground", "--engine", names.ENGINE_NAME]
    words += ["--listen", f"{HEAD}-0.{HEAD}.$({NAMESPACE_VARIABLE}).svc.{CLUSTER_DOMAIN}:{PORT}"]
    words += [f"--{names.NAMESPACE}", f"$({NAMESPACE_VARIABLE})", f"--{names.IMAGE}", f"$({IMAGE_VARIABLE})"]
    for option in names.OPTIONS:
        if option.name not in (names.CONTEXT, names.NAMESPACE, names.IMAGE) and (value := options.get(option.name)):
            words += [f"--{option.name}", value]
    return words


def _labels() -> dict[str, str]:
    return dict(zip(_ABOUT, (NAME, "head"), strict=True))


def _metadata(namespace: str) -> Manifest:
    return {"name": HEAD, "namespace": namespace, "labels": _labels()}


def _service(namespace: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(namespace),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the head binds its name before it is ready
            "selector": _labels(),
            "ports": [{"name": "https", "port": PORT, "targetPort": PORT}],
        },
    }


def _stateful_set(namespace: str, image: str, pods_image: str, command: Sequence[str], storage: str) -> Manifest:
    container = {
        "name": "head",
        "image": image,
        "command": list(command),
        "env": [
            {"name": "PHALANX_HOME", "value": STATE_FOLDER},
            {"name": "HOME", "value": VOLUME},
            {"name": NAMESPACE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": IMAGE_VARIABLE, "value": pods_image},
        ],
        "ports": [{"name": "https", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "state", "mountPath": VOLUME}, {"name": "scratch", "mountPath": "/tmp"}],  # noqa: S108
    }
    pod = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    claim = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(namespace),
        "spec": {
            "replicas": 1,  # never two heads with one state
            "serviceName": HEAD,
            "selector": {"matchLabels": _labels()},
            "template": {"metadata": {"labels": _labels()}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }
