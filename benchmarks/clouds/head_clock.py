"""The wall clock of the head of a campaign, which can be set while the head runs: a small library that the head preloads adds an offset to it.

CLOCK_BOOTTIME and the other monotonic clocks are not touched, as when an operator or NTP sets a machine's clock. Needs a C compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("wall_clock.c")
# Offsets from the true time; the next is never the present one.
JUMPS_S: Final = (-9 * 3600, -3600, -70, 0, 45, 3600, 11 * 3600)


class HeadClock:
    """See the module. `folder`: for the library and the offset. `offset_s`: of the wall clock of processes that have `environment`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemExit("a campaign that sets the clock needs a C compiler: make compiler-tools, or --jumps 0")
        library, self._file = folder / "wall_clock.so", folder / "offset_s"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CAMPAIGN_CLOCK": str(self._file)}
        self.offset_s = 0
        self._file.write_bytes(bytes(8))

    def set(self, offset_s: int) -> None:
        """Set the clock. Processes that run see it at their next look."""
        self.offset_s = offset_s
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(offset_s.to_bytes(8, "little", signed=True))
