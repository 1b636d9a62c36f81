"""Runs a head on Ray: its options, its engine, and the certificates of Ray's processes and supervisors."""

from __future__ import annotations

import argparse
import hashlib
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from phalanx.app.join_service import certificate_names
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.core.ids import NodeId
from phalanx.engines.local.records import LocalNode
from phalanx.engines.ray import redis
from phalanx.engines.ray.cluster import ManagedRayCluster, reachable
from phalanx.engines.ray.engine import RayEngine, driver_command, driver_environment
from phalanx.engines.ray.joined_node import python_version, ray_version
from phalanx.engines.ray.parse import MISMATCH
from phalanx.engines.ray.protocol import DriverConnected, DriverProblem, decode_event
from phalanx.wire.join import RayJoin

if TYPE_CHECKING:
    from phalanx.app.certificates import CertificateAuthority, SignedCertificate

RAY_ENGINE: Final = "ray"
RAY_VERSION_SERIES: Final = "2.60."  # of Ray: built and tested with it (constraints.txt)
CONNECT_TIMEOUT_S: Final = 30.0  # for a driver to connect to a Ray cluster; 1 to 3 s on an idle one
OWN_CLUSTER: Final = "own"
REDIS_OFF: Final = "off"
RAY_LOOPBACK: Final = "127.0.0.2"  # Ray replaces 127.0.0.1 by this machine's external address


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """The options of `up --engine ray`.

    Attributes:
        address: an existing Ray cluster; empty for a cluster of Phalanx's own.
        redis: HOST:PORT where the own Ray head stores its state; empty for memory.
    """

    address: str = ""
    redis: str = ""


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the head's arguments for Ray."""
    parser.add_argument(
        "--ray-address", default=None, help=f"HOST:PORT of a Ray cluster that is there; {OWN_CLUSTER}: one of our own"
    )
    parser.add_argument(
        "--ray-redis", default=None, help=f"HOST:PORT of a Redis for the head of our own; {REDIS_OFF}: none any more"
    )


def ray_options(engine: str, given: argparse.Namespace, before: Mapping[str, Any]) -> RayOptions | None:
    """Return the given options, else the stored ones, after checking them; None on another engine. Called before anything is written.

    Raises:
        BadRequest: an option of Ray without Ray; Ray is not installed, or has another version.
        Unreachable, TryLater: the existing Ray cluster does not accept a driver.
    """
    if engine != RAY_ENGINE:
        odd = "--ray-address" if given.ray_address else "--ray-redis" if given.ray_redis else ""
        if odd:
            raise BadRequest(f"{odd} needs the engine Ray", hint="phalanx up --engine ray")
        return None
    known = before.get("ray") or {}
    address = given.ray_address if given.ray_address is not None else known.get("address", "")
    kept = given.ray_redis if given.ray_redis is not None else known.get("redis", "")
    options = RayOptions(
        address="" if address == OWN_CLUSTER else str(address), redis="" if kept == REDIS_OFF else str(kept)
    )
    if options.address and given.ray_redis not in (None, REDIS_OFF):
        raise BadRequest(
            "--ray-redis is for a Ray cluster of our own, and --ray-address names another's",
            hint=f"--ray-address {OWN_CLUSTER}",
        )
    version = ray_version()
    if not version.startswith(RAY_VERSION_SERIES):
        raise BadRequest(
            f"Ray {version} is installed, but {RAY_VERSION_SERIES}* is needed",
            hint="pip install '.[ray]' in the checkout",
        )
    if options.address:
        _check_driver_connects(options.address)
        return replace(options, redis="")
    if options.redis:
        redis.check(options.redis)
    return options


def stored_ray_options(options: RayOptions | None) -> dict[str, str] | None:
    """Return the options to store for the next head."""
    return None if options is None else asdict(options)


def _check_driver_connects(address: str) -> None:
    """Check that a driver can connect to that Ray cluster, in a separate process: Ray aborts a process that loses its cluster."""
    if not reachable(address, timeout_s=3.0):
        raise Unreachable(
            f"no Ray head listens at {address}", hint="--ray-address HOST:PORT, the port of Ray's GCS, mostly 6379"
        )
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


def ray_engine(
    options: RayOptions,
    *,
    home: StateFolder,
    nodes: Sequence[LocalNode],
    address: str,
    authority: CertificateAuthority | None,
    remote: bool,
    environment: Callable[[], dict[str, str]],
    token_of: Callable[[NodeId], str],
) -> RayEngine:
    """Return the engine of this head; nothing is started yet.

    Args:
        options: the options of Ray.
        home: the head's state folder.
        nodes: of this machine, if the Ray cluster is Phalanx's own.
        address: of this machine, for other servers.
        authority: signs certificates of Ray's processes.
        remote: supervisors connect to the head by TLS.
        environment: returns the supervisors' environment with the head's address.
        token_of: returns a node's token.
    """
    cluster = None if options.address else _own_cluster(home, nodes, address, authority, options.redis)
    return RayEngine(
        address=options.address if cluster is None else cluster.ray_address,
        cluster=cluster,
        files=None if cluster is None else cluster.files,
        cluster_id=_cluster_id(home),
        environment=environment,
        ca_pem="" if authority is None or not remote else authority.ca_pem,
        token_of=token_of,
        home=home.path,
    )


def ray_join_factory(engine: RayEngine | None) -> Callable[[SignedCertificate], RayJoin] | None:
    """Return a function that makes a joining server a node of the own Ray cluster; None without an own cluster."""
    cluster = None if engine is None else engine.cluster
    if cluster is None:
        return None

    def given(signed: SignedCertificate) -> RayJoin:
        return RayJoin(
            address=cluster.ray_address,
            token=cluster.token,
            key_pem=signed.key_pem,
            certificate_pem=signed.certificate_pem,
            ray_version=ray_version(),
            python_version=python_version(),
            reconnect_s=cluster.files.reconnect_s,
        )

    return given


def _own_cluster(
    home: StateFolder, nodes: Sequence[LocalNode], address: str, authority: CertificateAuthority | None, kept: str
) -> ManagedRayCluster:
    certificate = key = ca = ""
    if authority is not None:
        certificate, key = authority.write("ray", authority.sign(certificate_names(address, socket.gethostname())))
        ca = authority.ca_file
    return ManagedRayCluster(
        home=home.path,
        address=address,
        nodes=nodes,
        certificate=certificate,
        key=key,
        ca=ca,
        redis=kept,
        namespace=f"phalanx-{_cluster_id(home)}",
    )


def _cluster_id(home: StateFolder) -> str:
    """Return an id of this head's state folder; it stays the same after a restart and does not reveal the secret."""
    return hashlib.sha256(b"phalanx cluster " + home.secret()).hexdigest()[:12]
