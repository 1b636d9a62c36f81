"""Headers between a browser and a job's program: what each side must not see is removed, and addresses are rewritten. Pure.

The program sees requests as those of `phalanx port-forward`: to 127.0.0.1:PORT, from a page of the same origin. The head has checked Origin
and Sec-Fetch-Site before. Programs that compare Host and Origin, such as Jupyter and code-server, then accept them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from phalanx.api.auth.session_cookie import is_own_cookie
from phalanx.core.errors import BadRequest

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
_NOT_FOR_PROGRAMS: Final = frozenset(
    (b"host", b"expect", b"content-length", b"cookie", b"origin", b"referer", b"forwarded", b"x-real-ip")
)
# They would act on all ports of the head's host, on the dashboard too; or let a script act outside its program's path.
_NOT_FOR_BROWSERS: Final = frozenset(
    (
        b"clear-site-data",
        b"strict-transport-security",
        b"public-key-pins",
        b"expect-ct",
        b"alt-svc",
        b"nel",
        b"report-to",
        b"service-worker-allowed",
        b"referrer-policy",
        b"date",
        b"set-cookie",
        b"location",
        b"content-location",
    )
)
_OWN_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})  # no address is bound here
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAddress:
    """How a browser and the program know each other.

    Attributes:
        port: of the program. `job_id`: its job.
        origin: of its pages in the browser.
        prefix: path of its pages there; ends with a slash. "/" if the program has a host name of its own.
        keep_path: the program expects the prefix in its requests.
    """

    port: int
    job_id: str
    origin: str
    prefix: str
    keep_path: bool = False

    @property
    def shown(self) -> str:
        """The program, for people."""
        return f"port {self.port} of job {self.job_id}"

    @property
    def own_origin(self) -> str:
        """The origin that the program sees."""
        return f"http://127.0.0.1:{self.port}"

    def seen_path(self, path: str) -> str:
        """Return the path in the browser of a path of the program."""
        if self.keep_path and path.startswith(self.prefix):
            return path
        return self.prefix + path.removeprefix("/")

    def own_path(self, path: str) -> str:
        """Return the program's path of a path in the browser."""
        if self.keep_path or not path.startswith(self.prefix):
            return path
        return "/" + path[len(self.prefix) :]


def request_headers(
    headers: Headers, address: ProgramAddress, *, scheme: str, without: Iterable[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers for the program; `without`: further names to leave out. The length of the body is left to the caller.

    Raises:
        BadRequest: the body has two lengths.
    """
    names = [name for name, _ in headers]
    if names.count(b"content-length") > 1 or (b"content-length" in names and b"transfer-encoding" in names):
        raise BadRequest("the request has two lengths", hint="send Content-Length or Transfer-Encoding")
    dropped = {*_HOP_BY_HOP, *_NOT_FOR_PROGRAMS, *without, *_named_by_connection(headers)}
    kept = [(name, value) for name, value in headers if name not in dropped and not name.startswith(b"x-forwarded-")]
    found = [(b"host", f"127.0.0.1:{address.port}".encode()), *kept]
    if cookies := _program_cookies(headers):
        found.append((b"cookie", cookies))
    for name, value in headers:
        if name == b"origin":
            found.append((name, address.own_origin.encode() if value != b"null" else value))
        elif name == b"referer":
            found.append((name, _program_referer(value.decode("latin-1"), address).encode("latin-1")))
    found += [(b"x-forwarded-proto", scheme.encode())]
    if address.prefix != "/":
        found.append((b"x-forwarded-prefix", address.prefix.rstrip("/").encode()))
    return found


def response_headers(
    headers: Iterable[tuple[bytes, bytes]], address: ProgramAddress, *, bodiless: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return the headers for the browser; `bodiless`: the response has no body, and so no length."""
    headers = list(headers)
    dropped = {*_HOP_BY_HOP, *_NOT_FOR_BROWSERS, *_named_by_connection(headers)}
    if bodiless:
        dropped.add(b"content-length")
    found = [(name, value) for name, value in headers if name not in dropped]
    for name, value in headers:
        if name in (b"location", b"content-location"):
            found.append((name, _seen_location(value.decode("latin-1"), address).encode("latin-1")))
        elif name == b"service-worker-allowed":
            found.append((name, address.prefix.encode()))  # the widest that it may have, whatever the program says
        elif name == b"set-cookie" and (cookie := _seen_cookie(value.decode("latin-1"), address)):
            found.append((name, cookie.encode("latin-1")))
    # A stricter policy would make browsers send `Origin: null` with forms; a laxer one would send paths, which may hold a token, to other sites.
    return [*found, (b"referrer-policy", b"same-origin")]


def _named_by_connection(headers: Headers) -> set[bytes]:
    listed = (value for name, value in headers if name == b"connection")
    return {word.lower() for value in listed for word in _TOKEN.findall(value)} - {b"cookie", b"host"}


def _program_cookies(headers: Headers) -> bytes:
    """Return the cookies without those of the head."""
    listed = [part.strip() for name, value in headers if name == b"cookie" for part in value.split(b";")]
    return b"; ".join(one for one in listed if one and not is_own_cookie(one.partition(b"=")[0].decode("latin-1")))


def _program_referer(value: str, address: ProgramAddress) -> str:
    own = value.removeprefix(address.origin)
    return (
        address.own_origin + address.own_path(own) if own != value and own.startswith("/") else address.own_origin + "/"
    )


def _seen_location(value: str, address: ProgramAddress) -> str:
    if value.startswith("/") and not value.startswith(("//", "/\\")):
        return address.seen_path(value)
    try:
        parts = urlsplit(value)
        own = parts.scheme in ("http", "https") and parts.hostname in _OWN_NAMES and parts.port == address.port
    except ValueError:
        return address.prefix
    if not own:
        return value
    rest = value.partition("://")[2].partition("/")[2]
    return address.seen_path("/" + rest)


def _seen_cookie(value: str, address: ProgramAddress) -> str:
    """Return a cookie for the program's own pages; empty if it has the name of one of the head's."""
    first, *attributes = value.split(";")
    if is_own_cookie(first.partition("=")[0].strip()):
        return ""
    kept = [first]
    for attribute in attributes:
        name, equals, text = attribute.partition("=")
        match name.strip().lower():
            case "domain":  # the pages lie at another name
                continue
            case "path" if equals:
                path = text.strip()
                kept.append(f" Path={address.seen_path(path) if path.startswith('/') else address.prefix}")
            case _:
                kept.append(attribute)
    return ";".join(kept)
