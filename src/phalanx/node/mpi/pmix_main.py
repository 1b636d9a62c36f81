"""The PMIx server of one step on one node: `python -I -m phalanx.node.mpi.pmix_main`, a child of the node's part of a batch job.

A process of its own, because libpmix has global state, and an error in it must end the step only. Lines of JSON: the first of standard input
is the world, then the results of fences; standard output has the port of the server, then what `PmixServer` sends.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
from typing import Any, Final

from phalanx.node.mpi.pmix_library import PmixFailed, PmixServer
from phalanx.node.mpi.world import MpiWorld

# Plain lists of names, values in messages instead of shared memory, and the peer's user as its proof: the same with every version.
_SETTINGS: Final = {"PMIX_MCA_preg": "^compress", "PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the step ends it
    os.environ.update(_SETTINGS)
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        if "data" in message:
            message["data"] = base64.b64encode(message["data"]).decode()
        with lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    order = json.loads(sys.stdin.readline())
    world = MpiWorld.from_json(order["world"])
    errors: list[str] = []
    for library in order["libraries"]:
        try:
            server = PmixServer(library, world, order["folder"], send)
            send({"port": server.port()})
        except PmixFailed as error:
            errors.append(str(error))
            continue
        for line in sys.stdin:
            result = json.loads(line)
            server.exchanged(result["fence"], [base64.b64decode(part) for part in result["parts"]])
        break
    else:
        send({"failed": "; ".join(errors)})
    sys.stdout.flush()
    os._exit(0)  # without waiting for the library's threads


if __name__ == "__main__":
    main()
