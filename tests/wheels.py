"""Packages for tests that install: wheels written by hand, so that neither an index nor a build is needed."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, *, version: str = "1.0", body: str = "", command: str = "") -> str:
    """Write a wheel of one module; its file's name.

    Args:
        folder: where it goes.
        name: of the package and of its module.
        version: as in its file's name.
        body: the module's text; `main` is there besides.
        command: of a command that calls `main`; "" for none.
    """
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n\ndef main():\n    print('command of', __name__)\n{body}",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if command:
        files[f"{about}/entry_points.txt"] = f"[console_scripts]\n{command} = {name}:main\n"
    record = "".join(f"{path},{_hash(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    file = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / file, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return file


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
