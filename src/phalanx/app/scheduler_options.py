"""The scheduler settings of the head: from its command line, else from `cluster.json`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from phalanx.controller.policy_loading import find_policy
from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import LEARNING_POLICIES
from phalanx.core.scheduling.settings import PolicySettings, live_policy_settings
from phalanx.core.units import parse_duration_s

_TIMES: Final = ("min_run", "min_run_by_right", "min_stay")  # options, stored under their names with `_s`


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `phalanx up` passes on."""
    parser.add_argument("--policy", default=None, help="scheduling policy")
    for name in _TIMES:
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, metavar="TIME")
    parser.add_argument("--preemption", default=None, action=argparse.BooleanOptionalAction)


def scheduler_settings(given: argparse.Namespace, before: Any) -> dict[str, Any]:
    """Return the settings to store: the given ones, else those stored before. A different policy starts with its default constants.

    Raises:
        BadRequest: a time has no unit, or an option is only for the default policy.
    """
    known = before if isinstance(before, dict) else {}
    if given.policy is not None and given.policy != known.get("policy", "default"):
        known = {}
    settings = {**known, "policy": given.policy or known.get("policy", "default")}
    times = {f"{name}_s": getattr(given, name) for name in _TIMES if getattr(given, name) is not None}
    for name, text in times.items():
        settings[name] = parse_duration_s(text, what=f"--{name.removesuffix('_s').replace('_', '-')}")
    if given.preemption is not None:
        settings["preemption"] = given.preemption
    if settings["policy"] not in LEARNING_POLICIES and (times or given.preemption is not None):
        raise BadRequest(
            "--min-run, --min-run-by-right, --min-stay and --preemption work only with the policies "
            f"{' and '.join(LEARNING_POLICIES)}, not with {settings['policy']}",
            hint="remove them, or add --policy default",
        )
    return settings


def build_policy(settings: dict[str, Any]) -> PolicySettings:
    """Return the policy of stored settings.

    Raises:
        BadRequest: there is no policy of this name, or a time is out of range.
    """
    name = str(settings["policy"])
    return live_policy_settings(
        name,
        make=find_policy(name) if ":" in name else None,
        min_run_s=settings.get("min_run_s"),
        min_run_by_right_s=settings.get("min_run_by_right_s"),
        min_stay_s=settings.get("min_stay_s"),
        preemption=bool(settings.get("preemption", True)),
    )
