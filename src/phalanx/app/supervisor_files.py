"""Copies what a supervisor needs into a folder, from which it runs in an image that knows nothing of Phalanx.

    python3 -P -m phalanx.app.supervisor_files FOLDER        in an image with Phalanx
    python3 -P -m phalanx.app.supervisor_files FILE.tar.gz   the same as one file, and with what `phalanx join` needs
    python3 -P FOLDER/start.py MODULE [ARGUMENT ...]         in the other image

A head serves that file to rented machines, whose images know nothing of Phalanx either (`machine_files`).

The other image needs glibc and the same minor version of Python, because the copied packages are compiled for it. `start.py` says so in one
line, by whatever Python the image has, and makes the folder a virtual environment of that image's Python.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from phalanx.app import supervisor_start

NEEDED: Final = ("phalanx", "msgspec")
AT_START: Final = ("app", "core", "node", "wire")  # the parts of Phalanx that a supervisor imports when it starts
OF_HEADS: Final = frozenset(
    ("api", "controller", "engines", "gateway", "providers", "simulator", "store", "submitit", "sweep")
)
"""The parts that no supervisor imports, and none of the programs that it starts: three files in ten."""
FOR_JOINING: Final = ("click",)  # of `phalanx join`, beside those of a supervisor
USEFUL: Final = ("_phalanx_proctable", "cloudpickle", "obstore", "pynvml", "typing_extensions")
START_FILE: Final = "start.py"
_USAGE: Final = 64


def copy_supervisor(folder: Path, more: Sequence[str] = (), *, compiled: bool = True) -> None:
    """Copy the packages, and `more` of them, and the program that starts them. A second call replaces them.

    With `more`, all of Phalanx is copied, else what a supervisor may need.

    `compiled`: with the bytecode that is here of what a supervisor imports when it starts, so that not each pod compiles it again.

    Raises:
        OSError: the folder cannot be written.
        ModuleNotFoundError: a needed package is not installed.
    """
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    for name in (*NEEDED, *more, *USEFUL):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            _copy(Path(found.origin), site, compiled=compiled, heads=bool(more))
        elif name in (*NEEDED, *more):
            raise ModuleNotFoundError(f"the package {name} is not installed here")
    facts = {"python": list(sys.version_info[:2]), "suffix": importlib.machinery.EXTENSION_SUFFIXES[0]}
    (folder / supervisor_start.FACTS_FILE).write_text(json.dumps(facts), encoding="ascii")
    shutil.copyfile(supervisor_start.__file__, folder / START_FILE)


def write_archive(path: str) -> None:
    """Write what a rented machine needs as one compressed tar: some 7 MB, 2 s of CPU.

    Raises:
        OSError: it cannot be written.
        ModuleNotFoundError: a needed package is not installed.
    """
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        copy_supervisor(Path(folder) / "files", FOR_JOINING, compiled=False)
        fresh = os.path.join(folder, "new")
        with tarfile.open(fresh, "w:gz", compresslevel=6) as tar:
            tar.add(os.path.join(folder, "files"), arcname=".", filter=_as_root)
        os.replace(fresh, path)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def main() -> int:
    """Copy into the folder of the command line, and return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python3 -P -m phalanx.app.supervisor_files FOLDER, or FILE.tar.gz", file=sys.stderr)
        return _USAGE
    try:
        if sys.argv[1].endswith(".tar.gz"):
            write_archive(sys.argv[1])
        else:
            copy_supervisor(Path(sys.argv[1]))
    except (OSError, ModuleNotFoundError) as error:
        print(f"phalanx: cannot copy the supervisor into {sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


def _copy(origin: Path, site: Path, *, compiled: bool, heads: bool) -> None:
    """Copy a package or a module. The times of files stay, as Python compares those of source and bytecode."""
    if origin.name == "__init__.py" or origin.stem == "__init__":
        package = origin.parent
        useless = partial(_useless, package, compiled=compiled, heads=heads)
        shutil.copytree(package, site / package.name, dirs_exist_ok=True, ignore=useless)
        return
    shutil.copy2(origin, site / origin.name)
    if compiled and origin.suffix == ".py":
        bytecode = Path(importlib.util.cache_from_source(str(origin)))
        if bytecode.exists():
            (site / bytecode.parent.name).mkdir(exist_ok=True)
            shutil.copy2(bytecode, site / bytecode.parent.name / bytecode.name)


def _useless(package: Path, folder: str, names: Sequence[str], *, compiled: bool, heads: bool) -> set[str]:
    """Return what to leave out of a folder of a package: parts of heads, bytecode of other Pythons, and of what no supervisor imports when it starts."""
    parts, ours = Path(folder).relative_to(package).parts, package.name == NEEDED[0]
    if parts and parts[-1] == "__pycache__":
        return {name for name in names if not name.endswith(f".{sys.implementation.cache_tag}.pyc")}
    imported = not ours or not parts or parts[0] in AT_START
    left = set() if compiled and imported else {"__pycache__"}
    return left | OF_HEADS.intersection(names) if ours and not parts and not heads else left


if __name__ == "__main__":
    sys.exit(main())
