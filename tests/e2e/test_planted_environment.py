"""What a job plants in its environment works in its own ranks and nowhere else; and the head never unpickles, whatever it is asked."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.node.processes.proctable import process_environment, read_table
from tests import canaries

pytestmark = pytest.mark.serial

LIMIT_S = 120.0  # a hang guard
PHALANX = (sys.executable, "-P", "-m", "phalanx.app.cli")
LIBRARY = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void seen(void) {
    char words[4096];
    int from = open("/proc/self/cmdline", O_RDONLY), to = open(WHERE, O_WRONLY | O_CREAT | O_APPEND, 0666);
    ssize_t size = read(from, words, sizeof words - 1);
    for (ssize_t at = 0; at < size; at++) if (!words[at]) words[at] = ' ';
    words[size > 0 ? size : 0] = '\n';
    if (write(to, words, size + 1) < 0) abort();
    close(from);
    close(to);
}
"""
LOGGING = "open({where!r}, 'a').write(open('/proc/self/cmdline').read().replace('\\0', ' ') + '\\n')\n"
GUARD = """
import sys
if "phalanx.app.head" in open("/proc/self/cmdline").read():
    import pickle, _pickle, marshal
    open({where!r} + ".on", "w").close()
    def _refuse(*_, **__):
        import traceback
        with open({where!r}, "a") as file:
            file.write("".join(traceback.format_stack()))
        raise RuntimeError("the head unpickles")
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        setattr(pickle, name, _refuse)
    for name in ("load", "loads", "Unpickler"):
        setattr(_pickle, name, _refuse)
"""


def _phalanx(
    home: Path, *words: str, more: dict[str, str] | None = None, cwd: Path | None = None, typed: str = ""
) -> str:
    kept = canaries.environment()
    done = subprocess.run(
        [*PHALANX, *words],
        env={**kept, "PHALANX_HOME": str(home), **(more or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=cwd,
        input=typed,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _plant(folder: Path) -> dict[str, str]:
    """Everything that makes an interpreter, a shell or the loader run something; each writes down who ran it."""
    for kind in ("sitecustomize", "usercustomize"):
        (folder / f"{kind}.py").write_text(LOGGING.format(where=str(folder / "python.seen")))
    (folder / "startup.sh").write_text(
        f"tr '\\0' ' ' < /proc/$$/cmdline >> {folder}/shell.seen; echo >> {folder}/shell.seen\n"
    )
    planted = {
        "PYTHONPATH": str(folder),
        "PYTHONSTARTUP": str(folder / "sitecustomize.py"),
        "PYTHONHOME": "",
        "PYTHONINSPECT": "",
        "BASH_ENV": str(folder / "startup.sh"),
        "ENV": str(folder / "startup.sh"),
        "IFS": "/",
        "CDPATH": "/",
        "PYTHONWARNINGS": "error",
        "GCONV_PATH": str(folder),
    }
    if (compiler := shutil.which("gcc")) is not None:
        (folder / "evil.c").write_text(LIBRARY)
        subprocess.run(
            [
                compiler,
                "-shared",
                "-fPIC",
                f'-DWHERE="{folder}/loader.seen"',
                "-o",
                folder / "evil.so",
                folder / "evil.c",
            ],
            check=True,
        )
        planted |= {"LD_PRELOAD": str(folder / "evil.so"), "LD_AUDIT": ""}
    return planted


def _seen(folder: Path, kind: str) -> list[str]:
    path = folder / f"{kind}.seen"
    return path.read_text().splitlines() if path.exists() else []


def _ours(home: Path) -> dict[int, str]:
    """Head, supervisors, spawners and keepers, by pid: whoever carries this cluster's home or a node's key and is no task."""
    key = json.loads(next((home / "nodes").glob("*/engine.json")).read_text())["node_key"].encode()
    head = json.loads((home / "head.json").read_text())["pid"]
    found = {}
    for pid in read_table():
        known = process_environment(pid)
        if pid == head or (known.get(b"PHALANX_NODE_KEY") == key and b"PHALANX_TASK_KEY" not in known):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def test_what_a_job_plants_acts_in_its_ranks_and_in_no_program_of_ours(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "planted"
    folder.mkdir()
    planted = _plant(folder)
    asked = [word for name, value in planted.items() for word in ("--env", f"{name}={value}")]
    _phalanx(home, "up", "--virtual", "1x2", "--port", "0")
    try:
        text = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=2\nsrun true\n"
        (tmp_path / "batch.sh").write_text(text)
        _phalanx(
            home,
            "run",
            "--gpus",
            "1",
            "--setup",
            "true",
            *asked,
            "--",
            sys.executable,
            "-c",
            "print('in a rank')",
            cwd=tmp_path,
        )
        job = re.search(
            r"job (\d+)", _phalanx(home, "submit", "--gpus", "1", *asked, "--", "sleep", "600", cwd=tmp_path)
        )
        assert job
        _phalanx(home, "exec", job[1], "--", "true")  # it runs, and the keeper is there to be looked at
        ours = _ours(home)
        assert len(ours) >= 4, ours  # head, supervisor, spawner, keeper
        for pid, words in ours.items():
            assert "evil.so" not in Path(f"/proc/{pid}/maps").read_text(), words
            assert not process_environment(pid).keys() & {b"LD_PRELOAD", b"BASH_ENV", b"PYTHONSTARTUP"}, words
        _phalanx(home, "cancel", job[1])
        _phalanx(home, "run", *asked, str(tmp_path / "batch.sh"), cwd=tmp_path)
    finally:
        _phalanx(home, "down", "--cancel-jobs")
    assert any("in a rank" in line for line in _seen(folder, "python"))  # the plants are alive
    assert any("true" in line for line in _seen(folder, "shell"))  # setup, by bash
    ours_by_words = re.compile(r"phalanx\.(app|node)|spawner_main|zygote_main")
    assert [line for kind in ("python", "shell") for line in _seen(folder, kind) if ours_by_words.search(line)] == []
    of_loader = _seen(folder, "loader")
    if "LD_PRELOAD" in planted:
        assert any("in a rank" in line for line in of_loader)
        assert [line for line in of_loader if re.search(r"phalanx\.app|spawner_main|zygote_main", line)] == []


def test_the_head_unpickles_nothing_through_the_life_of_a_job(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "guard"
    folder.mkdir()
    where = folder / "unpickled"
    (folder / "sitecustomize.py").write_text(GUARD.format(where=str(where)))
    project = tmp_path / "project"
    project.mkdir()
    (project / "data").write_text("x")
    _phalanx(home, "up", "--virtual", "1x2", "--port", "0", more={"PYTHONPATH": str(folder)})
    try:
        assert (folder / "unpickled.on").exists()  # the guard stands in the head
        _phalanx(
            home, "run", "--gpus", "2", "--copy", "--", "sh", "-c", "cat data; cp data $PHALANX_OUTPUT_DIR", cwd=project
        )
        job = re.search(r"job (\d+)", _phalanx(home, "submit", "--gpus", "1", "--", "sleep", "600", cwd=project))
        assert job
        assert "typed" in _phalanx(home, "exec", job[1], "--", "cat", typed="typed")
        for words in (
            ("why", job[1]),
            ("show", "1"),
            ("logs", "1"),
            ("ps",),
            ("nodes",),
            ("queues",),
            ("get", "1", str(tmp_path / "got")),
            ("cancel", job[1]),
        ):
            _phalanx(home, *words)
    finally:
        _phalanx(home, "down", "--cancel-jobs")
    assert not where.exists(), where.read_text()
