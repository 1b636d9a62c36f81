"""The keeper of a joined server: `python -m phalanx.app.server_keeper --folder DIR`, started by `phalanx join`, ended by `phalanx down`.

It runs this server's supervisor while the server is a member: it restarts the supervisor when it dies, and removes leftover processes.
On Ray it runs the Ray node instead, which starts the supervisor. If the keeper dies, the supervisor continues, and the next keeper
adopts it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from typing import Final

from phalanx.cli.hints import error_line
from phalanx.core.errors import BadRequest, Conflict, PhalanxError
from phalanx.engines.joined import records
from phalanx.engines.joined.records import Membership
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.local.records import LocalNode
from phalanx.node.logs.log_file import log_to_file

# Before a dead supervisor is restarted; shorter than the node's lease, so that the lease decides how long a restart takes.
REVIVE_AFTER_S: Final = 3.0
_LOOK_EVERY_S: Final = 1.0
_PAUSE_MAX_S: Final = 15.0  # when this server lacks processes, files or space: the pause doubles up to this
_log = logging.getLogger("phalanx.joined")


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT, and return the exit code; the reason of an error is printed in one line."""
    parser = argparse.ArgumentParser(
        prog="phalanx-joined", description="Keep a server joined; `phalanx join` starts this."
    )
    parser.add_argument("--folder", required=True)
    folder = os.path.abspath(parser.parse_args(argv).folder)
    try:
        joined = records.read(folder)
        if joined is None:
            raise BadRequest(f"{folder}: this server has not joined a head", hint="phalanx join HEAD --token ...")
        lock = records.lock_keeper(folder)
        if lock is None:
            raise Conflict(f"a keeper already runs in {folder}", hint="phalanx down stops it")
        log_to_file(os.path.join(folder, "keeper.log"), os.environ.get("PHALANX_LOG", "INFO").upper())
        _keep(folder, joined)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: error: {error_line(error.message, error.hint)}\n")
        return int(error.exit_code)
    return 0


def _keep(folder: str, joined: Membership) -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if joined.ray_address:
        from phalanx.engines.ray.joined_node import keep_ray_node

        keep_ray_node(folder, joined, ended)
        return
    engine = _opened(folder, joined, ended)
    while engine is not None and not ended.wait(_LOOK_EVERY_S):
        for death in engine.observe():
            _log.warning("node %s: %s", death.node_id, death.why)
    if engine is not None:
        engine.close(keep_nodes=False)


def _opened(folder: str, joined: Membership, ended: threading.Event) -> LocalEngine | None:
    """Start the engine with this server's supervisor, retrying until the server has the resources; None if asked to stop before."""
    pause_s = _LOOK_EVERY_S
    while True:
        try:
            engine = _supervisor_engine(folder, joined)
            engine.open()
        except (OSError, RuntimeError) as error:
            _log.error("the supervisor could not be started: %s; trying again in %.0f s", error, pause_s)
            if ended.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        else:
            return engine


def _supervisor_engine(folder: str, joined: Membership) -> LocalEngine:
    """Return a local engine with this server's one node, whose head is on another machine."""
    engine = LocalEngine(
        home=folder,
        environment=lambda: {
            "PHALANX_HEAD_URL": ",".join(filter(None, [joined.url, joined.heads])),
            "PHALANX_HEAD_CA": records.ca_file(folder),
            "PHALANX_NODE_ENGINE": joined.engine,
            "PHALANX_NODE_ADDRESS": joined.address,
        },
        token_of=lambda _: records.read_token(folder),
        revive_after_s=REVIVE_AFTER_S,
        jobs_as="owner",
    )
    engine.adopt([LocalNode(id=joined.node_id, virtual_devices=joined.devices if joined.virtual else 0)])
    return engine


if __name__ == "__main__":
    sys.exit(main())
