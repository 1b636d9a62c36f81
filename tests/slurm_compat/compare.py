"""Compares what one script did on the two clusters: exit code, calls with their environments, and files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from tests.slurm_compat import differences
from tests.slurm_compat.cluster import FIRST_JOB, NODES, Outcome

_OUR_WORDS: Final = re.compile(r"^(phalanx|slurm(stepd)?|srun|sbatch|squeue|scancel|scontrol|sacct|sinfo)\b.*$")
"""Lines that a launcher itself writes: a task's text never begins so in these scripts."""
_ADDRESS: Final = re.compile(r"\b(?:10\.[0-9]+\.[0-9]+|127\.0\.0)\.([0-9]+)\b")
_NODE: Final = re.compile(rf"\b[hn]([0-{NODES - 1}])\b")
_CLOCK: Final = re.compile(r"\b[0-9]{1,2}:[0-9]{2}:[0-9]{2}\b")
_SECONDS: Final = re.compile(r"^((?:real|user|sys)\t)[0-9]+m[0-9.]+s$")
"""What the shell's `time` prints."""
_BACKGROUND: Final = re.compile(r"^[^#\n]*[^&>|\n]&[ \t]*(#.*)?$", re.MULTILINE)
"""A command that a script starts in the background: its steps get their numbers in the order in which they happen to arrive."""
_RUNTIMES: Final = ("apptainer",)


def compare(slurm: Outcome, ours: Outcome, text: str) -> list[str]:
    """Return one line for each difference that is not allowed; none if the script does the same."""
    if not slurm.submitted or not ours.submitted:
        same = slurm.submitted == ours.submitted
        return (
            []
            if same
            else [
                f"submit: Slurm {_accepted(slurm)}, here {_accepted(ours)}: {_last(ours if slurm.submitted else slurm)}"
            ]
        )
    found = [f"exit code: {slurm.exit_code}, here {ours.exit_code}"] if slurm.exit_code != ours.exit_code else []
    drop = _RUNTIMES if "--container-image" in text else ()
    if _BACKGROUND.search(text):
        slurm, ours = _steps_in_order(slurm, ours), _steps_in_order(ours, ours)
    theirs, mine = _calls(slurm, ours, drop), _calls(ours, ours, drop)
    if [key for key, _ in theirs] != [key for key, _ in mine]:
        found += _key_differences([key for key, _ in theirs], [key for key, _ in mine])
    else:
        for (key, left), (_, right) in zip(theirs, mine, strict=True):
            found += [f"{key.split('|')[0]}: {line}" for line in _environment(left, right)]
    found += _files(_normal_files(slurm, ours), _normal_files(ours, ours))
    return list(dict.fromkeys(found))


def _accepted(outcome: Outcome) -> str:
    return "accepts" if outcome.submitted else "refuses"


def _last(outcome: Outcome) -> str:
    return " ".join(outcome.said.split())[-300:]


def _calls(outcome: Outcome, ours: Outcome, drop: tuple[str, ...]) -> list[tuple[str, Mapping[str, str]]]:
    """Calls by program, words, folder and place in the step, in that order, with their environments."""
    found = []
    for call in outcome.calls:
        if call["program"] in drop:
            continue
        env = {name: _normal(value, outcome, ours) for name, value in call["env"].items()}
        place = [
            env.get(name, "") for name in ("SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID", "SLURM_PROCID")
        ]
        key = "|".join([call["program"], _normal(json.dumps(call["argv"]), outcome, ours), call["cwd"], *place])
        found.append((key, env))
    return sorted(found, key=lambda pair: pair[0])


def _steps_in_order(outcome: Outcome, ours: Outcome) -> Outcome:
    """Give the same numbers to the steps in the order of what they call, not of their arrival: how many there are stays to be compared."""
    steps: dict[str, list[str]] = {}
    for call in outcome.calls:
        if step := call["env"].get("SLURM_STEP_ID"):
            words = [call["program"], json.dumps(call["argv"]), call["env"].get("SLURM_STEP_NODELIST", "")]
            steps.setdefault(step, []).append(_normal("|".join(words), outcome, ours))
    order = sorted(steps, key=lambda step: (sorted(steps[step]), int(step)))
    numbers = dict(zip(order, sorted(steps, key=int), strict=True))
    calls = []
    for call in outcome.calls:
        env = {**call["env"]}
        for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
            if name in env:
                env[name] = numbers[env[name]]
        calls.append({**call, "env": env})
    return replace(outcome, calls=tuple(calls))


def _normal(text: str, outcome: Outcome, ours: Outcome) -> str:
    """Write job numbers, node names, addresses and devices in one way."""
    if outcome is not ours:
        first = int(outcome.job or FIRST_JOB)
        text = re.sub(
            r"(?<![0-9])(8700[0-9]{2})(?![0-9])", lambda match: str(int(match[1]) - first + int(ours.job or 0)), text
        )
    text = re.sub(r"\bVIRTUAL-n[0-9]+-[0-9a-f]+-([0-9]+)\b", r"\1", text)
    text = _ADDRESS.sub(lambda match: f"<{int(match[1]) - 1}>", text)
    return _SECONDS.sub(r"\1<time>", _CLOCK.sub("<time>", _NODE.sub(r"<\1>", text)))


def _key_differences(left: list[str], right: list[str]) -> Iterator[str]:
    only_left = [one for one in left if one not in right]
    only_right = [one for one in right if one not in left]
    yield from (f"call only on Slurm: {one}" for one in only_left[:3])
    yield from (f"call only here: {one}" for one in only_right[:3])
    if not only_left and not only_right:
        yield f"{len(left)} calls on Slurm, {len(right)} here"


def _environment(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*left, *right}):
        one, other = left.get(name), right.get(name)
        element = " of an element" if "SLURM_ARRAY_TASK_ID" in left and name in {"SLURM_JOB_ID", "SLURM_JOBID"} else ""
        if one != other and not differences.allowed(name + element, one, other):
            yield f"{name}: {one!r}, here {other!r}"


def _normal_files(outcome: Outcome, ours: Outcome) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, text in outcome.files.items():
        lines = [_normal(line, outcome, ours) for line in text.splitlines()]
        found[_normal(name, outcome, ours)] = sorted(line for line in lines if not _OUR_WORDS.match(line))
    return found


def _files(left: Mapping[str, list[str]], right: Mapping[str, list[str]]) -> Iterator[str]:
    yield from (f"file only on Slurm: {name} {left[name][:3]}" for name in left if name not in right)
    yield from (f"file only here: {name} {right[name][:3]}" for name in right if name not in left)
    for name in left:
        if name in right and left[name] != right[name]:
            missing = [line for line in left[name] if line not in right[name]]
            extra = [line for line in right[name] if line not in left[name]]
            yield f"file {name}: Slurm has {missing[:3]}, here {extra[:3]}"
