"""Each screen at 80 and 140 columns, to the letter. After a wanted change: PHALANX_GOLDEN=write pytest tests/golden/cli."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from phalanx.cli.cluster.nodes import node_lines, node_page
from phalanx.cli.cluster.systemd_unit import systemd_unit
from phalanx.cli.jobs import show, usage
from phalanx.cli.jobs.ps import job_lines
from phalanx.cli.root import main
from phalanx.cli.terminal import Terminal
from phalanx.cli.top.fleet_grid import count_letters, legend_lines
from phalanx.cli.top.rendering import (
    fleet_text,
    headline,
    job_line,
    job_row,
    job_titles,
)
from phalanx.core.accounting.usage_summary import UsageSummary
from phalanx.wire.api.usage import JobUsageView
from tests.golden.cli import views

FOLDER = Path(__file__).parent


def screen(width, *, colour=False):
    return Terminal(width=width, height=40, interactive=True, colour=colour, blocks=True)


def same_as(name, lines):
    text = "\n".join(lines) + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch):
    monkeypatch.setattr(show, "_clock", lambda at_s: f"{at_s - views.NOW_S:+.0f}s")


@pytest.mark.parametrize("width", [80, 140])
def test_ps(width):
    same_as(f"ps-{width}", job_lines(views.jobs(), screen(width), views.NOW_S))


@pytest.mark.parametrize("width", [80, 140])
def test_nodes(width):
    same_as(f"nodes-{width}", node_lines(views.nodes(), screen(width), views.NOW_S))


def test_nodes_of_several_releases_show_them():
    first, *others = views.nodes()
    mixed = [
        msgspec.structs.replace(first, version="0.0.9"),
        *(msgspec.structs.replace(one, version="0.1.0") for one in others),
    ]
    same = [msgspec.structs.replace(one, version="0.1.0") for one in views.nodes()]
    assert "PHALANX" in node_lines(mixed, screen(200), views.NOW_S)[0]
    assert "0.0.9" in node_lines(mixed, screen(200), views.NOW_S)[1]
    assert node_lines(same, screen(200), views.NOW_S) == node_lines(views.nodes(), screen(200), views.NOW_S)
    assert "Phalanx 0.0.9" in node_page(mixed[0], screen(100), views.NOW_S)[2]


def test_node_page():
    lines = [line for node in views.nodes()[2:] for line in node_page(node, screen(100), views.NOW_S)]
    same_as("node-100", lines)


@pytest.mark.parametrize("width", [80, 140])
def test_show(width):
    value = show._Job(
        job=views.training(),
        attempts=views.attempts(),
        history=views.history(),
        usage=msgspec.convert(views.usage(), UsageSummary),
    )
    advice = msgspec.convert(views.job_usage(), JobUsageView).advice
    same_as(f"show-{width}", show.job_page(value, screen(width), views.NOW_S, whole_history=False, advice=advice))


@pytest.mark.parametrize("width", [80, 140])
def test_usage(width):
    found = msgspec.convert(views.job_usage(), JobUsageView)
    same_as(f"usage-{width}", usage.usage_page(found, screen(width)))


def test_usage_without_a_time_limit():
    found = msgspec.structs.replace(msgspec.convert(views.job_usage(), JobUsageView), time_limit_s=None)
    assert "  time        ran 10m00s, no limit, 6m48s waiting" in usage.usage_page(found, screen(80))


@pytest.mark.parametrize("width", [80, 140])
def test_top(width):
    seen = views.overview()
    titles = job_titles(width)
    rows = [
        " | ".join(cell.plain for cell in job_row(job, seen.now_s, titles))
        for job in [*seen.running, *seen.pending, *seen.recent]
    ]
    head = re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", headline(seen, views.fleet(), width).plain)
    same_as(
        f"top-{width}",
        [
            head,
            *("".join(text for text, _ in line) for line in legend_lines(count_letters(views.fleet()), width)),
            *fleet_text(
                seen.nodes, width, letters=dict(zip(views.fleet().nodes, views.fleet().cells, strict=True))
            ).plain.split("\n"),
            " | ".join(titles),
            *rows,
            *map(job_line, seen.pending),
        ],
    )


def test_no_line_is_wider_than_its_screen():
    for width in (40, 80, 140):
        for lines in (
            job_lines(views.jobs(), screen(width), views.NOW_S)[:-1],
            node_lines(views.nodes(), screen(width), views.NOW_S)[:-1],
        ):
            assert max(map(len, lines)) <= width


def test_ordered_nodes_have_their_price_age_and_purpose():
    lines = node_lines(views.nodes(), screen(160), views.NOW_S, views.ordered_nodes())
    words = [
        "burst-0",
        "provisioning",
        "burst",
        "2",
        "0/8",
        "h100-sxm5-80gb",
        "40s",
        "job",
        "1",
        "waits",
        "for",
        "capacity",
    ]
    assert [line.split() for line in lines if line.startswith("burst-0")] == [words]
    assert lines[-1].endswith("1 node down; 1 node on the way")
    top = fleet_text(views.nodes(), 100, views.ordered_nodes(), views.NOW_S).plain.split("\n")
    assert top[-2].split() == [
        "burst-0",
        "provisioning",
        "8",
        "GPUs,",
        "pool",
        "burst,",
        "$2/h,",
        "40s:",
        "job",
        "1",
        "waits",
        "for",
        "capacity",
    ]
    assert top[-1].split()[:2] == ["burst-1", "down"]
    assert max(map(len, top)) <= 100


def test_strangers_text_steers_no_screen():
    for lines in (
        job_lines(views.jobs(), screen(140), views.NOW_S),
        node_lines(views.nodes(), screen(140), views.NOW_S),
    ):
        assert not any("\x1b" in line for line in lines)


def test_unit():
    same_as(
        "unit",
        systemd_unit(
            python="/opt/phalanx/bin/python", home="/home/ada/my state", arguments=["--port", "7700"]
        ).splitlines(),
    )


def test_help(capsys):
    assert main(["--help"]) == 0
    same_as("help", capsys.readouterr().out.splitlines())
