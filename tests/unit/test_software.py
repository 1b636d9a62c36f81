"""The environment that a job names: what the key accepts, and what a node finds, says and changes."""

import json
import os
import sys
from pathlib import Path

import pytest

from phalanx.cli.jobs.request.job_file import parse_job_file
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.job_file.software import Software, parse_software
from phalanx.node.logic.requirements import InvalidRequirements, locked_sources
from phalanx.node.logic.software import changes_between, modules_listed, with_changes
from phalanx.node.prepare.software_main import main

MODULE_COMMAND = """
module() {
  if [ "$*" = "-t avail" ]; then printf '/mf:\\ncuda/\\ncuda/12.4(default) <L>\\ngcc/13\\n' >&2; return; fi
  case $2 in
    cuda*) export CUDA_HOME=/opt/cuda PATH=/opt/cuda/bin:$PATH LOADEDMODULES=cuda/12.4;;
    gcc*) echo 'gcc is broken' >&2; return 1;;
    *) return 1;;
  esac
}
"""


def of_job(**keys):
    return spec_from_mapping({"run": "true", **keys}, workdir="/w")


# ---- the key


def test_job_file_names_modules_as_a_list_and_keeps_their_versions_as_written():
    file = parse_job_file("run: 'true'\nsoftware:\n  modules: [cuda/12, gcc/1.10]\n  venv: .venv\n", path="job.yaml")
    assert of_job(**file.mapping).software == Software(modules=("cuda/12", "gcc/1.10"), venv=".venv")
    assert of_job(software={"modules": "cuda/12, gcc"}).software.modules == ("cuda/12", "gcc")


def test_requirements_is_a_form_of_it_and_the_key_says_the_same():
    assert of_job(software={"requirements": "r.txt"}) == of_job(requirements="r.txt")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"condo": "x"}, "did you mean conda"),
        ({}, "names nothing"),
        ({"conda": "a", "venv": "b"}, "conda and venv cannot be combined"),
        ({"venv": "b", "requirements": "r.txt"}, "cannot be combined"),
        ({"conda": "-p"}, "not a name"),
        ({"venv": " "}, "not a name"),
        ({"venv": "b", "uv": "uv.lock"}, "venv and uv cannot be combined"),
        ({"uv": "/p/uv.lock"}, "not a uv.lock in the working directory"),
        ({"uv": "requirements.txt"}, "not a uv.lock"),
        ({"modules": ["a b"]}, "not a name"),
        ({"modules": ["a\a"]}, "not a name"),
        ({"modules": [["a"]]}, "not a name"),
        ({"modules": ["m"] * 65}, "at most 64"),
        ({"requirements": "/r.txt"}, "not in the working directory"),
        ("conda", "must contain a form"),
    ],
)
def test_nonsense_is_refused(value, why):
    with pytest.raises(BadRequest) as caught:
        parse_software(value)
    assert why in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("other", [{"image": "a"}, {"requirements": "r.txt"}])
def test_an_image_or_a_list_of_packages_excludes_it(other):
    with pytest.raises(BadFile, match="cannot be combined"):
        of_job(software={"venv": "v"}, **other)


def test_copys_own_list_of_packages_is_not_installed_into_an_environment_that_exists():
    assert of_job(software={"venv": "v"}, requirements="none").software.has_python
    assert not of_job(software={"modules": ["gcc"]}, requirements="r.txt").software.has_python


def test_lock_file_tells_from_which_folders_it_installs():
    text = '[[package]]\nname = "a"\nsource = {{ {0} = "." }}\n[[package]]\nname = "b"\nsource = {{ editable = "packages/b" }}\n'
    text += '[[package]]\nname = "c"\nsource = {{ directory = "../c" }}\n[[package]]\nname = "d"\nsource = {{ registry = "x" }}\n'
    assert locked_sources(text.format("editable")) == (("../c", "packages/b"), True)
    assert locked_sources(text.format("virtual")) == (("../c", "packages/b"), False)
    for nonsense in ("", "version = 1", "package = 3", "[[package]]\nname = 'a'\n", "]"):
        with pytest.raises(InvalidRequirements, match="cannot be read"):
            locked_sources(nonsense)


# ---- what it changes


def test_place_of_a_task_is_its_own_whatever_an_environment_sets():
    before = {"A": "1", "RANK": "3", "CUDA_VISIBLE_DEVICES": "0", "GONE": "x", "_": "a"}
    after = {"A": "2", "RANK": "0", "CUDA_VISIBLE_DEVICES": "", "PHALANX_JOB_ID": "9", "NEW": "y", "_": "b"}
    changes = changes_between(before, after)
    assert changes == {"A": "2", "GONE": None, "NEW": "y"}
    assert with_changes({"A": "1", "GONE": "x", "RANK": "3"}, changes) == {"A": "2", "NEW": "y", "RANK": "3"}


def test_lists_of_both_module_systems_are_read():
    of_environment_modules = "/mf:\ncuda/12.4 <L>\ngcc/13(default) \nNo module(s) found.\n"
    of_lmod = "/mf:\ncuda/\ncuda/12.4\ngcc/\ngcc/13(default)\n"
    assert modules_listed(of_environment_modules) == modules_listed(of_lmod) == ["cuda/12.4", "gcc/13"]


