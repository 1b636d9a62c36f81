"""Python environments of the examples, made once, outside the repository.

An environment holds exactly the `requirements.txt` of its example, and of `requirements-alone.txt` the packages without those that they name, in PHALANX_EXAMPLES_CACHE or
~/.cache/phalanx-examples, under a hash of those files and of this Python. One `with_phalanx` also sees the packages of the Python that runs this, so torch is not downloaded again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "examples"
_INSTALL_S: Final = 1200.0


class EnvironmentMissing(Exception):
    """The packages of an example cannot be installed here."""


def environment_of(name: str, *, with_phalanx: bool = False, folder: Path = FOLDER) -> Path:
    """Return the `bin` folder of an example's environment; make it if it is not there.

    Raises:
        EnvironmentMissing: pip cannot install it.
    """
    requirements, alone = folder / name / "requirements.txt", folder / name / "requirements-alone.txt"
    told = b"".join(file.read_bytes() for file in (requirements, alone) if file.exists())
    beside = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n" if with_phalanx else ""
    key = hashlib.sha256(told + sys.version.encode() + beside.encode()).hexdigest()[:16]
    root = Path(os.environ.get("PHALANX_EXAMPLES_CACHE") or Path.home() / ".cache" / "phalanx-examples")
    made = root / key
    if (made / "complete").exists():
        return made / "bin"
    shutil.rmtree(made, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    print(f"{name}: installing {' '.join(told.decode().split())}", flush=True)
    python = str(made / "bin" / "python")
    try:
        _call(sys.executable, "-m", "venv", str(made))
        if beside:
            packages = _call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
            (Path(packages) / "phalanx-beside.pth").write_text(beside)
        if requirements.exists():
            _call(python, "-m", "pip", "install", "-q", "-r", str(requirements))
        if alone.exists():
            _call(python, "-m", "pip", "install", "-q", "--no-deps", "-r", str(alone))
    except subprocess.SubprocessError as error:
        raise EnvironmentMissing(f"{name}: {last_lines(getattr(error, 'stderr', '') or str(error), 3)}") from error
    (made / "complete").touch()
    return made / "bin"


def last_lines(text: str, count: int) -> str:
    """The end of a text."""
    return "\n".join(text.splitlines()[-count:])


def _call(*words: str) -> str:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_INSTALL_S, env=environment)
    return done.stdout
