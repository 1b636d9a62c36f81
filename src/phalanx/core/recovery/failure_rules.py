"""Failure rules: a table from signs to diagnoses, and its parser. The first rule whose signs all match decides.

The controller passes `judge` to the attempt machine, with the operators' own rules before the shipped table (`phalanx.planner.facts.failure_rules`).
Pure functions of evidence and rules. Nothing here collects evidence or acts on it.

A pattern is text, not a regular expression: case-insensitive, `*` for anything within the line, `|` between alternatives. So matching is
linear in the output of a rank, whatever the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from phalanx.core.errors import BadRequest
from phalanx.core.work.attempt import EndCause, TaskExit
from phalanx.core.work.failure import (
    EVIDENCE_LINE_CHARS_MAX,
    EVIDENCE_LINES_MAX,
    FailureAttribution,
    FailureDiagnosis,
    FailureEvidence,
    FailureReaction,
    RestartBudget,
)
from phalanx.core.work.nearest_match import suggestion, unknown_key_hint

RULES_MAX: Final = 500  # each is tried on each failure; the shipped table has some fifty
NAME_CHARS_MAX: Final = 64
PATTERN_CHARS_MAX: Final = 500
SAYS_CHARS_MAX: Final = 200
WEIGHT_MAX: Final = 10.0
SIGNALS: Final = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGQUIT": 3,
    "SIGILL": 4,
    "SIGTRAP": 5,
    "SIGABRT": 6,
    "SIGBUS": 7,
    "SIGFPE": 8,
    "SIGKILL": 9,
    "SIGUSR1": 10,
    "SIGSEGV": 11,
    "SIGUSR2": 12,
    "SIGPIPE": 13,
    "SIGALRM": 14,
    "SIGTERM": 15,
    "SIGXCPU": 24,
    "SIGXFSZ": 25,
    "SIGSYS": 31,
}
"""Numbers of x86 and ARM Linux. Source: signal(7)."""
_SHELL: Final = 128  # a shell reports 128 + n for a command that signal n ended
E = TypeVar("E", FailureAttribution, FailureReaction, RestartBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """One row. All given kinds of signs must match; of several numbers, any one. Empty signs match everything.

    Attributes:
        codes: exit codes. signals: signals that ended the task, also if a launcher reported them as 128 + n.
        xids: errors of the GPU driver on the task's node since the attempt began.
        pattern: matches a line at the end of the task's output.
        oom: the kernel killed one of its processes because memory ran out.
        cause: end of a whole generation, without a task that failed by itself ("hang").
        says: explanation for users; "" uses the matching line.
        source, date: origin of the row.
    """

    name: str
    attribution: FailureAttribution
    remedy: FailureReaction
    charge: RestartBudget
    codes: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    xids: tuple[int, ...] = ()
    pattern: str = ""
    oom: bool = False
    cause: str = ""
    weight: float = 0.0
    says: str = ""
    source: str = ""
    date: str = ""


NO_EVIDENCE: Final = FailureEvidence()
UNKNOWN_CODE: Final = FailureDiagnosis(
    rule="exit-code",
    attribution=FailureAttribution.USER,
    remedy=FailureReaction.RESTART_IN_PLACE,
    charge=RestartBudget.RETRY,
    description="",
)
UNKNOWN_SIGNAL: Final = FailureDiagnosis(
    rule="signal",
    attribution=FailureAttribution.INFRASTRUCTURE,
    remedy=FailureReaction.RESTART_IN_PLACE,
    charge=RestartBudget.PROGRESS,
    description="a signal that Phalanx did not send",
)
"""Diagnoses if no rule matches: an exit code is chosen by the job, a signal is not."""


def diagnose(exit: TaskExit, rules: Sequence[FailureRule]) -> FailureDiagnosis:
    """Diagnose a task's failure by the first matching rule. Cost: rules x lines of evidence."""
    found = exit.evidence or NO_EVIDENCE
    for rule in rules:
        if rule.cause:
            continue
        line = _matching_line(rule, exit, found)
        if line is not None:
            return _diagnosis_by(rule, line, found)
    return UNKNOWN_SIGNAL if exit.code is None else UNKNOWN_CODE


