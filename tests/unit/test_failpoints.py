"""Around every write of the head stands a failpoint with a name, and every name stands in the code: a new write without one fails here.

The head is what `phalanx.app.head` imports, directly or by others, wherever it lies: a new module is searched without a line of test.
"""

import ast
import errno
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from phalanx import failpoints
from phalanx.failpoints import (
    ENVIRONMENT_VARIABLE,
    FAILPOINTS,
    FailureMode,
    arm,
    arm_from_text,
    armed,
    around,
    hit,
)

ROOT = Path(failpoints.__file__).parent.parent
# Modules that the head imports and that write, but not the head's state; each with its reason.
EXEMPT = {
    "phalanx.node.membership": "runs on the server that joins; a standby only reads with it",
    "phalanx.engines.ray.node_actor": "runs in Ray's actor on a node; the head takes a constant from it",
    "phalanx.node.files.job_accounts": "folders of jobs, made by supervisors; the head takes a constant from it",
    "phalanx.node.processes.cgroup_delegation": "the kernel's files, which hold nothing over a restart",
    "phalanx.node.processes.cgroups": "the same",
    "phalanx.wire.rank": "the lease page, written by supervisors into memory",
    "phalanx.wire.stream_relay": "pipes and sockets of a relay, which run beside the ranks of a job",
}
WRITES = {
    "os": {
        "write",
        "pwrite",
        "writev",
        "pwritev",
        "fsync",
        "fdatasync",
        "sync",
        "rename",
        "renames",
        "replace",
        "link",
        "symlink",
        "unlink",
        "remove",
        "rmdir",
        "removedirs",
        "mkdir",
        "makedirs",
        "truncate",
        "ftruncate",
        "posix_fallocate",
        "copy_file_range",
        "sendfile",
        "chmod",
        "fchmod",
        "lchmod",
        "chown",
        "fchown",
        "lchown",
        "utime",
        "mknod",
        "mkfifo",
        "setxattr",
        "removexattr",
    },
    "shutil": {
        "rmtree",
        "move",
        "copy",
        "copy2",
        "copyfile",
        "copytree",
        "copyfileobj",
        "copymode",
        "copystat",
        "unpack_archive",
    },
    "tempfile": {
        "mkstemp",
        "mkdtemp",
        "NamedTemporaryFile",
        "TemporaryFile",
        "SpooledTemporaryFile",
        "TemporaryDirectory",
    },
    "subprocess": {"Popen"},  # a process is durable too: what it is must be on record before it can outlive the head
}
PATH_WRITES = {
    "write_text",
    "write_bytes",
    "writelines",
    "truncate",
    "touch",
    "rmdir",
    "unlink",
    "symlink_to",
    "hardlink_to",
    "mkdir",
    "executemany",
    "executescript",
    "copy_expert",
    "wal_checkpoint",
    "extractall",
}
MARKS = {"hit"}  # between two writes
# Functions of `durable_files`: what each adds to its caller's part of the name, in order.
DERIVED = {
    "make_directory": ("directory",),
    "create_file": ("create",),
    "write_at": ("write",),
    "truncate_file": ("cut",),
    "sync_file": ("sync",),
    "sync_content": ("sync",),
    "rename_path": ("rename",),
    "remove_file": ("remove",),
    "remove_folder": ("remove",),
    "remove_tree": ("remove",),
    "sync_directory": ("sync_directory",),
    "replace_file": ("create", "write", "sync", "rename", "sync_directory"),
}
DURABLE = "phalanx.durable_files"
NOT_THE_HEADS = {"sync_path", "time_durable_write"}  # functions of it that pass no point
FLAGS = {"O_CREAT", "O_TRUNC", "O_APPEND", "O_WRONLY", "O_RDWR"}
# Opens a file that is there, to write it through a point: the descriptor alone changes nothing.
OPENED_TO_WRITE = {
    "phalanx.store.logs.files": {"_open"},
    "phalanx.store.outputs.copies": {"append_stored"},
}
# Settings of a connection, and what only looks; `journal_mode` writes the header of a new file, under the point that opens it.
QUIET_PRAGMAS = {
    "synchronous",
    "foreign_keys",
    "journal_size_limit",
    "trusted_schema",
    "cell_size_check",
    "cache_size",
    "query_only",
    "page_count",
    "page_size",
    "application_id",
    "journal_mode",
}
QUIET_SQL = ("SELECT ", "PRAGMA integrity_check", "PRAGMA quick_check", "BEGIN", "ROLLBACK")
# A reader's `execute`: what it is given are named reads, which is checked where they are named (reading.py). The second stands behind its caller's point.
QUIET_CALLS = {
    ("phalanx.store.sql.postgres.connections", "connection.execute(sql.encode(), values or None)"),
    ("phalanx.store.sql.postgres.connections", "connection.execute(sql.encode())"),
}
# Functions whose last write is closed by a mark of their only caller, which names it.
CLOSED_BY = {("phalanx.store.sql.postgres.store", "_write"): "postgres.commit.done"}
QUIET_MODES = {"r", "rb", "rt"}


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped():
    """A million nodes of syntax trees would be scanned in each full garbage collection of the tests that follow."""
    yield
    for cached in (parsed, imported, calls):
        cached.cache_clear()


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in (ROOT / "phalanx").rglob("*.py")}


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def reached(root):
    """Every module of ours that one imports, directly or by others, also where a function does it."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name in MODULES and name not in found:
            found.add(name)
            waiting += [*imported(parsed(MODULES[name])), name.rpartition(".")[0]]
    return sorted(found)


# The second is reached by its address alone; the others are commands beside the head.
ROOTS = (
    "phalanx.app.head",
    "phalanx.store.sql.postgres.store",
    "phalanx.store.sql.backups",
    *(f"phalanx.engines.{engine}.engine_type" for engine in ("local", "ray", "slurm")),  # found by name
)


@cache
def head():
    return sorted({name for root in ROOTS for name in reached(root)})


def sources():
    return [name for name in head() if name not in EXEMPT]


@cache
def calls(tree):
    """(function, call, the points of the `with` blocks it stands in) for every call in a module; the innermost function that holds it."""

    def walk(node, function, within):
        for child in ast.iter_child_nodes(node):
            inside, held = function, within
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside, held = child, ()
            if isinstance(child, ast.Call):
                yield inside, child, within
            if isinstance(child, ast.With):
                # `with around("x"), open(p, "w")`: what follows the point in the same line stands within it.
                for item in child.items:
                    yield from walk(ast.Expression(item.context_expr), inside, held)
                    if named(item.context_expr) is not None:
                        held = (*held, item.context_expr)
                for line in child.body:
                    yield from walk(ast.Module([line], []), inside, held)
                continue
            yield from walk(child, inside, held)

    return list(walk(tree, None, ()))


def named(call):
    """The name of the point around which a `with` stands; None for another context."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "around":
        name = call.args[0]
        return ast.unparse(name) if isinstance(name, ast.JoinedStr) else constant(name)
    return None


