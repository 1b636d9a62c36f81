"""The Logs port on files: <root>/<job>/<epoch>/<stream>.log, appended at an offset, synced before anything is acknowledged.

A file may be longer than what was acknowledged (a crash between write and sync): its end is the truth, and what is sent again is
trimmed to what is new. Bytes of a file that another life of the head wrote count as held only after they were synced once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import batched
