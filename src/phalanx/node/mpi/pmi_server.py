"""Serves PMI-1 to the ranks of one node: the wire protocol by which MPICH, Intel MPI and MVAPICH find each other.

Each rank connects to `PMI_PORT`, or has one end of a socket pair in `PMI_FD`. Values that ranks put are exchanged with the other nodes at each
barrier. Source: MPICH, src/pmi/src/pmi_wire.c and pmi_v1.c ("cmd=put key=... value=...", one command on a line).

The port does not need `PMI_RANK` and `PMI_SIZE`, which some programs without MPI would take for theirs (Accelerate), and it survives programs that
close what they inherit (Python's `subprocess`). `PMI_FD` is what Slurm sets for `--mpi=pmi2`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from phalanx.node.mpi.loopback import LOOPBACK, LoopbackListener
from phalanx.node.mpi.world import MpiWorld, process_mapping

PMI_FENCE: Final = "pmi"
PMI_VARIABLES: Final = ("PMI_PORT", "PMI_ID", "PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_JOBID")
_LINE_BYTES_MAX: Final = 1 << 16
_ID_MAX: Final = 1 << 31  # a C int
_ONLY_PMI_1: Final = {"MPIR_CVAR_PMI_VERSION": "1"}
"""MPICH 4.2 and newer would refuse to start if it finds the variables of PMIx too."""
_LIMITS: Final = "kvsname_max=256 keylen_max=64 vallen_max=1024"


class PmiServer:
    """PMI of one step on this node.

    Args:
        send: receives {"fence": PMI_FENCE, "places", "data": pairs} at a barrier, {"initialized": rank}, {"finalized": rank} and {"abort": code}.
    """

    def __init__(self, world: MpiWorld, send: Callable[[dict[str, Any]], None]) -> None:
        self._world, self._send = world, send
        self._lock = threading.Lock()
        self._values: dict[str, str] = {"PMI_process_mapping": mapping} if (mapping := process_mapping(world)) else {}
        self._new: dict[str, str] = {}
        self._waiting: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._ids: dict[str, int] = {}
        self._listener = LoopbackListener(self._greet, "pmi")

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables by which a rank finds the port. Its number is a secret: other users can connect too."""
        number = str(secrets.randbelow(_ID_MAX))
        self._ids[number] = rank
        return {"PMI_PORT": f"{LOOPBACK}:{self._listener.port}", "PMI_ID": number, **_ONLY_PMI_1}

    def connect(self, rank: int) -> tuple[dict[str, str], list[socket.socket]]:
        """Return a rank's variables and its end of a connection, to be closed here once the process has started."""
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        threading.Thread(target=self._serve, args=(ours, rank), name=f"pmi-{rank}", daemon=True).start()
        variables = {
            "PMI_FD": str(theirs.fileno()),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(self._world.size),
            "PMI_JOBID": self._world.name,
            **_ONLY_PMI_1,
        }
        return variables, [theirs]

    def exchanged(self, _fence: str, parts: list[dict[str, str]]) -> None:
        """End the barrier, with the values of all nodes."""
        with self._lock:
            for part in parts:
                self._values |= part
            waiting, self._waiting = self._waiting, []
        for sock in waiting:
            _reply(sock, "cmd=barrier_out rc=0")

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        with sock.makefile("rb") as lines:
            words = dict(
                word.partition("=")[::2] for word in lines.readline(_LINE_BYTES_MAX).decode("ascii", "replace").split()
            )
        rank = self._ids.get(words.get("pmiid", ""))
        if rank is None:
            return
        for answer in ("initack", f"set size={self._world.size}", f"set rank={rank}", "set debug=0"):
            _reply(sock, f"cmd={answer}")
        self._serve(sock, rank)

    def _serve(self, sock: socket.socket, rank: int) -> None:
        with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as lines:
            while line := lines.readline(_LINE_BYTES_MAX):
                if not line.startswith((b"cmd=", b"mcmd=")):
                    self._send({"abort": 1, "why": f"rank {rank} does not speak PMI-1; start the program by mpirun"})
                    return
                if line.startswith(b"mcmd="):  # several lines
                    while (line := lines.readline(_LINE_BYTES_MAX)) and line.strip() != b"endcmd":
                        pass
                    _reply(sock, "cmd=spawn_result rc=-1")
                    continue
                words = dict(word.partition("=")[::2] for word in _words(line.decode("ascii", "replace")))
                if words.get("cmd") == "barrier_in":
                    self._barrier(sock)
                elif answer := self._answer(words, rank):
                    _reply(sock, answer)

    def _answer(self, words: dict[str, str], rank: int) -> str:
        match words.get("cmd", ""):
            case "init":
                self._send({"initialized": rank})
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return f"cmd=maxes {_LIMITS} rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={self._world.size} rc=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname=kvs_{self._world.name} rc=0"
            case "put":
                with self._lock:
                    self._new[words.get("key", "")] = words.get("value", "")
                return "cmd=put_result rc=0 msg=success"
            case "get":
                value = self._values.get(words.get("key", ""))
                found = "rc=-1 msg=key_not_found value=unknown" if value is None else f"rc=0 msg=success value={value}"
                return f"cmd=get_result {found}"
            case "finalize":
                self._send({"finalized": rank})
                return "cmd=finalize_ack rc=0"
            case "abort":
                code = words.get("exitcode", "")
                self._send({"abort": int(code) if code.isdecimal() else 1})
                return ""
            case "publish_name" | "unpublish_name" | "lookup_name" as verb:
                return f"cmd={verb.partition('_')[0]}_result rc=-1 msg=not_supported"
            case _:
                return ""

    def _barrier(self, sock: socket.socket) -> None:
        with self._lock:
            self._waiting.append(sock)
            if len(self._waiting) < len(self._world.local):
                return
            values, self._new = self._new, {}
        self._send({"fence": PMI_FENCE, "places": self._world.places(()), "data": values})


def _words(line: str) -> list[str]:
    """The `key=value` words of a command; the value of the last one may contain spaces."""
    head, found, value = line.strip().partition(" value=")
    return [*head.split(), *([f"value={value}"] if found else [])]


def _reply(sock: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        sock.sendall(f"{text}\n".encode())
