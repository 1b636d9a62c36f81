"""Names of users, projects, queues, pools and channels."""

from __future__ import annotations

import re
from typing import Final

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}")


def is_name(text: str) -> bool:
    """Whether the text can be such a name."""
    return NAME_PATTERN.fullmatch(text) is not None
