"""The system account that a job runs under, and its login environment, built without the supervisor's own secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

UID_MIN_DEFAULT: Final = 1000
"""System accounts have lower numbers. Source: UID_MIN of login.defs(5) on Debian and Red Hat."""
# As useradd(8) allows, plus the dots and capitals that directory services allow.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?")
# Variables that locate the node's programs and libraries or configure its network. Any other may hold a secret of the supervisor's starter.
_PASSED: Final = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_MODULE_LOADING",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
_PASSED_PREFIXES: Final = ("LC_", "NCCL_", "UCX_", "FI_", "GLOO_", "TP_")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccount:
    """An account as in the system's tables; `groups` holds all of its groups, the primary one included."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def is_account_name(name: str) -> bool:
    """Whether the name is safe to look up in the system's tables."""
    return _NAME.fullmatch(name) is not None


def login_environment(base: Mapping[str, str], account: NodeAccount) -> dict[str, str]:
    """Build the environment of a rank under this account from the supervisor's own."""
    passed = {name: value for name, value in base.items() if name in _PASSED or name.startswith(_PASSED_PREFIXES)}
    return {**passed, "HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
