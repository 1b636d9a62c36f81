"""`phalanx calibrate`: measure this fleet with one ordinary job, compare it with the fact tables, and store the profile."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.cells import count
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import print_error, warn
from phalanx.cli.option_types import HOSTS
from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import BadRequest, NotFound, NotPermitted
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.work.users import Action

if TYPE_CHECKING:
    from phalanx.cli.plan.calibration_nodes import CalibrationNodes
    from phalanx.client import Client
    from phalanx.planner.calibration.profile import Profile
    from phalanx.wire.api.nodes import ProfileReply

_INTERRUPTED: Final = 130  # 128 + SIGINT


@click.command()
@click.option(
    "--nodes",
    "listed",
    type=HOSTS,
    metavar="NODES",
    help="Measure only these nodes: gpu[001-004]. [default: all nodes that are up]",
)
@click.option("--quick", is_flag=True, help="Measure fewer sizes and repeats, in about 30 s.")
@click.option("--wait", is_flag=True, help="Wait until the fleet is idle instead of failing.")
@click.option(
    "--python",
    default="",
    metavar="PATH",
    help="Python with Phalanx and torch on the nodes. [default: this one, or python]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be measured, and where.")
@click.option("--show", "show_stored", is_flag=True, help="Show the stored calibration without measuring.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calibrate(
    listed: str | None, quick: bool, wait: bool, python: str, dry_run: bool, show_stored: bool, as_json: bool
) -> int:
    """Measure this fleet: matrix multiplications, memory, links within and between nodes, storage, three short trainings.

    One job measures all nodes at once, so the fleet must be idle. Later plans use the measurements. Ctrl-C cancels the job.

    \b
    phalanx calibrate --quick
    phalanx calibrate --nodes gpu[001-004]
    phalanx calibrate --show
    """  # noqa: D301 - click reads the backspace character itself
    from phalanx.cli.plan.calibration_job import CalibrationFailed
    from phalanx.cli.plan.calibration_nodes import check_idle, select_nodes

    if wait and listed is not None:
        raise BadRequest(
            "--wait and --nodes exclude each other: --nodes reserves nodes, which would move the jobs on them",
            hint="use one of the two",
        )
    head = connect()
    if show_stored:
        return _show_stored(head, as_json=as_json)
    chosen = select_nodes(head.nodes(), None if listed is None else expand_hostlist(listed), time.time())
    if dry_run:
        return _show_plan(chosen, quick=quick, as_json=as_json)
    me = head.me()
    if Action.OPERATE not in me.actions:
        raise NotPermitted(
            f"{me.user} may not store the fleet's profile", hint="ask an operator; --show prints the stored profile"
        )
    check_idle(chosen, wait=wait)
    for line in chosen.excluded:
        warn(line)
    try:
        profile, reply = _measure(head, chosen, only=listed is not None, quick=quick, python=python)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CalibrationFailed as failed:  # as `run` does: exit with the job's code
        return print_error(failed.message, failed.hint, failed.job_code)
    _print(profile, reply, as_json=as_json)
    return 0


def _measure(
    head: Client, chosen: CalibrationNodes, *, only: bool, quick: bool, python: str
) -> tuple[Profile, ProfileReply]:
    """Run the job and merge its profile into the stored one; return the new profile and the stored one.

    On every error the job is cancelled and its nodes are released.
    """
    from phalanx.cli.plan.calibration_job import reserve_nodes, run_calibration
    from phalanx.planner.calibration.profile import merge_profiles, parse_profile
    from phalanx.planner.calibration.record_codec import encode_record

    with reserve_nodes(head, chosen, only=only, name="calibrate", why="phalanx calibrate") as reservation:
        profile = run_calibration(
            connect(FOLLOW_PATIENCE_S), chosen, reservation=reservation, quick=quick, python=python
        )
    kept = head.profile().profile
    whole = merge_profiles(
        None if kept is None else parse_profile(kept), profile, {str(node.id) for node in head.nodes()}
    )
    return profile, head.put_profile(encode_record(whole))


def _show_plan(chosen: CalibrationNodes, *, quick: bool, as_json: bool) -> int:
    from phalanx.cli.plan.calibration_job import build_calibration_job

    job = build_calibration_job(chosen, reservation="", quick=quick, python="", here=True)
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json({"nodes": chosen.names, "left_out": chosen.excluded, "job": job}, indent=2))
        return 0
    print(
        strip_control(
            f"{count(len(chosen.nodes), 'node')} x {chosen.devices} {chosen.gpu}: {fold_hostlist(chosen.names)}"
        )
    )
    for line in chosen.excluded:
        print(f"  {strip_control(line)}")
    several, many = chosen.devices > 1, len(chosen.nodes) > 1
    parts = ["matrix multiplications", "memory"]
    parts += ["all-reduce and all-to-all within nodes"] * several
    parts += ["the same between nodes", "every pair of nodes"] * many
    parts += ["storage", "short trainings"]
    print(f"measures {', '.join(parts)}")
    print("Dry run: nothing was submitted. Next: phalanx calibrate" + (" --quick" if quick else ""))
    return 0


def _show_stored(head: Client, *, as_json: bool) -> int:
    from phalanx.planner.calibration.profile import parse_profile

    reply = head.profile()
    if reply.profile is None:
        raise NotFound("this fleet has no calibration", hint="run phalanx calibrate to measure it")
    _print(parse_profile(reply.profile), reply, as_json=as_json)
    return 0


def _print(profile: Profile, reply: ProfileReply, *, as_json: bool) -> None:
    from phalanx.cli.plan.calibration_table import calibration_rows, profile_lines
    from phalanx.planner.calibration.profile import slow_parts
    from phalanx.planner.calibration.record_codec import encode_record

    if as_json:
        from phalanx.cli.list_output import to_json

        slow: list[Any] = [encode_record(part) for part in slow_parts(profile)]
        table = [encode_record(row) for row in calibration_rows(profile)]
        value = {"profile": encode_record(profile), "table": table, "slow": slow, "stale": reply.stale}
        print(to_json(value, indent=2))
        return
    screen = terminal(sys.stdout)
    print("\n".join(profile_lines(profile, reply.stale, screen)))
    print(screen.paint("next: phalanx plan MODEL --fleet here", "dim"))
