"""Find programs whose tasks would each be an MPI world of size 1, because no MPI launcher starts them. Pure: the shell reads the files.

Such a job would end with exit code 0 and a wrong result.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable
from typing import Final

from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.job_file.launchers import MPI_LAUNCHERS, count_logical_lines, find_launcher, split_commands
from phalanx.core.work.spec import LaunchMode

_MPI_LIBRARIES: Final = ("libmpi.so", "libmpich.so", "libmpi_cxx.so", "libmpi_mpifh.so", "libmpifort.so")
_ELF_64_LITTLE: Final = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2  # Source: elf(5)
_DT_NEEDED, _DT_STRTAB = 1, 5
_NAME_BYTES_MAX: Final = 255
_HEADER_BYTES: Final = 64
_SEGMENTS_MAX: Final = 128  # a dozen is usual
_DYNAMIC_BYTES_MAX: Final = 1 << 16


def independent_tasks(prepare: PrepareTasks) -> int:
    """Return how many tasks Phalanx starts by itself, each of which would be an MPI world of its own; 0 for one, and for launchers."""
    spec = prepare.spec
    own = spec.role.launch in {LaunchMode.PER_DEVICE, LaunchMode.FIXED} and not spec.slurm and spec.service is None
    tasks = prepare.allocation.world_size
    return tasks if own and tasks > 1 else 0


def python_world(tree: ast.Module) -> int | None:
    """Return the line where a Python program imports mpi4py unconditionally, or None. An import in a `try` or a function is optional."""
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.partition(".")[0] == "mpi4py" for name in names):
            return node.lineno
    return None


def shell_world(text: str) -> str | None:
    """Return the MPI launcher that a shell script calls, or None."""
    if not count_logical_lines(text):
        return None
    found = (find_launcher((), command) for command in split_commands(text))
    return next((launcher for launcher in found if launcher in MPI_LAUNCHERS), None)


def mpi_library(read: Callable[[int, int], bytes]) -> str | None:
    """Return the MPI library that an executable needs, or None: also for a file that is not an ELF executable of 64 bits.

    Args:
        read: returns so many bytes of the file from an offset; fewer at its end.
    """
    try:
        return next((name for name in _needed(read) if name.startswith(_MPI_LIBRARIES)), None)
    except (struct.error, ValueError, IndexError, StopIteration):
        return None


def _needed(read: Callable[[int, int], bytes]) -> list[str]:
    """Return the shared libraries of an ELF file, from its dynamic section."""
    header = read(0, _HEADER_BYTES)
    if header[:6] != _ELF_64_LITTLE:
        return []
    (offset,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    count = min(count, _SEGMENTS_MAX)
    table = read(offset, size * count)
    segments = [struct.unpack_from("<IIQQQQQ", table, index * size) for index in range(count)]
    loads = [(at, address, length) for kind, _, at, address, _, length, _ in segments if kind == _PT_LOAD]
    dynamic = next(((at, length) for kind, _, at, _, _, length, _ in segments if kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return []
    section = read(dynamic[0], min(dynamic[1], _DYNAMIC_BYTES_MAX))
    entries = [struct.unpack_from("<qQ", section, at) for at in range(0, len(section), 16)]
    strings = next(value for tag, value in entries if tag == _DT_STRTAB)
    base = next(at + strings - address for at, address, length in loads if address <= strings < address + length)
    names = [read(base + value, _NAME_BYTES_MAX) for tag, value in entries if tag == _DT_NEEDED]
    return [name.split(b"\0", 1)[0].decode("ascii", "replace") for name in names]
