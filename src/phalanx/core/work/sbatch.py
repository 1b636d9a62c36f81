"""The words of an `#SBATCH` script: which lines count, which options they hold, and what each is to Phalanx. Pure.

Source: sbatch(1) of Slurm 22.05, and what its `sbatch` does with the scripts of tests/unit/test_sbatch.py. What the options mean for a job is
in `sbatch_job`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest import nearest

_MARK: Final = "#SBATCH"
SCRIPT_LINES_MAX: Final = 10_000  # looked through for directives; they end at the first command


class Takes(enum.Enum):
    """Whether an option is followed by a value."""

    NO = "no"
    YES = "yes"
    MAYBE = "maybe"  # only as --option=value


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `unmet`: why Phalanx does not do what it says, for people; empty for one that is honoured."""

    name: str
    short: str = ""
    takes: Takes = Takes.YES
    unmet: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One option as written. `line` counts from 1; 0 for one from elsewhere."""

    name: str
    value: str
    line: int


def _honoured() -> tuple[Option, ...]:
    yes = (
        ("job-name", "J"), ("nodes", "N"), ("ntasks", "n"), ("ntasks-per-node", ""), ("cpus-per-task", "c"), ("gpus", "G"),
        ("gpus-per-node", ""), ("gpus-per-task", ""), ("ntasks-per-gpu", ""), ("gres", ""), ("mem", ""), ("mem-per-cpu", ""),
        ("mem-per-gpu", ""), ("time", "t"), ("output", "o"), ("error", "e"), ("open-mode", ""), ("array", "a"),
        ("dependency", "d"), ("begin", "b"), ("signal", ""), ("chdir", "D"), ("nodelist", "w"), ("exclude", "x"),
        ("reservation", ""), ("comment", ""), ("export", ""), ("nice", ""), ("partition", "p"), ("account", "A"),
    )  # fmt: skip
    flags = (("hold", "H"), ("requeue", ""), ("parsable", ""), ("quiet", "Q"), ("verbose", "v"))
    kinds = {"nice": Takes.MAYBE}
    return tuple(
        Option(name=name, short=short, takes=kinds.get(name, Takes.YES)) for name, short in yes
    ) + tuple(Option(name=name, short=short, takes=Takes.NO) for name, short in flags)  # fmt: skip


_NO_BINDING: Final = "tasks are not bound to cores, sockets or memory"
_SHARED: Final = "nodes are shared by device: others may be on those the job leaves free"
_NO_MAIL: Final = "Phalanx sends no mail"
_UNMET: Final = (
    ("exclusive", "", Takes.MAYBE, _SHARED), ("oversubscribe", "s", Takes.NO, "a device is never shared by two jobs"),
    ("overcommit", "O", Takes.NO, "CPUs are granted once"), ("qos", "q", Takes.YES, "queues and priorities take its place; see --queue"),
    ("constraint", "C", Takes.YES, "features are Slurm's; a GPU model goes with the number: --gpus-per-node=a100:4"),
    ("prefer", "", Takes.YES, "features are Slurm's"), ("licenses", "L", Takes.YES, "licences are not counted"),
    ("mail-type", "", Takes.YES, _NO_MAIL), ("mail-user", "", Takes.YES, _NO_MAIL),
    ("no-requeue", "", Takes.NO, "a job whose node is lost is placed again, and resumes"),
    ("no-kill", "k", Takes.MAYBE, "a gang that lost a node starts again whole"),
    ("wait", "W", Takes.NO, "phalanx submit --wait does it"), ("test-only", "", Takes.NO, "phalanx submit --dry-run does it"),
    ("switches", "", Takes.YES, "--within leaf or --prefer leaf say it"), ("contiguous", "", Takes.NO, "neighbours are taken anyway where they are free"),
    ("spread-job", "", Takes.NO, "gangs are placed close together"), ("use-min-nodes", "", Takes.NO, "gangs are placed on few nodes anyway"),
    ("distribution", "m", Takes.YES, "ranks go node by node (block)"), ("mem-bind", "", Takes.YES, _NO_BINDING),
    ("hint", "", Takes.YES, _NO_BINDING), ("threads-per-core", "", Takes.YES, _NO_BINDING), ("cores-per-socket", "", Takes.YES, _NO_BINDING),
    ("sockets-per-node", "", Takes.YES, _NO_BINDING), ("ntasks-per-socket", "", Takes.YES, _NO_BINDING),
    ("ntasks-per-core", "", Takes.YES, _NO_BINDING), ("extra-node-info", "B", Takes.YES, _NO_BINDING),
    ("gpus-per-socket", "", Takes.YES, _NO_BINDING), ("cpus-per-gpu", "", Takes.YES, "give --cpus-per-task"),
    ("gpu-bind", "", Takes.YES, "every task sees the devices of its job on its node, or with --gpus-per-task its own"),
    ("gpu-freq", "", Takes.YES, "clocks are left alone"), ("cpu-freq", "", Takes.YES, "clocks are left alone"),
    ("core-spec", "S", Takes.YES, _NO_BINDING), ("thread-spec", "", Takes.YES, _NO_BINDING), ("mincpus", "", Takes.YES, "give --cpus-per-task"),
    ("tmp", "", Takes.YES, "disk is not counted"), ("deadline", "", Takes.YES, "a job is not removed for being late"),
    ("delay-boot", "", Takes.YES, "nodes are not booted"), ("reboot", "", Takes.NO, "nodes are not booted"),
    ("priority", "", Takes.YES, "--nice lowers it, phalanx submit --priority sets it"), ("wckey", "", Takes.YES, "--comment is kept as a label"),
    ("profile", "", Takes.YES, "steps and devices are sampled anyway"), ("acctg-freq", "", Takes.YES, "devices are sampled each second"),
    ("propagate", "", Takes.MAYBE, "limits are the node's"), ("get-user-env", "", Takes.MAYBE, "the environment travels with --export"),
    ("network", "", Takes.YES, "the network is left alone"), ("power", "", Takes.YES, "power is left alone"),
    ("mcs-label", "", Takes.YES, "there are no such labels"), ("kill-on-invalid-dep", "", Takes.YES, "a job whose parent failed ends by itself"),
    ("input", "i", Takes.YES, "the script reads nothing from its standard input"), ("export-file", "", Takes.YES, "the environment travels with --export"),
    ("bb", "", Takes.YES, "there are no burst buffers"), ("bbf", "", Takes.YES, "there are no burst buffers"),
    ("ignore-pbs", "", Takes.NO, "other schedulers' lines are never read"), ("x11", "", Takes.MAYBE, "there is no display"),
    ("cluster-constraint", "", Takes.YES, "there is one cluster"), ("nodefile", "F", Takes.YES, "give --nodelist"),
    ("tres-per-task", "", Takes.YES, "give --gpus-per-task"), ("usage", "", Takes.NO, "see docs/slurm.md"),
)  # fmt: skip
_REFUSED: Final = {
    "clusters": "there is one cluster, this one", "container": "this release runs the job on the node itself", "wrap": "there is a script already",
    "uid": "a job runs as who submits it", "gid": "a job runs as who submits it", "burst-buffer": "there are no burst buffers",
}  # fmt: skip
_REFUSED_SHORT: Final = {"M": "clusters"}
OPTIONS: Final = {
    option.name: option
    for option in (
        *_honoured(),
        *(Option(name=name, short=short, takes=takes, unmet=why) for name, short, takes, why in _UNMET),
    )
}
_SHORT: Final = {option.short: option for option in OPTIONS.values() if option.short}


def looks_like_script(text: str) -> bool:
    """Whether a text is a script with an `#SBATCH` line that counts."""
    return text.startswith("#!") and any(True for _ in _directives(text))


def read_options(text: str) -> tuple[Given, ...]:
    """The options of a script, in the order written; where one is given twice, the later counts.

    Raises:
        BadFile: no `#!` in the first line, an option that Slurm does not have, one that cannot be done here at all, or a heterogeneous job.
    """
    if not text.startswith("#!"):
        raise BadFile(
            "this is no batch script: its first line does not begin with #! and the path of an interpreter",
            hint="#!/bin/bash",
        )
    found: dict[str, Given] = {}
    for line, words in _directives(text):
        if words[:1] in (["hetjob"], ["packjob"]):
            raise BadFile(
                f"line {line}: heterogeneous jobs are not understood by this release",
                hint="submit the parts one by one",
            )
        for given in options_of(words, line):
            found.pop(given.name, None)
            found[given.name] = given
    return tuple(found.values())


def options_of(words: Sequence[str], line: int = 0) -> list[Given]:
    """The options of one line.

    Raises:
        BadFile: as `read_options`.
    """
    found: list[Given] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            option = _named(name[2:], line)
        elif word.startswith("-") and len(word) > 1:
            option = _lettered(word[1], line)
            equals, value = ("=", word[2:].removeprefix("=")) if len(word) > 2 else ("", "")
            if option.takes is Takes.NO and value:  # letters of flags may stand together: -Hv
                left.insert(0, f"-{value}")
                equals, value = "", ""
        else:
            raise BadFile(f"{_at(line)}{word!r} is no option", hint="an option begins with - or --")
        if option.takes is Takes.YES and not equals:
            if not left:
                raise BadFile(f"{_at(line)}--{option.name} has no value")
            value = left.pop(0)
        found.append(Given(name=option.name, value=value, line=line))
    return found


def _directives(text: str) -> list[tuple[int, list[str]]]:
    """Lines that begin with #SBATCH, up to the first command, as words."""
    found: list[tuple[int, list[str]]] = []
    for number, raw in enumerate(text.splitlines()[:SCRIPT_LINES_MAX], start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            break
        if raw.startswith(_MARK) and raw[len(_MARK) : len(_MARK) + 1] in {" ", "\t", ""}:
            words = _words(raw[len(_MARK) :], number)
            if words:
                found.append((number, words))
    return found


def _words(text: str, line: int) -> list[str]:
    """Words as a shell has them: quotes, backslashes, and a comment from a # that begins a word.

    Raises:
        BadFile: a quotation is not closed.
    """
    found: list[str] = []
    word, begun, quote, place = "", False, "", 0
    while place < len(text):
        char = text[place]
        place += 1
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and text[place : place + 1] in {'"', "\\"}:
                word, place = word + text[place], place + 1
            else:
                word += char
        elif char in {"'", '"'}:
            quote, begun = char, True
        elif char.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        elif char == "#" and not begun:
            return found
        elif char == "\\" and place < len(text):
            word, begun, place = word + text[place], True, place + 1
        else:
            word, begun = word + char, True
    if quote:
        raise BadFile(f"line {line}: a quotation {quote} is not closed")
    return [*found, word] if begun else found


def _named(name: str, line: int) -> Option:
    if name in _REFUSED:
        raise BadFile(f"{_at(line)}--{name} cannot be done here: {_REFUSED[name]}")
    option = OPTIONS.get(name)
    if option is not None:
        return option
    begun = [option for known, option in OPTIONS.items() if known.startswith(name)]
    if len(begun) == 1:  # as getopt_long takes it
        return begun[0]
    near = nearest(name, OPTIONS)
    raise BadFile(
        f"{_at(line)}sbatch has no option --{name}", hint=f"did you mean --{near}?" if near else "man sbatch lists them"
    )


def _lettered(letter: str, line: int) -> Option:
    if letter in _REFUSED_SHORT:
        return _named(_REFUSED_SHORT[letter], line)
    option = _SHORT.get(letter)
    if option is None:
        raise BadFile(f"{_at(line)}sbatch has no option -{letter}", hint="man sbatch lists them")
    return option


def _at(line: int) -> str:
    return f"line {line}: " if line else ""
