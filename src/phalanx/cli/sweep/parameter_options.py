"""The words of `phalanx sweep` that are neither options of it nor of a job: each is a parameter, `--lr log:1e-5..1e-2`."""

from __future__ import annotations

from typing import Final

import click

from phalanx.cli.jobs.request.job_request import DoubleDashCommand
from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.sweep.space import SweepParameter, choice_parameter, parse_parameter
from phalanx.user_files.yaml_document import YamlValue

_FOUND: Final = "phalanx.parameters"


class ParameterCommand(DoubleDashCommand):
    """A command that takes each unknown option as a parameter with its values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the parameters out, then parse the rest."""
        cut = args.index("--") if "--" in args else len(args)
        options = {
            name: param for param in self.get_params(ctx) if isinstance(param, click.Option) for name in param.opts
        }
        words, rest, found = args[:cut], [], []
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            known = options.get(flag)
            if not flag.startswith("--") or flag in self.get_help_option_names(ctx):
                rest.append(word)
                if known is not None and not (known.is_flag or equals or len(word) > 2) and words:
                    rest.append(words.pop(0))
            elif known is not None:
                rest.append(word)
                if not (known.is_flag or known.count or equals) and words:
                    rest.append(words.pop(0))
            else:
                if not equals:
                    value = words.pop(0) if words else ""
                found.append(_parameter(flag, value, options))
        ctx.meta[_FOUND] = tuple(found)
        return super().parse_args(ctx, [*rest, *args[cut:]])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return `[--PARAMETER VALUES] [OPTIONS] ...`."""
        return ["[--PARAMETER VALUES]", *super().collect_usage_pieces(ctx)]


def typed_parameters(context: click.Context) -> tuple[SweepParameter, ...]:
    """Return the parameters of the command line."""
    found: tuple[SweepParameter, ...] = context.meta.get(_FOUND, ())
    return found


def file_parameters(table: YamlValue) -> tuple[SweepParameter, ...]:
    """Return the parameters of a file: a range as text, or a list of values.

    Raises:
        BadFile: one is wrong; the message has its line.
    """
    found = []
    for name, value in table.mapping("parameters").items():
        try:
            if isinstance(value.content, list):
                found.append(choice_parameter(name, [one.text(name) for one in value.content]))
            else:
                found.append(parse_parameter(name, value.text(name)))
        except BadRequest as error:
            raise value.error(error.message, error.hint) from None
    return tuple(found)


def _parameter(flag: str, value: str, options: dict[str, click.Option]) -> SweepParameter:
    try:
        return parse_parameter(flag.removeprefix("--"), value)
    except BadRequest as error:
        near = suggestion(flag, [name for name in options if name.startswith("--")], str(error.hint))
        raise BadRequest(f"{flag}: neither an option nor a parameter: {error.message}", hint=near) from None
