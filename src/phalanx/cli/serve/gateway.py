"""`phalanx gateway`: one address for all services."""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
from typing import TYPE_CHECKING

import click

from phalanx.cli.connection import connect
from phalanx.cli.option_types import GrammarType
from phalanx.cli.serve.gateway_address import forget_gateway, remember_gateway
from phalanx.core.errors import BadFile, BadRequest, PhalanxError
from phalanx.core.units import parse_duration_s

if TYPE_CHECKING:
    from phalanx.client.connection.transport import Transport
    from phalanx.gateway.head_link import GatewayHead

_DURATION = GrammarType("TIME", parse_duration_s)


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0 is any free one.")
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    metavar="IP",
    help="Address of this machine; any but loopback needs TLS.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), metavar="FILE", help="Certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False), metavar="FILE", help="Its key (PEM).")
@click.option(
    "--per-replica",
    type=click.IntRange(1, 100_000),
    default=256,
    show_default=True,
    help="Requests that a replica gets at once.",
)
@click.option(
    "--waiting",
    type=click.IntRange(0, 1_000_000),
    default=10_000,
    show_default=True,
    help="Requests of a service that may wait for a replica.",
)
@click.option("--wait", "wait", type=_DURATION, default="10m", show_default=True, help="How long they wait.")
@click.option(
    "--silent", type=_DURATION, default="10m", show_default=True, help="End an answer that is silent for this long."
)
@click.option("--shared", is_flag=True, help="Let several gateways of this machine share the port.")
def gateway(
    port: int,
    address: str,
    tls_cert: str | None,
    tls_key: str | None,
    per_replica: int,
    waiting: int,
    wait: str,
    silent: str,
    shared: bool,
) -> None:
    """Serve all services at one address, with OpenAI's API.

    The model is the name of the service; the API key is a token of Phalanx. The token of this command must be able to see all services, and to
    change those that shall start on demand.
    """
    from phalanx.client.connection.discovery import state_folder
    from phalanx.wire.head_url import is_loopback, joined_address

    try:
        from phalanx.gateway.server import GatewayOptions, run_gateway
    except ModuleNotFoundError as error:
        raise BadRequest(
            f"the gateway needs the package {error.name}", hint="pip install '.[gateway]' in the checkout"
        ) from None
    tls = _tls_context(tls_cert, tls_key)
    if tls is None and not is_loopback(address):
        raise BadRequest(
            f"{address} is not loopback: anyone on the network could read the keys",
            hint="add --tls-cert and --tls-key, or listen on 127.0.0.1 behind a proxy with TLS",
        )
    head = _gateway_head(connect().transport)
    folder = state_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    options = GatewayOptions(
        host=address,
        port=port,
        tls=tls,
        snapshot=os.path.join(folder, "gateway-services.json"),
        prefix_folder=os.path.join(folder, "gateway-prefixes"),
        usage_folder=os.path.join(folder, "gateway-usage"),
        files_folder=os.path.join(folder, "gateway-files"),
        replica_limit=per_replica,
        waiting_max=waiting,
        wait_max_s=parse_duration_s(wait),
        silent_max_s=parse_duration_s(silent),
        shared=shared,
    )
    with contextlib.ExitStack() as ending:

        def ready(bound: int) -> None:
            url = f"{'http' if tls is None else 'https'}://{joined_address(address, bound)}"
            if is_loopback(address):  # commands of this user find it
                remember_gateway(url)
                ending.callback(forget_gateway, url)
            print(f"gateway: {url}/v1", flush=True)
            print(
                "next: OpenAI clients use it as their base URL, with a token of Phalanx as the API key", file=sys.stderr
            )

        run_gateway(head, options, ready)


def _gateway_head(transport: Transport) -> GatewayHead:
    """Return how a gateway reaches the head."""
    from phalanx.gateway.head_link import GatewayHead

    first_url = transport.url()

    def current_url() -> str:
        try:
            return transport.url()
        except PhalanxError:  # a head that restarts
            return first_url

    tls = transport.trust(first_url) if first_url.startswith("https:") else None
    return GatewayHead(url=current_url, headers=transport.headers, failed=transport.try_next_head, tls=tls)


def _tls_context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of the files; None without any.

    Raises:
        BadRequest: only one of them was given.
        BadFile: they cannot be read, or do not belong together.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise BadRequest("a certificate and its key belong together", hint="give both --tls-cert and --tls-key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise BadFile(f"{cert}, {key}: {error}", hint="they must be PEM files that belong together") from None
    return context
