"""The command of a job: as words or as a shell text, how often it starts, and the name of the job by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from phalanx.core.work.job_file.key_values import PRINTABLE, read_text, read_word
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.launchers import MPI_LAUNCHERS, count_logical_lines, find_launcher, split_commands
from phalanx.core.work.spec import LaunchMode

JOB_NAME_MAX: Final = 128
_PLAIN_WORDS: Final = re.compile(r"[A-Za-z0-9_./:=,@%+\- ]+")
_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*|bash|sh|zsh|torchrun|deepspeed|accelerate|mpirun|mpiexec|uv|env")
# Builtins and keywords of the shell.
_SHELL_FIRST: Final = frozenset(
    {
        ".",
        ":",
        "[",
        "alias",
        "bg",
        "break",
        "builtin",
        "case",
        "cd",
        "command",
        "continue",
        "coproc",
        "declare",
        "dirs",
        "do",
        "done",
        "elif",
        "else",
        "enable",
        "esac",
        "eval",
        "exec",
        "exit",
        "export",
        "fg",
        "fi",
        "for",
        "function",
        "getopts",
        "hash",
        "help",
        "history",
        "if",
        "jobs",
        "let",
        "local",
        "logout",
        "mapfile",
        "popd",
        "pushd",
        "read",
        "readarray",
        "readonly",
        "return",
        "select",
        "set",
        "shift",
        "shopt",
        "source",
        "suspend",
        "test",
        "then",
        "time",
        "times",
        "trap",
        "type",
        "typeset",
        "ulimit",
        "umask",
        "unalias",
        "unset",
        "until",
        "wait",
        "while",
    }
)


def command_of(given: Mapping[str, object]) -> tuple[tuple[str, ...], str]:
    """The command as words, or as a shell text; exactly one of the two is not empty.

    A single line of plain words is split here: then no shell runs between the supervisor and the task, and Python ranks may start warm.

    Raises:
        InvalidKey: there is no command.
    """
    value = given.get("run")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        words = tuple(read_word(item, "run") for item in value)
        if not words or not words[0].strip():
            _no_command()
        return words, ""
    text = read_text(given, "run")
    if not text.strip():
        _no_command()
    words = plain_command_words(text)
    return (words, "") if words else ((), text)


def plain_command_words(text: str) -> tuple[str, ...]:
    """The words of a command that needs no shell; empty for any other text."""
    line = text.strip()
    words = tuple(line.split()) if _PLAIN_WORDS.fullmatch(line) else ()
    return words if words and words[0] not in _SHELL_FIRST and "=" not in words[0] else ()


def _no_command() -> NoReturn:
    raise InvalidKey(
        "run: the command is missing", key="run", hint="write run: python train.py, or put the command after --"
    )


def launch_mode_of(argv: tuple[str, ...], script: str, tasks_per_node: int | None, *, starts_alone: bool) -> LaunchMode:
    """How often the command starts. `starts_alone`: a batch script or a server, which starts once on a node whatever it calls."""
    launcher = find_launcher(argv, script)
    if launcher in MPI_LAUNCHERS and not starts_alone:
        return LaunchMode.ONCE
    if tasks_per_node is not None:
        return LaunchMode.FIXED
    if script and count_logical_lines(script) > 1:
        raise InvalidKey(
            "run: the script has several lines; state how often it starts on each node",
            key="run",
            hint="add tasks_per_node: 1 to start it once per node, or give the number of tasks per node",
        )
    return LaunchMode.PER_NODE if launcher else LaunchMode.PER_DEVICE


def job_name_of(given: Mapping[str, object], argv: tuple[str, ...], script: str) -> str:
    """The name that is given, else the program or script of the command. `argv` and `script` as of `command_of`."""
    name = read_text(given, "name").strip()
    if name:
        if len(name) > JOB_NAME_MAX or not PRINTABLE.fullmatch(name):
            raise InvalidKey(
                f"name: {name[:40]!r} is longer than {JOB_NAME_MAX} characters or contains unprintable ones", key="name"
            )
        return name
    words = argv or next(
        (words for command in split_commands(script) if (words := tuple(command.split()))[0] not in _SHELL_FIRST), ()
    )
    chosen = words[0] if words else "job"
    if _INTERPRETER.fullmatch(chosen.rsplit("/", 1)[-1]):
        chosen = next(
            (word for word in words[1:] if word.endswith((".py", ".sh")) and not word.startswith("-")), chosen
        )
    base = chosen.rstrip("/").rsplit("/", 1)[-1] or "job"
    return "".join(PRINTABLE.findall(base))[:JOB_NAME_MAX].strip() or "job"
