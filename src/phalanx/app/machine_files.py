"""What a head serves to rented machines: the program that `supervisor_files` packs, made once in the life of a head, by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Final

_LIMIT_S: Final = 120.0


@dataclass(slots=True, kw_only=True)
class MachineFiles:
    """The file of one head. Thread-safe.

    Attributes:
        path: where it is, with the ending `.tar.gz`.
    """

    path: str
    _made: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> str:
        """Return the path of the file, which is made if this head has not made it: an earlier head may have had another release.

        Raises:
            OSError: it cannot be made.
        """
        with self._guard:
            if not self._made or not os.path.exists(self.path):
                command = [sys.executable, "-P", "-m", "phalanx.app.supervisor_files", self.path]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
                except subprocess.TimeoutExpired as error:
                    raise OSError(f"the files for machines were not packed within {_LIMIT_S:g} s") from error
                if done.returncode != 0:
                    raise OSError(f"the files for machines cannot be packed: {done.stderr.strip()[-300:]}")
                self._made = True
            return self.path
