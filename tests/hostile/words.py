"""The whole command line as click knows it, good words for each command, and what one command line ended with."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click

from phalanx.cli.root import main, phalanx

HANG_S = 30  # a command line that takes longer hangs
SLOW_S = 2.0  # of processor time; what is slower is asked again
CODES = frozenset({0, 64, 69, 74, 75, 77, 78, 124})
NO = 1  # the answer of `plan` where a model does not fit
LINE_MAX = 3000  # characters of an error: one that nobody reads to its end is no clear line

# What makes a command get as far as the option under test, without starting, stopping or following anything. A command that is not
# here is given "1" for each word it needs: a new one is tried as it comes.
GOOD: dict[str, list[str]] = {
    "run": ["--dry-run", "--", "true"],
    "submit": ["--dry-run", "--", "true"],
    "exec": ["none", "--", "true"],
    "nodes drain": ["n7"],
    "nodes label": ["n7", "a=b"],
    "nodes reserve": ["n7", "--for", "1h", "--maintenance"],
    "nodes show": ["n7"],
    "nodes mig": ["h100"],
    "nodes undrain": ["n7"],
    "nodes forget": ["n7"],
    "plan": ["qwen3-0.6b", "--gpus", "h100:8"],
    "calibrate": ["--dry-run"],
    "projects add": ["p1"],
    "users add": ["u1"],
    "queues add": ["q1"],
    "queues set": ["side"],
    "join": ["127.0.0.1:1", "--token", "phxj.1.2", "--fingerprint", "sha256:" + "0" * 64],
}
# Would start or stop daemons, take the terminal, wait for a person or begin a demo of 90 s where its words are good: tried with words that are none.
ONLY_REFUSED = frozenset(
    {
        "up",
        "demo",
        "down",
        "join",
        "top",
        "attach",
        "shell",
        "exec",
        "ssh",
        "proxy",
        "port-forward",
        "calibrate",
        "run",
        "get",
        "topology",
        "drill",
        "gateway",
        "relay",
        "login",
    }
)

NONSENSE = (
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "999999999999999999999999",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "1.5",
    "0x10",
    "\u0661",
    "\x00",
    "a\x00b",
    "\n",
    "a\nb",
    "\udcff",
    "\U0001f600",
    "\x1b[31mred",
    "../../etc/passwd",
    "/",
    "/etc",
    "/dev/zero",
    "/nonexistent/x",
    "~",
    "$(true)",
    "%s%n",
    "{}",
    "[]",
    "null",
    "None",
    "true",
    "a=b",
    "=",
    "a=",
    "=b",
    "a:b:c",
    "h100:8",
    "8x8x8",
    "99999999x99999999",
    "gpu[",
    "gpu[001-999999999]",
    "n[0-9][0-9][0-9][0-9][0-9][0-9]",
    "n[5-1]",
    ",",
    ",,,",
    "a,b",
    "1-",
    "1-2-3",
    "0-99999999",
    "0-9%0",
    "1h",
    "-1h",
    "1:2:3:4",
    "99999999999h",
    "1h1h",
    "h",
    "2026-13-45",
    "9999-12-31T23:59:59",
    "10000-01-01",
    "-1",
    "now",
    "x" * 300,
    "x" * 100_000,
    "9" * 5000,
    "[" * 3000,
    "afterok:1",
    "afterok:",
    "1GiB",
    "-1GiB",
    "1e400GiB",
    "sha256:",
    "http://[",
    "http://127.0.0.1:99999999",
    "file:///etc/passwd",
    "127.0.0.1:0",
    ":::",
    "\u202e",
    "tp=0",
    "tp=2,fsdp=-1",
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command line ended. `wrong`: what is wrong about that; "" if nothing."""

    words: tuple[str, ...]
    code: int
    said: str
    seconds: float
    wrong: str = ""


def commands() -> Iterator[tuple[str, click.Command]]:
    """(words, command) of every command there is."""

    def below(path: tuple[str, ...], command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield " ".join(path), command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name="phalanx")
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from below((*path, name), inner)

    yield from below((), phalanx)


