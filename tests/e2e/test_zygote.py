"""Warm ranks against the same command under a plain interpreter: they must not be told apart. Real torch, real forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from phalanx.node.logic.warm_start import parse_warm_command
from phalanx.node.processes.attempt_limits import JobLimits
from phalanx.node.processes.proctable import process_environment
from phalanx.node.processes.zygote import Zygotes, ZygoteState
from tests.e2e.process_rig import BARE, MODES, Rig, runs, until

pytest.importorskip("torch")
pytestmark = [pytest.mark.serial, pytest.mark.torch]

ENV = {**BARE, "PYTHONPATH": "", "HOME": "/", "LANG": "C.UTF-8"}
del ENV["PYTHONPATH"]


@pytest.fixture(scope="module")
def zygotes():
    made = Zygotes(node_key=f"test-zygotes-{os.getpid()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def zygote(zygotes):
    found = ask(zygotes, ("python", "x.py"))
    assert found is not None
    assert found.wait(100), found.reason
    return found


def ask(zygotes, command, env=ENV):
    """The zygote for a command; there is one."""
    taken = parse_warm_command(command)
    assert taken is not None
    found = zygotes.request(taken, env=env, cwd="/")
    assert found is not None
    return found


def plain(command, cwd):
    """What the command does under a plain interpreter: output and wait status."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=ENV,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.returncode


def warm(zygote, command, cwd, mode=None):
    """What it does as a warm rank."""
    with Rig(mode) as rig:
        attempt = rig.open(zygote=zygote)
        _, output = rig.run(attempt, command, cwd=str(cwd), env=ENV, warm=True)
        text, end = output(), rig.exit()
        attempt.close()
    return text, -end.signal if end.signal is not None else end.code


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_rank_has_the_limits_of_its_job(zygote, tmp_path, mode):
    (tmp_path / "x.py").write_text("import os; print(len(os.sched_getaffinity(0)), open('/proc/self/cgroup').read())")
    way = "affinity" if mode == "session" else "auto"
    with Rig(mode, limits=way) as rig:
        attempt = rig.open(zygote=zygote, limits=JobLimits(cpus=1))
        _, output = rig.run(attempt, ("python", "x.py"), cwd=str(tmp_path), env=ENV, warm=True)
        cpus, groups = output().split(maxsplit=1)
        attempt.close()
    assert rig.node_key in groups if mode == "cgroup" else cpus == "1"


