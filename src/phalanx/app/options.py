"""The options of a head as one record: from its arguments, else from the stored options of the previous head, else the defaults."""

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
    """The options of this head. `remembered` are the options that the next head uses by default.

    Attributes:
        lease_before_s: the lease of the previous head, which supervisors may still have; 0 if there was none.
        store: the database that several heads share; empty for a file of this head. `store_before`: as stored in this folder.
        files: the directory that these heads share for files of jobs; empty if each head uses its own folder.
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
    """Parse the head's arguments."""
    parser = argparse.ArgumentParser(prog="phalanx-head", description="Run a Phalanx head; `phalanx up` starts this.")
    parser.add_argument("--home")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument(
        "--listen",
        default=None,
        help="ADDRESS[:PORT] of this machine for other servers, with TLS; off: only loopback",
    )
    parser.add_argument("--virtual", default=None, help="NODESxDEVICES, such as 3x4")
    parser.add_argument("--lease", type=float, default=None, help="lease of a supervisor in seconds")
    parser.add_argument(
        "--revive", type=float, default=None, help="seconds until a dead local node is restarted; 0: never"
    )
    parser.add_argument(
        "--jobs-as",
        choices=["owner", "head"],
        default=None,
        help="account of the jobs if this head is root",
    )
    parser.add_argument(
        "--token-life-max", default=None, help="longest lifetime of a token, such as 30d; off: no limit"
    )
    parser.add_argument(
        "--engine", choices=["local", "ray", "slurm"], default=None, help="engine that starts the supervisors"
    )
    add_store_arguments(parser)
    add_slurm_arguments(parser)
    add_ray_arguments(parser)
    add_arguments(parser)
    return parser.parse_args(argv)


def options_of(given: argparse.Namespace, home: Home, lock: int) -> Options:
    """Return the given options, else the stored ones, else the defaults.

    Raises:
        PhalanxError: an option is invalid, contradicts another, or its engine is not installed.
    """
    before = home.read_json("cluster.json")
    port = given.port if given.port is not None else int(before.get("port", PORT_DEFAULT))
    virtual = given.virtual if given.virtual is not None else before.get("virtual")
    lease_s = given.lease if given.lease is not None else float(before.get("lease_s", LEASE_DEFAULT_S))
    revive_s = given.revive if given.revive is not None else float(before.get("revive_s", REVIVE_AFTER_S))
    if not 1.0 <= lease_s <= 3600.0:
        raise Conflict(f"--lease {lease_s} is out of range: use 1 to 3600 seconds")
    listen = given.listen if given.listen is not None else before.get("listen") or "off"
    life = given.token_life_max if given.token_life_max is not None else before.get("token_life_max") or "off"
    scheduling = remembered_of(given, before.get("scheduling"))
    policy = policy_of(scheduling)
    engine = given.engine or before.get("engine") or "local"
    slurm, ray = slurm_options(engine, given, before), ray_options(engine, given, before)
    if slurm is not None:
        check_slurm(slurm, before, listens=listen != "off")
    if slurm is not None and given.virtual is not None:
        raise Conflict(
            "--virtual cannot be used with --engine slurm", hint="remove --virtual: the nodes come from Slurm"
        )
    store = store_options(given, home, before)
    check_store(store, home, own_ray=ray is not None and not ray.address)
    # The default lease was not chosen by a user, and a takeover takes nearly as long.
    alone_before = not store.before and lease_s == LEASE_DEFAULT_S
    if store.address and given.lease is None and ("lease_s" not in before or alone_before):
        lease_s = SUPERVISORS_LEASE_S
    prefix = "" if not store.address else f"{this_machine()[0].id}-{port}-"
    nodes = [] if slurm is not None else virtual_nodes(virtual, prefix) if virtual else this_machine()
    if ray is not None and ray.address:
        nodes = []  # the nodes come from Ray
    carried = nodes if ray is not None else []
    nodes = [] if ray is not None else nodes
    jobs_as = given.jobs_as or str(before.get("jobs_as") or "")
    kept = {node.id for node in nodes}
    # Nodes that still run from before are monitored until they end.
    nodes += [node for node in known(home.path) if node.id not in kept]
    remembered = {
        "port": port,
        "listen": listen,
        "virtual": virtual,
        "lease_s": lease_s,
        "revive_s": revive_s,
        "nodes": [node.id for node in [*nodes, *carried]],
        "scheduling": scheduling,
        "engine": engine,
        "slurm": remembered_slurm(slurm),
        "ray": remembered_ray(ray),
        "jobs_as": jobs_as,
        "token_life_max": life,
        "files": store.files,
    }
    return Options(
        home=home,
        lock=lock,
        remembered=remembered,
        port=port,
        nodes=nodes,
        lease_s=lease_s,
        lease_before_s=float(before.get("lease_s", 0.0)),
        revive_after_s=revive_s or None,
        policy=policy,
        listen=None if listen == "off" else listen_of(listen, port),
        slurm=slurm,
        ray=ray,
        carried=carried,
        jobs_as=jobs_as,
        store=store.address,
        store_before=store.before,
        files=store.files,
        token_life_max_s=None if life == "off" else parse_duration_s(life, what="--token-life-max"),
    )
