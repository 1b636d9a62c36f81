"""Requests that create the engine's objects: their owner, and pods. A repeated create makes no second pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.core.work.attempt import EndCause
from phalanx.engines.kubernetes import render
from phalanx.engines.kubernetes.errors import KubernetesError, KubernetesUnreachable
from phalanx.engines.kubernetes.render import PodSettings
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath

CONFLICT_TRIES: Final = 4
CONFLICT_PAUSE_S: Final = 0.1
_WRITTEN_TWICE: Final = "Conflict"  # the other reason of a 409 is AlreadyExists
# A quota, a namespace that ends, or a right that was taken away: an administrator may change each, and no job is at fault.
_MAY_PASS = ("exceeded quota", "is being terminated", "cannot create resource", "cannot patch resource")


def apply_owner(api: KubernetesApi, settings: PodSettings) -> dict[str, Any]:
    """Return the reference to the ConfigMap that owns everything. It is applied each time, because it may have been deleted.

    Raises:
        KubernetesError: the server refuses it.
        KubernetesUnreachable: it does not answer.
    """
    path = ResourcePath("configmaps", namespace=settings.namespace)
    found = api.apply(path, settings.owner_name, render.owner_config_map(settings))
    return render.owner_reference(settings.owner_name, str(found["metadata"]["uid"]))


def create_pod(api: KubernetesApi, path: ResourcePath, pod: Mapping[str, Any]) -> PhalanxError | None:
    """Create a pod, or find the one that an earlier try created; return why it does not exist, or None.

    A conflict may also be one of the server with itself, as when a quota is written twice at once: then the create is repeated.
    """
    refusal: PhalanxError | None = None
    for _ in range(CONFLICT_TRIES):
        refusal = _create_once(api, path, pod)
        if not (isinstance(refusal, KubernetesError) and refusal.is_conflict and refusal.reason == _WRITTEN_TWICE):
            break
        api.ended.wait(CONFLICT_PAUSE_S)
    return refusal


def _create_once(api: KubernetesApi, path: ResourcePath, pod: Mapping[str, Any]) -> PhalanxError | None:
    try:
        api.create(path, pod)
    except KubernetesError as error:
        if not error.is_conflict:
            return error
        other = _foreign(api, path, pod)
        return error if isinstance(other, KubernetesError) and other.is_absent else other
    except KubernetesUnreachable as error:
        # The answer was lost, perhaps not the request.
        return _foreign(api, path, pod) and error
    except PhalanxError as error:
        return error
    return None


def explain_refusal(error: PhalanxError, what: str = "a pod") -> tuple[str, EndCause]:
    """Return message and cause of a refused create: FAILED if the server would refuse the same job again, LIMITED if an administrator may change that."""
    if not isinstance(error, KubernetesError):
        return error.message, EndCause.CONTENDED
    text = f"Kubernetes refused {what}: {error.message}"
    if error.is_absent or (error.is_forbidden and any(words in error.message for words in _MAY_PASS)):
        return text, EndCause.LIMITED
    if error.status in {400, 422} or error.is_forbidden:
        return text, EndCause.FAILED
    return text, EndCause.CONTENDED if error.is_overload or error.is_conflict else EndCause.START_FAIL


def _foreign(api: KubernetesApi, path: ResourcePath, pod: Mapping[str, Any]) -> PhalanxError | None:
    """Return None if the pod of this name is the one that we wanted to create."""
    try:
        found = api.get(path, pod["metadata"]["name"])
    except PhalanxError as error:
        return error
    about = found.get("metadata") or {}
    labels = about.get("labels") or {}
    same = all(labels.get(key) == value for key, value in pod["metadata"]["labels"].items())
    if same and not about.get("deletionTimestamp"):
        return None
    return KubernetesError(409, "AlreadyExists", f"another pod has the name {pod['metadata']['name']}")
