"""`phalanx login`: gets a token by signing in, and saves it with the cluster's URL and CA."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import select
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urljoin, urlsplit

import click

from phalanx.cli.browser import open_browser
from phalanx.cli.connection import ANSWER_S, PATIENCE_S, PROVIDER_ANSWER_S
from phalanx.cli.terminal import strip_control
from phalanx.client.connection.clusters import CLUSTER_VARIABLE, SavedCluster, read_clusters, write_clusters
from phalanx.core.errors import NotFound, NotPermitted, TryLater, Unreachable, WaitTimedOut
from phalanx.core.units import format_duration
from phalanx.core.work.names import is_name

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.login import LoginReply

WAIT_S: Final = 600.0  # for a person who looks for a second factor
_PASTED: Final = re.compile(r"[A-Za-z0-9_-]{43}")


@click.command()
@click.argument("url", required=False)
@click.option("--name", help="Name under which the cluster is saved: the host's by default.")
@click.option("--browser", is_flag=True, help="By a browser on this machine, instead of a code.")
def login(url: str | None, name: str | None, browser: bool) -> None:
    """Sign in, and save the token with the cluster. URL is the head's; without it, that of --cluster or of the head in use.

    It shows a code and a page on which to type it in, in a browser on any machine: at the sign-in provider if that offers codes, else at the head.
    The first login at a head with a CA of its own shows its fingerprint and asks; PHALANX_FINGERPRINT or PHALANX_CA answer that. The CA is saved too.
    """
    from phalanx.client import Client
    from phalanx.client.connection.tls import trusted_ca
    from phalanx.client.connection.transport import Transport
    from phalanx.wire.head_url import check_encrypted

    saved = read_clusters()
    chosen = os.environ.get(CLUSTER_VARIABLE, "")
    if url is None:
        url = saved.clusters[chosen].url if chosen in saved.clusters else ",".join(Transport().known_urls())
    check_encrypted(url.partition(",")[0])
    name = name or chosen or next((one.name for one in saved.clusters.values() if one.url == url), "") or _host(url)
    before = saved.clusters.get(name)
    ca = trusted_ca(url.partition(",")[0]) or ("" if before is None or before.url != url else before.ca)
    ca = ca or _accepted_ca(url.partition(",")[0])
    saved.with_cluster(SavedCluster(name=name, url=url))  # refuses a bad name before anyone signs in
    with Client(url, "none", answer_timeout_s=ANSWER_S, ca=ca) as head:
        provider = head.health().sign_in  # says at once why a head does not answer
    with Client(url, "none", retry_limit_s=PATIENCE_S, answer_timeout_s=PROVIDER_ANSWER_S, ca=ca) as head:
        found = _sign_in(head, f"phalanx login on {socket.gethostname()}", browser=browser, provider=provider)
    cluster = SavedCluster(name=name, url=url, token=found.secret, ca=ca, user=found.user, expires_s=found.expires_s)
    saved = read_clusters().with_cluster(cluster)
    if not saved.current:
        saved = saved.with_current(name)
    write_clusters(saved)
    ends = "" if found.expires_s is None else f" for {format_duration(found.expires_s - time.time())}"
    print(strip_control(f"signed in as {found.user} at {url}{ends}; saved as cluster {name}"))
    print("next: phalanx ps" if saved.current == name else f"next: phalanx config use {name}")


def _accepted_ca(url: str) -> str:
    """The CA of a head that this machine does not know, once the user has compared its fingerprint; "" for a head that it knows.

    Raises:
        Unreachable: it does not know the head, and no one can be asked.
        NotPermitted: the user said no.
    """
    from phalanx.client.connection.tls import unknown_ca

    found = unknown_ca(url)
    if found is None:
        return ""
    ca, shown, error = found
    if not sys.stdin.isatty():
        raise error
    print(f"this machine does not know the CA of {url}\nfingerprint: {shown}", file=sys.stderr)
    print("compare it with the one that `phalanx join --print` prints on the head", file=sys.stderr)
    if not click.confirm("Is it the same?", err=True):
        raise NotPermitted("nothing was sent to a head with that fingerprint")
    return ca


def _host(url: str) -> str:
    host = urlsplit(url.partition(",")[0]).hostname or ""
    name = host if host.replace(".", "").isdecimal() else host.partition(".")[0]
    return name if is_name(name) else "cluster"


def _sign_in(head: Client, note: str, *, browser: bool, provider: str | None) -> LoginReply:
    """Sign in by the way that was chosen. `provider`: as `Health.sign_in`."""
    if not browser:
        try:
            return _by_device(head, note, provider)
        except NotFound:  # a head of an earlier release, without a provider or with one without codes
            pass
    return _by_browser(head, note, provider)


def _warn_without_provider(provider: str | None) -> None:
    """Say what a page asks for at which no one signs in at a provider."""
    if provider == "":
        print("this head has no sign-in provider: its page asks for an API token of yours", file=sys.stderr)
        print("without a token: ask an admin, who runs `phalanx tokens add --user NAME`", file=sys.stderr)


def _by_device(head: Client, note: str, provider: str | None) -> LoginReply:
    device = head.start_device_login(note)
    place = urljoin(f"{head.transport.url()}/", device.verification_url)
    _warn_without_provider(provider)
    print(strip_control(f"code: {device.user_code}"), file=sys.stderr)
    ends = format_duration(device.expires_in_s)
    print(strip_control(f"next: type it in at {place} within {ends}"), file=sys.stderr)
    if device.complete_url:
        open_browser(urljoin(place, device.complete_url))
    ends_s, failed = time.monotonic() + device.expires_in_s, ""
    while time.monotonic() < ends_s:
        time.sleep(device.interval_s)
        try:
            found = head.finish_device_login(device.handle, note)
        except (TryLater, Unreachable) as error:  # such as a moment without network: the code is good for longer
            if error.message != failed:
                print(strip_control(f"{error.message}; trying again until the code expires"), file=sys.stderr)
            failed = error.message
            continue
        if not found.pending:
            return found
        failed = ""
    missed = f"; at the end {failed}" if failed else ""
    raise WaitTimedOut(f"no one typed in the code within {ends}{missed}", hint="start again")


def _by_browser(head: Client, note: str, provider: str | None) -> LoginReply:
    _warn_without_provider(provider)
    verifier, state = secrets.token_urlsafe(32), secrets.token_urlsafe(16)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
    with TCPServer(("127.0.0.1", 0), _Receiver) as server:
        address = f"{head.transport.url()}/login/{server.server_address[1]}/{challenge}/{state}"
        print(f"word: {_word(challenge)}", file=sys.stderr)
        ends = format_duration(WAIT_S)
        if open_browser(address):
            print(f"next: sign in there within {ends}, and compare the word", file=sys.stderr)
        else:
            print(f"next: open {address}\nwithin {ends}, and compare the word there", file=sys.stderr)
            if sys.stdin.isatty():
                print("with a browser on another machine: paste the page's code here", file=sys.stderr)
        code = _wait_for_code(server, state)
    return head.finish_browser_login(code, verifier, note)


def _word(challenge: str) -> str:
    """Return the word that the page shows too."""
    digits = hashlib.sha256(challenge.encode()).hexdigest()[:8].upper()
    return f"{digits[:4]}-{digits[4:]}"


def _wait_for_code(server: TCPServer, state: str) -> str:
    """Return the code that a browser brings, or that is typed in because the browser is on another machine."""
    ends_s = time.monotonic() + WAIT_S
    _Receiver.state, _Receiver.code = state, ""
    sources = [server.fileno(), *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
    while (left_s := ends_s - time.monotonic()) > 0:
        ready = select.select(sources, [], [], left_s)[0]
        if server.fileno() in ready:
            server.handle_request()
            if _Receiver.code:
                return _Receiver.code
        elif ready:
            line = sys.stdin.readline()
            if not line:
                sources.pop()
            elif _PASTED.fullmatch(line.strip()):
                return line.strip()
            elif line.strip():
                print("that is not the code of the page", file=sys.stderr)
    raise WaitTimedOut(f"no one signed in within {format_duration(WAIT_S)}", hint="start again")


class _Receiver(BaseHTTPRequestHandler):
    """Takes the code from the browser. A request without this login's state is refused."""

    state, code = "", ""
    timeout = 5.0  # of a connection that sends nothing

    def do_GET(self) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        good = secrets.compare_digest(query.get("state", "").encode(), _Receiver.state.encode())
        if good and _PASTED.fullmatch(query.get("code", "")):
            _Receiver.code = query["code"]
        body = b"You can close this page: the command line continues." if _Receiver.code else b"This is not the login."
        self.send_response(200 if _Receiver.code else 403)
        self.send_header("content-type", "text/plain; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.send_header("referrer-policy", "no-referrer")
        self.send_header("x-content-type-options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: the query has the code."""
