"""The route by which nodes that stage datasets learn of each other. The addresses live in memory: nodes repeat theirs every few seconds."""

from __future__ import annotations

import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.nodes.checkpoint_routes import grant_of_caller
from phalanx.api.nodes.data_servers import RegisteredDataServer
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.access.node_tokens import supervisor_token
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.state.records import NODES
from phalanx.core.work.users import Action
from phalanx.wire.data_peers import TOKEN_LIFETIME_S, DataPeer, DataPeersReply, DataPeersRequest, data_key, data_token

_OUTSIDE_MAX: Final = 8  # nodes outside the job that a node learns of: each is asked for its chunks twice a second
_CERTIFICATE_DAYS: Final = 397  # as of all certificates of a head
_FINGERPRINT_MAX: Final = 128

routes = RouteTable()


@routes.post("/v1/node/data", Action.SUPERVISE, body=DataPeersRequest, reply=DataPeersReply)
async def exchange_data_peers(request: Request) -> Response:
    """Report the server of chunks that a node has for the owner of a job, and return those of other nodes, with tokens for them."""
    runtime = runtime_of(request)
    asked = await read_record(request, DataPeersRequest, runtime.services.limits.body_bytes)
    node_id, _ = grant_of_caller(request, asked.job_id, asked.epoch)
    name = caller_of(request).node_id
    assert name is not None
    runtime.supervisors.require(name, asked.supervisor_id)
    if not 0 <= asked.port < 65536 or len(asked.fingerprint) > _FINGERPRINT_MAX:
        raise BadRequest(f"node {node_id}: port {asked.port} or its fingerprint is not valid")
    user, address, ranks = await run_in_thread(_about, runtime.services, asked.job_id, node_id)
    if asked.port and asked.fingerprint:
        found = RegisteredDataServer(asked.supervisor_id, name, node_id, address, asked.port, asked.fingerprint)
        runtime.data_servers.put(user, found)
    others = [
        one
        for one in runtime.data_servers.of_user(user)
        if one.node != node_id and runtime.supervisors.is_registered(one.name, one.supervisor_id)
    ]
    inside = [one for one in others if one.node in ranks]
    outside = [one for one in others if one.node not in ranks][:_OUTSIDE_MAX]
    expires_s = runtime.services.clock.now_s() + TOKEN_LIFETIME_S
    secret = runtime.services.node_secret
    peers = [
        DataPeer(
            node=one.node,
            rank=ranks.get(one.node),
            address=one.address,
            port=one.port,
            fingerprint=one.fingerprint,
            token=data_token(data_key(supervisor_token(secret, one.name), user), expires_s),
        )
        for one in [*inside, *outside]
    ]
    certificate, key = ("", "") if asked.fingerprint else await run_in_thread(make_certificate, node_id)
    return json_response(DataPeersReply(peers=peers, certificate_pem=certificate, key_pem=key))


def _about(services: HeadServices, job_id: JobId, node_id: NodeId) -> tuple[UserId, str, dict[NodeId, int]]:
    """The owner of the job, the address of the node, and the node ranks of the job's newest attempt."""
    job, attempts, node = (
        services.store.job(job_id),
        services.store.attempts(job_id),
        services.store.record(NODES, node_id),
    )
    if job is None or node is None or not attempts:
        raise NotFound(f"no job {job_id!r}")
    return job.user, node.address, {grant.node_id: grant.node_rank for grant in attempts[-1].allocation.grants}


def make_certificate(node_id: NodeId) -> tuple[str, str]:
    """A certificate that signs itself, and its key: peers know it by its SHA-256, which the head sends them."""
    # Imported here: most heads stage no datasets.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"phalanx data {node_id}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_CERTIFICATE_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(pem).decode(), secret.decode()
