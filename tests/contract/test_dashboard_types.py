"""The dashboard's own modules under the TypeScript compiler: their names, calls and properties agree. Libraries are described in tests/javascript."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx.web

COMPILER = Path(sys.prefix, "typescript", "lib", "tsc.js")
MODULES = sorted(Path(phalanx.web.__file__).parent.glob("static/*.js"))
DESCRIBED = Path(__file__).parents[1] / "javascript"

pytestmark = [
    pytest.mark.skipif(not COMPILER.exists(), reason="no TypeScript here: make browser-tools"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node here"),
]


def complaints(folder):
    done = subprocess.run(
        ["node", COMPILER, "--pretty", "false"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(DESCRIBED, tmp_path, dirs_exist_ok=True)
    for module in MODULES:
        shutil.copy(module, tmp_path)
    return tmp_path


def test_modules_have_no_type_errors(folder):
    assert len(MODULES) > 10
    assert complaints(folder) == []


@pytest.mark.parametrize(
    ("module", "wrong", "code"),
    [
        ("head.js", "ask(1);", "TS2345"),
        ("tables.js", "document.getElementById('live').vaule;", "TS2339"),
        ("actions.js", "actionBar(document.body, () => [{ title: 'x' }]);", "TS2322"),
        ("stream.js", "version.peak();", "TS2339"),
    ],
)
def test_an_error_is_found(folder, module, wrong, code):
    with open(folder / module, "a", encoding="utf-8") as file:
        file.write(wrong + "\n")
    found = [line for line in complaints(folder) if not line.startswith(" ")]
    assert len(found) == 1, found
    assert found[0].startswith(f"{module}(")
    assert code in found[0]


def test_every_library_that_is_imported_is_described(folder):
    used = {
        name
        for module in MODULES
        for name in module.read_text().split('"')
        if name.startswith("./vendor/") and name.endswith(".js")
    }
    assert {Path(name).stem for name in used} == {
        path.name.removesuffix(".d.ts") for path in DESCRIBED.glob("vendor/*.d.ts")
    }
