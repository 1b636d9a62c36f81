"""How a head is put onto Ray: from its options to the engine, with the certificates that its processes and supervisors need."""

from __future__ import annotations

import argparse
import hashlib
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from phalanx.app.home import Home
from phalanx.app.joining import names_at
from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.core.ids import NodeId
from phalanx.engines.local.records import LocalNode
from phalanx.engines.ray import redis
from phalanx.engines.ray.cluster import OwnCluster, reachable
from phalanx.engines.ray.engine import RayEngine, driver_command, driver_environment
from phalanx.engines.ray.member import python_version, ray_version
from phalanx.engines.ray.parse import MISMATCH
from phalanx.engines.ray.protocol import Connected, Trouble, tiding_of
from phalanx.wire.join import RayJoin

if TYPE_CHECKING:
    from phalanx.app.certificates import Authority, Signed

ENGINE: Final = "ray"
SERIES: Final = "2.60."  # of Ray: what this is built and tested with (constraints.txt)
CHECK_S: Final = 30.0  # for a Ray cluster to let a driver in: 1 to 3 s where nothing else runs
OWN: Final = "own"
OFF: Final = "off"
LOOPBACK: Final = "127.0.0.2"  # Ray takes 127.0.0.1 for a wish to be told this machine's outer address


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What `up --engine ray` was given.

    Attributes:
        address: a Ray cluster that is there already; empty for one of our own.
        redis: HOST:PORT where the head of our own keeps what it knows; empty for its own memory.
    """

    address: str = ""
    redis: str = ""


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """The head's own arguments for Ray."""
    parser.add_argument(
        "--ray-address", default=None, help=f"HOST:PORT of a Ray cluster that is there; {OWN}: one of our own"
    )
    parser.add_argument(
        "--ray-redis", default=None, help=f"HOST:PORT of a Redis for the head of our own; {OFF}: none any more"
    )


def ray_options(engine: str, given: argparse.Namespace, before: Mapping[str, Any]) -> RayOptions | None:
    """The options, else those of the head before, found good; None on another engine. Called before anything is written.

    Raises:
        BadRequest: an option of Ray without it; Ray is not installed, or of another release.
        Unreachable, TryLater: the Ray cluster that is there does not let us in.
    """
    if engine != ENGINE:
        odd = "--ray-address" if given.ray_address else "--ray-redis" if given.ray_redis else ""
        if odd:
            raise BadRequest(f"{odd} is of Ray", hint="phalanx up --engine ray")
        return None
    known = before.get("ray") or {}
    address = given.ray_address if given.ray_address is not None else known.get("address", "")
    kept = given.ray_redis if given.ray_redis is not None else known.get("redis", "")
    options = RayOptions(address="" if address == OWN else str(address), redis="" if kept == OFF else str(kept))
    if options.address and given.ray_redis not in (None, OFF):
        raise BadRequest(
            "--ray-redis is for a Ray cluster of our own, and --ray-address names another's",
            hint=f"--ray-address {OWN}",
        )
    version = ray_version()
    if not version.startswith(SERIES):
        raise BadRequest(f"Ray {version} is installed, and {SERIES}* is needed", hint="pip install 'phalanx[ray]'")
    if options.address:
        _check_let_in(options.address)
        return replace(options, redis="")
    if options.redis:
        redis.check(options.redis)
    return options


def remembered_ray(options: RayOptions | None) -> dict[str, str] | None:
    """What the next head takes over."""
    return None if options is None else asdict(options)


def _check_let_in(address: str) -> None:
    """Nothing, if a driver of ours gets into that Ray cluster. Tried in a process of its own: Ray aborts one that it loses."""
    if not reachable(address, timeout_s=3.0):
        raise Unreachable(
            f"no Ray head listens at {address}", hint="--ray-address HOST:PORT, the port of Ray's GCS, mostly 6379"
        )
    try:
        done = subprocess.run(
            driver_command(address, "check", "--check"),
            env=driver_environment(None),
            capture_output=True,
            timeout=CHECK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise TryLater(
            f"the Ray head at {address} does not let a driver in within {CHECK_S:.0f} s",
            hint="is it Ray, of the same release, and does it speak TLS? RAY_USE_TLS and kin count",
        ) from error
    lines = done.stdout.splitlines()
    try:
        said = tiding_of(lines[-1]) if lines else None
    except msgspec.MsgspecError:
        said = None
    if not isinstance(said, Connected):
        why = said.text if isinstance(said, Trouble) else f"the driver ended with {done.returncode}"
        if MISMATCH in why:
            raise Conflict(
                f"the Ray head at {address} is of another release: {why[why.index(MISMATCH) :]}",
                hint=f"Ray {SERIES}* and this Python are needed there too",
            )
        raise Unreachable(
            f"the Ray head at {address} does not let us in: {why}",
            hint="RAY_AUTH_TOKEN_PATH names the file of its token",
        )


def ray_engine(
    options: RayOptions,
    *,
    home: Home,
    nodes: Sequence[LocalNode],
    address: str,
    authority: Authority | None,
    far: bool,
    environment: Callable[[], dict[str, str]],
    token_of: Callable[[NodeId], str],
) -> RayEngine:
    """The engine of this head; nothing is started yet.

    Args:
        options: as given.
        home: the head's.
        nodes: of this machine, where the Ray cluster is ours.
        address: of this machine, as other servers reach it.
        authority: signs for Ray's processes.
        far: supervisors reach the head by TLS.
        environment: where supervisors find the head.
        token_of: makes a node's token.
    """
    cluster = None if options.address else _own_cluster(home, nodes, address, authority, options.redis)
    return RayEngine(
        address=options.address if cluster is None else cluster.ray_address,
        cluster=cluster,
        files=None if cluster is None else cluster.files,
        cluster_id=_cluster_id(home),
        environment=environment,
        ca_pem="" if authority is None or not far else authority.ca_pem,
        token_of=token_of,
        home=home.path,
    )


def ray_joining(engine: RayEngine | None) -> Callable[[Signed], RayJoin] | None:
    """How a server that joins becomes a node of our Ray cluster; None where there is none of ours."""
    cluster = None if engine is None else engine.cluster
    if cluster is None:
        return None

    def given(signed: Signed) -> RayJoin:
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
    home: Home, nodes: Sequence[LocalNode], address: str, authority: Authority | None, kept: str
) -> OwnCluster:
    certificate = key = ca = ""
    if authority is not None:
        certificate, key = authority.write("ray", authority.sign(names_at(address, socket.gethostname())))
        ca = authority.ca_file
    return OwnCluster(
        home=home.path,
        address=address,
        nodes=nodes,
        certificate=certificate,
        key=key,
        ca=ca,
        redis=kept,
        namespace=f"phalanx-{_cluster_id(home)}",
    )


def _cluster_id(home: Home) -> str:
    """Of this head's state folder, also after a restart; says nothing of its secret."""
    return hashlib.sha256(b"phalanx cluster " + home.secret()).hexdigest()[:12]
