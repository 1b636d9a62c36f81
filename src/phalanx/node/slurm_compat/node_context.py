"""What the tasks of a batch job find on one node: its folder, its devices and its container runtime. Each node has its own copy of this."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from socket import socket
from typing import Any, Final

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.node.gang.step_tasks import StepTasks
from phalanx.node.logic.step_containers import ContainerStart, StepContainers, container_start
from phalanx.node.logic.variables.mpi_variables import IN_PID_NAMESPACES
from phalanx.node.logic.variables.secret_variables import only_secrets
from phalanx.node.mpi.step_worlds import StepWorlds

_REFUSED: Final = 1  # exit code of a task whose container cannot be started


class BatchNodeContext:
    """The values that differ on each node: the job's folder `workdir`, Phalanx variables, devices; and secrets, which no message carries."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.workdir = str(order["workdir"])
        self._worlds: StepWorlds | None = None
        self._scratch = os.path.dirname(order["script"])
        self._tools = str(order["bin"])
        self.variables = {name: value for name, value in os.environ.items() if name.startswith("PHALANX_")}
        self.secrets = only_secrets(os.environ)
        self._names = [name for name in self.variables.get("PHALANX_DEVICES", "").split(",") if name]
        self._cuda_order = {name: os.environ[name] for name in ("CUDA_DEVICE_ORDER",) if name in os.environ}
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._cuda_names = numbers if len(numbers) == len(self._names) else self._names
        self._indices = [str(index) for index in order.get("devices", ())]
        self._virtual = self.variables.get("PHALANX_VIRTUAL") == "1"
        self._containers = StepContainers.from_json(order["containers"])

    def folder(self, cwd: str, first: str) -> str:
        """The folder here that corresponds to `cwd` on node rank 0, where the job's folder is `first`: each node may have its own copy."""
        inside = cwd == first or cwd.startswith(f"{first}/")
        return self.workdir + cwd[len(first) :] if inside else cwd

    def devices(self, places: Sequence[int] | None = None, *, image: bool = False) -> dict[str, str]:
        """The variables that say which devices a process may use: the job's on this node, or those at `places` among them.

        In the container of an `image` the numbers of devices may be others, so that the UUIDs are used.

        On virtual nodes the names are those of virtual devices: as many as there would be GPUs, and none that CUDA could open.
        """
        chosen = range(len(self._names)) if places is None else [place for place in places if place < len(self._names)]
        names = ",".join(self._names[place] for place in chosen)
        cuda_names = names if image else ",".join(self._cuda_names[place] for place in chosen)
        found = {"PHALANX_DEVICES": names, "CUDA_VISIBLE_DEVICES": cuda_names, **self._cuda_order}
        if places is not None and len(self._indices) == len(self._names):
            found["ROCR_VISIBLE_DEVICES"] = ",".join(self._indices[place] for place in chosen)
        return found

    def environment(self, one: Mapping[str, Any]) -> dict[str, str]:
        """The environment of a task, with what differs on this node, as the folder of our commands in PATH."""
        path = os.pathsep.join(
            self._tools if folder == one["tools"] else folder for folder in one["env"].get("PATH", "").split(os.pathsep)
        )
        return {
            **one["env"],
            "PATH": path,
            **self.variables,
            **self.secrets,
            **self.devices(one.get("places"), image=bool(one.get("container"))),
        }

    def worlds(self, tasks: StepTasks) -> StepWorlds:
        """The MPI worlds of the steps on this node."""
        if self._worlds is None:
            self._worlds = StepWorlds(tasks.report, self._scratch)
            tasks.on_exit = self._worlds.ended
        return self._worlds

    def connect(
        self, tasks: StepTasks, step: int, one: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[dict[str, str], list[socket]]:
        """The variables of a task of an MPI world, and the sockets that its process inherits; none of another task.

        Raises:
            OSError: no port or folder can be had.
        """
        if not one.get("mpi"):
            return {}, []
        return self.worlds(tasks).connect(step, one["mpi"], one["task"], env)

    def in_container(
        self,
        argv: Sequence[str],
        options: Mapping[str, str],
        *,
        task: str,
        cwd: str,
        places: Sequence[int] | None = None,
    ) -> ContainerStart:
        """How to start `argv` in the image that the options name, with all devices or those at `places`; `argv` itself if they name none.

        Raises:
            BadRequest: no container runtime is installed here, or it cannot run the image.
            OSError: the job's folder cannot be written.
        """
        gpus = [] if self._virtual else self.devices(places)["PHALANX_DEVICES"].split(",")
        home = os.path.expanduser("~")
        start = container_start(
            options, self._containers, argv, task=task, cwd=cwd, home=home, gpus=[name for name in gpus if name]
        )
        if start.container:  # noted first: the supervisor removes the containers that are left after a kill
            if os.getuid() != 0 and _may_gain_no_privileges():
                raise BadRequest(
                    "podman may not map user ids for this script", hint="write --container-image in the script itself"
                )
            os.makedirs(self._containers.notes, mode=0o700, exist_ok=True)
            with open(os.path.join(self._containers.notes, start.container), "wb"):
                pass
        return start


def _may_gain_no_privileges() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return "NoNewPrivs:\t1\n" in status


def handle_order(tasks: StepTasks, message: dict[str, Any], node: BatchNodeContext) -> None:
    """Start, signal or end tasks of this node, as node rank 0 ordered."""
    if "run" in message:
        ready: list[dict[str, Any]] = []
        inherited: list[socket] = []
        for one in message["run"]:
            one["cwd"] = node.folder(one["cwd"], one["first"])
            env = node.environment(one)
            try:
                start = node.in_container(
                    one["argv"],
                    one.get("container", {}),
                    task=f"step-{message['step']}.{one['task']}",
                    cwd=one["cwd"],
                    places=one.get("places"),
                )
                one["argv"], one["if_killed"] = start.argv, start.removal
                variables, sockets = node.connect(tasks, message["step"], one, env)
            except OSError as error:
                tasks.refuse(message["step"], one["task"], f"{error.filename}: {error.strerror}", _REFUSED)
            except PhalanxError as error:
                hint = f" ({error.hint})" if error.hint else ""
                tasks.refuse(message["step"], one["task"], f"{error.message}{hint}", _REFUSED)
            else:
                inherited += sockets
                if start.container and one.get("mpi"):
                    env = {**IN_PID_NAMESPACES, **env}
                ready.append({**one, "env": {**env, **variables}, "descriptors": [sock.fileno() for sock in sockets]})
        tasks.start(message["step"], ready)
        for sock in inherited:
            sock.close()
    elif "exchanged" in message:
        node.worlds(tasks).exchanged(message)
    elif "signal" in message:
        tasks.signal(message["signal"], message.get("step"))
    elif "end" in message:
        tasks.end(message["end"])
