"""Opens a page in a browser of this machine, if it has a screen."""

from __future__ import annotations

import os
import sys


def open_browser(url: str) -> bool:
    """Open the page, and return whether a browser took it."""
    import webbrowser

    return _has_screen() and webbrowser.open(url)


def _has_screen() -> bool:
    """Whether a browser can open a window here; over SSH without a forwarded screen it would take the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
