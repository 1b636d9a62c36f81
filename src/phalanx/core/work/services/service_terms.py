"""What a service asks for beyond one replica's command: the keys `type`, `replicas`, `port`, `ready`, `sleep` and so on of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import NodeId, ServiceId
from phalanx.core.units import parse_duration_s
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.services.prefill_terms import PrefillTerms, parse_prefill_terms
from phalanx.core.work.services.rollout_terms import RolloutTerms, parse_rollout_terms
from phalanx.core.work.services.scale_terms import ScaleTerms, parse_scale_terms

READY_TCP: Final = "tcp"  # ready once the port accepts a connection
READY_WITHIN_DEFAULT_S: Final = 600.0  # loading a model of 100 GB from a network disk takes minutes
READY_WITHIN_MAX_S: Final = 86_400.0
REPLICAS_MAX: Final = 1000
PORT_MAX: Final = 65_535
SERVICE_NAME_MAX: Final = 63  # a label of DNS, since gateways route by it

_TYPES: Final = ("job", "service")
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_RANGE: Final = re.compile(r"(\d{1,6})(?:\s*\.\.\s*(\d{1,6}))?")
_PATH: Final = re.compile(r"/[!-~]{0,1023}")
# Keys that end a job, or start it later: a service has no end, and starts when it is submitted.
_KEYS_OF_JOBS: Final = (
    "array",
    "time",
    "idle",
    "terminal",
    "retry",
    "depends_on",
    "begin",
    "hold",
    "slurm",
    "warm",
    "plan",
    "notify",
    "on_end",
)
_KEYS_OF_SERVICES: Final = (
    "replicas",
    "port",
    "ready",
    "ready_within",
    "sleep",
    "wake",
    "scale",
    "update",
    "prefill_for",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTerms:
    """The terms of a service.

    Attributes:
        replicas_min, replicas_max: the range of the number of replicas.
        port: each replica listens on this port if it is free on its node, else on any free one; 0 for any.
        ready: a path that answers HTTP requests with a status from 200 to 399, or READY_TCP.
        ready_within_s: time from the start of a replica's ranks within which it must be ready for a rollout to continue.
        sleep, wake: paths that a POST asks to free the replica's devices, and to use them again; empty if it cannot sleep.
        scale: targets that the number of replicas follows; None: it is as a user sets it.
        rollout: the steps in which this revision replaces the one before; None: replica by replica.
        prefill: another service whose prompts it reads; None: it answers requests of its own.
    """

    replicas_min: int
    replicas_max: int
    port: int = 0
    ready: str = READY_TCP
    ready_within_s: float = READY_WITHIN_DEFAULT_S
    sleep: str = ""
    wake: str = ""
    scale: ScaleTerms | None = None
    rollout: RolloutTerms | None = None
    prefill: PrefillTerms | None = None

    @property
    def range_text(self) -> str:
        """The range as in a job file: "2", "1..4"."""
        low, high = self.replicas_min, self.replicas_max
        return str(low) if low == high else f"{low}..{high}"

    def clamp(self, replicas: int) -> int:
        """The number in the range nearest to this one."""
        return max(self.replicas_min, min(self.replicas_max, replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPosition:
    """The service and revision that a job is a replica of. `crowded`: those of its avoided nodes that run other replicas."""

    service: ServiceId
    revision: int
    crowded: tuple[NodeId, ...] = ()


def parse_service_terms(given: Mapping[str, object], name: str) -> ServiceTerms | None:
    """The terms of a mapping with `type: service`; None for a job.

    Args:
        given: keys of a job file with their values; absent keys count as not given.
        name: of the job or service, given or derived from its command.

    Raises:
        InvalidKey: an invalid value, a key that only jobs or only services have, or a name that is no label of DNS.
    """
    kind = str(given.get("type", "job")).strip().lower()
    if kind not in _TYPES:
        raise InvalidKey(f"type: {kind[:40]!r} is neither job nor service", key="type", hint="write type: service")
    if kind == "job":
        for key in _KEYS_OF_SERVICES:
            if key in given:
                raise InvalidKey(f"{key}: only services have it", key=key, hint="add type: service")
        return None
    for key in _KEYS_OF_JOBS:
        if given.get(key):
            raise InvalidKey(f"{key}: a service has no {key}", key=key, hint=f"remove {key}, or write type: job")
    if ".." in str(given.get("nodes", "")):
        raise InvalidKey(
            "nodes: a replica has a fixed number of nodes", key="nodes", hint="replicas: 1..4 gives a range"
        )
    if not _NAME.fullmatch(name):
        raise InvalidKey(
            f"name: {name[:40]!r} is not a name for a service",
            key="name",
            hint=f"lower-case letters, digits and -, beginning with a letter, at most {SERVICE_NAME_MAX} characters",
        )
    low, high = _replicas(given.get("replicas", 1))
    scale = parse_scale_terms(given["scale"]) if given.get("scale") else None
    if scale is not None and low == high:
        raise InvalidKey(
            f"scale: replicas: {low} leaves no choice of the number", key="scale", hint="write replicas: 1..4"
        )
    hooks = {key: _path(given[key], key) for key in ("sleep", "wake") if given.get(key)}
    if len(hooks) == 1:
        (one,) = hooks
        other = "wake" if one == "sleep" else "sleep"
        raise InvalidKey(f"{one}: a service that sleeps also needs {other}", key=one, hint=f"add {other}: /PATH")
    return ServiceTerms(
        replicas_min=low,
        replicas_max=high,
        port=_port(given.get("port", "auto")),
        ready=_ready(given.get("ready", READY_TCP)),
        ready_within_s=_ready_within_s(given.get("ready_within", READY_WITHIN_DEFAULT_S)),
        sleep=hooks.get("sleep", ""),
        wake=hooks.get("wake", ""),
        scale=scale,
        rollout=parse_rollout_terms(given["update"]) if given.get("update") else None,
        prefill=parse_prefill_terms(given["prefill_for"], name) if given.get("prefill_for") else None,
    )


def _replicas(value: object) -> tuple[int, int]:
    match = _RANGE.fullmatch(str(value).strip())
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if isinstance(value, bool) or not low <= high or not 1 <= high <= REPLICAS_MAX:
        raise InvalidKey(
            f"replicas: {str(value)[:40]!r} is not a number or range from 0 to {REPLICAS_MAX}",
            key="replicas",
            hint="write replicas: 2, or replicas: 1..4",
        )
    return low, high


def _port(value: object) -> int:
    text = str(value).strip().lower()
    if text == "auto":
        return 0
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:6]) <= PORT_MAX:
        raise InvalidKey(f"port: {text[:40]!r} is not a port", key="port", hint=f"write 1 to {PORT_MAX}, or auto")
    return int(text)


def _ready(value: object) -> str:
    text = str(value).strip()
    return READY_TCP if text.lower() == READY_TCP else _path(text, "ready", "write a path such as /health, or tcp")


def _path(value: object, key: str, hint: str = "write a path such as /sleep?level=1") -> str:
    text = str(value).strip()
    if not _PATH.fullmatch(text):
        raise InvalidKey(f"{key}: {text[:40]!r} is not a path", key=key, hint=hint)
    return text


def _ready_within_s(value: object) -> float:
    try:
        seconds = value if isinstance(value, float) else parse_duration_s(str(value), what="ready_within")
    except BadRequest as error:
        raise InvalidKey(error.message, key="ready_within", hint=error.hint) from None
    if not 0 < seconds <= READY_WITHIN_MAX_S:
        raise InvalidKey(
            f"ready_within: {value!r} is not between 0 and 24 hours", key="ready_within", hint="write 90s, 10m, 1h"
        )
    return seconds
