"""Messages of core suggest only commands that the command line has."""

import ast
import re
from pathlib import Path

import phalanx.core
from phalanx.cli.root import COMMANDS

CORE = Path(phalanx.core.__file__).parent
COMMAND = re.compile(r"\bphalanx ([a-z][a-z-]*)")
NOT_COMMANDS = {"access/node_tokens.py", "access/audit.py"}  # labels that keys and hashes are derived from


def texts(path):
    """String constants of a module without its docstrings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def test_core_suggests_only_commands_that_exist():
    suggested = {
        (path.relative_to(CORE).as_posix(), command)
        for path in CORE.rglob("*.py")
        if path.relative_to(CORE).as_posix() not in NOT_COMMANDS
        for text in texts(path)
        for command in COMMAND.findall(text)
    }
    assert len(suggested) > 10
    assert {command for _, command in suggested} <= COMMANDS.keys(), suggested
