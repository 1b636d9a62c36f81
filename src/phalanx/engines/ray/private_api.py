"""The only uses of Ray's private modules, one function each, because Ray 2.60 has no public API for them.

`python -P -m phalanx.engines.ray.private_api HOST PORT NAMESPACE` calls `delete_redis_namespace` in its own process.
"""

from __future__ import annotations

import sys
from typing import Any


def free_gpus(ray_id: str) -> float:
    """Return the GPUs of a Ray node that are free in Ray's accounting; 0 for an unknown node.

    The public `ray.available_resources()` only sums over the cluster, and Ray's state API needs a dashboard. Ray marks this function as
    DeveloperAPI, and Ray Serve uses it. Source: github.com/ray-project/ray/pull/43252 and issue 60134, which asks for a public one.

    Raises:
        RuntimeError: the installed Ray does not have the function.
    """
    try:
        from ray._private import state

        per_node: Any = state.available_resources_per_node
    except (ImportError, AttributeError) as error:
        raise _missing("ray._private.state.available_resources_per_node") from error
    free: dict[str, dict[str, float]] = per_node()
    return free.get(ray_id, {}).get("GPU", 0.0)


def delete_redis_namespace(host: str, port: int, namespace: str) -> None:
    """Delete the state of a Ray cluster in a Redis without a password.

    Only Ray knows the layout of its keys; KubeRay calls the same function. Source: github.com/ray-project/ray/issues/32884, which asks for a
    public one.

    Raises:
        RuntimeError: the installed Ray does not have the function.
    """
    try:
        from ray._private import gcs_utils

        delete: Any = gcs_utils.cleanup_redis_storage
    except (ImportError, AttributeError) as error:
        raise _missing("ray._private.gcs_utils.cleanup_redis_storage") from error
    delete(host=host, port=port, password="", use_ssl=False, storage_namespace=namespace)


def _missing(name: str) -> RuntimeError:
    import ray

    return RuntimeError(
        f"Ray {ray.__version__} has no {name}; install a Ray release that this Phalanx supports: ray==2.60.*"
    )


if __name__ == "__main__":
    delete_redis_namespace(sys.argv[1], int(sys.argv[2]), sys.argv[3])
