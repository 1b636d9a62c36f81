"""Click types of command-line options. They use the grammars of `core`, so that options and job files mean the same.

A grammar is imported when an option has a value for it, because most commands give few of their options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from phalanx.core.errors import BadRequest

SMALL_NUMBER: Final = 4  # digits of a number of GPUs or nodes that needs no grammar
SEEDS_MAX: Final = 1000  # fills of one call
_SEED_DIGITS_MAX: Final = 12


class GrammarType(click.ParamType[str]):
    """Text that a grammar of `core` accepts. It is passed on unchanged: the head parses it with the same grammar."""

    def __init__(self, name: str, check: Callable[[str], object]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check and return the text.

        Raises:
            BadRequest: the text does not match the grammar; the message names the option.
        """
        text = str(value)
        try:
            self._check(text)
        except BadRequest as error:
            flag = max(param.opts, key=len) if param is not None and param.opts[0].startswith("-") else ""
            words = error.message.split(": ", 1)[-1] if flag else error.message
            hint = error.hint
            if text.startswith("-") and flag == "--time" and ctx is not None and _has_option(ctx.command, "--tty"):
                hint = "-t is the time limit, as of sbatch; --tty gives a terminal"
            raise BadRequest(f"{flag}: {words}" if flag else words, hint=hint) from None
        return text


def _has_option(command: click.Command, name: str) -> bool:
    return any(name in one.opts for one in command.params)


class SeedsType(click.ParamType[list[int]]):
    """Seeds as `42-51`, `7` or `1,4,9`."""

    name = "A-B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:  # noqa: ARG002  # as above
        """Return the seeds in order.

        Raises:
            BadRequest: not numbers, a range that ends before it begins, or more than `SEEDS_MAX`.
        """
        if isinstance(value, list):
            return value
        found: list[int] = []
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            ends = (first, last) if dash else (first, first)
            if not all(end.isascii() and end.isdigit() and len(end) <= _SEED_DIGITS_MAX for end in ends):
                raise BadRequest(f"--seeds {value}: {part.strip()!r} is not a seed", hint="--seeds 42-51")
            span = range(int(ends[0]), int(ends[1]) + 1)
            if not span or len(found) + len(span) > SEEDS_MAX:
                raise BadRequest(f"--seeds {value}: 1 to {SEEDS_MAX} seeds are possible", hint="--seeds 42-51")
            found += span
        return found


class EnvPairType(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`; a bare NAME takes its value from the environment of this command."""

    name = "K=V"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:  # noqa: ARG002  # as above
        """Return the name and the value.

        Raises:
            BadRequest: a bare name that is not set in the environment.
        """
        import os

        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals and name not in os.environ:
            raise BadRequest(
                f"--env {name}: no value given, and {name} is not set here", hint=f"write --env {name}=VALUE"
            )
        return name, text if equals else os.environ[name]


class LabelType(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "K=V"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:  # noqa: ARG002  # as above
        """Return the name and the value.

        Raises:
            BadRequest: there is no name or no value.
        """
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name:
            raise BadRequest(f"--label: {str(value)[:60]!r} is not NAME=VALUE", hint="write --label exp=7")
        return name, text


_RANK_DIGITS: Final = 18  # of a number that the head accepts


class RankType(click.ParamType[str]):
    """The number of a rank, `all`, or `supervisor` for the log of the supervisors."""

    name = "RANK"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002  # click's signature
        """Return the word in its canonical form.

        Raises:
            BadRequest: not a rank.
        """
        text = str(value).strip().lower()
        if text.isdecimal() and len(text) <= _RANK_DIGITS:
            return str(int(text))
        if text in {"all", "supervisor", "stacks"}:
            return text
        raise BadRequest(f"--rank: {value!r} is not a rank", hint="write --rank 0, --rank all or --rank supervisor")


def _is_small_number(text: str) -> bool:
    """Return whether the text is a small number of GPUs or nodes, which the grammars accept: most values are."""
    return text.isascii() and text.isdigit() and len(text) <= SMALL_NUMBER and text[0] != "0"


def _check_duration(text: str) -> None:
    from phalanx.core.units import parse_duration_s

    parse_duration_s(text)


def _check_memory(text: str) -> None:
    from phalanx.core.units import parse_memory_bytes

    parse_memory_bytes(text)


def _check_gpus(text: str) -> None:
    if not _is_small_number(text):
        from phalanx.core.work.gpus import parse_gpus

        parse_gpus(text)


def _check_nodes(text: str) -> None:
    if not _is_small_number(text):
        from phalanx.core.work.gpus import parse_nodes

        parse_nodes(text)


def _check_hosts(text: str) -> None:
    from phalanx.core.fleet.hostlist import expand_hostlist

    expand_hostlist(text)


RANK: Final = RankType()
DURATION: Final = GrammarType("TIME", _check_duration)
MEMORY: Final = GrammarType("MEM", _check_memory)
GPUS: Final = GrammarType("GPUS", _check_gpus)
HOSTS: Final = GrammarType("NODES", _check_hosts)
NODES: Final = GrammarType("N", _check_nodes)
PAIR: Final = EnvPairType()
LABEL: Final = LabelType()
SEEDS: Final = SeedsType()
