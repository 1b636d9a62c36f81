"""What the engine must be allowed to do in its namespace, what is lost without each verb, and the YAML that grants it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

NAME: Final = "phalanx"  # of the Role, its binding and the service account


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRight:
    """One verb on one kind.

    Attributes:
        lost: what does not work without it.
        optional: the engine works without it.
        cluster: it is asked for the whole cluster, where a Role of a namespace cannot grant it.
    """

    verb: str
    plural: str
    lost: str
    group: str = ""
    part: str = ""
    optional: bool = False
    cluster: bool = False

    @property
    def resource(self) -> str:
        """As in a rule: `pods/log`."""
        return f"{self.plural}/{self.part}" if self.part else self.plural


_NOTHING: Final = "no supervisor can be started"
_STALE: Final = "the end of a pod is not noticed; only leases tell of lost nodes"
_OTHERS: Final = "GPUs of other namespaces are seen only when a pod does not start"
RIGHTS: Final = (
    AccessRight(verb="create", plural="pods", lost=_NOTHING),
    AccessRight(verb="get", plural="pods", lost="a pod that an interrupted request created is not found again"),
    AccessRight(verb="list", plural="pods", lost=_STALE),
    AccessRight(verb="watch", plural="pods", lost=_STALE),
    AccessRight(verb="delete", plural="pods", lost="pods of ended attempts stay, and hold their GPUs"),
    AccessRight(verb="deletecollection", plural="pods", lost="pods are deleted one by one at the end", optional=True),
    AccessRight(verb="create", plural="configmaps", lost="pods have no owner, with which they would be deleted"),
    AccessRight(verb="patch", plural="configmaps", lost="pods have no owner, with which they would be deleted"),
    AccessRight(verb="delete", plural="configmaps", lost="a ConfigMap stays at the end"),
    AccessRight(verb="create", plural="secrets", lost=f"{_NOTHING}: its token has no safe place"),
    AccessRight(verb="patch", plural="secrets", lost=f"{_NOTHING}: its token has no safe place"),
    AccessRight(
        verb="delete",
        plural="secrets",
        lost="tokens of ended attempts stay in the namespace; they open nothing any more",
    ),
    AccessRight(
        verb="list", plural="nodes", lost="nodes must be declared by number and GPUs", optional=True, cluster=True
    ),
    AccessRight(
        verb="watch", plural="nodes", lost="nodes must be declared by number and GPUs", optional=True, cluster=True
    ),
    *(AccessRight(verb=verb, plural="pods", lost=_OTHERS, optional=True, cluster=True) for verb in ("list", "watch")),
)
_KUEUE: Final = "no job enters a queue of Kueue"
_REASON: Final = "it is not known why Kueue lets a job wait"
KUEUE_RIGHTS: Final = (
    AccessRight(verb="create", plural="jobs", group="batch", lost=_KUEUE),
    AccessRight(
        verb="get", plural="jobs", group="batch", lost="a Job that an interrupted request created is not found again"
    ),
    AccessRight(verb="list", plural="jobs", group="batch", lost="it is not noticed when Kueue admits or stops a job"),
    AccessRight(verb="watch", plural="jobs", group="batch", lost="it is not noticed when Kueue admits or stops a job"),
    AccessRight(verb="delete", plural="jobs", group="batch", lost="Jobs of ended attempts stay, and hold their quota"),
    AccessRight(verb="list", plural="workloads", group="kueue.x-k8s.io", lost=_REASON, optional=True),
    AccessRight(verb="watch", plural="workloads", group="kueue.x-k8s.io", lost=_REASON, optional=True),
    AccessRight(
        verb="get",
        plural="localqueues",
        part="pendingworkloads",
        group="visibility.kueue.x-k8s.io",
        lost="the position of a job in its queue is not known",
        optional=True,
    ),
)
"""Beside `RIGHTS`, where a queue of Kueue is named."""
AUTOSCALER_RIGHTS: Final = (
    AccessRight(
        verb="list",
        plural="events",
        lost="what an autoscaler says of a job's pods is not shown",
        optional=True,
    ),
)
"""Beside `RIGHTS`, where pods wait for an autoscaler."""


def review(right: AccessRight, namespace: str) -> dict[str, Any]:
    """Return the SelfSubjectAccessReview that asks for a right."""
    attributes = {"verb": right.verb, "group": right.group, "resource": right.plural, "subresource": right.part}
    if not right.cluster:
        attributes["namespace"] = namespace
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }


def role_objects(
    namespace: str, rights: Iterable[AccessRight] = RIGHTS, subject: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the objects that grant the rights in a namespace: a service account, a Role and its binding.

    Args:
        namespace: of all of them.
        rights: those of a namespace are granted; those of the whole cluster are not.
        subject: who gets the rights; None for the service account.
    """
    about = {"name": NAME, "namespace": namespace, "labels": {"app.kubernetes.io/name": NAME}}
    rules: dict[tuple[str, str], list[str]] = {}
    for right in rights:
        if not right.cluster:
            verbs = rules.setdefault((right.group, right.resource), [])
            if right.verb not in verbs:
                verbs.append(right.verb)
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": about,
        "rules": [
            {"apiGroups": [group], "resources": [resource], "verbs": verbs}
            for (group, resource), verbs in rules.items()
        ],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about}
    own = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": about,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME},
        "subjects": [subject or own],
    }
    return [*([account] if subject is None else []), role, binding]


def cluster_role_objects(subject: dict[str, str], rights: Sequence[AccessRight] = RIGHTS) -> list[dict[str, Any]]:
    """Return the objects that grant what is useful, and which only an administrator of the cluster can grant."""
    about = {"name": f"{NAME}-nodes", "labels": {"app.kubernetes.io/name": NAME}}
    rules: dict[str, list[str]] = {}
    for right in rights:
        if right.cluster:
            rules.setdefault(right.resource, []).append(right.verb)
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": about,
        "rules": [{"apiGroups": [""], "resources": [name], "verbs": verbs} for name, verbs in rules.items()],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": about,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": about["name"]},
        "subjects": [subject],
    }
    return [role, binding]
