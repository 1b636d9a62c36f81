"""Build environments, `ray start` command lines and actor options for Ray. Pure, tested by golden files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from phalanx.engines.ray.parse import LABEL_NODE, LABEL_STARTED, LABEL_VIRTUAL
from phalanx.engines.ray.protocol import RAY_RECONNECT_S

OBJECT_STORE_BYTES: Final = 80_000_000  # Ray refuses less than 75 MB; nothing of ours goes through it
HEALTH_PERIOD_MS: Final = 1000
HEALTH_TIMEOUT_MS: Final = 1000
HEALTH_FAILURES: Final = 3  # Ray reports a silent node after 3 to 5 s; our lease is the fence, this is only earlier
# In place of RAY_RECONNECT_S if Ray's head uses Redis: long enough for a restarted head, even on a busy machine.
GCS_RECONNECT_REDIS_S: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCredentials:
    """Credentials of a process of the Ray cluster. Empty `certificate`: no TLS, for loopback only.

    `reconnect_s`: how long it waits for a lost Ray head.
    """

    token: str
    certificate: str = ""
    key: str = ""
    ca: str = ""
    reconnect_s: int = RAY_RECONNECT_S


def ray_environment(files: RayCredentials | None) -> dict[str, str]:
    """Return variables for every process that uses Ray; without files, as for an existing cluster, the user's own settings stay.

    RAY_AUTH_MODE is always set: without it, a plain start writes a token into the user's folder, which changes later runs.
    """
    base = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    if files is None:
        return base
    base |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": files.token,
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": str(HEALTH_PERIOD_MS),
        "RAY_health_check_timeout_ms": str(HEALTH_TIMEOUT_MS),
        "RAY_health_check_failure_threshold": str(HEALTH_FAILURES),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(files.reconnect_s),
        # A supervisor outlives its actor: our lease decides when its ranks end, not Ray.
        "RAY_kill_child_processes_on_worker_exit": "false",
    }
    if files.certificate:
        base |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": files.certificate,
            "RAY_TLS_SERVER_KEY": files.key,
            "RAY_TLS_CA_CERT": files.ca,
        }
    return base


def redis_environment(redis: str, namespace: str) -> dict[str, str]:
    """Return variables of Ray's head that select its Redis and namespace; empty without Redis."""
    return {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": namespace} if redis else {}


def without_ray_variables(given: dict[str, str]) -> dict[str, str]:
    """Return the base environment of a supervisor and its ranks: without variables that Ray set for its worker."""
    removed = ("RAY_", "PHALANX_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SPARK_")
    return {name: value for name, value in given.items() if not name.startswith(removed)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStart:
    """One node of a Ray cluster that we run. `devices` 0 and not virtual: Ray detects the GPUs. `started_ms`: Unix time of this start."""

    name: str
    address: str
    devices: int
    virtual: bool
    temp: str = ""
    started_ms: int = 0


def head_command(start: RayStart, port: int, client_port: int) -> list[str]:
    """Return the command that runs Ray's head, itself a node, in the foreground. Its Ray Client server cannot be disabled, so it gets a port."""
    lead = ["--head", "--port", str(port), "--temp-dir", start.temp, "--include-dashboard", "false", "--no-monitor"]
    return [*_start(), *lead, "--ray-client-server-port", str(client_port), *_common(start)]


def node_command(start: RayStart, head: str) -> list[str]:
    """Return the command that runs another node in the foreground."""
    return [*_start(), "--address", head, *_common(start)]


def _start() -> list[str]:
    # -P: modules in the working directory must not shadow Ray's.
    return [sys.executable, "-P", "-m", "ray.scripts.scripts", "start"]


def _common(start: RayStart) -> list[str]:
    labels = f"{LABEL_NODE}={start.name},{LABEL_STARTED}={start.started_ms}"
    labels += f",{LABEL_VIRTUAL}={start.devices}" if start.virtual else ""
    counted = ["--num-gpus", str(start.devices)] if start.virtual or start.devices else []
    return [
        "--block",
        "--disable-usage-stats",
        "--node-name",
        start.name,
        "--node-ip-address",
        start.address,
        "--labels",
        labels,
        *counted,
        "--object-store-memory",
        str(OBJECT_STORE_BYTES),
        "--include-log-monitor",
        "false",
        "--dashboard-agent-listen-port",
        "0",
    ]


def actor_name(node_id: str, ray_id: str) -> str:
    """Return the name of a node's actor, unique to one incarnation of its Ray node."""
    return f"{node_id}.{ray_id[:16]}"


def actor_options(node_id: str, ray_id: str, gpus: float) -> dict[str, Any]:
    """Return the options of a node's actor; the caller adds the scheduling strategy, which is an object of Ray.

    Detached: it outlives the driver, as the node outlives the head. Ray restarts it when its process dies.
    """
    return {
        "name": actor_name(node_id, ray_id),
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "num_gpus": gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 2,
    }
