"""Find what a Python program imports. Pure: the shell reads the files."""

from __future__ import annotations

import ast
import os.path
from collections.abc import Callable, Sequence
from typing import Final

from phalanx.node.logic.script_check import SCRIPT_BYTES_MAX

FILES_MAX: Final = (
    32  # of a program that are read to see whether one of them imports a package; the script itself comes first
)


def module_file(argv: Sequence[str]) -> str | None:
    """Return the file, relative to the working directory, that `python -m MODULE` would run if the module is a file there; else None."""
    for index, word in enumerate(argv[1:-1], 1):
        if word == "-m":
            return argv[index + 1].replace(".", "/") + ".py"
        if not word.startswith("-"):
            return None
    return None


def imported_modules(text: bytes) -> set[str]:
    """Return the names of all modules that a Python source imports anywhere; empty if it does not parse or is too long."""
    if len(text) > SCRIPT_BYTES_MAX:
        return set()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")}
    return names


def imports_package(
    package: str,
    script: str,
    read: Callable[[str], bytes | None],
    *,
    modules_of: Callable[[bytes], set[str]] = imported_modules,
) -> bool:
    """Return whether a script imports a package, itself or by modules beside it.

    Args:
        package: the name of a top-level package.
        script: path of the script.
        read: returns the content of a file, None without the file.
        modules_of: parses one file.
    """
    folder, waiting, seen = os.path.dirname(script), [script], set[str]()
    while waiting and len(seen) < FILES_MAX:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        text = read(path)
        names = set() if text is None else modules_of(text)
        if any(name.partition(".")[0] == package for name in names):
            return True
        for name in sorted(names):
            parts = name.split(".")
            waiting += [
                os.path.join(folder, *parts[:-1], f"{parts[-1]}.py"),
                os.path.join(folder, *parts, "__init__.py"),
            ]
    return False
