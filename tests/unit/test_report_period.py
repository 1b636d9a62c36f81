"""The period of a report, and the forms in which reports are printed."""

import re

import pytest

from phalanx.cli.report.period import Period, parse_moment_s, parse_month, resolve_period
from phalanx.cli.report.report_table import ReportTable, print_report, report_page
from phalanx.cli.tables import Column
from phalanx.core.errors import BadRequest


def test_a_month_ends_where_the_next_begins():
    december, january = parse_month("2026-12"), parse_month("2027-01")
    assert december.until_s == january.since_s == 1_798_761_600.0


@pytest.mark.parametrize(
    ("text", "expected"), [("1d", 13_600.0), ("1970-01-02", 86_400.0), ("1970-01-01T06:00Z", 21_600.0)]
)
def test_moments_are_durations_ago_or_dates(text, expected):
    assert parse_moment_s(text, now_s=100_000.0) == expected


@pytest.mark.parametrize("text", ["2026-13", "2026-1", "1969-12", "9999-12", "november"])
def test_words_that_are_no_month_are_refused(text):
    with pytest.raises(BadRequest, match="is not a month"):
        parse_month(text)


@pytest.mark.parametrize("options", [("1d", None, "2026-11"), ("1d", "2d", None), (None, "31d", None)])
def test_contradicting_options_are_refused(options):
    with pytest.raises(BadRequest):
        resolve_period(*options)
    assert isinstance(resolve_period("2d", "1d", None), Period)


HOSTILE = ReportTable(
    title="T",
    since_s=0.0,
    until_s=60.0,
    value={},
    columns=(Column(title="A"), Column(title="B", hide_empty=True)),
    rows=[["<script>alert(1)</script>", ""]],
    csv_rows=[["a"], ["=1+1"], ["-2.5"], ["-x"], ["\x1b[2J"]],
    notes=["<b>"],
)


def test_the_page_escapes_names_and_leaves_out_empty_columns():
    page = report_page(HOSTILE, "phalanx report <i>")
    assert not re.search(r"<(script|b|i)>|<th[^>]*>B<", page)
    assert "&lt;script&gt;" in page


def test_csv_has_no_formula(capsys):
    print_report(HOSTILE, "csv", "")
    assert capsys.readouterr().out.splitlines() == ["a", "'=1+1", "-2.5", "'-x", "\ufffd[2J"]