def diagnose_cause(cause: EndCause, rules: Sequence[FailureRule]) -> FailureDiagnosis | None:
    """Diagnose the end of a generation without a failed task; None if no rule covers this cause."""
    return next((_diagnosis_by(rule, "", NO_EVIDENCE) for rule in rules if rule.cause == cause.value), None)


def _diagnosis_by(rule: FailureRule, line: str, found: FailureEvidence) -> FailureDiagnosis:
    xid = next((one for one in found.xids if one in rule.xids), None)
    says = rule.says or line.strip() or rule.name
    if xid is not None:
        says = f"XID {xid}: {rule.says or rule.name}"
    elif rule.oom and found.memory is not None:
        says = str(found.memory)
    return FailureDiagnosis(
        rule=rule.name,
        attribution=rule.attribution,
        remedy=rule.remedy,
        charge=rule.charge,
        description=says,
        weight=rule.weight,
        line=line.strip(),
    )


def _matching_line(rule: FailureRule, exit: TaskExit, found: FailureEvidence) -> str | None:
    """The line that matched, "" if the rule has no pattern; None if the rule does not match."""
    if (rule.codes and exit.code not in rule.codes) or (rule.signals and _signal_of(exit) not in rule.signals):
        return None
    if (rule.xids and not any(xid in rule.xids for xid in found.xids)) or (rule.oom and not found.oom_killed):
        return None
    if not rule.pattern:
        return ""
    # Newest line first: the last lines are the most likely to explain the exit.
    # Bounded here as well: a supervisor may be of another release or compromised.
    lines = (line[:EVIDENCE_LINE_CHARS_MAX] for line in reversed(found.lines[-EVIDENCE_LINES_MAX:]))
    return next((line for line in lines if matches(rule.pattern, line)), None)


def _signal_of(exit: TaskExit) -> int:
    """The signal, also if a launcher reported it as exit code 128 + n; 0 for none."""
    if exit.signal is not None and exit.code is None:
        return exit.signal
    return exit.code - _SHELL if exit.code is not None and _SHELL < exit.code < _SHELL + 65 else 0


def matches(pattern: str, line: str) -> bool:
    """Whether the line contains an alternative of the pattern: its pieces between `*`, in order."""
    lower = line.lower()
    return any(_in_order(option.lower().split("*"), lower) for option in pattern.split("|") if option.strip("* "))


def _in_order(pieces: Sequence[str], line: str) -> bool:
    start = 0
    for piece in pieces:
        found = line.find(piece, start)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def merge_rules(own: Iterable[FailureRule], shipped: Iterable[FailureRule]) -> tuple[FailureRule, ...]:
    """The operators' rules, then the shipped ones without those of the same name."""
    first = tuple(own)
    names = {rule.name for rule in first}
    return (*first, *(rule for rule in shipped if rule.name not in names))


# ---- parsing ---------------------------------------------------------------------------------------------------------

SIGNS: Final = ("codes", "signals", "xids", "pattern", "oom", "cause")
KEYS: Final = ("name", *SIGNS, "blame", "remedy", "charge", "weight", "says")
CAUSES: Final = ("hang",)  # causes of whole generations that rules may cover


def parse_rules(values: Any) -> tuple[FailureRule, ...]:
    """Parse rules from plain values (a list of tables), in their order.

    Raises:
        BadRequest: an unknown key (the error names the nearest known one), an invalid value, or a duplicate name.
    """
    if not isinstance(values, list):
        raise BadRequest("rules: a list of tables is required", hint="each with name, a sign, blame and remedy")
    if len(values) > RULES_MAX:
        raise BadRequest(f"rules: {len(values)} rules; at most {RULES_MAX} are allowed")
    rules: dict[str, FailureRule] = {}
    for number, value in enumerate(values, start=1):
        rule = parse_rule(value, f"rule {number}")
        if rule.name in rules:
            raise BadRequest(f"rule {number}: name: {rule.name!r} is used twice")
        rules[rule.name] = rule
    return tuple(rules.values())


def rule_to_plain(rule: FailureRule) -> dict[str, Any]:
    """The rule as plain values for `parse_rule`; without empty ones."""
    given = {key: getattr(rule, "attribution" if key == "blame" else key) for key in KEYS}
    return {
        key: list(value) if isinstance(value, tuple) else str(value) if key in _WORDS else value
        for key, value in given.items()
        if value
    }


