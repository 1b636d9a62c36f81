"""What a file of requirements asks for, what its environment is called, and which environments go."""

import fcntl
import os

import pytest

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.job_file.requirements import parse_requirements
from phalanx.node.files.cache_folder import cache_folder, make_cache
from phalanx.node.files.folder_cache import FolderCache
from phalanx.node.logic.requirements import (
    InvalidRequirements,
    PythonInterpreter,
    activated,
    default_requirements_file,
    environment_name,
    environments_to_evict,
    error_summary,
    names_python_by_path,
    project_dependencies,
    python_candidates,
    read_requirements,
)

PYTHON = PythonInterpreter(
    path="/usr/bin/python3",
    version="3.11.7",
    abi="cpython-311",
    platform="linux-x86_64",
    parents=(),
    scripts="/usr/bin",
)


def taken(path, **files):
    named = {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}
    return read_requirements(path, workdir="/w", read=named.get)


# ---- the key


@pytest.mark.parametrize(
    "value", ["requirements.txt", "reqs/dev.txt", "./requirements.in", "sub/pyproject.toml", "none"]
)
def test_key_names_a_file_of_the_working_directory(value):
    assert parse_requirements(value) == os.path.normpath(value)


@pytest.mark.parametrize(
    "value", ["/etc/requirements.txt", "../requirements.txt", "a/../../r.txt", "setup.cfg", "..", "."]
)
def test_key_elsewhere_or_of_another_kind_is_refused(value):
    with pytest.raises(BadRequest):
        parse_requirements(value)


def test_job_carries_the_key():
    assert spec_from_mapping({"run": "true", "requirements": "r.txt"}, workdir="/w").requirements == "r.txt"
    with pytest.raises(BadFile, match="requirements"):
        spec_from_mapping({"run": "true", "requirements": "/r.txt"}, workdir="/w")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"requirements.txt": b"", "pyproject.toml": b"[project]\ndependencies = ['a']"}, "requirements.txt"),
        ({"pyproject.toml": b"[project]\nname = 'x'\ndependencies = ['a']"}, "pyproject.toml"),
        ({"pyproject.toml": b"[project]\nname = 'x'\ndynamic = ['dependencies']"}, ""),
        ({"pyproject.toml": b"[tool.ruff]\nline-length = 120"}, ""),
        ({"pyproject.toml": b"no [ toml"}, ""),
        ({"train.py": b""}, ""),
    ],
)
def test_copy_brings_its_own_list_where_it_has_one(files, found):
    assert default_requirements_file(files.get) == found


def test_dependencies_made_by_a_build_are_refused_by_name():
    with pytest.raises(BadRequest, match="known only when it is built"):
        project_dependencies("[project]\nname = 'x'\ndynamic = ['dependencies']")


# ---- reading


def test_included_files_stand_in_their_place_and_constraints_keep_their_path():
    found = taken(
        "r/all.txt",
        r__all_txt="-r base.txt  # first\ntorch>=2\n-c pins.txt\n",
        r__base_txt="numpy \\\n  ==2.0\n\n# no\n",
        r__pins_txt="numpy==2.0\n",
    )
    assert found.installer_lines == ("numpy   ==2.0", "torch>=2", "-c /w/r/pins.txt")
    assert found.source_lines == ("numpy   ==2.0", "torch>=2", "-c pins.txt")
    assert found.local_paths == ("r/pins.txt",)


@pytest.mark.parametrize(
    ("line", "local"),
    [
        ("./pkg", ["./pkg"]),
        ("./pkg[extra] ; python_version > '3'", ["./pkg"]),
        ("wheels/a-1.0-py3-none-any.whl --hash=sha256:00", ["wheels/a-1.0-py3-none-any.whl"]),
        ("a @ file:///srv/a.whl", ["/srv/a.whl"]),
        ("a @ https://example.org/a.whl", []),
        ("git+https://example.org/a.git", []),
        ("--index-url https://example.org/simple", []),
        ("--find-links wheels", ["wheels"]),
        ("-e ./pkg#egg=pkg", ["./pkg"]),
        ("-rmore.txt", []),
        ("numpy==2.0", []),
    ],
)
def test_contents_count_of_what_is_local(line, local):
    assert list(taken("r.txt", r_txt=line, more_txt="numpy").local_paths) == local


def test_editable_package_is_installed_itself_for_the_copy_goes_away():
    assert taken("r.txt", r_txt="-e ./pkg#egg=pkg\n--editable=.\n").installer_lines == ("./pkg", ".")


def test_what_is_not_there_is_named_with_who_names_it():
    with pytest.raises(InvalidRequirements, match=r"base.txt: no such file in /w \(r.txt names it\)"):
        taken("r.txt", r_txt="-r base.txt")


def test_files_that_include_each_other_end():
    with pytest.raises(InvalidRequirements, match="include each other"):
        taken("a.txt", a_txt="-r b.txt", b_txt="-r a.txt")


def test_project_is_its_dependencies_alone():
    found = taken("pyproject.toml", pyproject_toml="[project]\nname = 'x'\nversion = '3'\ndependencies = ['a>1', 'b']")
    assert found.installer_lines == ("a>1", "b")


# ---- the name


def name(text="numpy", python=PYTHON, contents=(), more=""):
    return environment_name(python, taken("r.txt", r_txt=text, more_txt=more, pins_txt=more), contents)


