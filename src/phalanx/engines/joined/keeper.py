"""Keeps the supervisor of a joined server running, by a local engine with one node, whose head is on another machine."""

from __future__ import annotations

import logging
from typing import Final

from phalanx.engines.local.engine import LocalEngine
from phalanx.node import membership as records
from phalanx.ports.engine import KeeperStop, LocalNode, Membership

# Before a dead supervisor is restarted; shorter than the node's lease, so that the lease decides how long a restart takes.
REVIVE_AFTER_S: Final = 3.0
_LOOK_EVERY_S: Final = 1.0
_PAUSE_MAX_S: Final = 15.0  # when this server lacks processes, files or space: the pause doubles up to this
_log = logging.getLogger("phalanx.joined")


def keep_supervisor(folder: str, membership: Membership, ended: KeeperStop) -> None:
    """Keep the supervisor running until `ended` is set; if the keeper dies, the supervisor continues, and the next keeper adopts it."""
    engine = _opened(folder, membership, ended)
    while engine is not None and not ended.wait(_LOOK_EVERY_S):
        for death in engine.observe():
            _log.warning("node %s: %s", death.node_id, death.why)
    if engine is not None:
        engine.close(keep_nodes=ended.keep_node)


def _opened(folder: str, membership: Membership, ended: KeeperStop) -> LocalEngine | None:
    """Start the engine with this server's supervisor, retrying until the server has the resources; None if asked to stop before."""
    pause_s = _LOOK_EVERY_S
    while True:
        try:
            engine = _supervisor_engine(folder, membership)
            engine.open()
        except (OSError, RuntimeError) as error:
            _log.error("the supervisor could not be started: %s; trying again in %.0f s", error, pause_s)
            if ended.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        else:
            return engine


def _supervisor_engine(folder: str, membership: Membership) -> LocalEngine:
    """Return a local engine with this server's one node, whose head is on another machine."""
    engine = LocalEngine(
        home=folder,
        own_nodes=[
            LocalNode(
                id=membership.node_id,
                virtual_devices=membership.devices if membership.virtual else 0,
                offers=membership.offers,
                cordoned=membership.cordoned,
            )
        ],
        environment=lambda: {
            "PHALANX_HEAD_URL": ",".join(filter(None, [membership.url, membership.heads])),
            "PHALANX_HEAD_FILE": records.heads_file(folder),
            "PHALANX_HEAD_CA": records.ca_file(folder),
            "PHALANX_NODE_ENGINE": membership.engine,
            "PHALANX_NODE_ADDRESS": membership.address,
            "PHALANX_NODE_UNWATCHED": "1",
        },
        token_of=lambda _: records.read_token(folder),
        revive_after_s=REVIVE_AFTER_S,
        jobs_as="owner",
    )
    engine.adopt()
    return engine