def constant(word):
    assert isinstance(word, ast.Constant), f"line {word.lineno}: a failpoint's name is written out"
    return word.value


def writes(call, module, function=None):
    """Whether a call can change what outlives the head."""
    called = call.func
    if isinstance(called, ast.Name):
        return called.id == "open" and not quiet_mode(call, 1)
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr in WRITES.get(owner, ()):
        return True
    if owner == "os" and called.attr == "open":
        flagged = {part.attr for part in ast.walk(call) if isinstance(part, ast.Attribute)} & FLAGS
        if flagged and not flagged & {"O_CREAT", "O_TRUNC"} and function in OPENED_TO_WRITE.get(module, ()):
            return False
        return bool(flagged)
    if owner == "os" and called.attr == "fdopen":
        return not quiet_mode(call, 1)
    if owner == "apsw" and called.attr == "Connection":
        return any(isinstance(part, ast.Attribute) and part.attr == "SQLITE_OPEN_CREATE" for part in ast.walk(call))
    if called.attr in PATH_WRITES and owner != "os":
        return True
    if called.attr == "pragma":
        return not (isinstance(call.args[0], ast.Constant) and call.args[0].value in QUIET_PRAGMAS)
    return called.attr == "execute" and not only_looks(call.args[0]) and (module, ast.unparse(call)) not in QUIET_CALLS


def quiet_mode(call, at):
    mode = next(
        (word.value for word in call.keywords if word.arg == "mode"), call.args[at] if len(call.args) > at else None
    )
    return mode is None or (isinstance(mode, ast.Constant) and mode.value in QUIET_MODES)


def only_looks(sql):
    if isinstance(sql, ast.Subscript) or (isinstance(sql, ast.Call) and isinstance(sql.func, ast.Attribute)):
        wanted: ast.expr = sql
        if isinstance(sql, ast.Call):
            assert isinstance(sql.func, ast.Attribute)
            wanted = sql.func.value
        return (
            isinstance(wanted, ast.Subscript) and ast.unparse(wanted.value).rpartition(".")[2] == "reads"
        )  # of a dialect
    if not (isinstance(sql, ast.Constant) and isinstance(sql.value, str)):
        return False
    return sql.value.startswith(QUIET_SQL)


