"""The actor: sits on one node, holds its GPUs in Ray's accounting, and keeps a supervisor alive there.

It is the local engine with one node, far from the head. The supervisor is started in a session of its own and outlives the actor; an actor
that Ray starts again finds it by its record. What a rank does never passes through Ray.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.local.private import write_private
from phalanx.engines.local.records import LocalNode
from phalanx.engines.ray.protocol import Carried
from phalanx.engines.ray.render import cleaned

FOLDER_VARIABLE = "PHALANX_RAY_FOLDER"  # set by who starts a Ray node of ours: where its supervisor's folder lies
REVIVE_AFTER_S = 3.0  # as of a server that joined by itself


class Carrier:
    """Made a Ray actor by the driver. Everything that it takes and gives is plain."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._what: Carried | None = None
        self._guard = threading.Lock()  # Ray calls us on two threads: what is being carried is released after that

    def carry(self, given: dict[str, Any]) -> str:
        """Bring the supervisor up, or take over the one that lives; again is harmless and says where the head is now. "" or why not."""
        with self._guard:
            return self._bring(msgspec.convert(given, Carried))

    def pulse(self) -> dict[str, Any]:
        """Whether a node is carried, and deaths since the last call, which may have been long ago: each says whose it is."""
        if self._engine is None:
            return {"carrying": False, "deaths": []}
        deaths = [{"supervisor_id": death.supervisor_id, "why": death.why} for death in self._engine.observe()]
        return {"carrying": True, "deaths": deaths}

    def release(self) -> None:
        """End the supervisor and all under it; nothing is left when this returns."""
        with self._guard:
            if self._engine is not None:
                self._engine.close(keep_nodes=False)
                self._engine = None

    def _bring(self, what: Carried) -> str:
        self._what = what
        if self._engine is not None:
            return ""
        folder = os.environ.get(FOLDER_VARIABLE) or os.path.join(
            os.path.expanduser("~"), ".phalanx", "ray", what.cluster
        )
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if what.ca_pem:
                write_private(folder, "ca.pem", what.ca_pem)
            engine = self._make(folder, what)
        except OSError as error:
            return _why(folder, what, error)
        failed = engine.open().get(what.node_id)
        if failed is not None:
            engine.close(keep_nodes=False)  # nothing is carried: asked again, we try again
            return _why(folder, what, failed)
        self._engine = engine
        return ""

    def _make(self, folder: str, what: Carried) -> LocalEngine:
        devices = _devices_held()

        def environment() -> dict[str, str]:
            assert self._what is not None
            found = {**self._what.environment, "PHALANX_NODE_ENGINE": "ray", "PHALANX_NODE_ADDRESS": what.address}
            if self._what.ca_pem:
                found["PHALANX_HEAD_CA"] = os.path.join(folder, "ca.pem")
            if what.virtual is None:
                found["PHALANX_NODE_DEVICES"] = ",".join(map(str, devices))
            return found

        engine = LocalEngine(
            home=folder, environment=environment, token_of=lambda _: self._what.token if self._what else "",
            revive_after_s=REVIVE_AFTER_S, inherited=lambda: cleaned(dict(os.environ)),
        )  # fmt: skip
        engine.adopt([LocalNode(id=what.node_id, virtual_devices=0 if what.virtual is None else len(devices))])
        return engine


def _why(folder: str, what: Carried, error: OSError) -> str:
    return f"{folder} on {what.node_id}: {error.strerror or error}"


def _devices_held() -> list[int]:
    """Positions of the GPUs that Ray counts as this actor's; on a node with virtual devices they are mere numbers."""
    import ray

    return sorted(int(device) for device in ray.get_gpu_ids())
