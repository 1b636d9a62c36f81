"""The supervisor of one node's part of one attempt: `python -m phalanx.app.seat`, started by an engine where the job is to run.

It reads PHALANX_SEAT (wire.seat), becomes a supervisor like any other (app.node) that carries this attempt alone, and ends with it. Its exit
code is that of the first task here that failed by itself, so that the engine's own books tell the truth; of a cancel or a time limit they
are told by a word of the engine's own (`SeatOrder.parting`).
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
from phalanx.client.discovery import split_url
from phalanx.client.tls import trusting
from phalanx.core.access.node_keys import seat_token
from phalanx.core.ids import NodeId
from phalanx.core.work.seat import Seat
from phalanx.wire.rank import StopReason
from phalanx.wire.seat import SEAT_CUT_OFF, SEAT_DISTRUSTS, SEAT_VARIABLE, SeatOrder, decode_order

REACH_S: Final = 30.0  # for a head that is being started again; else somebody shuts us out
REACH_PAUSE_S: Final = 0.5
PARTING_S: Final = (
    10.0  # for the engine to hear the last word: tens of milliseconds, and Slurm's own MessageTimeout at worst
)
_USAGE: Final = 64
_NODE_NAMES: Final = ("PHALANX_NODE_ID", "SLURMD_NODENAME")  # which node this is, the surest first
_DEVICES: Final = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
_OF_THE_DRIVER: Final = "CUDA_VISIBLE_DEVICES"


def main() -> int:
    """Run until the attempt is over."""
    text = os.environ.pop(SEAT_VARIABLE, "")
    try:
        order = decode_order(text)
    except msgspec.MsgspecError as error:
        print(f"phalanx seat: {SEAT_VARIABLE} holds no order ({error}); engines start this", file=sys.stderr)
        return _USAGE
    node_id = _which_node(order)
    if node_id is None:
        print(f"phalanx seat: this is none of the nodes {', '.join(order.parts)}", file=sys.stderr)
        return _USAGE
    barred = _barred(order)
    if barred:
        return barred
    seat = Seat(node_id=node_id, job_id=order.job_id, epoch=order.epoch)
    folder = _folder(seat)
    try:
        os.environ.update(_variables(order, seat, folder))
        return _leave(order, node_id, node.run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _barred(order: SeatOrder) -> int:
    """0, if the head lets us in; else the code that tells the engine why not, for without the head nobody else could."""
    secure, name, port = split_url(order.head_url)
    until = time.monotonic() + REACH_S
    while True:
        try:
            with socket.create_connection((name, port), timeout=REACH_S) as connection:
                if secure and order.ca_pem:
                    trusting(order.ca_pem).wrap_socket(connection, server_hostname=name).close()
                return 0
        except ssl.SSLCertVerificationError:
            return SEAT_DISTRUSTS
        except OSError:
            if time.monotonic() > until:
                return SEAT_CUT_OFF
            time.sleep(REACH_PAUSE_S)


def _leave(order: SeatOrder, node_id: NodeId, ended: node.Ended) -> int:
    """Have the engine's books say how the attempt ended where an exit code cannot; the code to leave with."""
    line = order.parting.get(ended.stop.name.lower())
    if line is None:
        # Stopped since a task failed elsewhere: that node has the code, and the highest of all is the job's.
        return 0 if ended.stop is StopReason.RESTART and not ended.failed else ended.code
    if node_id != next(iter(order.parts)):
        return 0
    try:
        said = subprocess.run(
            ["/bin/sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, timeout=PARTING_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ended.code
    return 0 if said.returncode == 0 else ended.code


def _which_node(order: SeatOrder) -> NodeId | None:
    names = [os.environ.get(name, "") for name in _NODE_NAMES] + [socket.gethostname().split(".")[0]]
    return next((NodeId(name) for name in names if name in order.parts), None)


def _folder(seat: Seat) -> str:
    """A folder on this node for its owner alone; a name that nobody can have made before."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    # In TMPDIR, which Slurm may set for each job, else in /tmp.
    return tempfile.mkdtemp(prefix=f"phalanx-{user}-{seat.job_id}.{seat.epoch}-")


def _variables(order: SeatOrder, seat: Seat, folder: str) -> dict[str, str]:
    """The settings of `app.node`."""
    part = order.parts[seat.node_id]
    found = {
        "PHALANX_NODE_ID": seat.node_id,
        "PHALANX_NODE_KEY": f"{seat.node_id}-{seat.job_id}.{seat.epoch}-{secrets.token_hex(6)}",
        "PHALANX_NODE_DIR": folder,
        "PHALANX_NODE_TOKEN": seat_token(order.key, seat),
        "PHALANX_NODE_SEAT": seat.name,
        "PHALANX_NODE_DEVICES": ",".join(map(str, _devices(part.devices))),
        "PHALANX_NODE_ADDRESS": part.address,
        "PHALANX_NODE_ENGINE": order.engine,
        "PHALANX_HEAD_URL": order.head_url,
    }
    if order.ca_pem:
        found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
        with open(found["PHALANX_HEAD_CA"], "w", encoding="ascii") as file:
            file.write(order.ca_pem)
    return found


def _devices(count: int) -> list[int]:
    """Positions of the given devices in the driver's list.

    CUDA's own variable goes first: where the engine hides the other devices from us, it counts those that are left.
    """
    for name in (_OF_THE_DRIVER, *_DEVICES):
        words = [word.strip() for word in os.environ.get(name, "").split(",")]
        if all(word.isdecimal() for word in words) and len(words) >= count > 0:
            return [int(word) for word in words[:count]]
    return list(range(count))


if __name__ == "__main__":
    code = main()
    os._exit(code)  # as app.node: the threads are daemons blocked on the head
