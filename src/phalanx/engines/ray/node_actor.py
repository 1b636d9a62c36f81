"""The Ray actor of a node: it holds the node's GPUs in Ray's accounting and keeps a supervisor running there.

It is a local engine with one node. The supervisor runs in its own session and outlives the actor; an actor that Ray restarts finds it by its
record. Ranks do not use Ray.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from phalanx.engines.local import records
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray.options import ENGINE_NAME
from phalanx.engines.ray.protocol import SupervisorSpec
from phalanx.engines.ray.render import without_ray_variables
from phalanx.node.files.private_files import write_private
from phalanx.node.processes.proctable import process_environment, read_table
from phalanx.node.processes.sweeps import node_role
from phalanx.ports.engine import LocalNode

FOLDER_VARIABLE = "PHALANX_RAY_FOLDER"  # set when we start a Ray node: the folder of its supervisor
REVIVE_AFTER_S = 3.0  # as for a joined server


class NodeActor:
    """The driver makes it a Ray actor. Arguments and results are plain values."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._spec: SupervisorSpec | None = None
        self._guard = threading.Lock()  # Ray calls us on two threads: a release waits for a start under way

    def start_supervisor(self, given: dict[str, Any]) -> str:
        """Start the supervisor, or adopt the running one; return "" or the error. Idempotent; a repeated call updates the head's URL."""
        with self._guard:
            return self._start(msgspec.convert(given, SupervisorSpec))

    def poll(self) -> dict[str, Any]:
        """Return whether a node is managed, the deaths since the last call with their supervisors' ids, and the number of GPUs held."""
        if self._engine is None:
            return {"carrying": False, "deaths": []}
        deaths = [{"supervisor_id": death.supervisor_id, "why": death.why} for death in self._engine.observe()]
        return {"carrying": True, "deaths": deaths, "gpus": len(_assigned_devices())}

    def release(self) -> None:
        """Stop the supervisor and all its processes; none is left on return."""
        with self._guard:
            if self._engine is not None:
                self._engine.close(keep_nodes=False)
                self._engine = None

    def release_if_idle(self) -> bool:
        """Stop the supervisor if no task of a job runs here; return whether it is stopped.

        A job that the head placed here in the same moment starts elsewhere, as after the death of a supervisor.
        """
        with self._guard:
            if self._engine is None or self._spec is None:
                return self._engine is None
            living = records.read(self._engine.node_folder(self._spec.node_id))
            if living is None or any(
                node_role(process_environment(pid), living.node_key) == "task" for pid in read_table()
            ):
                return False
            self._engine.close(keep_nodes=False)
            self._engine = None
            return True

    def _start(self, what: SupervisorSpec) -> str:
        self._spec = what
        if self._engine is not None:
            return ""
        folder = os.environ.get(FOLDER_VARIABLE) or os.path.join(
            os.path.expanduser("~"), ".phalanx", "ray", what.cluster
        )
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if what.ca_pem:
                write_private(folder, "ca.pem", what.ca_pem)
            engine = self._make_engine(folder, what)
        except OSError as error:
            return _start_error(folder, what, error)
        try:
            engine.watch()
            engine.start(what.node_id)
        except OSError as error:
            engine.close(keep_nodes=False)  # the next call to `start_supervisor` tries again
            return _start_error(folder, what, error)
        self._engine = engine
        return ""

    def _make_engine(self, folder: str, what: SupervisorSpec) -> LocalEngine:
        held = _assigned_devices()
        devices = node_devices(held, what.gpus, process_environment(os.getppid()))
        outside = [place for place, device in enumerate(devices) if device not in held]

        def environment() -> dict[str, str]:
            assert self._spec is not None
            found = {**self._spec.environment, "PHALANX_NODE_ENGINE": ENGINE_NAME, "PHALANX_NODE_ADDRESS": what.address}
            if self._spec.ca_pem:
                found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
            if what.virtual_devices is None:
                found["PHALANX_NODE_DEVICES"] = ",".join(map(str, devices))
                found["PHALANX_NODE_OUTSIDE"] = ",".join(map(str, outside))
                found["PHALANX_NODE_OUTSIDE_BY"] = "other users of the Ray cluster"
            return found

        engine = LocalEngine(
            home=folder,
            own_nodes=[LocalNode(id=what.node_id, virtual_devices=0 if what.virtual_devices is None else len(held))],
            environment=environment,
            token_of=lambda _: self._spec.token if self._spec else "",
            revive_after_s=REVIVE_AFTER_S,
            inherited=lambda: without_ray_variables(dict(os.environ)),
        )
        engine.adopt()
        return engine


def _start_error(folder: str, what: SupervisorSpec, error: OSError) -> str:
    return f"{folder} on {what.node_id}: {error.strerror or error}"


def node_devices(held: Sequence[int], gpus: int, raylet: Mapping[bytes, bytes]) -> list[int]:
    """Return the indices of all GPUs of the Ray node, ascending, also of those that other users of the Ray cluster hold.

    Args:
        held: those that Ray assigned to us.
        gpus: the number of GPUs of the Ray node.
        raylet: the environment of the node's Ray daemon, which offers the GPUs that it may see, from the first.
    """
    visible = raylet.get(b"CUDA_VISIBLE_DEVICES", b"").split(b",")
    known = [int(word) for word in visible] if all(word.isdigit() for word in visible) else list(range(gpus))
    found = known[:gpus]
    return sorted(found) if set(held) <= set(found) else sorted(held)


def _assigned_devices() -> list[int]:
    """Return the indices of the GPUs that Ray assigned to this actor; for virtual devices they are only numbers."""
    import ray

    return sorted(int(device) for device in ray.get_gpu_ids())
