"""The PMIx server of a step on one node. Its process starts when the first rank connects: a step without Open MPI costs one open port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

from phalanx.node.mpi.loopback import LOOPBACK, LoopbackListener, end_connection
from phalanx.node.mpi.pmix_library import SERVER_NAME
from phalanx.node.mpi.world import MpiWorld

_SERVER: Final = (sys.executable, "-I", "-m", "phalanx.node.mpi.pmix_main")
_START_S: Final = 60.0  # 0.1 s on an idle node; a guard
_CHUNK_BYTES: Final = 1 << 16
_URIS: Final = tuple(f"PMIX_SERVER_URI{version}" for version in ("41", "4", "3", "21", "2"))
"""A client reads the newest that it knows. Source: OpenPMIx, `pmix_ptl_base_check_server_uris`."""
PMIX_VARIABLES: Final = ("PMIX_NAMESPACE", "PMIX_RANK", *_URIS)


class PmixProcess:
    """PMIx of one step on this node.

    Ranks connect to a port here, and their connections are passed on to the server. Until it runs, they wait.

    Args:
        world: of the step.
        folder: for files of the server.
        env: of a task: where libraries are found.
        send: receives what `PmixServer` sends; {"abort", "why"} if there is no server.
    """

    def __init__(
        self, world: MpiWorld, folder: str, env: Mapping[str, str], send: Callable[[dict[str, Any]], None]
    ) -> None:
        self._world, self._folder, self._env, self._send = world, folder, env, send
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._listener = LoopbackListener(self._pass_on, "pmix")

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, as `PMIx_server_setup_fork` gives them."""
        return {
            "PMIX_NAMESPACE": self._world.namespace,
            "PMIX_RANK": str(rank),
            **dict.fromkeys(_URIS, f"{SERVER_NAME}.0;tcp4://{LOOPBACK}:{self._listener.port}"),
            "PMIX_SECURITY_MODE": "native",
            "PMIX_BFROP_BUFFER_TYPE": "PMIX_BFROP_BUFFER_NON_DESC",
            "PMIX_GDS_MODULE": "hash",
            "PMIX_SERVER_TMPDIR": self._folder,
            "PMIX_SYSTEM_TMPDIR": tempfile.gettempdir(),
            "PMIX_HOSTNAME": self._world.hosts[self._world.place],
        }

    def exchanged(self, fence: str, parts: list[str]) -> None:
        """End a fence."""
        self._write({"fence": fence, "parts": parts})

    def close(self) -> None:
        """End it: its input ends."""
        self._listener.close()
        with self._lock:
            process, self._process = self._process, None
            self._port = -1
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()

    def _pass_on(self, rank: socket.socket) -> None:
        port = self._start()
        if not port:
            return
        with socket.create_connection((LOOPBACK, port)) as server:
            for sock in (rank, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_copy, args=(server, rank), name="pmix", daemon=True)
            back.start()
            _copy(rank, server)
            back.join()

    def _start(self) -> int:
        """Start the server if it does not run yet. Return its port; 0 without a server."""
        with self._lock:
            if self._port:
                return max(self._port, 0)
            self._port = -1
            paths = {name: self._env[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in self._env}
            process = self._process = subprocess.Popen(
                _SERVER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **paths},
                process_group=0,
            )
            self._write({"world": self._world.to_json(), "folder": self._folder, "libraries": _libraries(self._env)})
            assert process.stdout is not None
            guard = threading.Timer(_START_S, process.kill)
            guard.start()
            first = process.stdout.readline()
            guard.cancel()
            said: dict[str, Any] = json.loads(first) if first else {"failed": "its server did not start"}
            if "failed" not in said:
                self._port = int(said["port"])
                threading.Thread(target=self._read, args=(process.stdout,), name="pmix", daemon=True).start()
                return self._port
        why = f"PMIx: {said['failed']}; install Open MPI's libpmix, or start the program by mpirun"
        self._send({"abort": 1, "why": f"{self._world.hosts[self._world.place]}: {why}"})
        return 0

    def _write(self, message: dict[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with self._writing, contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()

    def _read(self, output: IO[bytes]) -> None:
        for line in output:
            self._send(json.loads(line))


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for sock in (source, target):
        end_connection(sock)


def _libraries(env: Mapping[str, str]) -> list[str]:
    """Return where libpmix may be: where the linker finds it, and beside the mpirun in PATH."""
    found = ["libpmix.so.2"]
    launcher = shutil.which("mpirun", path=env.get("PATH"))
    if launcher is not None:
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(launcher)))
        places = (os.path.join(prefix, part, "libpmix.so.2") for part in ("lib", "lib64", "lib/openmpi", "lib/pmix"))
        found += [path for path in places if os.path.exists(path)]
    return found
