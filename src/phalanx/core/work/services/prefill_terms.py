"""A service that reads the prompts of another one, whose replicas then only answer: the key `prefill_for`."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ServiceId
from phalanx.core.work.job_file.keys import InvalidKey

_NAMES: Final = ("service", "protocol")
_SERVICE: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_HINT: Final = "write prefill_for: chat, or prefill_for: {service: chat, protocol: sglang}"


class TransferProtocol(enum.StrEnum):
    """How a request passes from the engine that reads its prompt to the one that answers it."""

    VLLM = "vllm"  # one after the other: the first answers with `kv_transfer_params`, which the second gets
    SGLANG = "sglang"  # both at once: they meet in a room of the first one's bootstrap server


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTerms:
    """The service whose prompts are read, and how."""

    service: ServiceId
    protocol: TransferProtocol = TransferProtocol.VLLM

    def keys(self) -> dict[str, str]:
        """The mapping in a job file that gives these terms."""
        return {"service": self.service, "protocol": self.protocol.value}


def parse_prefill_terms(value: object, own_name: str) -> PrefillTerms:
    """The terms of the key `prefill_for`.

    Args:
        value: of the key.
        own_name: of the service that has it.

    Raises:
        InvalidKey: an unknown name, or an invalid value.
    """
    if isinstance(value, list | tuple):
        value = dict(str(one).partition("=")[::2] for one in value)
    given = value if isinstance(value, Mapping) else {"service": value}
    texts = {str(name).strip().lower(): str(one).strip() for name, one in given.items() if one is not None}
    for name in texts:
        if name not in _NAMES:
            raise InvalidKey(f"prefill_for: {name[:40]!r} is unknown", key="prefill_for", hint=_HINT)
    service, protocol = texts.get("service", ""), texts.get("protocol", TransferProtocol.VLLM).lower()
    if not _SERVICE.fullmatch(service):
        raise InvalidKey(f"prefill_for: {service[:40]!r} is not the name of a service", key="prefill_for", hint=_HINT)
    if service == own_name:
        raise InvalidKey(
            "prefill_for: a service cannot read its own prompts",
            key="prefill_for",
            hint="name the service that answers",
        )
    if protocol not in {one.value for one in TransferProtocol}:
        raise InvalidKey(
            f"prefill_for: protocol {protocol[:40]!r} is neither vllm nor sglang", key="prefill_for", hint=_HINT
        )
    return PrefillTerms(service=ServiceId(service), protocol=TransferProtocol(protocol))