SCRIPTS = {
    "exit with a code": "import sys; print('x'); sys.exit(3)",
    "exit with a message": "import sys; sys.exit('gone wrong')",
    "exit without a code": "raise SystemExit",
    "an exception": """
        def inner(): raise ValueError("no")
        def outer():
            try: inner()
            except ValueError as error: raise RuntimeError("wrapped") from error
        print("before"); outer()
        """,
    "an exception below an exception hook": """
        import sys, traceback
        sys.excepthook = lambda kind, error, trace: print("hook", kind, len(traceback.extract_tb(trace)))
        1 / 0
        """,
    "a syntax error": "x = = 1",
    "killed by itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ended at once": "import os; print('lost'); os._exit(7)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "atexit and threads": """
        import atexit, threading, time
        atexit.register(print, "second"); atexit.register(print, "first")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        print("main")
        """,
    "an exception and atexit": """
        import atexit, sys
        atexit.register(lambda: print("at exit", flush=True))
        raise KeyError(1)
        """,
    "who am I": """
        import __main__, os, signal, sys
        print(sys.argv, sys.path[0], __file__, __name__, __spec__, __package__, __doc__, type(__loader__).__name__)
        print(sys.orig_argv[1:], sys.flags, sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.read())
        print(sorted(os.environ.keys() - {"PHALANX_TASK_KEY", "PHALANX_NODE_KEY"}), __main__.__dict__ is globals(), sorted(globals()))
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGTERM))
        print(os.getcwd(), os.umask(0), sorted(os.listdir("/proc/self/fd"), key=int), open("/proc/self/comm").read())
        print(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").split(b"\\0"))
        """,
    "children of multiprocessing": """
        import multiprocessing
        def square(n): return n * n
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool: print(pool.map(square, range(4)))
            with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(square, range(4)))
        """,
    "pickles of its own classes": """
        import pickle
        class Thing: pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
        """,
    "torch in parallel": """
        import torch
        x = torch.ones(600, 600)
        print((x @ x).sum().item(), torch.get_num_threads())
        """,
    "threads of numpy": """
        import numpy as np, os
        np.ones((500, 500)) @ np.ones((500, 500))
        print(len(os.listdir("/proc/self/task")))
        """,
    "objects with an end": """
        import atexit, os, sys, torch, weakref
        class Thing:
            def __del__(self): print("its end", os.path.basename("a/b"), torch.ones(2).sum().item())
        class Kept: pass
        thing, kept, torch.mine = Thing(), Kept(), Thing()
        weakref.finalize(kept, print, "finalized")
        del torch.mine
        sys.exit(4)
        """,
    "C's own output": "import ctypes, sys; ctypes.CDLL(None).printf(b'from C'); sys.exit(5)",
    "imports beside itself": "import helper_beside; print(helper_beside.WORD)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_warm_script_does_what_a_cold_one_does(zygote, tmp_path, name):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]))
    (tmp_path / "helper_beside.py").write_text("WORD = 'here'")
    command = ("python", "script.py", "--lr", "1e-3", "two words")
    assert warm(zygote, command, tmp_path) == plain(command, tmp_path)


@pytest.mark.parametrize("path", ["no-such-script.py", "folder/linked.py", "./folder/../folder/real.py"])
def test_a_warm_script_is_found_as_a_cold_one_is(zygote, tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "folder" / "real.py").write_text("import sys; print(sys.argv, sys.path[0], __file__); 1/0")
    (tmp_path / "else" / "target.py").write_text("import sys; print(sys.argv, sys.path[0], __file__); 1/0")
    (tmp_path / "folder" / "linked.py").symlink_to("../else/target.py")
    assert warm(zygote, ("python", path), tmp_path) == plain(("python", path), tmp_path)


@pytest.mark.parametrize("module", ["package.tool", "package", "no_such_module"])
def test_a_warm_module_does_what_a_cold_one_does(zygote, tmp_path, module):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("print('package')")
    text = (
        "import sys; print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__.name); raise ValueError(1)"
    )
    (tmp_path / "package" / "__main__.py").write_text(text)
    (tmp_path / "package" / "tool.py").write_text(text)
    command = ("python", "-m", module, "argument")
    assert warm(zygote, command, tmp_path) == plain(command, tmp_path)


def test_unbuffered_ranks_have_a_zygote_of_their_own(zygotes, zygote, tmp_path):
    command = ("python", "-u", "script.py")
    (tmp_path / "script.py").write_text(
        "import os, sys; print('out', sys.stdout.write_through, sys.orig_argv[1:]); os._exit(0)"
    )
    unbuffered = ask(zygotes, command)
    assert unbuffered is not zygote
    assert unbuffered.wait(100), unbuffered.reason
    assert warm(unbuffered, command, tmp_path) == plain(command, tmp_path)


def test_warm_ranks_draw_different_random_numbers(zygote, tmp_path):
    (tmp_path / "script.py").write_text(
        "import random, numpy, torch, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4(), torch.rand(1).item())"
    )
    first = warm(zygote, ("python", "script.py"), tmp_path)[0].split()
    second = warm(zygote, ("python", "script.py"), tmp_path)[0].split()
    assert not set(first) & set(second)


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_rank_is_marked_contained_and_killed(zygote, tmp_path, mode):
    (tmp_path / "script.py").write_text(
        "import os, time; os.fork(); os.setsid() if os.getpid() != os.getsid(0) else 0; time.sleep(1000)"
    )
    with Rig(mode) as rig:
        attempt = rig.open(zygote=zygote)
        pid, _ = rig.run(attempt, ("python", "script.py"), cwd=str(tmp_path), env=ENV, warm=True)
        until(lambda: len(attempt.members()) == 2, "the fork")
        assert process_environment(pid)[b"PHALANX_TASK_KEY"].strip() == attempt.key.marker.encode()
        assert attempt.freeze()
        members = attempt.members()
        assert attempt.kill() == []
        assert not any(runs(member) for member in members)
        assert rig.exit().signal == signal.SIGKILL


def test_a_warm_rank_outlives_its_zygote(tmp_path):
    own = Zygotes(node_key=f"test-own-{os.getpid()}")
    (tmp_path / "script.py").write_text("import time; print('begun', flush=True); time.sleep(0.5); print('ended')")
    command = ("python", "script.py")
    zygote = ask(own, command)
    assert zygote.wait(100), zygote.reason
    with Rig() as rig:
        attempt = rig.open(zygote=zygote)
        _, output = rig.run(attempt, command, cwd=str(tmp_path), env=ENV, warm=True)
        os.kill(zygote.pid, signal.SIGKILL)
        assert output() == "begun\nended\n"
        assert rig.exit().code == 0
        until(lambda: zygote.state is ZygoteState.DEAD, "its death to be seen")
        assert ask(own, command) is not zygote
        attempt.close()
    own.close()


def test_an_interpreter_without_torch_is_refused_with_the_reason(zygotes, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=60)
    command = (f"{tmp_path}/bare/bin/python", "script.py")
    zygote = ask(zygotes, command)
    assert not zygote.wait(100)
    assert zygote.state is ZygoteState.REFUSED
    assert "torch" in zygote.reason
    missing = parse_warm_command(("no-such/python", "script.py"))
    assert missing is not None
    assert zygotes.request(missing, env=ENV, cwd="/") is None


def test_a_zygote_with_a_thread_is_refused(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
    )
    own = Zygotes(node_key=f"test-thread-{os.getpid()}")
    zygote = ask(own, ("python", "x.py"), env={**ENV, "PYTHONPATH": str(tmp_path)})
    assert not zygote.wait(100)
    assert zygote.state is ZygoteState.REFUSED
    assert "2 threads" in zygote.reason
    own.close()


def test_idle_zygotes_are_let_go():
    own = Zygotes(node_key=f"test-idle-{os.getpid()}", idle_s=10.0)
    zygote = ask(own, ("python", "x.py"))
    own.reap(zygote.used_s + 9.0)
    assert zygote.spawner.alive()
    own.reap(zygote.used_s + 11.0)
    until(lambda: not zygote.spawner.alive(), "the zygote to end")
    own.close()
