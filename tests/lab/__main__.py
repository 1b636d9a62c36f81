"""The lab by hand.

    python -m tests.lab up [--hosts 3] [--gpus 8] [--rate 1000]     builds it; it stays until `down`
    python -m tests.lab show
    python -m tests.lab exec h0 -- COMMAND ...                      inside a host
    python -m tests.lab cut h1 | mend h1 | drop h1 30 | shape h1 100 | kill h1 | restart h1
    python -m tests.lab slurm                                       Slurm's daemons on every living host that has none
    python -m tests.lab down

`--name` keeps several labs apart. Exit codes are those of the command inside, 64 for a wrong word, 69 where no lab is or can be.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from tests.lab import state
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import Slurm

USAGE, NO_LAB = 64, 69


def main(argv: list[str]) -> int:
    """Do the one verb."""
    words, inside = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    asked = _parser().parse_args(words)
    if not re.fullmatch(r"[a-z0-9-]{1,32}", asked.name):
        return _no(USAGE, f"a lab's name is of small letters, digits and hyphens, not {asked.name!r}")
    if why_not():
        return _no(NO_LAB, why_not())
    if asked.verb == "up":
        return _up(asked)
    lab = state.load(asked.name)
    if lab is None:
        state.forget(asked.name)
        if asked.verb == "down":
            print(f"lab {asked.name!r} is not up")
            return 0
        return _no(NO_LAB, f"lab {asked.name!r} is not up: python -m tests.lab up")
    try:
        return _verb(lab, asked, inside)
    except (KeyError, ValueError, RuntimeError) as error:
        return _no(USAGE, str(error.args[0]))


def _up(asked: argparse.Namespace) -> int:
    if state.load(asked.name) is not None:
        return _no(USAGE, f"lab {asked.name!r} is up: python -m tests.lab show; or give another --name")
    lab = Lab(size=asked.hosts, gpus=asked.gpus, rate_mbit=asked.rate, detached=True)
    lab.up()
    state.save(asked.name, lab)
    _show(lab)
    print("next: python -m tests.lab exec h0 -- bash     down: make lab-down")
    return 0


def _verb(lab: Lab, asked: argparse.Namespace, inside: list[str]) -> int:
    if asked.verb == "down":
        lab.down()
        state.forget(asked.name)
        return 0
    if asked.verb == "show":
        _show(lab)
        return 0
    if asked.verb == "slurm":
        slurm = Slurm(lab=lab)
        slurm.start()
        print("\n".join(f"{node:6}{said}" for node, said in slurm.states().items()))
        return 0
    if asked.verb == "exec":
        command = lab.command(asked.host, inside or ["bash"], folder=os.getcwd())
        os.execvp(command[0], command)  # the terminal is the command's
    match asked.verb:
        case "cut":
            lab.cut(asked.host)
        case "mend":
            lab.mend(asked.host)
        case "drop":
            lab.drop(asked.host, asked.percent / 100.0)
        case "shape":
            lab.shape(asked.host, asked.mbit)
        case "kill":
            lab.kill(asked.host)
        case _:
            lab.restart(asked.host)
    state.save(asked.name, lab)
    return 0


def _show(lab: Lab) -> None:
    print(f"{'host':6}{'address':14}{'link':>12}{'loss':>7}{'gpus':>6}  state")
    for host in lab.hosts.values():
        condition = "dead" if not host.pid else "cut" if host.cut else "up"
        rate = f"{host.rate_mbit:g} Mbit/s"
        print(f"{host.name:6}{host.address:14}{rate:>12}{host.loss:>7.0%}{lab.gpus:>6}  {condition}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description="Hosts and a switch as network namespaces."
    )
    parser.add_argument("--name", default="lab")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="build it")
    up.add_argument("--hosts", type=int, default=3)
    up.add_argument("--gpus", type=int, default=8, help="fake GPUs per host")
    up.add_argument("--rate", type=float, default=1000.0, help="of each link, each way, in Mbit/s")
    verbs.add_parser("show", help="the hosts and their links")
    verbs.add_parser("slurm", help="start Slurm on every living host that has none")
    verbs.add_parser("down", help="remove it")
    for verb, means in {
        "exec": "run what follows -- inside",
        "cut": "unplug its cable",
        "mend": "plug it in, lose no packets",
        "kill": "power cut",
        "restart": "power on again",
    }.items():
        verbs.add_parser(verb, help=means).add_argument("host")
    drop = verbs.add_parser("drop", help="lose packets on its link")
    drop.add_argument("host")
    drop.add_argument("percent", type=float)
    shape = verbs.add_parser("shape", help="bound its link")
    shape.add_argument("host")
    shape.add_argument("mbit", type=float)
    return parser


def _no(code: int, text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
