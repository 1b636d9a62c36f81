"""Phalanx runs training jobs on a cluster of GPU servers.

The root package holds the version and imports the client on first use. Nothing else is imported here, so each entry point
loads only the modules that it uses.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.client import Client as Client
    from phalanx.executor.executor import Executor as Executor
    from phalanx.executor.function import function as function

__version__ = "0.1.0"
__all__ = ["Client", "Executor", "__version__", "function"]

_HOMES = {
    "Client": "phalanx.client",
    "Executor": "phalanx.executor.executor",
    "function": "phalanx.executor.function",
}


def __getattr__(name: str) -> object:
    """Import one of the public names on its first use.

    Raises:
        AttributeError: any other name.
    """
    home = _HOMES.get(name)
    if home is not None:
        import importlib

        # Imported by name, so that `import phalanx` does not load the client and HTTP.
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}; it exports: {', '.join(__all__)}")
