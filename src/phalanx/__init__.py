"""Phalanx turns a pile of GPU servers into one computer.

The root package holds the version and, on first use, the client; it imports nothing by itself, so that every
entry point pays only for what it uses.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.client import Client as Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    """Import the client the first time somebody asks for it.

    Raises:
        AttributeError: for any other name.
    """
    if name == "Client":
        import importlib

        # By name, so that no import of the root package draws the client (and HTTP) in behind it.
        return importlib.import_module("phalanx.client").Client
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}; it offers: {', '.join(__all__)}")
