"""Creates the engines of a head: the default one, which also watches nodes from before, and the one that the user chose."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from phalanx.app.join_service import certificate_names
from phalanx.app.options import HeadOptions
from phalanx.app.resources import Listeners
from phalanx.core.access.node_tokens import attempt_key, machine_join_token, node_token
from phalanx.core.errors import BadRequest
from phalanx.core.ids import NodeId
from phalanx.engines.registry import DEFAULT_ENGINE, engine_type
from phalanx.node.files.job_accounts import JOBS_AS_VARIABLE
from phalanx.node.head_link import peer_account
from phalanx.ports.engine import CertificateFiles, Engine, EngineContext, MachineJoin
from phalanx.ports.provider import EnginePools
from phalanx.providers.registry import provider_type
from phalanx.wire.head_http import fingerprint

if TYPE_CHECKING:
    from phalanx.app.certificates import CertificateAuthority
    from phalanx.ports.provider import NodeProvider


def create_default_engine(options: HeadOptions, head: EngineContext) -> Engine:
    """Create the engine of this machine, which a head has whether it leads or is a standby."""
    return engine_type(DEFAULT_ENGINE).create({}, head if options.engine == DEFAULT_ENGINE else replace(head, nodes=()))


def create_engines(options: HeadOptions, head: EngineContext, default: Engine | None) -> list[Engine]:
    """Create all engines of a head. `default`: the one of this machine, if it already runs."""
    engines = [default or create_default_engine(options, head)]
    if options.engine != DEFAULT_ENGINE:
        engines.append(engine_type(options.engine).create(options.engine_options, head))
    return engines


def create_provider(name: str, options: HeadOptions, head: EngineContext) -> NodeProvider:
    """Create a provider of node pools: that of the engine of this name, whether the head runs on it or not, or an installed one.

    Raises:
        BadRequest: it is not installed, or cannot be imported.
    """
    own = _engine_with_pools(name)
    if own is not None:
        return own.create_provider(options.engine_options if name == options.engine else {}, head)
    return provider_type(name).create(head)


def _engine_with_pools(name: str) -> EnginePools | None:
    try:
        found = engine_type(name)
    except BadRequest:
        return None
    return found if isinstance(found, EnginePools) else None


def parallel_calls(name: str) -> int:
    """Return how many calls a provider takes at the same time; one that is not installed takes none, and refuses that."""
    try:
        return 1 if _engine_with_pools(name) is not None else provider_type(name).parallel_calls
    except BadRequest:
        return 1


def engine_context(options: HeadOptions, listeners: Listeners, *, secret: bytes, sole_head: bool) -> EngineContext:
    """Return what the engines of this head need from it."""
    home, listen = options.state_folder, listeners.listen

    @cache
    def authority() -> CertificateAuthority:
        from phalanx.app.certificates import CertificateAuthority  # `cryptography` is imported only if needed

        return CertificateAuthority(home)

    def certificate_files(name: str, address: str) -> CertificateFiles:
        certificate, key = authority().write(name, authority().sign(certificate_names(address, socket.gethostname())))
        return CertificateFiles(certificate=certificate, key=key, ca=authority().ca_file)

    def machine_join(node_id: NodeId, order: str) -> MachineJoin:
        token = machine_join_token(secret, node_id, order)
        return MachineJoin(
            address=listeners.url.removeprefix("https://"), token=token, fingerprint=fingerprint(authority().ca_pem)
        )

    return EngineContext(
        state_folder=home.path,
        nodes=options.nodes,
        url=listeners.url,
        address="" if listen is None else listen.own_host,
        ca_pem="" if listen is None else authority().ca_pem,
        environment=lambda: _environment(options, listeners),
        local_environment=lambda: _local_environment(options, listeners),
        node_token=lambda node: node_token(secret, node),
        attempt_key=lambda job_id, epoch: attempt_key(secret, job_id, epoch),
        derive_id=lambda purpose: hashlib.sha256(f"phalanx {purpose} ".encode() + secret).hexdigest(),
        sign=lambda address, hostname: authority().sign(certificate_names(address, hostname)),
        certificate_files=certificate_files,
        revive_after_s=options.revive_after_s,
        sole_head=sole_head,
        machine_join=None if listen is None else machine_join,
    )


def _environment(options: HeadOptions, listeners: Listeners) -> dict[str, str]:
    """Return the environment of supervisors that may run on another machine than the head."""
    if listeners.listen is not None:
        return {"PHALANX_HEAD_URL": listeners.listen.url}
    return {
        "PHALANX_HEAD_URL": listeners.loopback_url,
        "PHALANX_HEAD_FILE": options.state_folder.path_of("head.json"),
        **peer_account.head_uid_environment(),
    }


def _local_environment(options: HeadOptions, listeners: Listeners) -> dict[str, str]:
    """Return the environment of the supervisors on this machine: this head is reached on loopback without TLS."""
    home = options.state_folder
    ca_file = home.path_of("tls", "ca.pem")
    return {
        "PHALANX_HEAD_URL": listeners.loopback_url,
        "PHALANX_HEAD_FILE": home.path_of("head.json"),
        **peer_account.head_uid_environment(),
        "PHALANX_HOME": home.path,
        "PHALANX_NODE_ADDRESS": (listeners.listen and listeners.listen.own_host) or "127.0.0.1",
        **({JOBS_AS_VARIABLE: options.jobs_as} if options.jobs_as else {}),
        # For the day on which a head on another machine leads.
        **({"PHALANX_HEAD_CA": ca_file} if listeners.listen is not None and os.path.exists(ca_file) else {}),
    }
