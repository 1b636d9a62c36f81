"""Parses the options of an `#SBATCH` script: which lines count, which options they contain, and whether Phalanx honours them. Pure.

Source: sbatch(1) of Slurm 22.05, and the behaviour of its `sbatch` with the scripts of tests/unit/test_sbatch.py. `sbatch_job` maps the
options to a job.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest_match import nearest_match

_MARK: Final = "#SBATCH"
HET_WORDS: Final = ("hetjob", "packjob")  # the newer and the older word between two components
COMPONENTS_MAX: Final = 128  # MAX_HET_JOB_COMPS of Slurm's slurm_protocol_defs
SCRIPT_LINES_MAX: Final = 10_000  # searched for directives; they end at the first command


class OptionArity(enum.Enum):
    """Whether an option is followed by a value."""

    NO = "no"
    YES = "yes"
    MAYBE = "maybe"  # only as --option=value


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOption:
    """One option. `unsupported_reason`: why Phalanx does not honour it, for users; empty if it does. `meaning`: what it does if it does."""

    name: str
    short: str = ""
    takes: OptionArity = OptionArity.YES
    unsupported_reason: str = ""
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOption:
    """One option as written. `line` counts from 1; 0 if it is not from the script. `earlier`: of an option of CUMULATIVE, those before it."""

    name: str
    value: str
    line: int
    earlier: tuple[ParsedOption, ...] = ()


# name, short, takes a value, what it does here
_HONOURED: Final = (
    ("job-name", "J", OptionArity.YES, "name"),
    ("nodes", "N", OptionArity.YES, "nodes; of a range the lower end"),
    ("ntasks", "n", OptionArity.YES, "tasks of the job"),
    ("ntasks-per-node", "", OptionArity.YES, "tasks of each node"),
    ("cpus-per-task", "c", OptionArity.YES, "CPUs of each task"),
    ("cpus-per-gpu", "", OptionArity.YES, "CPUs for each GPU"),
    ("gpus", "G", OptionArity.YES, "GPUs of the job, with a model if given"),
    ("gpus-per-node", "", OptionArity.YES, "GPUs of each node, with a model if given"),
    ("gpus-per-task", "", OptionArity.YES, "GPUs of each task, which sees only its own"),
    ("gres", "", OptionArity.YES, "`gpu`, `mps` and `shard`; others are listed as ignored"),
    ("mem", "", OptionArity.YES, "memory of each node; 0 requests none"),
    ("mem-per-cpu", "", OptionArity.YES, "memory for each CPU"),
    ("mem-per-gpu", "", OptionArity.YES, "memory for each GPU"),
    ("exclusive", "", OptionArity.MAYBE, "all GPUs and CPUs of each node"),
    ("time", "t", OptionArity.YES, "time limit"),
    ("time-min", "", OptionArity.YES, "accepted: a job always gets its whole time limit"),
    ("output", "o", OptionArity.YES, "file of the output"),
    ("error", "e", OptionArity.YES, "file of the error output"),
    ("open-mode", "", OptionArity.YES, "append or truncate"),
    ("array", "a", OptionArity.YES, "array, with `%` elements at once"),
    (
        "dependency",
        "d",
        OptionArity.YES,
        "`afterok`, `afterany`, `afternotok`, `aftercorr`, `singleton`; all must hold",
    ),
    ("begin", "b", OptionArity.YES, "earliest start"),
    ("signal", "", OptionArity.YES, "signal before the time limit, to the script with `B:`, else to the tasks"),
    ("chdir", "D", OptionArity.YES, "working directory"),
    ("nodelist", "w", OptionArity.YES, "these nodes"),
    ("exclude", "x", OptionArity.YES, "not these nodes"),
    ("reservation", "", OptionArity.YES, "on the nodes of this reservation"),
    ("comment", "", OptionArity.YES, "the label `slurm.comment`"),
    ("export", "", OptionArity.YES, "which variables of the shell are passed"),
    ("nice", "", OptionArity.MAYBE, "priority"),
    ("partition", "p", OptionArity.YES, "the queue of that name, if it exists"),
    ("account", "A", OptionArity.YES, "the project of that name, if it exists"),
    ("licenses", "L", OptionArity.YES, "the resources of these names"),
    ("tmp", "", OptionArity.YES, "the resource `scratch`"),
    ("hold", "H", OptionArity.NO, "held until it is released"),
    (
        "mail-type",
        "",
        OptionArity.YES,
        "`BEGIN`, `END`, `FAIL`, `REQUEUE`, `INVALID_DEPEND`, `ALL`; `TIME_LIMIT` with other failures; others are listed as ignored",
    ),
    ("mail-user", "", OptionArity.YES, "mail addresses that are notified"),
    ("requeue", "", OptionArity.NO, "always so"),
    ("quiet", "Q", OptionArity.NO, "accepted"),
    ("verbose", "v", OptionArity.NO, "accepted"),
    ("wait-all-nodes", "", OptionArity.YES, "always so: a script starts when all of its nodes are ready"),
    ("gres-flags", "", OptionArity.YES, "accepted: devices are chosen by their place anyway"),
    ("container-image", "", OptionArity.YES, "the script runs in this image (option of the plugin pyxis)"),
    ("container-mounts", "", OptionArity.YES, "folders that it sees"),
    ("container-workdir", "", OptionArity.YES, "its folder in the image"),
    ("container-name", "", OptionArity.YES, "accepted: each start is a new container"),
    ("container-env", "", OptionArity.YES, "accepted: all variables are passed"),
    ("container-mount-home", "", OptionArity.NO, "it sees the home folder"),
    ("no-container-mount-home", "", OptionArity.NO, "the default"),
    ("container-writable", "", OptionArity.NO, "changes to the image are lost at the end"),
    ("container-remap-root", "", OptionArity.NO, "accepted: the user stays the same"),
    ("no-container-remap-root", "", OptionArity.NO, "the default"),
)
CUMULATIVE: Final = frozenset({"mail-type"})
"""Options of which several lines of a script add up; of others the last counts."""
_ALIASES: Final = {"tasks-per-node": "ntasks-per-node"}
_NO_BINDING: Final = "tasks are not bound to cores, sockets or memory"
_IGNORED: Final = (
    ("parsable", "", OptionArity.NO, "the submit prints the number of the job in its own words"),
    ("wait", "W", OptionArity.NO, "the submit has an option of its own to wait"),
    ("oversubscribe", "s", OptionArity.NO, "a device is never shared by two jobs"),
    ("overcommit", "O", OptionArity.NO, "CPUs are never overcommitted"),
    ("qos", "q", OptionArity.YES, "use queues and priorities"),
    (
        "constraint",
        "C",
        OptionArity.YES,
        "nodes have no Slurm features; only GPU models are read, such as h100|a100, in a script that asks for GPUs",
    ),
    ("prefer", "", OptionArity.YES, "nodes have no Slurm features"),
    ("no-requeue", "", OptionArity.NO, "a job that loses a node is requeued and resumes"),
    ("no-kill", "k", OptionArity.MAYBE, "a gang that loses a node restarts as a whole"),
    ("test-only", "", OptionArity.NO, "request a dry run when you submit"),
    ("switches", "", OptionArity.YES, "request the level leaf: within or prefer"),
    ("contiguous", "", OptionArity.NO, "neighbouring nodes are preferred anyway"),
    ("spread-job", "", OptionArity.NO, "gangs are placed close together"),
    ("use-min-nodes", "", OptionArity.NO, "gangs are placed on as few nodes as possible anyway"),
    ("distribution", "m", OptionArity.YES, "ranks are assigned node by node (block)"),
    ("mem-bind", "", OptionArity.YES, _NO_BINDING),
    ("hint", "", OptionArity.YES, _NO_BINDING),
    ("threads-per-core", "", OptionArity.YES, _NO_BINDING),
    ("cores-per-socket", "", OptionArity.YES, _NO_BINDING),
    ("sockets-per-node", "", OptionArity.YES, _NO_BINDING),
    ("ntasks-per-socket", "", OptionArity.YES, _NO_BINDING),
    ("ntasks-per-core", "", OptionArity.YES, _NO_BINDING),
    ("extra-node-info", "B", OptionArity.YES, _NO_BINDING),
    ("gpus-per-socket", "", OptionArity.YES, _NO_BINDING),
    (
        "gpu-bind",
        "",
        OptionArity.YES,
        "every task sees all devices of its job on its node, or its own with --gpus-per-task",
    ),
    ("gpu-freq", "", OptionArity.YES, "Phalanx does not change clocks"),
    ("cpu-freq", "", OptionArity.YES, "Phalanx does not change clocks"),
    ("core-spec", "S", OptionArity.YES, _NO_BINDING),
    ("thread-spec", "", OptionArity.YES, _NO_BINDING),
    ("mincpus", "", OptionArity.YES, "give --cpus-per-task"),
    ("deadline", "", OptionArity.YES, "jobs have no deadline"),
    ("delay-boot", "", OptionArity.YES, "nodes are not booted"),
    ("reboot", "", OptionArity.NO, "nodes are not booted"),
    ("priority", "", OptionArity.YES, "use --nice"),
    ("wckey", "", OptionArity.YES, "use --comment, which is stored as a label"),
    ("profile", "", OptionArity.YES, "steps and devices are always sampled"),
    ("acctg-freq", "", OptionArity.YES, "devices are sampled each second"),
    ("propagate", "", OptionArity.MAYBE, "resource limits are those of the node"),
    ("get-user-env", "", OptionArity.MAYBE, "use --export to pass the environment"),
    ("batch", "", OptionArity.YES, "the script runs on the first node"),
    ("ntasks-per-gpu", "", OptionArity.YES, "give --ntasks-per-node"),
    ("umask", "", OptionArity.YES, "files get the permissions of the supervisor"),
    ("extra", "", OptionArity.YES, "use --comment, which is stored as a label"),
    ("oom-kill-step", "", OptionArity.MAYBE, "a job ends when the kernel kills one of its tasks for memory"),
    ("segment", "", OptionArity.YES, "request slices of nodes: slice and slice_within"),
    ("network", "", OptionArity.YES, "Phalanx does not configure the network"),
    ("power", "", OptionArity.YES, "Phalanx does not manage power"),
    ("mcs-label", "", OptionArity.YES, "MCS labels are not supported"),
    ("kill-on-invalid-dep", "", OptionArity.YES, "a job whose dependency failed is always ended"),
    ("input", "i", OptionArity.YES, "the script's standard input is empty"),
    ("export-file", "", OptionArity.YES, "use --export to pass the environment"),
    ("bb", "", OptionArity.YES, "burst buffers are not supported"),
    ("bbf", "", OptionArity.YES, "burst buffers are not supported"),
    ("ignore-pbs", "", OptionArity.NO, "directives of other schedulers are always ignored"),
    ("x11", "", OptionArity.MAYBE, "X11 forwarding is not supported"),
    ("cluster-constraint", "", OptionArity.YES, "there is only this cluster"),
    ("nodefile", "F", OptionArity.YES, "give --nodelist"),
    ("tres-per-task", "", OptionArity.YES, "give --gpus-per-task"),
    ("usage", "", OptionArity.NO, "see docs/slurm.md"),
)
REFUSED_SBATCH_OPTIONS: Final = {
    "clusters": "there is only this cluster",
    "container": "batch scripts run on the node itself",
    "wrap": "the script is already given",
    "uid": "a job runs as the user who submits it",
    "gid": "a job runs as the user who submits it",
    "burst-buffer": "burst buffers are not supported",
}
_REFUSED_SHORT: Final = {"M": "clusters"}
SBATCH_OPTIONS: Final = {
    option.name: option
    for option in (
        *(SbatchOption(name=name, short=short, takes=takes, meaning=does) for name, short, takes, does in _HONOURED),
        *(
            SbatchOption(name=name, short=short, takes=takes, unsupported_reason=why)
            for name, short, takes, why in _IGNORED
        ),
    )
}
_SHORT: Final = {option.short: option for option in SBATCH_OPTIONS.values() if option.short}


def is_sbatch_script(text: str) -> bool:
    """Whether a text is a script with an `#SBATCH` line. Lines after the first command have no effect, as in Slurm, but show what it is."""
    if not text.startswith("#!"):
        return False
    return any(line.startswith(_MARK) and line[len(_MARK) :][:1].isspace() for line in text.splitlines())


def parse_script_options(text: str) -> tuple[ParsedOption, ...]:
    """The options of a script, in the order written; if one is given twice, the later counts, and of CUMULATIVE both. Of a heterogeneous job those of component 0.

    Raises:
        BadFile: as in `parse_script_components`.
    """
    return parse_script_components(text)[0]


def parse_script_components(text: str) -> list[tuple[ParsedOption, ...]]:
    """The options of each component of a script: a line `#SBATCH hetjob` begins the next one.

    Raises:
        BadFile: no `#!` in the first line, an option unknown to Slurm, one that is not supported at all, or too many components.
    """
    if not text.startswith("#!"):
        raise BadFile(
            "not a batch script: the first line must begin with #! and the path of an interpreter",
            hint="#!/bin/bash",
        )
    found: list[dict[str, ParsedOption]] = [{}]
    for line, words in _directives(text):
        if words[0] in HET_WORDS:
            if len(words) > 1 or len(found) == COMPONENTS_MAX:
                why = (
                    f"a job has at most {COMPONENTS_MAX} components" if len(words) == 1 else f"{words[0]} stands alone"
                )
                raise BadFile(f"line {line}: {why}", hint=f"write #SBATCH {words[0]} between two components")
            found.append({})
            continue
        for given in parse_option_line(words, line):
            before = found[-1].pop(given.name, None)
            found[-1][given.name] = (
                replace(given, earlier=(*before.earlier, before))
                if before is not None and given.name in CUMULATIVE
                else given
            )
    return [tuple(component.values()) for component in found]


def parse_option_line(words: Sequence[str], line: int = 0) -> list[ParsedOption]:
    """The options of one line.

    Raises:
        BadFile: as in `parse_script_options`.
    """
    found: list[ParsedOption] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            option = _long_option(name[2:], line)
        elif word.startswith("-") and len(word) > 1:
            option = _short_option(word[1], line)
            equals, value = ("=", word[2:].removeprefix("=")) if len(word) > 2 else ("", "")
            if option.takes is OptionArity.NO and value:  # flags may be combined: -Hv
                left.insert(0, f"-{value}")
                equals, value = "", ""
        else:
            raise BadFile(f"{_line_prefix(line)}{word!r} is not an option", hint="an option begins with - or --")
        if option.takes is OptionArity.YES and not equals:
            if not left:
                raise BadFile(f"{_line_prefix(line)}--{option.name} has no value")
            value = left.pop(0)
        found.append(ParsedOption(name=option.name, value=value, line=line))
    return found


def split_command_line(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of an sbatch command line before its first word that is neither an option nor an option's value: the script.

    Raises:
        BadFile: as in `parse_option_line`.
    """
    place = 0
    while place < len(words) and (words[place] == ":" or (words[place].startswith("-") and words[place] != "-")):
        word = words[place]
        if word == ":":  # before the options of the next component
            place += 1
            continue
        name, equals, _ = word.partition("=")
        long = word.startswith("--")
        option = _long_option(name[2:], 0) if long else _short_option(word[1], 0)
        takes_next = option.takes is OptionArity.YES and (not equals if long else len(word) == 2)
        place += 2 if takes_next else 1
    return list(words[:place]), list(words[place:])


