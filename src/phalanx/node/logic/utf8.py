"""Make text safe to send or store. Names of files and hosts are bytes to the system, and need not be UTF-8."""

from __future__ import annotations


def replace_invalid_utf8(text: str) -> str:
    """Replace each byte that is not valid UTF-8 by a question mark."""
    return text.encode("utf-8", "replace").decode()
