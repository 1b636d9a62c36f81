"""The zygote: a spawner that has imported torch, so that its forked ranks need not. Run by path under the *job's* interpreter.

    <python> [-u] zygote_main.py <module,?module> <padding> <descriptor>

It imports the modules (`?` marks an optional one), runs no tensor operation and no CUDA call, and verifies that it has one thread: a fork
copies no other thread, but the locks they hold. A warm rank then behaves as `python script.py` or `python -m module` would: same sys.argv,
sys.path[0], `__main__`, traceback, exit code, atexit order. It ends by finalisation as every interpreter does, but only of its own modules:
finalising shared modules would copy their pages (`_keep_what_is_shared`).

Differences from a cold rank: string hashes have the zygote's salt (a cold rank draws its own unless PYTHONHASHSEED is set). The global
generators of `random`, NumPy and torch are seeded again in each rank.

Standard library only, Python >= 3.10, no import from phalanx except the modules passed to it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from phalanx.node.processes import keeper, proctable, spawner_main
else:
    _path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawner_main.py")
    _spec = importlib.util.spec_from_file_location("_phalanx_spawner_main", _path)
    spawner_main = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(spawner_main)
    keeper = sys.modules["_phalanx_keeper"]
    proctable = sys.modules["_phalanx_proctable"]

_TASK_KEY: Final = "PHALANX_TASK_KEY"
_BLAS_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # as OpenBLAS asks
_BLAS_SUFFIXES: Final = ("64_", "")


def main() -> None:
    """Import, report whether a fork is safe, fork keepers; in a forked rank, become the user's program."""
    modules, control = sys.argv[1], spawner_main.control_socket(sys.argv[3])
    safe_path = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if not safe_path:
        del sys.path[0]  # this folder: users must not import its files
    atexit.register(_keep_what_is_shared)  # registered before all imports, so it is called last
    unfit = _import_all(modules.split(",")) or _unfit()
    if unfit:
        control.send(json.dumps({"op": "unfit", "reason": unfit}).encode())
        os._exit(0)
    _shared[:] = [name for name in sys.modules if name not in {"__main__", "sys", "builtins"}]
    sys.stdout.flush()
    sys.stderr.flush()
    control.send(json.dumps({"op": "ready"}).encode())
    rank = spawner_main.serve(control, name="phx-zygote")
    if rank is None:
        os._exit(0)
    _be_fresh(rank.request)
    _run(rank.request["warm"], safe_path=bool(safe_path))


def _import_all(names: list[str]) -> str:
    """Import the modules; returns the error, or an empty text."""
    for name in names:
        try:
            importlib.import_module(name.removeprefix("?"))
        except ImportError as error:
            if not name.startswith("?"):
                return f"{sys.executable} cannot import {name}: {error}"
        except Exception as error:  # noqa: BLE001  any error on import: the rank starts cold and shows it
            return f"importing {name} under {sys.executable} failed: {error!r}"
    return ""


def _unfit() -> str:
    """The reason why ranks must not be forked from this process; empty if they may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run after the imports; a fork is safe from a single-threaded process only"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA, which does not survive a fork"
    return ""


_shared: list[str] = []
"""Names of the modules that all ranks share with this zygote."""


def _keep_what_is_shared() -> None:
    """At the end of a rank: do not finalise the modules and libraries that came with the zygote.

    Finalising writes to them, and each written page is copied: 116 MiB and 0.2 s of CPU per rank with torch 2.13, when all ranks end at
    the same time. Without it, 46 MiB and 0.06 s.
    """
    hold = ctypes.pythonapi.Py_IncRef
    hold.argtypes, hold.restype = [ctypes.py_object], None
    for name in _shared:
        module = sys.modules.pop(name, None)
        if module is not None:
            hold(module)
            hold(getattr(module, "__dict__", None))
    if "LD_PRELOAD" in os.environ:  # such a library may write at exit
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not glibc
        # Called in reverse: those of libraries loaded since the fork, fflush for what C has buffered, _exit with the code.
        libc["on_exit"](libc["_exit"], None)
        libc["__cxa_atexit"](libc["fflush"], None, None)


def _be_fresh(request: dict[str, Any]) -> None:
    """Make this fork look and act like a process just started with the rank's environment and command."""
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request)
    keeper.prctl(keeper.PR_SET_NAME, os.path.basename(request["command"][0]).encode())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if not request["warm"]["unbuffered"] and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=False)  # the zygote may have a terminal, a rank has a pipe
    _restore_blas_threads()
    _reseed()


