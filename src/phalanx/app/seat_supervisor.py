"""The supervisor of a seat, one node's part of one attempt: `python -m phalanx.app.seat_supervisor`, started by an engine on that node.

It reads PHALANX_SEAT (wire.seat), becomes a normal supervisor (app.node) for this attempt only, and ends with it. Its exit code is that of
the first local task that failed on its own, so that the engine records the right result. A cancel or a time limit is reported by a command
of the engine (`SeatAssignment.exit_commands`).
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from typing import Final

import msgspec

from phalanx.app import node
from phalanx.app.assigned_devices import assigned_devices
from phalanx.core.access.node_tokens import seat_token
from phalanx.core.ids import NodeId
from phalanx.core.work.seats import Seat
from phalanx.wire.head_http import context_for_ca
from phalanx.wire.head_url import split_url
from phalanx.wire.rank import RankStopReason
from phalanx.wire.seat import (
    SEAT_CERTIFICATE_REJECTED,
    SEAT_HEAD_UNREACHABLE,
    SEAT_RANK_VARIABLE,
    SEAT_VARIABLE,
    SeatAssignment,
    decode_assignment,
)

HEAD_CONNECT_TIMEOUT_S: Final = (
    30.0  # enough for a head that restarts; after it, a firewall probably blocks the connection
)
HEAD_RETRY_S: Final = 0.5
FINAL_REPORT_TIMEOUT_S: Final = (
    10.0  # for the engine to receive the final report: tens of milliseconds, at worst Slurm's MessageTimeout
)
_USAGE: Final = 64
_NODE_NAMES: Final = ("PHALANX_NODE_ID", "SLURMD_NODENAME")  # the name of this node, the most reliable variable first
_ADDRESS: Final = "PHALANX_SEAT_ADDRESS"  # of a pod, which is not that of its node, and known only there


def main() -> int:
    """Run until the attempt has ended, and return the exit code."""
    text = os.environ.pop(SEAT_VARIABLE, "")
    try:
        order = decode_assignment(text)
    except msgspec.MsgspecError as error:
        print(
            f"phalanx seat: {SEAT_VARIABLE} is not a valid order ({error}); engines start this process", file=sys.stderr
        )
        return _USAGE
    node_id = _which_node(order)
    if node_id is None:
        print(f"phalanx seat: this machine is not one of the nodes {', '.join(order.nodes)}", file=sys.stderr)
        return _USAGE
    unreachable = _check_head(order)
    if unreachable:
        return unreachable
    seat = Seat(node_id=node_id, job_id=order.job_id, epoch=order.epoch)
    folder = _folder(seat)
    try:
        os.environ.update(_variables(order, seat, folder))
        return _leave(order, node_id, node.run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_head(order: SeatAssignment) -> int:
    """Return 0 if the head is reachable, else the exit code by which the engine learns why not."""
    secure, name, port = split_url(order.head_url)
    until = time.monotonic() + HEAD_CONNECT_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((name, port), timeout=HEAD_CONNECT_TIMEOUT_S) as connection:
                if secure and order.ca_pem:
                    context_for_ca(order.ca_pem).wrap_socket(connection, server_hostname=name).close()
                return 0
        except ssl.SSLCertVerificationError:
            return SEAT_CERTIFICATE_REJECTED
        except OSError:
            if time.monotonic() > until:
                return SEAT_HEAD_UNREACHABLE
            time.sleep(HEAD_RETRY_S)


def _leave(order: SeatAssignment, node_id: NodeId, ended: node.SupervisorResult) -> int:
    """Report the end of the attempt to the engine if an exit code cannot express it; return the exit code."""
    line = order.exit_commands.get(ended.stop.name.lower())
    if line is None:
        # Stopped because a task failed on another node: that node returns the code, and the engine uses the highest.
        return 0 if ended.stop is RankStopReason.RESTART and not ended.failed else ended.code
    if node_id != next(iter(order.nodes)):
        return 0
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FINAL_REPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ended.code
    return 0 if done.returncode == 0 else ended.code


def _which_node(order: SeatAssignment) -> NodeId | None:
    rank = os.environ.pop(SEAT_RANK_VARIABLE, "")
    if rank.isdecimal() and int(rank) < len(order.nodes):
        return list(order.nodes)[int(rank)]
    names = [os.environ.get(name, "") for name in _NODE_NAMES] + [socket.gethostname().split(".")[0]]
    return next((NodeId(name) for name in names if name in order.nodes), None)


def _folder(seat: Seat) -> str:
    """Create a private folder on this node, with an unpredictable name."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may run as an account that its image does not name
        user = str(os.geteuid())
    # In TMPDIR, which Slurm may set per job, else in /tmp.
    return tempfile.mkdtemp(prefix=f"phalanx-{user}-{seat.job_id}.{seat.epoch}-")


def _variables(order: SeatAssignment, seat: Seat, folder: str) -> dict[str, str]:
    """Return the settings of `app.node`."""
    part = order.nodes[seat.node_id]
    found = {
        "PHALANX_NODE_ID": seat.node_id,
        "PHALANX_NODE_KEY": f"{seat.node_id}-{seat.job_id}.{seat.epoch}-{secrets.token_hex(6)}",
        "PHALANX_NODE_DIR": folder,
        "PHALANX_NODE_TOKEN": seat_token(order.key, seat),
        "PHALANX_NODE_SEAT": seat.name,
        "PHALANX_NODE_DEVICES": ",".join(map(str, assigned_devices(part.devices))),
        "PHALANX_NODE_ADDRESS": os.environ.pop(_ADDRESS, "") or part.address,
        "PHALANX_NODE_ENGINE": order.engine,
        "PHALANX_HEAD_URL": order.head_url,
    }
    if order.ca_pem:
        found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
        with open(found["PHALANX_HEAD_CA"], "w", encoding="ascii") as file:
            file.write(order.ca_pem)
    return found


if __name__ == "__main__":
    code = main()
    os._exit(code)  # as in app.node: daemon threads may still wait for the head
