"""The planner's pages print what the planner says: every `console` block is run again. After a wanted change: PHALANX_GOLDEN=write."""

import os
import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli.root import main

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```console(?: (?P<most>\d+))?\n\$ phalanx (?P<words>[^\n]+)\n(?P<shown>.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["planner.md", "planner-70b.md", "serving-plan.md"])
def test_page_shows_what_is_printed(page, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text)

    def again(found):
        main(shlex.split(found["words"]))
        lines = capsys.readouterr().out.rstrip().split("\n")
        assert lines[0], found["words"]
        most = int(found["most"] or len(lines))
        lines = lines if len(lines) <= most else [*lines[:most], "..."]
        head = found[0].split("\n", 1)[0]
        return "\n".join([head, f"$ phalanx {found['words']}", *lines, "```"])

    printed = BLOCK.sub(again, text)
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")
