"""Parses rule files (YAML 1.2, a list of failure rules) into the rules sent to the head. Errors name the line.

rules:
  - name: spot                    # unique; the name of a built-in rule replaces that rule
    codes: [117]                  # conditions: codes, signals, xids, pattern, oom, cause; all given ones must match
    blame: preempted              # user, infrastructure, preempted, echo
    remedy: elsewhere             # here, elsewhere, drain, stop
    says: the spot market took it
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.recovery.failure_rules import KEYS, RULES_MAX, parse_rule
from phalanx.core.work.nearest_match import nearest_match

FILE_BYTES_MAX: Final = 1 << 20  # the same for every file that users write
_DEPTH_MAX: Final = 4  # the mapping, the list, a rule, a list of numbers
_EVENTS_MAX: Final = RULES_MAX * 64  # eleven keys with their values, and lists of numbers


def read_rule_file(path: str) -> list[dict[str, Any]]:
    """Return the checked rules of the file at `path`; `-` reads standard input.

    Raises:
        BadFile: the file cannot be read, is not YAML, or has a wrong key or value; the message names the line.
        TooLarge: the file is larger than 1 MiB.
    """
    raw = read_file_bytes(path, FILE_BYTES_MAX, "rule file")
    try:
        return parse_rule_file(raw.decode("utf-8-sig"), path=path)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadFile(f"{path}:{line}: not UTF-8") from None


def parse_rule_file(text: str, *, path: str) -> list[dict[str, Any]]:
    """Return the rules of a text; `path` is for messages.

    Raises:
        BadFile: as for `read_rule_file`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        lines = _lines(YAML(typ="safe", pure=True).parse(text), path)
        value = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _fail(path, 1 if mark is None else mark.line + 1, f"not YAML: {error.problem or error.context}")
    except (YAMLError, ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict) or not isinstance(value.get("rules", []), list):
        _fail(path, 1, "a rule file begins with rules: and a list of them below it")
    for key in value:
        if key != "rules":
            near = nearest_match(str(key), ("rules",))
            hint = "did you mean 'rules'?" if near else f"write rules: and below it {', '.join(KEYS)}"
            _fail(path, 1, f"unknown key {str(key)[:40]!r}", hint)
    rules: list[Any] = value.get("rules", [])
    names: dict[str, int] = {}
    for number, one in enumerate(rules):
        line = lines[number] if number < len(lines) else 1
        try:
            rule = parse_rule(one, f"rule {number + 1}")
        except BadRequest as error:
            _fail(path, line, error.message, error.hint)
        if rule.name in names:
            _fail(path, line, f"{rule.name} is defined twice, here and on line {names[rule.name]}")
        names[rule.name] = line
    return rules


def _lines(events: Any, path: str) -> list[int]:
    """Return the line of each rule. Rejects anchors, aliases and tags, which could expand without limit."""
    depth, found = 0, []
    for count, event in enumerate(events):
        kind = type(event).__name__.removesuffix("Event")
        line = int(event.start_mark.line) + 1
        container = kind in ("MappingStart", "SequenceStart")
        if kind == "Alias" or getattr(event, "anchor", None) or getattr(event, "tag", None):
            _fail(path, line, "a rule file has only keys, values and lists: no anchors, aliases or tags")
        if container and depth == 2:
            found.append(line)
        depth += container - (kind in ("MappingEnd", "SequenceEnd"))
        if depth > _DEPTH_MAX or count > _EVENTS_MAX:
            _fail(path, line, "nested too deep" if depth > _DEPTH_MAX else f"more than {_EVENTS_MAX} values")
    return found


def _fail(path: str, line: int, why: str, hint: str = "") -> NoReturn:
    raise BadFile(f"{path}:{line}: {why}", hint=hint)
