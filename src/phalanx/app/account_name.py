"""A name for an account that has none, such as the user of a container: Python's `getpass`, and with it torch's compiler, fail without one."""

from __future__ import annotations

import os
import pwd
from typing import Final

NAME: Final = "phalanx"


def name_account() -> None:
    """Set USER, for this process and its children, if neither the system's tables nor a variable name this account."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        if not os.environ.get("LOGNAME"):
            os.environ.setdefault("USER", NAME)
