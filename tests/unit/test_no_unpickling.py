"""Nothing of ours turns bytes into code: no pickle or its kin, no eval, no shell line put together; read from the source, so that a new use fails here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "multiprocessing",
    "dbm",
    "code",
    "codeop",
}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("os", "system"),
    ("os", "popen"),
}
EXEMPT = {
    # Between processes that one command starts for itself; the drill serves nobody.
    "simulator/drill/campaign.py": {"multiprocessing", "ProcessPoolExecutor"},
    "node/processes/zygote_main.py": {"exec", "compile"},  # the user's own script, in the user's own rank
}
# Inside processes that are the user's own, a training process or a program that submits Python functions: their formats are its formats.
OUTSIDE = ("torch/", "executor/", "submitit/", "joblib.py")


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield node.lineno, module
            case ast.ImportFrom(module="concurrent.futures", names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name == "ProcessPoolExecutor")
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=name)) if (of, name) in LOADS:
                yield node.lineno, f"{of}.{name}"
            case ast.Call(
                func=ast.Attribute(attr="run" | "Popen" | "call" | "check_call" | "check_output"), keywords=keywords
            ):
                yield from ((node.lineno, "shell=") for word in keywords if word.arg == "shell")
            case ast.Call(keywords=keywords):
                for word in keywords:
                    if word.arg == "typ" and isinstance(word.value, ast.Constant) and word.value.value != "safe":
                        yield node.lineno, "an unsafe YAML loader"
            case _:
                pass


def _sources() -> list[str]:
    found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return [name for name in found if not name.startswith(OUTSIDE)]


@pytest.mark.slow
def test_no_file_of_ours_unpickles_evaluates_or_runs_what_it_was_given():
    found = {}
    for name in _sources():
        uses = [
            (line, use)
            for line, use in _uses(ast.parse((ROOT / name).read_text(encoding="utf-8")))
            if use not in EXEMPT.get(name, ())
        ]
        if uses:
            found[name] = uses
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "eval(x)",
        "exec(x)",
        "import numpy as np; np.load(x)",
        "import subprocess; subprocess.run(x, shell=True)",
        "YAML(typ='unsafe')",
        "import marshal",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_such_a_use_would_be_found(line):
    assert list(_uses(ast.parse(line)))


def test_the_exemptions_are_still_needed():
    for name, uses in EXEMPT.items():
        assert uses == {use for _, use in _uses(ast.parse((ROOT / name).read_text(encoding="utf-8")))}


@pytest.mark.slow
def test_the_head_comes_up_without_the_modules_that_unpickle_from_the_network():
    """What the head imports, third parties included. `pickle` itself comes along with the standard library (copyreg, logging); nobody calls it: e2e."""
    told = subprocess.run(
        [sys.executable, "-P", "-c", "import sys, phalanx.app.head; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(told.stdout.split())
    assert (
        loaded
        & {
            "cloudpickle",
            "dill",
            "shelve",
            "torch",
            "ray",
            "joblib",
            "multiprocessing.managers",
        }
        == set()
    )
