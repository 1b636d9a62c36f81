"""Parses rule files (YAML 1.2, a list of failure rules) into the rules sent to the head. Errors name the line.

rules:
  - name: spot                    # unique; the name of a built-in rule replaces that rule
    codes: [117]                  # conditions: codes, signals, xids, pattern, oom, cause; all given ones must match
    blame: preempted              # user, infrastructure, preempted, echo
    remedy: elsewhere             # here, elsewhere, drain, stop
    says: the spot market took it
"""

from __future__ import annotations

from typing import Any, Final

from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.errors import BadRequest
from phalanx.core.recovery.failure_rules import KEYS, RULES_MAX, parse_rule
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml

RULE_FILE: Final = FileKind(
    name="rule file",
    example="write rules: and a list of them below it",
    bytes_max=1 << 20,  # the same as for a topology file
    depth_max=4,  # the mapping, the list, a rule, a list of numbers
    events_max=RULES_MAX * 64,  # eleven keys with their values, and lists of numbers
)


def read_rule_file(path: str) -> list[dict[str, Any]]:
    """Return the checked rules of the file at `path`; `-` reads standard input.

    Raises:
        BadFile: the file cannot be read, is not YAML, or has a wrong key or value; the message names the line.
        TooLarge: the file is larger than 1 MiB.
    """
    return _rules(read_yaml_file(path, RULE_FILE))


def parse_rule_file(text: str, *, path: str) -> list[dict[str, Any]]:
    """Return the rules of a text; `path` is for messages.

    Raises:
        BadFile: as for `read_rule_file`.
    """
    return _rules(parse_yaml(text, RULE_FILE, path=path))


def _rules(root: YamlValue) -> list[dict[str, Any]]:
    listed = root.mapping("rule file", ("rules",))["rules"]
    if not isinstance(listed.content, list):
        raise listed.error("rules: expected a list of rules", f"each with some of {', '.join(KEYS)}")
    rules: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for number, value in enumerate(listed.content, start=1):
        if isinstance(value.content, dict):
            value.mapping("rule", KEYS)
        plain = value.plain()
        try:
            name = parse_rule(plain, f"rule {number}").name
        except BadRequest as error:
            raise value.error(error.message, error.hint) from None
        if name in lines:
            raise value.error(f"{name} is defined twice, here and on line {lines[name]}")
        lines[name] = value.line
        rules.append(plain)
    return rules