def _reseed() -> None:
    """Draw new seeds as a cold rank would; `random` does so by itself after a fork."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _show(request: dict[str, Any]) -> None:
    """Write the task key and the command to their places in /proc: sweeps read the key, people read the command.

    Both overwrite space that was reserved when this program started: a padded variable, and its own argv.
    """
    row = _memory_bounds()
    if row is None:
        return
    words_start, words_end, block_start, _ = row
    with open("/proc/self/environ", "rb") as environ:
        block = environ.read()
    name = f"{_TASK_KEY}=".encode()
    at = 0 if block.startswith(name) else block.find(b"\0" + name) + 1
    if at or block.startswith(name):
        start = at + len(name)
        room = block.index(b"\0", start) - start
        marker = request["env"][_TASK_KEY].encode()
        if len(marker) <= room:
            ctypes.memmove(block_start + start, marker.ljust(room), room)
    words = b"\0".join(os.fsencode(word) for word in request["command"])
    room = words_end - words_start
    ctypes.memmove(words_start, words[: room - 1].ljust(room, b"\0"), room)


def _memory_bounds() -> tuple[int, int, int, int] | None:
    """The addresses of this process's argv and environment: arg_start, arg_end, env_start, env_end of proc(5); None if hidden."""
    with open("/proc/self/stat", "rb") as stat:
        text = stat.read()
    fields = [int(field) for field in text[text.rfind(b")") + 2 :].split()[45:49]]
    if len(fields) != 4 or fields[0] <= 1 or fields[2] <= 1:
        return None
    return fields[0], fields[1], fields[2], fields[3]


def _restore_blas_threads() -> None:
    """Give NumPy's OpenBLAS the threads of a cold start; the zygote loaded it with one, to stay single-threaded."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split(None, 5)[5].strip() for line in maps if "openblas" in line}
    for path in sorted(libraries):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for prefix in ("scipy_openblas", "openblas"):
                for suffix in _BLAS_SUFFIXES:
                    setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                    processors = getattr(library, f"{prefix}_get_num_procs{suffix}", None)
                    if setter is not None and processors is not None:
                        setter(ctypes.c_int(_wanted_blas_threads() or processors()))


def _wanted_blas_threads() -> int:
    """The number that the rank's environment asks for; 0 where it asks for none."""
    for name in _BLAS_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 0


def _run(command: dict[str, Any], *, safe_path: bool) -> None:
    """Run the script or module as `__main__`. Returns or raises as it does; the interpreter handles the rest."""
    program = command["script"] if command["script"] is not None else "-m"
    sys.argv[:] = [program, *command["arguments"]]
    flags = ["-u"] if command["unbuffered"] else []
    target = [command["script"]] if command["script"] is not None else ["-m", command["module"]]
    sys.orig_argv = [command["interpreter"], *flags, *target, *command["arguments"]]
    own = sys.modules["__main__"]  # kept: its globals are these functions'
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        if command["script"] is not None:
            _run_script(command["script"], main_module, safe_path=safe_path)
        else:
            if not safe_path:
                sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(command["module"])  # type: ignore[attr-defined]  # noqa: SLF001  what `python -m` calls
    except SystemExit:
        raise
    except BaseException as error:
        trace = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        # Already shown, with the traceback of a cold rank. The interpreter still takes the exit code (or, for
        # KeyboardInterrupt, the signal) from it.
        sys.excepthook = lambda *_: None
        raise
    finally:
        del own


def _run_script(path: str, module: ModuleType, *, safe_path: bool) -> None:
    """Run a script as the interpreter does."""
    absolute = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(absolute)))
    module.__dict__.update(
        __file__=absolute,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
        __spec__=None,
        __package__=None,
        __doc__=None,
    )
    try:
        exec(compile(source, absolute, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the user's own script
    finally:
        # As the interpreter does after a script (not after a module): its output comes before its traceback.
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(Exception):
                stream.flush()


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not this file's."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
