"""Every write of the store stands behind a failpoint with a name, and every name stands in the code: a new write without one fails here."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.store import failpoints
from phalanx.store.failpoints import FAILPOINTS, VARIABLE, Failure, arm, arm_by_text, armed, hit

STORE = Path(failpoints.__file__).parent
SOURCES = sorted(path for path in STORE.rglob("*.py") if path.name != "failpoints.py")
WRITES = {
    "os": {
        "write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "sync", "rename", "renames", "replace", "link", "symlink", "unlink",
        "remove", "rmdir", "removedirs", "mkdir", "makedirs", "truncate", "ftruncate", "posix_fallocate", "copy_file_range", "sendfile",
        "chmod", "fchmod", "chown", "fchown", "utime", "mknod", "mkfifo",
    },
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copyfileobj"},
    "tempfile": {"mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory"},
}  # fmt: skip
POINTS = {"hit", "write", "sync_directory"}  # of failpoints.py; each takes the name first
FLAGS = {"O_CREAT", "O_TRUNC", "O_APPEND"}
# Settings of a connection, and what only looks; `journal_mode` writes the header of a new file, under the point that opens it.
QUIET_PRAGMAS = {
    "synchronous", "foreign_keys", "journal_size_limit", "trusted_schema", "cell_size_check", "cache_size", "query_only", "page_count",
    "page_size", "application_id", "journal_mode",
}  # fmt: skip
QUIET_SQL = ("SELECT ", "PRAGMA integrity_check", "BEGIN", "COMMIT")  # in reading.py a COMMIT ends a look


def calls(tree):
    """(function, call) for every call in a module; the innermost function that holds it."""

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                yield inside, child
            yield from walk(child, inside)

    yield from walk(tree, None)


def writes(call, path):
    """Whether a call can change a file."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open"  # the store knows only descriptors
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in WRITES.get(owner, ()):
        return True
    if owner == "os" and function.attr == "open":
        return any(isinstance(part, ast.Attribute) and part.attr in FLAGS for part in ast.walk(call))
    if owner == "apsw" and function.attr == "Connection":
        return any(isinstance(part, ast.Attribute) and part.attr == "SQLITE_OPEN_CREATE" for part in ast.walk(call))
    if function.attr in {"executemany", "wal_checkpoint", "write_text", "write_bytes", "writelines", "truncate"}:
        return True
    if function.attr == "pragma":
        return not (isinstance(call.args[0], ast.Constant) and call.args[0].value in QUIET_PRAGMAS)
    return function.attr == "execute" and not only_looks(call.args[0], path)


def only_looks(sql, path):
    if isinstance(sql, ast.Subscript) or (isinstance(sql, ast.Call) and isinstance(sql.func, ast.Attribute)):
        named: ast.expr = sql
        if isinstance(sql, ast.Call):
            assert isinstance(sql.func, ast.Attribute)
            named = sql.func.value
        return isinstance(named, ast.Subscript) and isinstance(named.value, ast.Name) and named.value.id == "_READS"
    if not (isinstance(sql, ast.Constant) and isinstance(sql.value, str)):
        return False
    return sql.value.startswith(QUIET_SQL if path.name == "reading.py" else QUIET_SQL[:3])


def points_in(path):
    """(name, function, line) of every failpoint passed in a file."""
    for function, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
        words = [call.func, *call.args]  # also handed to an executor: submit(sync_directory, "name", folder)
        at = next((at for at, word in enumerate(words) if isinstance(word, ast.Name) and word.id in POINTS), None)
        if at is not None:
            name = words[at + 1]
            assert isinstance(name, ast.Constant), f"{path.name}:{call.lineno}: a failpoint's name is written out"
            yield name.value, function, call.lineno


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STORE)))
def test_every_write_stands_behind_a_failpoint_of_its_own(path):
    points = [(function, line) for _, function, line in points_in(path)]
    bare = []
    for function, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
        if not writes(call, path):
            continue
        name = function.name if function is not None else None
        before = [line for holder, line in points if holder is not None and holder.name == name and line <= call.lineno]
        others = [
            other.lineno
            for holder, other in calls(ast.parse(path.read_text(encoding="utf-8")))
            if writes(other, path) and holder is not None and holder.name == name and other.lineno < call.lineno
        ]
        if not before or (others and max(others) >= max(before)):
            bare.append(f"{path.relative_to(STORE)}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert bare == [], 'put hit("...") before it, and the name into FAILPOINTS'


def test_every_failpoint_stands_at_one_place_and_every_place_is_known():
    found = [name for path in SOURCES for name, _, _ in points_in(path)]
    assert sorted(found) == sorted(FAILPOINTS)


def test_the_search_for_writes_finds_them():
    """The net itself: what a hurried colleague might write is caught."""
    for text in (
        "os.replace(a, b)", "os.fsync(fd)", "open(path, 'w')", "connection.execute('DELETE FROM jobs')", "connection.execute(sql)",
        "cursor.executemany(_WRITES['put_job'], rows)", "os.open(path, os.O_WRONLY | os.O_CREAT)", "shutil.rmtree(folder)",
        "connection.pragma('user_version', 3)", "connection.execute(_WRITES['put_job'])", "tempfile.mkstemp()",
    ):  # fmt: skip
        call = ast.parse(text, mode="eval").body
        assert writes(call, Path("store.py")), text
    for text in (
        "os.open(path, os.O_RDONLY)",
        "connection.execute(_READS['job'], (1,))",
        "connection.pragma('page_size')",
        "os.stat(path)",
    ):
        assert not writes(ast.parse(text, mode="eval").body, Path("store.py")), text


# ---- how they fail ---------------------------------------------------------------------------------------------------


def test_an_unarmed_point_passes():
    for name in FAILPOINTS:
        hit(name)


def test_an_armed_point_fails_once_at_its_nth_pass():
    with armed("store.commit.begin", Failure.ERROR, nth=3):
        hit("store.commit.begin")
        hit("store.commit.begin")
        with pytest.raises(OSError, match=r"failpoint store\.commit\.begin"):
            hit("store.commit.begin")
        hit("store.commit.begin")
        hit("store.commit.rows")


def test_full_says_no_space():
    with armed("logs.append.sync", Failure.FULL), pytest.raises(OSError) as caught:
        hit("logs.append.sync")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "text",
    ["store.commit.begn=kill", "store.commit.done=error", "store.commit.begin=torn", "store.commit.begin", "store.commit.begin=kill:x",
     "store.commit.begin=kill:0", "store.commit.begin=explode"],
)  # fmt: skip
def test_what_cannot_be_armed_is_refused(text):
    with pytest.raises(ValueError):
        arm_by_text(text)


def test_arming_an_unknown_point_names_the_known_ones():
    with pytest.raises(ValueError, match=r"there is no failpoint 'x'; known: blobs\."):
        arm("x", Failure.KILL)


def test_the_environment_arms_a_real_process():
    script = "from phalanx.store.failpoints import hit; hit('store.commit.begin'); print('passed', flush=True); hit('store.commit.begin')"
    environment = {**os.environ, VARIABLE: "logs.append.write=torn, store.commit.begin=kill:2"}
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert (child.returncode, child.stdout) == (-9, "passed\n")


def test_a_wrong_word_in_the_environment_stops_the_process():
    environment = {**os.environ, VARIABLE: "store.comit=kill"}
    child = subprocess.run(
        [sys.executable, "-c", "import phalanx.store.failpoints"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert child.returncode == 1
    assert "there is no failpoint 'store.comit'" in child.stderr