def points_in(tree):
    """(name, verb, function, line) of every failpoint passed in a module that imports them, or functions that derive their names."""
    known = {name.rpartition(".")[2] for name in imported(tree) if name.startswith(("phalanx.failpoints.", DURABLE))}
    verbs = known & (MARKS | {"around"} | set(DERIVED))
    for function, call, _ in calls(tree):
        words = [call.func, *call.args]  # also handed to an executor: submit(sync_directory, "name", folder)
        at = next((at for at, word in enumerate(words) if isinstance(word, ast.Name) and word.id in verbs), None)
        if at is None:
            continue
        verb, name = words[at].id, words[at + 1]
        if verb in DERIVED:
            assert constant(name), f"line {call.lineno}: a file of the head has a point"
            for part in DERIVED[verb]:
                yield f"{constant(name)}.{part}", "write" if part == "write" else "around", function, call.lineno
        elif not isinstance(name, ast.JoinedStr):
            yield constant(name), verb, function, call.lineno


def bare_writes(tree, module):
    """Writes without a point before, or without one after: each in an `around` of its own, or between two marks of its function."""
    points = [(function, line) for _, _, function, line in points_in(tree)]
    found = [
        (function, call, within)
        for function, call, within in calls(tree)
        if writes(call, module, function.name if function is not None else None)
    ]
    if module == DURABLE:
        found = [one for one in found if one[0] is None or one[0].name not in NOT_THE_HEADS]
    shared = [within[-1] for _, _, within in found if within]
    for function, call, within in found:
        if within:
            if sum(other is within[-1] for other in shared) > 1:
                yield call
            continue
        mine = [line for holder, line in points if holder is function]
        others = [other.lineno for holder, other, _ in found if holder is function and other is not call]
        before = [
            line for line in mine if line <= call.lineno and not any(line <= other < call.lineno for other in others)
        ]
        after = [
            line for line in mine if line > call.lineno and not any(call.lineno < other < line for other in others)
        ]
        if function is None or not before or not (after or (module, function.name) in CLOSED_BY):
            yield call


def test_every_write_stands_between_failpoints_of_its_own():
    bare = [
        f"{module}:{call.lineno}: {ast.unparse(call)[:80]}"
        for module in sources()
        for call in bare_writes(parsed(MODULES[module]), module)
    ]
    assert bare == [], 'put it into `with around("..."):`, and the name into FAILPOINTS'


def test_the_modules_that_are_exempt_are_reached_and_write():
    assert set(EXEMPT) <= set(head())
    for module in EXEMPT:
        assert any(writes(call, module) for _, call, _ in calls(parsed(MODULES[module]))), (
            f"{module} writes nothing: strike it"
        )


def test_every_failpoint_stands_at_one_place_and_every_place_is_known():
    found = [name for module in sources() for name, _, _, _ in points_in(parsed(MODULES[module]))]
    assert sorted(found) == sorted(FAILPOINTS)


def test_functions_that_derive_names_pass_what_the_table_says():
    """Which points a function passes, itself and by the functions that it calls; and no function of the module is missing."""
    tree = parsed(MODULES[DURABLE])
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(functions) == set(DERIVED) | NOT_THE_HEADS
    for name, parts in DERIVED.items():
        passed: list[str] = []
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "around":
                    passed.append(ast.unparse(node.args[0]).rpartition(".")[2].rstrip("'\""))
                elif node.func.id in DERIVED:
                    passed += DERIVED[node.func.id]
        assert sorted(passed) == sorted(parts), name


def test_a_point_around_a_write_can_kill_after_it_and_a_mark_cannot():
    for module in sources():
        for name, verb, _, line in points_in(parsed(MODULES[module])):
            assert (FailureMode.AFTER in FAILPOINTS[name]) == (verb not in MARKS), f"{module}:{line}: {name}"
            assert (FailureMode.TORN in FAILPOINTS[name]) == (verb == "write"), f"{module}:{line}: {name}"


