"""An account of this node that a job runs under, and the environment that it begins with: nothing of the supervisor's own passes over. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

UID_MIN_DEFAULT: Final = 1000
"""Below it are the system's own accounts. Source: UID_MIN of login.defs(5), Debian and Red Hat alike."""
_NAME: Final = re.compile(
    r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?"
)  # useradd(8), and the dots and capitals that directories allow
# What says where programs and libraries of this node are, and how its network is used. All else may be a secret of whoever started us.
_PASSED: Final = (
    "PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_MODULE_LOADING", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_PASSED_PREFIXES: Final = ("LC_", "NCCL_", "UCX_", "FI_", "GLOO_", "TP_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """As the system's tables have it; `groups` holds all of its groups, its own too."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def is_account_name(name: str) -> bool:
    """Whether the system's tables may be asked for it."""
    return _NAME.fullmatch(name) is not None


def login_environment(base: Mapping[str, str], account: Account) -> dict[str, str]:
    """What a rank of this account begins with, out of the supervisor's own environment."""
    passed = {name: value for name, value in base.items() if name in _PASSED or name.startswith(_PASSED_PREFIXES)}
    return {**passed, "HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
