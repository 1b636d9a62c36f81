"""The supervisor, copied out of an image with Phalanx, and started by the Python of another one."""

import ast
import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typing_extensions

import phalanx
from phalanx.app import supervisor_start
from phalanx.app.supervisor_files import AT_START, OF_HEADS, copy_supervisor
from phalanx.wire.seat import SEAT_IMAGE_UNFIT


@pytest.fixture
def copied(tmp_path):
    copy_supervisor(tmp_path / "s")
    return tmp_path / "s"


def start(copied, python=sys.executable, **variables):
    words = [python, str(copied / "start.py"), "phalanx.app.seat_supervisor"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/", **variables}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def test_a_copied_supervisor_runs_by_itself_and_leaves_the_variables_of_ranks_alone(copied):
    done = start(copied, os.path.realpath(sys.executable))  # which has no package of ours
    assert (done.returncode, "PHALANX_SEAT is not a valid order" in done.stderr) == (64, True), done.stderr
    program = (copied / "bin" / "python").readlink()
    assert program == os.path.realpath(sys.executable) or str(program) == os.path.realpath(sys.executable)
    script = "import phalanx, sys; print(phalanx.__file__, 'PYTHONPATH' in __import__('os').environ)"
    shown = subprocess.run([copied / "bin" / "python", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == f"{next(copied.glob('lib/*/site-packages'))}/phalanx/__init__.py False\n"
    assert start(copied).returncode == 64, "a container that starts again finds its folder as it was"


def test_the_program_runs_in_the_first_python_with_the_copied_packages_and_none_of_the_image(copied):
    [site] = copied.glob("lib/*/site-packages")
    (site / "probe.py").write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.check_output([sys.executable, '-c', 'import phalanx; print(phalanx.__file__)'], text=True)\n"
        "print(json.dumps([__name__, sys.argv, sys.orig_argv[1], sys.executable, sys.path, child.strip()]))\n"
    )
    words = [sys.executable, str(copied / "start.py"), "probe", "--word"]  # this Python has packages of its own
    shown = subprocess.run(
        words, capture_output=True, text=True, check=True, cwd=copied, env={"PATH": os.environ["PATH"]}
    )
    name, argv, started, program, path, child = json.loads(shown.stdout)
    assert (name, argv) == ("__main__", [str(site / "probe.py"), "--word"])
    assert started == str(copied / "start.py"), "no second Python"
    assert (program, child) == (str(copied / "bin" / "python"), str(site / "phalanx" / "__init__.py"))
    assert path[0] == str(site)
    assert not [one for one in path[1:] if one in ("", str(copied)) or one.endswith("-packages")]


def test_a_copied_supervisor_compiles_nothing_that_was_compiled_where_it_comes_from(tmp_path, monkeypatch):
    origin = tmp_path / "here"
    shutil.copytree(Path(phalanx.__file__).parent, origin / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(typing_extensions.__file__, origin)
    for folder in (origin, origin / "phalanx" / "core", origin / "phalanx" / "planner"):
        assert compileall.compile_dir(folder, quiet=1, maxlevels=0)
    (origin / "phalanx" / "core" / "__pycache__" / "errors.cpython-27.pyc").write_bytes(b"of another Python")
    copy = [sys.executable, "-P", "-m", "phalanx.app.supervisor_files", str(tmp_path / "s")]
    subprocess.run(copy, env={**os.environ, "PYTHONPATH": str(origin)}, check=True)
    [site] = (tmp_path / "s").glob("lib/*/site-packages")
    assert not list(site.rglob("*27.pyc"))
    assert not list((site / "phalanx" / "planner").rglob("*.pyc")), "nor what no supervisor imports at its start"
    at_start = "import sys, phalanx.app.resident_supervisor, phalanx.app.node; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", at_start], capture_output=True, text=True, check=True).stdout.split()
    parts = {name.split(".")[1] for name in loaded if name.startswith("phalanx.") and name.count(".") > 1}
    assert parts == set(AT_START)
    read = [sys.executable, "-v", "-B", "-c", "import typing_extensions, phalanx.core.errors"]
    said = subprocess.run(
        read, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    ).stderr
    for name in ("typing_extensions", "phalanx/core/errors"):
        assert f"# {site}/{os.path.dirname(name)}/__pycache__/".replace("//", "/") in said, said[-2000:]
        assert f"code object from {site}/{name}.py" not in said, "it was compiled again"


def test_a_supervisor_and_the_programs_that_it_starts_find_their_modules_among_the_copied_ones(copied):
    [package] = copied.glob("lib/*/site-packages/phalanx")
    assert not {name.name for name in package.iterdir()} & OF_HEADS
    origin, seen = Path(phalanx.__file__).parent.parent, set()
    waiting = ["phalanx.app.seat_supervisor", "phalanx.app.resident_supervisor", "phalanx.app.supervisor_files"]
    while waiting:
        name = waiting.pop()
        path = origin.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not name.startswith("phalanx.") or not path.exists():
            continue
        seen.add(name)
        assert (package.parent / path.relative_to(origin)).exists(), f"{name} is missing"
        waiting += modules_named_in(path)
    assert len(seen) > 300
    assert "phalanx.node.mpi.agent_main" in seen, "a program that a supervisor starts by its name"


def modules_named_in(path):
    """What a file imports at any time, and what it names as a word, as the module of a program that it starts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from (one.name for one in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from (module, *(f"{module}.{one.name}" for one in node.names))
            case ast.Constant(value=str(word)) if word.startswith("phalanx."):
                yield word


def test_a_supervisor_starts_without_the_modules_that_few_jobs_need():
    """Each module costs a pod's start half a millisecond and more."""
    at_start = "import sys, phalanx.app.seat_supervisor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", at_start], capture_output=True, text=True, check=True).stdout.split()
    few = {
        "tarfile",
        "tomllib",
        "obstore",
        "phalanx.core.fleet.node_pool",
        "phalanx.core.work.layouts.layout",
        "phalanx.node.files.workdir_upload",
        "phalanx.node.slurm_compat.batch_rank",
    }
    assert "phalanx.node.shell.supervisor_loop" in loaded
    assert not few.intersection(loaded)


def test_another_python_or_another_libc_is_named_in_one_line(copied):
    facts = json.loads((copied / "supervisor.json").read_text())
    for change, words in (
        ({"python": [3, 99]}, "as python3, and the supervisor needs 3.99"),
        ({"suffix": ".cpython-311-arm64-linux-musl.so"}, "the supervisor needs glibc and the same processor"),
    ):
        (copied / "supervisor.json").write_text(json.dumps({**facts, **change}))
        done = start(copied)
        assert done.returncode == supervisor_start.UNFIT_IMAGE == SEAT_IMAGE_UNFIT
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_library_that_cannot_be_loaded_is_named(copied):
    [package] = copied.glob("lib/*/site-packages/msgspec")
    (package / "__init__.py").write_text('raise ImportError("/lib/libc.so.6: version `GLIBC_2.99\' not found")')
    done = start(copied)
    assert (done.returncode, done.stderr.count("\n")) == (SEAT_IMAGE_UNFIT, 1)
    assert "GLIBC_2.99" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(copied):
    shutil.rmtree(copied / "bin", ignore_errors=True)
    (copied / "bin").write_text("")
    done = start(copied)
    assert (done.returncode, "cannot prepare" in done.stderr) == (SEAT_IMAGE_UNFIT, True)
