"""The head's settings of its scheduler: from its command line, else as the head before remembered them in `cluster.json`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.settings import Policy, live_policy
from phalanx.core.units import parse_duration_s

_TIMES: Final = ("min_run", "min_run_by_right", "min_stay")  # options, each kept under its name with `_s`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options as `phalanx up` passes them on."""
    parser.add_argument("--policy", default=None, help="who goes first")
    for name in _TIMES:
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, metavar="TIME")
    parser.add_argument("--preemption", default=None, action=argparse.BooleanOptionalAction)


def remembered_of(given: argparse.Namespace, before: Any) -> dict[str, Any]:
    """What is kept for the next head: what was given, else what the one before kept. Of a policy given anew its constants begin anew.

    Raises:
        BadRequest: a time without a unit, or a constant of the default policy for another one.
    """
    known = before if isinstance(before, dict) else {}
    if given.policy is not None and given.policy != known.get("policy", "default"):
        known = {}
    kept = {**known, "policy": given.policy or known.get("policy", "default")}
    told = {f"{name}_s": getattr(given, name) for name in _TIMES if getattr(given, name) is not None}
    for name, text in told.items():
        kept[name] = parse_duration_s(text, what=f"--{name.removesuffix('_s').replace('_', '-')}")
    if given.preemption is not None:
        kept["preemption"] = given.preemption
    if kept["policy"] != "default" and (told or given.preemption is not None):
        raise BadRequest(
            f"--min-run, --min-run-by-right, --min-stay and --preemption are of the default policy, not of {kept['policy']}",
            hint="leave them out, or add --policy default",
        )
    return kept


def policy_of(kept: dict[str, Any]) -> Policy:
    """The policy that the kept settings name.

    Raises:
        BadRequest: no live policy has this name, or a time is out of bounds.
    """
    return live_policy(
        str(kept["policy"]), min_run_s=kept.get("min_run_s"), min_run_by_right_s=kept.get("min_run_by_right_s"),
        min_stay_s=kept.get("min_stay_s"), preemption=bool(kept.get("preemption", True)),
    )  # fmt: skip
