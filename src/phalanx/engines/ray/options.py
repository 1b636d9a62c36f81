"""The name of the engine, and its options."""

from __future__ import annotations

from typing import Final

from phalanx.ports.engine import EngineOption

ENGINE_NAME: Final = "ray"
ADDRESS: Final = "ray-address"
REDIS: Final = "ray-redis"
OWN_CLUSTER: Final = "own"
REDIS_OFF: Final = "off"
OPTIONS: Final = (
    EngineOption(
        name=ADDRESS, metavar="HOST:PORT", help="Existing Ray cluster to use; own: start one.", reset=OWN_CLUSTER
    ),
    EngineOption(
        name=REDIS,
        metavar="HOST:PORT",
        help="Redis that stores the state of our own Ray head; off: none.",
        reset=REDIS_OFF,
    ),
)