def split_components(words: Sequence[str]) -> list[list[str]]:
    """Split words at each `:` that stands alone: the options, or commands, of the components of a heterogeneous job."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
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
    """Split like a shell: quotes, backslashes, and a comment from a # that begins a word.

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
        raise BadFile(f"line {line}: missing closing {quote}")
    return [*found, word] if begun else found


def _long_option(name: str, line: int) -> SbatchOption:
    if name in REFUSED_SBATCH_OPTIONS:
        raise BadFile(f"{_line_prefix(line)}--{name} is not supported: {REFUSED_SBATCH_OPTIONS[name]}")
    option = SBATCH_OPTIONS.get(_ALIASES.get(name, name))
    if option is not None:
        return option
    begun = [option for known, option in SBATCH_OPTIONS.items() if known.startswith(name)]
    if len(begun) == 1:  # unique prefix, as in getopt_long
        return begun[0]
    near = nearest_match(name, SBATCH_OPTIONS)
    raise BadFile(
        f"{_line_prefix(line)}sbatch has no option --{name}",
        hint=f"did you mean --{near}?" if near else "man sbatch lists them",
    )


def _short_option(letter: str, line: int) -> SbatchOption:
    if letter in _REFUSED_SHORT:
        return _long_option(_REFUSED_SHORT[letter], line)
    option = _SHORT.get(letter)
    if option is None:
        raise BadFile(f"{_line_prefix(line)}sbatch has no option -{letter}", hint="man sbatch lists them")
    return option


def _line_prefix(line: int) -> str:
    return f"line {line}: " if line else ""
