"""Jobs in environments of their nodes: modules of both module systems, conda and virtual environments, on a real head with two nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from phalanx.node.files.folder_cache import FolderCache
from tests.e2e.test_requirements import Shell
from tests.wheels import wheel

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

UV = Path("build/uv/bin/uv").absolute()
SYSTEMS = {
    "environment-modules": Path("build/modules/environment-modules/usr/share/modules").absolute(),
    "lmod": Path("build/modules/lmod/usr/share/lmod/lmod").absolute(),
}
CUDA = "#%Module1.0\nprepend-path PATH {0}/cuda/bin\nprepend-path LD_LIBRARY_PATH {0}/cuda/lib64\nsetenv CUDA_HOME {0}/cuda\n"


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("software"))
    shell("up", "--virtual", "2x2", "--port", str(free_port()), cwd=shell.folder)
    yield shell
    shell("down", "--cancel-jobs", cwd=shell.folder)


@pytest.fixture(params=sorted(SYSTEMS))
def modules(request, phalanx, tmp_path):
    """Options that give a job one of the module systems, with a module of its own."""
    home = SYSTEMS[request.param]
    if not (home / "init" / "bash").exists():
        pytest.skip(f"{request.param} is not here: make modules-tools")
    (tmp_path / "mf" / "cuda").mkdir(parents=True)
    (tmp_path / "mf" / "cuda" / "12.4").write_text(CUDA.format(tmp_path))
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").write_text("#!/bin/sh\necho nvcc of the module\n")
    (tmp_path / "cuda" / "bin" / "nvcc").chmod(0o755)
    return ("-e", f"MODULESHOME={home}", "-e", f"MODULEPATH={tmp_path}/mf")


def venv_at(folder):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def test_module_is_loaded_for_every_rank_for_exec_and_for_the_setup(phalanx, modules, tmp_path):
    code = "nvcc; echo $RANK $CUDA_HOME; module -t list 2>&1 | grep cuda; touch up$RANK; sleep 60"
    words = ("submit", *modules, "--modules", "cuda", "-g", "2x1", "--setup", "nvcc")
    phalanx(*words, "--", "bash", "-c", code, cwd=tmp_path)
    job = phalanx.last(tmp_path)
    phalanx("exec", job, "--", "bash", "-c", "until [ -e up0 -a -e up1 ]; do sleep 0.1; done", cwd=tmp_path)
    assert phalanx("exec", job, "--", "nvcc", cwd=tmp_path).stdout == "nvcc of the module\n"
    for rank in ("0", "1"):
        log = phalanx("logs", job, "--rank", rank, cwd=tmp_path).stdout
        assert log.splitlines() == ["nvcc of the module", f"{rank} {tmp_path}/cuda", "cuda/12.4"]
    assert phalanx.said(job, tmp_path).count("modules cuda") == 2
    phalanx("cancel", job, cwd=tmp_path)


def test_absent_module_ends_the_job_before_any_rank_starts(phalanx, modules, tmp_path):
    done = phalanx("run", *modules, "--modules", "cuda/11", "-g", "2x1", "--", "touch", "started", cwd=tmp_path, code=1)
    assert "no module cuda/11 on this node; other versions: cuda/12.4" in done.stderr
    assert not (tmp_path / "started").exists()
    assert phalanx.job(phalanx.last(tmp_path), tmp_path)["attempts"] == 1


def test_gang_waits_for_the_node_that_lacks_its_environment_and_then_does_not_start(phalanx, tmp_path):
    venv_at(tmp_path / "good")
    # The node rank is known to a node when it looks; here its `python` works on the first node only.
    python = tmp_path / "good" / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\n[ "$PHALANX_NODE_RANK" = 0 ] || exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = phalanx("run", "--venv", "good", "-g", "2x1", "--", "touch", "started", cwd=tmp_path, code=1)
    assert f"n1: {python} does not start on this node: it ends with code 3" in done.stderr
    assert not (tmp_path / "started").exists()


def test_conda_and_virtual_environments_run_the_ranks(phalanx, tmp_path):
    prefix = tmp_path / "envs" / "ml"
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (prefix / "etc" / "conda" / "activate.d").mkdir(parents=True)
    (prefix / "etc" / "conda" / "activate.d" / "a.sh").write_text("export MINE=$CONDA_DEFAULT_ENV\n")
    (tmp_path / "job.yaml").write_text(
        f"software: {{conda: ml}}\nenv: {{CONDA_ENVS_PATH: {tmp_path}/envs}}\nrun: [python, -c, 'import os, sys; print(os.environ[\"MINE\"], sys.executable)']\n"
    )
    assert phalanx("run", "job.yaml", cwd=tmp_path).stdout == f"ml {prefix}/bin/python\n"
    venv = venv_at(tmp_path / "venv")
    (tmp_path / "main.py").write_text("import sys; print(sys.prefix)\n")
    words = ("--venv", "venv", "--", "python", "main.py")
    assert phalanx("run", *words, cwd=tmp_path).stdout == f"{venv}\n"
    typo = phalanx("run", "--conda", str(tmp_path / "envs" / "mll"), "--", "python", "main.py", cwd=tmp_path, code=1)
    assert "on this node; did you mean ml?" in typo.stderr


@pytest.fixture
def uv_project(phalanx, tmp_path, monkeypatch):
    """A project of uv that is a package with its code in src, and locked to a wheel of its own."""
    if not UV.exists():
        pytest.skip("uv is not here: make uv-tools")
    monkeypatch.setenv("UV_OFFLINE", "1")
    file = wheel(tmp_path, "pxlocked", body=f"# {tmp_path}", command="pxlocked-say")
    (tmp_path / "src" / "mine").mkdir(parents=True)
    (tmp_path / "src" / "mine" / "__init__.py").write_text("import pxlocked; VERSION = pxlocked.VERSION\n")
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.9"\ndependencies = ["pxlocked"]\n'
        f'[tool.uv.sources]\npxlocked = {{path = "{file}"}}\n[build-system]\nrequires = ["uv_build"]\nbuild-backend = "uv_build"\n'
    )
    subprocess.run([UV, "lock", "--offline"], cwd=tmp_path, check=True, capture_output=True)
    return ("-e", f"PATH={UV.parent}:{phalanx.env['PATH']}", "--uv", "uv.lock")


def test_locked_project_is_installed_once_and_its_own_code_is_that_of_the_job(phalanx, uv_project, tmp_path):
    code = "import mine, os; print(mine.VERSION, os.environ['VIRTUAL_ENV'])"
    first = phalanx("run", *uv_project, "--", "python", "-c", code, cwd=tmp_path)
    version, venv = first.stdout.split()
    assert version == "1.0"
    assert "uv.lock: its packages are installed once on each node" in first.stderr
    assert FolderCache(os.path.dirname(os.path.dirname(venv))).complete(os.path.basename(venv))
    (tmp_path / "src" / "mine" / "__init__.py").write_text("VERSION = 'edited'\n")
    assert phalanx("run", *uv_project, "--copy", "--", "python", "-c", code, cwd=tmp_path).stdout == f"edited {venv}\n"
    assert "already installed on this node" in phalanx.said(phalanx.last(tmp_path), tmp_path)
    assert phalanx("run", *uv_project, "--", "pxlocked-say", cwd=tmp_path).stdout == "command of pxlocked\n"


def test_lock_that_cannot_be_installed_ends_the_job_with_the_words_of_uv(phalanx, uv_project, tmp_path):
    next(tmp_path.glob("*.whl")).unlink()
    lock = tmp_path / "uv.lock"
    lock.write_text(lock.read_text() + "# another environment\n")
    done = phalanx("run", *uv_project, "--", "true", cwd=tmp_path, code=1)
    assert "n0: uv.lock could not be installed: uv ended with code" in done.stderr
    lock.write_text("nonsense")
    done = phalanx("run", *uv_project, "--", "true", cwd=tmp_path, code=1)
    assert "n0: uv.lock cannot be read" in done.stderr
    assert "no such file" in phalanx("run", "--uv", "sub/uv.lock", "--", "true", cwd=tmp_path, code=78).stderr