_WORDS: Final = ("blame", "remedy", "charge")


def parse_rule(value: Any, where: str) -> FailureRule:
    """Parse one rule. `where`: its position, for messages.

    Raises:
        BadRequest: as `parse_rules`.
    """
    if not isinstance(value, Mapping):
        raise BadRequest(f"{where}: a table is required", hint=f"known keys: {', '.join(KEYS)}")
    for key in value:
        if key not in KEYS:
            raise BadRequest(
                f"{where}: unknown key {str(key)[:NAME_CHARS_MAX]!r}", hint=unknown_key_hint(str(key), KEYS, {})
            )
    name = _text(value, "name", where, NAME_CHARS_MAX)
    if not name:
        raise BadRequest(f"{where}: name is missing")
    where = f"{where} ({name})"
    rule = _signs(value, name, where)
    if not any(getattr(rule, sign) for sign in SIGNS):
        raise BadRequest(f"{where}: a sign is missing", hint=f"give at least one of {', '.join(SIGNS)}")
    return rule


def _signs(value: Mapping[str, Any], name: str, where: str) -> FailureRule:
    attribution = _one_of(value, "blame", FailureAttribution, where)
    usual = RestartBudget.RETRY if attribution is FailureAttribution.USER else RestartBudget.PROGRESS
    oom, weight, cause = value.get("oom", False), value.get("weight", 0.0), _text(value, "cause", where, NAME_CHARS_MAX)
    if not isinstance(oom, bool):
        raise BadRequest(f"{where}: oom: must be true or false")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0.0 <= weight <= WEIGHT_MAX:
        raise BadRequest(f"{where}: weight: must be a number from 0 to {WEIGHT_MAX:g}")
    if cause and cause not in CAUSES:
        raise BadRequest(f"{where}: cause: {cause!r} is not one of {', '.join(CAUSES)}")
    pattern = _text(value, "pattern", where, PATTERN_CHARS_MAX)
    if pattern and not all(option.strip("* ") for option in pattern.split("|")):
        raise BadRequest(f"{where}: pattern: {pattern!r} would match every line")
    return FailureRule(
        name=name,
        attribution=attribution,
        remedy=_one_of(value, "remedy", FailureReaction, where),
        pattern=pattern,
        oom=oom,
        weight=float(weight),
        cause=cause,
        charge=_one_of(value, "charge", RestartBudget, where) if "charge" in value else usual,
        codes=_numbers(value, "codes", where, 255),
        signals=_numbers(value, "signals", where, 64),
        xids=_numbers(value, "xids", where, 9_999),
        says=_text(value, "says", where, SAYS_CHARS_MAX),
    )


def _text(value: Mapping[str, Any], key: str, where: str, chars_max: int) -> str:
    text = value.get(key, "")
    if not isinstance(text, str) or len(text) > chars_max or not (text.isprintable()):
        raise BadRequest(f"{where}: {key}: must be one line of at most {chars_max} characters")
    return text.strip() if key == "name" else text


def _numbers(value: Mapping[str, Any], key: str, where: str, most: int) -> tuple[int, ...]:
    given = value.get(key, ())
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    named = [SIGNALS.get(one.upper(), one) if key == "signals" and isinstance(one, str) else one for one in listed]
    numbers: list[int] = []
    for number in named:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
            words = " or a name like SIGSEGV" if key == "signals" else ""
            raise BadRequest(f"{where}: {key}: {str(number)[:40]!r} is not a number from 1 to {most}{words}")
        numbers.append(number)
    return tuple(numbers)


def _one_of(value: Mapping[str, Any], key: str, kind: type[E], where: str) -> E:
    word = value.get(key)
    known: Iterable[str] = [one.value for one in kind]
    if not isinstance(word, str) or word not in known:
        what = f"{str(word)[:40]!r} is not one of" if word is not None else "missing; one of"
        raise BadRequest(
            f"{where}: {key}: {what} {', '.join(known)}",
            hint="" if word is None else suggestion(str(word), known, form="{!r}"),
        )
    return kind(word)
