"""Text that travels or is written down. Names of files, hosts and ports are bytes to the system, and need not be UTF-8."""

from __future__ import annotations


def legible(text: str) -> str:
    """The text, with a question mark for each byte in it that is no character."""
    return text.encode("utf-8", "replace").decode()
