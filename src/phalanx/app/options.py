"""How a head runs: its arguments, what the head before remembered, and the defaults, as one record."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.app.fleet import this_machine, virtual_nodes
from phalanx.app.home import Home
from phalanx.app.joining import Listen, listen_of
from phalanx.app.ray import RayOptions, add_ray_arguments, ray_options, remembered_ray
from phalanx.app.scheduling import add_arguments, policy_of, remembered_of
from phalanx.app.sharing import add_store_arguments, check_store, store_options
from phalanx.app.slurm import SlurmOptions, add_slurm_arguments, check_slurm, remembered_slurm, slurm_options
from phalanx.controller.leadership import SUPERVISORS_LEASE_S
from phalanx.controller.leases import LEASE_DEFAULT_S
from phalanx.core.errors import Conflict
from phalanx.core.scheduling.settings import Policy
from phalanx.core.units import parse_duration_s
from phalanx.engines.local.engine import REVIVE_AFTER_S
from phalanx.engines.local.records import LocalNode, known

PORT_DEFAULT: Final = 7600


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How this head runs. `remembered` is what the next one takes over where it is not told otherwise.

    Attributes:
        lease_before_s: as the head before granted it; supervisors may still hold such. 0 in a folder without one.
        store: the database that several heads share; empty for a file of this head alone. `store_before`: as this folder remembers it.
        files: the directory that those heads share for what jobs wrote; empty where each keeps it in its own folder.
    """

    home: Home
    lock: int
    remembered: dict[str, Any]
    port: int
    nodes: list[LocalNode]
    lease_s: float
    lease_before_s: float
    revive_after_s: float | None
    policy: Policy
    listen: Listen | None = None
    slurm: SlurmOptions | None = None
    ray: RayOptions | None = None
    carried: Sequence[LocalNode] = ()
    jobs_as: str = ""
    token_life_max_s: float | None = None
    store: str = ""
    store_before: str = ""
    files: str = ""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The head's arguments, as given."""
    parser = argparse.ArgumentParser(
        prog="phalanx-head", description="Run a Phalanx head; `phalanx up` does this for you."
    )
    parser.add_argument("--home")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument(
        "--listen",
        default=None,
        help="ADDRESS[:PORT] of this machine that other servers reach, with TLS; off: loopback alone",
    )
    parser.add_argument("--virtual", default=None, help="NODESxDEVICES, as 3x4")
    parser.add_argument("--lease", type=float, default=None, help="seconds a supervisor may be silent")
    parser.add_argument(
        "--revive", type=float, default=None, help="seconds until a dead local node is brought back; 0: never"
    )
    parser.add_argument(
        "--jobs-as",
        choices=["owner", "head"],
        default=None,
        help="whose account jobs run under where this head is root",
    )
    parser.add_argument("--token-life-max", default=None, help="longest life of a token, as 30d; off: no bound")
    parser.add_argument("--engine", choices=["local", "ray", "slurm"], default=None, help="what brings the supervisors")
    add_store_arguments(parser)
    add_slurm_arguments(parser)
    add_ray_arguments(parser)
    add_arguments(parser)
    return parser.parse_args(argv)


def options_of(given: argparse.Namespace, home: Home, lock: int) -> Options:
    """What was given, else what the head before remembered, else the defaults.

    Raises:
        PhalanxError: one of them is none, contradicts another, or its engine is not here.
    """
    before = home.read_json("cluster.json")
    port = given.port if given.port is not None else int(before.get("port", PORT_DEFAULT))
    virtual = given.virtual if given.virtual is not None else before.get("virtual")
    lease_s = given.lease if given.lease is not None else float(before.get("lease_s", LEASE_DEFAULT_S))
    revive_s = given.revive if given.revive is not None else float(before.get("revive_s", REVIVE_AFTER_S))
    if not 1.0 <= lease_s <= 3600.0:
        raise Conflict(f"--lease {lease_s}: a lease lasts 1 s to 1 h")
    listen = given.listen if given.listen is not None else before.get("listen") or "off"
    life = given.token_life_max if given.token_life_max is not None else before.get("token_life_max") or "off"
    scheduling = remembered_of(given, before.get("scheduling"))
    policy = policy_of(scheduling)
    engine = given.engine or before.get("engine") or "local"
    slurm, ray = slurm_options(engine, given, before), ray_options(engine, given, before)
    if slurm is not None:
        check_slurm(slurm, before, listens=listen != "off")
    if slurm is not None and given.virtual is not None:
        raise Conflict("--virtual and --engine slurm at once", hint="Slurm says what nodes there are")
    store = store_options(given, home, before)
    check_store(store, home, own_ray=ray is not None and not ray.address)
    # Nobody chose it, and a takeover takes nearly as long.
    alone_before = not store.before and lease_s == LEASE_DEFAULT_S
    if store.address and given.lease is None and ("lease_s" not in before or alone_before):
        lease_s = SUPERVISORS_LEASE_S
    prefix = "" if not store.address else f"{this_machine()[0].id}-{port}-"
    nodes = [] if slurm is not None else virtual_nodes(virtual, prefix) if virtual else this_machine()
    if ray is not None and ray.address:
        nodes = []  # Ray says what nodes there are
    carried = nodes if ray is not None else []
    nodes = [] if ray is not None else nodes
    jobs_as = given.jobs_as or str(before.get("jobs_as") or "")
    kept = {node.id for node in nodes}
    # Still running from before: watched on until they end.
    nodes += [node for node in known(home.path) if node.id not in kept]
    remembered = {
        "port": port, "listen": listen, "virtual": virtual, "lease_s": lease_s, "revive_s": revive_s, "nodes": [node.id for node in [*nodes, *carried]],
        "scheduling": scheduling, "engine": engine, "slurm": remembered_slurm(slurm), "ray": remembered_ray(ray), "jobs_as": jobs_as, "token_life_max": life,
        "files": store.files,
    }  # fmt: skip
    return Options(
        home=home, lock=lock, remembered=remembered, port=port, nodes=nodes, lease_s=lease_s, lease_before_s=float(before.get("lease_s", 0.0)),
        revive_after_s=revive_s or None, policy=policy, listen=None if listen == "off" else listen_of(listen, port),
        slurm=slurm, ray=ray, carried=carried, jobs_as=jobs_as, store=store.address, store_before=store.before, files=store.files,
        token_life_max_s=None if life == "off" else parse_duration_s(life, what="--token-life-max"),
    )  # fmt: skip
