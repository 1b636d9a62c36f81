"""This machine's own nodes, which its head starts whether it leads or is a standby."""

from __future__ import annotations

import os
from collections.abc import Callable

from phalanx.app.options import HeadOptions
from phalanx.app.resources import Listeners
from phalanx.app.state_folder import StateFolder
from phalanx.core.access.node_tokens import node_token
from phalanx.engines.local.engine import LocalEngine
from phalanx.node.files.job_accounts import JOBS_AS_VARIABLE
from phalanx.node.head_link import peer_account


def local_engine(options: HeadOptions, secret: bytes, environment: Callable[[], dict[str, str]]) -> LocalEngine:
    """Return the engine of this machine; nothing is started yet."""
    return LocalEngine(
        home=options.state_folder.path,
        environment=environment,
        token_of=lambda node: node_token(secret, node),
        revive_after_s=options.revive_after_s,
        jobs_as="owner",
    )


def node_environment(options: HeadOptions, doors: Listeners) -> dict[str, str]:
    """Return the environment of the supervisors on this machine."""
    home = options.state_folder
    return {
        "PHALANX_HEAD_URL": doors.loopback_url,
        "PHALANX_HEAD_FILE": home.path_of("head.json"),
        **peer_account.head_uid_environment(),
        "PHALANX_HOME": home.path,
        "PHALANX_NODE_ADDRESS": "127.0.0.1" if doors.listen is None else doors.listen.host,
        **({JOBS_AS_VARIABLE: options.jobs_as} if options.jobs_as else {}),
        **_authority(home, doors),
    }


def _authority(home: StateFolder, doors: Listeners) -> dict[str, str]:
    """Return the variable with the CA file, needed if another head leads; this machine's head is reached on loopback without TLS."""
    path = home.path_of("tls", "ca.pem")
    return {"PHALANX_HEAD_CA": path} if doors.listen is not None and os.path.exists(path) else {}
