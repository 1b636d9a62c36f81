"""Pods whose image knows nothing of Phalanx: an init container of the supervisor image copies the supervisor into a volume of the pod. Pure."""

from __future__ import annotations

from typing import Any, Final

FOLDER: Final = "/opt/phalanx-supervisor"
INIT_CONTAINER: Final = "phalanx-supervisor"


def bring_supervisor(pod: dict[str, Any], supervisor_image: str) -> dict[str, Any]:
    """Let the first container of a pod run its module of Phalanx from a volume, which an init container fills; change and return the pod."""
    spec = pod["spec"]
    container = spec["containers"][0]
    mount = {"name": INIT_CONTAINER, "mountPath": FOLDER}
    # Without -P, which is new in 3.11: an older Python shall say which one it is.
    container["command"] = ["python3", f"{FOLDER}/start.py", container["command"][-1]]
    container["volumeMounts"].append(mount)
    spec["volumes"].append({"name": INIT_CONTAINER, "emptyDir": {}})
    spec["initContainers"] = [
        {
            "name": INIT_CONTAINER,
            "image": supervisor_image,
            "command": ["python3", "-P", "-m", "phalanx.app.supervisor_files", FOLDER],
            "securityContext": container["securityContext"],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [mount],
        }
    ]
    return pod
