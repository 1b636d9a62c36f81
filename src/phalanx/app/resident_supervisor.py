"""The supervisor of a resident node: `python -m phalanx.app.resident_supervisor`, which stays between attempts and ends with its pod or Slurm job.

It reads PHALANX_RESIDENT (wire.resident) and becomes a normal supervisor (app.node). It ends in two cases:

- SIGTERM, by which Kubernetes deletes, evicts or preempts a pod. The head sees that too, and drains the node: the ranks of the whole gang
  save together. So the supervisor waits until no attempt is left, or until shortly before the pod's grace period is over. Where the
  engine's signal reaches the ranks as well, as in a Slurm job, it stops them at once and reports that the node leaves.
- The head has not answered for `head_gone_s`: nothing else would ever free the GPUs. Its ranks froze long before, when their lease ended.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from phalanx.app import node
from phalanx.app.assigned_devices import assigned_devices
from phalanx.node.shell.supervisor_loop import SupervisorLoop
from phalanx.wire.head_http import context_for_ca
from phalanx.wire.head_url import split_url
from phalanx.wire.resident import (
    ADDRESS_VARIABLE,
    GRACE_VARIABLE,
    RESIDENT_VARIABLE,
    ResidentAssignment,
    decode_resident,
)

LOOK_S: Final = 0.2  # between looks after SIGTERM
HEAD_CHECK_S: Final = 60.0  # between two checks of the head
CONNECT_S: Final = 10.0
STOP_S: Final = 12.0  # that a supervisor needs to stop its ranks and to report their end
GRACE_S: Final = 60.0
_USAGE: Final = 64


@dataclass(slots=True, kw_only=True)
class ResidentLife:
    """Decides when a resident supervisor ends. Times are seconds of one monotonic clock.

    Attributes:
        grace_s: of the pod.
        head_gone_s: see `ResidentAssignment`.
        answered_s: when the head last answered; when the process started, before it did.
        asked_s: when SIGTERM came; None before.
    """

    grace_s: float
    head_gone_s: float
    answered_s: float
    asked_s: float | None = None

    def is_over(self, now_s: float, *, has_members: bool) -> bool:
        """Whether to end now."""
        if self.asked_s is not None:
            return not has_members or now_s - self.asked_s >= max(0.0, self.grace_s - STOP_S)
        return now_s - self.answered_s >= self.head_gone_s


def main() -> int:
    """Run until the supervisor has ended, and return its exit code."""
    text = os.environ.pop(RESIDENT_VARIABLE, "")
    try:
        given = decode_resident(text)
        grace_s = float(os.environ.pop(GRACE_VARIABLE, GRACE_S))
    except (msgspec.MsgspecError, ValueError) as error:
        print(
            f"phalanx resident: {RESIDENT_VARIABLE} is not valid ({error}); an engine starts this process",
            file=sys.stderr,
        )
        return _USAGE
    folder = tempfile.mkdtemp(prefix="phalanx-resident-")
    try:
        os.environ.update(_variables(given, folder))
        life = ResidentLife(grace_s=grace_s, head_gone_s=given.head_gone_s, answered_s=time.monotonic())
        return node.run(lambda loop: _watch(loop, life, given)).code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def head_answers(url: str, ca_pem: str) -> bool:
    """Whether the head with this certificate accepts a connection."""
    secure, name, port = split_url(url)
    try:
        with socket.create_connection((name, port), timeout=CONNECT_S) as connection:
            if secure and ca_pem:
                context_for_ca(ca_pem).wrap_socket(connection, server_hostname=name).close()
            return True
    except OSError:
        return False


def _watch(loop: SupervisorLoop, life: ResidentLife, given: ResidentAssignment) -> Callable[[], None]:
    """End the supervisor when its life is over; return what SIGTERM calls."""
    asked = threading.Event()
    check_s = min(HEAD_CHECK_S, given.head_gone_s / 4)

    def run() -> None:
        while not life.is_over(time.monotonic(), has_members=loop.has_members):
            if asked.wait(LOOK_S if life.asked_s is not None else check_s):
                life.asked_s = life.asked_s or time.monotonic()
                time.sleep(LOOK_S)
            elif head_answers(given.head_url, given.ca_pem):
                life.answered_s = time.monotonic()
        loop.terminate()

    threading.Thread(target=run, name="resident", daemon=True).start()
    return loop.terminate if given.signals_reach_ranks else asked.set


def _variables(given: ResidentAssignment, folder: str) -> dict[str, str]:
    """Return the settings of `app.node`."""
    found = {
        "PHALANX_NODE_ID": given.node_id,
        "PHALANX_NODE_KEY": f"{given.node_id}-{secrets.token_hex(6)}",
        "PHALANX_NODE_DIR": folder,
        "PHALANX_NODE_TOKEN": given.token,
        "PHALANX_NODE_ENGINE": given.engine,
        "PHALANX_NODE_DEVICES": ",".join(map(str, assigned_devices(given.devices))),
        "PHALANX_NODE_ADDRESS": os.environ.pop(ADDRESS_VARIABLE, "") or "127.0.0.1",
        "PHALANX_NODE_UNWATCHED": "1",
        "PHALANX_HEAD_URL": given.head_url,
    }
    if given.cpus:
        found |= {"PHALANX_NODE_CPUS": str(given.cpus), "PHALANX_NODE_MEMORY_BYTES": str(given.memory_bytes)}
    if given.signals_reach_ranks:
        found["PHALANX_NODE_SIGNALS_REACH_RANKS"] = "1"
    if given.ca_pem:
        found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
        with open(found["PHALANX_HEAD_CA"], "w", encoding="ascii") as file:
            file.write(given.ca_pem)
    return found


if __name__ == "__main__":
    code = main()
    os._exit(code)  # as in app.node: daemon threads may still wait for the head
