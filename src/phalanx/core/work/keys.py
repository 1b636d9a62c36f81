"""The keys of a job file or request: the kind of value of each, common synonyms, and the error for an unknown one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest import nearest


class Kind(enum.Enum):
    """The kind of value of a key. TEXT keeps the words as written, so that `1.10`, `010` and `no` stay what the user typed."""

    TEXT = "text"
    WORDS = "words"  # text, or a list of words
    LIST = "list"  # one item, or a list of items
    NUMBER = "number"  # a whole number
    FLAG = "flag"
    MAYBE_TABLE = "maybe table"  # text, or a mapping of names to texts
    TABLE = "table"  # a mapping of names to texts, or a list of NAME=text


KEYS: Final[Mapping[str, Kind]] = {
    "name": Kind.TEXT,
    "run": Kind.WORDS,
    "gpus": Kind.TEXT,
    "nodes": Kind.NUMBER,
    "gpus_per_node": Kind.NUMBER,
    "cpus": Kind.NUMBER,
    "memory": Kind.TEXT,
    "tasks_per_node": Kind.NUMBER,
    "workdir": Kind.TEXT,
    "env": Kind.TABLE,
    "setup": Kind.TEXT,
    "project": Kind.TEXT,
    "queue": Kind.TEXT,
    "priority": Kind.NUMBER,
    "time": Kind.TEXT,
    "retry": Kind.NUMBER,
    "checkpoint": Kind.TEXT,
    "warm": Kind.FLAG,
    "hold": Kind.FLAG,
    "grace": Kind.TEXT,
    "collective_timeout": Kind.TEXT,
    "upload": Kind.TEXT,
    "labels": Kind.TABLE,
    "depends_on": Kind.LIST,
    "array": Kind.TEXT,
    "begin": Kind.TEXT,
    "within": Kind.TEXT,
    "prefer": Kind.TEXT,
    "slice": Kind.NUMBER,
    "slice_within": Kind.TEXT,
    "preemptible": Kind.FLAG,
    "saves_on_stop": Kind.FLAG,
    "reservation": Kind.TEXT,
    "plan": Kind.MAYBE_TABLE,
    "requirements": Kind.TEXT,
    "image": Kind.TEXT,
    "nodelist": Kind.TEXT,
    "exclude": Kind.TEXT,
    "slurm": Kind.TABLE,
}

# Names of the same key in other tools, for a helpful error message.
_SYNONYMS: Final = {
    "gpus": ("accelerators", "gpu", "gres", "num_gpus"),
    "depends_on": ("after", "dependencies", "dependency"),
    "run": ("args", "cmd", "command", "entrypoint", "script"),
    "image": ("container",),
    "cpus": ("cpu",),
    "workdir": ("cwd", "directory", "working_dir"),
    "env": ("environment", "env_vars", "envs"),
    "begin": ("not_before", "start_after"),
    "retry": ("max_retries", "restarts", "retries"),
    "memory": ("mem",),
    "nodes": ("num_nodes",),
    "tasks_per_node": ("nproc_per_node", "ntasks_per_node"),
    "queue": ("partition",),
    "time": ("time_limit", "timeout", "walltime"),
    "slice": ("slices", "segment"),
    "within": ("topology", "switches"),
    "preemptible": ("preemptable",),
    "requirements": ("packages", "pip", "requires"),
    "plan": ("layout", "parallelism", "parallel"),
}
_KEY_OF: Final = {synonym: key for key, synonyms in _SYNONYMS.items() for synonym in synonyms}


class BadKey(BadFile):
    """A key is unknown or its value invalid. `key` is as written, so that callers can name the line or flag."""

    def __init__(self, message: str, *, key: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


def unknown_key(key: str) -> BadKey:
    """The error for an unknown key, with the nearest match."""
    near = _KEY_OF.get(key.lower().replace("-", "_")) or nearest(key, [*KEYS])
    hint = f"did you mean {near!r}?" if near else f"known keys: {' '.join(KEYS)}"
    return BadKey(f"unknown key {key!r}", key=key, hint=hint)


def refuse_key(key: object) -> None:
    """Reject an unknown key.

    Raises:
        BadKey: the key is unknown.
    """
    if not isinstance(key, str):
        raise BadKey(f"a key must be a word, not {key!r}", key=str(key))
    if key not in KEYS:
        raise unknown_key(key)
