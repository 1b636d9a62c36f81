"""Makes a command of a function that fetches one kind of report. All kinds share the period, the grouping and the forms of output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.connection import connect
from phalanx.cli.report.period import MOMENT, MONTH, resolve_period
from phalanx.cli.report.report_table import ReportTable, print_report
from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from phalanx.client import Client

FORMS: Final = ("json", "csv", "html")


_LABEL: Final = "label:"


class GroupingType(click.Choice[str]):
    """What the rows of a report stand for: one of a few words, or `label:NAME`."""

    def __init__(self, words: Sequence[str], *, labels: bool) -> None:
        super().__init__(words)
        self._labels = labels

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word."""
        text = str(value)
        if self._labels and text.startswith(_LABEL) and len(text) > len(_LABEL):
            return text
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}{f', or {_LABEL}NAME' if self._labels else ''}", param, ctx)


def report_kind(
    name: str, *, by: Sequence[str] = (), by_default: str = "", labels: bool = False, since: str = "30d"
) -> Callable[[Callable[..., ReportTable]], click.Command]:
    """Make the command `phalanx report NAME` of a function (head, period, **options); its docstring is the help.

    Args:
        name: of the kind.
        by: values of `--by`, passed as `by`; empty for a kind without it.
        by_default: the first one if empty.
        labels: whether `--by label:NAME` is possible.
        since: how far back the report reaches without `--since`.
    """

    def make(fetch: Callable[..., ReportTable]) -> click.Command:
        def run(
            since: str | None,
            until: str | None,
            month: str | None,
            as_json: bool,
            as_csv: bool,
            as_html: bool,
            **options: Any,
        ) -> None:
            forms = [form for form, wanted in zip(FORMS, (as_json, as_csv, as_html), strict=True) if wanted]
            if len(forms) > 1:
                raise BadRequest(f"--{forms[0]} and --{forms[1]} are two formats", hint="give one of them")
            period = resolve_period(since, until, month, default=since_default)
            head: Client = connect()
            found = fetch(head, period, **options)
            print_report(found, forms[0] if forms else "text", " ".join(["phalanx", *sys.argv[1:]]))

        since_default = since
        params: list[click.Parameter] = []
        if by:
            params.append(
                click.Option(
                    ["--by"],
                    type=GroupingType(by, labels=labels),
                    default=by_default or by[0],
                    show_default=True,
                    help="What each row stands for."
                    + (" label:NAME for the values of a label of jobs." if labels else ""),
                )
            )
        params += [
            click.Option(
                ["--since"], type=MOMENT, metavar="TIME", help=f"12h or 30d ago, or a date (UTC).  [default: {since}]"
            ),
            click.Option(["--until"], type=MOMENT, metavar="TIME", help="As --since.  [default: now]"),
            click.Option(["--month"], type=MONTH, metavar="YYYY-MM", help="A whole month (UTC) in place of both."),
            *getattr(fetch, "__click_params__", [])[::-1],
            click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
            click.Option(["--csv", "as_csv"], is_flag=True, help="Print CSV, with the total in the last row."),
            click.Option(["--html", "as_html"], is_flag=True, help="Print a page that needs no other file."),
        ]
        return click.Command(name, callback=run, params=params, help=fetch.__doc__)

    return make
