"""The options of a head as one record: from its arguments, else from the stored options of the previous head, else the defaults."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from phalanx.app.join_service import ListenAddress, parse_listen, parse_relay
from phalanx.app.machine_nodes import this_machine_nodes, virtual_nodes
from phalanx.app.relay.key_file import read_relay_key
from phalanx.app.scheduler_options import add_scheduler_arguments, build_policy, scheduler_settings
from phalanx.app.secret_key_file import given_key_file
from phalanx.app.shared_store import add_store_arguments, check_store, store_options
from phalanx.app.state_folder import StateFolder
from phalanx.controller.leadership import SUPERVISORS_LEASE_S
from phalanx.controller.leases import LEASE_DEFAULT_S
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.units import parse_duration_s
from phalanx.core.work.extras import parse_offers
from phalanx.core.work.job_file.web_ports import PORT_MAX
from phalanx.engines.registry import DEFAULT_ENGINE, engine_type, selectable_engines
from phalanx.ports.engine import EngineType, HeadSetup, LocalNode
from phalanx.providers.tracing.otlp_exporter import check_endpoint
from phalanx.wire.head_relay import KEY_FILE

PORT_DEFAULT: Final = 7600
ANY_PORT: Final = 0
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_HOST_CHARS_MAX: Final = 180  # of 253, with the name of a program before it
REVIVE_AFTER_S: Final = (
    20.0  # pause before a dead local node is started again; long enough to see the job continue without it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """The options of this head. `to_store` are the options that the next head uses by default.

    Attributes:
        previous_lease_s: the lease of the previous head, which supervisors may still have; 0 if there was none.
        store: the database that several heads share; empty for a file of this head. `previous_store`: as stored in this folder.
        nodes: nodes of this machine, which the engine brings up.
        otlp: the URL to which traces of jobs are posted; empty for none.
        programs_port: on which pages of web programs of jobs are served; ANY_PORT for one that is free, None for no such pages.
        programs_host: each program has a host name directly below this one; empty if all are at the head's own name.
        secrets_key: the file with the keys that encrypt secrets; empty for one of this head alone.
        relay_key: of the relay, if `listen` is the address of one; else empty.
        shared_files: the directory that these heads share for files of jobs; empty if each head uses its own folder.
    """

    state_folder: StateFolder
    lock: int
    to_store: dict[str, Any]
    port: int
    nodes: Sequence[LocalNode]
    engine: str
    engine_options: Mapping[str, str]
    lease_s: float
    previous_lease_s: float
    revive_after_s: float | None
    policy: PolicySettings
    listen: ListenAddress | None = None
    jobs_as: str = ""
    token_life_max_s: float | None = None
    store: str = ""
    previous_store: str = ""
    shared_files: str = ""
    otlp: str = ""
    secrets_key: str = ""
    programs_port: int | None = ANY_PORT
    programs_host: str = ""
    relay_key: bytes = b""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the head's arguments."""
    parser = argparse.ArgumentParser(prog="phalanx-head", description="Run a Phalanx head; `phalanx up` starts this.")
    parser.add_argument("--home")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument(
        "--listen",
        default=None,
        help="ADDRESS[:PORT] of this machine for other servers, with TLS; off: only loopback",
    )
    parser.add_argument(
        "--relay", default=None, help="HOST:PORT of a relay, for a head that other servers cannot reach; off: none"
    )
    parser.add_argument(
        "--relay-key", default=None, metavar="FILE", help="the relay's key; off: relay.key in the state folder"
    )
    parser.add_argument("--virtual", default=None, help="NODESxDEVICES, such as 3x4, 3xh100:4 or 3xh100:4+mig")
    parser.add_argument(
        "--offers", default=None, help="named amounts of each node, such as scratch=2TiB,nic=8; off: none"
    )
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
    engines = selectable_engines()
    parser.add_argument(
        "--engine", choices=[one.name for one in engines], default=None, help="engine that starts the supervisors"
    )
    for option in (option for engine in engines for option in engine.options):
        parser.add_argument(f"--{option.name}", default=None, metavar=option.metavar, help=option.help)
    parser.add_argument("--otlp", default=None, help="URL of an OpenTelemetry collector for traces of jobs; off: none")
    parser.add_argument(
        "--secrets-key", default=None, metavar="FILE", help="keys that encrypt secrets; off: a file of this head"
    )
    parser.add_argument(
        "--programs-port", default=None, help="port for pages of web programs of jobs; off: none; any: a free one"
    )
    parser.add_argument(
        "--programs-host", default=None, help="web programs have host names of their own below this one; off: none"
    )
    add_store_arguments(parser)
    add_scheduler_arguments(parser)
    return parser.parse_args(argv)


