"""The keys of a job file or request: the kind of value of each, common synonyms, and the error for an unknown one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadFile


class ValueKind(enum.Enum):
    """The kind of value of a key. TEXT keeps the words as written, so that `1.10`, `010` and `no` stay what the user typed."""

    TEXT = "text"
    TEXT_OR_WORDS = "words"  # text, or a list of words
    LIST = "list"  # one item, or a list of items
    NUMBER = "number"  # a whole number
    FLAG = "flag"
    TEXT_OR_MAPPING = "maybe table"  # text, or a mapping of names to texts
    LIST_OR_MAPPING = "maybe list"  # one item, a list of items, or a mapping of names to texts or lists of texts
    TABLE_OF_LISTS = "table of lists"  # a mapping of names to texts or lists of texts
    TABLE = "table"  # a mapping of names to texts, or a list of NAME=text


KEY_KINDS: Final[Mapping[str, ValueKind]] = {
    "name": ValueKind.TEXT,
    "run": ValueKind.TEXT_OR_WORDS,
    "gpus": ValueKind.TEXT,
    "nodes": ValueKind.NUMBER,
    "gpus_per_node": ValueKind.NUMBER,
    "share": ValueKind.TEXT,
    "cpus": ValueKind.NUMBER,
    "memory": ValueKind.TEXT,
    "resources": ValueKind.TEXT_OR_MAPPING,
    "tasks_per_node": ValueKind.NUMBER,
    "workdir": ValueKind.TEXT,
    "env": ValueKind.TABLE,
    "setup": ValueKind.TEXT,
    "project": ValueKind.TEXT,
    "queue": ValueKind.TEXT,
    "priority": ValueKind.NUMBER,
    "time": ValueKind.TEXT,
    "idle": ValueKind.TEXT,
    "terminal": ValueKind.FLAG,
    "retry": ValueKind.NUMBER,
    "checkpoint": ValueKind.TEXT,
    "outputs": ValueKind.TEXT,
    "warm": ValueKind.FLAG,
    "hold": ValueKind.FLAG,
    "allow_never": ValueKind.FLAG,
    "grace": ValueKind.TEXT,
    "collective_timeout": ValueKind.TEXT,
    "upload": ValueKind.TEXT,
    "secrets": ValueKind.LIST,
    "ports": ValueKind.LIST_OR_MAPPING,
    "notify": ValueKind.LIST_OR_MAPPING,
    "on_end": ValueKind.TEXT_OR_MAPPING,
    "labels": ValueKind.TABLE,
    "depends_on": ValueKind.LIST,
    "array": ValueKind.TEXT,
    "begin": ValueKind.TEXT,
    "within": ValueKind.TEXT,
    "prefer": ValueKind.TEXT,
    "slice": ValueKind.NUMBER,
    "slice_within": ValueKind.TEXT,
    "preemptible": ValueKind.FLAG,
    "saves_on_stop": ValueKind.FLAG,
    "reservation": ValueKind.TEXT,
    "plan": ValueKind.TEXT_OR_MAPPING,
    "requirements": ValueKind.TEXT,
    "software": ValueKind.TABLE_OF_LISTS,
    "data": ValueKind.TABLE,
    "image": ValueKind.TEXT,
    "nodelist": ValueKind.TEXT,
    "exclude": ValueKind.TEXT,
    "slurm": ValueKind.TABLE,
    "speeds": ValueKind.TABLE,
    "planned_speeds": ValueKind.TABLE,
    "type": ValueKind.TEXT,
    "replicas": ValueKind.TEXT,
    "port": ValueKind.TEXT,
    "ready": ValueKind.TEXT,
    "ready_within": ValueKind.TEXT,
    "sleep": ValueKind.TEXT,
    "wake": ValueKind.TEXT,
    "scale": ValueKind.TABLE,
    "update": ValueKind.TEXT_OR_MAPPING,
    "prefill_for": ValueKind.TEXT_OR_MAPPING,
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
    "idle": ("idle_timeout", "idle_minutes_to_autostop", "inactivity_duration"),
    "terminal": ("tty", "pty", "interactive"),
    "time": ("time_limit", "timeout", "walltime"),
    "slice": ("slices", "segment"),
    "within": ("topology", "switches"),
    "preemptible": ("preemptable",),
    "requirements": ("packages", "pip", "requires"),
    "software": ("conda", "module", "lockfile", "modules", "uv", "venv", "virtualenv"),
    "data": ("dataset", "datasets", "inputs", "file_mounts"),
    "plan": ("layout", "parallelism", "parallel"),
    "scale": ("autoscaling", "autoscale", "replica_policy"),
    "update": ("rollout", "strategy", "update_config"),
    "ready": ("readiness", "readiness_probe", "health"),
    "ports": ("expose", "web_ports"),
    "notify": ("email", "mail", "mail_user", "notifications", "on_failure"),
    "on_end": ("epilog", "epilogue", "on_exit", "post_exec", "teardown"),
    "resources": ("extras", "licences", "licenses", "scratch", "tmp"),
}
KEY_OF_SYNONYM: Final[Mapping[str, str]] = {
    synonym.replace("_", ""): key for key, synonyms in _SYNONYMS.items() for synonym in synonyms
}


class InvalidKey(BadFile):
    """A key is unknown or its value invalid. `key` is as written, so that callers can name the line or flag."""

    def __init__(self, message: str, *, key: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


def unknown_key_error(key: str) -> InvalidKey:
    """The error for an unknown key, with the nearest match."""
    from phalanx.core.work.nearest_match import unknown_key_hint  # most keys are known

    return InvalidKey(f"unknown key {key!r}", key=key, hint=unknown_key_hint(key, KEY_KINDS, KEY_OF_SYNONYM))


def check_key(key: object) -> None:
    """Reject an unknown key.

    Raises:
        InvalidKey: the key is unknown.
    """
    if not isinstance(key, str):
        raise InvalidKey(f"a key must be a word, not {key!r}", key=str(key))
    if key not in KEY_KINDS:
        raise unknown_key_error(key)
