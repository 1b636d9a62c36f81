"""Completion by the Tab key, as the scripts of `phalanx completion` ask for it, and the manual pages."""

import shlex
import subprocess
import sys

import pytest

from phalanx.cli.root import COMMANDS
from tests.golden.cli.fake_head import TOKEN, FakeHead

PHALANX = [sys.executable, "-m", "phalanx.app.cli"]


@pytest.fixture
def head(monkeypatch, tmp_path):
    fake = FakeHead()
    monkeypatch.setenv("PHALANX_URL", fake.url)
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    yield fake
    fake.close()


def offered(line):
    """What bash offers for the last word of the line."""
    words = line.split(" ")
    script = (
        f'phalanx() {{ {shlex.join(PHALANX)} "$@"; }}; '
        'env() { while [[ $1 == *=* ]]; do local -x "$1"; shift; done; "$@"; }; '  # so that `env` finds the function
        'compopt() { :; }; eval "$(phalanx completion bash)"; '
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _phalanx_completion phalanx; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_what_the_head_knows(head):
    assert offered("phalanx re") == [name for name in COMMANDS if name.startswith("re")]
    assert offered("phalanx nodes undr") == ["undrain"]
    assert "--gpus-per-node" in offered("phalanx submit --gpus")
    jobs = offered("phalanx logs ")
    assert "12" in jobs
    assert offered("phalanx cancel 1") == [job for job in jobs if job.startswith("1")]
    assert "n0" in offered("phalanx nodes drain ")


def test_a_head_that_is_not_there_offers_nothing_and_prints_nothing(head):
    head.close()
    assert offered("phalanx logs ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell):
    done = subprocess.run([*PHALANX, "completion", shell], capture_output=True, text=True, timeout=100, check=True)
    assert "_PHALANX_COMPLETE" in done.stdout


def test_every_command_has_a_manual_page(tmp_path):
    subprocess.run([sys.executable, "docs/man_pages.py", str(tmp_path)], timeout=100, check=True)
    pages = {page.name: page.read_text() for page in tmp_path.iterdir()}
    assert {f"phalanx-{name}.1" for name in COMMANDS} | {"phalanx.1", "phalanx-nodes-drain.1"} <= pages.keys()
    assert "\\-\\-gpus" in pages["phalanx-submit.1"]
    assert ".nf\nphalanx submit " in pages["phalanx-submit.1"], "examples keep their lines"
    assert not [name for name, text in pages.items() if "\x08" in text]
