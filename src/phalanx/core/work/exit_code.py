"""The exit code of a job in words."""

from __future__ import annotations

import re


def code_beside(code: int | None, why: str) -> str:
    """`exit code 3` of a failed job, to be printed beside why it failed; empty for success, and if `why` names the code itself."""
    text = f"exit code {code}"
    return "" if not code or re.search(rf"\b{text}\b", why) else text
