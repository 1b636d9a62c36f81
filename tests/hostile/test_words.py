"""Every option and argument of every command, with values that are none: one clear line and an exit code, soon. The commands are click's own list."""

import os
import subprocess
import sys

import click
import pytest

from phalanx.cli.errors import report_exception
from tests.effort import size
from tests.hostile.head import serving
from tests.hostile.words import CODES, GOOD, ONLY_REFUSED, commands, ended, judged, memory_mib, option_lines

LINES_MIN = 10_000  # that click's own list gives
EVERY_WITHOUT_HEAD = size(50, 1)  # one line of so many
EVERY_WITH_HEAD = size(230, 1)
GROWTH_MIB = 60  # of this process, over thousands of command lines


@pytest.fixture(autouse=True)
def nobody_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))  # some commands write settings there
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("PHALANX_URL", "PHALANX_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def share(every, first=0):
    return (words for number, words in enumerate(option_lines()) if number % every == first)


@pytest.mark.timeout(3600)
def test_nonsense_without_a_head_ends_in_one_clear_line():
    judged(iter([("--help",), ("ps",)]))  # modules and caches
    before_mib = memory_mib()
    count, wrong = judged(share(EVERY_WITHOUT_HEAD))
    assert count > LINES_MIN // EVERY_WITHOUT_HEAD
    assert wrong == []
    assert memory_mib() - before_mib < GROWTH_MIB


@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_nonsense_before_a_head_ends_in_one_clear_line(monkeypatch):
    with serving() as served:
        monkeypatch.setenv("PHALANX_HOME", served.home)
        count, wrong = judged(share(EVERY_WITH_HEAD))
        assert served.faults() == []
    assert count > LINES_MIN // EVERY_WITH_HEAD
    assert wrong == []


def test_every_command_is_tried():
    names = {name for name, _ in commands()}
    tried = {
        " ".join(word for word in words[:2] if word[0:1].isalpha() and word.replace("-", "").isalpha())
        for words in option_lines()
    }
    for name, command in commands():
        valued = [
            param
            for param in command.params
            if not (isinstance(param, click.Option) and (param.is_flag or param.count))
        ]
        if valued and name and name not in ONLY_REFUSED:
            assert any(words == name or words.startswith(name) for words in tried), name
    assert set(GOOD) <= names
    assert names >= ONLY_REFUSED


@pytest.mark.parametrize(
    "words",
    [
        ("ps", "--limit", "\udcff"),
        ("show", "\udcff"),
        ("frobnicate",),
        ("submit", "--gpus", "x" * 100_000, "--", "true"),
        ("plan", "/dev/zero"),
        ("--url", "http://127.0.0.1:99999999", "ps"),
        ("simulate", "--trace", "/dev/zero", "--nodes", "1"),
        ("nodes", "drain", "n[0-9"),
        ("\udcff",),
        ("-",),
        ("",),
    ],
)
def test_nonsense_to_the_real_program_ends_in_one_clear_line(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.app.cli", *map(os.fsencode, words)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env={**os.environ, "PHALANX_HOME": str(tmp_path)},
        check=False,
    )
    said = done.stderr.decode(errors="replace")
    assert done.returncode in CODES - {0}, said
    assert "Traceback" not in said
    assert len(said) < 5000
    assert [line.startswith("phalanx: error:") for line in said.splitlines()] == [True], said


def test_long_words_are_told_without_their_middle():
    found = ended("show", "x" * 100_000, "y")
    assert found.code == 64
    assert len(found.said) < 3000


def test_bytes_that_are_no_text_are_told(capsys):
    assert report_exception(UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), debug=False) == 64
    assert "not UTF-8" in capsys.readouterr().err
