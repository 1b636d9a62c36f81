"""TLS trust of the client: the CA in PHALANX_CA, the CA with the fingerprint in PHALANX_FINGERPRINT, else the system's CAs.

A fingerprint alone is enough: the head's CA is fetched over an unverified connection and accepted only if its fingerprint matches.
Nothing secret is sent before that.
"""

from __future__ import annotations

import functools
import os
import ssl
import time
from typing import Final

from phalanx.client.connection.clusters import SavedCluster
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest, NotPermitted, Unreachable
from phalanx.core.hints import Hint, HintCode
from phalanx.wire.head_http import (
    BROKEN,
    FINGERPRINT_PREFIX,
    HeadHttp,
    context_for_ca,
    context_for_file,
    fingerprint,
    unverified_context,
)
from phalanx.wire.head_url import is_loopback, joined_address, split_url

CA_BYTES_MAX: Final = 1 << 16
FETCH_S: Final = 5.0  # timeout; the same as for any short call
_HEX_DIGITS: Final = 64
# X509_V_ERR_* of OpenSSL's x509_vfy.h: why a certificate was rejected.
_TOO_EARLY: Final = 9
_TOO_LATE: Final = 10
_OTHER_NAME: Final = (62, 64)  # a host name, an IP address


def context_for(url: str, known_ca: str | None = None) -> ssl.SSLContext:
    """Return the TLS context for the head at `url`. `known_ca`: file of the CA to trust if the environment names none.

    Raises:
        PhalanxError: the CA file cannot be read, or the head's CA has another fingerprint.
    """
    ca_file, wanted = os.environ.get("PHALANX_CA", ""), os.environ.get("PHALANX_FINGERPRINT", "")
    if ca_file:
        try:
            return context_for_file(ca_file)
        except OSError as error:
            raise BadFile(
                f"PHALANX_CA={ca_file}: {error.strerror or error}", hint="it must be the head's CA in PEM format"
            ) from error
    if wanted:
        _, name, port = split_url(url)
        return context_for_ca(fetch_ca(name, port, wanted))
    return context_for_file(known_ca)


def cluster_context(url: str, cluster: SavedCluster) -> ssl.SSLContext:
    """Return the TLS context for a head of a saved cluster. For one without a saved CA: as for any head.

    Raises:
        PhalanxError: as `context_for`; or the saved CA is damaged.
    """
    if not cluster.ca:
        return context_for(url)
    try:
        return context_for_ca(cluster.ca)
    except (ssl.SSLError, ValueError) as error:
        raise BadFile(
            f"the saved CA of the cluster {cluster.name} is damaged: {error}",
            hint=Hint(HintCode.LOGIN, cluster=cluster.name),
        ) from error


def trusted_ca(url: str) -> str:
    """Return the CA in PEM format that the environment names for the head at `url`; "" for the system's CAs, and over plain HTTP.

    Raises:
        PhalanxError: as `context_for`.
    """
    ca_file, wanted = os.environ.get("PHALANX_CA", ""), os.environ.get("PHALANX_FINGERPRINT", "")
    secure, name, port = split_url(url)
    if not secure or not (ca_file or wanted):
        return ""
    if not ca_file:
        return fetch_ca(name, port, wanted)
    context_for(url)
    return read_file_bytes(ca_file, CA_BYTES_MAX, "CA").decode("ascii", "replace")


@functools.cache
def fetch_ca(name: str, port: int, wanted: str) -> str:
    """Fetch the CA certificate of the head at this address and verify its fingerprint.

    Raises:
        BadRequest: `wanted` is not a fingerprint, `name` not a host name, or the server does not use TLS.
        NotPermitted: the CA has another fingerprint.
        Unreachable: no answer.
    """
    expected = canonical_fingerprint(wanted)
    body, found = _offered_ca(name, port)
    if found != expected:
        raise NotPermitted(
            f"the head at {name}:{port} has a CA certificate with fingerprint {found}, not {expected}; nothing was sent to it",
            hint=Hint(HintCode.COMPARE_FINGERPRINT),
        )
    return body


