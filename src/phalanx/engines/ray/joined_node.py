"""Keep the Ray node of a joined server running. The Ray actor on it starts the supervisor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from phalanx.core.errors import BadRequest
from phalanx.engines.ray.protocol import RayJoin
from phalanx.engines.ray.ray_process import RayProcess, sweep_supervisors
from phalanx.engines.ray.render import (
    RayCredentials,
    RayStart,
    node_command,
    ray_environment,
)
from phalanx.node.files.private_files import write_private
from phalanx.ports.engine import KeeperStop, Membership

KEEP_EVERY_S: Final = 2.0
KEEP_PAUSE_MAX_S: Final = 15.0  # after failed starts the pause doubles up to this, as for a driver
_log = logging.getLogger("phalanx.joined")


def ray_version() -> str:
    """Return the version of Ray installed here.

    Raises:
        BadRequest: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise BadRequest("Ray is not installed here", hint="pip install '.[ray]' in the checkout")
    return importlib.metadata.version("ray")


def prepare(folder: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Check the versions, write the credentials of this server's Ray node, and return the settings without them."""
    given = msgspec.convert(settings, RayJoin, strict=False)
    check_versions(given)
    write_ray_files(folder, given)
    return {"address": given.address, "reconnect_s": str(given.reconnect_s)}


def check_versions(given: RayJoin) -> None:
    """Check that this server can be a node of that Ray cluster.

    Raises:
        BadRequest: Ray is missing, or Ray's or Python's version differs; all nodes must have the same.
    """
    ours = (ray_version(), python_version())
    if ours != (given.ray_version, given.python_version):
        raise BadRequest(
            f"the head runs Ray {given.ray_version} on Python {given.python_version}, this server Ray {ours[0]} on Python {ours[1]}",
            hint=f"Ray needs equal versions on all nodes: pip install 'ray[default]=={given.ray_version}' under that Python",
        )


def python_version() -> str:
    """Return Python's version as Ray compares it."""
    return platform.python_version()


def write_ray_files(folder: str, given: RayJoin) -> None:
    """Write token, key and certificate of this server's Ray node, readable by their owner alone."""
    for name, text in (("token", given.token), ("node.pem", given.certificate_pem), ("node.key", given.key_pem)):
        write_private(os.path.join(folder, "ray"), name, text)


def joined_ray_process(folder: str, joined: Membership) -> RayProcess:
    """Describe this server's Ray node."""
    files = RayCredentials(
        token=os.path.join(folder, "ray", "token"),
        certificate=os.path.join(folder, "ray", "node.pem"),
        key=os.path.join(folder, "ray", "node.key"),
        ca=os.path.join(folder, "ca.pem"),
        reconnect_s=int(joined.settings["reconnect_s"]),
    )
    start = RayStart(name=joined.node_id, address=joined.address, devices=joined.devices, virtual=joined.virtual)
    return RayProcess(
        name=joined.node_id,
        folder=os.path.join(folder, "ray", "process"),
        supervisor_folder=folder,
        command=lambda: node_command(replace(start, started_ms=int(time.time() * 1000)), joined.settings["address"]),
        variables=ray_environment(files),
    )


def keep_ray_node(folder: str, joined: Membership, ended: KeeperStop) -> None:
    """Keep the Ray node running until `ended` is set, then stop Ray, the supervisor and its ranks on this server."""
    process = joined_ray_process(folder, joined)
    pause_s = KEEP_EVERY_S
    while True:
        try:
            _ensure_running(process)
            pause_s = KEEP_EVERY_S
        except (OSError, RuntimeError) as error:  # no process, file or space available; may be temporary
            pause_s = min(2 * pause_s, KEEP_PAUSE_MAX_S)
            _log.error("Could not start the Ray node: %s; retrying in %.0f s", error, pause_s)
        if ended.wait(pause_s):
            break
    if ended.keep_node:
        return
    process.stop()
    sweep_supervisors(folder)


def _ensure_running(process: RayProcess) -> None:
    if not process.is_running():
        words = process.last_line()
        if words:
            _log.warning("The Ray node ended: %s", words)
        process.start()
