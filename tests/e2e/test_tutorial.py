"""The tutorial: every command is one that Phalanx takes, and prints what the page shows.

A block `console` shows what is printed, up to numbers, the widths of columns and the order of lines; `console fails` the same of a command that ends
with 1. Of `console live` only the exit code holds: how far a job is depends on the machine.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from benchmarks.cluster import free_port
from phalanx.cli.root import phalanx as root
from tests.e2e.test_cli_head import Shell

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"```console(?P<kind> live| fails|)\n\$ (?P<line>[^\n]+)\n(?P<shown>.*?)```", re.DOTALL)
FILE = re.compile(r"```python\n(?P<text># (?P<name>\S+\.py)\n.*?)```", re.DOTALL)
PASSING = ("placed on ", "starting on ", "running on ", "stopping on ", "...")  # `run` prints the states that it meets


def commands():
    return [found["line"] for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


def test_every_command_of_the_tutorial_is_one_that_phalanx_takes():
    ours = [shlex.split(line)[1:] for line in commands() if line.startswith("phalanx ")]
    assert len(ours) > 12
    for words in ours:
        _parse(root, words)


def _parse(command, words):
    """Parse a command line down to its last subcommand, as click does before it runs anything."""
    context = command.make_context("phalanx", list(words))
    if isinstance(command, click.Group) and context._protected_args:
        rest = [*context._protected_args, *context.args]
        _, found, rest = command.resolve_command(context, rest)
        _parse(found, rest)


@pytest.mark.serial
@pytest.mark.e2e
@pytest.mark.prove
@pytest.mark.timeout(900)
def test_the_tutorial_prints_what_it_shows(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    shell = Shell(tmp_path)
    (tmp_path / "examples").symlink_to(PAGE.parents[1] / "examples")
    for file in FILE.finditer(text):
        (shell.work / file["name"]).write_text(file["text"])
    environment = {name: value for name, value in shell.env.items() if name != "PHALANX_HOME"}
    environment |= {"HOME": str(tmp_path / "home"), "COLUMNS": "120"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    (tmp_path / "home").mkdir()
    shell.env = environment
    port = str(free_port())

    def run_block(found):
        line = found["line"]
        if line.startswith("phalanx logs "):
            _await_step(shell)
        typed = f"{line} --port {port}" if line.startswith("phalanx up ") else line
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=shell.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        printed = done.stdout
        assert done.returncode == (found["kind"] == " fails"), (line, printed)
        if found["kind"] != " live":
            assert _shape(found["shown"]) <= _shape(printed), (line, printed)

    try:
        for found in BLOCK.finditer(text):
            run_block(found)
    finally:
        if (tmp_path / "home" / ".phalanx" / "head.json").exists():
            subprocess.run(shell.argv("down", "--cancel-jobs"), env=environment, timeout=120, check=False)


def _await_step(shell):
    until_s = time.monotonic() + 300
    while "step " not in shell("logs", "gpt", "--rank", "0").stdout:
        assert time.monotonic() < until_s, "the training made no step"
        time.sleep(0.5)


def _shape(printed):
    """The lines without what differs from run to run: numbers, widths and states on the way."""
    lines = [line for line in printed.splitlines() if not line.strip().startswith(PASSING)]
    return {re.sub(r"\s+", " ", re.sub(r"\d[\d.]*\w*", "#", line)).strip() for line in lines}
