"""Addresses and URLs of heads: their parts, and whether a token may be sent to them. Clients and supervisors share it."""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode

_INSECURE_VARIABLE: Final = "PHALANX_INSECURE"


def split_url(url: str) -> tuple[bool, str, int]:
    """Split a head's URL into (uses TLS, host, port).

    Raises:
        BadRequest: the text is not an http(s) URL of a head.
    """
    scheme, colon, rest = url.partition("://")
    name, slash, path = rest.partition("/")
    host, colon_port, port = name.rpartition(":") if not name.endswith("]") else (name, "", "")
    if not colon_port:
        host, port = name, "443" if scheme == "https" else "7600"
    if (
        scheme not in ("http", "https")
        or not colon
        or not host
        or not port.isdecimal()
        or not 0 < int(port[:6]) < 65_536
        or (slash and path)
    ):
        raise BadRequest(
            f"{url!r} is not the URL of a head",
            hint="for example https://10.0.0.5:7600, or http://127.0.0.1:7600 on this machine",
        )
    return scheme == "https", host.strip("[]"), int(port)


def split_urls(text: str) -> list[str]:
    """Split a comma-separated list of URLs; each is returned once."""
    return list(dict.fromkeys(url for word in text.split(",") if (url := word.strip().rstrip("/")))) or [text]


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an address in 127.0.0.0/8 or ::1. No other name counts: it may resolve to any machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_encrypted(url: str) -> bool:
    """Return whether the token is safe on the way to `url`: TLS, or loopback. False where PHALANX_INSECURE permits plain HTTP.

    Raises:
        BadRequest: plain HTTP to another machine, and PHALANX_INSECURE is not set.
    """
    secure, host, port = split_url(url)
    if secure or is_loopback(host):
        return True
    if os.environ.get(_INSECURE_VARIABLE, "") not in ("", "0"):
        return False
    raise BadRequest(
        f"{url} is not encrypted: anyone on the network could read the token and forge the answers; nothing was sent",
        hint=Hint(HintCode.ENCRYPT, url=f"https://{joined_address(host, port)}"),
    )


def is_secure_url(url: str) -> bool:
    """Return whether a URL of the web is TLS, or plain HTTP on this machine; it may have a path and a query, but no account."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or " " in url or not host or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))


def split_address(text: str) -> tuple[str, str | None]:
    """Split HOST or HOST:PORT without validating either; port None without one. An IPv6 host needs brackets when a port follows."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return text.strip().strip("[]"), None
    return host.strip("[]"), port


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
