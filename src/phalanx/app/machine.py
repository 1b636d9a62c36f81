"""This machine's own nodes, which its head starts whether it leads or is a standby."""

from __future__ import annotations

import os
from collections.abc import Callable

from phalanx.app.ground import Doors
from phalanx.app.home import Home
from phalanx.app.options import Options
from phalanx.core.access.node_keys import node_token
from phalanx.engines.local.engine import LocalEngine
from phalanx.node.shell import loopback
from phalanx.node.shell.accounts import JOBS_AS_VARIABLE


def local_engine(options: Options, secret: bytes, environment: Callable[[], dict[str, str]]) -> LocalEngine:
    """Return the engine of this machine; nothing is started yet."""
    return LocalEngine(
        home=options.home.path,
        environment=environment,
        token_of=lambda node: node_token(secret, node),
        revive_after_s=options.revive_after_s,
        jobs_as="owner",
    )


def node_environment(options: Options, doors: Doors) -> dict[str, str]:
    """Return the environment of the supervisors on this machine."""
    home = options.home
    return {
        "PHALANX_HEAD_URL": doors.inner_url,
        "PHALANX_HEAD_FILE": home.at("head.json"),
        **loopback.told(),
        "PHALANX_HOME": home.path,
        "PHALANX_NODE_ADDRESS": "127.0.0.1" if doors.listen is None else doors.listen.host,
        **({JOBS_AS_VARIABLE: options.jobs_as} if options.jobs_as else {}),
        **_authority(home, doors),
    }


def _authority(home: Home, doors: Doors) -> dict[str, str]:
    """Return the variable with the CA file, needed if another head leads; this machine's head is reached on loopback without TLS."""
    path = home.at("tls", "ca.pem")
    return {"PHALANX_HEAD_CA": path} if doors.listen is not None and os.path.exists(path) else {}
