"""Find errors in a job's script before it starts: a fixed rendezvous address, a backend without devices, a wrong encoding.

Pure: the shell reads the files, this module checks their text. It refuses only scripts that cannot work.
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.node.logic.separate_worlds import python_world

# A longer script is generated; parsing it is not worth the cost. This many bytes in lines of one letter take 0.2 s and 57 MiB, and the
# parser blocks all other threads of the supervisor meanwhile, including lease and fence.
SCRIPT_BYTES_MAX: Final = 64 << 10
_PYTHON: Final = re.compile(r"(?:.*/)?(?:python|pypy)[0-9.]*")
_SHELL: Final = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh")
_LAUNCHER: Final = re.compile(r"(?:.*/)?(?:torchrun|accelerate|deepspeed|mpirun|mpiexec)")
_OPTIONS_WITH_VALUE: Final = frozenset({"-W", "-X", "-Q", "--check-hash-based-pycs"})
_COOKIE: Final = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_INIT: Final = "init_process_group"
_LOOPBACK: Final = ("localhost", "127.", "::1", "[::1]", "0.0.0.0")
_INSPECTING_WORDS: Final = ("MASTER_ADDR", "environ", "getenv", "WORLD_SIZE", "RANK", "is_available", "cuda", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptContext:
    """The gang in which the script will run: nodes, tasks, and whether it gets devices that NCCL supports."""

    nodes: int
    world_size: int
    cuda: bool


def script_path(argv: Sequence[str]) -> str | None:
    """Return the script file that `argv` will read, as written there; None if it names none (a module, -c, a program)."""
    if not argv:
        return None
    if _LAUNCHER.fullmatch(argv[0]):
        return next((word for word in argv[1:] if word.endswith(".py")), None)
    if not (_PYTHON.fullmatch(argv[0]) or _SHELL.fullmatch(argv[0])):
        return argv[0] if argv[0].endswith((".py", ".sh")) and "/" in argv[0] else None
    words = iter(argv[1:])
    for word in words:
        if word in {"-c", "-m", "-s", "-"} or (word.startswith("-") and not word.startswith("--") and word[-1] in "cm"):
            return None
        if word in _OPTIONS_WITH_VALUE or (word in {"-o", "-O"} and _SHELL.fullmatch(argv[0])):
            next(words, None)
        elif not word.startswith(("-", "+")):
            return word
    return None


def find_script_error(name: str, text: bytes, around: ScriptContext) -> str | None:
    """Return why the Python script `name` cannot work here, with its line; None if no error is found.

    A script that does not parse passes, because the job's interpreter may be newer than ours. So does one of more than SCRIPT_BYTES_MAX,
    or one nested too deeply for our parser.
    """
    if len(text) > SCRIPT_BYTES_MAX:
        return None
    wrong = _encoding_objection(name, text)
    if wrong is not None or around.world_size < 1:
        return wrong
    found = _Scan(around)
    try:
        found.visit(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not found.objections:
        return None
    line, why = min(found.objections)
    return f"{os.path.basename(name)}, line {line}: {why}"


def line_of_mpi4py(text: bytes) -> int | None:
    """Return the line where a Python script imports mpi4py unconditionally; None if it does not, or does not parse."""
    try:
        return python_world(ast.parse(text)) if len(text) <= SCRIPT_BYTES_MAX else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _encoding_objection(name: str, text: bytes) -> str | None:
    """Check for UTF-8, which Python 3 expects unless one of the first two lines names another encoding."""
    if any(_COOKIE.match(line) for line in text.split(b"\n", 2)[:2]):
        return None
    try:
        text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        return (
            f"{os.path.basename(name)}, line {line}: byte 0x{text[error.start]:02x} is not UTF-8; save the file as UTF-8, "
            "or name its encoding in its first line"
        )
    return None


class _Scan(ast.NodeVisitor):
    """Collects errors. Code under an `if` whose condition inspects the environment is skipped: the script adapts by itself.

    Conditions are unparsed once and not visited: nested conditional expressions would otherwise be unparsed once for each level.
    """

    def __init__(self, around: ScriptContext) -> None:
        self._around = around
        self.objections: list[tuple[int, str]] = []

    def visit_If(self, node: ast.If) -> None:
        """Skip branches whose condition inspects the environment."""
        if not _inspects_environment(node.test):
            for statement in (*node.body, *node.orelse):
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Skip expressions whose condition inspects the environment."""
        if not _inspects_environment(node.test):
            self.visit(node.body)
            self.visit(node.orelse)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Check os.environ["MASTER_ADDR"] = "10.0.0.1"."""
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value) and _text(target.slice) == "MASTER_ADDR":
                self._address(node.lineno, _text(node.value), "MASTER_ADDR")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Check init_process_group(...), os.putenv("MASTER_ADDR", ...), os.environ.update(MASTER_ADDR=...)."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == _INIT:
            self._backend(node.lineno, _text(given.get("backend", node.args[0] if node.args else None)))
            method = _text(given.get("init_method", node.args[1] if len(node.args) > 1 else None))
            if method is not None and method.startswith("tcp://"):
                self._address(node.lineno, method.removeprefix("tcp://"), "init_method")
        elif name == "putenv" and len(node.args) == 2 and _text(node.args[0]) == "MASTER_ADDR":
            self._address(node.lineno, _text(node.args[1]), "MASTER_ADDR")
        elif name == "update" and isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
            self._address(node.lineno, _text(given.get("MASTER_ADDR")), "MASTER_ADDR")
        self.generic_visit(node)

    def _address(self, line: int, address: str | None, what: str) -> None:
        """Report a fixed address, which fits one placement only; on a single node a loopback address still works."""
        if (
            address is None
            or self._around.world_size == 1
            or (self._around.nodes == 1 and address.startswith(_LOOPBACK))
        ):
            return
        hint = "leave it out: Phalanx sets MASTER_ADDR and MASTER_PORT, and init_process_group() reads them"
        if what == "init_method":
            hint = 'leave it out, or write init_method="env://"'
        self.objections.append((line, f"{what} is fixed to {address!r}, but the job may run on any node; {hint}"))

    def _backend(self, line: int, backend: str | None) -> None:
        if backend is None or self._around.cuda or backend.lower() != "nccl":
            return
        why = 'backend "nccl" needs GPUs, and this job has none here (virtual devices are slots on the CPU); use "gloo", or let torch choose'
        self.objections.append((line, why))


def _inspects_environment(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return any(word in text for word in _INSPECTING_WORDS)


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _text(node: ast.expr | None) -> str | None:
    """Return the value of a string literal; None for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
