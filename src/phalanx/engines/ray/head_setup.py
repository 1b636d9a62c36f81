"""Starts a head on Ray: the check of its options, its engine, and the credentials of Ray's processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Final

import msgspec

from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.engines.ray import joined_node, redis
from phalanx.engines.ray.cluster import ManagedRayCluster, why_silent
from phalanx.engines.ray.engine import RayEngine, driver_command, driver_environment
from phalanx.engines.ray.options import ADDRESS, ENGINE_NAME, OWN_CLUSTER, REDIS, REDIS_OFF
from phalanx.engines.ray.parse import MISMATCH
from phalanx.engines.ray.protocol import DriverConnected, DriverProblem, decode_event
from phalanx.ports.engine import EngineContext, HeadSetup

RAY_VERSION_SERIES: Final = "2.60."  # of Ray: built and tested with it (constraints.txt)
CONNECT_TIMEOUT_S: Final = 30.0  # for a driver to connect to a Ray cluster; 1 to 3 s on an idle one
ANSWER_S: Final = 3.0  # for a Ray head to answer a connection; milliseconds on an idle network
RAY_LOOPBACK: Final = "127.0.0.2"  # Ray replaces 127.0.0.1 by this machine's external address


def check_options(options: dict[str, str], given: Mapping[str, str], setup: HeadSetup) -> dict[str, str]:
    """Return the options to use, after checking them, and the Ray cluster or the Redis that they name.

    Raises:
        BadRequest: the options contradict each other; Ray is not installed, or has another version.
        Conflict: several heads cannot share an own Ray cluster.
        Unreachable, TryLater: the existing Ray cluster does not accept a driver.
    """
    if options[ADDRESS] and given.get(REDIS, REDIS_OFF) != REDIS_OFF:
        raise BadRequest(
            "--ray-redis is for a Ray cluster of our own, and --ray-address names another's",
            hint=f"--ray-address {OWN_CLUSTER}",
        )
    version = joined_node.ray_version()
    if not version.startswith(RAY_VERSION_SERIES):
        raise BadRequest(
            f"Ray {version} is installed, but {RAY_VERSION_SERIES}* is needed",
            hint="pip install '.[ray]' in the checkout",
        )
    if options[ADDRESS]:
        _check_driver_connects(options[ADDRESS])
        return {**options, REDIS: ""}
    if options[REDIS]:
        redis.check(options[REDIS])
    if setup.shares_store:
        raise Conflict(
            "--engine ray with --store: the head's own Ray cluster ends with that head",
            hint="use --ray-address HOST:PORT with a Ray cluster that all heads can reach",
        )
    return options


def create_engine(options: Mapping[str, str], head: EngineContext) -> RayEngine:
    """Create the engine, with a cluster of our own unless an existing one is used."""
    cluster_id = head.derive_id("cluster")[:12]
    cluster = None if options[ADDRESS] else _own_cluster(head, cluster_id, options[REDIS])
    return RayEngine(
        address=options[ADDRESS] if cluster is None else cluster.ray_address,
        cluster=cluster,
        files=None if cluster is None else cluster.files,
        cluster_id=cluster_id,
        environment=head.environment,
        ca_pem=head.ca_pem,
        token_of=head.node_token,
        home=head.state_folder,
        sign=head.sign,
    )


def _check_driver_connects(address: str) -> None:
    """Check that a driver can connect to that Ray cluster, in a separate process: Ray aborts a process that loses its cluster."""
    silent = why_silent(address, tls=os.environ.get("RAY_USE_TLS", "") in ("1", "true", "True"), timeout_s=ANSWER_S)
    if silent:
        raise Unreachable(silent, hint="--ray-address HOST:PORT, the port of Ray's GCS, mostly 6379")
    try:
        done = subprocess.run(
            driver_command(address, "check", "--check"),
            env=driver_environment(None),
            capture_output=True,
            timeout=CONNECT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise TryLater(
            f"the Ray head at {address} did not accept a driver within {CONNECT_TIMEOUT_S:.0f} s",
            hint="is it Ray, of the same release, and does it speak TLS? RAY_USE_TLS and kin count",
        ) from error
    lines = done.stdout.splitlines()
    try:
        reply = decode_event(lines[-1]) if lines else None
    except msgspec.MsgspecError:
        reply = None
    if not isinstance(reply, DriverConnected):
        why = reply.text if isinstance(reply, DriverProblem) else f"the driver ended with {done.returncode}"
        if MISMATCH in why:
            raise Conflict(
                f"the Ray head at {address} has another version: {why[why.index(MISMATCH) :]}",
                hint=f"Ray {RAY_VERSION_SERIES}* and this Python are needed there too",
            )
        raise Unreachable(
            f"the Ray head at {address} did not accept a driver: {why}",
            hint="RAY_AUTH_TOKEN_PATH names the file of its token",
        )


def _own_cluster(head: EngineContext, cluster_id: str, redis_address: str) -> ManagedRayCluster:
    """Return our own cluster. Ray always listens on all addresses, so its processes use TLS even if no servers join."""
    address = head.address or RAY_LOOPBACK
    files = head.certificate_files(ENGINE_NAME, address)
    return ManagedRayCluster(
        home=head.state_folder,
        address=address,
        nodes=head.nodes,
        certificate=files.certificate,
        key=files.key,
        ca=files.ca,
        redis=redis_address,
        namespace=f"phalanx-{cluster_id}",
    )
