"""The spawner: a small single-threaded process that forks ranks, so that the threaded supervisor never forks one.

Run by path, `python -S -E spawner_main.py <descriptor>`, by `spawner.py` of the supervisor; the zygote (`zygote_main.py`) is the same
program with torch imported, under the job's interpreter. Standard library only, Python >= 3.10, no import from phalanx.

    supervisor --(seqpacket socket)-- spawner --fork--> keeper, one per attempt generation --fork+exec--> ranks

The spawner forks keepers only (see `fork_keeper.py`); supervisor and keeper then use a socket of their own, so a dead spawner ends no rank.
End of file on the control socket means that the supervisor is gone: the spawner waits for its keepers, which clean up, and exits.
PR_SET_PDEATHSIG is unsuitable here: it fires when the supervisor's *thread* that forked ends, and leaves no time to clean up.

Request, with the keeper's end of its socket as descriptor: {"op": "keeper", "confinement": as in keeper.py}. Reply: {"op": "keeper", "pid": pid}.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from types import ModuleType
from typing import TYPE_CHECKING


def sibling(name: str) -> ModuleType:
    """Load a file of this folder by path, under a name that cannot collide with imports of a user's script."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_phalanx_{name}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typing.NamedTuple and `fork_keeper.py` look it up there
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from phalanx.node.processes import keeper
else:
    sibling("proctable")
    keeper = sibling("keeper")

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def serve(control: socket.socket, *, name: str) -> keeper.WarmRank | None:
    """Fork keepers on request until the supervisor is gone.

    Args:
        control: the socket to the supervisor.
        name: what `ps` shows, at most 15 bytes.

    Returns:
        A Rank in each warm rank forked below; None in the spawner and in each keeper at their end.
    """
    keeper.prctl(keeper.PR_SET_NAME, name.encode())
    keeper.prctl(
        keeper.PR_SET_CHILD_SUBREAPER, 1
    )  # if a keeper dies, its processes are reparented here and not to init
    for number in _IGNORED:
        signal.signal(number, keeper.do_nothing)
    gc.disable()
    gc.freeze()  # memory pages of loaded modules stay shared with every fork
    wake = keeper.ChildExitNotifier()
    poll = select.poll()
    poll.register(wake.descriptor, select.POLLIN)
    poll.register(control.fileno(), select.POLLIN)
    listening = True
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake.descriptor in ready:
            wake.clear()
        if not _reap() and not listening:
            return None
        if not listening or control.fileno() not in ready:
            continue
        message = keeper.receive(control)
        if message is None:
            listening = False
            poll.unregister(control.fileno())
            if not _reap():
                return None
            continue
        request, descriptors = message
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            wake.close_in_child()
            return keeper.Keeper(channel, confinement=request["confinement"]).run()
        channel.close()
        control.send(json.dumps({"op": "keeper", "pid": pid}).encode())


def _reap() -> bool:
    """Reap dead keepers and adopted processes; True while a child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def control_socket(argument: str) -> socket.socket:
    """The socket whose descriptor the supervisor passed; children must not inherit it."""
    control = socket.socket(fileno=int(argument))
    control.set_inheritable(False)
    return control


def main() -> None:
    """Serve cold spawns: each rank is fork and exec."""
    control = control_socket(sys.argv[1])
    control.send(json.dumps({"op": "ready"}).encode())
    serve(control, name="phx-spawner")
    os._exit(0)


if __name__ == "__main__":
    main()
