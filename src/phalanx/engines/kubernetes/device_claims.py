"""GPUs by dynamic resource allocation: a pod claims its devices by a ResourceClaimTemplate instead of an amount of a resource. Pure.

The templates belong to the namespace, one for each number of GPUs: `h100-8` for pods of 8. So the head needs no right on claims, and knows no
device class. Kubernetes makes a claim for each pod, and deletes it with the pod.
"""

from __future__ import annotations

import re
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.engines.kubernetes import options as names

GROUP: Final = "resource.k8s.io"
_PREFIX: Final = "claims:"
_NAME: Final = "gpus"  # of the claim in its pod
_TEMPLATE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")


def claim_templates(gpu_resource: str) -> str:
    """Return the beginning of the names of the ResourceClaimTemplates; empty if GPUs are an amount of a resource.

    Raises:
        BadRequest: it is no name.
    """
    if not gpu_resource.startswith(_PREFIX):
        return ""
    name = gpu_resource.removeprefix(_PREFIX)
    if not _TEMPLATE.fullmatch(name):
        raise BadRequest(
            f"--{names.GPU_RESOURCE} {gpu_resource}: not the beginning of names of ResourceClaimTemplates",
            hint=f"--{names.GPU_RESOURCE} {_PREFIX}h100, for the templates h100-1, h100-2 ... of the namespace",
        )
    return name


def claim_devices(pod: dict[str, Any], templates: str, gpus: int) -> None:
    """Let the first container of a pod claim its GPUs; change the pod."""
    spec = pod["spec"]
    spec["resourceClaims"] = [{"name": _NAME, "resourceClaimTemplateName": f"{templates}-{gpus}"}]
    spec["containers"][0]["resources"]["claims"] = [{"name": _NAME}]
