"""Whom the client trusts off loopback: the CA in PHALANX_CA, the one whose fingerprint is in PHALANX_FINGERPRINT, else the system's.

A fingerprint is enough to start with: the head's CA is fetched over a connection that is not trusted, and taken only if its fingerprint
is the one given. Nothing secret is sent before that.
"""

from __future__ import annotations

import functools
import http.client
import os
import ssl
import time
from typing import Final

from phalanx.core.errors import BadFile, BadRequest, NotPermitted, Unreachable
from phalanx.wire.join import FINGERPRINT_PREFIX, fingerprint

CA_BYTES_MAX: Final = 1 << 16
FETCH_S: Final = 5.0  # of a head that answers; the same as for any short call
_HEX_DIGITS: Final = 64
# X509_V_ERR_* of OpenSSL's x509_vfy.h: what a certificate that does not hold is refused for.
_TOO_EARLY: Final = 9
_TOO_LATE: Final = 10
_OTHER_NAME: Final = (62, 64)  # a host name, an IP address


def context_for(name: str, port: int, known_ca: str | None = None) -> ssl.SSLContext:
    """The trust for one head. `known_ca`: the file of the CA that it must have, where nothing in the environment says otherwise.

    Raises:
        PhalanxError: the CA's file cannot be read, or the head's CA is not the one that was named.
    """
    ca_file, wanted = os.environ.get("PHALANX_CA", ""), os.environ.get("PHALANX_FINGERPRINT", "")
    if ca_file:
        try:
            return ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise BadFile(f"PHALANX_CA={ca_file}: {error.strerror or error}", hint="it is the head's CA, in PEM form") from error  # fmt: skip
    if wanted:
        return trusting(fetch_ca(name, port, wanted))
    if known_ca is not None:
        return ssl.create_default_context(cafile=known_ca)
    return ssl.create_default_context()


@functools.cache
def trusting(ca_pem: str) -> ssl.SSLContext:
    """Trust in what this CA vouches for, and in nothing else."""
    return ssl.create_default_context(cadata=ca_pem)


@functools.cache
def fetch_ca(name: str, port: int, wanted: str) -> str:
    """The CA's certificate of the head there, proven by its fingerprint.

    Raises:
        BadRequest: `wanted` is no fingerprint, `name` no name, or nobody speaks TLS there.
        NotPermitted: the head there has another CA.
        Unreachable: nobody answers.
    """
    sought = checked(wanted)
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE  # nothing but the public certificate passes here, and the fingerprint proves that
    connection = http.client.HTTPSConnection(name, port, timeout=FETCH_S, context=blind)
    try:
        connection.request("GET", "/v1/ca")
        reply = connection.getresponse()
        body = reply.read(CA_BYTES_MAX)
    except ssl.SSLError as error:
        raise BadRequest(
            f"{name}:{port} does not speak TLS", hint="give the address and port that `phalanx up --listen` printed"
        ) from error
    except UnicodeError as error:  # of a name with an empty label, or one over 63 letters
        raise BadRequest(f"{name!r} is no name of a server", hint="give the address that `phalanx up --listen` printed") from error  # fmt: skip
    except (OSError, http.client.HTTPException) as error:
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or repr(error)
        raise Unreachable(
            f"no head at {name}:{port}: {why}", hint="is the head up, and does a firewall stand between?"
        ) from error
    finally:
        connection.close()
    try:
        found = fingerprint(body.decode("ascii", "replace"))
    except BadFile as error:
        raise BadRequest(f"{name}:{port} answers, but is no head that servers can join (status {reply.status})",
                         hint="give the address and port that `phalanx up --listen` printed") from error  # fmt: skip
    if found != sought:
        raise NotPermitted(
            f"the head at {name}:{port} has the fingerprint {found}, not {sought}; nothing was sent to it",
            hint="`phalanx up` on the head prints the right line; if it says the same, somebody stands between",
        )
    return body.decode("ascii")


def checked(wanted: str) -> str:
    """The fingerprint in its one form.

    Raises:
        BadRequest: it is none.
    """
    digits = wanted.strip().lower().removeprefix(FINGERPRINT_PREFIX).replace(":", "")
    if len(digits) != _HEX_DIGITS or any(digit not in "0123456789abcdef" for digit in digits):
        raise BadRequest(
            f"{wanted!r} is no fingerprint", hint=f"it reads {FINGERPRINT_PREFIX}<{_HEX_DIGITS} hex digits>"
        )
    return FINGERPRINT_PREFIX + digits


def untrusted(error: ssl.SSLCertVerificationError, url: str) -> Unreachable:
    """What a certificate that was refused means to a user, with this machine's own time where the clocks may be to blame."""
    match error.verify_code:
        case code if code in (_TOO_EARLY, _TOO_LATE):
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            when = "is good only later than" if code == _TOO_EARLY else "was good only before"
            return Unreachable(
                f"one of two clocks is wrong: the certificate of the head at {url} {when} {now}, which it is here",
                hint="date -u on both machines tells which; set it. A CA that was made under a wrong clock stays wrong: remove tls/ "
                "in the head's state folder while it is down",
            )
        case code if code in _OTHER_NAME:
            return Unreachable(
                f"the head at {url} has a certificate for another address: {error.verify_message}",
                hint="give the address that `phalanx up --listen` was given",
            )
        case _:
            return Unreachable(
                f"the head at {url} is not trusted here: {error.verify_message}",
                hint="set PHALANX_FINGERPRINT to the one that `phalanx join --print` prints on the head",
            )


def explained(error: BaseException, url: str) -> Unreachable | None:
    """What a failed handshake means to a user; None for any other error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(error, url)
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return Unreachable(f"the head at {url} speaks no TLS", hint="write http:// instead of https://")
    return None