def option_lines(nonsense: tuple[str, ...] = NONSENSE) -> Iterator[tuple[str, ...]]:
    """A command line for every option and argument of every command x every value; the words that are not under test are good."""
    for name, command in commands():
        good = GOOD.get(name, _needed(command))
        for param in command.params:
            if isinstance(param, click.Option) and (param.is_flag or param.count):
                continue
            for value in nonsense:
                if isinstance(param, click.Option):
                    given = (*name.split(), max(param.opts, key=len), value, *good)
                else:
                    given = (*name.split(), value)
                if name in ONLY_REFUSED and not _refused(command, param, value):
                    continue
                yield given


def _needed(command: click.Command) -> list[str]:
    return ["1" for param in command.params if isinstance(param, click.Argument) and param.required]


def _refused(command: click.Command, param: click.Parameter, value: str) -> bool:
    """Whether click itself refuses the value, so that the command does not run."""
    try:
        param.type.convert(value, param, click.Context(command))
    except (click.BadParameter, click.UsageError):
        return True
    except Exception:  # noqa: BLE001  # what a type raises beside is a fault that the run will show
        return True
    return False


def ended(*words: str) -> Ended:
    """Run one command line in this process, as if typed, with nothing on standard input."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict"), io.StringIO()
    began_s, environment = time.process_time(), dict(os.environ)
    old = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANG_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _no_input():
            code = main(list(words))
    except _Hangs:
        code = -1
    except BaseException as error:  # noqa: BLE001  # whatever comes out of `main` is what the test is for
        return Ended(
            words=words,
            code=-2,
            said=err.getvalue(),
            seconds=0.0,
            wrong=f"main raised {type(error).__name__}: {error}"[:500],
        )
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        os.environ.clear()  # `--url` sets a variable for the rest of its process
        os.environ.update(environment)
    took_s = time.process_time() - began_s  # the processor's, so that a busy machine accuses nobody
    return Ended(
        words=words, code=code, said=err.getvalue(), seconds=took_s, wrong=_wrong(words, code, err.getvalue(), took_s)
    )


def _wrong(words: tuple[str, ...], code: int, said: str, seconds: float) -> str:
    if code == -1:
        return f"hangs: no end after {HANG_S} s"
    if code == NO and words[:1] == ("plan",) and not said:
        return ""  # it stands on standard output, with what would fit
    if code not in CODES:
        return f"exit code {code}: {said[-500:]}"
    if "Traceback" in said:
        return f"a traceback: {said[-500:]}"
    lines = [line for line in said.splitlines() if line.startswith("phalanx: error:")]
    asked = words[-1].count(",") + 1 if words[:1] == ("nodes",) else 1  # several names: a line about each
    if code and not 1 <= len(lines) <= asked:
        return f"exit code {code} with {len(lines)} lines of error: {said[-500:]!r}"
    if code and said.strip().splitlines()[-1] != lines[-1]:
        return f"what went wrong is not the last line: {said[-500:]!r}"
    if lines and len(lines[0]) > LINE_MAX:
        return f"an error of {len(lines[0])} characters: {lines[0][:200]}"
    if any(mark in said for mark in ("\x1b", "\x07", "\x00")):
        return f"control characters reach the terminal: {said[:200]!r}"
    return f"took {seconds:.1f} s" if seconds > SLOW_S else ""


class _Hangs(BaseException):
    pass


def _hangs(*_: object) -> None:
    raise _Hangs


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def judged(lines: Iterator[tuple[str, ...]]) -> tuple[int, list[str]]:
    """How many were run, and what was wrong, with a line that repeats it. What was slow is run again, alone."""
    count, wrong = 0, []
    for words in lines:
        found = ended(*words)
        if found.wrong.startswith("took"):
            found = min((ended(*words) for _ in range(2)), key=lambda again: again.seconds)
        count += 1
        if found.wrong:
            shown = " ".join(repr(word if len(word) < 200 else word[:100] + f"...({len(word)})") for word in words)
            wrong.append(f"phalanx {shown}: {found.wrong}")
    return count, wrong


def memory_mib() -> float:
    """The most that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