def resolve_options(given: argparse.Namespace, home: StateFolder, lock: int) -> HeadOptions:
    """Return the given options, else the stored ones, else the defaults.

    Raises:
        PhalanxError: an option is invalid, contradicts another, or its engine is not installed.
    """
    before = home.read_json("cluster.json")
    port = given.port if given.port is not None else int(before.get("port", PORT_DEFAULT))
    virtual = given.virtual if given.virtual is not None else before.get("virtual")
    offers = parse_offers(_choice(given, before, "offers"))
    lease_s = given.lease if given.lease is not None else float(before.get("lease_s", LEASE_DEFAULT_S))
    revive_s = given.revive if given.revive is not None else float(before.get("revive_s", REVIVE_AFTER_S))
    if not 1.0 <= lease_s <= 3600.0:
        raise Conflict(f"--lease {lease_s} is out of range: use 1 to 3600 seconds")
    listen, life, otlp = (_choice(given, before, name) for name in ("listen", "token_life_max", "otlp"))
    otlp_endpoint = "" if otlp == "off" else check_endpoint(otlp)
    key_file = _file_choice(given, before, "secrets_key")
    programs_port = _choice(given, before, "programs_port", "any")
    programs_host = _choice(given, before, "programs_host")
    scheduling = scheduler_settings(given, before.get("scheduling"))
    policy = build_policy(scheduling)
    store = store_options(given, home, before)
    relay, relay_key_file, relay_key = _relay(given, before, home, listens=listen != "off", shares=bool(store.address))
    setup = HeadSetup(
        listens=listen != "off" or relay != "off",
        listened_before=any((before.get(name) or "off") != "off" for name in ("listen", "relay")),
        shares_store=bool(store.address),
        virtual=given.virtual or "",
    )
    engine, engine_options = _engine_options(given, before, setup)
    check_store(store, home)
    # The default lease was not chosen by a user, and a takeover takes nearly as long.
    alone_before = not store.previous_address and lease_s == LEASE_DEFAULT_S
    if store.address and given.lease is None and ("lease_s" not in before or alone_before):
        lease_s = SUPERVISORS_LEASE_S
    prefix = "" if not store.address else f"{this_machine_nodes()[0].id}-{port}-"
    nodes = _local_nodes(engine, engine_options, virtual, prefix, offers)
    jobs_as = given.jobs_as or str(before.get("jobs_as") or "")
    remembered = {
        "port": port,
        "listen": listen,
        "relay": relay,
        "relay_key": relay_key_file,
        "virtual": virtual,
        "offers": offers,
        "lease_s": lease_s,
        "revive_s": revive_s,
        "nodes": [node.id for node in nodes],
        "scheduling": scheduling,
        "engine": engine.name,
        "engine_options": engine_options,
        "jobs_as": jobs_as,
        "token_life_max": life,
        "files": store.files,
        "otlp": otlp,
        "secrets_key": key_file,
        "programs_port": programs_port,
        "programs_host": programs_host,
    }
    return HeadOptions(
        state_folder=home,
        lock=lock,
        to_store=remembered,
        port=port,
        nodes=nodes,
        lease_s=lease_s,
        previous_lease_s=float(before.get("lease_s", 0.0)),
        revive_after_s=revive_s or None,
        policy=policy,
        listen=parse_relay(relay) if relay != "off" else None if listen == "off" else parse_listen(listen, port),
        relay_key=relay_key,
        engine=engine.name,
        engine_options=engine_options,
        jobs_as=jobs_as,
        store=store.address,
        previous_store=store.previous_address,
        shared_files=store.files,
        otlp=otlp_endpoint,
        programs_port=_programs_port(programs_port),
        programs_host=_programs_host(programs_host),
        secrets_key=given_key_file("" if key_file == "off" else key_file),
        token_life_max_s=None if life == "off" else parse_duration_s(life, what="--token-life-max"),
    )


