# ruff: noqa: INP001  # a program for an image, not a package
"""Let `python3` of an image import Phalanx, which its pods and its init containers do. Run by root in the image, with that Python.

    python3 settle.py [--move]

--move: the files of the package lie in /usr/lib/phalanx/package, where no Debian has configured it: move them to where they run, and let
them run by this Python.
"""

import os
import platform
import re
import sys
import sysconfig
from pathlib import Path

PLACE = Path("/usr/lib/phalanx")
COMMAND = Path("/usr/bin/phalanx")


def main() -> None:
    """Find the package, let it run by this Python if asked to, and name its folder to `python3`."""
    build = (COMMAND.parent / os.readlink(COMMAND)).resolve().parent.parent
    found = build if build.exists() else PLACE / "package"
    (needed,) = (one.name for one in (found / "lib").iterdir() if one.name.startswith("python"))
    here = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if here != needed or platform.libc_ver()[0] != "glibc":
        libc = platform.libc_ver()[0] or "another libc"
        sys.exit(f"phalanx: this image has {here} with {libc}, and the package needs {needed} with glibc")
    if "--move" in sys.argv[1:]:
        found.rename(build)
        python = build / "bin/python"
        python.unlink()
        python.symlink_to(sys.executable)
        settings = build / "pyvenv.cfg"
        home = re.sub("(?m)^home = .*$", f"home = {Path(sys.executable).parent}", settings.read_text())
        settings.write_text(home)
    folder = Path(sysconfig.get_path("purelib"))
    # Debian's Python reads this one for what is no package of Debian.
    if "dist-packages" in str(folder) and not str(folder).startswith("/usr/local"):
        folder = Path(f"/usr/local/lib/{here}/dist-packages")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "phalanx.pth").write_text(f"{build / 'lib' / needed / 'site-packages'}\n")


main()
