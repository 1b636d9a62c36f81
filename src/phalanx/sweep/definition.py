"""What a sweep is, and its folder: the definition is written once, and one process at a time works on the sweep."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from phalanx.core.errors import BadFile, Conflict, NotFound
from phalanx.core.work.nearest_match import suggestion
from phalanx.sweep.space import SweepParameter

SEARCHES: Final = ("random", "grid", "tpe")
METRICS: Final = ("loss", "step-time")
_FILE, _LOCK, _JOURNAL = "sweep.json", "lock", "trials.log"


class SweepDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep as its first command described it.

    Attributes:
        id: in the idempotency keys and labels of its jobs.
        job: keys of the job file of every trial, before its values are filled in.
        append: whether the values are added to the command as options.
        samples: number of trials.
        min_steps: the step at which ASHA compares first; 0 to derive it from the length of a trial.
        eta: of that many trials that ASHA compares, one goes on.
        head_id: the head that has its jobs.
    """

    id: str
    name: str
    parameters: tuple[SweepParameter, ...]
    job: dict[str, object]
    append: bool
    samples: int
    search: str = "random"
    seed: int = 0
    metric: str = "loss"
    maximize: bool = False
    asha: bool = False
    min_steps: int = 0
    eta: int = 3
    max_parallel: int = 1
    head_id: str = ""

    def describes_same(self, other: SweepDefinition) -> bool:
        """Whether both are the same sweep, apart from its id and how many trials run at once."""
        neutral = {"id": "", "max_parallel": 0}
        return msgspec.structs.replace(self, **neutral) == msgspec.structs.replace(other, **neutral)


def sweeps_folder() -> str:
    """Return the user's folder of sweeps."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"), "phalanx", "sweeps")


def sweep_names() -> list[str]:
    """Return the names of this user's sweeps, newest first."""
    folder = sweeps_folder()
    found = {name: os.path.join(folder, name, _FILE) for name in (os.listdir(folder) if os.path.isdir(folder) else ())}
    there = {name: os.stat(path).st_mtime for name, path in found.items() if os.path.isfile(path)}
    return sorted(there, key=lambda name: (-there[name], name))


def journal_path(name: str) -> str:
    """Return the file in which Optuna keeps the trials of a sweep."""
    return os.path.join(sweeps_folder(), name, _JOURNAL)


def read_definition(name: str) -> SweepDefinition:
    """Return the definition of a sweep of this user.

    Raises:
        NotFound: there is no such sweep.
        BadFile: its file is damaged.
    """
    path = os.path.join(sweeps_folder(), name, _FILE)
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=SweepDefinition)
    except (FileNotFoundError, NotADirectoryError):
        names = sweep_names()
        hint = suggestion(name, names, f"sweeps: {', '.join(names[:10])}" if names else "none was started here")
        raise NotFound(f"no sweep {name[:80]!r}", hint=hint) from None
    except msgspec.MsgspecError as error:
        raise BadFile(f"{path}: not a sweep: {error}") from error


def write_definition(made: SweepDefinition) -> None:
    """Write the definition of a new sweep; the caller holds its lock."""
    path = os.path.join(sweeps_folder(), made.name, _FILE)
    with open(f"{path}.new", "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


@contextlib.contextmanager
def locked_sweep(name: str) -> Iterator[None]:
    """Hold the sweep: no other process of this user starts or stops its trials meanwhile. The system releases it with the process.

    Raises:
        Conflict: another process holds it.
    """
    folder = os.path.join(sweeps_folder(), name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    held = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another process works on the sweep {name}", hint="wait until it has ended, or end it with Ctrl-C"
            ) from None
        yield
    finally:
        os.close(held)