# ---- what a node finds


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Asks a node with nothing but a home folder for software; returns its answer."""
    for name in ("CONDA_EXE", "MAMBA_EXE", "MAMBA_ROOT_PREFIX", "CONDA_ENVS_PATH", "CONDA_PREFIX", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("MODULESHOME", str(tmp_path / "modules"))
    (tmp_path / "modules" / "init").mkdir(parents=True)
    (tmp_path / "modules" / "init" / "bash").write_text(MODULE_COMMAND)

    def ask(**software):
        answer = tmp_path / "answer"
        order = {"conda": "", "modules": [], "venv": "", **software, "workdir": str(tmp_path), "answer": str(answer)}
        (tmp_path / "order").write_text(json.dumps(order))
        code = main([str(tmp_path / "order")])
        found = json.loads(answer.read_text())
        assert code == ("why" in found)
        return found

    return ask


def conda_environment(folder, *, python=True):
    (folder / "conda-meta").mkdir(parents=True)
    (folder / "bin").mkdir()
    if python:
        (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return folder


def virtual_environment(folder, version=".".join(map(str, sys.version_info[:3]))):
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
    return folder


def test_modules_are_loaded_and_one_that_is_absent_names_the_nearest(node):
    assert node(modules=["cuda"])["changes"] == {
        "CUDA_HOME": "/opt/cuda",
        "LOADEDMODULES": "cuda/12.4",
        "PATH": "/opt/cuda/bin:/usr/bin:/bin",
    }
    assert node(modules=["cuda", "cudnn/9"])["why"] == "no module cudnn/9 on this node; found: cuda/12.4, gcc/13"
    assert node(modules=["gc/13"])["why"] == "no module gc/13 on this node; did you mean gcc/13?"
    assert node(modules=["gcc/12"])["why"].endswith("did you mean gcc/13?")
    assert node(modules=["gcc/13"])["why"] == "module gcc/13 could not be loaded on this node: gcc is broken"


def test_conda_environment_is_entered_with_its_scripts_and_its_own_variables(node, tmp_path, monkeypatch):
    prefix = conda_environment(tmp_path / "miniforge3" / "envs" / "ml")
    conda_environment(tmp_path / "miniforge3", python=False)
    (prefix / "conda-meta" / "state").write_text('{"env_vars": {"MINE": "1", "AWAY": "***unset***"}}')
    scripts = prefix / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "gdal.sh").write_text('export GDAL_DATA="$CONDA_PREFIX/share/gdal"\n')
    monkeypatch.setenv("VIRTUAL_ENV", "/old")
    monkeypatch.setenv("PATH", "/old/bin:/usr/bin:/bin")
    found = node(conda="ml")
    assert found["changes"] == {
        "CONDA_DEFAULT_ENV": "ml",
        "CONDA_PREFIX": str(prefix),
        "CONDA_PROMPT_MODIFIER": "(ml) ",
        "CONDA_SHLVL": "1",
        "GDAL_DATA": f"{prefix}/share/gdal",
        "MINE": "1",
        "PATH": f"{prefix}/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": None,
    }
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in found["found"]
    assert node(conda="base")["changes"]["CONDA_PREFIX"] == str(tmp_path / "miniforge3")
    assert node(conda="mll")["why"] == "no conda environment mll on this node; did you mean ml?"
    assert node(conda="./miniforge3/envs/lm")["why"].endswith("envs/lm on this node; did you mean ml?")
    (scripts / "ends.sh").write_text("echo no licence; exit 3\n")
    why = node(conda="ml")["why"]
    assert why == f"{scripts}/ends.sh ended the shell with code 3 on this node: no licence"


def test_conda_that_knows_more_folders_than_are_searched_is_asked(node, tmp_path, monkeypatch):
    elsewhere = conda_environment(tmp_path / "project" / "far")
    program = tmp_path / "bin" / "conda"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$*" = \'env list --json\' ] && echo \'{{"envs": ["{elsewhere}"]}}\'\n')
    program.chmod(0o755)
    assert node(conda="far")["why"].endswith(
        "neither conda, mamba nor micromamba is here: not in CONDA_EXE, PATH, the home folder or /opt"
    )
    monkeypatch.setenv("CONDA_EXE", str(program))
    assert node(conda="far")["changes"]["CONDA_PREFIX"] == str(elsewhere)
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda" / "environments.txt").write_text(f"{elsewhere}\n/gone\n")
    program.write_text("#!/bin/sh\nexit 1\n")
    assert node(conda="far")["changes"]["CONDA_PREFIX"] == str(elsewhere)


def test_virtual_environment_must_start_with_the_python_that_it_was_made_for(node, tmp_path):
    venv = virtual_environment(tmp_path / "venv")
    changes = node(venv="venv")["changes"]
    assert changes == {"PATH": f"{venv}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    assert node(venv="~/venv")["changes"] == changes
    assert node(venv="venv2")["why"] == f"no virtual environment {tmp_path}/venv2 on this node; did you mean venv?"
    assert node(venv="modules/x")["why"].endswith("; no such folder")
    virtual_environment(tmp_path / "old", version="3.4.1")
    assert "was made for Python 3.4, but its Python is" in node(venv="old")["why"]
    broken = virtual_environment(tmp_path / "broken") / "bin" / "python"
    broken.unlink()
    broken.symlink_to("/usr/bin/python2.3")
    assert node(venv="broken")["why"].endswith("does not exist on this node: it leads to /usr/bin/python2.3")
    broken.unlink()
    broken.write_text("#!/bin/sh\necho 'libpython not found' >&2; exit 127\n")
    Path(broken).chmod(0o755)
    assert node(venv="broken")["why"].endswith("does not start on this node: libpython not found")


def test_modules_come_before_the_environment_that_needs_them(node, tmp_path):
    venv = virtual_environment(tmp_path / "venv")
    found = node(modules=["cuda"], venv="venv")
    assert found["changes"]["PATH"] == f"{venv}/bin:/opt/cuda/bin:/usr/bin:/bin"
    assert found["found"].startswith("modules cuda, virtual environment ")