def _choice(given: argparse.Namespace, before: Mapping[str, Any], name: str, default: str = "off") -> str:
    """Return an option as given, else as stored, else its default."""
    found = getattr(given, name)
    return str(found if found is not None else before.get(name) or default)


def _file_choice(given: argparse.Namespace, before: Mapping[str, Any], name: str) -> str:
    """Return the path of a file, absolute; `off` without one."""
    path = _choice(given, before, name)
    return path if path == "off" else os.path.abspath(path)


def _relay(
    given: argparse.Namespace, before: Mapping[str, Any], home: StateFolder, *, listens: bool, shares: bool
) -> tuple[str, str, bytes]:
    """Return `--relay` and `--relay-key`, each `off` without one, and the key.

    Raises:
        PhalanxError: it is given beside `--listen` or `--store`, or its key cannot be read.
    """
    relay, path = _choice(given, before, "relay"), _file_choice(given, before, "relay_key")
    if relay == "off":
        return relay, path, b""
    if listens:
        raise Conflict(
            "--relay is for a head that other servers cannot reach, and --listen for one that they can",
            hint="add --listen off, or --relay off",
        )
    if shares:
        raise Conflict("--relay serves one head, and --store is for several", hint="use --listen, or --store off")
    return relay, path, read_relay_key(home.path_of(KEY_FILE) if path == "off" else path)


def _programs_port(text: str) -> int | None:
    """Parse `--programs-port`.

    Raises:
        BadRequest: it is not a port.
    """
    if text in ("any", "off"):
        return ANY_PORT if text == "any" else None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= PORT_MAX):
        raise BadRequest(f"--programs-port {text}: not a port", hint="--programs-port 7700, any or off")
    return int(text)


def _programs_host(text: str) -> str:
    """Parse `--programs-host`.

    Raises:
        BadRequest: it is not a host name.
    """
    if text == "off":
        return ""
    if len(text) > _HOST_CHARS_MAX or not _HOST.fullmatch(text):
        raise BadRequest(
            f"--programs-host {text}: not a host name",
            hint="name a domain whose names all lead to this head, as in --programs-host apps.example.org",
        )
    return text


def _local_nodes(
    engine: EngineType, engine_options: Mapping[str, str], virtual: str | None, prefix: str, offers: str
) -> list[LocalNode]:
    """Return the nodes that the head itself brings.

    Raises:
        Conflict: the engine cannot do what is asked of them.
    """
    nodes: list[LocalNode] = []
    if engine.uses_local_nodes(engine_options):
        nodes = virtual_nodes(virtual, prefix) if virtual else this_machine_nodes()
        nodes = [replace(node, offers=offers) for node in nodes]
    if offers and not engine.nodes_offer_extras:
        raise Conflict(f"--offers cannot be used with the nodes of engine {engine.name}", hint="use --offers off")
    if any(node.virtual_model for node in nodes) and not engine.has_virtual_models:
        raise Conflict(
            f"--virtual {virtual} names a GPU model, which engine {engine.name} cannot stand in for",
            hint=f"write --virtual {len(nodes)}x{nodes[0].virtual_devices}, or use --engine local",
        )
    return nodes


def _engine_options(
    given: argparse.Namespace, before: Mapping[str, Any], setup: HeadSetup
) -> tuple[EngineType, dict[str, str]]:
    """Return the engine and its options.

    Raises:
        PhalanxError: an option is of another engine, or the engine refuses the options.
    """
    name_before = before.get("engine") or DEFAULT_ENGINE
    chosen = engine_type(given.engine or name_before)
    words = {
        (engine, option.name): getattr(given, option.name.replace("-", "_"))
        for engine in selectable_engines()
        for option in engine.options
    }
    for (engine, name), value in words.items():
        if value and engine is not chosen:
            raise BadRequest(f"--{name} needs the engine {engine.title}", hint=f"phalanx up --engine {engine.name}")
    return chosen, chosen.check(
        {name: value for (engine, name), value in words.items() if engine is chosen and value is not None},
        before.get("engine_options") or {} if name_before == chosen.name else None,
        setup,
    )