def unknown_ca(url: str) -> tuple[str, str, Unreachable] | None:
    """Return the CA that a head offers and its fingerprint, unverified, with the error for using it; None if its certificate is trusted, and over plain HTTP.

    Raises:
        PhalanxError: the head does not answer, or its certificate is wrong in another way.
    """
    secure, name, port = split_url(url)
    if not secure:
        return None
    connection = HeadHttp(f"https://{joined_address(name, port)}", lambda: context_for(url))
    try:
        connection.request("GET", "/v1/ca", headers={}, timeout_s=FETCH_S).read(CA_BYTES_MAX)
    except ssl.SSLCertVerificationError as error:
        why = certificate_error(error, url)
        if error.verify_code in (_TOO_EARLY, _TOO_LATE, *_OTHER_NAME):
            raise why from error
        return (*_offered_ca(name, port), why)
    except BROKEN as error:
        broken = handshake_error(error, url)
        if broken is not None:
            raise broken from error
        return None  # the login itself says why the head does not answer
    finally:
        connection.close()
    return None


def _offered_ca(name: str, port: int) -> tuple[str, str]:
    """Return the CA that a head offers, and its fingerprint."""
    connection = HeadHttp(f"https://{joined_address(name, port)}", unverified_context)
    try:
        reply = connection.request("GET", "/v1/ca", headers={}, timeout_s=FETCH_S)
        body = reply.read(CA_BYTES_MAX)
    except ssl.SSLError as error:
        raise BadRequest(f"{name}:{port} does not use TLS", hint=Hint(HintCode.USE_PRINTED_ADDRESS)) from error
    except UnicodeError as error:  # of a name with an empty label, or one over 63 letters
        raise BadRequest(f"{name!r} is not a host name", hint=Hint(HintCode.USE_PRINTED_ADDRESS)) from error
    except BROKEN as error:
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or repr(error)
        raise Unreachable(
            f"no head at {name}:{port}: {why}", hint="check that the head is up and that no firewall blocks the port"
        ) from error
    finally:
        connection.close()
    try:
        found = fingerprint(body.decode("ascii", "replace"))
    except BadFile as error:
        raise BadRequest(
            f"{name}:{port} answers, but is not a head that servers can join (status {reply.status})",
            hint=Hint(HintCode.USE_PRINTED_ADDRESS),
        ) from error
    return body.decode("ascii"), found


def canonical_fingerprint(wanted: str) -> str:
    """Return the fingerprint in its canonical form.

    Raises:
        BadRequest: `wanted` is not a fingerprint.
    """
    digits = wanted.strip().lower().removeprefix(FINGERPRINT_PREFIX).replace(":", "")
    if len(digits) != _HEX_DIGITS or any(digit not in "0123456789abcdef" for digit in digits):
        raise BadRequest(
            f"{wanted!r} is not a fingerprint", hint=f"write {FINGERPRINT_PREFIX}<{_HEX_DIGITS} hex digits>"
        )
    return FINGERPRINT_PREFIX + digits


def certificate_error(error: ssl.SSLCertVerificationError, url: str) -> Unreachable:
    """Return the error for a rejected certificate; with this machine's time if a wrong clock may be the cause."""
    match error.verify_code:
        case code if code in (_TOO_EARLY, _TOO_LATE):
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            when = "is not yet valid" if code == _TOO_EARLY else "has expired"
            return Unreachable(
                f"the certificate of the head at {url} {when} by this machine's clock ({now}): one of the two clocks is wrong",
                hint="compare date -u on both machines and correct the wrong clock. If the head created its CA with a wrong clock, "
                "stop the head and remove tls/ in its state folder",
            )
        case code if code in _OTHER_NAME:
            return Unreachable(
                f"the head at {url} has a certificate for another address: {error.verify_message}",
                hint=Hint(HintCode.USE_LISTEN_ADDRESS),
            )
        case _:
            return Unreachable(
                f"the certificate of the head at {url} is not trusted: {error.verify_message}",
                hint=Hint(HintCode.SET_FINGERPRINT),
            )


def handshake_error(error: BaseException, url: str) -> Unreachable | None:
    """Return the error for a failed TLS handshake; None for any other error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return certificate_error(error, url)
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        here = is_loopback(split_url(url)[1])
        listen = Hint(HintCode.USE_PRINTED_HTTPS)
        return Unreachable(
            f"the head at {url} does not use TLS",
            hint="use http:// for a head on this machine's loopback address" if here else listen,
        )
    return None