def test_equal_text_in_another_folder_is_the_same_environment():
    one = read_requirements("r.txt", workdir="/attempts/1.1/workdir", read={"r.txt": "-c p.txt", "p.txt": "a==1"}.get)
    two = read_requirements("r.txt", workdir="/attempts/9.1/workdir", read={"r.txt": "-c p.txt", "p.txt": "a==1"}.get)
    assert environment_name(PYTHON, one, ()) == environment_name(PYTHON, two, ())


@pytest.mark.parametrize(
    "other",
    [
        {"text": "numpy>2"},
        {"text": "-r more.txt", "more": "scipy"},
        {"contents": [("./pkg", "aa")]},
        {
            "python": PythonInterpreter(
                path="/usr/bin/python3",
                version="3.11.8",
                abi="cpython-311",
                platform="linux-x86_64",
                parents=(),
                scripts="",
            )
        },
        {
            "python": PythonInterpreter(
                path="/usr/bin/python3",
                version="3.11.7",
                abi="cpython-311",
                platform="linux-aarch64",
                parents=(),
                scripts="",
            )
        },
        {
            "python": PythonInterpreter(
                path="/usr/bin/python3",
                version="3.11.7",
                abi="cpython-311",
                platform="linux-x86_64",
                parents=("/opt/torch",),
                scripts="",
            )
        },
    ],
)
def test_whatever_the_packages_depend_on_changes_the_name(other):
    assert name(**other) != name()


def test_comments_and_how_it_is_split_into_files_change_nothing():
    assert name("# packages\nnumpy  # fast\n") == name("-r more.txt", more="numpy") == name()


# ---- around it


def test_rank_finds_the_environment_first_and_the_node_after():
    dressed = activated({"PATH": "/usr/bin", "PYTHONHOME": "/x", "A": "1"}, "/v")
    assert dressed == {"PATH": "/v/bin:/usr/bin", "VIRTUAL_ENV": "/v", "A": "1"}


def test_interpreter_is_the_one_the_command_names():
    assert python_candidates(("python3.12", "a.py"))[0] == "python3.12"
    assert python_candidates(("torchrun", "a.py"))[0] == "python"
    assert names_python_by_path(("/opt/bin/python3", "a.py"))
    assert not names_python_by_path(("./train.sh",))


def test_installer_is_quoted_by_its_errors():
    lines = ["Looking in indexes", "ERROR: no version of nope", "ERROR: No matching distribution", "[notice] new pip"]
    assert error_summary(lines) == "ERROR: no version of nope · ERROR: No matching distribution"
    uv = ["Using Python 3.11", "error: No solution found", "  cause: Because nope was not found", "", "  hint: none"]
    assert error_summary(uv) == "error: No solution found · cause: Because nope was not found · hint: none"
    assert error_summary(["a", "", "b"]) == "a · b"


# ---- where


def test_cache_is_in_the_nodes_folder_but_that_of_a_seat_goes_with_the_attempt():
    assert cache_folder("/n", per_attempt=False, environment={}) == "/n"
    assert cache_folder("/n", per_attempt=True, environment={}).endswith(f"/phalanx-cache-{os.getuid()}")
    assert cache_folder("/n", per_attempt=True, environment={"PHALANX_CACHE": "/fast"}) == "/fast"


def test_cache_that_others_can_write_is_refused(tmp_path):
    make_cache(str(tmp_path / "own"))
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(PermissionError, match="PHALANX_CACHE"):
        make_cache(str(tmp_path / "own"))


# ---- room


def test_the_longest_unused_go_until_the_rest_fits_and_the_newest_stays():
    stored = [("new", 30.0, 60), ("old", 10.0, 60), ("middle", 20.0, 30)]
    assert environments_to_evict(stored, 100) == ["old"]
    assert environments_to_evict(stored, 10) == ["old", "middle"]
    assert environments_to_evict(stored, 200) == []


def made(venvs, one, used_s):
    os.makedirs(os.path.join(venvs.clear(one), "lib"))
    with open(os.path.join(venvs.path(one), "lib", "a.py"), "w") as file:
        file.write("x" * 100_000)
    venvs.mark_complete(one)
    os.utime(os.path.join(venvs.path(one), ".phalanx-complete"), (used_s, used_s))


def test_environment_in_use_is_never_swept_and_an_unfinished_one_always(tmp_path):
    venvs = FolderCache(str(tmp_path))
    made(venvs, "old", 10.0)
    in_use = venvs.acquire("old")
    made(venvs, "middle", 2e9)
    made(venvs, "new", 3e9)
    os.makedirs(venvs.clear("half"))
    os.utime(os.path.join(venvs.path("old"), ".phalanx-complete"), (10.0, 10.0))
    assert venvs.sweep(bytes_max=1) == ["half", "middle"]
    os.close(in_use)
    assert venvs.sweep(bytes_max=1) == ["old"]
    assert venvs.complete("new")


def test_unfinished_one_that_is_being_made_is_left_alone(tmp_path):
    venvs = FolderCache(str(tmp_path))
    with venvs.creation_lock("a", wait=False) as mine:
        assert mine
        os.makedirs(venvs.clear("a"))
        with venvs.creation_lock("a", wait=False) as second:
            assert not second
        assert venvs.sweep() == []
    assert venvs.sweep() == ["a"]


def test_whoever_holds_the_lock_of_an_environment_does_not_hold_a_member_that_is_stopped(tmp_path):
    venvs, stopped = FolderCache(str(tmp_path)), iter((False, True))
    holder = venvs.acquire("a")
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError):
        venvs.acquire("a", lambda: next(stopped))
    os.close(holder)
    os.close(venvs.acquire("a"))
    assert not list(stopped)
