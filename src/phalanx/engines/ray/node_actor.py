"""The Ray actor of a node: it holds the node's GPUs in Ray's accounting and keeps a supervisor running there.

It is a local engine with one node. The supervisor runs in its own session and outlives the actor; an actor that Ray restarts finds it by its
record. Ranks do not use Ray.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray.options import ENGINE_NAME
from phalanx.engines.ray.protocol import SupervisorSpec
from phalanx.engines.ray.render import without_ray_variables
from phalanx.node.files.private_files import write_private
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
        """Return whether a node is managed, and the deaths since the last call, each with its supervisor's id."""
        if self._engine is None:
            return {"carrying": False, "deaths": []}
        deaths = [{"supervisor_id": death.supervisor_id, "why": death.why} for death in self._engine.observe()]
        return {"carrying": True, "deaths": deaths}

    def release(self) -> None:
        """Stop the supervisor and all its processes; none is left on return."""
        with self._guard:
            if self._engine is not None:
                self._engine.close(keep_nodes=False)
                self._engine = None

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
        devices = _assigned_devices()

        def environment() -> dict[str, str]:
            assert self._spec is not None
            found = {**self._spec.environment, "PHALANX_NODE_ENGINE": ENGINE_NAME, "PHALANX_NODE_ADDRESS": what.address}
            if self._spec.ca_pem:
                found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
            if what.virtual_devices is None:
                found["PHALANX_NODE_DEVICES"] = ",".join(map(str, devices))
            return found

        engine = LocalEngine(
            home=folder,
            own_nodes=[LocalNode(id=what.node_id, virtual_devices=0 if what.virtual_devices is None else len(devices))],
            environment=environment,
            token_of=lambda _: self._spec.token if self._spec else "",
            revive_after_s=REVIVE_AFTER_S,
            inherited=lambda: without_ray_variables(dict(os.environ)),
        )
        engine.adopt()
        return engine


def _start_error(folder: str, what: SupervisorSpec, error: OSError) -> str:
    return f"{folder} on {what.node_id}: {error.strerror or error}"


def _assigned_devices() -> list[int]:
    """Return the indices of the GPUs that Ray assigned to this actor; for virtual devices they are only numbers."""
    import ray

    return sorted(int(device) for device in ray.get_gpu_ids())
