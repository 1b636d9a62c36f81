"""The keeper of a joined server: `python -m phalanx.app.server_keeper --folder DIR`, started by `phalanx join`, ended by `phalanx down`.

SIGINT ends the keeper and the node. SIGTERM, which a service manager sends, ends the node only if no job runs on it; else the supervisor
continues, and the next keeper adopts it.

It runs what the engine of the membership needs on this server: its supervisor, or daemons that start the supervisor. If the keeper dies,
the supervisor continues, and the next keeper adopts it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from phalanx.core.errors import BadRequest, Conflict, PhalanxError
from phalanx.engines.registry import engine_type
from phalanx.node import membership as records
from phalanx.node.logs.log_file import log_to_file
from phalanx.ports.engine import KeeperStop, Membership
from phalanx.web.command_hints import error_line


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
    ended = KeeperStop()

    def stop(number: int, _: object) -> None:
        ended.keep_node = number == signal.SIGTERM and bool(records.running_attempts(folder))
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    engine_type(joined.engine).keep_member(folder, joined, ended)


if __name__ == "__main__":
    sys.exit(main())