def test_the_search_for_writes_finds_them():
    """The net itself: what a hurried colleague might write is caught."""
    for text in (
        "os.replace(a, b)",
        "os.fsync(fd)",
        "open(path, 'w')",
        "open(path, mode=mode)",
        "os.fdopen(fd, 'wb')",
        "path.write_text(x)",
        "connection.execute('DELETE FROM jobs')",
        "connection.execute(sql)",
        "cursor.executemany(SQLITE.writes['put_job'], rows)",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, os.O_WRONLY)",
        "shutil.rmtree(folder)",
        "Path(x).touch()",
        "connection.pragma('user_version', 3)",
        "connection.execute(SQLITE.writes['put_job'])",
        "tempfile.mkstemp()",
        "subprocess.Popen(words)",
    ):
        call = ast.parse(text, mode="eval").body
        assert writes(call, "phalanx.store.sql.store"), text
    for text in (
        "os.open(path, os.O_RDONLY)",
        "open(path)",
        "open(path, 'rb', buffering=0)",
        "connection.execute(SQLITE.reads['job'], (1,))",
        "connection.pragma('page_size')",
        "os.stat(path)",
        "text.replace('a', 'b')",
    ):
        assert not writes(ast.parse(text, mode="eval").body, "phalanx.store.sql.store"), text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f():\n  os.fsync(fd)", 1),
        ("def f():\n  hit('a')\n  os.fsync(fd)", 1),  # none after
        ("def f():\n  os.fsync(fd)\n  hit('a')", 1),  # none before
        ("def f():\n  hit('a')\n  os.fsync(fd)\n  os.replace(a, b)\n  hit('b')", 2),  # none between
        ("def f():\n  hit('a')\n  os.fsync(fd)\n  hit('b')\n  os.replace(a, b)\n  hit('c')", 0),
        ("def f():\n  with around('a'):\n    os.fsync(fd)", 0),
        ("def f():\n  with around('a'):\n    os.fsync(fd)\n    os.replace(a, b)", 2),  # one point, two writes
        ("def f():\n  with around('a'):\n    pass\n  os.fsync(fd)", 1),
        ("def f():\n  with open(p, 'w'), around('a'):\n    pass", 1),  # opened before the point
        ("def f():\n  with around('a'), open(p, 'w'):\n    pass", 0),
        (
            "def f():\n  hit('a')\n  def g():\n    os.fsync(fd)\n  hit('b')",
            1,
        ),  # another function's points count for nothing
        ("os.fsync(fd)", 1),
    ],
)
def test_the_search_for_points_is_strict(text, count):
    tree = ast.parse(f"from phalanx.failpoints import around, hit\n{text}")
    assert len(list(bare_writes(tree, "m"))) == count


# ---- how they fail ---------------------------------------------------------------------------------------------------


def test_an_unarmed_point_passes():
    for name in FAILPOINTS:
        hit(name)
        with around(name):
            pass


def test_an_armed_point_fails_once_at_its_nth_pass():
    with armed("store.commit.begin", FailureMode.ERROR, nth=3):
        hit("store.commit.begin")
        hit("store.commit.begin")
        with pytest.raises(OSError, match=r"failpoint store\.commit\.begin"):
            hit("store.commit.begin")
        hit("store.commit.begin")
        hit("store.commit.rows")


def test_a_point_around_a_write_fails_before_it():
    done = []
    with armed("logs.append.sync", FailureMode.ERROR), pytest.raises(OSError), around("logs.append.sync"):
        done.append("written")
    assert done == []


def test_full_says_no_space():
    with armed("logs.append.sync", FailureMode.FULL), pytest.raises(OSError) as caught:
        hit("logs.append.sync")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "text",
    [
        "store.commit.begn=kill",
        "store.commit.done=error",
        "store.commit.begin=torn",
        "store.commit.begin",
        "store.commit.begin=kill:x",
        "store.commit.begin=kill:0",
        "store.commit.begin=explode",
    ],
)
def test_what_cannot_be_armed_is_refused(text):
    with pytest.raises(ValueError):
        arm_from_text(text)


def test_arming_an_unknown_point_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no failpoint 'x'; known: .*store\.open"):
        arm("x", FailureMode.KILL)


def test_the_environment_arms_a_real_process():
    script = "from phalanx.failpoints import hit; hit('store.commit.begin'); print('passed', flush=True); hit('store.commit.begin')"
    environment = {**os.environ, ENVIRONMENT_VARIABLE: "logs.append.write=torn, store.commit.begin=kill:2"}
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert (child.returncode, child.stdout) == (-9, "passed\n")


def test_after_kills_when_the_write_is_done_and_torn_leaves_half(tmp_path):
    script = "import os, sys; from phalanx.durable_files import write_at; write_at('blobs.put', os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), b'12345678', 0)"
    for failure, left in (("kill", b""), ("after", b"12345678"), ("torn", b"1234")):
        path = tmp_path / failure
        environment = {**os.environ, ENVIRONMENT_VARIABLE: f"blobs.put.write={failure}"}
        child = subprocess.run([sys.executable, "-c", script, path], env=environment, timeout=30, check=False)
        assert (child.returncode, path.read_bytes()) == (-9, left)


def test_a_failed_write_is_not_killed_after(tmp_path):
    script = (
        "from phalanx.durable_files import sync_directory\ntry:\n  sync_directory('blobs.put', '/nowhere')\n"
        "except OSError:\n  print('told')"
    )
    environment = {**os.environ, ENVIRONMENT_VARIABLE: "blobs.put.sync_directory=after"}
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=30, check=False
    )
    assert (child.returncode, child.stdout) == (0, b"told\n")


def test_a_wrong_word_in_the_environment_stops_the_process():
    environment = {**os.environ, ENVIRONMENT_VARIABLE: "store.comit=kill"}
    child = subprocess.run(
        [sys.executable, "-c", "import phalanx.failpoints"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert child.returncode == 1
    assert "no failpoint 'store.comit'" in child.stderr
